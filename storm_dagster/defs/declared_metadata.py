"""What nimbus's `show` says of one topology, as metadata: numbers that Dagster plots, tables, the picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from storm_dagster.defs.metadata import slots_markdown, table
from storm_dagster.defs.picture import SlotTasks

__all__ = ["component_numbers", "spout_figures", "topology_metadata"]


def spout_figures(document: Mapping[str, Any] | None) -> tuple[float, float]:
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


def component_numbers(document: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Component -> its counters and latencies."""
    return {
        name: {
            "tasks": len(part.get("tasks", ())),
            **{
                key: (part.get("stats") or {}).get(key) or 0
                for key in ("emitted", "executed", "acked", "failed", "execute_ms", "complete_ms")
            },
        }
        for name, part in ((document or {}).get("components") or {}).items()
    }


def topology_metadata(
    name: str, document: Mapping[str, Any] | None, *, plain: bool = False
) -> dict[str, Any]:
    """The topology as metadata; ``plain`` leaves out what changes by itself, tables and the picture."""
    if document is None:
        return {"topology_id": "none", "status": "NOT RUNNING", "workers": 0, "tasks": 0, "running": 0}
    latency, ratio = spout_figures(document)
    numbers = component_numbers(document)
    executed = sum(int(part["executed"]) for key, part in numbers.items() if not key.startswith("__"))
    found: dict[str, Any] = {
        "topology_id": str(document["id"]),
        "status": str(document["status"]),
        "workers": len(document["workers"]),
        "tasks": len(document["tasks"]),
        "running": sum(1 for task in document["tasks"] if task["status"] == "running"),
        "executed": executed,
        "complete_ms": latency,
        "failed_ratio": ratio,
        "errors": len(document.get("errors", ())),
    }
    if plain:
        return found
    components = {task["id"]: task["component"] for task in document["tasks"]}
    slots = [
        SlotTasks(worker["node"], worker["host"], worker["port"], tuple(worker["tasks"]))
        for worker in document["workers"]
    ]
    return {
        **found,
        "uptime_secs": int(document.get("uptime_secs") or 0),
        "slots": table(
            [("host", "string"), ("port", "int"), ("pid", "int"), ("tasks", "string")],
            [
                {
                    "host": worker["host"],
                    "port": worker["port"],
                    "pid": worker.get("pid"),
                    "tasks": str(worker["tasks"]),
                }
                for worker in document["workers"]
            ],
        ),
        "tasks_on_slots": slots_markdown(slots, components, f"{name}: tasks on slots"),
        "newest_errors": table(
            [("component", "string"), ("task", "int"), ("error", "string")],
            [
                {"component": e.get("component"), "task": e.get("task"), "error": str(e.get("error"))[:300]}
                for e in document.get("errors", ())[:20]
            ],
        ),
    }
