"""Priority of nimbuses for leadership, by the blobs that they miss.

See ``docs/decisions.md#leader-election``. A nimbus may lead when it holds the code of all
topologies (Storm's rule), or when no other nimbus misses fewer blobs (JStorm's). A topology whose
blobs no nimbus holds is degraded and does not block the election: all miss these blobs alike, and
the first to create the leader's node wins.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from storm_dagster.model.names import code_keys, id_of_blob_key

GRACE_SECS = 5.0
"""Seconds without a leader that a nimbus with missing blobs waits before it tries to lead."""
PATIENCE_SECS = 60.0
"""Seconds without a leader after which a better nimbus is waited for no longer."""


@dataclass(frozen=True)
class LeaderDecision:
    """Decision to try for leadership now or not, with the reason in words."""

    allowed: bool
    reason: str


def needed_blobs(active: Iterable[str], registered: Iterable[str]) -> set[str]:
    """Blobs that the active topologies need.

    These are the three of each topology, and all other registered blobs of it. ``active`` are the
    topology ids below ``/topology``, ``registered`` the keys below ``/blobstore``.
    """
    ids = set(active)
    needed = {key for key in registered if id_of_blob_key(key) in ids}
    for topology_id in ids:
        needed.update(code_keys(topology_id))
    return needed


def leader_decision(
    me: str, missing: int, missing_elsewhere: Mapping[str, int], *, vacant_secs: float
) -> LeaderDecision:
    """Decide if the nimbus ``me`` (``host:port``) may try to lead.

    It misses ``missing`` blobs; ``missing_elsewhere`` maps the address of every other live nimbus
    to the number of blobs that it announced as missing. ``vacant_secs`` is the time for which this
    nimbus has seen no leader.

    A nimbus that misses blobs waits :data:`GRACE_SECS` first, so that a better one that is just
    starting, or fetching, can announce itself. A better one that has not led within
    :data:`PATIENCE_SECS` hangs or fails, and is waited for no longer. If two miss equally many,
    both try, and ZooKeeper lets one win.
    """
    if missing == 0:
        return LeaderDecision(True, f"{me} holds all blobs of the active topologies")
    better: list[tuple[int, str]] = []
    for address, count in missing_elsewhere.items():
        if address != me and count < missing:
            better.append((count, address))
    if better and vacant_secs < PATIENCE_SECS:
        fewest, address = min(better)
        return LeaderDecision(
            False,
            f"{me} misses {missing} blobs, {address} misses only {fewest} and must lead",
        )
    if vacant_secs < GRACE_SECS:
        text = f"{me} misses {missing} blobs and waits {GRACE_SECS:g} s for a nimbus that has more"
        return LeaderDecision(False, text)
    text = f"{me} misses {missing} blobs and no nimbus that has more leads"
    return LeaderDecision(True, f"{text}: their topologies are degraded")
