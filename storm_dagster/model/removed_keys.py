"""Conf keys of earlier releases, each with its remedy.

Every conf with one of them is accepted with a warning
(:func:`storm_dagster.model.conf.validate_conf`): of ``storm.yaml``, ``-c``, a topology, Thrift.
"""

from collections.abc import Mapping
from typing import Any

REMOVED_KEYS: dict[str, str] = {
    "worker.gc.threshold": "remove it; workers collect after 100,000 new objects",
    "storm.zookeeper.tick.time": (
        "remove it; the embedded ZooKeeper has a tick of 500 ms, and a server of your own sets "
        "tickTime in its zoo.cfg"
    ),
    "worker.log.backups": (
        "remove it; three rotated logs of each worker are kept, and supervisor.logs.max.bytes "
        "limits those of a host"
    ),
    "topology.state.remember.secs": (
        "remove it; ids are remembered for four times topology.message.timeout.secs, so raise that "
        "for a longer memory"
    ),
    "dagster.repository": (
        "remove it; expose build_storm_defs through the Definitions of the code location in "
        "dagster.location, whose repository is __repository__"
    ),
    "dagster.history.retention.ticks.hours": (
        "remove it, and write `retention: {sensor: {purge_after_days: 1}, "
        "schedule: {purge_after_days: 1}}` into dagster.yaml: Dagster deletes ticks itself"
    ),
    "dagster.metrics.retention.hours": (
        "remove it; statistics are no longer stored below HOME/metrics: let Prometheus read "
        "/metrics of nimbus, and delete HOME/metrics once you have copied what you need"
    ),
    "nimbus.impersonation.acl": (
        "remove it; doAsUser is refused: let each user show a certificate of their own (a token has"
        " a scope, and no user)"
    ),
    "topology.submitted.keys": "remove it; the cluster itself stores which keys were submitted",
    "supervisor.health.check.dir": "write storm.health.check.dir, Storm's name; the value counts",
}
"""Removed key -> remedy."""

RENAMED_KEYS: dict[str, str] = {"supervisor.health.check.dir": "storm.health.check.dir"}
"""Removed key -> key under which its value counts, unless the same conf has that key, too."""


def take_removed_keys(conf: Mapping[Any, Any], source: str) -> tuple[dict[Any, Any], list[str]]:
    """A copy of ``conf`` without removed keys, and a warning for each of them.

    The copy has the value of a renamed key under the new name. ``source`` names the file or option
    in the warnings.
    """
    remaining: dict[Any, Any] = {}
    warnings: list[str] = []
    for key, value in conf.items():
        remedy = REMOVED_KEYS.get(key)
        if remedy is None:
            remaining[key] = value
            continue
        warnings.append(f"{source}: {key} is no longer a conf key: {remedy}")
        successor = RENAMED_KEYS.get(key)
        if successor is not None and successor not in conf:
            remaining[successor] = value
    return remaining, warnings
