"""Page of a topology that is being submitted: it has no components and no workers yet."""

from typing import Any

from storm_dagster.core.snapshot.windows import WINDOWS
from storm_dagster.nimbus.http.storm.cluster_pages import starting_row
from storm_dagster.nimbus.http.storm.formats import debug_fields, format_fixed, window_hint
from storm_dagster.operations.submit.open_tokens import StartingTopology


def starting_page(topology: StartingTopology, window: str, version: str) -> dict[str, Any]:
    """The page ``/api/v1/topology/ID``, with Storm's keys and without statistics."""
    return {
        **starting_row(topology, version),
        "user": None,
        "schedulerDisplayResource": False,
        "msgTimeout": 0,
        "window": window,
        "windowHint": window_hint(window),
        "topologyStats": [_no_statistics(row_window) for row_window in WINDOWS],
        "workers": [],
        "spouts": [],
        "bolts": [],
        "configuration": {},
        **debug_fields({}),
        "visualizationTable": [],
    }


def _no_statistics(window: str) -> dict[str, Any]:
    """The row of a window in which no tuple was emitted."""
    return {
        "windowPretty": window_hint(window),
        "window": window,
        "completeLatency": format_fixed(0.0),
        "emitted": 0,
        "transferred": 0,
        "acked": 0,
        "failed": 0,
    }
