"""The conf of a topology: checked, and completed with the system's values."""

from collections.abc import Collection
from typing import Any

from storm_dagster.model.access_tokens import is_unowned_caller
from storm_dagster.model.conf import Conf
from storm_dagster.model.conf_layers import FORCED_SCHEDULER, SUBMITTED_KEYS, merge_conf
from storm_dagster.model.errors import InvalidTopology, NotAuthorized
from storm_dagster.model.records import BaseConf, StormBase
from storm_dagster.model.removed_keys import REMOVED_KEYS
from storm_dagster.model.topology import TopologySpec

_SYSTEM_KEYS = ("topology.name", "topology.id", "storm.cluster.mode")
"""Keys that the cluster sets: updates do not keep them, and differences omit them."""
OWNER_KEY = "topology.submitter.user"
"""Key of the user that submitted a topology."""
USER_LIST_KEYS = ("topology.users", "topology.groups")
"""Keys of the users and groups that may read and change a topology."""
_KEEP_CONF = "topology.update.keep.conf"
"""Key of an update: ``false`` keeps no conf of earlier submissions."""
UPGRADE_KEYS = frozenset(
    {
        "topology.upgrade",
        "topology.upgrade.workers",
        "topology.upgrade.component",
        "topology.upgrade.worker.num",
    }
)
"""Keys that request a gray upgrade and choose its first workers; they are not stored."""
_ONE_TIME_KEYS = UPGRADE_KEYS | {_KEEP_CONF, "declared.code.version"}
"""Keys that concern only the submission that they came with: no later one keeps them."""


BASE_CONF_FIELDS = tuple(name for name in BaseConf.model_fields if name != "v")
"""Fields of a topology's base that repeat its conf."""


def total_conf(cluster: Conf, topology: Conf) -> dict[str, Any]:
    """Merge the cluster's conf and the topology's, which has precedence.

    All decisions about the topology read the result. Only the scheduler that the cluster forces
    (:data:`FORCED_SCHEDULER`) has precedence over the topology's own.
    """
    forced: dict[str, Any] = {}
    strategy = cluster.get(FORCED_SCHEDULER)
    if strategy:
        forced["topology.scheduler.strategy"] = strategy
    return merge_conf({"cluster": cluster, "stored": topology, "forced": forced})


def base_conf(total: Conf) -> BaseConf:
    """Fields of a topology's base that follow from its total conf.

    The only place where they are read from a conf.
    """
    return BaseConf(
        owner=str(total.get(OWNER_KEY) or ""),
        isolation=tuple(total.get("isolation.scheduler.machines") or ()),
    )


def with_base_conf(base: StormBase, fields: BaseConf) -> StormBase:
    """The base with these fields; the same object if it has them already."""
    changes = {name: getattr(fields, name) for name in BASE_CONF_FIELDS}
    if all(getattr(base, name) == value for name, value in changes.items()):
        return base
    return base.model_copy(update=changes)


def submitted_keys(submitted: Conf) -> tuple[str, ...]:
    """Keys of a ``submitted`` conf that a later update keeps, sorted.

    A key whose value does not count (a null under a key with a default, a key that a submission
    cannot set) is omitted: the update would keep the value of another source.
    """
    effective = merge_conf({"submission": submitted})
    return tuple(sorted(effective.keys() - _ONE_TIME_KEYS - set(_SYSTEM_KEYS)))


def stored_document(conf: Conf, keys: Collection[str]) -> dict[str, Any]:
    """Add the submitted ``keys`` to the normalized ``conf``, for storing it.

    Daemons of the release before read the keys there; without them, their updates keep no key.
    """
    document = dict(conf)
    if keys:
        document[SUBMITTED_KEYS] = sorted(keys)
    return document


def submitted_keys_in(document: Conf) -> tuple[str, ...]:
    """Read the submitted keys from a code's stored conf.

    A topology of an earlier release has its submitted keys only there.
    """
    return tuple(document.get(SUBMITTED_KEYS) or ())


def kept_conf(
    cluster: Conf, former: Conf, former_keys: Collection[str], submitted: Conf
) -> dict[str, Any]:
    """Conf of earlier submissions that an update keeps.

    It has the keys that ``submitted`` does not contain, not even with null. ``former`` is the conf
    that is stored with the running code, ``former_keys`` are its submitted keys. A total conf must
    not be passed: a key that the topology does not set would have the cluster's value there, and
    the update would keep it.

    With ``topology.update.keep.conf: false`` in ``submitted`` (or the cluster's conf) no key is
    kept. A conf that was stored by a release without submitted keys names none, so no key of it is
    kept, either.
    """
    total = merge_conf({"cluster": cluster, "submission": submitted})
    if not total.get(_KEEP_CONF, True):
        return {}
    keys = set(former_keys) - _ONE_TIME_KEYS - REMOVED_KEYS.keys() - set(submitted)
    return {key: former[key] for key in sorted(keys) if key in former}


