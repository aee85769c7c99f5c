"""Slots of the ``even`` and of the ``local`` strategy. Runs in Spark."""

from __future__ import annotations

from itertools import zip_longest

from storm_dagster.model.placement_reasons import Reason, even_refusal, local_refusal, no_supervisor_refusal
from storm_dagster.spark.assignment.free_ports import Slot
from storm_dagster.spark.assignment.reuse import Saving, choose_reused
from storm_dagster.spark.assignment.schema import Row
from storm_dagster.spark.assignment.slot_allocation import PlacementRefused, SlotAllocation


def even_shares(count: int, total: int) -> list[int]:
    """Sizes of an even spread over ``total`` workers, larger ones first."""
    return [count // total + (1 if index < count % total else 0) for index in range(total)]


def unsupported_requests(about: Row) -> list[str]:
    """Conf keys that round-robin assignment cannot honor; a new topology with one of them is refused."""
    keys = ["use.userdefine.assignment"] if about["user_workers"] else []
    if about["differ_names"]:
        keys.append(f"task.on.differ.node ({', '.join(about['differ_names'])})")
    if about["single_master"]:
        keys.append("topology.master.single.worker")
    return keys


def allocate_even(allocation: SlotAllocation) -> None:
    """Allocate as many of the wanted slots as there are; none at all raises :class:`PlacementRefused`.

    In a monitor event live workers whose size is no share of an even spread give their slots back; a
    rebalance keeps the fullest old slots.
    """
    about, request, ports = allocation.about, allocation.request, allocation.ports
    event = about["event"]
    unsupported = unsupported_requests(about)
    if unsupported and event == "new":
        raise PlacementRefused(even_refusal(about["name"], unsupported))
    offered = allocation.within if allocation.within is not None else list(ports.host)
    alive: list[Row] = []
    if event == "monitor":
        alive = [
            row for row in request["reusable"] if row["node"] in offered and ports.may_keep((row["node"], row["port"]))
        ]
    fixed = sum(request["fixed"])
    if event == "monitor":
        fixed += sum(row["size"] for row in request["reusable"] if row not in alive)
    mine = request["total"] - fixed
    wanted = min(max(1, min(about["workers"], request["total"]) - request["staying"] + len(alive)), mine)
    total = min(wanted, len(alive) + max(0, allocation.free - allocation.reserve))
    if event == "monitor" and not request["missing"] and total <= len(alive):
        return
    if not ports.host:
        raise PlacementRefused(no_supervisor_refusal(about["name"]))
    if total < 1:
        raise allocation.short(1, with_remedy=False)
    shares = even_shares(mine, total)
    kept = 0
    if event == "monitor":
        kept = _keep_fitting(allocation, alive, shares)
    elif event == "rebalance" and not about["reassign"]:
        _keep_fullest(allocation, shares)
    for slot in _dealt(allocation, total - kept - len(allocation.slots)):
        allocation.take(slot, "empty", Reason.SLOT_INTERLEAVED)


def _keep_fitting(allocation: SlotAllocation, alive: list[Row], shares: list[int]) -> int:
    """Number of live workers that stay; the others are freed."""
    left, kept = list(shares), 0
    for row in alive:
        slot = (row["node"], row["port"])
        if row["size"] in left:
            left.remove(row["size"])
            kept += 1
        else:
            allocation.release_own(slot)
            allocation.freed.append(row["worker"])
    return kept


def _keep_fullest(allocation: SlotAllocation, shares: list[int]) -> None:
    usable = [
        row for row in allocation.request["reusable"] if row["size"] and allocation.may_use((row["node"], row["port"]))
    ]
    savings = [Saving(row, shares[-1]) for row in usable]
    _, plain, fuller = choose_reused(savings, len(shares), sum(share > shares[-1] for share in shares))
    for row in sorted([*plain, *fuller], key=lambda row: row["worker"]):
        role = "fuller" if row in fuller else "reuse"
        allocation.take((row["node"], row["port"]), role, Reason.SLOT_REUSED, row["worker"])


def _dealt(allocation: SlotAllocation, count: int) -> list[Slot]:
    """The first ``count`` free slots, dealt host by host and in each host supervisor by supervisor."""
    ports = allocation.ports
    by_host: dict[str, list[list[Slot]]] = {}
    for node in allocation.nodes:
        by_host.setdefault(ports.host[node], []).append([(node, port) for port in ports.free[node]])
    return _interleave([_interleave(groups) for groups in by_host.values()])[:count]


def _interleave(groups: list[list[Slot]]) -> list[Slot]:
    by_size = sorted(groups, key=lambda group: -len(group))
    return [slot for turn in zip_longest(*by_size) for slot in turn if slot is not None]


def allocate_local(allocation: SlotAllocation) -> None:
    """Allocate one slot on the only supervisor; nothing is reserved there."""
    allocation.reserve = 0
    nodes = allocation.nodes
    if len(nodes) != 1:
        raise PlacementRefused(local_refusal(allocation.about["name"], len(nodes)))
    free = allocation.ports.free[nodes[0]]
    if not free:
        raise allocation.short(1, with_remedy=False)
    slot = (nodes[0], free[0])
    if allocation.about["event"] == "rebalance":
        for row in allocation.request["reusable"]:
            if allocation.may_use((row["node"], row["port"])):
                slot = (row["node"], row["port"])
                break
    allocation.take(slot, "empty", Reason.SLOT_LOCAL)
