"""The ``even`` strategy: the rules of Storm's even and default schedulers (``docs/decisions.md#even-strategy``)."""

from __future__ import annotations

from storm_dagster.core.scheduling.history import History, OldWorker
from storm_dagster.core.scheduling.outcome import NoRoom
from storm_dagster.core.scheduling.rebalance import choose_reused, trim
from storm_dagster.core.scheduling.selectors import Bin
from storm_dagster.core.scheduling.slots import Offer, interleaved
from storm_dagster.core.scheduling.units import Unit
from storm_dagster.model.placement import TopologyToPlace
from storm_dagster.model.placement_reasons import Reason, even_ignores, even_refusal, short_of_slots_refusal


def is_unchanged(topology: TopologyToPlace, units: tuple[Unit, ...], history: History, offer: Offer) -> bool:
    """Whether a monitor event leaves everything as it is: nothing is lost, and no further slot would be used."""
    if history.needed:
        return False
    alive = _alive(topology, history, offer)
    return _total(topology, units, history, alive, offer) <= len(alive)


def place_even(topology: TopologyToPlace, units: tuple[Unit, ...], history: History, offer: Offer) -> list[Bin]:
    """Place all executors but those of workers that stay, in as many slots as there are.

    Raises :class:`NoRoom` only when there is no slot at all. In a monitor event live workers whose size fits
    no share of an even spread are freed, as Storm's default scheduler does; a rebalance moves the fewest.
    The topology master is placed like any task.
    """
    alive = _alive(topology, history, offer)
    total = _total(topology, units, history, alive, offer)
    if total < 1:
        reserve = max(0, topology.reserve)
        raise NoRoom(short_of_slots_refusal(topology.name, 1, offer.counts(), reserve=reserve, isolated=offer.isolated))
    staying = {unit.first for worker in _fixed(history, alive) for unit in worker.units}
    mine = [unit for unit in units if unit.first not in staying]
    shares = _shares(len(mine), total)
    kept: list[Bin] = []
    if topology.event == "monitor":
        kept = _keep_fitting(topology, alive, shares, offer)
    elif topology.event == "rebalance" and not topology.reassign:
        kept = _keep_most(topology, history, mine, shares, offer)
    new = [
        Bin(
            offer.take(slot),
            offer.hosts[slot[0]],
            Reason.SLOT_INTERLEAVED,
            topology.memory_bytes,
            topology.cpu,
        )
        for slot in interleaved(offer)[: total - len(kept)]
    ]
    here = {unit.first for bin in kept for unit in bin.units}
    waiting = [unit for unit in mine if unit.first not in here]
    if topology.event == "rebalance":
        _deal(waiting, [*kept, *new], shares)
    else:
        _deal(waiting, new, _shares(len(waiting), len(new)) if new else [])
    return [*kept, *new]


def ignored_requests(topology: TopologyToPlace) -> list[str]:
    """Warning about conf keys that round-robin assignment cannot honor.

    A new topology with one of the first three raises :class:`NoRoom`. An existing one is healed and rebalanced
    all the same.
    """
    broken = ["use.userdefine.assignment"] if topology.user_workers else []
    broken += [f"task.on.differ.node ({', '.join(sorted(topology.differ_node))})"] if topology.differ_node else []
    broken += ["topology.master.single.worker"] if topology.single_master else []
    if broken and topology.event == "new":
        raise NoRoom(even_refusal(topology.name, broken))
    ignored = [*broken, *(["use.old.assignment"] if topology.use_old else [])]
    return [even_ignores(ignored)] if ignored else []


def fixed_workers(topology: TopologyToPlace, history: History, offer: Offer) -> tuple[OldWorker, ...]:
    """The workers that :func:`place_even` does not touch and does not return."""
    return _fixed(history, _alive(topology, history, offer))


def _fixed(history: History, alive: list[OldWorker]) -> tuple[OldWorker, ...]:
    return tuple(worker for worker in (*history.kept, *history.unstopped) if worker not in alive)


def _alive(topology: TopologyToPlace, history: History, offer: Offer) -> list[OldWorker]:
    """Monitor: live workers whose slot can be released, because its supervisor is there to stop them."""
    if topology.event != "monitor":
        return []
    return [worker for worker in history.kept if offer.may_keep(worker.slot)]


def _total(
    topology: TopologyToPlace, units: tuple[Unit, ...], history: History, alive: list[OldWorker], offer: Offer
) -> int:
    """Number of slots to use: what is wanted, limited by live and free slots."""
    fixed = _fixed(history, alive)
    mine = len(units) - sum(len(worker.units) for worker in fixed)
    wanted = min(max(1, min(topology.workers, len(units)) - len(fixed)), mine)
    return min(wanted, len(alive) + max(0, offer.total - max(0, topology.reserve)))


def _shares(count: int, total: int) -> list[int]:
    """Sizes of an even spread of ``count`` executors over ``total`` slots, larger ones first."""
    average, remainder = divmod(count, total)
    return [average + 1] * remainder + [average] * (total - remainder)


def _keep_fitting(topology: TopologyToPlace, alive: list[OldWorker], shares: list[int], offer: Offer) -> list[Bin]:
    """Keep live workers whose size is still a share of the spread: Storm's rule of bad slots."""
    left = list(shares)
    bins: list[Bin] = []
    for worker in alive:
        if len(worker.units) not in left:
            offer.release_own(worker.slot)
            continue
        left.remove(len(worker.units))
        memory, cpu = worker.memory_bytes or topology.memory_bytes, worker.cpu or topology.cpu
        bins.append(Bin(worker.slot, worker.host, Reason.SLOT_KEPT, memory, cpu))
        for unit in worker.units:
            bins[-1].put(unit, Reason.KEPT)
    return bins


def _keep_most(
    topology: TopologyToPlace, history: History, mine: list[Unit], shares: list[int], offer: Offer
) -> list[Bin]:
    """Reuse the fullest old slots, with as many executors as their share allows."""
    firsts = {unit.first for unit in mine}
    level = (shares[-1], sum(share > shares[-1] for share in shares))
    reuse = choose_reused(history.lost, offer, firsts, len(shares), level)
    stays = trim(reuse, firsts, shares[-1], {})
    bins: list[Bin] = []
    for worker in sorted(reuse.kept, key=lambda worker: worker.slot):
        slot = offer.take(worker.slot)
        bins.append(Bin(slot, offer.hosts[slot[0]], Reason.SLOT_REUSED, topology.memory_bytes, topology.cpu))
        for unit in stays[slot]:
            bins[-1].put(unit, Reason.STAYS)
    return bins


def _deal(waiting: list[Unit], bins: list[Bin], shares: list[int]) -> None:
    """Assign executors round robin, by ascending id, to the workers that are below their share.

    The fullest workers have the largest shares.
    """
    ranked = sorted(range(len(bins)), key=lambda index: (-bins[index].size, index))
    share = dict(zip(ranked, shares, strict=True))
    turn = 0
    for unit in waiting:
        while bins[turn % len(bins)].size >= share[turn % len(bins)]:
            turn += 1
        bins[turn % len(bins)].put(unit, Reason.DEALT)
        turn += 1
