"""Harness that runs a topology in this process on fixed tuples.

It is for tests of components, and deterministic. It is the worker's own code (groupings, acking,
replay, batching, windows, state) without sockets and ZooKeeper. All tasks run in the calling
thread, always in the same order; blocking components keep their threads. With ``simulated=True``
only :meth:`TopologyHarness.advance` moves time, so that the test controls ticks, windows,
checkpoints and timeouts.
"""

import logging
import time
from asyncio import CancelledError
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from storm_dagster.api.bolts import Bolt
from storm_dagster.api.specs import Grouping
from storm_dagster.api.spouts import Spout
from storm_dagster.api.tuples import Tuple
from storm_dagster.core.dataplane.event_outbox import ReportResponse
from storm_dagster.core.dataplane.window_state import MAX_AHEAD
from storm_dagster.core.submission.validation import check_confs
from storm_dagster.model.conf import default_conf
from storm_dagster.model.conf_layers import merge_conf
from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.model.errors import InvalidRequest, StormDagsterError
from storm_dagster.model.fusion import fuse
from storm_dagster.model.slot import Slot
from storm_dagster.model.topology import ComponentObject, ComponentSpec, InputSpec, TopologySpec
from storm_dagster.testing.waiting import patience
from storm_dagster.worker.dataplane.events import ReportedEvent
from storm_dagster.worker.engine.native import NativeEngine
from storm_dagster.worker.engine.single_process import number_tasks, place_all
from storm_dagster.worker.tasks.runner import TICK_DUE
from storm_dagster.worker.tasks.shared import Shared
from storm_dagster.worker.tasks.spouts import SpoutBase

_log = logging.getLogger(__name__)
_RECORDER = "harness.recorder"
"""Id of the bolt that records the tuples of all components."""
_REJECTED = "rejected"
"""Stream of the rows that a sink refuses."""
_WRITING_SECS = 10.0
"""Longest wait, at the end, for a thread that still writes to the folder of the state."""
_ROUND_TRIPS = "topology.testing.always.try.serialize"
"""Conf key: tuples are encoded and decoded, as between workers."""
_START_MS = 1
"""Simulated time at the start, milliseconds since 1970."""
_STEP_SECS = 0.1
"""The worker's interval for ticks, windows and timeouts."""
_IDLE_TURNS = 3
"""Number of turns without work after which the topology is idle."""


@dataclass(eq=False)
class SimulatedClock:
    """Clock that moves only when ``secs`` is set."""

    secs: float = 0.0

    def __call__(self) -> float:
        return self.secs


class FixedSpout(Spout):
    """Spout that emits fixed tuples, each with its index as id.

    Failed tuples are replayed up to ``replays`` times.
    """

    def __init__(self, tuples: Sequence[Any], replays: int = 0) -> None:
        self.waiting: deque[tuple[int, Any]] = deque(enumerate(tuples))
        """(index, values) of the tuples to emit, in order."""
        self.tuples: list[Any] = list(tuples)
        """All tuples, by index."""
        self.replays = replays
        self.acked: list[int] = []
        """Indices in the order of their acks."""
        self.failed: list[int] = []
        """Indices in the order of their fails; once for each fail."""

    def add(self, tuples: Sequence[Any]) -> None:
        """Queue more tuples, with the next indices."""
        first = len(self.tuples)
        self.tuples += tuples
        self.waiting.extend(enumerate(tuples, first))

    def next_tuple(self) -> None:
        """Emit the next tuple, if there is one."""
        if self.waiting:
            index, values = self.waiting.popleft()
            self.emit(values, tup_id=index)

    def ack(self, tup_id: int) -> None:
        """Record the id."""
        self.acked.append(tup_id)

    def fail(self, tup_id: int) -> None:
        """Record the id, and replay the tuple if allowed."""
        self.failed.append(tup_id)
        if self.failed.count(tup_id) <= self.replays:
            self.waiting.appendleft((tup_id, self.tuples[tup_id]))


class Recorder(Bolt):
    """Bolt that records all received tuples."""

    def initialize(self, conf: Any, context: Any) -> None:
        """Start with an empty record."""
        self.tuples: list[Tuple] = []

    def process(self, tup: Tuple) -> None:
        """Record the tuple."""
        self.tuples.append(tup)


@dataclass
class HarnessResult:
    """Result of a run."""

    tuples: list[Tuple]
    """All tuples of all components, in order of arrival (without direct streams)."""
    acked: dict[str, list[int]] = field(default_factory=dict)
    """Spout -> indices of the acked tuples."""
    """Only spouts in ``given``."""
    failed: dict[str, list[int]] = field(default_factory=dict)
    """Spout -> indices of the failed tuples, once for each fail."""
    errors: list[tuple[str, BaseException]] = field(default_factory=list)
    """(component, exception) of all raised or reported errors."""
    dead_letters: list[dict[str, Any]] = field(default_factory=list)
    """The dead letters, as ``storm-dagster dead-letters`` would list them."""
    warnings: list[str] = field(default_factory=list)
    """Differences that a cluster would show.

    Streams without a reader, conf keys without effect, and a conf that it would refuse.
    """

    def values(self, component: str, stream: str = "default") -> list[Any]:
        """Values emitted by a component on a stream, in order."""
        source = (component, stream)
        return [tup.values for tup in self.tuples if (tup.component, tup.stream) == source]


