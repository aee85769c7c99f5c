"""Shares of a worker's loop by component, and the components whose calls take too much of it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from storm_dagster.model.errors import StormDagsterError
from storm_dagster.worker.tasks.runner import Runner

WINDOW_SECS = 30.0
"""Time over which shares are compared."""
_MAX_SHARE = 0.5
"""Share of the loop from which slow calls are a problem for the other tasks."""
_SLOW_CALL_SECS = 0.005
"""Mean time of a call from which it is slow: a component that computes quickly, however much of the
loop it takes, delays the others by no more than a pass.
"""
_MIN_SHARE = 0.1
"""Share from which a component counts among several that take the loop together."""


class SlowCalls(StormDagsterError):
    """Calls of a component that take most of its worker's loop."""


@dataclass(frozen=True)
class LoopUse:
    """Use of a worker's loop by the tasks of a component, since they started."""

    task: int
    """The first of its tasks here."""
    secs: float
    """Time in which the loop ran the tasks."""
    calls: int
    """Calls of ``next_tuple`` or ``process`` in that time."""
    slow_secs: float = 0.0
    """Part of that time in passes that a single call made slow, also of a tick or a window."""
    slow_passes: int = 0
    """Number of those passes."""


def loop_use(runners: Iterable[Runner]) -> dict[str, LoopUse]:
    """Return component -> its use of the loop so far; without tasks that have their own thread."""
    uses: dict[str, LoopUse] = {}
    for runner in runners:
        calls = runner.calls_on_loop()
        if calls is None:
            continue
        use = uses.get(runner.component, LoopUse(runner.task_id, 0.0, 0))
        time = runner.loop_time
        uses[runner.component] = LoopUse(
            min(use.task, runner.task_id),
            use.secs + time.secs,
            use.calls + calls,
            use.slow_secs + time.slow_secs,
            use.slow_passes + time.slow_passes,
        )
    return uses


def slow_components(
    before: Mapping[str, LoopUse], after: Mapping[str, LoopUse], secs: float
) -> dict[str, SlowCalls]:
    """Return the components whose slow calls took more than half of the loop, with the error.

    ``before`` and ``after`` were measured ``secs`` seconds apart. Slow calls of several components
    are added: four that take a quarter each leave no more to the others than one.
    """
    slow: dict[str, tuple[float, int]] = {}
    for component, use in after.items():
        former = before.get(component, LoopUse(use.task, 0.0, 0))
        spent = use.secs - former.secs
        # A call that has not returned in the whole time counts as one.
        calls = max(1, use.calls - former.calls)
        slow_passes = use.slow_passes - former.slow_passes
        if spent / calls >= _SLOW_CALL_SECS:
            slow[component] = (spent, calls)
        elif slow_passes:
            # Most of its calls are quick, as of a spout that sleeps at every tenth, or the slow
            # ones are those of ticks and windows.
            slow[component] = (use.slow_secs - former.slow_secs, slow_passes)
    if sum(spent for spent, _ in slow.values()) <= _MAX_SHARE * secs:
        return {}
    return {
        component: _error_of(component, spent, calls, secs)
        for component, (spent, calls) in slow.items()
        if spent >= _MIN_SHARE * secs
    }


def _error_of(component: str, spent: float, calls: int, secs: float) -> SlowCalls:
    share = round(100 * spent / secs)
    mean_ms = 1000 * spent / calls
    return SlowCalls(
        f"calls of component {component!r} took {share} % of its worker's loop in the last "
        f"{secs:.0f} s ({calls} calls of {mean_ms:.0f} ms), and all other tasks of the worker wait "
        "for them: set blocking = True on its class (it then has its own thread), make process "
        "async, or let next_tuple return without sleeping when there is no tuple"
    )


class LoopShares:
    """Detector of components whose slow calls take the loop; reports each once."""

    def __init__(self) -> None:
        self._since = 0.0
        self._uses: Mapping[str, LoopUse] | None = None
        """Use of the loop at the begin of the window; ``None`` before the first one."""
        self._reported: set[str] = set()

    def check(self, now: float, runners: Iterable[Runner]) -> list[tuple[int, str, SlowCalls]]:
        """Return (task, component, error) of the components to report at the clock ``now``.

        Empty within a window.
        """
        if self._uses is not None and now - self._since < WINDOW_SECS:
            return []
        uses = loop_use(runners)
        former = self._uses
        secs = now - self._since
        self._uses = uses
        self._since = now
        if former is None:
            return []
        errors: list[tuple[int, str, SlowCalls]] = []
        for component, error in slow_components(former, uses, secs).items():
            if component not in self._reported:
                self._reported.add(component)
                errors.append((uses[component].task, component, error))
        return errors
