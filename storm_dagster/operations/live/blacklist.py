"""The blacklist: hosts whose supervisors get no new work.

Running tasks stay until they are rebalanced or die.
"""

import re
from collections.abc import Iterable

from storm_dagster.model import paths
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.records import Blacklist, decode_record, encode_record
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.steps import operation
from storm_dagster.operations.transactions import commit, retry_on_conflict

BLACKLIST = operation("blacklist", "blacklist")

_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]{1,253}")
"""Form of a host name, or of an IPv4 or IPv6 address."""
_MAX_HOSTS = 10_000
"""Hosts on the blacklist."""


def check_host(host: object) -> str:
    """A host name or address; :class:`InvalidRequest` otherwise."""
    if not isinstance(host, str) or not _HOST.fullmatch(host):
        raise InvalidRequest(
            f"{host!r:.80} is not a host name: use the host that `storm-dagster status` shows"
        )
    return host


def change_blacklist(
    ctx: OperationsContext, *, add: Iterable[str] = (), remove: Iterable[str] = ()
) -> tuple[str, ...]:
    """Add and remove hosts in one fenced transaction, and return the listed hosts.

    A call that changes no host writes no record. A host without a supervisor may be listed, because
    its supervisor may come back. Two calls at the same time both have their effect: the loser of
    the race re-reads the list. :class:`InvalidRequest` for a host that is to be added and removed,
    and beyond 10,000 hosts.
    """
    adding = {check_host(host) for host in add}
    removing = {check_host(host) for host in remove}
    if adding & removing:
        raise InvalidRequest(
            f"{min(adding & removing)!r} is to be added and removed: ask for one of them"
        )
    epoch = ctx.current_epoch()

    def attempt(_: ClusterView) -> tuple[str, ...]:
        raw = b""
        version = -1
        stored_list = ctx.cluster.state.get_data_with_version(paths.BLACKLIST)
        if stored_list is not None:
            raw, node = stored_list
            version = node.version
        stored = decode_record(Blacklist, raw, paths.BLACKLIST) if raw else Blacklist()
        before = set(stored.hosts)
        after = (before | adding) - removing
        if len(after) > _MAX_HOSTS:
            raise InvalidRequest(
                f"the blacklist would hold {len(after)} hosts, {_MAX_HOSTS} are allowed: "
                "remove some"
            )
        if after != before:
            record = stored.model_copy(update={"hosts": tuple(sorted(after))})
            transaction = ctx.cluster.fenced(epoch).set(
                paths.BLACKLIST, encode_record(record), version
            )
            commit(ctx, transaction, "blacklist")
            ctx.log.info("blacklist: %s", ", ".join(sorted(after)) or "empty")
        return tuple(sorted(after))

    return retry_on_conflict(ctx, "changing the blacklist", attempt)
