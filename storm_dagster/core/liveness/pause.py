"""Pause of healing by operators.

The leader ends it by its own clock. An observer that sees no leader do so ends it for itself, a
minute after the length of the pause has passed on its own clock.
"""

from collections.abc import Sequence
from datetime import datetime, timezone

import msgspec

from storm_dagster.model.healing_pause import HealingPause

_GRACE_SECS = 60.0
"""Seconds that a leader has to end a pause whose length has passed."""
_MAX_CAUSES = 5
"""Causes that a sentence names."""


class SeenPause(msgspec.Struct, frozen=True):
    """A pause, and when its observer first saw it."""

    until_ms: int
    """End in the record, by which two pauses differ."""
    seen_at: float
    """Boot clock of the observer."""
    is_over: bool = False
    """True if it no longer counts, although no leader has ended it."""


def note_pause(
    pause: HealingPause | None, seen: SeenPause | None, boot_now: float
) -> SeenPause | None:
    """The pause of the record for the next observation; ``None`` without a pause.

    ``seen`` is that of the last observation. A time in the future is of another boot.
    """
    if pause is None:
        return None
    seen_at = boot_now
    if seen is not None and seen.until_ms == pause.until_ms and seen.seen_at <= boot_now:
        seen_at = seen.seen_at
    is_over = boot_now - seen_at > pause.secs + _GRACE_SECS
    return SeenPause(pause.until_ms, seen_at, is_over)


def must_end(pause: HealingPause, seen: SeenPause, boot_now: float, now_ms: int) -> bool:
    """True if the leader must end the pause: by its clock, which may have been set back."""
    return now_ms >= pause.until_ms or boot_now - seen.seen_at >= pause.secs


def pause_text(pause: HealingPause) -> str:
    """Sentence without a full stop: who has paused healing, until when, and what ends it."""
    operator = f" by {pause.user}" if pause.user else ""
    end = datetime.fromtimestamp(pause.until_ms / 1000, timezone.utc)
    return (
        f"healing is paused{operator} until {end:%Y-%m-%d %H:%M:%S} UTC: "
        "`storm-dagster resume-healing` ends the pause"
    )


def waiting_text(causes: Sequence[str]) -> str:
    """Causes that wait for the end of a pause, as one sentence; empty without one."""
    if not causes:
        return ""
    more = f" and {len(causes) - _MAX_CAUSES} more" if len(causes) > _MAX_CAUSES else ""
    verb = "waits" if len(causes) == 1 else "wait"
    return f"{len(causes)} {verb} for it: {'; '.join(causes[:_MAX_CAUSES])}{more}"
