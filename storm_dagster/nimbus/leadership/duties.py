"""Duties of the leader.

They are due transitions, healing while no sensor is armed, cleaning, and reporting. The leader
removes killed topologies. Dagster's sensors come first for all other duties. They hold ``/healer``.
While it has existed recently, the leader leaves other due transitions and healing to them, for the
time that a run should take (``docs/decisions.md#healing-sensor``).
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from msgspec import UNSET
from msgspec.structs import replace

from storm_dagster.core.liveness.causes import Cause, LivenessMemory
from storm_dagster.core.liveness.pause import SeenPause, must_end, note_pause
from storm_dagster.core.liveness.step import HealingSettings, HealingState, healing_step
from storm_dagster.core.transitions import DueMemory
from storm_dagster.host.clock import boot_clock, boot_id
from storm_dagster.host.futures import in_thread
from storm_dagster.model import paths
from storm_dagster.model.errors import (
    Fenced,
    NotAlive,
    StormDagsterError,
    Unavailable,
    typed_error_text,
)
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.operations.context import OperationsContext, load_runnable
from storm_dagster.operations.live import cleaner, healing, lifecycle
from storm_dagster.operations.live.healing_pause import resume_healing
from storm_dagster.operations.live.outlook import ReassignmentOutlook
from storm_dagster.operations.results import ReassignResult
from storm_dagster.operations.upgrade import advance_upgrades
from storm_dagster.zk.gray_upgrades import upgrades_under_way

_log = logging.getLogger(__name__)

MAX_BACKSTOP_SECS = 20.0
"""Longest time that the leader gives a sensor or a run.

