"""Runs in Spark: what a topology with a past, or with wishes, wants of the slots. One row for each topology."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from storm_dagster.spark.assignment.past import KEPT, LOST, UNSTOPPED, Executors, OldWorker, Past, read_past
from storm_dagster.spark.assignment.schema import DEMANDS

__all__ = ["demand_of"]

Row = dict[str, Any]


def demand_of(key: tuple[pa.Scalar, ...], units: pa.Table, rows: pa.Table) -> pa.Table:
    """The demand of one topology from its executors and the rows about it."""
    facts = rows.to_pylist()
    text = next(row["text"] for row in facts if row["kind"] == "about")
    about = json.loads(text)
    executors = Executors(units)
    past = read_past(about, executors, facts)
    demand = _demand(about, executors, past)
    row = {"cluster": key[0].as_py(), "topology": key[1].as_py(), "text": text, "demand": demand}
    return pa.Table.from_pylist([row], schema=DEMANDS)


def _demand(about: Row, executors: Executors, past: Past) -> Row:
    loose = set(past.loose())
    tasks = executors.tasks() if "size" in executors.columns else None
    even = about["strategy"] == "even"
    master = about["master"] if past.alone and not even else -1
    state = KEPT if about["event"] == "monitor" else LOST
    seats: list[Row] = []
    for number, worker in enumerate(past.old):
        if worker.state != state:
            continue
        holds = worker.holds if even else [position for position in worker.holds if position in loose]
        components = [executors.component[position] for position in holds]
        weights = _weights(worker, [p for p in holds if executors.component[p] != master], tasks)
        seats.append(
            {
                "worker": number,
                "node": worker.node,
                "port": worker.port,
                "size": sum(component != master for component in components),
                "weights": list(weights),
                "numbers": list(weights.values()),
                "master": master in components,
            }
        )
    return {
        "settled": not past.needed and not (even and about["event"] == "monitor"),
        "count": past.count,
        "staying": past.staying,
        "alone": past.alone,
        "claims": [
            {
                "node": claim.node,
                "port": claim.port,
                "host": claim.host,
                "old": claim.old,
                "size": len(claim.holds),
                "hint_node": claim.hint[0] if claim.hint else None,
                "hint_port": claim.hint[1] if claim.hint else None,
                "components": sorted({executors.component[position] for position in claim.holds}),
            }
            for claim in past.claims
        ],
        "own": [{"node": node, "port": port} for node, port in past.own],
        "seats": seats,
        "needs": _needs(about, executors, past, loose),
        "fixed": [len(worker.holds) for worker in past.old if worker.state == UNSTOPPED],
        "total": len(executors.unit),
        "missing": len(past.needed),
        "loose": len(loose),
        "clash": past.clash,
    }


def _weights(worker: OldWorker, holds: list[int], tasks: list[list[int]] | None) -> dict[int, int]:
    """How many of the executors have how many tasks in this worker, the largest first."""
    if tasks is None:
        return {1: len(holds)} if holds else {}
    counts: dict[int, int] = {}
    for position in holds:
        here = len(worker.tasks.intersection(tasks[position]))
        counts[here] = counts.get(here, 0) + 1
    return dict(sorted(counts.items(), reverse=True))


def _needs(about: Row, executors: Executors, past: Past, loose: set[int]) -> list[Row]:
    """Components that must be apart: how many are to be placed, and supervisors that hold one for good."""
    needs: list[Row] = []
    for component in about["differ"]:
        count = sum(executors.component[position] == component for position in loose)
        blocked = {
            worker.node
            for worker in past.old
            if worker.state != LOST and any(executors.component[p] == component for p in worker.holds)
        }
        if count:
            needs.append({"component": component, "units": count, "blocked": sorted(blocked)})
    return needs
