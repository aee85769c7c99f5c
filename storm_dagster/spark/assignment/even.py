"""Runs in Spark: seats of the ``even`` and of the ``local`` strategy."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from storm_dagster.model.placement_reasons import (
    Reason,
    even_refusal,
    local_refusal,
    no_supervisor_refusal,
)
from storm_dagster.spark.assignment.ports import Slot
from storm_dagster.spark.assignment.saving import Saving, most_saving
from storm_dagster.spark.assignment.seating import Refused, Seating

__all__ = ["even_shares", "even_wishes", "seat_even", "seat_local"]

Row = dict[str, Any]


def even_shares(count: int, total: int) -> list[int]:
    """Sizes of an even spread over ``total`` workers, larger ones first."""
    return [count // total + (1 if index < count % total else 0) for index in range(total)]


def even_wishes(about: Row) -> list[str]:
    """Wishes that dealing tasks over slots in turn cannot keep, those that a new topology may not make first."""
    wishes = ["use.userdefine.assignment"] if about["wishes"] else []
    if about["differ_names"]:
        wishes.append(f"task.on.differ.node ({', '.join(about['differ_names'])})")
    if about["single_master"]:
        wishes.append("topology.master.single.worker")
    return wishes


def seat_even(seating: Seating) -> None:
    """As many seats as wanted, as far as there are slots; none at all raises :class:`Refused`.

    In a monitor event live workers whose size is no share of an even spread give their slots back; a
    rebalance keeps the fullest old slots.
    """
    about, demand, ports = seating.about, seating.demand, seating.ports
    event = about["event"]
    wishes = even_wishes(about)
    if wishes and event == "new":
        raise Refused(even_refusal(about["name"], wishes))
    offered = seating.within if seating.within is not None else list(ports.host)
    alive: list[Row] = []
    if event == "monitor":
        alive = [
            seat
            for seat in demand["seats"]
            if seat["node"] in offered and ports.may_return((seat["node"], seat["port"]))
        ]
    fixed = sum(demand["fixed"])
    if event == "monitor":
        fixed += sum(seat["size"] for seat in demand["seats"] if seat not in alive)
    mine = demand["total"] - fixed
    wanted = min(max(1, min(about["workers"], demand["total"]) - demand["staying"] + len(alive)), mine)
    total = min(wanted, len(alive) + max(0, seating.free - seating.reserve))
    if event == "monitor" and not demand["missing"] and total <= len(alive):
        return
    if not ports.host:
        raise Refused(no_supervisor_refusal(about["name"]))
    if total < 1:
        raise seating.short(1, with_remedy=False)
    shares = even_shares(mine, total)
    kept = 0
    if event == "monitor":
        kept = _keep_fitting(seating, alive, shares)
    elif event == "rebalance" and not about["reassign"]:
        _keep_fullest(seating, shares)
    for slot in _dealt(seating, total - kept - len(seating.seats)):
        seating.sit(slot, "empty", Reason.SLOT_INTERLEAVED)


def _keep_fitting(seating: Seating, alive: list[Row], shares: list[int]) -> int:
    """How many live workers stay; the others are freed."""
    left, kept = list(shares), 0
    for seat in alive:
        slot = (seat["node"], seat["port"])
        if seat["size"] in left:
            left.remove(seat["size"])
            kept += 1
        else:
            seating.lend(slot)
            seating.freed.append(seat["worker"])
    return kept


def _keep_fullest(seating: Seating, shares: list[int]) -> None:
    usable = [
        seat
        for seat in seating.demand["seats"]
        if seat["size"] and seating.may_use((seat["node"], seat["port"]))
    ]
    savings = [Saving(seat, shares[-1]) for seat in usable]
    _, plain, fuller = most_saving(savings, len(shares), sum(share > shares[-1] for share in shares))
    for seat in sorted([*plain, *fuller], key=lambda seat: seat["worker"]):
        role = "fuller" if seat in fuller else "reuse"
        seating.sit((seat["node"], seat["port"]), role, Reason.SLOT_REUSED, seat["worker"])


def _dealt(seating: Seating, count: int) -> list[Slot]:
    """The first ``count`` free slots, dealt host by host and in each host supervisor by supervisor."""
    ports = seating.ports
    by_host: dict[str, list[list[Slot]]] = {}
    for node in seating.nodes:
        by_host.setdefault(ports.host[node], []).append([(node, port) for port in ports.free[node]])
    return _interleave([_interleave(groups) for groups in by_host.values()])[:count]


def _interleave(groups: list[list[Slot]]) -> list[Slot]:
    by_size = sorted(groups, key=lambda group: -len(group))
    return [slot for turn in zip_longest(*by_size) for slot in turn if slot is not None]


def seat_local(seating: Seating) -> None:
    """One seat on the only supervisor; nothing is reserved there."""
    seating.reserve = 0
    nodes = seating.nodes
    if len(nodes) != 1:
        raise Refused(local_refusal(seating.about["name"], len(nodes)))
    free = seating.ports.free[nodes[0]]
    if not free:
        raise seating.short(1, with_remedy=False)
    slot = (nodes[0], free[0])
    if seating.about["event"] == "rebalance":
        for seat in seating.demand["seats"]:
            if seating.may_use((seat["node"], seat["port"])):
                slot = (seat["node"], seat["port"])
                break
    seating.sit(slot, "empty", Reason.SLOT_LOCAL)
