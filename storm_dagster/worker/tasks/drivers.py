"""Bolts that have drivers of windows and state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from storm_dagster.model.errors import InvalidTopology

if TYPE_CHECKING:
    from storm_dagster.worker.tasks.runner import Runner
    from storm_dagster.worker.tasks.state_opening import StateOpening


def acks_itself(bolt: Any) -> bool:
    """Whether the bolt acks instead of the runner: it gathers tuples, or defers acks to checkpoints."""
    return bool(getattr(bolt, "_gathers", False)) or hasattr(type(bolt), "process_again")


def open_state(bolt: Any, runner: Runner, *, inline: bool = False) -> StateOpening | None:
    """Begin to open the state of a windowed or stateful bolt; in this thread with ``inline``.

    Raises if its conf is not valid.
    """
    windows = None
    if hasattr(type(bolt), "process_window"):
        from storm_dagster.worker.tasks.windows import WindowDriver

        bolt._driver = windows = WindowDriver(bolt, runner)
    elif not hasattr(type(bolt), "process_again") or not getattr(bolt, "exactly_once", True):
        return None
    from storm_dagster.worker.tasks.state_opening import StateOpening

    if runner.is_async:
        raise InvalidTopology(
            f"bolt {runner.component!r} has state and an async process: changes of the state could not "
            "be attributed to one tuple; make process a plain method"
        )
    return StateOpening(bolt, runner, windows, inline)
