"""The engine of this project: Python components and multilang programs, on the worker's loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from storm_dagster.api.context import TopologyContext
from storm_dagster.api.tuples import Tuple
from storm_dagster.core.acking import Verdicts
from storm_dagster.model.names import ACKER, TOPOLOGY_MASTER
from storm_dagster.model.topology import ComponentObject, ComponentSpec, TopologySpec
from storm_dagster.model.wire import Frame, TaskReport
from storm_dagster.worker.contract import Placement
from storm_dagster.worker.routes import LocalLink, RemoteLink, build_routes
from storm_dagster.worker.runner import Runner, Shared
from storm_dagster.worker.runners import make_runner
from storm_dagster.worker.spouts import SpoutBase
from storm_dagster.worker.system import Acker, TopologyMaster
from storm_dagster.worker.transport import Transport
from storm_dagster.worker.tree import Tree, next_tuple_id

__all__ = ["NativeEngine"]

_log = logging.getLogger(__name__)

_CLOCK_SECS = 0.1
"""Pause between two looks at ticks and timeouts."""
_PRESSURE_REPEAT_SECS = 1.0
_PRESSURE_VALID_SECS = 4.0
"""Back pressure that a peer does not repeat is over: the peer may have died."""
_BACKLOG_SECS = 1.0
"""Work waiting for one task, in seconds, that stops the spouts: long before tuples time out in a queue."""
_FEW_TUPLES = 16
_MOST_HELD = 10_000
"""Tuples kept for a task that is assigned here but still open elsewhere."""
_SYSTEM_PART = ComponentSpec(object=ComponentObject(python="storm_dagster.worker.system:Acker"))


class NativeEngine:
    """See :class:`storm_dagster.worker.contract.Engine`."""

    def __init__(
        self,
        *,
        topology_id: str,
        spec: TopologySpec,
        conf: Mapping[str, Any],
        shared: Shared,
        transport: Transport | None,
        slot: tuple[str, int],
        host: str = "127.0.0.1",
        archive: Path | None = None,
        state_dir: Path | None = None,
    ) -> None:
        self.topology_id = topology_id
        self.spec = spec
        self.conf = conf
        self.shared = shared
        self.transport = transport
        self.slot = slot
        self.host = host
        self.archive = archive
        self.state_dir = state_dir
        self.placement: Placement | None = None
        self.runners: dict[int, Runner] = {}
        self.misdirected = 0
        """Tuples that came for tasks which are not here; they were failed at once."""
        self._order: list[Runner] = []
        self._spouts: list[SpoutBase] = []
        self._ackers: dict[int, Acker] = {}
        self.master: TopologyMaster | None = None
        self._held: dict[int, list[Tuple]] = {}
        self._next_clock = 0.0
        self._starting = False
        self._released = False
        """Whether spouts may start: every worker was ready once, or the wait was over."""
        self._release_at = time.monotonic() + 10.0
        self._pressed: dict[tuple[str, int], float] = {}
        self._own_pressure = False
        self._pressure_sent = 0.0
        self._high = max(2, int(conf.get("topology.executor.queue.size") or 32768) // 2)
        self._use_pressure = conf.get("topology.backpressure.enable") is not False

    # -- placement --------------------------------------------------------------------------------------

    def place(self, placement: Placement) -> None:
        """See the contract."""
        previous, self.placement = self.placement, placement
        self.close_tasks(self.runners.keys() - placement.open)
        same_places = (
            previous is not None
            and previous.slots == placement.slots
            and previous.components == placement.components
            and previous.open == placement.open
            and previous.addresses == placement.addresses
        )
        if self.transport is not None:
            used = {slot for slot in placement.slots.values() if slot != self.slot}
            self.transport.set_peers(
                {slot: address for slot, address in placement.addresses.items() if slot in used},
                placement.tokens.values(),
            )
        for task in sorted(placement.open - self.runners.keys()):
            self._open(task)
        if not same_places:
            self._rewire()
        for task in list(self._held):
            held = self._held.pop(task)
            runner = self.runners.get(task)
            if runner is not None:
                runner.queue.extend(held)
            elif task in placement.mine:
                self._held[task] = held
            else:
                for tup in held:
                    self.shared.ledger.reject(tup)
        if self.master is not None:
            self.master.table.keep_only(f"{node}:{port}" for node, port in set(placement.slots.values()))
        self._update_spouts(time.monotonic())

    def _component_conf(self, part: ComponentSpec) -> dict[str, Any]:
        return {**self.conf, **part.conf}

    def _open(self, task: int) -> None:
        assert self.placement is not None
        component = self.placement.components[task]
        part = self.spec.component(component) or _SYSTEM_PART
        context = TopologyContext(
            topology_id=self.topology_id,
            spec=self.spec,
            tasks=self.placement.components,
            task_id=task,
            component=component,
            conf=self._component_conf(part),
            host=self.host,
            port=self.slot[1],
            node=self.slot[0],
            archive=self.archive,
            state_dir=self.state_dir,
            owns=self.shared.owns,
        )
        runner: Runner
        if component == ACKER:
            runner = self._ackers[task] = Acker(self.shared, context, part)
        elif component == TOPOLOGY_MASTER:
            runner = self.master = TopologyMaster(self.shared, context, part)
        else:
            runner = make_runner(self.shared, context, part, is_spout=component in self.spec.spouts)
        self.runners[task] = runner
        self._starting = True
        if isinstance(runner, SpoutBase):
            self._spouts.append(runner)
        # Bolts come first: in one pass of the loop tuples go as far down the topology as they can.
        self._order = sorted(self.runners.values(), key=lambda one: (isinstance(one, SpoutBase), one.task_id))

    def close_tasks(self, tasks: Collection[int]) -> None:
        """See the contract. Tuples that wait for a closed task are failed: their spouts send them again."""
        for task in list(tasks):
            runner = self.runners.pop(task, None)
            if runner is None:
                continue
            _log.info("closing task %d (%s)", task, runner.component)
            runner.close()
            for tup in runner.queue:
                self.shared.ledger.reject(tup)
            runner.queue.clear()
            self._order.remove(runner)
            if isinstance(runner, SpoutBase):
                self._spouts.remove(runner)
            self._ackers.pop(task, None)
            if runner is self.master:
                self.master = None

    def _rewire(self) -> None:
        placement = self.placement
        assert placement is not None
        tasks_of: dict[str, list[int]] = {}
        for task, component in placement.components.items():
            if task in placement.slots:
                tasks_of.setdefault(component, []).append(task)
        ackers = tuple(sorted(tasks_of.get(ACKER, ())))
        self.shared.acker_tasks = ackers
        self.shared.home_ackers = tuple(index for index, task in enumerate(ackers) if task in self._ackers)
        for runner in self.runners.values():
            runner.context._tasks = placement.components
            links: dict[tuple[int, str], Any] = {}
            try:
                routes = build_routes(
                    self.spec,
                    tasks_of,
                    runner.component,
                    runner.task_id,
                    self._linker(runner.task_id, links),
                    runner.context,
                )
            except Exception as error:
                # A custom grouping that cannot be made: the task must not run half wired.
                runner.report(error, "groupings")
                runner.status = "starting"
                continue
            runner.wire(routes)

    def _linker(self, source: int, links: dict[tuple[int, str], Any]) -> Callable[[int, str], Any]:
        placement = self.placement
        assert placement is not None

        def link(target: int, stream: str) -> Any:
            found = links.get((target, stream))
            if found is None:
                runner = self.runners.get(target)
                slot = placement.slots[target]
                if runner is not None:
                    found = LocalLink(target, runner.queue.append)
                elif slot == self.slot or self.transport is None:
                    found = LocalLink(target, self._held.setdefault(target, []).append)
                else:
                    found = RemoteLink(target, source, stream, self.transport.peers[slot])
                links[(target, stream)] = found
            return found

        return link

    # -- frames -----------------------------------------------------------------------------------------

    def deliver(self, frame: Frame) -> None:
        """See the contract."""
        placement = self.placement
        assert placement is not None
        components = placement.components
        for target, source, stream, bundles in frame.groups:
            runner = self.runners.get(target)
            if runner is None:
                held = self._held.setdefault(target, []) if target in placement.mine else None
                if held is None or len(held) > _MOST_HELD:
                    self._refuse(bundles)
                    continue
                append = held.append
            else:
                append = runner.queue.append
            component = components.get(source, "")
            for root, edge, many in bundles:
                if not root:
                    tree = None
                elif root.__class__ is int:
                    tree = Tree(len(many), root, edge)  # type: ignore[arg-type]
                else:
                    pairs = iter(root)  # type: ignore[arg-type]
                    parents = tuple(Tree(1, one, number) for one, number in zip(pairs, pairs, strict=True))
                    tree = Tree(len(many), 0, 0, None, parents)
                for values in many:
                    append(Tuple(next_tuple_id(), component, stream, source, values, tree))
        if frame.acks or frame.inits or frame.fails:
            self._take_acker_news(frame)
        for task, roots in frame.acked:
            runner = self.runners.get(task)
            if isinstance(runner, SpoutBase):
                runner.acked.extend(roots)
        for task, roots in frame.failed:
            self._tell_failed(task, roots)
        if frame.report is not None and self.master is not None:
            self.master.receive(frame.report)
        if frame.pressure is not None:
            slot = placement.tokens.get(frame.token)
            if slot is not None:
                if frame.pressure:
                    self._pressed[slot] = time.monotonic() + _PRESSURE_VALID_SECS
                else:
                    self._pressed.pop(slot, None)
                self._update_spouts(time.monotonic())

    def _refuse(self, bundles: Any) -> None:
        for root, _, many in bundles:
            self.misdirected += len(many)
            if root.__class__ is int:
                if root:
                    self.shared.ledger.fails.append(root)
            else:
                self.shared.ledger.fails.extend(root[::2])

    def _take_acker_news(self, frame: Frame) -> None:
        verdicts = Verdicts()
        now = time.monotonic()
        for task, flat in frame.inits:
            if task in self._ackers:
                parts = iter(flat)
                self._ackers[task].table.apply(
                    now, inits=zip(parts, parts, parts, strict=True), into=verdicts
                )
        for task, flat in frame.acks:
            if task in self._ackers:
                parts = iter(flat)
                self._ackers[task].table.apply(now, acks=zip(parts, parts, strict=True), into=verdicts)
        for task, flat in frame.fails:
            if task in self._ackers:
                self._ackers[task].table.apply(now, fails=flat, into=verdicts)
        self._hand_out(verdicts)

    def _hand_out(self, verdicts: Verdicts) -> None:
        placement = self.placement
        assert placement is not None
        for task, roots in verdicts.acked.items():
            runner = self.runners.get(task)
            if isinstance(runner, SpoutBase):
                runner.acked.extend(roots)
            else:
                peer = self._peer_of(task)
                if peer is not None:
                    peer.acked.setdefault(task, []).extend(roots)
        for task, roots in verdicts.failed.items():
            if task in self.runners:
                self._tell_failed(task, roots)
            else:
                peer = self._peer_of(task)
                if peer is not None:
                    peer.failed.setdefault(task, []).extend(roots)
        if verdicts.homeless:
            self._tell_failed(0, verdicts.homeless)
            if self.transport is not None:
                for peer in self.transport.peers.values():
                    peer.failed.setdefault(0, []).extend(verdicts.homeless)

    def _peer_of(self, task: int) -> Any:
        assert self.placement is not None
        slot = self.placement.slots.get(task)
        return self.transport.peers.get(slot) if self.transport is not None and slot is not None else None

    def _tell_failed(self, task: int, roots: list[int]) -> None:
        for runner in self._spouts:
            if task in (0, runner.task_id):
                entries = runner.pending.entries
                runner.failed.extend(root for root in roots if root in entries)

    def flush_ledger(self, now: float) -> bool:
        """Hand what the pass owes to the ackers over; whether spouts of this worker got verdicts from it."""
        ledger, ackers = self.shared.ledger, self.shared.acker_tasks
        if ledger.empty():
            return False
        acks, ledger.acks = ledger.acks, {}
        inits, ledger.inits = ledger.inits, []
        fails, ledger.fails = ledger.fails, []
        count = len(ackers)
        if not count:
            # No ackers any more: whoever waits is told by the timeout.
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
        verdicts = Verdicts()
        for index, task in enumerate(ackers):
            flat_acks, flat_inits, flat_fails = ack_lists[index], init_lists[index], fail_lists[index]
            local = self._ackers.get(task)
            if local is not None:
                triples, pairs = iter(flat_inits), iter(flat_acks)
                local.table.apply(
                    now,
                    zip(triples, triples, triples, strict=True),
                    zip(pairs, pairs, strict=True),
                    flat_fails,
                    verdicts,
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
        self._hand_out(verdicts)
        return bool(verdicts.acked or verdicts.failed or verdicts.homeless)

    def cannot_travel(self, link: Any, bundle: Any, error: Exception) -> None:
        """A bundle could not be encoded: its tuples fail, and the sender's task gets the error."""
        root, _, many = bundle
        self._refuse([(root, 0, many)])
        runner = self.runners.get(link.source)
        if runner is not None:
            runner.report(error, f"a tuple on stream {link.stream!r} cannot travel to another worker")

    # -- running ----------------------------------------------------------------------------------------

    def activate(self, active: bool) -> None:
        """See the contract."""
        if active == self.shared.active:
            return
        self.shared.active = active
        _log.info("the topology is %s", "active" if active else "inactive")
        for spout in self._spouts:
            (spout.activate if active else spout.deactivate)()
        self._update_spouts(time.monotonic())

    def run(self, now: float) -> bool:
        """See the contract."""
        if self._starting:
            self._start_tasks(now)
        if now >= self._next_clock:
            self._look_at_clock(now)
        worked = False
        for runner in self._order:
            if runner.status == "running" and runner.run(now):
                worked = True
        if self.flush_ledger(now):
            worked = True
        if self._use_pressure:
            self._watch_pressure(now)
        return worked

    def _start_tasks(self, now: float) -> None:
        missing = [runner for runner in self._order if not runner.start(now)]
        self._starting = bool(missing)
        self._update_spouts(now)

    def _look_at_clock(self, now: float) -> None:
        self._next_clock = now + _CLOCK_SECS
        for runner in self._order:
            runner.look_at_clock(now)
            runner.stats.snapshot(now)
        if self._pressed:
            self._pressed = {slot: until for slot, until in self._pressed.items() if until > now}
        self._update_spouts(now)

    def _update_spouts(self, now: float) -> None:
        shared = self.shared
        if not self._released and self.placement is not None:
            slots = set(self.placement.slots.values()) - {self.slot}
            mine_ready = all(runner.status == "running" for runner in self._order)
            self._released = (mine_ready and slots <= self.placement.ready) or now >= self._release_at
        shared.spouts_run = (
            shared.active
            and self._released
            and not self._own_pressure
            and not self._pressed
            and not shared.closing
        )

    def _watch_pressure(self, now: float) -> None:
        # Between the two marks the state stays, so that it does not flutter.
        share = 0.5 if self._own_pressure else 1.0
        mark, secs = self._high * share, _BACKLOG_SECS * share
        full = any(
            (waiting := runner.waiting()) > mark or (waiting > _FEW_TUPLES and runner.backlog_secs() > secs)
            for runner in self._order
        )
        transport = self.transport
        pressure = full or (transport is not None and transport.busy())
        changed = pressure != self._own_pressure
        if changed:
            self._own_pressure = pressure
            self._update_spouts(now)
        if transport is not None and (
            changed or (pressure and now - self._pressure_sent > _PRESSURE_REPEAT_SECS)
        ):
            self._pressure_sent = now
            for peer in transport.peers.values():
                peer.pressure = pressure

    def idle_secs(self, now: float) -> float | None:
        """See the contract."""
        least = max(0.0, self._next_clock - now)
        for runner in self._order:
            secs = runner.idle_secs(now)
            if secs is not None and secs < least:
                least = secs
        return least

    def drained(self) -> bool:
        """See the contract."""
        return self.shared.ledger.empty() and not any(runner.waiting() for runner in self._order)

    # -- looking ----------------------------------------------------------------------------------------

    def statuses(self) -> dict[int, str]:
        """See the contract."""
        # The keeper's thread asks too: list() takes the items in one step.
        return {task: runner.status for task, runner in list(self.runners.items())}

    def stats(self) -> dict[str, TaskReport]:
        """See the contract."""
        now = time.monotonic()
        return {
            str(task): TaskReport(
                status=runner.status,
                component=runner.component,
                uptime_secs=runner.uptime(),
                stats=runner.stats.all_time(),
                windows=runner.stats.windows(now),
                streams=runner.stats.by_stream(),
                errors=runner.stats.errors,
                metrics=runner.stats.metrics,
            )
            for task, runner in self.runners.items()
        }

    def close(self) -> None:
        """See the contract."""
        self.shared.closing = True
        self._update_spouts(time.monotonic())
        for runner in list(self._order):
            runner.close()
        self.runners.clear()
        self._order.clear()
        self._spouts.clear()
        self._ackers.clear()
