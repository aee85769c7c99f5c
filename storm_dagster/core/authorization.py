"""Authorization of authenticated callers by the rules of Storm's ACLs.

An absent or empty list allows no user (``docs/decisions.md#empty-means-nobody``). All other
operations are for administrators only.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

from storm_dagster.model.errors import NotAuthorized

Operation = Literal["list", "submit", "topology", "admin"]
"""Kinds of requests.

``list``: names and states; ``submit``: uploads, submissions and their runs; ``topology``: reading
and changing one topology; ``admin``: all others (blobs, other hosts, placements of other users, all
confs).
"""

UNKNOWN_USER = "anyone"
"""Name in the log of requests for a caller whose user is not known."""

_LISTS: Mapping[Operation, tuple[str, str]] = {
    "list": ("nimbus.users", "nimbus.groups"),
    "submit": ("nimbus.users", "nimbus.groups"),
    "topology": ("topology.users", "topology.groups"),
    "admin": ("nimbus.admins", "nimbus.admins.groups"),
}
"""Conf keys of the users and the groups that an operation is allowed for."""


@dataclass(frozen=True)
class Caller:
    """Authenticated caller of a request."""

    name: str
    cluster: bool = False
    """The cluster itself: a daemon, a run or a client that knows its secret."""
    host: str = ""
    """Address that the request came from."""
    groups: frozenset[str] = field(default_factory=frozenset)
    scope: str | None = None
    """Limit of its token; ``None`` without a limit."""
    token: str = ""
    """Id of its token; empty without one."""
    unowned: bool = False
    """True if its token belongs to no user; :attr:`name` then names the token."""

    def __str__(self) -> str:
        if self.token and not self.unowned:
            return f"{self.name!r} (token {self.token})"
        return repr(self.name)


CLUSTER = Caller("storm", cluster=True)
"""Caller of requests that are signed with the cluster's secret, or have its token for "admin"."""
LIMITED_USER: ContextVar[str | None] = ContextVar("storm_dagster.limited_user", default=None)
"""User of the current request, or the name of its token if that belongs to no user.

``None`` for an administrator, and in a cluster without authentication of users.
"""

REQUEST_USER: ContextVar[str] = ContextVar("storm_dagster.request_user", default="")
"""Name of the user of the current request, also of an administrator.

Empty in a cluster without authentication of users.
"""


def _is_listed(caller: Caller, conf: Mapping[str, Any], users: str, groups: str) -> bool:
    """True if the conf lists the caller under ``users``, or a group of it under ``groups``."""
    if caller.name in (conf.get(users) or ()):
        return True
    return not caller.groups.isdisjoint(conf.get(groups) or ())


def is_admin(caller: Caller, conf: Mapping[str, Any]) -> bool:
    """True if the caller is the cluster itself or an administrator.

    ``nimbus.admins`` and ``nimbus.admins.groups`` name administrators. The token of one with a
    scope is none: what is submitted with it belongs to its user.
    """
    return caller.scope is None and _has_all_rights(caller, conf)


def _has_all_rights(caller: Caller, conf: Mapping[str, Any]) -> bool:
    users, groups = _LISTS["admin"]
    return caller.cluster or _is_listed(caller, conf, users, groups)


def authorize(
    caller: Caller,
    operation: Operation,
    conf: Mapping[str, Any],
    topology_conf: Mapping[str, Any] | None = None,
) -> None:
    """Raise :class:`NotAuthorized` unless the caller may do the operation.

    ``conf`` is the cluster's. ``topology`` requires the caller's name in ``topology.users``, or one
    of its groups in ``topology.groups``, of ``topology_conf``; for other operations that is not
    read. ``None`` means that the topology does not exist, which only an administrator may learn.
    The scope of a token is checked elsewhere: a request needs both.
    """
    if _has_all_rights(caller, conf):
        return
    users, groups = _LISTS[operation]
    keys = f"{users} or {groups}"
    checked_conf: Mapping[str, Any] | None = conf
    if operation == "topology":
        keys += " of the topology"
        checked_conf = topology_conf
    if checked_conf is None or not _is_listed(caller, checked_conf, users, groups):
        raise NotAuthorized(
            f"user {caller} is not allowed to do this: an administrator can add the user to {keys}"
        )
