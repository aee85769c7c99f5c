"""A pause of healing by operators: when it ends, and how it is described."""

from __future__ import annotations

import pytest

from storm_dagster.core.liveness.pause import (
    SeenPause,
    must_end,
    note_pause,
    pause_text,
    waiting_text,
)
from storm_dagster.model.healing_pause import HealingPause

BEGIN_MS = 1_800_000_000_000
SECS = 600
PAUSE = HealingPause(since_ms=BEGIN_MS, until_ms=BEGIN_MS + SECS * 1000, user="ann")
SEEN_AT = 50.0
"""Boot clock of the observer when it first saw the pause."""
SEEN = SeenPause(PAUSE.until_ms, SEEN_AT)


@pytest.mark.parametrize(
    ("passed_secs", "set_back_secs", "expected"),
    [(0, 0, False), (599, 0, False), (600, 0, True), (599, 7200, False), (600, 7200, True)],
)
def test_a_leader_ends_a_pause_in_time_also_by_a_clock_set_back(
    passed_secs: int, set_back_secs: int, expected: bool
) -> None:
    now_ms = BEGIN_MS + (passed_secs - set_back_secs) * 1000
    assert must_end(PAUSE, SEEN, SEEN_AT + passed_secs, now_ms) == expected


def test_a_leader_that_sees_a_pause_late_ends_it_at_its_time() -> None:
    assert must_end(PAUSE, SEEN, SEEN_AT + 1, PAUSE.until_ms)


@pytest.mark.parametrize(
    ("seen", "now", "expected"),
    [
        (None, 70.0, SeenPause(PAUSE.until_ms, 70.0)),
        (SEEN, 70.0, SEEN),
        (SEEN, SEEN_AT + SECS + 60, SEEN),
        # No leader has ended it for a minute.
        (SEEN, SEEN_AT + SECS + 61, SeenPause(PAUSE.until_ms, SEEN_AT, is_over=True)),
        # Another pause has its own length.
        (SeenPause(PAUSE.until_ms - 1, SEEN_AT), 700.0, SeenPause(PAUSE.until_ms, 700.0)),
        # The boot clock began again with the host.
        (SEEN, 3.0, SeenPause(PAUSE.until_ms, 3.0)),
    ],
)
def test_an_observer_counts_a_pause_from_when_it_first_saw_it(
    seen: SeenPause | None, now: float, expected: SeenPause
) -> None:
    assert note_pause(PAUSE, seen, now) == expected


def test_a_pause_that_was_ended_is_forgotten() -> None:
    assert note_pause(None, SEEN, 70.0) is None


@pytest.mark.parametrize(("user", "who"), [("ann", "paused by ann until"), ("", "paused until")])
def test_a_pause_names_its_operator_end_and_remedy(user: str, who: str) -> None:
    text = pause_text(PAUSE.model_copy(update={"user": user}))
    assert who in text and "2027-01-15 08:10:00 UTC" in text
    assert "`storm-dagster resume-healing` ends the pause" in text


def test_the_latest_end_that_a_record_can_have_is_described() -> None:
    latest = HealingPause(since_ms=0, until_ms=253_402_300_799_999)
    assert "until 9999-12-31 23:59:59 UTC" in pause_text(latest)


def test_the_causes_that_wait_are_named_up_to_five() -> None:
    causes = [f"cause {number}" for number in range(1, 8)]
    assert waiting_text([]) == ""
    assert waiting_text(causes[:1]) == "1 waits for it: cause 1"
    assert waiting_text(causes[:5]).endswith("cause 4; cause 5")
    assert waiting_text(causes).startswith("7 wait for it: cause 1; ")
    assert waiting_text(causes).endswith("cause 5 and 2 more")
