"""What the pages show: values for the templates. Nothing here waits for a topology master longer
than 0.1 s at a time.
"""

import time
from collections.abc import Callable, Mapping
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
from storm_dagster.model.operation_text import operation_text
from storm_dagster.model.verbs import verbs_of_page
from storm_dagster.nimbus.http.pages.flow import COLUMNS, TopologyFlow
from storm_dagster.nimbus.http.storm.formats import Links
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.operations.context import topology_by_name

_MOST_TASKS = 200
_MOST_TIMES = 12
_CHARTS = (
    ("Tuples per second", "", (("emitted", "rate"), ("acked", "acked"))),
    ("Complete latency", "ms", (("p50", "p50_ms"), ("p95", "p95_ms"), ("p99", "p99_ms"))),
    ("Lag, and failed per second", "", (("lag", "lag"), ("failed", "failed"))),
)
_COMPONENT_CHARTS = (
    ("Tuples per second", "", (("tuples", "rate"), ("failed", "failed"))),
    ("Latency", "ms", (("p50", "p50_ms"), ("p95", "p95_ms"), ("p99", "p99_ms"))),
    ("Tuples that wait", "", (("queue", "waiting"),)),
)
_SHOWN_EVENTS = 40
_STARTING_SECS = 30
"""A worker that starts later than this after its tasks were placed was replaced in its slot."""


