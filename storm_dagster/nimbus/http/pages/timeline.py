"""What happened to a topology: placements with their reasons and runs, workers that came back, errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from storm_dagster.model.amounts import duration
from storm_dagster.model.records import TaskError
from storm_dagster.model.view import TopologyView

_SHOWN = 40
_STARTING_SECS = 30
"""A worker that starts later than this after its tasks were placed was replaced in its slot."""


@dataclass(frozen=True)
class Event:
    """One line of the timeline."""

    at_secs: float
    """Epoch seconds."""
    action: str
    text: str
    run: str | None = None
    """URL of the Dagster run; ``None`` when there was none, or no Dagster is known."""


def timeline(
    topology: TopologyView, errors: Sequence[tuple[str, TaskError]], run_url: Callable[[str], str | None]
) -> list[Event]:
    """The newest events, newest first: as many as a page holds."""
    found = [
        Event(error.time, "error", f"{component}[{error.task}] on {error.host}:{error.port}: {_last_line(error.error)}")
        for component, error in errors
    ]
    assignment = topology.assignment
    if assignment is not None:
        for change in assignment.history:
            parts = [change.why] if change.why else []
            if change.moved:
                parts.append(f"{change.moved} tasks moved")
            if change.outage_secs:
                parts.append(f"silent for {duration(change.outage_secs)} before")
            run = run_url(change.run) if change.run else None
            found.append(Event(change.at_secs, change.action, ", ".join(parts), run))
        starts = assignment.start_secs()
        for worker in assignment.workers:
            live = topology.live_workers.get(worker.slot)
            placed = max((starts.get(task, 0) for task in worker.ids), default=0)
            if live is not None and live.started_ms / 1000 > placed + _STARTING_SECS:
                found.append(
                    Event(
                        live.started_ms / 1000, "started", f"worker {worker.address} in its place, process {live.pid}"
                    )
                )
    return sorted(found, key=lambda event: -event.at_secs)[:_SHOWN]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:160]
