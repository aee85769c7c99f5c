"""The graph of a topology: components, the streams between them, and what flows (``/visualization``)."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

from storm_dagster.core.submission.tasks import with_system_components
from storm_dagster.nimbus.requests.page_snapshot import ComponentSnapshot
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.requests.window_stats import WINDOWS, is_system_name

_UNSAFE = re.compile(r"[^A-Za-z_\-:.]")
_COLUMNS = 4


def _sane(stream: str) -> str:
    """A stream's name as Storm's page uses it in identifiers."""
    name = stream if re.match(r"[A-Za-z]", stream) else f"s{stream}"
    return _UNSAFE.sub("_", name)


def visualization(reader: ClusterReader, name: str, window: str, sys: bool) -> dict[str, Any]:
    """Component -> its type, load, latency, what it sent by stream, executors and inputs; keys as in Storm."""
    snapshot = reader.snapshot(name)
    runnable = reader.runnable(snapshot.id)
    spec = with_system_components(runnable.spec, runnable.conf) if sys else runnable.spec
    graph: dict[str, Any] = {}
    for component_id, kind, declared in spec.components():
        part = snapshot.components.get(component_id)
        if part is None:
            continue
        totals = part.windows[window].totals(include_sys=sys)
        sent = part.windows[window].transferred
        graph[component_id] = {
            ":type": kind,
            ":capacity": part.capacity,
            ":latency": totals.complete_ms if kind == "spout" else totals.process_ms,
            ":transferred": {stream: count for stream, count in sent.items() if sys or not is_system_name(stream)},
            ":stats": _executors(part),
            ":link": f"/api/v1/topology/{quote(snapshot.id, safe='')}/component/{quote(component_id, safe='')}",
            ":inputs": [
                {
                    ":component": one.component,
                    ":stream": one.stream,
                    ":sani-stream": _sane(one.stream),
                    ":grouping": one.grouping.type,
                }
                for one in declared.inputs
                if sys or not is_system_name(one.stream)
            ],
        }
    return graph


def visualization_table(reader: ClusterReader, name: str, window: str, sys: bool) -> dict[str, Any]:
    """Every stream once, in rows of four: what a page offers to switch on and off."""
    graph = visualization(reader, name, window, sys)
    streams = sorted({one[":stream"] for part in graph.values() for one in part[":inputs"]})
    boxes = [
        {":stream": stream, ":sani-stream": _sane(stream), ":checked": not is_system_name(stream)} for stream in streams
    ]
    rows = [boxes[start : start + _COLUMNS] for start in range(0, len(boxes), _COLUMNS)]
    return {"visualizationTable": rows}


def _executors(part: ComponentSnapshot) -> list[dict[str, Any]]:
    return [
        {
            ":host": one.host,
            ":port": one.port,
            ":uptime_secs": one.uptime_secs,
            ":transferred": {window: dict(one.windows[window].transferred) for window in WINDOWS},
        }
        for one in part.executors
    ]
