"""Record of a pause of healing, which operators have asked for."""

from typing import Annotated

from pydantic import Field

from storm_dagster.model.records import Record

DEFAULT_PAUSE_SECS = 3600
"""Length of a pause without another one."""
MAX_PAUSE_SECS = 86_400
"""Longest pause, so that a forgotten one ends within a day."""


class HealingPause(Record):
    """``/healing_pause``: operators have paused healing.

    The leader deletes it at its end; daemons of the release before do not know it, and heal.
    """

    since_ms: Annotated[int, Field(ge=0, lt=253_402_300_800_000)]
    """Begin (epoch ms), by the clock of the leader that wrote it."""
    until_ms: Annotated[int, Field(ge=0, lt=253_402_300_800_000)]
    """End, likewise."""
    user: str = ""
    """Operator who asked for it; empty if the cluster does not know its users."""

    @property
    def secs(self) -> float:
        """Length, seconds."""
        return max(0.0, (self.until_ms - self.since_ms) / 1000)
