"""Runs in Spark: seats of the ``balanced`` strategy."""

from __future__ import annotations

from typing import Any

from storm_dagster.model.placement_reasons import Reason, differ_node_refusal, too_many_wishes_refusal
from storm_dagster.spark.assignment.fill import shared_out
from storm_dagster.spark.assignment.ports import Slot
from storm_dagster.spark.assignment.saving import Saving, most_saving
from storm_dagster.spark.assignment.seating import Refused, Seating

__all__ = ["seat_balanced"]

Row = dict[str, Any]


def seat_balanced(seating: Seating) -> None:
    """Wanted workers first, then old slots that a rebalance keeps, then the least loaded supervisors.

    Raises :class:`Refused` when slots are short, or when they are on too few supervisors for a component
    whose tasks must be apart.
    """
    about, demand = seating.about, seating.demand
    count, claims, alone = demand["count"], demand["claims"], demand["alone"]
    if demand["clash"]:
        wished, kept, room = demand["clash"]
        raise Refused(too_many_wishes_refusal(about["name"], wished, kept, room))
    if seating.free - seating.reserve < count:
        raise seating.short(count, with_remedy=True)
    blocked: dict[int, set[str]] = {need["component"]: set(need["blocked"]) for need in demand["needs"]}
    held = {(seat["node"], seat["port"]) for seat in demand["seats"]}
    usable = sum(map(seating.may_use, held))
    homeless: list[int] = []
    for number, claim in enumerate(claims):
        slot = _slot_for(claim, seating)
        if slot is None:
            homeless.append(number)
            continue
        seating.sit(slot, "claim", Reason.SLOT_OLD if claim["old"] else Reason.SLOT_USER, number)
        _block(blocked, claim, slot)
    own_master: Slot | None = None
    if about["event"] == "rebalance" and not about["reassign"]:
        at_home = sum((seat["node"], seat["port"]) in held for seat in seating.seats)
        kept = min(usable, count) - at_home
        if claims and len(claims) + kept > count:
            raise Refused(too_many_wishes_refusal(about["name"], len(claims), kept, count))
        own_master = _reuse(seating, count - len(claims) - int(alone), alone)
    seated = [seat["node"] for seat in seating.seats]
    if own_master is not None:
        seating.sit(own_master, "master", Reason.SLOT_REUSED)
    first_new = len(seating.seats)
    _spread(seating, count - first_new, seated, blocked, alone and own_master is None)
    for seat, number in zip(seating.seats[first_new:], homeless, strict=False):
        seat.update(role="claim", ref=number)
        _block(blocked, claims[number], (seat["node"], seat["port"]))
    if alone and own_master is None:
        _choose_master(seating.seats)
    able = {seat["node"] for seat in seating.seats if seat["role"] != "master"}
    for need in demand["needs"]:
        left = able - blocked[need["component"]]
        if len(left) < need["units"]:
            which = about["differ_names"][about["differ"].index(need["component"])]
            raise Refused(differ_node_refusal(about["name"], which, need["units"], len(left)))


def _block(blocked: dict[int, set[str]], claim: Row, slot: Slot) -> None:
    for component in claim["components"]:
        if component in blocked:
            blocked[component].add(slot[0])


def _slot_for(claim: Row, seating: Seating) -> Slot | None:
    """The wanted port if it is free on the wanted host, else another port there."""
    ports = seating.ports
    on_host = set(ports.nodes_of([claim["host"]])) if claim["host"] is not None else set()
    # The supervisor itself comes before others of its host.
    if claim["node"] in ports.free:
        on_host.add(claim["node"])
    nodes = sorted(
        (node for node in on_host if ports.free[node] and (seating.within is None or node in seating.within)),
        key=lambda node: (node != claim["node"], node),
    )
    if claim["port"] is not None:
        for node in nodes:
            if ports.has((node, claim["port"])):
                return (node, claim["port"])
    elif claim["hint_node"] is not None and seating.may_use((claim["hint_node"], claim["hint_port"])):
        return (claim["hint_node"], claim["hint_port"])
    return (nodes[0], ports.free[nodes[0]][0]) if nodes else None


def _reuse(seating: Seating, places: int, alone: bool) -> Slot | None:
    """Sits on the old slots that save most moves; returns the one where the topology master stays alone.

    The topology master stays where it is when nothing else stays there, which is so when that saves a move.
    """
    demand = seating.demand
    sizes = [claim["size"] for claim in demand["claims"]] + [0] * places
    share, rest = shared_out(sizes, demand["loose"] - int(alone))
    usable = [seat for seat in demand["seats"] if seating.may_use((seat["node"], seat["port"]))]
    savings = [Saving(seat, share) for seat in usable if seat["size"]]
    home = next((seat for seat in usable if alone and seat["master"]), None)
    saved, plain, fuller = most_saving(savings, places, rest)
    if home is not None:
        others = [saving for saving in savings if saving.row is not home]
        without, *seats = most_saving(others, places, rest)
        if without >= saved:
            plain, fuller = seats
    kept = sorted([*plain, *fuller], key=lambda seat: (-seat["size"], seat["node"], seat["port"]))
    for seat in kept:
        role = "fuller" if seat in fuller else "reuse"
        seating.sit((seat["node"], seat["port"]), role, Reason.SLOT_REUSED, seat["worker"])
    return (home["node"], home["port"]) if home is not None and home not in kept else None


def _spread(
    seating: Seating, count: int, seated: list[str], blocked: dict[int, set[str]], alone: bool
) -> None:
    """New slots, one at a time, on the least loaded supervisor; kept apart as late as possible."""
    ports, needs = seating.ports, seating.demand["needs"]
    chosen = set(seated)
    for remaining in range(count, 0, -1):
        node, why, against = ports.best(seating.within)
        useful = max(1, remaining - 1 if alone else remaining)
        tight = [
            blocked[need["component"]]
            for need in needs
            if need["units"] - len(chosen - blocked[need["component"]]) >= useful
        ]
        if tight:
            helpful = [
                other
                for other in seating.nodes
                if ports.free[other] and other not in chosen and not any(other in nodes for nodes in tight)
            ]
            if helpful and node not in helpful:
                node, why, against = min(helpful, key=ports.load), Reason.SLOT_DIFFER, ""
        seating.sit((node, ports.free[node][0]), "empty", why)
        seating.seats[-1]["text"] = against
        chosen.add(node)


def _choose_master(seats: list[Row]) -> None:
    """An empty seat on the supervisor that has most seats of the topology becomes its master's."""
    crowd: dict[str, int] = {}
    for seat in seats:
        crowd[seat["node"]] = crowd.get(seat["node"], 0) + 1
    empty = [seat for seat in seats if seat["role"] == "empty"]
    max(empty, key=lambda seat: crowd[seat["node"]])["role"] = "master"
