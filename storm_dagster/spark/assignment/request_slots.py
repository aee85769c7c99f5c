"""Slot requests of topologies with a history, one row for each topology. Runs in Spark."""

from __future__ import annotations

import json
from collections import Counter

import pyarrow as pa

from storm_dagster.spark.assignment.history import (
    KEPT,
    LOST,
    UNSTOPPED,
    EventHistory,
    Executors,
    HeldWorker,
    read_history,
)
from storm_dagster.spark.assignment.schema import SLOT_REQUESTS, Row


def request_slots(key: tuple[pa.Scalar, ...], units: pa.Table, rows: pa.Table) -> pa.Table:
    """Slot request of one topology from its executors and the rows about it."""
    facts = rows.to_pylist()
    text = next(row["text"] for row in facts if row["kind"] == "about")
    about = json.loads(text)
    executors = Executors(units)
    history = read_history(about, executors, facts)
    request = _request(about, executors, history)
    row = {"cluster": key[0].as_py(), "topology": key[1].as_py(), "text": text, "request": request}
    return pa.Table.from_pylist([row], schema=SLOT_REQUESTS)


def _request(about: Row, executors: Executors, history: EventHistory) -> Row:
    unassigned = set(history.unassigned())
    tasks = executors.tasks() if "size" in executors.columns else None
    even = about["strategy"] == "even"
    master = about["master"] if history.alone and not even else -1
    state = KEPT if about["event"] == "monitor" else LOST
    reusable: list[Row] = []
    for number, worker in enumerate(history.old):
        if worker.state != state:
            continue
        holds = worker.holds if even else [position for position in worker.holds if position in unassigned]
        components = [executors.component[position] for position in holds]
        weights = _weights(worker, [p for p in holds if executors.component[p] != master], tasks)
        reusable.append(
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
        "unchanged": not history.needed and not (even and about["event"] == "monitor"),
        "count": history.count,
        "staying": history.staying,
        "alone": history.alone,
        "requested": [
            {
                "node": wanted.node,
                "port": wanted.port,
                "host": wanted.host,
                "old": wanted.old,
                "size": len(wanted.holds),
                "hint_node": wanted.hint[0] if wanted.hint else None,
                "hint_port": wanted.hint[1] if wanted.hint else None,
                "components": sorted({executors.component[position] for position in wanted.holds}),
            }
            for wanted in history.requested
        ],
        "own": [{"node": node, "port": port} for node, port in history.own],
        "reusable": reusable,
        "needs": _needs(about, executors, history, unassigned),
        "fixed": [len(worker.holds) for worker in history.old if worker.state == UNSTOPPED],
        "total": len(executors.unit),
        "missing": len(history.needed),
        "unassigned": len(unassigned),
        "clash": history.clash,
    }


def _weights(worker: HeldWorker, holds: list[int], tasks: list[list[int]] | None) -> dict[int, int]:
    """Tasks in this worker -> number of executors that have so many, the largest first."""
    if tasks is None:
        return {1: len(holds)} if holds else {}
    counts = Counter(len(worker.tasks.intersection(tasks[position])) for position in holds)
    return dict(sorted(counts.items(), reverse=True))


def _needs(about: Row, executors: Executors, history: EventHistory, unassigned: set[int]) -> list[Row]:
    """Components that must be apart: number to place, and supervisors that already hold one."""
    needs: list[Row] = []
    for component in about["differ"]:
        count = sum(executors.component[position] == component for position in unassigned)
        blocked = {
            worker.node
            for worker in history.old
            if worker.state != LOST and any(executors.component[p] == component for p in worker.holds)
        }
        if count:
            needs.append({"component": component, "units": count, "blocked": sorted(blocked)})
    return needs
