"""Duties of the leader: due transitions, healing when no sensor is armed, cleaning, reporting.

Dagster's sensors come first. They hold ``/healer``; while it has been there recently the leader leaves both
healing and due transitions to them (``docs/decisions.md#healing-sensor``).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from msgspec.structs import replace

from storm_dagster.core.liveness.causes import Cause
from storm_dagster.core.liveness.memory import LivenessMemory
from storm_dagster.core.liveness.step import HealingSettings, HealingState, healing_step
from storm_dagster.core.transitions import DueMemory
from storm_dagster.model import paths
from storm_dagster.model.clock import boot_clock, boot_id
from storm_dagster.model.errors import Fenced, StormDagsterError, Unavailable
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live import cleaner, healing, lifecycle
from storm_dagster.operations.results import ReassignResult
from storm_dagster.operations.upgrade import advance_upgrades

_log = logging.getLogger(__name__)

_TICK_SECS = 1.0
_DUE_GRACE_SECS = 10.0
"""Seconds without a sensor after which the leader does due transitions itself."""
_REPORT_SECS = 10.0


class LeaderDuties:
    """The duties of one nimbus, in one thread; it does nothing while this nimbus does not lead.

    Everything that it remembers is forgotten when leadership changes: a new leader grants one full timeout
    from its own election, for it has not seen anything yet.
    """

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus
        conf = nimbus.conf
        self._backstop_secs = float(conf["nimbus.monitor.backstop.secs"])
        self._clean_secs = float(conf["nimbus.cleanup.inbox.freq.secs"])
        self._boot_id = boot_id()
        self._epoch: int | None = None
        self._forget(None)

    def _forget(self, epoch: int | None) -> None:
        now = boot_clock()
        self._epoch = epoch
        self._healer_seen = now
        self._armed = False
        self._due = DueMemory()
        self._healing = self._new_healing()
        self._garbage: cleaner.CleanerMemory = {}
        self._next_clean = now
        self._next_report = now
        self._nimbus.alarm = None

    def _new_healing(self) -> HealingState:
        """State of a healer that begins now."""
        now = boot_clock()
        return HealingState(LivenessMemory(boot_id=self._boot_id, since=now), polled_at=now)

    def run(self, stop: threading.Event) -> None:
        """Run until ``stop``."""
        while not stop.wait(_TICK_SECS):
            try:
                self.run_once()
            except Unavailable as error:
                _log.warning("the leader's duties wait: %s", error)
                # What could not be seen for a while must not count as silence.
                self._healing = replace(self._healing, liveness=self._new_healing().liveness)
            except Fenced as error:
                _log.warning("the leader's duties end: %s", error)
                self._nimbus.wake_election()
            except StormDagsterError as error:
                _log.error("a duty of the leader failed: %s", error)
            except Exception:
                _log.exception("a duty of the leader failed")

    def run_once(self) -> None:
        """One round; nothing when this nimbus does not lead."""
        epoch = self._nimbus.status.epoch
        if epoch is None:
            return
        if epoch != self._epoch:
            self._forget(epoch)
        now = boot_clock()
        if self._nimbus.cluster.state.exists(paths.HEALER):
            self._healer_seen = now
        absent = now - self._healer_seen
        ctx = self._nimbus.operations(epoch)
        if absent >= min(_DUE_GRACE_SECS, self._backstop_secs):
            self._finish_due(ctx)
        self._advance_upgrades(ctx)
        self._heal(ctx, absent)
        if now >= self._next_clean:
            self._next_clean = now + self._clean_secs
            self._clean(ctx)
        if now >= self._next_report:
            self._next_report = now + _REPORT_SECS
            self._nimbus.unreported.flush(ctx, self._nimbus.dagster)

    def _finish_due(self, ctx: OperationsContext) -> None:
        result = lifecycle.finish_due(ctx, self._due, boot_id=self._boot_id, boot_now=boot_clock())
        self._due = result.memory
        for done in result.done:
            _log.info("done by the leader, no sensor is armed: %s", done.describe())
            self._nimbus.unreported.add(
                ctx,
                done.name,
                f"{done.describe()}, done by the leader because no sensor was armed",
                gone=done.action == "remove",
            )

    def _advance_upgrades(self, ctx: OperationsContext) -> None:
        """Upgrades end at once, also while a sensor is armed: what fails must not go on until its next tick."""
        if not ctx.cluster.upgrades_under_way():
            return
        for report in advance_upgrades(ctx):
            text = f"gray upgrade of {report.topology_id} {report.outcome}: {report.reason}"
            _log.log(logging.WARNING if report.status == "ROLLBACK" else logging.INFO, "%s", text)
            self._nimbus.unreported.add(ctx, report.name, text)

    def _heal(self, ctx: OperationsContext, absent: float) -> None:
        """Reassign what is dead once the healing sensor has been away for the backstop time."""
        if absent < self._backstop_secs:
            if self._armed:
                _log.info("a healing sensor is armed again, the leader leaves healing to it")
                self._armed = False
                self._nimbus.alarm = None
            return
        if not self._armed:
            self._armed = True
            # The judgment starts now: nothing was watched before.
            self._healing = self._new_healing()
            _log.warning("no healing sensor has been armed for %g s: the leader reassigns dead tasks itself", absent)
        now = boot_clock()
        settings = HealingSettings(ctx.limits(), self._boot_id)
        step = healing_step(ctx.cluster.load_view(), self._healing, now, settings)
        alarm = step.memory.alarm
        if alarm != self._healing.alarm:
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
        words = {cause.key: cause.describe() for cause in causes}
        for report in reports:
            why = "; ".join(words.get(key, key) for key in report.causes)
            _log.warning("reassignment of %s: %s (%s)", report.topology_id, report.status, report.error or why)
            if report.status == "assigned":
                for asset in ("assignment", "published_assignment"):
                    self._nimbus.unreported.add(
                        ctx,
                        report.name,
                        f"{report.moved} tasks of {report.topology_id} reassigned by the leader because no "
                        f"healing sensor was armed: {why}",
                        ("storm", asset),
                    )

    def _clean(self, ctx: OperationsContext) -> None:
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