class TopologyHarness(AbstractContextManager["TopologyHarness"]):
    """One topology, ready to run. Use it as a context manager, or close it."""

    def __init__(
        self,
        topology: Any,
        given: Mapping[str, Sequence[Any]] | None = None,
        *,
        conf: Mapping[str, Any] | None = None,
        replays: int = 0,
        state_dir: Path | None = None,
        archive: Path | None = None,
        simulated: bool = False,
        start_ms: int | None = None,
    ) -> None:
        """Build the topology.

        ``given`` maps spouts to tuples, which replace the spout. ``state_dir`` is the folder of the
        components' state, by default one that is deleted with the harness. ``simulated`` time
        starts at ``start_ms`` (milliseconds since 1970; by default just after the end of a window,
        so that the first tuples are in the first complete one). Without ``start_ms`` simulated time
        has no date, and no time stamp is too far ahead of it. ``archive`` is the folder of the
        topology's files. ``InvalidRequest`` for a spout that the topology lacks, or for programs
        with ``simulated`` time.
        """
        spec: TopologySpec = topology if isinstance(topology, TopologySpec) else topology.to_spec()
        self.errors: list[tuple[str, BaseException]] = []
        cluster: dict[str, Any] = {_ROUND_TRIPS: True}
        if simulated and start_ms is None:
            cluster[MAX_AHEAD] = 0
        merged = merge_conf(
            {
                "defaults": default_conf(),
                "cluster": cluster,
                "author": spec.conf,
                "submission": conf or {},
            }
        )
        self.warnings: list[str] = [*unread_streams(spec), *ignored_keys(conf or {}, spec)]
        """As :attr:`HarnessResult.warnings`; they are logged, too."""
        for warning in self.warnings:
            _log.warning("%s", warning)
        self._given = frozenset(given or ())
        """Names of the spouts that are replaced."""
        self._waiting: list[tuple[str, list[Sequence[Any]]]] = []
        """(spout, tuples) of :meth:`give` that their spouts do not have yet."""
        spec = fuse(_with_recorder(spec, given or {}, replays), merged)
        self.clock: SimulatedClock | None = None
        epoch_secs: float | None = None
        if simulated:
            _refuse_programs(spec)
            self.clock = SimulatedClock()
            epoch_secs = (_START_MS if start_ms is None else start_ms) / 1000
        self.shared: Shared = Shared(
            conf=merged,
            owns=lambda: True,
            wake=lambda: None,
            report=self._report,
            clock=self.clock or time.monotonic,
            epoch=epoch_secs,
        )
        self.shared.sliced = False
        # Without KeyboardInterrupt and the exceptions of test frameworks, which end the run.
        self.shared.catches = (Exception, SystemExit, CancelledError, GeneratorExit)
        self.dagster_events: list[DagsterEvent] = []
        """Events reported by bolts (``self.dagster``), in order."""
        self.dagster_up: bool = True
        """True if the simulated cluster takes events; otherwise their tuples wait."""
        self.shared.events.send = self._store
        self._folder = TemporaryDirectory(prefix="storm-harness-")
        self.shared.scratch = Path(self._folder.name)
        slot = Slot("harness", 0)
        self.engine: NativeEngine = NativeEngine(
            topology_id=f"{spec.name or 'harness'}-1-0",
            spec=spec,
            conf=merged,
            shared=self.shared,
            transport=None,
            slot=slot,
            archive=archive,
            state_dir=Path(self._folder.name) if state_dir is None else state_dir,
        )
        self.engine.place(place_all(number_tasks(spec, merged), slot))
        self.engine.activate(True)

    def _report(self, task: int, component: str, error: BaseException, where: str) -> None:
        self.errors.append((component, error))

    def _store(self, batch: list[ReportedEvent]) -> None:
        """Respond to a batch of events in place of the cluster."""
        if self.dagster_up:
            events = [reported.event for reported in batch]
            self.dagster_events += events
            self.shared.events.on_response(ReportResponse(frozenset(event.id for event in events)))
        else:
            self.shared.events.on_response(ReportResponse(problem="dagster_up is False"))

    def tasks(self, component: str) -> list[Any]:
        """The component instances of the tasks of ``component``, in order of task ids.

        ``None`` for a program, and a task that has not started. ``InvalidRequest`` if there is no
        such component.
        """
        runners = [
            runner for runner in self.engine.runners.values() if runner.component == component
        ]
        if not runners:
            raise InvalidRequest(f"the topology has no component {component!r}")
        runners.sort(key=lambda runner: runner.task_id)
        return [runner.instance for runner in runners]

    def tick(self, component: str) -> None:
        """Send every task of ``component`` a tick in the next run, whatever its conf."""
        for runner in self.engine.runners.values():
            if runner.component == component:
                runner.ticks |= TICK_DUE

    def give(self, spout: str, *tuples: Sequence[Any]) -> None:
        """Add tuples to a spout in ``given``, which the next run emits.

        An empty list in ``given`` is enough. ``InvalidRequest`` if the spout is not in ``given``.
        """
        self.tasks(spout)  # Raises for an unknown name.
        if spout not in self._given:
            raise InvalidRequest(
                f"spout {spout!r} is the topology's own: name it in given={{...}} to give it tuples"
            )
        self._waiting.append((spout, list(tuples)))
        self._hand_over()

    def _hand_over(self) -> bool:
        """Pass the tuples of :meth:`give` on to their spouts; true if a spout took some.

        Those of a spout whose task has not started, as before the first run, wait.
        """
        waiting = self._waiting
        self._waiting = []
        for spout, tuples in waiting:
            (instance,) = self.tasks(spout)
            if isinstance(instance, FixedSpout):
                instance.add(tuples)
            else:
                self._waiting.append((spout, tuples))
        return len(self._waiting) < len(waiting)

    def advance(self, secs: float, *, timeout: float = 30.0) -> HarnessResult:
        """Advance simulated time in steps of 0.1 s, and run after each step.

        The topology runs before the first one, too. ``InvalidRequest`` if time is not simulated.
        Raises ``TimeoutError`` after ``timeout`` (real) seconds in all.
        """
        if self.clock is None:
            raise InvalidRequest("this harness runs in real time: make it with simulated=True")
        until = self.clock.secs + secs
        deadline = time.monotonic() + timeout
        self.run(timeout=timeout)
        while self.clock.secs < until - 1e-9:
            self.clock.secs = min(until, round(self.clock.secs + _STEP_SECS, 6))
            self.run(timeout=max(0.001, deadline - time.monotonic()))
        return self._result()

    def run(self, *, timeout: float = 10.0) -> HarnessResult:
        """Run until the topology is idle.

        Tuples that bolts keep without acking (batches, windows) do not count. Raises
        ``TimeoutError`` after ``timeout`` (real) seconds, multiplied by ``STORM_TEST_PATIENCE``.
        """
        limit = patience(timeout)
        deadline = time.monotonic() + limit
        idle_turns = 0
        while idle_turns < _IDLE_TURNS:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the topology still works after {limit:g} s: does a spout never end, "
                    f"or a component not start? errors so far: {self.errors!r:.500}"
                )
            if self._run_turn():
                idle_turns = 0
            else:
                idle_turns += 1
        return self._result()

    def _run_turn(self) -> bool:
        """Run each task once. False if the topology was idle."""
        if self._hand_over():
            return True
        runners = list(self.engine.runners.values())
        for runner in runners:
            if isinstance(runner, SpoutBase):
                # A spout that emitted nothing is called at once.
                runner.pause_until = 0.0
        has_worked = self.engine.run(self.shared.clock())
        # A task whose component names a system that is away opens when time has passed.
        waiting = {runner.task_id for runner in runners if runner.system_wait.pause_secs()}
        is_starting = any(
            status == "starting" and task not in waiting
            for task, status in self.engine.statuses().items()
        )
        busy = [runner for runner in runners if runner.busy_elsewhere()]
        has_busy_bolt = any(runner.kind == "bolt" for runner in busy)
        has_task_work = has_worked or is_starting or has_busy_bolt
        if not has_task_work and (self._waits_for_retry() or self.engine.drained()):
            return False
        if is_starting or busy:
            time.sleep(0.001)
            # Some task starts, and none in a thread: it failed to start, and waits for a retry.
            is_opening = any(runner.status == "starting" for runner in busy)
            if is_starting and not is_opening and not has_worked and self.clock is not None:
                # Otherwise the retry would never be due.
                self.clock.secs = round(self.clock.secs + _STEP_SECS, 6)
        return True

    def _waits_for_retry(self) -> bool:
        """True if a task waits for an external system: it is idle until time has passed."""
        now_ms = self.shared.now_ms()
        for runner in self.engine.runners.values():
            if runner.events_full or runner.system_wait.pause_secs():
                return True
            if getattr(runner.instance, "_room_at", 0) > now_ms:
                return True
        return False

    def _result(self) -> HarnessResult:
        """Everything since the begin of the harness, not only of the last run."""
        result = HarnessResult(
            list(self.tasks(_RECORDER)[0].tuples),
            errors=list(self.errors),
            warnings=list(self.warnings),
        )
        for runner in self.engine.runners.values():
            letters = runner.letters.log if isinstance(runner, SpoutBase) else None
            if letters is not None and letters.is_open:
                result.dead_letters += letters.read().values()
            if isinstance(runner.instance, FixedSpout):
                result.acked.setdefault(runner.component, []).extend(runner.instance.acked)
                result.failed.setdefault(runner.component, []).extend(runner.instance.failed)
        return result

    def close(self) -> None:
        """Close all tasks, and delete their folder after its last writer has ended."""
        writers: list[Thread] = []
        for runner in self.engine.runners.values():
            writers += runner.writers()
        self.engine.close()
        for thread in writers:
            thread.join(_WRITING_SECS)
        self._folder.cleanup()

    def __exit__(self, *_: object) -> None:
        self.close()


