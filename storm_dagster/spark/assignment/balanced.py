"""Slots of the ``balanced`` strategy. Runs in Spark."""

from __future__ import annotations

from collections import Counter

from storm_dagster.model.placement_reasons import Reason, differ_node_refusal, too_many_requests_refusal
from storm_dagster.spark.assignment.free_ports import Slot
from storm_dagster.spark.assignment.reuse import Saving, choose_reused
from storm_dagster.spark.assignment.schema import Row
from storm_dagster.spark.assignment.selectors import fair_share
from storm_dagster.spark.assignment.slot_allocation import PlacementRefused, SlotAllocation


def allocate_balanced(allocation: SlotAllocation) -> None:
    """Allocate requested workers first, then old slots that a rebalance keeps, then the least loaded supervisors.

    Raises :class:`PlacementRefused` when slots are short, or on too few supervisors for a component whose
    tasks must be apart.
    """
    about, request = allocation.about, allocation.request
    count, requested, alone = request["count"], request["requested"], request["alone"]
    if request["clash"]:
        raise PlacementRefused(too_many_requests_refusal(about["name"], *request["clash"]))
    if allocation.free - allocation.reserve < count:
        raise allocation.short(count, with_remedy=True)
    blocked: dict[int, set[str]] = {need["component"]: set(need["blocked"]) for need in request["needs"]}
    held = {(row["node"], row["port"]) for row in request["reusable"]}
    usable = sum(map(allocation.may_use, held))
    unplaced: list[int] = []
    for number, wanted in enumerate(requested):
        slot = _slot_for(wanted, allocation)
        if slot is None:
            unplaced.append(number)
            continue
        allocation.take(slot, "requested", Reason.SLOT_OLD if wanted["old"] else Reason.SLOT_USER, number)
        _block(blocked, wanted, slot)
    own_master: Slot | None = None
    if about["event"] == "rebalance" and not about["reassign"]:
        at_home = sum((row["node"], row["port"]) in held for row in allocation.slots)
        kept = min(usable, count) - at_home
        if requested and len(requested) + kept > count:
            raise PlacementRefused(too_many_requests_refusal(about["name"], len(requested), kept, count))
        own_master = _reuse(allocation, count - len(requested) - int(alone), alone)
    used = [row["node"] for row in allocation.slots]
    if own_master is not None:
        allocation.take(own_master, "master", Reason.SLOT_REUSED)
    first_new = len(allocation.slots)
    _spread(allocation, count - first_new, used, blocked, alone and own_master is None)
    for row, number in zip(allocation.slots[first_new:], unplaced, strict=False):
        row.update(role="requested", ref=number)
        _block(blocked, requested[number], (row["node"], row["port"]))
    if alone and own_master is None:
        _choose_master(allocation.slots)
    able = {row["node"] for row in allocation.slots if row["role"] != "master"}
    for need in request["needs"]:
        left = able - blocked[need["component"]]
        if len(left) < need["units"]:
            which = about["differ_names"][about["differ"].index(need["component"])]
            raise PlacementRefused(differ_node_refusal(about["name"], which, need["units"], len(left)))


def _block(blocked: dict[int, set[str]], wanted: Row, slot: Slot) -> None:
    for component in wanted["components"]:
        if component in blocked:
            blocked[component].add(slot[0])


def _slot_for(wanted: Row, allocation: SlotAllocation) -> Slot | None:
    """The requested port if it is free on the requested host, else another port there."""
    ports = allocation.ports
    on_host = set(ports.nodes_of([wanted["host"]])) if wanted["host"] is not None else set()
    # The supervisor itself comes before others of its host.
    if wanted["node"] in ports.free:
        on_host.add(wanted["node"])
    nodes = sorted(
        (node for node in on_host if ports.free[node] and (allocation.within is None or node in allocation.within)),
        key=lambda node: (node != wanted["node"], node),
    )
    if wanted["port"] is not None:
        for node in nodes:
            if ports.has((node, wanted["port"])):
                return (node, wanted["port"])
    elif wanted["hint_node"] is not None and allocation.may_use((wanted["hint_node"], wanted["hint_port"])):
        return (wanted["hint_node"], wanted["hint_port"])
    return (nodes[0], ports.free[nodes[0]][0]) if nodes else None


def _reuse(allocation: SlotAllocation, places: int, alone: bool) -> Slot | None:
    """Take the old slots that save most moves; returns the one where the topology master stays alone.

    The topology master stays where it is when nothing else stays there, which is so when that saves a move.
    """
    request = allocation.request
    sizes = [wanted["size"] for wanted in request["requested"]] + [0] * places
    share, remainder = fair_share(sizes, request["unassigned"] - int(alone))
    usable = [row for row in request["reusable"] if allocation.may_use((row["node"], row["port"]))]
    savings = [Saving(row, share) for row in usable if row["size"]]
    home = next((row for row in usable if alone and row["master"]), None)
    saved, plain, fuller = choose_reused(savings, places, remainder)
    if home is not None:
        others = [saving for saving in savings if saving.row is not home]
        without, *others_kept = choose_reused(others, places, remainder)
        if without >= saved:
            plain, fuller = others_kept
    kept = sorted([*plain, *fuller], key=lambda row: (-row["size"], row["node"], row["port"]))
    for row in kept:
        role = "fuller" if row in fuller else "reuse"
        allocation.take((row["node"], row["port"]), role, Reason.SLOT_REUSED, row["worker"])
    return (home["node"], home["port"]) if home is not None and home not in kept else None


def _spread(allocation: SlotAllocation, count: int, used: list[str], blocked: dict[int, set[str]], alone: bool) -> None:
    """Allocate new slots one at a time on the least loaded supervisor; kept apart as late as possible."""
    ports, needs = allocation.ports, allocation.request["needs"]
    chosen = set(used)
    for remaining in range(count, 0, -1):
        node, why, against = ports.best(allocation.within)
        useful = max(1, remaining - 1 if alone else remaining)
        tight = [
            blocked[need["component"]]
            for need in needs
            if need["units"] - len(chosen - blocked[need["component"]]) >= useful
        ]
        if tight:
            helpful = [
                other
                for other in allocation.nodes
                if ports.free[other] and other not in chosen and not any(other in nodes for nodes in tight)
            ]
            if helpful and node not in helpful:
                node, why, against = min(helpful, key=ports.load), Reason.SLOT_DIFFER, ""
        allocation.take((node, ports.free[node][0]), "empty", why)
        allocation.slots[-1]["text"] = against
        chosen.add(node)


def _choose_master(rows: list[Row]) -> None:
    """Give the master an empty slot on the supervisor that has most slots of the topology."""
    crowd = Counter(row["node"] for row in rows)
    empty = [row for row in rows if row["role"] == "empty"]
    max(empty, key=lambda row: crowd[row["node"]])["role"] = "master"