With it a lost host is healed within its session and 30 s, also without Dagster. A conf of an
earlier release may name more (``docs/decisions.md#healing-sensor``).
"""
_TICK_SECS = 1.0
"""Pause between two rounds of duties."""
_DUE_GRACE_SECS = 10.0
"""Seconds without a sensor after which the leader does due transitions itself."""
_DUE_SECS = 5.0
"""Seconds between two polls for due transitions while none waits for its time."""
_MAX_REMOVALS = 8
"""Removals that run at the same time, each in its own thread."""
_REPORT_SECS = 10.0
"""Seconds between two attempts to report to a Dagster that did not answer."""
_GRACE_SECS = 61.0
"""Seconds until the next cleaning while garbage waits: the cleaner's grace is 60 s."""


class LeaderRounds(ABC):
    """Rounds of duties in a separate thread, while this nimbus leads.

    A duty that fails does not stop the others. All memory is dropped when leadership changes: a
    new leader has seen no heartbeat yet, and grants one full timeout from its own election.
    """

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus
        configured_secs = float(nimbus.conf["nimbus.monitor.backstop.secs"])
        self._backstop_secs = min(configured_secs, MAX_BACKSTOP_SECS)
        """Seconds that the leader gives a sensor before it heals, or a run before it takes over."""
        self._boot_id = boot_id()
        """Boot of this machine, for which the times in memory hold."""
        self._epoch: int | None = None
        """Epoch to which the memory belongs."""
        self._healer_seen_at = 0.0
        """Boot clock at which a sensor was last seen armed, or of the beginning of the epoch."""
        self._failures: dict[str, str] = {}
        """Name of a duty -> its failure that was logged, until it succeeds."""
        self._forget()

    @abstractmethod
    def _forget(self) -> None:
        """Drop all memory, as a leader that was just elected."""

    def _cut_off(self) -> None:  # noqa: B027 (most need no note)
        """Note that ZooKeeper could not be read."""

    @abstractmethod
    def _duties(self) -> Iterable[Callable[[OperationsContext], None]]:
        """Return the duties of each round, in their order."""

    def run(self, stop: threading.Event) -> None:
        """Run until ``stop``."""
        while not stop.wait(_TICK_SECS):
            self._run_once()

    def _run_once(self) -> None:
        """Do all duties of one round, if this nimbus leads.

        The round ends early if another nimbus leads by now.
        """
        epoch = self._nimbus.status.epoch
        if epoch is None:
            self._cut_off()
            return
        if epoch != self._epoch:
            self._epoch = epoch
            self._healer_seen_at = boot_clock()
            self._forget()
        for duty in self._duties():
            try:
                duty(self._nimbus.operations(epoch))
            except Fenced as error:
                _log.warning("the leader's duties end: %s", error)
                self._nimbus.wake_election()
                return
            except Exception as error:
                if isinstance(error, Unavailable):
                    self._cut_off()
                self._log_failure(duty.__name__, error)
            else:
                self._failures.pop(duty.__name__, None)

    def _log_failure(self, duty: str, error: Exception) -> None:
        """Log a failure if it is a new one: each round, one second later, meets the same."""
        text = typed_error_text(error)
        if self._failures.get(duty) == text:
            return
        self._failures[duty] = text
        is_unexpected = not isinstance(error, StormDagsterError)
        _log.error(
            "a duty of the leader (%s) failed: %s", duty.strip("_"), text, exc_info=is_unexpected
        )

    def _sensor_absent_secs(self) -> float:
        """Return the seconds for which no sensor has been armed in this epoch."""
        now = boot_clock()
        if self._nimbus.cluster.state.exists(paths.HEALER):
            self._healer_seen_at = now
        return now - self._healer_seen_at


class LeaderReports(LeaderRounds):
    """Reports of the leader's own changes to Dagster.

    They run in a separate thread: a Dagster that accepts them slowly delays no other duty.
    """

    def _forget(self) -> None:
        self._next_report = boot_clock()
        """Boot clock before which no report is attempted."""

    def _duties(self) -> Iterable[Callable[[OperationsContext], None]]:
        return (self._report,)

    def _report(self, ctx: OperationsContext) -> None:
        """Report the events that wait; after a failure only every :data:`_REPORT_SECS`."""
        outbox = self._nimbus.unreported
        outbox.take_noted(ctx)
        if not len(outbox) or boot_clock() < self._next_report:
            return
        outbox.flush(ctx, self._nimbus.dagster)
        if len(outbox):
            self._next_report = boot_clock() + _REPORT_SECS


class LeaderTransitions(LeaderRounds):
    """Due transitions of topologies.

    These are removals of killed topologies, delayed rebalances and activations. They run in a
    separate thread, and so does each removal, of which eight run at once: a removal waits for
    workers to end, and for Spark to end the queries of the topology.
    """

    def __init__(self, nimbus: Nimbus) -> None:
        # Not forgotten with the epoch: its threads still run.
        self._removals: dict[str, Future[None]] = {}
        """Id of a topology -> its removal, which runs or has ended."""
        super().__init__(nimbus)

    def _forget(self) -> None:
        # Times at which topologies with a transition to come were first seen.
        self._nimbus.due = DueMemory()
        self._next_due = boot_clock()
        """Boot clock of the next poll while no transition waits for its time."""

    def _duties(self) -> Iterable[Callable[[OperationsContext], None]]:
        return (self._finish_due,)

    def _finish_due(self, ctx: OperationsContext) -> None:
        """Execute due transitions; while a sensor is armed, only removals and overdue ones.

        The cluster is polled after each verb of this leader, at each tick while a transition waits
        for its time, and every :data:`_DUE_SECS` otherwise.
        """
        armed = self._sensor_absent_secs() < min(_DUE_GRACE_SECS, self._backstop_secs)
        late_secs = self._backstop_secs if armed else 0.0
        now = boot_clock()
        # This comes before the view is loaded: a removal that ends afterwards is still in the view,
        # and is not due.
        self._collect_removals()
        executed = self._nimbus.verb_executed
        if executed.is_set():
            executed.clear()
            # The cache may still lack the change.
            view = ctx.cluster.load_view()
        elif self._nimbus.due.seen or now >= self._next_due:
            view = self._nimbus.shown_view()
        else:
            return
        self._next_due = now + _DUE_SECS
        result = lifecycle.finish_due(
            ctx,
            self._nimbus.due,
            boot_id=self._boot_id,
            boot_now=now,
            view=view,
            late_secs=late_secs,
            start_removal=lambda topology_id, name: self._start_removal(ctx, topology_id, name),
        )
        self._nimbus.due = result.memory
        for action in result.done:
            self._note_due(ctx, action)

    def _collect_removals(self) -> None:
        """Drop removals that have ended, and log failed ones: they are due once more."""
        ended = {key: future for key, future in self._removals.items() if future.done()}
        for topology_id, future in ended.items():
            del self._removals[topology_id]
            duty = f"the removal of {topology_id}"
            error = future.exception()
            if error is None or isinstance(error, NotAlive):
                self._failures.pop(duty, None)
            elif isinstance(error, Exception):
                self._log_failure(duty, error)

    def _start_removal(self, ctx: OperationsContext, topology_id: str, name: str) -> None:
        """Remove the topology in a new thread; later, if too many removals run."""
        if topology_id in self._removals or len(self._removals) >= _MAX_REMOVALS:
            return

        def remove() -> None:
            # A cached view may still show a topology that was removed a moment ago.
            if lifecycle.remove(ctx, topology_id).changed:
                self._note_due(ctx, lifecycle.DoneAction("remove", topology_id, name))

        self._removals[topology_id] = in_thread("nimbus-removal", remove)

    def _note_due(self, ctx: OperationsContext, action: lifecycle.DoneAction) -> None:
        """Note for Dagster an action that was due and has been done."""
        topology_id = action.topology_id
        if action.action == "remove":
            _log.info("removed %s, which was killed", topology_id)
            metadata = {"verb": "kill", "topology_id": topology_id, "status": "gone"}
            text = f"kill: {topology_id} is gone"
            self._nimbus.unreported.add_change(
                ctx, action.name, text, metadata, removed=topology_id
            )
            return
        _log.info("done by the leader, no sensor did it: %s", action.describe())
        text = f"{action.describe()}, done by the leader because no sensor did it"
        self._nimbus.unreported.add(ctx, action.name, text)


class LeaderDuties(LeaderRounds):
    """Upgrades and cleaning."""

    def _forget(self) -> None:
        self._garbage: cleaner.CleanerMemory = {}
        """Times at which garbage and tokens were first seen."""
        self._upgrades: dict[str, float] = {}
        """Times at which upgrades were first seen; :func:`advance_upgrades` updates it."""
        self._next_clean = boot_clock()
        """Boot clock of the next cleaning."""

    def _duties(self) -> Iterable[Callable[[OperationsContext], None]]:
        return self._advance_upgrades, self._clean

    def _advance_upgrades(self, ctx: OperationsContext) -> None:
        """Advance or end gray upgrades, also while a sensor is armed.

        An upgrade that fails must not continue until the sensor's next tick.
        """
        if not upgrades_under_way(self._nimbus.cached):
            return
        for report in advance_upgrades(ctx, self._upgrades, self._nimbus.shown_view()):
            text = f"gray upgrade of {report.topology_id} {report.outcome}: {report.reason}"
            _log.log(logging.WARNING if report.status == "ROLLBACK" else logging.INFO, "%s", text)
            self._nimbus.unreported.add(ctx, report.name, text)

    def _clean(self, ctx: OperationsContext) -> None:
        """Delete garbage at the interval of the conf; earlier if some waits for its grace."""
        if boot_clock() < self._next_clean:
            return
        self._next_clean = boot_clock() + float(self._nimbus.conf["nimbus.cleanup.inbox.freq.secs"])
        report, self._garbage = cleaner.clean(ctx, self._garbage, boot_now=boot_clock())
        if report.nodes or report.blobs or report.tokens:
            _log.info(
                "cleaned %d nodes, %d blobs, %d tokens",
                len(report.nodes),
                len(report.blobs),
                len(report.tokens),
            )
        for problem in report.problems:
            _log.warning("not cleaned: %s", problem)
        if report.waiting:
            # Garbage must be seen twice: the next cleaning follows when its grace has passed.
            self._next_clean = min(self._next_clean, boot_clock() + _GRACE_SECS)


class LeaderHealing(LeaderRounds):
    """Reassignment of dead tasks.

    While no sensor is armed, the leader reassigns them at once. Otherwise it reassigns those that
    no run has healed for the backstop time.

    It runs in a separate thread, so that no slow duty delays it. The reassignment checks each cause
    by ZooKeeper itself, and a cause that a run heals at the same time is void: no task moves twice.
    """

    def _forget(self) -> None:
        # The state begins as after a connection loss: daemons that lost the former leader may be
        # about to reconnect as well.
        self._healing = HealingState(LivenessMemory(boot_id=self._boot_id))
        self._outlook = ReassignmentOutlook()
        """Plans of earlier polls."""
        self._heals_alone = False
        """True while no sensor is armed: then every tick polls, and no run is waited for."""
        self._next_poll = 0.0
        """Boot clock of the next poll while a sensor is armed."""
        self._nimbus.alarm = None
        self._nimbus.paused_causes = ()
        self._pause: SeenPause | None = None
        """Pause by operators that the last round saw."""

    def _cut_off(self) -> None:
        # The time without ZooKeeper must not count as silence of workers.
        self._healing = replace(self._healing, polled_at=UNSET)

    def _duties(self) -> Iterable[Callable[[OperationsContext], None]]:
        return (self._end_pause, self._heal)

    def _end_pause(self, ctx: OperationsContext) -> None:
        """End a pause by operators whose time has passed."""
        if not self._nimbus.cached.exists(paths.HEALING_PAUSE):
            self._pause = None
            return
        pause = ctx.cluster.healing_pause()
        now = boot_clock()
        self._pause = note_pause(pause, self._pause, now)
        if pause is None or self._pause is None:
            return
        if not must_end(pause, self._pause, now, ctx.now_secs() * 1000):
            return
        if resume_healing(ctx, until_ms=pause.until_ms):
            _log.warning("the pause of healing is over: healing continues")
            # Healing must not wait for the next poll.
            self._next_poll = 0.0

    def _heal(self, ctx: OperationsContext) -> None:
        """Poll for dead tasks, and reassign those that no sensor or run heals in time.

        While a sensor is armed, the poll is rarer, and a cause must last for the backstop time. The
        reason of a freeze is set as the nimbus's ``alarm``.
        """
        now = boot_clock()
        absent_secs = self._sensor_absent_secs()
        heals_alone = absent_secs >= self._backstop_secs
        if heals_alone and not self._heals_alone:
            _log.warning(
                "no healing sensor has been armed for %g s: the leader reassigns dead tasks itself",
                absent_secs,
            )
        elif self._heals_alone and not heals_alone:
            _log.info("a healing sensor is armed, the leader leaves healing to it")
        self._heals_alone = heals_alone
        if not heals_alone and now < self._next_poll:
            return
        self._next_poll = now + min(
            float(self._nimbus.conf["nimbus.monitor.freq.secs"]), self._backstop_secs / 4
        )
        patience_secs = 0.0 if heals_alone else self._backstop_secs
        settings = HealingSettings(ctx.limits(), self._boot_id, patience_secs=patience_secs)
        view = self._nimbus.shown_view()
        outlook = self._outlook.poll(view, lambda topology: load_runnable(ctx, topology))
        step = healing_step(view, self._healing, now, settings, outlook=outlook)
        alarm = step.memory.alarm
        if alarm != self._nimbus.alarm:
            self._nimbus.alarm = alarm
            if alarm:
                _log.error("%s", alarm)
        self._healing = step.memory
        self._nimbus.paused_causes = ()
        if step.paused:
            causes = step.observation.causes
            self._nimbus.paused_causes = tuple(cause.describe() for cause in causes)
        if step.next_check is not None:
            # The patience for a cause may end before the next poll.
            self._next_poll = min(self._next_poll, step.next_check)
        if step.attempts:
            causes = [attempt.cause for attempt in step.attempts]
            results = healing.reassign(ctx, causes)
            self._report_reassignments(ctx, results, step.observation.causes)

    def _report_reassignments(
        self, ctx: OperationsContext, results: Iterable[ReassignResult], causes: Iterable[Cause]
    ) -> None:
        """Log every result, and note the successful ones for Dagster.

        ``causes`` describe the keys of causes in the results.
        """
        if self._heals_alone:
            reason = "no healing sensor was armed"
        else:
            reason = f"no run did it for {self._backstop_secs:g} s"
        descriptions = {cause.key: cause.describe() for cause in causes}
        for result in results:
            topology_id = result.topology_id
            cause_text = "; ".join(descriptions.get(key, key) for key in result.causes)
            text = f"reassignment of {topology_id}: {result.status} ({result.error or cause_text})"
            _log.warning("%s", text, extra={"topology": topology_id})
            if result.status != "assigned":
                continue
            text = (
                f"{result.moved} tasks of {topology_id} reassigned by the leader because {reason}: "
                f"{cause_text}"
            )
            for asset in ("assignment", "published_assignment"):
                self._nimbus.unreported.add(ctx, result.name, text, ("storm", asset))