def unread_streams(spec: TopologySpec) -> list[str]:
    """Streams that no component of the topology reads, ``rejected`` first.

    In the harness its recorder reads every stream, so that a test sees their tuples. On a cluster
    the tuples of an unread stream go nowhere, and a sink without a reader of ``rejected`` fails
    the rows that it refuses.
    """
    read = {
        (item.component, item.stream) for _, _, part in spec.components() for item in part.inputs
    }
    warnings: list[str] = []
    for name, _, part in spec.components():
        for stream in part.outputs:
            if (name, stream) in read:
                continue
            if stream == _REJECTED:
                warnings.insert(
                    0,
                    f"no component reads stream {stream!r} of {name!r}: on a cluster the tuples of "
                    "rejected rows fail, and become dead letters",
                )
            else:
                warnings.append(f"no component reads stream {stream!r} of {name!r}")
    return warnings


def ignored_keys(conf: Mapping[str, Any], spec: TopologySpec) -> list[str]:
    """Warnings of a submission about conf keys without effect, or the error that refuses it.

    The harness runs with a conf that a submission would refuse: the test may be about that.
    """
    try:
        _, _, warnings = check_confs(dict(conf), spec, "conf", "warn")
    except StormDagsterError as error:
        return [f"a cluster would refuse the topology: {error}"]
    return warnings


