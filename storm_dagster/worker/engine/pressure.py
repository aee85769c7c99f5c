"""Loads for load-aware shuffling, and back pressure.

Both come from the queues of all tasks. Queues are those of this worker and of other workers. Full
queues hold the bolts that send to them, and the spouts that their tuples come from.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sized
from typing import Any, NamedTuple

from storm_dagster.model.slot import Slot
from storm_dagster.model.topology import TopologySpec, reachable
from storm_dagster.model.wire import Group
from storm_dagster.worker.dataplane.routes import Placement
from storm_dagster.worker.dataplane.transport import Transport
from storm_dagster.worker.tasks.runner import MAX_QUOTA, Runner

_REPEAT_SECS = 1.0
"""Interval in which a request to the peers is repeated, while it holds."""
_VALID_SECS = 4.0
"""A request or load expires unless the peer repeats it: it may have died, or the task moved."""
_BACKLOG_SECS = 1.0
"""Queued work of one task, in seconds, that makes it full. It is far below the tuple timeout."""
_FEW_TUPLES = 16
"""Tuples that never make a queue full by their work: a slow bolt may have a few."""
_QUEUE_BYTES = 64 * 1024 * 1024
"""Bytes in one queue that make it full; only tuples of other workers count."""
_LARGE_BYTES = 2048
"""Size from which the bytes of a tuple may fill a queue before the number of tuples does."""
_REFRESH_SECS = 1.0
"""Interval between two measurements of loads."""
_MIN_REPORTED_LOAD = 0.05
"""Load, as in :class:`Loads`, up to which a task counts as idle."""
_NONE = ""
"""Stands for no component in the list of full ones, for peers of the release before, too."""
_ALL = "*"
"""All components, from a peer of an earlier release, which does not name components."""


class _Request(NamedTuple):
    """Back pressure that a peer has requested."""

    expiry: float
    full: frozenset[str]
    """Its full components."""
    away: frozenset[str]
    """Components that wait for an external system."""


class Pressure:
    """Full components, and the tasks here that wait for them.

    Components are full in this worker or in its peers. A component is full if one of its tasks is.
    A spout waits while any component downstream is full, a bolt while a direct reader is. In a
    cycle all could wait for each other, so there a bolt still has small turns
    (:meth:`Runner.may_begin`).
    """

    def __init__(
        self, conf: Mapping[str, Any], transport: Transport | None, spec: TopologySpec
    ) -> None:
        self._transport = transport
        self._enabled = conf.get("topology.backpressure.enable") is not False
        self._high = max(2, int(conf.get("topology.executor.queue.size") or 32768) // 2)
        """Tuples in a queue above which it is full."""
        self.own: frozenset[str] = frozenset()
        """Full components of this worker."""
        self.own_away: frozenset[str] = frozenset()
        """Components of this worker that wait for an external system: full ones, and those that
        take tuples while events of former ones wait.
        """
        self._fed: dict[Slot, set[str]] = {}
        """Slot -> components there that this worker sends to. All of them are full while that
        worker does not receive.
        """
        self._components: Mapping[int, str] = {}
        """Task -> component, of the whole topology."""
        self._large = False
        """True if a large tuple has come from a peer."""
        self._sent = 0.0
        """Time of the last request to the peers."""
        self._applied = 0.0
        """Time of the last :meth:`apply`."""
        self._requests: dict[Slot, _Request] = {}
        """Slot of a peer -> its back pressure."""
        self._readers: dict[str, set[str]] = {name: set() for name, _, _ in spec.components()}
        """Component -> the components that read its streams."""
        for reader, _, part in spec.components():
            for item in part.inputs:
                self._readers.setdefault(item.component, set()).add(reader)
        self._downstream = {name: reachable(name, self._readers) for name in self._readers}
        """Component -> all components that its tuples reach."""

    def on_request(
        self,
        slot: Slot,
        wait: bool,
        full: Iterable[str] | None,
        away: Iterable[str] | None = None,
    ) -> None:
        """Start or end the back pressure of a peer (``wait``).

        ``full``: its full components; ``None``: it does not name them, and all tasks wait.
        ``away``: those that wait for an external system.
        """
        if wait:
            expiry = time.monotonic() + _VALID_SECS
            self._requests[slot] = _Request(
                expiry, frozenset(full or (_ALL,)), frozenset(away or ())
            )
        else:
            self._requests.pop(slot, None)

    def forget(self, slots: Iterable[Slot]) -> None:
        """End the back pressure of lost workers.

        A worker that was killed under load cannot end it.
        """
        for slot in slots:
            self._requests.pop(slot, None)

    def expire(self, now: float) -> None:
        """Drop requests that were not repeated."""
        if self._requests:
            self._requests = {
                slot: request for slot, request in self._requests.items() if request.expiry > now
            }

    def place(self, placement: Placement, runners: Collection[Runner]) -> None:
        """Set the quota of each task here: the tuples that it may emit in one turn.

        It is half a queue, divided by the tasks here that send to it. Also note which components of
        other workers the tasks here send to.
        """
        senders: Counter[str] = Counter()
        for runner in runners:
            senders.update(self._readers.get(runner.component, ()))
        for runner in runners:
            readers = self._readers.get(runner.component, ())
            max_senders = max((senders[reader] for reader in readers), default=0)
            runner.quota = MAX_QUOTA
            if max_senders and self._enabled:
                runner.quota = min(MAX_QUOTA, max(1, self._high // max_senders))
        self._components = placement.components
        self._fed = {slot: set() for slot in placement.slots.values()}
        for task, slot in placement.slots.items():
            if placement.components.get(task) in senders:
                self._fed[slot].add(placement.components[task])

    def apply(self, runners: Iterable[Runner], now: float = 0.0) -> None:
        """Hold or release all tasks from ``now`` on.

        Sets ``held``, ``in_cycle``, ``awaits_target`` and ``results.delayed`` of the tasks. The
        time for which they were held before is counted.
        """
        requests = self._requests.values()
        full = self.own.union(*(request.full for request in requests))
        away = self.own_away.union(*(request.away for request in requests))
        passed = now - self._applied
        self._applied = now
        for runner in runners:
            if runner.held:
                runner.held_secs += passed
            component = runner.component
            if runner.kind == "system":
                # An acker has trees of all spouts.
                runner.awaits_target = bool(away)
            else:
                runner.awaits_target = not away.isdisjoint(self._downstream.get(component, ()))
            if runner.results is not None:
                downstream_sets = [
                    names for names in self._downstream.values() if component in names
                ]
                is_any_full = not all(map(full.isdisjoint, downstream_sets))
                runner.results.delayed = _ALL in full or is_any_full
            if runner.kind == "spout":
                runner.held = _ALL in full or not full.isdisjoint(
                    self._downstream.get(component, ())
                )
                continue
            ahead = full.intersection(self._readers.get(component, ()))
            runner.in_cycle = all(component in self._downstream[reader] for reader in ahead)
            # The harness has no limits: the order of tuples would depend on the machine's speed.
            runner.held = bool(ahead) and runner.shared.sliced

    def on_frame(self, groups: list[Group], size: int, runners: Mapping[int, Runner]) -> None:
        """Estimate the size of the tuples of a frame, for the tasks that receive them.

        ``size``: bytes of the frame. Only here it costs no time: elsewhere, tuples would have to be
        measured.
        """
        if size <= _LARGE_BYTES and not self._large:
            return
        bundle_count = sum(len(bundles) for _, _, _, bundles in groups)
        # A bundle has at least one tuple: in most frames all are small, and are not counted.
        if not bundle_count or not (self._large or size > bundle_count * _LARGE_BYTES):
            return
        tuples = 0
        for _, _, _, bundles in groups:
            for _, _, bundle_tuples in bundles:
                tuples += len(bundle_tuples)
        tuple_bytes = size / tuples
        self._large = self._large or tuple_bytes > _LARGE_BYTES
        for target in {target for target, _, _, _ in groups}:
            runner = runners.get(target)
            if runner is not None:
                # A moving average, which begins at the first size.
                weight = 1 / 8 if runner.tuple_bytes else 1
                runner.tuple_bytes += (tuple_bytes - runner.tuple_bytes) * weight

    def update(self, now: float, runners: Collection[Runner], closed: Mapping[int, Sized]) -> bool:
        """Measure the queues, and notify the peers.

        ``closed``: task that is not open yet -> tuples that wait for it. Returns True if this
        worker's own state changed.
        """
        # Runs in each pass, measured by benchmarks/dataplane.py.
        if not self._enabled:
            return False
        high = self._high
        own = self.own
        full: set[str] = {
            self._components.get(task, _ALL)
            for task, waiting in closed.items()
            if len(waiting) > high
        }
        away: set[str] = set()
        # Components that take tuples, some of which wait.
        slow: set[str] = set()
        for runner in runners:
            if runner.events_wait:
                slow.add(runner.component)
            if runner.target_is_away():
                # The tuples that it has would time out and be replayed.
                away.add(runner.component)
                continue
            waiting = runner.waiting()
            if waiting <= 1:
                continue
            # Hysteresis: between the two marks the state does not change.
            share = 0.5 if runner.component in own else 1.0
            if (
                waiting > high * share
                or waiting * runner.tuple_bytes > _QUEUE_BYTES * share
                or (waiting > _FEW_TUPLES and runner.backlog_secs() > _BACKLOG_SECS * share)
            ):
                full.add(runner.component)
        transport = self._transport
        if transport is not None:
            for slot in transport.busy():
                full |= self._fed.get(slot) or {_ALL}
        full |= away
        away |= slow
        changed = full != own or away != self.own_away
        if changed:
            self.own = frozenset(full)
            self.own_away = frozenset(away)
        if transport is not None and (
            changed or ((full or away) and now - self._sent > _REPEAT_SECS)
        ):
            self._sent = now
            for peer in transport.peers.values():
                peer.pressure = bool(full or away)
                # Without a name, all tasks of the peer would wait.
                peer.full = sorted(full) or ([_NONE] if away else None)
                peer.away = sorted(away) or None
        return changed


class Loads:
    """Loads of all busy tasks.

    A load is the estimated time to process a task's queue, in seconds, at most 1.
    """

    def __init__(self, conf: Mapping[str, Any], transport: Transport | None) -> None:
        self._transport = transport
        self._enabled = not conf.get("topology.disable.loadaware.messaging")
        self._next = 0.0
        """Time of the next measurement."""
        self._own_loads: dict[int, float] = {}
        """Task of this worker -> its load, if it is not idle."""
        self._peer_loads: dict[int, tuple[float, float]] = {}
        """Task -> (load, its expiry)."""

    def on_report(self, loads: Iterable[tuple[int, float]], now: float) -> None:
        """Store the changed loads of a peer's tasks."""
        if self._enabled:  # Without it, no entry would expire.
            expiry = now + _VALID_SECS
            self._peer_loads.update((task, (load, expiry)) for task, load in loads)

    def refresh(self, now: float, runners: Iterable[Runner]) -> None:
        """Once a second, measure loads and update all shuffles.

        The loads of this worker are published to its peers.
        """
        if not self._enabled or now < self._next:
            return
        self._next = now + _REFRESH_SECS
        runners = list(runners)
        former = self._own_loads
        self._own_loads = {}
        for runner in runners:
            load = min(1.0, runner.backlog_secs())
            if load > _MIN_REPORTED_LOAD:
                self._own_loads[runner.task_id] = round(load, 3)
        if self._transport is not None and (self._own_loads or former):
            # The end of a load is sent once.
            ended = former.keys() - self._own_loads.keys()
            report = [*self._own_loads.items(), *((task, 0.0) for task in ended)]
            for peer in self._transport.peers.values():
                peer.loads = report
        self._peer_loads = {
            task: entry for task, entry in self._peer_loads.items() if entry[1] > now
        }
        loads = {task: load for task, (load, _) in self._peer_loads.items()}
        loads.update(self._own_loads)
        for runner in runners:
            for route in runner.routes.values():
                for shuffle in route.shuffles:
                    shuffle.refresh([loads.get(link.task, 0.0) for link in shuffle.targets])
