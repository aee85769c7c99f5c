"""The conf of a topology: checked, then completed with what the system decides."""

from collections.abc import Collection
from typing import Any

from storm_dagster.model.conf import Conf
from storm_dagster.model.errors import InvalidTopology, NotAuthorized
from storm_dagster.model.removed_keys import REMOVED_KEYS
from storm_dagster.model.topology import TopologySpec

# Set by the system; what a client wrote there is overwritten.
_SYSTEM_KEYS = ("topology.name", "topology.id", "storm.cluster.mode")
SUBMITTED_KEYS = "topology.submitted.keys"
"""Field of a code's stored conf with the keys that came with the submission, not from the
topology's code. No conf key: :func:`split_stored_conf` takes it out for every reader.

It has the name that releases before this one read there, so that an upgrade can be taken back.
"""
OWNER_KEY = "topology.submitter.user"
_LISTS = ("topology.users", "topology.groups")
_KEEP_CONF = "topology.update.keep.conf"
UPGRADE_KEYS = frozenset(
    {
        "topology.upgrade",
        "topology.upgrade.workers",
        "topology.upgrade.component",
        "topology.upgrade.worker.num",
    }
)
"""Keys that ask for a gray upgrade and choose its first workers: no version of the topology stores
them.
"""
_ONE_TIME_KEYS = UPGRADE_KEYS | {_KEEP_CONF, SUBMITTED_KEYS, "declared.code.version"}
"""Keys that speak of the one submission that they came with: no later one keeps them."""


FORCED_SCHEDULER = "forced scheduler of nimbus.inimbus.class"
"""Under this key the cluster's values name the strategy that a plug-in demands; no file can hold
it.
"""


def total_conf(cluster: Conf, topology: Conf) -> dict[str, Any]:
    """Cluster conf overridden by the topology's: the conf of every decision about the topology.

    Only the scheduler that the cluster forces (:data:`FORCED_SCHEDULER`) wins over the topology's
    own.
    """
    total = {**cluster, **topology}
    total.pop(FORCED_SCHEDULER, None)
    if cluster.get(FORCED_SCHEDULER):
        total["topology.scheduler.strategy"] = cluster[FORCED_SCHEDULER]
    return total


def split_stored_conf(document: Conf) -> tuple[dict[str, Any], frozenset[str]]:
    """The conf in a code's stored document, and the keys of it that came with the submission."""
    conf = dict(document)
    submitted = conf.pop(SUBMITTED_KEYS, None)
    return conf, frozenset(submitted or ())


def kept_conf(
    cluster: Conf, former: Conf, former_keys: Collection[str], submitted: Conf
) -> dict[str, Any]:
    """Conf of earlier submissions that an update keeps: keys that are not given again (or null).

    ``former`` is the conf of the code that runs, ``former_keys`` those of it that were submitted.

    With ``topology.update.keep.conf: false`` in ``submitted`` (or the cluster's conf) nothing is
    kept. A conf that was stored before submissions were told from code names no keys: nothing of it
    is kept, either.
    """
    if not {**cluster, **submitted}.get(_KEEP_CONF, True):
        return {}
    kept = set(former_keys) - _ONE_TIME_KEYS - REMOVED_KEYS.keys() - set(submitted)
    return {key: former[key] for key in sorted(kept) if key in former}


def limited_conf(user: str, given: Conf, former: Conf | None) -> dict[str, Any]:
    """Owner and lists of a topology that a user submits who is no administrator, or of its
    ``former`` conf, which stay.

    :class:`NotAuthorized` for an update with other lists.
    """
    if former is None:
        return {
            OWNER_KEY: user,
            "topology.users": sorted({*(given.get("topology.users") or ()), user}),
        }
    for key in _LISTS:
        if not set(given.get(key) or ()) <= set(former.get(key) or ()):
            raise NotAuthorized(
                f"user {user!r} may not change {key} of a topology: an administrator can, or leave it out"
            )
    return {key: former[key] for key in (OWNER_KEY, *_LISTS) if key in former}


def conf_differences(old: Conf, new: Conf) -> dict[str, tuple[Any, Any]]:
    """Key -> (old, new) of two total confs; keys that the system sets are left out."""
    quiet = {*_SYSTEM_KEYS, *_ONE_TIME_KEYS}
    return {
        key: (old.get(key), new.get(key))
        for key in sorted({*old, *new} - quiet)
        if old.get(key) != new.get(key)
    }


def message_timeout_secs(conf: Conf) -> int:
    """``topology.message.timeout.secs``, the default delay of a kill and a rebalance; 30 when not
    set.
    """
    timeout = conf.get("topology.message.timeout.secs")
    return int(timeout) if timeout else 30


def normalize_conf(
    cluster: Conf, submitted: Conf, topology: TopologySpec, topology_id: str = ""
) -> dict[str, Any]:
    """The conf that is stored with the topology, of validated ones.

    The author's conf, then the submission's, then what the system decides: name and id (left out
    while the topology has none), the cluster's mode, workers, ackers (null becomes 1) and
    ``topology.max.task.parallelism`` of the merged conf, so that a later change of the cluster's
    conf does not change a running topology. Normalizing twice changes nothing. Raises
    :class:`InvalidTopology` for a ``storm.local.dir`` other than the cluster's.
    """
    own = {**topology.conf, **submitted}
    given = submitted.get(SUBMITTED_KEYS)
    given = (
        sorted(set(submitted) - _ONE_TIME_KEYS - set(_SYSTEM_KEYS))
        if given is None
        else list(given)
    )
    local_dir = own.get("storm.local.dir")
    if local_dir is not None and local_dir != cluster.get("storm.local.dir"):
        raise InvalidTopology(
            f"storm.local.dir is {local_dir!r} in the topology's conf, {cluster.get('storm.local.dir')!r} in the "
            "cluster's: remove it, daemons choose their own folder"
        )
    total = total_conf(cluster, own)
    ackers = total.get("topology.acker.executors")
    return {
        **{
            key: value
            for key, value in own.items()
            if key not in (*_SYSTEM_KEYS, SUBMITTED_KEYS, _KEEP_CONF)
        },
        **({SUBMITTED_KEYS: given} if given else {}),
        "topology.name": topology.name,
        **({"topology.id": topology_id} if topology_id else {}),
        "storm.cluster.mode": cluster.get("storm.cluster.mode", "distributed"),
        "topology.workers": total.get("topology.workers", 1),
        "topology.acker.executors": 1 if ackers is None else ackers,
        "topology.max.task.parallelism": total.get("topology.max.task.parallelism"),
    }
