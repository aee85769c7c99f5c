"""Exchange of acks, fails and their results between tasks, ackers and spouts of all workers."""

from __future__ import annotations

from typing import Any

from storm_dagster.core.acking import AckerResult
from storm_dagster.model.wire import Frame
from storm_dagster.worker.dataplane.placement import Placement
from storm_dagster.worker.dataplane.transport import Transport
from storm_dagster.worker.engine.system import Acker
from storm_dagster.worker.tasks.runner import Runner, Shared
from storm_dagster.worker.tasks.spouts import SpoutBase


class AckExchange:
    """Routes acks to ackers and results to spouts: directly in this worker, to others in the next frame."""

    def __init__(self, shared: Shared, transport: Transport | None, runners: dict[int, Runner]) -> None:
        self._shared = shared
        self._transport = transport
        self.runners = runners
        """The engine's own map; the engine changes it."""
        self.ackers: dict[int, Acker] = {}
        self.spouts: list[SpoutBase] = []
        self.placement: Placement | None = None
        self.misdirected: int = 0
        """Tuples received for tasks that are not here; they failed at once."""

    def fail_misdirected(self, bundles: Any) -> None:
        """Fail the trees of tuples received for a task that is not here."""
        for root, _, many in bundles:
            self.misdirected += len(many)
            if root.__class__ is int:
                if root:
                    self._shared.ledger.fails.append(root)
            else:
                self._shared.ledger.fails.extend(root[::2])

    def on_frame(self, frame: Frame) -> None:
        """Apply a peer's acks to the ackers here, and its results to the spouts here."""
        for task, roots in frame.acked:
            runner = self.runners.get(task)
            if isinstance(runner, SpoutBase):
                runner.acked.extend(roots)
        for task, roots in frame.failed:
            self.notify_failed(task, roots)
        if not (frame.acks or frame.inits or frame.fails):
            return
        result = AckerResult()
        now = self._shared.clock()
        for task, flat in frame.inits:
            if task in self.ackers:
                parts = iter(flat)
                self.ackers[task].table.apply(now, inits=zip(parts, parts, parts, strict=True), into=result)
        for task, flat in frame.acks:
            if task in self.ackers:
                parts = iter(flat)
                self.ackers[task].table.apply(now, acks=zip(parts, parts, strict=True), into=result)
        for task, flat in frame.fails:
            if task in self.ackers:
                self.ackers[task].table.apply(now, fails=flat, into=result)
        self.deliver_results(result)

    def deliver_results(self, result: AckerResult) -> None:
        """Notify spouts, here and in other workers."""
        placement = self.placement
        assert placement is not None
        for task, roots in result.acked.items():
            runner = self.runners.get(task)
            if isinstance(runner, SpoutBase):
                runner.acked.extend(roots)
            else:
                peer = self._peer_of(task)
                if peer is not None:
                    peer.acked.setdefault(task, []).extend(roots)
        for task, roots in result.failed.items():
            if task in self.runners:
                self.notify_failed(task, roots)
            else:
                peer = self._peer_of(task)
                if peer is not None:
                    peer.failed.setdefault(task, []).extend(roots)
        if result.unrouted:
            self.notify_failed(0, result.unrouted)
            if self._transport is not None:
                for peer in self._transport.peers.values():
                    peer.failed.setdefault(0, []).extend(result.unrouted)

    def _peer_of(self, task: int) -> Any:
        assert self.placement is not None
        slot = self.placement.slots.get(task)
        return self._transport.peers.get(slot) if self._transport is not None and slot is not None else None

    def notify_failed(self, task: int, roots: list[int]) -> None:
        """Fail trees of a spout task (0: of any)."""
        for runner in self.spouts:
            if task in (0, runner.task_id):
                entries = runner.pending.entries
                runner.failed.extend(root for root in roots if root in entries)

    def flush(self, now: float) -> bool:
        """Send the acks of this pass to the ackers. Whether spouts of this worker got results from it."""
        ledger, ackers = self._shared.ledger, self._shared.acker_tasks
        if ledger.empty():
            return False
        acks, ledger.acks = ledger.acks, {}
        inits, ledger.inits = ledger.inits, []
        fails, ledger.fails = ledger.fails, []
        count = len(ackers)
        if not count:
            # No ackers any more: pending tuples time out.
            return False
        ack_lists: list[list[int]] = [[] for _ in ackers]
        for root, value in acks.items():
            ack_lists[root % count] += (root, value)
        init_lists: list[list[int]] = [[] for _ in ackers]
        for root, value, task in inits:
            init_lists[root % count] += (root, value, task)
        fail_lists: list[list[int]] = [[] for _ in ackers]
        for root in fails:
            fail_lists[root % count].append(root)
        result = AckerResult()
        for index, task in enumerate(ackers):
            flat_acks, flat_inits, flat_fails = ack_lists[index], init_lists[index], fail_lists[index]
            local = self.ackers.get(task)
            if local is not None:
                triples, pairs = iter(flat_inits), iter(flat_acks)
                local.table.apply(
                    now,
                    zip(triples, triples, triples, strict=True),
                    zip(pairs, pairs, strict=True),
                    flat_fails,
                    result,
                )
                continue
            peer = self._peer_of(task)
            if peer is None:
                continue
            if flat_acks:
                peer.acks.setdefault(task, []).extend(flat_acks)
            if flat_inits:
                peer.inits.setdefault(task, []).extend(flat_inits)
            if flat_fails:
                peer.fails.setdefault(task, []).extend(flat_fails)
        self.deliver_results(result)
        return bool(result.acked or result.failed or result.unrouted)
