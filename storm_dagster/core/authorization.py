"""Authorization of authenticated callers by the rules of Storm's ACLs.

An absent or empty list means nobody (``docs/decisions.md#empty-means-nobody``). Only administrators
may do the rest.
"""

from collections.abc import Callable, Collection, Mapping
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

Groups = Callable[[str], Collection[str]]
"""The groups of a user."""


@dataclass(frozen=True)
class Caller:
    """Authenticated caller of a request."""

    name: str
    cluster: bool = False
    """The cluster itself: a daemon, a run or a client that knows its secret."""
    host: str = ""
    """Address that the request came from."""
    via: str | None = None
    """The authenticated user, when it acts for ``name``."""
    groups: frozenset[str] = field(default_factory=frozenset)
    scope: str | None = None
    """What its token is limited to."""

    def __str__(self) -> str:
        return f"{self.name!r} through {self.via!r}" if self.via else repr(self.name)


CLUSTER = Caller("storm", cluster=True)
LIMITED_USER: ContextVar[str | None] = ContextVar("storm_dagster.limited_user", default=None)
"""User whose request is being answered; ``None`` for an administrator and in a cluster that asks
nobody.
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


def impersonate(caller: Caller, name: str, conf: Mapping[str, Any], groups: Groups) -> Caller:
    """``caller`` acting for the user ``name``; :class:`NotAuthorized` without that right.

    ``nimbus.impersonation.acl`` names, for each user who may do so, the ``hosts`` it may come from
    and the ``groups`` whose members it may act for; ``"*"`` stands for all. The cluster itself acts
    for nobody else.
    """
    if name == caller.name:
        return caller
    entry = (conf.get("nimbus.impersonation.acl") or {}).get(caller.name)
    theirs = frozenset(groups(name))
    if (
        caller.cluster
        or not isinstance(entry, Mapping)
        or not {"*", caller.host} & set(entry.get("hosts") or ())
        or not ("*" in (entry.get("groups") or ()) or theirs & set(entry.get("groups") or ()))
    ):
        raise NotAuthorized(
            f"user {caller.name!r} at {caller.host or 'an unknown host'} may not act for {name!r}: an administrator can "
            "allow it in nimbus.impersonation.acl"
        )
    return Caller(name, host=caller.host, via=caller.name, groups=theirs)