def _refuse_programs(spec: TopologySpec) -> None:
    """Raise :class:`InvalidRequest` for a component that is a program: it runs in real time."""
    for name, _, part in spec.components():
        if part.object.shell is not None:
            raise InvalidRequest(
                f"component {name!r} is a program, which runs in real time: "
                "run without simulated=True"
            )


def _with_recorder(
    spec: TopologySpec, given: Mapping[str, Sequence[Any]], replays: int
) -> TopologySpec:
    """Replace the spouts in ``given``, and add the recorder.

    It reads all streams but direct ones. ``InvalidRequest`` for a spout that the topology lacks.
    """
    spouts = dict(spec.spouts)
    for name, tuples in given.items():
        if name not in spouts:
            raise InvalidRequest(f"the topology has no spout {name!r}: it has {', '.join(spouts)}")
        args = {"tuples": [list(values) for values in tuples], "replays": replays}
        code = ComponentObject(python=f"{__name__}:FixedSpout", args=args)
        changes = {"object": code, "parallelism": 1, "conf": {}}
        spouts[name] = spouts[name].model_copy(update=changes)
    inputs: list[InputSpec] = []
    for name, _, part in spec.components():
        for stream, declared in part.outputs.items():
            if not declared.direct:
                source = InputSpec(component=name, stream=stream, grouping=Grouping.GLOBAL)
                inputs.append(source)
    recorder = ComponentSpec(
        object=ComponentObject(python=f"{__name__}:Recorder"), inputs=tuple(inputs)
    )
    return spec.model_copy(update={"spouts": spouts, "bolts": {**spec.bolts, _RECORDER: recorder}})


def run_topology(
    topology: Any,
    given: Mapping[str, Sequence[Any]] | None = None,
    *,
    conf: Mapping[str, Any] | None = None,
    replays: int = 0,
    timeout: float = 10.0,
    state_dir: Path | None = None,
    ticks: Sequence[str] = (),
) -> HarnessResult:
    """Run ``topology`` on fixed tuples, and return the result.

    ``given`` maps spouts to the tuples that replace them. When the topology is idle, the components
    in ``ticks`` get a tick each, and it runs once more. Raises as :class:`TopologyHarness`, and
    ``TimeoutError`` if a run takes longer than ``timeout`` seconds.
    """
    harness = TopologyHarness(topology, given, conf=conf, replays=replays, state_dir=state_dir)
    with harness:
        result = harness.run(timeout=timeout)
        if not ticks:
            return result
        for component in ticks:
            harness.tick(component)
        return harness.run(timeout=timeout)