class PageFacts:
    """Values of each page, by the name of its template."""

    def __init__(self, nimbus: Nimbus, reader: ClusterReader) -> None:
        self._nimbus = nimbus
        self._reader = reader

    def common(self) -> dict[str, Any]:
        """For every page: this nimbus, and Dagster's address."""
        return {
            "health": self._reader.health(),
            "dagster": self._nimbus.dagster.site,
            "now": time.time(),
        }

    def topologies(self, request: Request) -> dict[str, Any]:
        """The list, which asks no topology master: its figures stand in the heartbeats of tasks."""
        wanted = query_text(request, "q", 200) or ""
        keys = {
            "name": "",
            **dict.fromkeys(("rate", "failed", "p95_ms", "capacity", "lag", "uptime_secs"), -1.0),
        }
        sort = query_word(request, "sort", keys, "name")
        beats = {one.id: one.beats for one in self._reader.view().topologies.values()}
        rows = []
        for row in self._reader.list_topologies()["topologies"]:
            known = beats.get(row["id"]) if row["status"] == "ACTIVE" else None
            summary, trend = (known.summary, known.trend) if known is not None else ({}, "")
            figures = {
                key: summary.get(key)
                for key in ("rate", "failed", "p95_ms", "capacity", "lag", "lag_rate")
            }
            picture, link = (
                Markup(trend_picture(trend)),
                f"/topologies/{quote(row['name'], safe='')}",
            )
            rows.append({**row, **figures, "trend": picture, "link": link})
        rows = [row for row in rows if wanted.lower() in row["name"].lower()]
        if sort != "name":
            rows.sort(key=lambda row: -(row[sort] if row[sort] is not None else -1.0))
        # What does not run stands on top, however the rest is sorted.
        rows.sort(key=lambda row: not (row["not_running"] or row["degraded"]))
        operations = [
            {"topology": row["topology"], "text": operation_text(row)}
            for row in self._reader.operations()
            if wanted.lower() in row["topology"].lower()
        ]
        return {"rows": rows, "wanted": wanted, "sort": sort, "operations": operations}

    def topology(self, request: Request) -> dict[str, Any]:
        """One topology: findings, graph, charts, components, tasks, workers, timeline, errors."""
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
        chosen: dict[str, str] = {
            "focus": focus,
            "sort": "" if sort == "name" else sort,
            "day": "1" if day else "",
        }

        def link(**changed: str) -> str:
            asked = urlencode({key: value for key, value in {**chosen, **changed}.items() if value})
            return here + (f"?{asked}" if asked else "")

        tasks = flow.tasks(focus)
        return {
            "topology": snapshot,
            "age": age_secs if snapshot.reported else None,
            "operations": [operation_text(row) for row in self._reader.operations(snapshot.name)],
            "findings": flow.findings,
            "graph": Markup(flow.picture(focus, lambda name: link(focus=name))),
            "narrowed": flow.narrowed(focus),
            "rows": flow.sorted_rows(sort),
            "edges": flow.edge_rows(),
            "stream_titles": [row.title for row in STREAM_METRICS],
            "stream_rows": flow.streams(focus)[:_MOST_TASKS],
            "charts": self._charts(topology, focus, day, now),
            "tasks": tasks[:_MOST_TASKS],
            "more_tasks": max(0, len(tasks) - _MOST_TASKS),
            "lags": flow.lags(focus)[:_MOST_TASKS],
            "metrics": flow.metrics(focus)[:_MOST_TASKS],
            "workers": flow.workers(Links(view)),
            "events": timeline(snapshot, self._nimbus.dagster.run_url),
            "errors": snapshot.errors[:20],
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
        """Where each task is, and why."""
        topology = topology_by_name(self._reader.view(), request.path_params["name"])
        document = self._reader.placement(topology.id)
        components = {int(task): name for task, name in document.get("components", {}).items()}
        slots: Mapping[str, str] = document.get("slots", {})
        reasons, unassigned, waiting = (
            document.get(key) or {} for key in ("reasons", "unassigned", "waiting")
        )
        drawn = running_supervisors(workers_of(topology, now_secs=int(time.time())))
        title = f"Tasks of {topology.base.name}"
        return {
            "topology": topology,
            "here": f"/topologies/{quote(topology.base.name, safe='')}",
            "picture": Markup(slots_picture(drawn, title, by_component=True)),
            "tasks": [
                (
                    task,
                    components[task],
                    slots.get(str(task)),
                    _why(str(task), reasons, unassigned, waiting),
                )
                for task in sorted(components)
            ],
            "worker_reasons": sorted((document.get("worker_reasons") or {}).items()),
            "warnings": document.get("warnings") or [],
        }

    def hosts(self, request: Request) -> dict[str, Any]:
        """Hosts with their slots, and what runs in each."""
        view, now = self._reader.view(), int(time.time())
        links = Links(view)
        drawn: list[DrawnSupervisor] = []
        rows: list[dict[str, Any]] = []
        for supervisor in supervisors_of(view, now_secs=now, workers=True):
            slots = drawn_slots(supervisor.slots)
            drawn.append(DrawnSupervisor(supervisor.id, supervisor.info.host, slots))
            rows.append({"supervisor": supervisor, "log": links.supervisor(supervisor.id)})
        return {"picture": Markup(slots_picture(drawn, "Hosts and slots")), "rows": rows}

    def _charts(self, topology: Any, focus: str, day: bool, now: float) -> list[dict[str, Any]]:
        history = self._reader.history(topology, focus, day)
        interval = float(history.get("interval") or (300 if day else 10))
        columns = history.get("columns") or ["time"]
        rows = [dict(zip(columns, row, strict=True)) for row in history.get("rows") or ()]
        # A young topology has a picture of its own time.
        since = max(
            now - (86_400 if day else 3600),
            min(topology.base.launch_time_secs, now - 12 * interval),
        )
        found: list[dict[str, Any]] = []
        for title, unit, lines in _COMPONENT_CHARTS if focus else _CHARTS:
            drawn = [
                Line(label, [(row["time"], row.get(column)) for row in rows])
                for label, column in lines
            ]
            every = max(1, len(rows) // _MOST_TIMES)
            found.append(
                {
                    "title": title,
                    "unit": unit,
                    "keys": [
                        (label, Markup(key_picture(number)))
                        for number, (label, _) in enumerate(lines)
                    ],
                    "svg": Markup(
                        chart_picture(drawn, title, since=since, until=now, interval=interval)
                    ),
                    "rows": [
                        (row["time"], [row.get(name) for _, name in lines])
                        for row in rows[::-1][::every]
                    ],
                }
            )
        return found if rows else []

    def _verbs(self, name: str) -> list[tuple[str, str, str, str | None]]:
        """(verb, its effect, command, page in Dagster)."""
        return [
            (verb.name, verb.summary, verb.command(name), self._nimbus.dagster.job_url(verb.job))
            for verb in verbs_of_page()
        ]


def _why(
    task: str, reasons: Mapping[str, str], unassigned: Mapping[str, str], waiting: Mapping[str, str]
) -> str:
    if task in unassigned:
        return unassigned[task]
    return (
        f"its worker is gone; it would go to {waiting[task]} now"
        if task in waiting
        else reasons.get(task, "")
    )


@dataclass(frozen=True)
class Event:
    """One line of the timeline."""

    at_secs: float
    """Epoch seconds."""
    action: str
    text: str
    run: str | None = None
    """URL of the Dagster run; ``None`` when there was none, or no Dagster is known."""


def timeline(topology: TopologySnapshot, run_url: Callable[[str], str | None]) -> list[Event]:
    """The newest events, newest first: as many as a page holds."""
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
    return sorted(events, key=lambda event: -event.at_secs)[:_SHOWN_EVENTS]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:160]
