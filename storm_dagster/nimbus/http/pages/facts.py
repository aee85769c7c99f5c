"""Values for the templates of the pages.

No page waits for a topology master longer than 0.1 s at a time.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from storm_dagster.core.pictures.chart import Line, chart_picture, key_picture, trend_picture
from storm_dagster.core.pictures.slots import (
    DrawnSupervisor,
    drawn_slots,
    running_supervisors,
    slots_picture,
)
from storm_dagster.core.snapshot.cluster import supervisors_of
from storm_dagster.core.snapshot.stream_metrics import STREAM_METRICS
from storm_dagster.core.snapshot.topology import TopologySnapshot
from storm_dagster.core.snapshot.workers import workers_of
from storm_dagster.http.responses import (
    error_response,
    query_flag,
    query_text,
    query_word,
    run_read,
)
from storm_dagster.model.amounts import duration
from storm_dagster.model.errors import KeyNotFound, StormDagsterError
from storm_dagster.model.event_log import event_log_text
from storm_dagster.model.operation_text import operation_text
from storm_dagster.model.verbs import verbs_of_page
from storm_dagster.nimbus.http.pages.flow import COLUMNS, TopologyFlow
from storm_dagster.nimbus.http.storm.formats import Links
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.operations.context import topology_by_name

_MAX_ROWS = 200
"""Rows of a table of tasks, streams, lags or metrics."""
_MAX_TIMES = 12
"""Rows of the table of a chart, at least, if the chart has as many."""
_MAX_ERRORS = 20
"""Errors on the page of a topology."""
_CHARTS = (
    ("Tuples per second", "", (("emitted", "rate"), ("acked", "acked"))),
    ("Complete latency", "ms", (("p50", "p50_ms"), ("p95", "p95_ms"), ("p99", "p99_ms"))),
    ("Lag, and failed per second", "", (("lag", "lag"), ("failed", "failed"))),
)
"""Charts of a topology: title, unit, and (label, column of the history) of each line."""
_COMPONENT_CHARTS = (
    ("Tuples per second", "", (("tuples", "rate"), ("failed", "failed"))),
    ("Latency", "ms", (("p50", "p50_ms"), ("p95", "p95_ms"), ("p99", "p99_ms"))),
    ("Tuples that wait", "", (("queue", "waiting"),)),
)
"""Charts of one component, likewise."""
_MAX_EVENTS = 40
"""Lines of the timeline."""
_STARTING_SECS = 30
"""A worker that starts later than this after its placement replaced another in its slot."""
_SORT_KEYS = ("name", "rate", "failed", "p95_ms", "capacity", "lag", "uptime_secs")
"""Keys by which the list of topologies is sorted."""


def _link_of_page(here: str, parameters: Mapping[str, str]) -> Callable[..., str]:
    """Function that returns the URL of the page ``here`` with some parameters changed."""

    def link(**changed: str) -> str:
        """URL of this page with the same query, except for the ``changed`` parameters."""
        values = {**parameters, **changed}
        query = urlencode({key: value for key, value in values.items() if value})
        return f"{here}?{query}" if query else here

    return link


def _flow_tables(flow: TopologyFlow, focus: str, sort: str) -> dict[str, Any]:
    """Findings and tables of a topology, those of components in the order ``sort``."""
    tasks = flow.tasks(focus)
    return {
        "findings": flow.findings,
        "center": flow.center(focus),
        "rows": flow.sorted_rows(sort),
        "edges": flow.edge_rows(),
        "stream_titles": [row.title for row in STREAM_METRICS],
        "stream_rows": flow.streams(focus)[:_MAX_ROWS],
        "tasks": tasks[:_MAX_ROWS],
        "more_tasks": max(0, len(tasks) - _MAX_ROWS),
        "lags": flow.lags(focus)[:_MAX_ROWS],
        "metrics": flow.metrics(focus)[:_MAX_ROWS],
    }


class PageFacts:
    """Values of each page, by the name of its template."""

    def __init__(self, nimbus: Nimbus, reader: ClusterReader) -> None:
        self._nimbus = nimbus
        self._reader = reader

    def common(self) -> dict[str, Any]:
        """Values for every page: this nimbus, healing, and Dagster's address."""
        return {
            "health": self._reader.health(),
            "dagster": self._nimbus.dagster.site,
            "healing": self._healing(),
            "now": time.time(),
        }

    def _healing(self) -> Mapping[str, Any] | None:
        """Healer, and the pause by operators; ``None`` without ZooKeeper."""
        try:
            return self._reader.healing()
        except StormDagsterError:
            return None

    def topologies(self, request: Request) -> dict[str, Any]:
        """The list of topologies, with numbers from the heartbeats of tasks.

        No topology master is queried.
        """
        search = query_text(request, "q", 200) or ""
        sort = query_word(request, "sort", _SORT_KEYS, "name")
        rows = [row for row in self._topology_rows() if search.lower() in row["name"].lower()]
        if sort != "name":
            rows.sort(key=lambda row: -_number_or(row[sort], -1.0))
        # Topologies that do not run completely come first in every order.
        rows.sort(key=lambda row: not (row["not_running"] or row["degraded"]))
        operations = [
            {"topology": row["topology"], "text": operation_text(row)}
            for row in self._reader.operations()
            if search.lower() in row["topology"].lower()
        ]
        return {"rows": rows, "search": search, "sort": sort, "operations": operations}

    def _topology_rows(self) -> list[dict[str, Any]]:
        """Rows of ``list --json`` with numbers, a picture of the trend, and a link.

        The numbers are ``None``, and the picture empty, unless the topology is active and its tasks
        beat.
        """
        topologies = self._reader.view().topologies.values()
        heartbeats = {topology.id: topology.beats for topology in topologies}
        rows: list[dict[str, Any]] = []
        for row in self._reader.list_topologies()["topologies"]:
            summary: Mapping[str, Any] = {}
            trend = ""
            beats = heartbeats.get(row["id"])
            if beats is not None and row["status"] == "ACTIVE":
                summary = beats.summary
                trend = beats.trend
            numbers = {
                key: summary.get(key)
                for key in ("rate", "failed", "p95_ms", "capacity", "lag", "lag_rate")
            }
            picture = Markup(trend_picture(trend))
            link = f"/topologies/{quote(row['name'], safe='')}"
            rows.append({**row, **numbers, "trend": picture, "link": link})
        return rows

    def topology(self, request: Request) -> dict[str, Any]:
        """One topology: findings, graph, charts, tables, timeline, errors.

        The query has ``focus`` (a component that the page is about), ``sort`` (a column of the
        components) and ``day`` (charts of a day instead of an hour). :class:`KeyNotFound` for an
        unknown component.
        """
        view = self._reader.view()
        topology = topology_by_name(view, request.path_params["name"])
        now = time.time()
        errors = self._reader.errors(topology)
        snapshot, age_secs = self._reader.page_snapshot(view, topology, errors)
        flow = TopologyFlow(snapshot)
        focus = query_text(request, "focus", 200) or ""
        if focus and focus not in flow.rows:
            raise KeyNotFound(f"topology {topology.base.name!r} has no component {focus!r}")
        sort = query_word(request, "sort", COLUMNS, "name")
        day = query_flag(request, "day")
        here = f"/topologies/{quote(topology.base.name, safe='')}"
        parameters: dict[str, str] = {
            "focus": focus,
            "sort": "" if sort == "name" else sort,
            "day": "1" if day else "",
        }
        link = _link_of_page(here, parameters)
        summary = self._nimbus.cluster.event_log_document(topology.base.name)
        return {
            "topology": snapshot,
            "event_log": None if summary is None else event_log_text(summary, now),
            "age": age_secs if snapshot.reported else None,
            "operations": [operation_text(row) for row in self._reader.operations(snapshot.name)],
            "graph": Markup(flow.picture(focus, lambda name: link(focus=name))),
            **_flow_tables(flow, focus, sort),
            "charts": self._charts(topology, focus, day, now),
            "workers": flow.workers(Links(view)),
            "events": timeline(snapshot, self._nimbus.dagster.run_url),
            "errors": snapshot.errors[:_MAX_ERRORS],
            "focus": focus,
            "sort": sort,
            "columns": COLUMNS,
            "day": day,
            "here": here,
            "link": link,
            "verbs": self._verbs(topology.base.name),
        }

    async def graph_file(self, request: Request) -> Response:
        """The graph alone, as a file."""

        def draw() -> str:
            view = self._reader.view()
            topology = topology_by_name(view, request.path_params["name"])
            snapshot, _ = self._reader.page_snapshot(view, topology)
            return TopologyFlow(snapshot).picture("", None)

        try:
            return Response(
                await run_read(draw),
                media_type="image/svg+xml",
                headers={"Cache-Control": "no-store"},
            )
        except StormDagsterError as error:
            return error_response(error)

    def placement(self, request: Request) -> dict[str, Any]:
        """The slot of each task, and the reason for it."""
        topology = topology_by_name(self._reader.view(), request.path_params["name"])
        document = self._reader.placement(topology.id)
        components = {int(task): name for task, name in document.get("components", {}).items()}
        slots: Mapping[str, str] = document.get("slots", {})
        tasks = [
            (task, components[task], slots.get(str(task)), _reason(str(task), document))
            for task in sorted(components)
        ]
        supervisors = running_supervisors(workers_of(topology, now_secs=int(time.time())))
        title = f"Tasks of {topology.base.name}"
        return {
            "topology": topology,
            "here": f"/topologies/{quote(topology.base.name, safe='')}",
            "picture": Markup(slots_picture(supervisors, title, by_component=True)),
            "tasks": tasks,
            "worker_reasons": sorted((document.get("worker_reasons") or {}).items()),
            "warnings": document.get("warnings") or [],
        }

    def hosts(self, request: Request) -> dict[str, Any]:
        """Hosts with their slots, and the workers in them."""
        view = self._reader.view()
        now_secs = int(time.time())
        links = Links(view)
        drawn: list[DrawnSupervisor] = []
        rows: list[dict[str, Any]] = []
        for supervisor in supervisors_of(view, now_secs=now_secs, workers=True):
            slots = drawn_slots(supervisor.slots)
            drawn.append(DrawnSupervisor(supervisor.id, supervisor.info.host, slots))
            rows.append({"supervisor": supervisor, "log": links.supervisor(supervisor.id)})
        return {"picture": Markup(slots_picture(drawn, "Hosts and slots")), "rows": rows}

    def _charts(self, topology: Any, focus: str, day: bool, now: float) -> list[dict[str, Any]]:
        """Charts of a topology, or of the component ``focus``; none without a history.

        Each is ``{"title", "unit", "keys", "svg", "rows"}``: ``keys`` explain its lines, ``rows``
        are its numbers as a table. ``now`` is in epoch seconds.
        """
        history = self._reader.history(topology, focus, day)
        # Only an empty history, which has no charts, has no interval.
        interval = float(history.get("interval") or (300 if day else 10))
        columns = history.get("columns") or ["time"]
        rows = [dict(zip(columns, row, strict=True)) for row in history.get("rows") or ()]
        if not rows:
            return []
        # The chart of a young topology begins with the topology, but has 12 intervals at least.
        since = max(
            now - (86_400 if day else 3600),
            min(topology.base.launch_time_secs, now - 12 * interval),
        )
        charts: list[dict[str, Any]] = []
        for title, unit, lines in _COMPONENT_CHARTS if focus else _CHARTS:
            drawn_lines = [_chart_line(label, column, rows) for label, column in lines]
            picture = chart_picture(drawn_lines, title, since=since, until=now, interval=interval)
            keys = [(label, Markup(key_picture(number))) for number, (label, _) in enumerate(lines)]
            charts.append(
                {
                    "title": title,
                    "unit": unit,
                    "keys": keys,
                    "svg": Markup(picture),
                    "rows": _chart_rows([column for _, column in lines], rows),
                }
            )
        return charts

    def _verbs(self, name: str) -> list[tuple[str, str, str, str | None]]:
        """(verb, its effect, command, page in Dagster)."""
        return [
            (verb.name, verb.summary, verb.command(name), self._nimbus.dagster.job_url(verb.job))
            for verb in verbs_of_page()
        ]


