"""Rules of free slots that the planner shares with :mod:`storm_dagster.core.usable_slots`.

Spark's Python processes import this module: it needs the standard library alone.
"""

from collections.abc import Collection, Mapping


def slots_beyond(free: int, reserve: int) -> int:
    """The free slots that a topology may take if ``reserve`` slots must stay free."""
    return max(0, free - max(0, reserve))


def confined_to(hosts: Mapping[str, str], isolation: Collection[str]) -> list[str] | None:
    """Supervisors that a topology with this isolation is confined to, by id.

    ``hosts`` maps each supervisor that may get its work to its host. ``None`` if it is confined to
    no host: it has no isolation, or no supervisor on these hosts may get work.
    """
    if not isolation:
        return None
    machines = set(isolation)
    return sorted(node for node, host in hosts.items() if host in machines) or None
