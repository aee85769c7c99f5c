"""Graph of a topology for the pages of Storm's REST: its components and its streams."""

import re
from typing import Any
from urllib.parse import quote

from storm_dagster.core.snapshot.tasks import ExecutorSnapshot
from storm_dagster.core.snapshot.windows import WINDOWS, is_system_name
from storm_dagster.core.submission.tasks import with_system_components
from storm_dagster.model.topology import InputSpec
from storm_dagster.nimbus.requests.reading import ClusterReader

_UNSAFE = re.compile(r"[^A-Za-z_\-:.]")
"""Characters that Storm's page replaces in the name of a stream, digits included."""
_COLUMNS = 4
"""Switches in one row of the page."""


def _sane(stream: str) -> str:
    """A stream's name as an identifier of Storm's page."""
    name = stream if re.match(r"[A-Za-z]", stream) else f"s{stream}"
    return _UNSAFE.sub("_", name)


def visualization(reader: ClusterReader, name: str, window: str, sys: bool) -> dict[str, Any]:
    """Component -> its numbers, executors and inputs, with Storm's keys.

    Components without a snapshot are left out. With ``sys`` those of the system are included.
    """
    snapshot = reader.snapshot(name)
    runnable = reader.runnable(snapshot.id)
    spec = with_system_components(runnable.spec, runnable.conf) if sys else runnable.spec
    graph: dict[str, Any] = {}
    for component_id, kind, declared in spec.components():
        part = snapshot.components.get(component_id)
        if part is None:
            continue
        totals = part.windows[window].totals(include_sys=sys)
        transferred = part.windows[window].transferred
        topology_path = f"/api/v1/topology/{quote(snapshot.id, safe='')}"
        graph[component_id] = {
            ":type": kind,
            ":capacity": part.capacity,
            ":latency": totals.complete_ms if kind == "spout" else totals.execute_ms,
            ":transferred": {
                stream: count
                for stream, count in transferred.items()
                if sys or not is_system_name(stream)
            },
            ":stats": [_visual_stats(executor) for executor in part.executors],
            ":link": f"{topology_path}/component/{quote(component_id, safe='')}",
            ":inputs": [
                _visual_input(stream_input)
                for stream_input in declared.inputs
                if sys or not is_system_name(stream_input.stream)
            ],
        }
    return graph


def _visual_stats(executor: ExecutorSnapshot) -> dict[str, Any]:
    transferred = {window: dict(executor.windows[window].transferred) for window in WINDOWS}
    return {
        ":host": executor.host,
        ":port": executor.port,
        ":uptime_secs": executor.uptime_secs,
        ":transferred": transferred,
    }


def _visual_input(stream_input: InputSpec) -> dict[str, Any]:
    return {
        ":component": stream_input.component,
        ":stream": stream_input.stream,
        ":sani-stream": _sane(stream_input.stream),
        ":grouping": stream_input.grouping.type,
    }


def visualization_table(reader: ClusterReader, name: str, window: str, sys: bool) -> dict[str, Any]:
    """Every stream once, in rows of four, for the switches of a page."""
    graph = visualization(reader, name, window, sys)
    streams: set[str] = set()
    for component in graph.values():
        streams.update(stream_input[":stream"] for stream_input in component[":inputs"])
    boxes = [
        {":stream": stream, ":sani-stream": _sane(stream), ":checked": not is_system_name(stream)}
        for stream in sorted(streams)
    ]
    rows = [boxes[start : start + _COLUMNS] for start in range(0, len(boxes), _COLUMNS)]
    return {"visualizationTable": rows}
