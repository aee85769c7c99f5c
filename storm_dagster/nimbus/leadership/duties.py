"""Duties of the leader: due transitions, healing when no sensor is armed, cleaning, reporting.

The leader removes killed topologies. For all else Dagster's sensors come first. They hold
``/healer``; while it has been there recently the leader leaves other due transitions and healing to
them, for as long as a run should take (``docs/decisions.md#healing-sensor``).
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from msgspec import UNSET
from msgspec.structs import replace

from storm_dagster.core.liveness.causes import Cause, LivenessMemory
from storm_dagster.core.liveness.step import HealingSettings, HealingState, healing_step
from storm_dagster.core.transitions import DueMemory
from storm_dagster.host.clock import boot_clock, boot_id
from storm_dagster.host.futures import in_thread
from storm_dagster.model import paths
from storm_dagster.model.errors import Fenced, NotAlive, StormDagsterError, Unavailable
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live import cleaner, healing, lifecycle
from storm_dagster.operations.results import ReassignResult
from storm_dagster.operations.upgrade import advance_upgrades
from storm_dagster.zk.gray_upgrades import upgrades_under_way

_log = logging.getLogger(__name__)

_TICK_SECS = 1.0
_DUE_GRACE_SECS = 10.0
"""Seconds without a sensor after which the leader does due transitions itself."""
_DUE_SECS = 5.0
"""Seconds between two looks for due transitions while none waits for its time."""
_MAX_REMOVALS = 8
_REPORT_SECS = 10.0
"""Seconds between two attempts to report to a Dagster that did not answer."""


class _Rounds(ABC):
    """Rounds of duties in a thread of their own; none while this nimbus does not lead. Each duty
    fails alone.

    Everything that it remembers is forgotten when leadership changes: a new leader grants one full
    timeout from its own election, for it has not seen anything yet.
    """

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus
        self._backstop_secs = float(nimbus.conf["nimbus.monitor.backstop.secs"])
        self._boot_id = boot_id()
        self._epoch: int | None = None
        self._healer_seen = 0.0
        self._failures: dict[str, str] = {}
        self._forget()

    @abstractmethod
    def _forget(self) -> None:
        """Forget everything, as a leader that was just elected."""

    def _cut_off(self) -> None:  # noqa: B027 (most have nothing to note)
        """Note that ZooKeeper could not be seen."""

    @abstractmethod
    def _duties(self) -> Iterable[Callable[[OperationsContext], None]]:
        """What is done in each round, in this order."""

    def run(self, stop: threading.Event) -> None:
        """Run until ``stop``."""
        while not stop.wait(_TICK_SECS):
            self._run_once()

    def _run_once(self) -> None:
        epoch = self._nimbus.status.epoch
        if epoch is None:
            self._cut_off()
            return
        if epoch != self._epoch:
            self._epoch, self._healer_seen = epoch, boot_clock()
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
        """Log a failure when it is a new one: the next round meets the same in a second."""
        text = f"{type(error).__name__}: {error}"
        if self._failures.get(duty) != text:
            self._failures[duty] = text
            known = isinstance(error, StormDagsterError)
            _log.error(
                "a duty of the leader (%s) failed: %s", duty.strip("_"), text, exc_info=not known
            )

    def _sensor_absent(self) -> float:
        """Seconds for which no sensor has been armed."""
        now = boot_clock()
        if self._nimbus.cluster.state.exists(paths.HEALER):
            self._healer_seen = now
        return now - self._healer_seen


class LeaderReports(_Rounds):
    """Reports of what the leader did to Dagster.

    They have a thread of their own: a Dagster that is slow to take them delays no other duty.
    """

    def _forget(self) -> None:
        self._next_report = boot_clock()

    def _duties(self) -> Iterable[Callable[[OperationsContext], None]]:
        return (self._report,)

    def _report(self, ctx: OperationsContext) -> None:
        outbox = self._nimbus.unreported
        outbox.take_noted(ctx)
        if not len(outbox) or boot_clock() < self._next_report:
            return
        outbox.flush(ctx, self._nimbus.dagster)
        if len(outbox):
            self._next_report = boot_clock() + _REPORT_SECS


class LeaderTransitions(_Rounds):
    """Due transitions: removals of killed topologies, delayed rebalances, activations.

    They have a thread of their own, and so has each removal, of which eight run at once: a removal
    waits for workers to end, and for Spark to end the queries of the topology.
    """

    def __init__(self, nimbus: Nimbus) -> None:
        self._removals: dict[str, Future[None]] = {}
        """Id of a topology -> its removal, which runs or has ended."""
        super().__init__(nimbus)

    def _forget(self) -> None:
        self._due = DueMemory()
        self._next_due = boot_clock()

    def _duties(self) -> Iterable[Callable[[OperationsContext], None]]:
        return (self._finish_due,)

    def _finish_due(self, ctx: OperationsContext) -> None:
        armed = self._sensor_absent() < min(_DUE_GRACE_SECS, self._backstop_secs)
        late = self._backstop_secs if armed else 0.0
        now = boot_clock()
        # Before the view is loaded: a removal that ends afterwards is in the view, but not due.
        self._collect_removals()
        executed = self._nimbus.verb_executed
        if executed.is_set():
            executed.clear()
            # Cached reads may not have the change yet.
            view = ctx.cluster.load_view()
        elif self._due.seen or now >= self._next_due:
            view = self._nimbus.shown_view()
        else:
            return
        self._next_due = now + _DUE_SECS
        result = lifecycle.finish_due(
            ctx,
            self._due,
            boot_id=self._boot_id,
            boot_now=now,
            view=view,
            late_secs=late,
            start_removal=lambda topology_id, name: self._start_removal(ctx, topology_id, name),
        )
        self._due = result.memory
        for done in result.done:
            self._note_due(ctx, done)

    def _collect_removals(self) -> None:
        """Forget removals that have ended, and log those that failed: they are due again."""
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
        """Remove the topology in a thread of its own; later, if too many removals run."""
        if topology_id in self._removals or len(self._removals) >= _MAX_REMOVALS:
            return

        def remove() -> None:
            # A cached view may still show a topology that was removed a moment ago.
            if lifecycle.remove(ctx, topology_id).changed:
                self._note_due(ctx, lifecycle.DoneAction("remove", topology_id, name))

        self._removals[topology_id] = in_thread("nimbus-removal", remove)

    def _note_due(self, ctx: OperationsContext, done: lifecycle.DoneAction) -> None:
        """Note for Dagster what was due and is done."""
        if done.action == "remove":
            _log.info("removed %s, which was killed", done.topology_id)
            metadata = {"verb": "kill", "topology_id": done.topology_id, "status": "gone"}
            text = f"kill: {done.topology_id} is gone"
            self._nimbus.unreported.add_change(
                ctx, done.name, text, metadata, removed=done.topology_id
            )
            return
        _log.info("done by the leader, no sensor did it: %s", done.describe())
        text = f"{done.describe()}, done by the leader because no sensor did it"
        self._nimbus.unreported.add(ctx, done.name, text)


class LeaderDuties(_Rounds):
    """Upgrades and cleaning."""

    def _forget(self) -> None:
        self._garbage: cleaner.CleanerMemory = {}
        self._upgrades: dict[str, float] = {}
        self._next_clean = boot_clock()

    def _duties(self) -> Iterable[Callable[[OperationsContext], None]]:
        return self._advance_upgrades, self._clean

    def _advance_upgrades(self, ctx: OperationsContext) -> None:
        """Upgrades end at once, also while a sensor is armed: what fails must not go on until its
        next tick.
        """
        if not upgrades_under_way(self._nimbus.cached):
            return
        for report in advance_upgrades(ctx, self._upgrades, self._nimbus.shown_view()):
            text = f"gray upgrade of {report.topology_id} {report.outcome}: {report.reason}"
            _log.log(logging.WARNING if report.status == "ROLLBACK" else logging.INFO, "%s", text)
            self._nimbus.unreported.add(ctx, report.name, text)

    def _clean(self, ctx: OperationsContext) -> None:
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
            # Garbage must be seen twice: clean again once its grace has passed.
            self._next_clean = min(self._next_clean, boot_clock() + 61.0)


class LeaderHealing(_Rounds):
    """Reassignment of what is dead: at once while no sensor is armed, else what no run healed for
    the backstop time.

    It has a thread of its own, so that no slow duty delays it. A cause is judged again, by
    ZooKeeper itself, when it is acted on, and one that a run heals at the same time is void:
    nothing moves twice.
    """

    def _forget(self) -> None:
        # Known and cut off: who lost the former leader may be about to reconnect as well.
        self._healing = HealingState(LivenessMemory(boot_id=self._boot_id))
        self._alone = False
        self._next_poll = 0.0
        self._nimbus.alarm = None

    def _cut_off(self) -> None:
        # What could not be seen for a while must not count as silence.
        self._healing = replace(self._healing, polled_at=UNSET)

    def _duties(self) -> Iterable[Callable[[OperationsContext], None]]:
        return (self._heal,)

    def _heal(self, ctx: OperationsContext) -> None:
        now, absent = boot_clock(), self._sensor_absent()
        alone = absent >= self._backstop_secs
        if alone and not self._alone:
            _log.warning(
                "no healing sensor has been armed for %g s: the leader reassigns dead tasks itself",
                absent,
            )
        elif self._alone and not alone:
            _log.info("a healing sensor is armed again, the leader leaves healing to it")
        self._alone = alone
        if not alone and now < self._next_poll:
            return
        self._next_poll = now + min(
            float(self._nimbus.conf["nimbus.monitor.freq.secs"]), self._backstop_secs / 4
        )
        settings = HealingSettings(
            ctx.limits(), self._boot_id, patience_secs=0.0 if alone else self._backstop_secs
        )
        step = healing_step(self._nimbus.shown_view(), self._healing, now, settings)
        alarm = step.memory.alarm
        if alarm != self._nimbus.alarm:
            self._nimbus.alarm = alarm
            if alarm:
                _log.error("%s", alarm)
        self._healing = step.memory
        if step.attempts:
            causes = [attempt.cause for attempt in step.attempts]
            self._report_reassignments(ctx, healing.reassign(ctx, causes), step.observation.causes)

    def _report_reassignments(
        self, ctx: OperationsContext, reports: Iterable[ReassignResult], causes: Iterable[Cause]
    ) -> None:
        reason = (
            "no healing sensor was armed"
            if self._alone
            else f"no run did it for {self._backstop_secs:g} s"
        )
        words = {cause.key: cause.describe() for cause in causes}
        for report in reports:
            topology_id, why = (
                report.topology_id,
                "; ".join(words.get(key, key) for key in report.causes),
            )
            text = f"reassignment of {topology_id}: {report.status} ({report.error or why})"
            _log.warning("%s", text, extra={"topology": topology_id})
            if report.status == "assigned":
                text = f"{report.moved} tasks of {topology_id} reassigned by the leader because {reason}: {why}"
                for asset in ("assignment", "published_assignment"):
                    self._nimbus.unreported.add(ctx, report.name, text, ("storm", asset))
