"""The conf of a topology: checked, then completed with what the system decides."""

from collections.abc import Collection
from typing import Any

from storm_dagster.model.conf import Conf
from storm_dagster.model.conf_layers import FORCED_SCHEDULER, SUBMITTED_KEYS, merge_conf
from storm_dagster.model.errors import InvalidTopology, NotAuthorized
from storm_dagster.model.removed_keys import REMOVED_KEYS
from storm_dagster.model.topology import TopologySpec

_SYSTEM_KEYS = ("topology.name", "topology.id", "storm.cluster.mode")
"""Keys that the cluster sets: no update keeps them, and no difference of them is shown."""
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
_ONE_TIME_KEYS = UPGRADE_KEYS | {_KEEP_CONF, "declared.code.version"}
"""Keys that speak of the one submission that they came with: no later one keeps them."""


def total_conf(cluster: Conf, topology: Conf) -> dict[str, Any]:
    """Cluster conf overridden by the topology's: the conf of every decision about the topology.

    Only the scheduler that the cluster forces (:data:`FORCED_SCHEDULER`) wins over the topology's
    own.
    """
    strategy = cluster.get(FORCED_SCHEDULER)
    forced = {"topology.scheduler.strategy": strategy} if strategy else {}
    return merge_conf({"cluster": cluster, "stored": topology, "forced": forced})


def submitted_keys(submitted: Conf) -> tuple[str, ...]:
    """Keys of a ``submitted`` conf that a later update keeps, sorted.

    A key whose value does not count (a null under a key with a default, a key that a submission
    cannot set) is not among them: the update would keep a value that another party gave.
    """
    counting = merge_conf({"submission": submitted})
    return tuple(sorted(counting.keys() - _ONE_TIME_KEYS - set(_SYSTEM_KEYS)))


def stored_document(conf: Conf, keys: Collection[str]) -> dict[str, Any]:
    """The normalized ``conf`` as it is stored, with its submitted ``keys``.

    Daemons of the release before look for the keys there, and their updates keep nothing otherwise.
    """
    return {**conf, SUBMITTED_KEYS: sorted(keys)} if keys else dict(conf)


def submitted_keys_in(document: Conf) -> tuple[str, ...]:
    """The submitted keys that a code's stored conf names: all that a topology of an older release
    has of them.
    """
    return tuple(document.get(SUBMITTED_KEYS) or ())


def kept_conf(
    cluster: Conf, former: Conf, former_keys: Collection[str], submitted: Conf
) -> dict[str, Any]:
    """Conf of earlier submissions that an update keeps: keys that are not given again (or null).

    ``former`` is the conf that is stored with the code that runs, ``former_keys`` those of it that
    were submitted. In a total conf a key that the topology does not set would have the cluster's
    value, which the update would then keep.

    With ``topology.update.keep.conf: false`` in ``submitted`` (or the cluster's conf) nothing is
    kept. A conf that was stored before submissions were told from code names no keys: nothing of it
    is kept, either.
    """
    total = merge_conf({"cluster": cluster, "submission": submitted})
    if not total.get(_KEEP_CONF, True):
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
    topology_conf = merge_conf({"author": topology.conf, "submission": submitted})
    topology_conf.pop(_KEEP_CONF, None)
    local_dir = topology_conf.get("storm.local.dir")
    if local_dir is not None and local_dir != cluster.get("storm.local.dir"):
        raise InvalidTopology(
            f"storm.local.dir is {local_dir!r} in the topology's conf, {cluster.get('storm.local.dir')!r} in the "
            "cluster's: remove it, daemons choose their own folder"
        )
    total = total_conf(cluster, topology_conf)
    ackers = total.get("topology.acker.executors")
    decided = {
        "topology.name": topology.name,
        "storm.cluster.mode": cluster.get("storm.cluster.mode", "distributed"),
        "topology.workers": total.get("topology.workers", 1),
        "topology.acker.executors": 1 if ackers is None else ackers,
        "topology.max.task.parallelism": total.get("topology.max.task.parallelism"),
    }
    if topology_id:
        decided["topology.id"] = topology_id
    return merge_conf({"author": topology_conf, "system": decided})
