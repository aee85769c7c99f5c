"""System tasks of a topology: ackers and the topology master."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from storm_dagster.api.context import TopologyContext
from storm_dagster.core.acking import AckerResult, AckTracker
from storm_dagster.model.topology import ComponentSpec
from storm_dagster.worker.dataplane.routes import Route
from storm_dagster.worker.engine.master import ListeningClock, TopologyMasterTable
from storm_dagster.worker.tasks.runner import Runner, Shared


class Acker(Runner):
    """One ``__acker`` task. Its messages are batched beside tuples; see ``Frame`` and ``Ledger``."""

    kind = "system"

    def __init__(self, shared: Shared, context: TopologyContext, part: ComponentSpec) -> None:
        super().__init__(shared, context, part)
        # Twice the timeout: the spout's own clock decides, and it may have started later.
        self.table_timeout = 2 * float(self.conf.get("topology.message.timeout.secs") or 30)
        """Seconds after which an incomplete tree is dropped."""
        self.table = AckTracker(self.table_timeout)
        self.sent = Route("__ack_ack", ("id",))
        self.tick_secs = None
        self._expire_at = 0.0

    def wire(self, routes: dict[str, Route]) -> None:
        """Count sent messages as one stream; an acker has no routes."""
        self.routes["__ack_ack"] = self.sent

    def apply(
        self,
        now: float,
        into: AckerResult,
        inits: Sequence[int] = (),
        acks: Sequence[int] = (),
        fails: Sequence[int] = (),
    ) -> None:
        """As :meth:`AckTracker.apply`, of flat lists, as frames have them."""
        triples, pairs = iter(inits), iter(acks)
        self.table.apply(now, zip(triples, triples, triples, strict=True), zip(pairs, pairs, strict=True), fails, into)

    def on_clock(self, now: float) -> None:
        """Drop trees that have timed out."""
        if now >= self._expire_at:
            self.table.expire(now)
            self._expire_at = now + max(1.0, self.table_timeout / 20)
        self.stats.executed = self.stats.acked = self.table.updates


class TopologyMaster(Runner):
    """The ``__topology_master`` task: collects the reports of all workers, which ``ClusterSync`` writes to
    ``/taskbeats/<id>``."""

    kind = "system"

    def __init__(self, shared: Shared, context: TopologyContext, part: ComponentSpec) -> None:
        super().__init__(shared, context, part)
        self.tick_secs = None
        self.table = TopologyMasterTable(context.topology_id, self.task_id)
        self.listening = ListeningClock()

    def receive(self, report: Any) -> None:
        """Store a worker's report."""
        self.stats.executed += 1
        self.stats.acked += 1
        self.table.receive(report, self.listening.now)