def _number_or(number: float | None, default: float) -> float:
    return default if number is None else number


def _chart_line(label: str, column: str, rows: Sequence[Mapping[str, Any]]) -> Line:
    return Line(label, [(row["time"], row.get(column)) for row in rows])


def _chart_rows(
    columns: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> list[tuple[float, list[float | None]]]:
    """(time, value of each column) of some rows, the newest first, at equal distances."""
    step = max(1, len(rows) // _MAX_TIMES)
    newest = len(rows) - 1
    table: list[tuple[float, list[float | None]]] = []
    for index in range(newest, -1, -step):
        row = rows[index]
        table.append((row["time"], [row.get(column) for column in columns]))
    return table


def _reason(task: str, document: Mapping[str, Any]) -> str:
    """The reason for the slot of a task, in a document of a placement."""
    unassigned: Mapping[str, str] = document.get("unassigned") or {}
    waiting: Mapping[str, str] = document.get("waiting") or {}
    reasons: Mapping[str, str] = document.get("reasons") or {}
    if task in unassigned:
        return unassigned[task]
    if task in waiting:
        return f"its worker is gone; it would go to {waiting[task]} now"
    return reasons.get(task, "")


@dataclass(frozen=True)
class Event:
    """One line of the timeline."""

    at_secs: float
    """Epoch seconds."""
    action: str
    text: str
    run: str | None = None
    """URL of the Dagster run; ``None`` without a run or a known Dagster."""


def timeline(topology: TopologySnapshot, run_url: Callable[[str], str | None]) -> list[Event]:
    """The newest events of a topology, newest first, at most 40."""
    events: list[Event] = []
    for component, error in topology.errors:
        place = f"{component}[{error.task}] on {error.host}:{error.port}"
        events.append(Event(error.time, "error", f"{place}: {_last_line(error.error)}"))
    for change in topology.changes:
        parts = [change.why] if change.why else []
        if change.moved:
            parts.append(f"{change.moved} tasks moved")
        if change.outage_secs:
            parts.append(f"silent for {duration(change.outage_secs)} before")
        run = run_url(change.run) if change.run else None
        events.append(Event(change.at_secs, change.action, ", ".join(parts), run))
    for worker in topology.workers:
        started_secs = worker.started_secs
        if started_secs is not None and started_secs > worker.placed_secs + _STARTING_SECS:
            text = f"worker {worker.address} in its place, process {worker.pid}"
            events.append(Event(started_secs, "started", text))
    return sorted(events, key=lambda event: -event.at_secs)[:_MAX_EVENTS]


def _last_line(text: str) -> str:
    """Last line of an error, which names the exception of a traceback; at most 160 characters."""
    return (text.strip().splitlines() or [""])[-1][:160]
