"""A topology that runs in this process, without ZooKeeper, Spark for placement, or other processes.

It is the worker's own engine (groupings, acks, replays, back pressure, windows, state, dead
letters) with all tasks in one worker. Nothing here needs Linux.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storm_dagster.core.dataplane.event_outbox import ReportResponse
from storm_dagster.local.report import (
    ComponentCounts,
    RunReport,
    compare_counts,
    count_components,
)
from storm_dagster.local.tail import TAIL, TailBolt, with_tail
from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.model.fusion import fuse
from storm_dagster.model.slot import Slot
from storm_dagster.model.topology import TopologySpec
from storm_dagster.security.spark_remote import ClusterSpark
from storm_dagster.worker.dataplane.events import ReportedEvent
from storm_dagster.worker.engine.native import NativeEngine
from storm_dagster.worker.engine.single_process import number_tasks, place_all
from storm_dagster.worker.tasks.errors import ErrorReporter
from storm_dagster.worker.tasks.plain_values import short_repr
from storm_dagster.worker.tasks.shared import RunningTask, Shared

_SLOT = Slot("local", 0)
_MAX_PAUSE_SECS = 0.1
"""Longest wait of the loop, so that it notices a stop."""
_DRAIN_SECS = 2.0
"""Time that tuples in flight have to finish after the spouts were stopped."""
_WRITING_SECS = 10.0
"""Longest wait for threads that still write state after the end of the tasks."""
_SHOWN_CHARACTERS = 200
"""Characters of a shown value."""
_PLAIN = (int, float, bool, type(None))


@dataclass(frozen=True)
class RunLimits:
    """Reasons for which a run ends by itself."""

    secs: float | None = None
    """Seconds after the start."""
    idle_secs: float | None = None
    """Seconds in which no tuple was emitted, executed or pending."""


@dataclass(eq=False, kw_only=True)
class TopologyRun:
    """One run of a topology, from the first task to the last.

    :meth:`run` is the loop and returns at the end. :meth:`stop`, :attr:`report` and
    :meth:`blocking_task` may be used by other threads.
    """

    name: str
    spec: TopologySpec
    """The normalized topology, without system components."""
    conf: Mapping[str, Any]
    """Its total conf, with resolved references."""
    archive: Path
    """Folder of the topology's code."""
    state_dir: Path
    """Folder of the state of its components."""
    scratch: Path
    """Folder for files of running programs."""
    shown: Collection[str] = ()
    """Components whose last tuples are in the reports."""
    cluster_spark: ClusterSpark = field(default_factory=ClusterSpark)
    """Servers of Spark Connect in the cluster's conf."""
    on_event: Callable[[DagsterEvent], None] = lambda event: None
    """Called with each report to Dagster, in the loop."""
    report_secs: float = 1.0
    """Seconds between two reports."""

    def __post_init__(self) -> None:
        self.passes = 0
        """Number of passes of the loop; a number that does not grow means a blocked loop."""
        self._woken = threading.Event()
        self._end = ""
        """Reason for the end; empty while the run continues."""
        self._errors = 0
        self._events = 0
        self._failed_starts: set[int] = set()
        """Tasks that reported an error before they ran."""
        self._started = time.monotonic()
        self._counts: dict[str, ComponentCounts] = {}
        self._counted_at = self._started
        self._activity: tuple[int, ...] = ()
        self._active_at = self._started
        """Time of the last change of the counts of tuples, or of pending work."""
        spec = fuse(with_tail(self.spec, self.shown), self.conf)
        kinds = {component: kind for component, kind, _ in self.spec.components()}
        # As tuples flow: spouts first.
        self._kinds = {
            component: kinds[component] for component in [*self.spec.spouts, *self.spec.bolts]
        }
        reporter = ErrorReporter(self.conf, self._on_error, time.monotonic)
        self.shared = Shared(
            conf=self.conf, owns=lambda: True, wake=self._woken.set, report=reporter
        )
        self.shared.scratch = self.scratch
        self.shared.events.send = self._print_events
        self.engine = NativeEngine(
            topology_id=f"{self.name}-1-{int(time.time())}",
            spec=spec,
            conf=self.conf,
            shared=self.shared,
            transport=None,
            slot=_SLOT,
            archive=self.archive,
            state_dir=self.state_dir,
            cluster_spark=self.cluster_spark,
        )
        self._components = number_tasks(spec, self.conf)
        self.report: RunReport = self._make_report()
        """The last report; replaced once a :attr:`report_secs`."""

    # -- any thread --------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """End the run soon: no spout emits from now on, and tuples in flight finish."""
        self._end = self._end or reason
        self._woken.set()

    @property
    def is_ending(self) -> bool:
        """True if the end was requested, or a limit was reached."""
        return bool(self._end)

    def blocking_task(self) -> RunningTask | None:
        """Return the task that occupies the loop now, if one does."""
        return self.shared.at

    def _on_error(self, task: int, component: str, text: str, secs: int, group: str) -> None:
        self._errors += 1
        runner = self.engine.runners.get(task)
        if runner is None or runner.status == "starting":
            self._failed_starts.add(task)

    # -- the loop's thread -------------------------------------------------------------------------

    def run(self, limits: RunLimits) -> RunReport:
        """Run until a limit is reached or :meth:`stop` is called.

        Returns the last report, with the rates and latencies of the whole run.
        """
        self.engine.place(place_all(self._components, _SLOT))
        self.engine.activate(True)
        while not self._end:
            self.passes += 1
            self._woken.clear()
            now = time.monotonic()
            has_worked = self.engine.run(now)
            if now >= self._counted_at + self.report_secs:
                self.report = self._make_report()
            self._end = self._end or self._limit_reached(limits, now)
            if not has_worked and not self._end:
                pause = min(self.engine.idle_secs(time.monotonic()), _MAX_PAUSE_SECS)
                if pause > 0:
                    self._woken.wait(pause)
        self._drain()
        # The last report is about the whole run.
        self._counts = {}
        self._counted_at = self._started
        last = self._make_report()
        self._close()
        return last

    def _limit_reached(self, limits: RunLimits, now: float) -> str:
        """Return the limit that ends the run now; empty if none does."""
        if limits.secs is not None and now - self._started >= limits.secs:
            return f"{limits.secs:g} s are over"
        if limits.idle_secs is None:
            return ""
        activity = self._tuples()
        if activity != self._activity or self._is_busy():
            self._activity = activity
            self._active_at = now
        if now - self._active_at >= limits.idle_secs:
            return f"idle for {limits.idle_secs:g} s"
        return ""

    def _tuples(self) -> tuple[int, ...]:
        """Return the numbers of tuples that each task has emitted and executed."""
        numbers: list[int] = []
        for runner in self.engine.runners.values():
            stats = runner.stats
            numbers += [stats.executed, stats.written]
            numbers += [route.emitted for route in runner.routes.values()]
        return tuple(numbers)

    def _is_busy(self) -> bool:
        """True if a tuple is pending, or a task starts for the first time."""
        for task, runner in self.engine.runners.items():
            if runner.status == "starting" and task not in self._failed_starts:
                return True
        return bool(self.engine.open_trees()) or not self.engine.drained()

    def _drain(self) -> None:
        """Let tuples in flight finish, for at most two seconds."""
        self.engine.activate(False)
        deadline = time.monotonic() + _DRAIN_SECS
        while time.monotonic() < deadline:
            has_worked = self.engine.run(time.monotonic())
            has_pending = self.engine.open_trees() or self.shared.events.pending
            if not has_worked and not has_pending and self.engine.drained():
                return
            if not has_worked:
                time.sleep(0.001)

    def _close(self) -> None:
        writers: list[threading.Thread] = []
        for runner in self.engine.runners.values():
            writers += runner.writers()
        self.engine.close()
        for thread in writers:
            thread.join(_WRITING_SECS)

    def _print_events(self, batch: list[ReportedEvent]) -> None:
        for reported in batch:
            self._events += 1
            self.on_event(reported.event)
        event_ids = frozenset(reported.event.id for reported in batch)
        self.shared.events.on_response(ReportResponse(event_ids))

    # -- reports -----------------------------------------------------------------------------------

    def _make_report(self) -> RunReport:
        now = time.monotonic()
        counts = count_components(self.engine.stats(), self._kinds)
        rows = compare_counts(counts, self._counts, now - self._counted_at)
        self._counts = counts
        self._counted_at = now
        return RunReport(
            topology=self.name,
            seconds=now - self._started,
            rows=rows,
            errors=self._errors,
            events=self._events,
            last=self._last_tuples(),
            end=self._end,
        )

    def _last_tuples(self) -> dict[str, list[dict[str, Any]]]:
        for runner in self.engine.runners.values():
            if runner.component == TAIL and isinstance(runner.instance, TailBolt):
                return {
                    component: [_tuple_document(tup) for tup in tuples]
                    for component, tuples in runner.instance.last.items()
                }
        return {}


def _tuple_document(tup: Any) -> dict[str, Any]:
    """Return a tuple as JSON.

    Texts are cut; values other than texts and numbers are shown by their ``repr``.
    """
    values: list[Any] = []
    for value in tup.values:
        if isinstance(value, str):
            values.append(value[:_SHOWN_CHARACTERS])
        elif isinstance(value, _PLAIN):
            values.append(value)
        else:
            values.append(short_repr(value, _SHOWN_CHARACTERS))
    return {"component": tup.component, "stream": tup.stream, "values": values}
