"""Window and state drivers, which the worker attaches to bolts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from storm_dagster.model.errors import InvalidTopology

if TYPE_CHECKING:
    from storm_dagster.worker.tasks.runner import Runner


def acks_itself(bolt: Any) -> bool:
    """Whether the bolt acks instead of the runner: it gathers tuples, or defers acks to checkpoints."""
    return bool(getattr(bolt, "_gathers", False)) or hasattr(type(bolt), "process_again")


def attach_drivers(bolt: Any, runner: Runner) -> None:
    """Attach the drivers of a windowed or stateful bolt. Called when its emit works, before ``initialize``.

    Raises if its conf is not valid, or its state cannot be opened.
    """
    cls = type(bolt)
    windows = state = None
    if hasattr(cls, "process_window"):
        from storm_dagster.worker.tasks.windows import WindowDriver

        bolt._driver = windows = WindowDriver(bolt, runner)
    if hasattr(cls, "process_again"):
        from storm_dagster.worker.tasks.stateful import StateDriver

        if runner.is_async:
            raise InvalidTopology(
                f"bolt {runner.component!r} has state and an async process: changes of the state could not "
                "be attributed to one tuple; make process a plain method"
            )
        bolt._state_driver = state = StateDriver(bolt, runner)
    runner.state = state
    if windows is not None and state is not None:

        def both() -> None:
            windows.pulse()
            state.pulse()

        bolt._pulse, bolt._pulse_secs = both, 0.1
    elif state is not None:
        bolt._pulse, bolt._pulse_secs = state.pulse, 0.1