def limited_conf(user: str, submitted: Conf, former: Conf | None) -> dict[str, Any]:
    """Owner and lists of a topology whose submitter is not an administrator.

    Without a ``former`` conf the submitter is the owner and is added to the users. An update keeps
    owner and lists of the ``former`` conf; :class:`NotAuthorized` if it adds a user or group.

    A token without a user (``user`` then names it) owns nothing: its topologies have no owner and
    no lists, and it replaces no code of a topology that has an owner, since the code would run as
    that user.
    """
    if is_unowned_caller(user):
        return _unowned_conf(user, former)
    if former is None:
        users: set[str] = set(submitted.get("topology.users") or ())
        users.add(user)
        return {OWNER_KEY: user, "topology.users": sorted(users)}
    for key in USER_LIST_KEYS:
        if not set(submitted.get(key) or ()) <= set(former.get(key) or ()):
            raise NotAuthorized(
                f"user {user!r} must not change {key} of a topology: an administrator can, or "
                "leave it out"
            )
    return _former_owner(former)


def _former_owner(former: Conf) -> dict[str, Any]:
    """Owner and lists of the former conf; also those that it lacks are fixed."""
    return {
        OWNER_KEY: former.get(OWNER_KEY),
        **{key: former.get(key) or [] for key in USER_LIST_KEYS},
    }


def _unowned_conf(caller: str, former: Conf | None) -> dict[str, Any]:
    """Owner and lists of a topology whose code comes with a token of no user."""
    if former is None:
        return {OWNER_KEY: None, **{key: [] for key in USER_LIST_KEYS}}
    owner = former.get(OWNER_KEY)
    if owner:
        raise NotAuthorized(
            f"{caller!r} belongs to no user and must not replace the code of a topology of "
            f"{owner!r}: make a token with `storm-dagster token create --scope operate --user "
            f"{owner}`"
        )
    return _former_owner(former)


def removed_owner_keys(conf: Conf) -> list[str]:
    """Keys of owner and lists that the conf sets."""
    return [key for key in (OWNER_KEY, *USER_LIST_KEYS) if conf.get(key)]


def conf_differences(old: Conf, new: Conf) -> dict[str, tuple[Any, Any]]:
    """Key -> (old, new) of two total confs, without keys that the system sets."""
    keys = {*old, *new} - {*_SYSTEM_KEYS, *_ONE_TIME_KEYS}
    return {
        key: (old.get(key), new.get(key)) for key in sorted(keys) if old.get(key) != new.get(key)
    }


def message_timeout_secs(conf: Conf) -> int:
    """``topology.message.timeout.secs``, or 30 if it is not set.

    It is the default delay of a kill and a rebalance.
    """
    timeout = conf.get("topology.message.timeout.secs")
    return int(timeout) if timeout else 30


def normalize_conf(
    cluster: Conf, submitted: Conf, topology: TopologySpec, topology_id: str = ""
) -> dict[str, Any]:
    """Build the conf that is stored with the topology, from validated confs.

    The submission's conf has precedence over the author's, and the system's values over both: name
    and id (omitted while the topology has none), the cluster's mode, workers, ackers (null becomes
    1) and ``topology.max.task.parallelism`` of the merged conf, so that a later change of the
    cluster's conf does not change a running topology. Normalizing twice gives the same conf. Raises
    :class:`InvalidTopology` for a ``storm.local.dir`` other than the cluster's.
    """
    topology_conf = merge_conf({"author": topology.conf, "submission": submitted})
    topology_conf.pop(_KEEP_CONF, None)
    local_dir = topology_conf.get("storm.local.dir")
    if local_dir is not None and local_dir != cluster.get("storm.local.dir"):
        cluster_dir = cluster.get("storm.local.dir")
        raise InvalidTopology(
            f"storm.local.dir is {local_dir!r} in the topology's conf, {cluster_dir!r} in the "
            "cluster's: remove it, daemons choose their own folder"
        )
    total = total_conf(cluster, topology_conf)
    ackers = total.get("topology.acker.executors")
    system_conf = {
        "topology.name": topology.name,
        "storm.cluster.mode": cluster.get("storm.cluster.mode", "distributed"),
        "topology.workers": total.get("topology.workers", 1),
        "topology.acker.executors": 1 if ackers is None else ackers,
        "topology.max.task.parallelism": total.get("topology.max.task.parallelism"),
    }
    if topology_id:
        system_conf["topology.id"] = topology_id
    return merge_conf({"author": topology_conf, "system": system_conf})
