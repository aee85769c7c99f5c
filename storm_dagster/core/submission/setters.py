"""Conf keys that a limited user must not set: who may set a key stands in ``conf_keys.yaml``.

A limited user may submit and owns what it submits (``nimbus.users``), but its topologies must not
take what belongs to all: hosts, memory, precedence, the cluster's maxima.
"""

from collections.abc import Mapping
from typing import Any

from storm_dagster.core.scheduling.build import user_workers
from storm_dagster.model.conf import CONF_KEYS, Conf
from storm_dagster.model.errors import NotAuthorized
from storm_dagster.model.topology import TopologySpec

_MAXIMUM = "topology.max.task.parallelism"
"""A maximum, which every user may lower."""


def check_setters(
    user: str, conf: Conf, spec: TopologySpec, current: Conf, *, ignores_cluster_keys: bool
) -> tuple[dict[str, Any], TopologySpec, list[str]]:
    """Check the keys that the limited ``user`` sets; return (conf, topology, warnings).

    ``current`` is the total conf of the topology that is replaced or upgraded, else the cluster's.
    A key with its current value is accepted. :class:`NotAuthorized` names the first key that an
    administrator must set, in the submission's conf, the topology's own or a component's. Keys that
    only the cluster's conf may hold are refused as well. With ``ignores_cluster_keys`` they are
    left out with a warning instead: a client of Storm sends its whole conf each time.
    """
    for layer in (conf, spec.conf):
        _check_user_workers(user, layer, current)
    counted_conf, dropped = _split_keys(user, conf, current, ignores_cluster_keys)
    own_conf, own_dropped = _split_keys(user, spec.conf, current, ignores_cluster_keys)
    dropped |= own_dropped
    for component_id, kind, part in spec.components():
        for key, value in part.conf.items():
            if _setter(key) == "administrator" and not _is_free(key, value, current):
                raise _refusal(user, key, f"conf of {kind} {component_id!r}")
    warnings: list[str] = []
    if dropped:
        keys = ", ".join(sorted(dropped))
        warnings.append(f"ignored, since only the cluster's conf may set them: {keys:.500}")
    return counted_conf, spec.model_copy(update={"conf": own_conf}), warnings


def _check_user_workers(user: str, conf: Conf, current: Conf) -> None:
    """Refuse a user-defined worker with more memory than ``worker.memory.size``."""
    size = int(current.get("worker.memory.size") or 0)
    for worker in user_workers(conf.get("use.userdefine.assignment")):
        if size and (worker.memory_bytes or 0) > size:
            raise _refusal(
                user, "memory_bytes above worker.memory.size", "use.userdefine.assignment"
            )


def _split_keys(
    user: str, conf: Conf, current: Conf, ignores_cluster_keys: bool
) -> tuple[dict[str, Any], set[str]]:
    """The keys that count, and the names of those that are left out with a warning."""
    counted: dict[str, Any] = {}
    dropped: set[str] = set()
    for key, value in conf.items():
        setter = _setter(key)
        if setter == "user":
            counted[key] = value
        elif value is None or (setter == "cluster" and key.startswith("topology.")):
            # Null is not set: the cluster's value counts, also under a key that takes null. Name,
            # id and submitter are set by the system, whatever a conf says.
            continue
        elif _is_free(key, value, current):
            counted[key] = value
        elif setter == "cluster" and ignores_cluster_keys:
            dropped.add(key)
        else:
            raise _refusal(user, key, "the conf")
    return counted, dropped


def _setter(key: str) -> str:
    conf_key = CONF_KEYS.get(key)
    return "user" if conf_key is None else conf_key.setter


def _is_free(key: str, value: Any, current: Mapping[str, Any]) -> bool:
    """True if the value is the current one, or lowers a maximum."""
    current_value = current.get(key)
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(current_value, tuple):
        current_value = list(current_value)
    if value == current_value or (not value and not current_value):
        return True
    if key != _MAXIMUM or value is None:
        return False
    return current_value is None or value <= current_value


def _refusal(user: str, key: str, place: str) -> NotAuthorized:
    return NotAuthorized(
        f"user {user!r} must not set {key} ({place}): it concerns the topologies of others; leave "
        "it out, or ask an administrator to submit"
    )
