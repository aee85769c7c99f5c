"""Authorization of authenticated callers by the rules of Storm's ACLs.

An absent or empty list means nobody (``docs/decisions.md#empty-means-nobody``). Only administrators
may do the rest.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

from storm_dagster.model.errors import NotAuthorized

Operation = Literal["list", "submit", "topology", "admin"]
"""``list``: names and states; ``submit``: uploads, submissions and their runs; ``topology``: look
at or change one topology; ``admin``: everything else (blobs, other hosts, placements of others, all
confs).
"""

_LISTS: Mapping[Operation, tuple[str, str]] = {
    "list": ("nimbus.users", "nimbus.groups"),
    "submit": ("nimbus.users", "nimbus.groups"),
    "topology": ("topology.users", "topology.groups"),
    "admin": ("nimbus.admins", "nimbus.admins.groups"),
}
"""The conf keys of users and groups who may."""


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
    """What its token is limited to."""

    def __str__(self) -> str:
        return repr(self.name)


CLUSTER = Caller("storm", cluster=True)
LIMITED_USER: ContextVar[str | None] = ContextVar("storm_dagster.limited_user", default=None)
"""User whose request is being answered; ``None`` for an administrator and in a cluster that asks
nobody.
"""

REQUEST_USER: ContextVar[str] = ContextVar("storm_dagster.request_user", default="")
"""Name of the user whose request is being answered, an administrator's too; empty in a cluster that
does not ask who its users are.
"""


def _listed(caller: Caller, conf: Mapping[str, Any], users: str, groups: str) -> bool:
    return caller.name in (conf.get(users) or ()) or not caller.groups.isdisjoint(
        conf.get(groups) or ()
    )


def is_admin(caller: Caller, conf: Mapping[str, Any]) -> bool:
    """Whether the caller is the cluster itself, or named by ``nimbus.admins`` or
    ``nimbus.admins.groups``.
    """
    return caller.cluster or _listed(caller, conf, *_LISTS["admin"])


def authorize(
    caller: Caller,
    operation: Operation,
    conf: Mapping[str, Any],
    topology_conf: Mapping[str, Any] | None = None,
) -> None:
    """Raise :class:`NotAuthorized` unless the caller may.

    ``topology`` takes the caller's name in ``topology.users`` or one of its groups in
    ``topology.groups`` of ``topology_conf`` (``None``: there is no such topology, which only an
    administrator may learn).
    """
    if is_admin(caller, conf):
        return
    users, groups = _LISTS[operation]
    where = topology_conf if operation == "topology" else conf
    if where is None or not _listed(caller, where, users, groups):
        remedy = f"{users} or {groups}{' of the topology' if operation == 'topology' else ''}"
        raise NotAuthorized(
            f"user {caller} may not do this: an administrator can add the user to {remedy}"
        )
