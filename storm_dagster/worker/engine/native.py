"""Engine that runs Python and multilang components on a worker's loop.

``NativeEngine.run`` and ``deliver`` are hot paths; their form is measured by
``benchmarks/dataplane.py``.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import cycle
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from storm_dagster.api.context import TopologyContext
from storm_dagster.api.tuples import Tuple
from storm_dagster.host.resolve import load_plugin
from storm_dagster.model.conf_layers import component_conf
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.names import ACKER, TOPOLOGY_MASTER
from storm_dagster.model.slot import Slot
from storm_dagster.model.topology import ComponentObject, ComponentSpec, TopologySpec
from storm_dagster.model.values import REGISTER_KEY, encode_value, register_classes
from storm_dagster.model.wire import Frame, TaskReport
from storm_dagster.security.spark_remote import ClusterSpark
from storm_dagster.worker.dataplane.routes import (
    LocalLink,
    Placement,
    RemoteLink,
    build_routes,
    by_component,
)
from storm_dagster.worker.dataplane.sending import deliver
from storm_dagster.worker.dataplane.transport import Transport
from storm_dagster.worker.dataplane.tree import LOST, Tree
from storm_dagster.worker.engine.acks import AckExchange
from storm_dagster.worker.engine.creation import (
    close_runners,
    make_runner,
    senders_first,
    tasks_to_reopen,
)
from storm_dagster.worker.engine.pressure import Loads, Pressure
from storm_dagster.worker.engine.reports import task_report
from storm_dagster.worker.engine.system import Acker, TopologyMaster
from storm_dagster.worker.tasks.runner import Runner
from storm_dagster.worker.tasks.shared import Shared
from storm_dagster.worker.tasks.spouts import SpoutBase

_log = logging.getLogger(__name__)

_CLOCK_SECS = 0.1
"""Pause between two checks of ticks and timeouts."""
MAX_WAITING_TUPLES = 10_000
"""Tuples buffered for a task that is assigned here but still open in another worker."""
_SYSTEM = {ACKER: Acker, TOPOLOGY_MASTER: TopologyMaster}
"""System component -> runner of its tasks."""
_SYSTEM_PART = ComponentSpec(
    object=ComponentObject(python="storm_dagster.worker.engine.system:Acker")
)
"""Component of every system task; its object is not used."""


@dataclass(eq=False, kw_only=True)
class NativeEngine:
    """Tasks and tuples of a worker.

    Used only by the loop, which owns process, lease, sockets and clock.
    """

    topology_id: str
    spec: TopologySpec
    conf: Mapping[str, Any]
    shared: Shared
    transport: Transport | None
    """``None`` in the test harness, where one worker has all tasks."""
    slot: Slot
    host: str = "127.0.0.1"
    archive: Path | None = None
    """Folder of the topology's code and files."""
    state_dir: Path | None = None
    """``topology.state.dir``."""
    cluster_spark: ClusterSpark = field(default_factory=ClusterSpark)
    """Servers of Spark Connect in the cluster's conf."""

    def __post_init__(self) -> None:
        conf = self.conf
        shared = self.shared
        transport = self.transport
        register_classes(conf.get(REGISTER_KEY) or (), load_plugin)
        self.placement: Placement | None = None
        self.runners: dict[int, Runner] = {}
        """Task -> its runner, of the tasks that are open here."""
        self.exchange: AckExchange = AckExchange(shared, transport, self.runners)
        self._order: list[Runner] = []
        """The runners, in the order in which a pass runs them."""
        self.master: TopologyMaster | None = None
        """The topology master, if it is here."""
        self._waiting_tuples: dict[int, list[Tuple]] = {}
        """Task that is not open here -> tuples for it."""
        self._next_clock = 0.0
        """Time of the next check of ticks and timeouts."""
        self._starting = False
        """True if a task may have to be started."""
        self._released = False
        """True if spouts may start: every worker was ready once, or the wait timed out."""
        self._release_at = shared.clock() + 10.0
        """End of that wait."""
        self.pressure = Pressure(conf, transport, self.spec)
        self._loads = Loads(conf, transport)
        shared.redirect = self._redirect

    # -- placement ---------------------------------------------------------------------------------

    def place(self, placement: Placement) -> None:
        """Apply a placement.

        Close and open tasks, connect the peers, and rebuild the routes if they changed. Tasks of
        components whose tasks changed are reopened. Then trees with parts in ended workers fail,
        and tuples that waited for a task that is open now are queued.
        """
        previous = self.placement
        self.placement = placement
        self.exchange.placement = placement
        self.shared.storage.home = placement.state
        self.shared.storage.hosts = frozenset(
            address.rpartition(":")[0] for address in placement.addresses.values()
        )
        self.close_tasks(self.runners.keys() - placement.open)
        former = previous.components if previous is not None else {}
        self.close_tasks(
            tasks_to_reopen(self.spec, self.runners, former, placement.components), reopen=True
        )
        must_rewire = self._must_rewire(previous, placement)
        if self.transport is not None:
            peer_slots = {slot for slot in placement.slots.values() if slot != self.slot}
            addresses = {
                slot: address for slot, address in placement.addresses.items() if slot in peer_slots
            }
            unsent = self.transport.set_peers(addresses, placement.tokens.values())
            self.exchange.fail_unsent(unsent)
        for task in sorted(placement.open - self.runners.keys()):
            self._open(task)
        self._on_runners()
        if must_rewire:
            self._rewire()
        self.exchange.on_workers(self.shared.clock())
        if previous is not None:
            # Another process in the same slot has another token.
            ended_slots = [
                slot for token, slot in previous.tokens.items() if token not in placement.tokens
            ]
            self.pressure.forget(ended_slots)
        self._queue_waiting_tuples(placement)
        if self.master is not None:
            self.master.table.follow(placement)
        self._update_spouts(self.shared.clock())

    def _must_rewire(self, previous: Placement | None, placement: Placement) -> bool:
        """True if tasks or addresses have changed, or a task is about to open."""
        if previous is None:
            return True
        places = attrgetter("slots", "components", "open", "addresses")
        is_same = places(previous) == places(placement)
        return not (is_same and placement.open <= self.runners.keys())

    def _queue_waiting_tuples(self, placement: Placement) -> None:
        """Queue the tuples that waited for tasks that are open now.

        Tuples for tasks that are not assigned here fail.
        """
        for task in list(self._waiting_tuples):
            tuples = self._waiting_tuples.pop(task)
            runner = self.runners.get(task)
            if runner is not None:
                runner.queue.extend(tuples)
            elif task in placement.own_tasks:
                self._waiting_tuples[task] = tuples
            else:
                for tup in tuples:
                    self.shared.ledger.fail(tup, LOST)

    def _open(self, task: int) -> None:
        """Create the runner of a task. :meth:`_start_tasks` initializes its component."""
        assert self.placement is not None
        component = self.placement.components[task]
        part = self.spec.component(component) or _SYSTEM_PART
        context = TopologyContext(
            topology_id=self.topology_id,
            spec=self.spec,
            tasks=self.placement.components,
            task_id=task,
            component=component,
            conf=component_conf(self.conf, part.conf),
            host=self.host,
            port=self.slot.port,
            node=self.slot.node,
            archive=self.archive,
            state_dir=self.state_dir,
            owns=self.shared.owns,
            now_ms=self.shared.now_ms,
            assignment_version=self.placement.version,
            open_state=self.shared.storage.open_task_state,
            open_positions=self.shared.storage.open_positions,
            cluster_spark=self.cluster_spark,
        )
        create = _SYSTEM.get(component) or partial(
            make_runner, is_spout=component in self.spec.spouts
        )
        self.runners[task] = create(self.shared, context, part)
        self._starting = True

    def _on_runners(self) -> None:
        """Derive from the runners the lists by their kind."""
        runners = self.runners.values()
        self.exchange.spouts = [runner for runner in runners if isinstance(runner, SpoutBase)]
        self.exchange.ackers = {
            runner.task_id: runner for runner in runners if isinstance(runner, Acker)
        }
        master: TopologyMaster | None = None
        for runner in runners:
            if isinstance(runner, TopologyMaster):
                master = runner
                break
        # Assigned once: ClusterSync's thread reads it.
        self.master = master
        # Bolts first: in one pass, tuples go as far down the topology as possible.
        self._order = sorted(
            runners, key=lambda runner: (isinstance(runner, SpoutBase), runner.task_id)
        )

    def close_tasks(self, tasks: Collection[int], reopen: bool = False) -> None:
        """Close tasks: from then on they do not execute, emit or ack.

        Queued tuples fail, and their spouts replay them. With ``reopen`` the tasks open at once,
        and get the queued tuples that are not tracked, since no spout would replay those.
        """
        closing = [self.runners[task] for task in tasks if task in self.runners]
        for runner in closing:
            _log.info("closing task %d (%s)", runner.task_id, runner.component)
        close_runners(closing, time.monotonic() + self._grace(), retire=True)
        for runner in closing:
            task = runner.task_id
            del self.runners[task]
            self.shared.events.close(task)
            untracked = [tup for tup in runner.queue if reopen and tup._tree is None]
            for tup in runner.queue:
                self.shared.ledger.fail(tup, LOST)
            runner.queue[:] = untracked
            # Tasks here still append to it, until the routes are rebuilt.
            self._waiting_tuples[task] = runner.queue
        self._on_runners()

    def _rewire(self) -> None:
        """Rebuild the routes of all tasks here, and the lists of ackers.

        A task whose routes cannot be built reports that, and does not run.
        """
        placement = self.placement
        assert placement is not None
        tasks_of = by_component(
            {task: name for task, name in placement.components.items() if task in placement.slots}
        )
        ackers = tuple(sorted(tasks_of.get(ACKER, ())))
        self.shared.acker_tasks = ackers
        own_ackers = [index for index, task in enumerate(ackers) if task in self.exchange.ackers]
        self.shared.next_home = cycle(own_ackers).__next__ if own_ackers else None
        for runner in self.runners.values():
            runner.context._tasks = placement.components
            link = self._linker(runner.task_id)
            try:
                routes = build_routes(
                    self.spec, tasks_of, runner.component, runner.task_id, link, runner.context
                )
            except self.shared.catches as error:
                # A custom grouping cannot be created: the task must not run without a route.
                runner.report(error, "groupings")
                runner.wired = False
                continue
            runner.wire(routes)
            if runner.takes_peer_messages:
                peers = set(tasks_of.get(runner.component, ())) - {runner.task_id}
                runner.peers = {task: link(task, "__peers") for task in peers}
            runner.wired = True
        self.pressure.place(placement, self.runners.values())

    def _linker(self, source: int) -> Callable[[int, str], Any]:
        """Function (target task, stream) -> link from the task ``source`` to the target."""
        placement = self.placement
        assert placement is not None
        sender = self.runners.get(source)

        @cache
        def link(target: int, stream: str) -> Any:
            runner = self.runners.get(target)
            slot = placement.slots[target]
            if runner is not None:
                return LocalLink(target, runner.queue.append)
            if slot == self.slot or self.transport is None:
                return LocalLink(target, self._waiting_tuples.setdefault(target, []).append)
            remote = RemoteLink(target, source, stream, self.transport.peers[slot])
            if sender is not None:
                remote.count = sender.stats.count_stream
            return remote

        return link

    def _redirect(self, tup: Tuple, task: int) -> None:
        """Send a tuple on to another task of its component, and ack it here.

        It fails if that task is in no slot.
        """
        self.exchange.misdirected += 1
        ledger = self.shared.ledger
        if self.placement is None or task not in self.placement.slots:
            ledger.fail(tup, LOST)
            return
        link = self._linker(tup.task)(task, tup.stream)
        values: Any = tup.values
        if link.append is None:
            values = msgspec.Raw(encode_value(tup.values))
        deliver(link, tup._tree, ledger, tup.component, tup.stream, tup.task, values)
        ledger.ack(tup)

    # -- frames ------------------------------------------------------------------------------------

    def deliver(self, frame: Frame, size: int = 0) -> None:
        """Queue a peer's tuples, and apply its acks, load and back pressure.

        ``size``: bytes of the frame.
        """
        placement = self.placement
        assert placement is not None
        components = placement.components
        self.pressure.on_frame(frame.groups, size, self.runners)
        # A frame for the former worker of this slot: its trees are replayed. Its untracked tuples
        # are accepted.
        is_late = self.transport is not None and frame.to not in ("", self.transport.token)
        for target, source, stream, bundles in frame.groups:
            if is_late:
                # A bundle is (root, edge, tuples); the root of untracked tuples is 0.
                self.exchange.fail_misdirected([bundle for bundle in bundles if bundle[0]])
                bundles = [bundle for bundle in bundles if not bundle[0]]
            runner = self.runners.get(target)
            if runner is None:
                waiting = None
                if target in placement.own_tasks:
                    waiting = self._waiting_tuples.setdefault(target, [])
                if waiting is None or len(waiting) > MAX_WAITING_TUPLES:
                    self.exchange.fail_misdirected(bundles)
                    continue
                append = waiting.append
            elif runner.kind == "bolt" or runner.takes_peer_messages:
                append = runner.queue.append
            else:
                # No task of this release sends it tuples, and they would stay in its queue.
                self.exchange.fail_misdirected(bundles)
                continue
            component = components.get(source, "")
            for root, edge, tuples in bundles:
                if not root:
                    tree = None
                elif root.__class__ is int:
                    tree = Tree(len(tuples), root, edge)  # type: ignore[arg-type]
                else:
                    pairs = iter(root)  # type: ignore[arg-type]
                    parents = tuple(
                        Tree(1, parent_root, parent_edge)
                        for parent_root, parent_edge in zip(pairs, pairs, strict=True)
                    )
                    tree = Tree(len(tuples), 0, 0, None, parents)
                for values in tuples:
                    append(Tuple(0, component, stream, source, values, tree))
        self.exchange.on_frame(frame)
        if frame.report is not None and self.master is not None:
            self.master.receive(frame.report)
        if frame.loads is not None:
            self._loads.on_report(frame.loads, self.shared.clock())
        if frame.pressure is not None:
            slot = placement.tokens.get(frame.token)
            if slot is not None:
                self.pressure.on_request(slot, frame.pressure, frame.full, frame.away)
                self._update_spouts(self.shared.clock())

    def cannot_travel(self, link: Any, bundle: Any, error: Exception) -> None:
        """Fail a bundle that cannot be encoded (``transport.Broken``).

        The sending task reports the error, if it is here.
        """
        runner = self.runners.get(link.source)
        if runner is None:
            self.exchange.fail_misdirected([bundle], LOST)
            return
        self.exchange.fail_misdirected([bundle], runner.reason_of(error))
        if not isinstance(error, ValueError):
            error = InvalidRequest(f"a value is {error}")
        runner.report(error, f"a tuple on stream {link.stream!r} cannot travel")

    # -- running -----------------------------------------------------------------------------------

    def activate(self, active: bool) -> None:
        """Start or pause spouts.

        Tuples in flight are processed in any case.
        """
        if active == self.shared.active:
            return
        self.shared.active = active
        _log.info("the topology is %s", "active" if active else "inactive")
        for spout in self.exchange.spouts:
            spout.on_active(active)
        self._update_spouts(self.shared.clock())

    def run(self, now: float) -> bool:
        """Run one pass: run bolts and spouts, flush acks, apply back pressure.

        Returns True if there was any work.
        """
        if self._starting:
            self._start_tasks(now)
        if now >= self._next_clock - 1e-6:
            self._on_clock(now)
        worked = False
        shared = self.shared
        clock = time.perf_counter
        begin = clock()
        for runner in self._order:
            shared.at = runner
            if runner.wired and runner.status == "running":
                try:
                    worked = runner.run(now) or worked
                except shared.catches as error:
                    # No component may end the worker, and its other tasks with it.
                    self._crash(runner, error)
                end = clock()
                runner.loop_time.add(end - begin)
                begin = end
                if runner.crashed:
                    worked = self._starting = True
                    runner.attempt("restart", runner.restart)
        shared.at = None
        worked = (shared.events.pending and shared.events.run(now)) or worked
        self._loads.refresh(now, self._order)
        worked = self.exchange.flush(now) or worked
        if self.pressure.update(now, self._order, self._waiting_tuples):
            self._update_spouts(now)
        return worked

    def _crash(self, runner: Runner, error: BaseException) -> None:
        runner.report(error, "the task crashed and restarts")
        runner.crashed = True

    def _start_tasks(self, now: float) -> None:
        """Start the tasks that do not run; each pass repeats that."""
        missing = False
        for runner in self._order:
            self.shared.at = runner
            missing = not runner.start(now) or missing
        self.shared.at = None
        self._starting = missing
        self._update_spouts(now)

    def _on_clock(self, now: float) -> None:
        self._next_clock = now + _CLOCK_SECS
        for runner in self._order:
            begin = time.perf_counter()
            try:
                runner.on_clock(now)
            except self.shared.catches as error:
                self._crash(runner, error)
            runner.loop_time.add(time.perf_counter() - begin)
            runner.stats.snapshot(now)
        self.pressure.expire(now)
        self._update_spouts(now)

    def _update_spouts(self, now: float) -> None:
        """Decide if spouts may emit, and hold or release the tasks under back pressure."""
        shared = self.shared
        if not self._released and self.placement is not None:
            other_slots = set(self.placement.slots.values()) - {self.slot}
            is_ready = all(runner.status == "running" for runner in self._order)
            are_all_ready = is_ready and other_slots <= self.placement.ready
            self._released = are_all_ready or now >= self._release_at
        shared.spouts_run = shared.active and self._released and not shared.closing
        self.pressure.apply(self._order, now)

    def idle_secs(self, now: float) -> float:
        """Return the seconds until the next pass must begin, if no message arrives."""
        secs = max(0.0, self._next_clock - now)
        for runner in self._order:
            runner_secs = runner.idle_secs(now)
            if runner_secs is not None and runner_secs < secs:
                secs = runner_secs
        return secs

    def open_trees(self) -> int:
        """Return the number of pending tuples of the spouts here."""
        return sum(len(spout.pending) for spout in self.exchange.spouts)

    def drained(self) -> bool:
        """True if no tuple is queued or in flight in this worker."""
        waits = any(runner.waiting() or runner.has_pending_acks() for runner in self._order)
        return self.shared.ledger.empty() and not waits

    # -- state -------------------------------------------------------------------------------------

    def statuses(self) -> dict[int, str]:
        """Return task id -> ``starting`` or ``running``."""
        # Also called by ClusterSync's thread: list() copies the items atomically.
        return {
            task: runner.status if runner.wired else "starting"
            for task, runner in list(self.runners.items())
        }

    def stats(self) -> dict[str, TaskReport]:
        """Return state and statistics of all tasks, by task id."""
        now = time.monotonic()
        return {str(task): task_report(runner, now) for task, runner in self.runners.items()}

    def _grace(self) -> float:
        """Seconds for threads to end, before the supervisor kills the worker."""
        return 0.7 * float(self.conf.get("supervisor.worker.shutdown.sleep.secs") or 0)

    def close(self, since: float | None = None) -> None:
        """Close all tasks gracefully, before the supervisor kills the worker.

        ``since``: time at which the supervisor requested the stop. Senders close before receivers,
        and spouts last, since the other tasks may complete their trees. The next
        ``Transport.flush`` sends their last messages.
        """
        shared = self.shared
        shared.closing = True
        self._update_spouts(shared.clock())
        begin = time.monotonic() if since is None else since
        receivers_last = senders_first(
            self.spec, [runner for runner in self._order if runner.kind != "spout"]
        )
        close_runners(receivers_last, begin + 0.8 * self._grace(), retire=False)
        self.exchange.flush(shared.clock())
        for spout in self.exchange.spouts:
            spout.attempt("close", lambda spout=spout: spout.run(shared.clock()))
        close_runners(self.exchange.spouts, begin + self._grace(), retire=False)
        self.exchange.flush(shared.clock())
        shared.events.drop()
        self.runners.clear()
        self._on_runners()
