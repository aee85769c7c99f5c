"""Priority of nimbuses for leadership, by the blobs that they miss
(``docs/decisions.md#leader-election``).

A nimbus may lead when it holds the code of all topologies (Storm's rule), or when no other nimbus
has fewer blobs missing (JStorm's). A topology whose blobs nobody holds is degraded and blocks no
one: then all miss it alike, and the first to create the leader's node wins.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from storm_dagster.model.names import code_keys, id_of_blob_key

GRACE_SECS = 5.0
PATIENCE_SECS = 60.0


@dataclass(frozen=True)
class LeaderDecision:
    """Decision to try for leadership now or not, and the reason in words."""

    allowed: bool
    reason: str


def needed_blobs(active: Iterable[str], registered: Iterable[str]) -> set[str]:
    """Blobs that the active topologies need: the three of each, and whatever else is registered.

    ``active`` are the topology ids below ``/topology``, ``registered`` the keys below
    ``/blobstore``.
    """
    ids = set(active)
    needed = {key for key in registered if id_of_blob_key(key) in ids}
    for topology_id in ids:
        needed.update(code_keys(topology_id))
    return needed


def leader_decision(
    me: str, missing: int, others: Mapping[str, int], *, vacant_secs: float
) -> LeaderDecision:
    """Whether the nimbus ``me`` (``host:port``), which misses ``missing`` blobs, may try to lead.

    ``others`` maps the address of every other live nimbus to what it misses, as it announced it.
    ``vacant_secs`` is for how long this nimbus has seen no leader: one that misses something waits
    :data:`GRACE_SECS` first, so that a better one that is just starting, or fetching, can announce
    itself. A better one that has not led within :data:`PATIENCE_SECS` hangs, or fails at it, and is
    waited for no longer. Equal is not fewer: then both try, and ZooKeeper lets one win.
    """
    if missing == 0:
        return LeaderDecision(True, f"{me} holds all blobs of the active topologies")
    better = min(
        ((count, who) for who, count in others.items() if who != me and count < missing),
        default=None,
    )
    if better is not None and vacant_secs < PATIENCE_SECS:
        return LeaderDecision(
            False,
            f"{me} misses {missing} blobs, {better[1]} misses only {better[0]} and shall lead",
        )
    if vacant_secs < GRACE_SECS:
        text = f"{me} misses {missing} blobs and waits {GRACE_SECS:g} s for a nimbus that has more"
        return LeaderDecision(False, text)
    text = f"{me} misses {missing} blobs and no nimbus that has more leads: their topologies are degraded"
    return LeaderDecision(True, text)
