"""Exchange of acks, fails and results between tasks, ackers and spouts.

``AckExchange.flush`` and ``on_frame`` run in each pass; their form is measured by
``benchmarks/dataplane.py``.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from storm_dagster.core.dataplane.acking import AckerResult
from storm_dagster.model.slot import Slot
from storm_dagster.model.wire import Frame, decode_frame
from storm_dagster.worker.dataplane.routes import Placement
from storm_dagster.worker.dataplane.transport import KINDS, VERDICTS, Peer, Transport
from storm_dagster.worker.dataplane.tree import LOST, Reason
from storm_dagster.worker.engine.system import Acker
from storm_dagster.worker.tasks.runner import Runner
from storm_dagster.worker.tasks.shared import Shared
from storm_dagster.worker.tasks.spouts import SpoutBase


class WorkerBits:
    """A bit for each other worker.

    So a tree notes in one number which of them have parts of it. The worker that replaces a lost
    one in its slot has another bit. Tuples for a slot without a worker count as the next worker's,
    which will receive them.
    """

    def __init__(self, keep_secs: float) -> None:
        """``keep_secs``: time for which trees may still name a lost worker."""
        self._keep_secs = keep_secs
        self._keys: dict[Slot, str] = {}
        """Slot -> start token of its worker; ``host:port`` while there is none."""
        self._bits: dict[str, int] = {}
        """Key as in :attr:`_keys`, or token that only a peer has named -> bits of that worker."""
        self._lost: dict[str, tuple[int, float]] = {}
        """Start token of a lost worker -> its bits, and the time when they may be reused."""

    def place(self, slots: Collection[Slot], tokens: Mapping[str, Slot], now: float) -> int:
        """Apply the slots of the other workers, and the live workers (token -> slot).

        Returns the bits of the workers that were lost since the last call.
        """
        live = {slot: token for token, slot in tokens.items()}
        lost_bits = 0
        for slot in {*self._keys, *slots}:
            former = self._keys.pop(slot, "")
            address = slot.key
            key = live.get(slot, address) if slot in slots else ""
            if key:
                self._keys[slot] = key
            if key == former:
                continue
            if key:
                # A worker that was lost from view is back.
                self._lost.pop(key, None)
            if key and former == address:
                # The first worker of a slot gets the tuples that were sent before it was known.
                self._bits[key] = self._bits.pop(address) | self._bits.get(key, 0)
                continue
            if former:
                bits = self._bits.pop(former)
                self._lost[former] = (bits, now + self._keep_secs)
                lost_bits |= bits
            if key:
                self.bit_of(key, now)
        return lost_bits

    def of_slot(self, slot: Slot) -> tuple[str, int]:
        """Return (start token or ``""``, bits) of the worker of a slot."""
        key = self._keys.get(slot, "")
        token = "" if _is_address(key) else key
        return (token, self._bits.get(key, 0))

    def bit_of(self, token: str, now: float) -> int:
        """Return the bits of a worker. An unknown one gets a free bit.

        0 if it is lost.
        """
        if token in self._lost:
            return 0
        if token not in self._bits:
            self._lost = {
                lost_token: (bits, reusable_at)
                for lost_token, (bits, reusable_at) in self._lost.items()
                if reusable_at > now
            }
            used = 0
            for bits in self._bits.values():
                used |= bits
            for bits, _ in self._lost.values():
                used |= bits
            lowest_free_bit = ~used & (used + 1)
            self._bits[token] = lowest_free_bit
        return self._bits[token]

    def has_room(self, token: str) -> bool:
        """True if a peer may name this worker.

        Each slot may have one worker that is not known here yet, and there may be a few more slots.
        """
        return token in self._bits or len(self._bits) <= 2 * len(self._keys) + 9

    def tokens_of(self, bits: int) -> list[str]:
        """Return the start tokens of workers, lost ones included."""
        bits_by_token = list(self._bits.items())
        bits_by_token += [(token, lost_bits) for token, (lost_bits, _) in self._lost.items()]
        return [
            token for token, own_bits in bits_by_token if own_bits & bits and not _is_address(token)
        ]


def _is_address(key: str) -> bool:
    """True if a key is ``host:port``, not the start token of a worker."""
    return ":" in key


class AckExchange:
    """Routes acks to ackers and results to spouts.

    Directly in this worker, to other workers in the next frame.
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
        """Tuples for tasks or workers that no longer exist; they failed at once."""
        self.workers = WorkerBits(2 * float(shared.conf.get("topology.message.timeout.secs") or 30))
        self._homes: list[tuple[Any, ...]] = []
        """(task, slot, bits of the worker, True if it is here) of each acker. An acker whose home
        changes has moved or restarted, and lost its trees.
        """

    def fail_misdirected(self, bundles: Any, reason: Reason = LOST) -> None:
        """Fail the trees of the tuples in ``bundles``, for a task that is not here."""
        for root, _, tuples in bundles:
            self.misdirected += len(tuples)
            for tracked_root in _roots_of(root):
                self._shared.ledger.fail_root(tracked_root, None, reason)

    def fail_unsent(self, frames: Iterable[bytes]) -> None:
        """Fail the tuples in frames for a worker that is no longer used."""
        for raw in frames:
            for _, _, _, bundles in decode_frame(raw).groups:
                self.fail_misdirected(bundles)

    def on_workers(self, now: float) -> None:
        """Follow the placement's workers and ackers.

        The trees with parts in lost workers or lost ackers fail. Without effect in a worker without
        transport.
        """
        placement = self.placement
        transport = self._transport
        assert placement is not None
        if transport is None:
            return
        lost_bits = self.workers.place(transport.peers.keys(), placement.tokens, now)
        for slot, peer in transport.peers.items():
            peer.token, peer.bit = self.workers.of_slot(slot)
        former_homes = self._homes
        self._homes = []
        other_bits: list[int] = []
        for task in self._shared.acker_tasks:
            peer = self._peer_of(task)
            bit = 0 if peer is None else peer.bit
            self._homes.append((task, placement.slots.get(task), bit, task in self.ackers))
            other_bits.append(~bit)
        self._shared.ledger.others = tuple(other_bits) if len(transport.peers) > 1 else ()
        moved = self._moved_ackers(former_homes)
        if not (lost_bits or moved):
            return
        for origin in self._origins():
            # A copy: a windowed bolt's thread removes entries.
            for root, ((_, _, tree, *_), _) in [*origin.pending.entries.items()]:
                if tree is None:
                    continue
                has_lost_acker = moved and root % len(former_homes) in moved
                if tree.peers & lost_bits or has_lost_acker:
                    # The tuples that this worker still sends for it belong to no tree.
                    tree.failed = True
                    origin.lost.append(root)
        result = AckerResult()
        for acker in self.ackers.values():
            acker.table.lose(acker.table.touching(lost_bits), result)
        self.deliver_results(result)

    def _moved_ackers(self, former_homes: list[tuple[Any, ...]]) -> set[int]:
        """Indices of ackers that moved or restarted.

        All of them, if their number changed.
        """
        if len(former_homes) != len(self._homes):
            return set(range(len(former_homes)))
        return {index for index, home in enumerate(former_homes) if self._homes[index] != home}

    def _origins(self) -> list[Any]:
        """Spouts and windowed bolts here, which get results of their trees."""
        windowed = [runner.results for runner in self.runners.values() if runner.results]
        return [*self.spouts, *windowed]

    def _touch(
        self, acker: Acker, token: str, roots: list[int], now: float, result: AckerResult
    ) -> None:
        """Note that trees have parts in the worker ``token``; lose them, if that is lost."""
        bit = self.workers.bit_of(token, now) if self.workers.has_room(token) else 0
        if bit:
            acker.table.touch(roots, bit)
        else:
            acker.table.lose(roots, result)

    def on_frame(self, frame: Frame) -> None:
        """Apply a peer's acks to the ackers, and its results to the spouts."""
        for root, failing_task, component, reason in frame.reasons:
            self._shared.ledger.reasons[root] = (failing_task, component[:200], reason[:500])
        for task, roots in frame.acked:
            self._notify("acked", task, roots)
        for task, roots in frame.failed:
            self._notify("failed", task, roots)
        for task, roots in frame.lost:
            self._notify("lost", task, roots)
        if not (frame.acks or frame.inits or frame.fails or frame.losses or frame.touched):
            return
        result = AckerResult()
        now = self._shared.clock()
        ackers = self.ackers
        for task, inits in frame.inits:
            if task in ackers:
                ackers[task].apply(now, result, inits=inits)
        for task, acks in frame.acks:
            if task in ackers:
                ackers[task].apply(now, result, acks=acks)
        for task, fails in frame.fails:
            if task in ackers:
                ackers[task].apply(now, result, fails=fails)
        for task, losses in frame.losses:
            if task in ackers:
                ackers[task].apply(now, result, losses=losses)
        for task, token, roots in frame.touched:
            if task in ackers:
                self._touch(ackers[task], token, roots, now, result)
        self.deliver_results(result)

    def deliver_results(self, result: AckerResult) -> None:
        """Notify the spouts and windowed tasks of results, here and in other workers."""
        placement = self.placement
        assert placement is not None
        for verdict in VERDICTS:
            for task, roots in getattr(result, verdict).items():
                if self._notify(verdict, task, roots) and task:
                    continue
                # For task 0, an unknown spout, these are all peers.
                for peer in self._peers_of(task):
                    peer.by_task[verdict].setdefault(task, []).extend(roots)
                    self._explain(peer, roots)

    def _explain(self, peer: Peer, roots: Iterable[int]) -> None:
        """Send the reasons of failed roots to a peer, as far as they are known here."""
        reasons = self._shared.ledger.reasons
        peer.reasons += [(root, *reasons[root]) for root in roots if root in reasons]

    def _peers_of(self, task: int) -> list[Peer]:
        """Peers with a task; all peers for task 0."""
        if not task:
            return [] if self._transport is None else list(self._transport.peers.values())
        peer = self._peer_of(task)
        return [] if peer is None else [peer]

    def _peer_of(self, task: int) -> Any:
        """The peer with a task; ``None`` for a task that is here or nowhere."""
        assert self.placement is not None
        slot = self.placement.slots.get(task)
        if self._transport is None or slot is None:
            return None
        return self._transport.peers.get(slot)

    def _notify(self, verdict: str, task: int, roots: list[int]) -> bool:
        """Notify a spout or windowed task of a verdict on its trees.

        Task 0 means all of them. Returns True if one of them is here.
        """
        is_here = False
        for number in (task,) if task else list(self.runners):
            runner = self.runners.get(number)
            origin = runner if runner is None or isinstance(runner, SpoutBase) else runner.results
            if origin is None:
                continue
            is_here = True
            own_roots = roots
            if not task:
                entries = origin.pending.entries
                own_roots = [root for root in roots if root in entries]
            getattr(origin, verdict).extend(own_roots)
        return is_here

    def flush(self, now: float) -> bool:
        """Send the acks of this pass to the ackers.

        Returns True if an acker of this worker completed, failed or lost a tree by them.
        """
        ledger = self._shared.ledger
        ackers = self._shared.acker_tasks
        if ledger.empty():
            return False
        acks = ledger.acks
        inits = ledger.inits
        fails = ledger.fails
        losses = ledger.losses
        touched = ledger.touched
        ledger.acks = {}
        ledger.inits = []
        ledger.fails = []
        ledger.losses = []
        ledger.touched = []
        count = len(ackers)
        if not count:
            # The topology has no ackers now: pending tuples time out.
            return False
        init_lists: list[list[int]] = [[] for _ in ackers]
        ack_lists: list[list[int]] = [[] for _ in ackers]
        fail_lists: list[list[int]] = [[] for _ in ackers]
        loss_lists: list[list[int]] = [[] for _ in ackers]
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
                continue
            peer = self._peer_of(task)
            if peer is not None:
                for kind, flat in zip(KINDS, flats, strict=True):
                    if flat:
                        peer.by_task[kind].setdefault(task, []).extend(flat)
                self._explain(peer, flats[KINDS.index("fails")])
        roots_by_bits: dict[tuple[int, int], list[int]] = {}
        for root, bits in touched:
            roots_by_bits.setdefault((root % count, bits), []).append(root)
        for (index, bits), roots in roots_by_bits.items():
            task = ackers[index]
            peer = self._peer_of(task)
            for token in self.workers.tokens_of(bits):
                if task in self.ackers:
                    self._touch(self.ackers[task], token, roots, now, result)
                elif peer is not None:
                    peer.touched.append((task, token, roots))
        self.deliver_results(result)
        return bool(result.acked or result.failed or result.lost)


def _roots_of(root: Any) -> list[int]:
    """Roots of a bundle.

    ``root`` is ``[root, edge, root, edge, ...]``, one root, or 0 for no tree.
    """
    if isinstance(root, list):
        return root[::2]
    return [root] if root else []
