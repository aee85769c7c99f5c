"""End of a supervisor: what SIGTERM does, and when a drain is over.

Pure; see ``docs/decisions.md#drain-at-term``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

OnTerm = Literal["leave", "stop", "drain"]
"""``supervisor.on.term``. ``leave``: the workers continue; ``stop``: they end; ``drain``: their
tasks are moved to other hosts, then they end.
"""

ALONE_SECS = 5.0
"""Time for which every registered supervisor must drain until a drain ends early.

Supervisors that are stopped together begin to drain one after the other.
"""
KNOWN_SECS = 2.0
"""Time for which the record must name the drain until empty slots end it.

A placement that was planned before, such as the move off another host that drains, may still put
work here. It would be lost with this host until it is healed.
"""
MAX_UNKNOWN_SECS = 5.0
"""Time after which empty slots end a drain whose record cannot be written."""


@dataclass(frozen=True)
class DrainState:
    """State of a drain at one moment."""

    seconds: float
    """Time since its begin."""
    max_secs: float
    """``supervisor.drain.secs``."""
    used_ports: Sequence[int]
    """Slots with work or a process."""
    has_read: bool
    """True if the supervisor has read the assignments: before, its slots may have work."""
    known_secs: float | None = None
    """Time from the record of the drain to the newest read of the assignments; ``None`` while no
    record names it.
    """
    alone_secs: float = 0.0
    """Time for which every registered supervisor has drained."""
    is_hurried: bool = False
    """True after a second signal."""


def end_of_drain(state: DrainState) -> str | None:
    """Reason why the drain is over, for the log; ``None`` while it waits.

    Without a process and before the first read of the assignments there is nothing to move: the
    supervisor was stopped during its start.
    """
    if not state.used_ports:
        if not state.has_read:
            return "no worker was started yet"
        if _may_get_work(state):
            return None
        return f"all slots are empty after {state.seconds:.1f} s"
    ports = ", ".join(map(str, sorted(state.used_ports)))
    consequence = (
        f"the tasks in slots {ports} were not moved: they run elsewhere once this host is gone"
    )
    if state.is_hurried:
        return f"a second signal ended the drain; {consequence}"
    if state.seconds >= state.max_secs:
        return f"{state.max_secs:g} s (supervisor.drain.secs) have passed; {consequence}"
    if state.alone_secs >= ALONE_SECS:
        return f"every supervisor of the cluster drains, so that no host takes work; {consequence}"
    return None


def _may_get_work(state: DrainState) -> bool:
    """True while a placement that was planned before the drain may fill the empty slots."""
    if state.is_hurried or state.seconds >= state.max_secs:
        return False
    if state.known_secs is None:
        return state.seconds < MAX_UNKNOWN_SECS
    return state.known_secs < KNOWN_SECS
