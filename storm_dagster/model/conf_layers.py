"""Layers of a topology's conf, and the one rule by which they are merged.

The client, nimbus (also over Thrift), the operations, the launcher of workers, the worker and its
tasks merge with :func:`merge_conf`, so that they see the same value of a key in the same layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Literal

from storm_dagster.model.conf import CONF_KEYS, Conf

LayerName = Literal[
    "defaults",
    "cluster",
    "total",
    "stored",
    "author",
    "former",
    "option",
    "file",
    "pair",
    "submission",
    "owner",
    "system",
    "forced",
    "component",
]
Party = Literal["release", "cluster", "author", "submitter", "system", "component"]


@dataclass(frozen=True)
class ConfLayer:
    """One source of values, and the party that gives them."""

    party: Party
    """Under a key with a default, null of one party takes back only its own values."""
    doc: str


LAYERS: Final[Mapping[LayerName, ConfLayer]] = {
    "defaults": ConfLayer("release", "defaults that the release ships"),
    "cluster": ConfLayer("cluster", "conf of the daemon: storm.yaml and -c"),
    "total": ConfLayer("cluster", "conf that was merged before, as the base for a component's"),
    "author": ConfLayer("author", "conf in the topology's code"),
    "former": ConfLayer("submitter", "conf of earlier submissions that an update keeps"),
    "option": ConfLayer("submitter", "-c topology.KEY=VALUE of the command line"),
    "file": ConfLayer("submitter", "--conf-file of the command line"),
    "pair": ConfLayer("submitter", "--conf KEY=VALUE of the command line"),
    "submission": ConfLayer("submitter", "conf that was uploaded with the topology"),
    "owner": ConfLayer("system", "owner and lists of users, which a limited user cannot choose"),
    "system": ConfLayer("system", "keys that the cluster decides when it stores the topology"),
    "stored": ConfLayer("system", "conf stored with the code: the layers from author to system"),
    "forced": ConfLayer("system", "keys that a plug-in of nimbus decides"),
    "component": ConfLayer("component", "conf of one component"),
}
"""Every layer, the weakest first: a value overrides those of the layers before it."""

FORCED_SCHEDULER = "forced scheduler of nimbus.inimbus.class"
"""Under this key the cluster's values name the strategy that a plug-in demands; no file can hold
it.
"""
SUBMITTED_KEYS = "topology.submitted.keys"
"""Field of a code's stored conf that names the keys that came with the submission. It is not a
conf key. The cluster keeps these keys in the topology's record; the field is written for daemons of
the release before.
"""

RESERVED_KEYS: Final[Mapping[str, frozenset[LayerName]]] = {
    "topology.name": frozenset({"total", "stored", "system"}),
    "topology.id": frozenset({"total", "stored", "system"}),
    "storm.cluster.mode": frozenset({"defaults", "cluster", "total", "stored", "system"}),
    SUBMITTED_KEYS: frozenset(),
    FORCED_SCHEDULER: frozenset(),
}
"""Key -> the layers whose value counts; in any other layer the key is ignored."""

RESERVED_FAMILIES: Final[Mapping[str, frozenset[LayerName]]] = {
    "storm.zookeeper.": frozenset({"defaults", "cluster", "total"}),
    "storm.security.": frozenset({"defaults", "cluster", "total"}),
}
"""Prefix of keys -> the layers whose values count.

The supervisor decides to which ZooKeeper, and as which user, a worker connects, and which servers
it trusts.
"""


def _layer_values(name: LayerName, layer: Conf) -> dict[str, Any]:
    """The values of a layer that count."""
    values = dict(layer)
    for key, layers in RESERVED_KEYS.items():
        if name not in layers:
            values.pop(key, None)
    for prefix, layers in RESERVED_FAMILIES.items():
        if name not in layers:
            values = {
                key: value for key, value in values.items() if not str(key).startswith(prefix)
            }
    return values


def overlay(layers: Mapping[LayerName, Conf]) -> dict[str, Any]:
    """The layers of one party, in the order of :data:`LAYERS`, as one layer.

    A null is kept: it takes back the value that the party gave in a layer before, and
    :func:`merge_conf` must see it.
    """
    merged: dict[str, Any] = {}
    for name in LAYERS:
        merged.update(layers.get(name, {}))
    return merged


def merge_conf(layers: Mapping[LayerName, Conf]) -> dict[str, Any]:
    """Merge the layers into one conf.

    The last layer of :data:`LAYERS` that has a key wins, whole: maps and lists are not merged. A
    null is a value and wins like any other, as in Storm, if the key has no default, or is the
    user's own. Under a key with a default, null means that the party does not set the key: the
    value of the parties before it counts. Keys of :data:`RESERVED_KEYS` and
    :data:`RESERVED_FAMILIES` count in their layers only. A result that is merged a second time as
    ``cluster`` or ``total``, below layers that were merged into it, stays the same.
    """
    merged: dict[str, Any] = {}
    present: list[LayerName] = [name for name in LAYERS if name in layers]
    for _, names in groupby(present, key=_party):
        values = overlay({name: _layer_values(name, layers[name]) for name in names})
        if None in values.values():
            values = {
                key: value for key, value in values.items() if value is not None or takes_null(key)
            }
        merged.update(values)
    return merged


def component_conf(total: Conf, component: Conf) -> dict[str, Any]:
    """The conf that a component reads: the merged conf of its topology, and its own above it.

    A null of the topology under a key of the user's own drops the key here, so that
    ``conf.get(key, default)`` returns the default of the component's code. A null that the
    component's own conf sets stays.
    """
    set_values = {
        key: value for key, value in total.items() if value is not None or key in CONF_KEYS
    }
    return merge_conf({"total": set_values, "component": component})


def merged_value(layers: Mapping[LayerName, Conf], key: str) -> Any:
    """The value of one key in :func:`merge_conf` of the layers.

    ``None`` if no layer has it.
    """
    layers_with_key: dict[LayerName, Conf] = {
        name: {key: layer[key]} for name, layer in layers.items() if key in layer
    }
    return merge_conf(layers_with_key).get(key)


def takes_null(key: str) -> bool:
    """True if null is a value of this key.

    Such a key has no default, or is the user's own.
    """
    conf_key = CONF_KEYS.get(key)
    return conf_key is None or conf_key.default is None


def _party(name: LayerName) -> Party:
    return LAYERS[name].party
