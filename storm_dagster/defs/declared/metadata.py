"""Metadata of one topology from `show`: its state, its workers and their logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import dagster as dg

from storm_dagster.model.ranges import encode_ranges

_MOST_WORKERS = 100


def spout_metrics(document: Mapping[str, Any] | None) -> tuple[float, float]:
    """(mean complete latency in ms, share of tuples that failed) over all spouts."""
    acked = failed = 0
    weighted = 0.0
    for part in ((document or {}).get("components") or {}).values():
        stats = part.get("stats") or {}
        if part.get("type") == "spout":
            acked += int(stats.get("acked") or 0)
            failed += int(stats.get("failed") or 0)
            weighted += float(stats.get("complete_ms") or 0.0) * int(stats.get("acked") or 0)
    return (
        round(weighted / acked, 3) if acked else 0.0,
        round(failed / (acked + failed), 5) if acked + failed else 0.0,
    )


def component_state(document: Mapping[str, Any] | None) -> dict[str, dict[str, int]]:
    """Component -> how many tasks and executors it has."""
    parts = ((document or {}).get("components") or {}).items()
    return {name: {"tasks": len(part["tasks"]), "executors": part["executors"]} for name, part in parts}


def topology_state(document: Mapping[str, Any] | None) -> dict[str, Any]:
    """The topology in a few numbers, none of which changes while nothing happens."""
    if document is None:
        return {"topology_id": "none", "status": "NOT RUNNING", "workers": 0, "tasks": 0, "running": 0}
    return {
        "topology_id": str(document["id"]),
        "status": str(document["status"]),
        "workers": len(document["workers"]),
        "tasks": len(document["tasks"]),
        "running": sum(1 for task in document["tasks"] if task["status"] == "running"),
    }


def workers_markdown(document: Mapping[str, Any], services: Mapping[str, str | None]) -> dg.MarkdownMetadataValue:
    """A row for each worker, which links to its log. ``services``: supervisor id -> its HTTP service."""
    rows = ["| worker | pid | tasks | code |", "|---|---|---|---|"]
    for worker in document["workers"][:_MOST_WORKERS]:
        place, base = f"{worker['host']}:{worker['port']}", services.get(worker["node"])
        file = quote(f"{document['id']}/{worker['port']}/worker.log", safe="")
        linked = f"[{place}]({base}/api/v1/log?file={file})" if base else place
        tasks, code = encode_ranges(worker["tasks"]), str(worker["version"] or "")[:16]
        rows.append(f"| {linked} | {worker['pid'] or 'none'} | {tasks} | {code} |")
    if len(document["workers"]) > _MOST_WORKERS:
        rows.append(f"| ... and {len(document['workers']) - _MOST_WORKERS} more | | | |")
    return dg.MetadataValue.md("\n".join(rows))
