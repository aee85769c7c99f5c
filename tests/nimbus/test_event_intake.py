"""Queue of workers' events in the leader."""

from __future__ import annotations

from typing import Any

import pytest

from storm_dagster.core.event_log import EventSource
from storm_dagster.model.errors import Unavailable
from storm_dagster.nimbus.requests import event_intake
from storm_dagster.nimbus.requests.event_intake import EventIntake


def test_a_batch_without_a_thread_leaves_no_queue_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each later batch of the topology would wait in it, for ever."""
    attempts: list[str] = []

    def no_thread(name: str, action: Any) -> None:
        attempts.append(name)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(event_intake, "in_thread", no_thread)
    nimbus: Any = None  # a batch that is not committed asks it nothing
    intake = EventIntake(nimbus)
    for _ in range(2):
        with pytest.raises(Unavailable, match="cannot start a thread"):
            intake.submit("wc", EventSource(topology="wc-1-100"), [])
    assert len(attempts) == 2
