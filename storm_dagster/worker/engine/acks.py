"""Exchange of acks, fails and their results between tasks, ackers and spouts of all workers."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import reduce
from operator import or_
from typing import Any

from storm_dagster.core.dataplane.acking import AckerResult
from storm_dagster.model.slot import Slot
from storm_dagster.model.wire import Frame, decode_frame
from storm_dagster.worker.dataplane.routes import Placement
from storm_dagster.worker.dataplane.transport import KINDS, VERDICTS, Peer, Transport
from storm_dagster.worker.dataplane.tree import LOST, Reason
from storm_dagster.worker.engine.system import Acker
from storm_dagster.worker.tasks.runner import Runner, Shared
from storm_dagster.worker.tasks.spouts import SpoutBase


class WorkerBits:
    """A bit for each other worker, so that a tree notes in one number which of them have parts of
    it. The worker that replaces a lost one in its slot has a bit of its own.

    Tuples for a slot without a worker count as the next worker's, which will receive them.
    """

    def __init__(self, keep_secs: float) -> None:
        """``keep_secs``: time for which trees may still name a lost worker."""
        self._keep = keep_secs
        self._keys: dict[Slot, str] = {}
        """Slot -> start token of its worker; ``host:port`` while there is none."""
        self._bits: dict[str, int] = {}
        self._lost: dict[str, tuple[int, float]] = {}
        """Start token of a lost worker -> its bits, and when they may be used again."""

    def place(self, slots: Collection[Slot], tokens: Mapping[str, Slot], now: float) -> int:
        """Apply the slots in use and the live workers; the bits of the workers that are gone since
        the last call.
        """
        live = {slot: token for token, slot in tokens.items()}
        gone = 0
        for slot in {*self._keys, *slots}:
            before, empty = self._keys.pop(slot, ""), slot.key
            key = live.get(slot, empty) if slot in slots else ""
            if key:
                self._keys[slot] = key
            if key == before:
                continue
            if key:
                self._lost.pop(key, None)
            if key and before == empty:
                self._bits[key] = self._bits.pop(empty) | self._bits.get(key, 0)
                continue
            if before:
                bits = self._bits.pop(before)
                self._lost[before] = (bits, now + self._keep)
                gone |= bits
            if key:
                self.bit_of(key, now)
        return gone

    def of_slot(self, slot: Slot) -> tuple[str, int]:
        """(start token or ``""``, bits) of the worker of a slot."""
        key = self._keys.get(slot, "")
        return ("" if ":" in key else key, self._bits.get(key, 0))

    def bit_of(self, token: str, now: float) -> int:
        """The bits of a worker, also of one that is not known yet; 0: it is lost."""
        if token in self._lost:
            return 0
        if token not in self._bits:
            self._lost = {one: entry for one, entry in self._lost.items() if entry[1] > now}
            taken = reduce(
                or_, [*self._bits.values(), *(bits for bits, _ in self._lost.values())], 0
            )
            self._bits[token] = ~taken & (taken + 1)
        return self._bits[token]

    def has_room(self, token: str) -> bool:
        """Whether a peer may name this worker: each slot may have one that is not known here
        yet.
        """
        return token in self._bits or len(self._bits) <= 2 * len(self._keys) + 9

    def tokens_of(self, bits: int) -> Iterator[str]:
        """The start tokens of workers, lost ones included."""
        for token, own in (
            *self._bits.items(),
            *((token, entry[0]) for token, entry in self._lost.items()),
        ):
            if own & bits and ":" not in token:
                yield token


class AckExchange:
    """Routes acks to ackers and results to spouts: directly in this worker, to others in the next
    frame.
    """

    def __init__(
        self, shared: Shared, transport: Transport | None, runners: dict[int, Runner]
    ) -> None:
        self._shared = shared
        self._transport = transport
        self.runners = runners
        """The engine's own map; the engine changes it."""
        self.ackers: dict[int, Acker] = {}
        self.spouts: list[SpoutBase] = []
        self.placement: Placement | None = None
        self.misdirected: int = 0
        """Tuples for tasks or workers that are not there any more; they failed at once."""
        self.workers = WorkerBits(2 * float(shared.conf.get("topology.message.timeout.secs") or 30))
        self._homes: list[tuple[Any, ...]] = []
        """Where each acker is; an acker that moves or restarts knows nothing of its trees."""

    def fail_misdirected(self, bundles: Any, reason: Reason = LOST) -> None:
        """Fail the trees of tuples for a task that is not there."""
        for root, _, many in bundles:
            self.misdirected += len(many)
            for one in root[::2] if isinstance(root, list) else [root] if root else ():
                self._shared.ledger.fail_root(one, None, reason)

    def fail_unsent(self, frames: Iterable[bytes]) -> None:
        """Fail the tuples in frames for a worker that is not used any more."""
        for raw in frames:
            for _, _, _, bundles in decode_frame(raw).groups:
                self.fail_misdirected(bundles)

    def on_workers(self, now: float) -> None:
        """Fail the trees with parts in workers that are gone, and those of ackers that are gone."""
        placement, transport = self.placement, self._transport
        assert placement is not None
        if transport is None:
            return
        gone = self.workers.place(transport.peers.keys(), placement.tokens, now)
        for slot, peer in transport.peers.items():
            peer.token, peer.bit = self.workers.of_slot(slot)
        ledger, before = self._shared.ledger, self._homes
        self._homes = []
        others: list[int] = []
        for task in self._shared.acker_tasks:
            peer = self._peer_of(task)
            bit = 0 if peer is None else peer.bit
            self._homes.append((task, placement.slots.get(task), bit, task in self.ackers))
            others.append(~bit)
        ledger.others = tuple(others) if len(transport.peers) > 1 else ()
        moved = {
            index for index, home in enumerate(before) if self._homes[index : index + 1] != [home]
        }
        if len(self._homes) != len(before):
            moved = set(range(len(before)))
        if not (gone or moved):
            return
        for origin in (
            *self.spouts,
            *(runner.results for runner in self.runners.values() if runner.results),
        ):
            # A copy: a windowed bolt's thread removes entries.
            for root, ((_, _, tree, *_), _) in [*origin.pending.entries.items()]:
                if tree is not None and (
                    tree.peers & gone or (moved and root % len(before) in moved)
                ):
                    # What its tuples in this worker still send belongs to no tree.
                    tree.failed = True
                    origin.lost.append(root)
        result = AckerResult()
        for acker in self.ackers.values():
            acker.table.lose(acker.table.touching(gone), result)
        self.deliver_results(result)

    def _touch(
        self, acker: Acker, token: str, roots: list[int], now: float, result: AckerResult
    ) -> None:
        bit = self.workers.bit_of(token, now) if self.workers.has_room(token) else 0
        if bit:
            acker.table.touch(roots, bit)
        else:
            acker.table.lose(roots, result)

    def on_frame(self, frame: Frame) -> None:
        """Apply a peer's acks to the ackers here, and its results to the spouts here."""
        for root, by, component, why in frame.reasons:
            self._shared.ledger.reasons[root] = (by, component[:200], why[:500])
        for verdict in VERDICTS:
            for task, roots in getattr(frame, verdict):
                self._notify(verdict, task, roots)
        if not (frame.acks or frame.inits or frame.fails or frame.losses or frame.touched):
            return
        result = AckerResult()
        now = self._shared.clock()
        for kind in KINDS:
            for task, flat in getattr(frame, kind):
                if task in self.ackers:
                    self.ackers[task].apply(now, result, **{kind: flat})
        for task, token, roots in frame.touched:
            if task in self.ackers:
                self._touch(self.ackers[task], token, roots, now, result)
        self.deliver_results(result)

    def deliver_results(self, result: AckerResult) -> None:
        """Notify spouts, here and in other workers."""
        placement = self.placement
        assert placement is not None
        for verdict in VERDICTS:
            for task, roots in getattr(result, verdict).items():
                if self._notify(verdict, task, roots) and task:
                    continue
                every = self._transport.peers.values() if self._transport is not None else ()
                for peer in (self._peer_of(task),) if task else every:
                    if peer is not None:
                        peer.by_task[verdict].setdefault(task, []).extend(roots)
                        self._explain(peer, roots)

    def _explain(self, peer: Peer, roots: Iterable[int]) -> None:
        known = self._shared.ledger.reasons
        peer.reasons += [(root, *known[root]) for root in roots if root in known]

    def _peer_of(self, task: int) -> Any:
        assert self.placement is not None
        slot = self.placement.slots.get(task)
        return (
            self._transport.peers.get(slot)
            if self._transport is not None and slot is not None
            else None
        )

    def _notify(self, verdict: str, task: int, roots: list[int]) -> bool:
        """Tell a spout or windowed task (0: all of them) what became of its trees. Whether one is
        here.
        """
        found = False
        for number in (task,) if task else list(self.runners):
            runner = self.runners.get(number)
            origin = runner if runner is None or isinstance(runner, SpoutBase) else runner.results
            if origin is not None:
                found, entries = True, origin.pending.entries
                getattr(origin, verdict).extend(
                    roots if task else [root for root in roots if root in entries]
                )
        return found

    def flush(self, now: float) -> bool:
        """Send the acks of this pass to the ackers. Whether spouts of this worker got results from
        it.
        """
        ledger, ackers = self._shared.ledger, self._shared.acker_tasks
        if ledger.empty():
            return False
        acks, ledger.acks = ledger.acks, {}
        inits, ledger.inits = ledger.inits, []
        fails, ledger.fails = ledger.fails, []
        losses, ledger.losses = ledger.losses, []
        touched, ledger.touched = ledger.touched, []
        count = len(ackers)
        if not count:
            # No ackers any more: pending tuples time out.
            return False
        init_lists, ack_lists, fail_lists, loss_lists = ([[] for _ in ackers] for _ in KINDS)
        for root, value in acks.items():
            ack_lists[root % count] += (root, value)
        for root, value, task in inits:
            init_lists[root % count] += (root, value, task)
        for root in fails:
            fail_lists[root % count].append(root)
        for root in losses:
            loss_lists[root % count].append(root)
        result = AckerResult()
        for task, *flats in zip(ackers, init_lists, ack_lists, fail_lists, loss_lists, strict=True):
            local = self.ackers.get(task)
            if local is not None:
                local.apply(now, result, *flats)
            elif (peer := self._peer_of(task)) is not None:
                for kind, flat in zip(KINDS, flats, strict=True):
                    if flat:
                        peer.by_task[kind].setdefault(task, []).extend(flat)
                self._explain(peer, flats[KINDS.index("fails")])
        parts: dict[tuple[int, int], list[int]] = {}
        for root, bits in touched:
            parts.setdefault((root % count, bits), []).append(root)
        for (index, bits), roots in parts.items():
            task = ackers[index]
            for token in self.workers.tokens_of(bits):
                if task in self.ackers:
                    self._touch(self.ackers[task], token, roots, now, result)
                elif (peer := self._peer_of(task)) is not None:
                    peer.touched.append((task, token, roots))
        self.deliver_results(result)
        return bool(result.acked or result.failed or result.lost)
