"""Sensors that observe the daemons as external assets: on change, and at most once a minute.

Heartbeats and statistics never become events: one event costs Dagster 13 ms and stays for ever.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg

from storm_dagster.core.pictures.slots import (
    DrawnSupervisor,
    drawn_slots,
    running_supervisors,
    slots_picture,
)
from storm_dagster.core.snapshot.cluster import supervisors_of, workers_by_supervisor
from storm_dagster.core.snapshot.workers import workers_of
from storm_dagster.defs.keys import NIMBUS, SUPERVISORS, TOPOLOGIES, WORKERS
from storm_dagster.defs.metadata import (
    MOST_LOGS,
    log_link,
    notes,
    picture_markdown,
    table,
)
from storm_dagster.defs.observe.checks import (
    CHECK_ASSETS,
    outcome_of,
    view_findings,
    violations_result,
)
from storm_dagster.defs.resources.handles import ZooKeeperResource
from storm_dagster.model import paths
from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.model.ranges import encode_ranges
from storm_dagster.model.view import ClusterView


def statistics_links(http: str, name: str = "") -> dict[str, dg.UrlMetadataValue]:
    """Links to the current state of the topologies, or of one, at the leader at ``http``; none
    without a leader.
    """
    one = f"/{name}" if name else ""
    page = f"/topologies{one}" if name else "/"
    pages = (
        {"page": page, "statistics": f"/v1/topologies{one}", "metrics": "/metrics"} if http else {}
    )
    return {name: dg.MetadataValue.url(f"{http.rstrip('/')}{path}") for name, path in pages.items()}


def drawn_supervisors(view: ClusterView) -> list[DrawnSupervisor]:
    """The supervisors of ``view``, those that assignments name but that are gone included."""
    now_secs = int(time.time())
    drawn: list[DrawnSupervisor] = []
    for supervisor in supervisors_of(view, now_secs=now_secs, workers=True):
        slots = drawn_slots(supervisor.slots)
        drawn.append(DrawnSupervisor(supervisor.id, supervisor.info.host, slots))
    for node, workers in workers_by_supervisor(view, now_secs=now_secs).items():
        if node not in view.supervisors:
            drawn += running_supervisors(workers, gone=True)
    return sorted(drawn, key=lambda supervisor: (supervisor.host, supervisor.id))


def supervisors_state(view: ClusterView) -> Any:
    """State of the supervisors whose change is observed."""
    used = view.used_ports()
    return {
        key: (
            info.host,
            info.ports,
            sorted(used.get(key, ())),
            info.host in view.blacklist,
            info.version,
        )
        for key, info in view.supervisors.items()
    }


def supervisors_observation(view: ClusterView, key: dg.AssetKey) -> dg.AssetObservation:
    """The supervisors of ``view`` with their slots, as an observation."""
    used = view.used_ports()
    free = {
        node: len(set(info.ports) - used.get(node, set()))
        for node, info in view.supervisors.items()
    }
    rows = [
        (
            node,
            info.host,
            encode_ranges(info.ports).replace(",", ", "),
            encode_ranges(used.get(node, ())).replace(",", ", "),
            free[node],
            info.host in view.blacklist,
            info.version,
        )
        for node, info in sorted(view.supervisors.items())
    ]
    return dg.AssetObservation(
        asset_key=key,
        metadata={
            "supervisors": table(
                "supervisor host ports used free:int blacklisted:bool version", rows
            ),
            "tasks_on_slots": picture_markdown(
                slots_picture(drawn_supervisors(view), "Supervisors and slots")
            ),
            "live": len(rows),
            "slots": sum(len(info.ports) for info in view.supervisors.values()),
            "slots_free": sum(free.values()),
            "topologies": len(view.topologies),
        },
    )


def _workers(view: ClusterView) -> list[tuple[str, str, int, str, str]]:
    """(topology, host, port, status, tasks) of each worker."""
    now_secs = int(time.time())
    rows: list[tuple[str, str, int, str, str]] = []
    for topology in view.topologies.values():
        rows += [
            (
                worker.topology_name,
                worker.host,
                worker.port,
                worker.state,
                encode_ranges(worker.tasks),
            )
            for worker in workers_of(topology, now_secs=now_secs)
        ]
    return sorted(rows, key=lambda row: row[:3])


def workers_observation(view: ClusterView, key: dg.AssetKey) -> dg.AssetObservation:
    """Every slot that an assignment names, and whether its process runs."""
    rows = _workers(view)
    linked = sorted(
        (
            topology.base.name,
            log_link(topology.id, worker.host, worker.port, view.supervisors[worker.node].http),
        )
        for topology in view.topologies.values()
        for worker in topology.workers
        if worker.node in view.supervisors
    )
    running = sum(status == "running" for _, _, _, status, _ in rows)
    return dg.AssetObservation(
        asset_key=key,
        metadata={
            "workers": table("topology host port:int status tasks", rows),
            "logs": dg.MetadataValue.md(
                "\n".join(f"- {name} {link}" for name, link in linked[:MOST_LOGS])
            ),
            "wanted": len(rows),
            "running": running,
            "not_running": len(rows) - running,
        },
    )


def topologies_state(view: ClusterView, http: str) -> Any:
    """State of the topologies whose change is observed."""
    return [
        http,
        *(
            (
                topology.id,
                topology.base.status,
                topology.assignment_at and topology.assignment_at.version,
            )
            for _, topology in sorted(view.topologies.items())
        ),
    ]


def topologies_observation(view: ClusterView, http: str, key: dg.AssetKey) -> dg.AssetObservation:
    """Every topology, and where its statistics are: at ``http``, the leader."""
    rows = [
        (
            topology.base.name,
            topology.base.status,
            len(topology.workers),
            len(topology.tasks.component_of()) if topology.tasks is not None else 0,
        )
        for topology in sorted(view.topologies.values(), key=lambda item: item.base.name)
    ]
    return dg.AssetObservation(
        asset_key=key,
        metadata={
            "topologies": table("topology status workers:int tasks:int", rows),
            "live": len(rows),
            "not_active": sum(status != "ACTIVE" for _, status, _, _ in rows),
            **statistics_links(http),
        },
    )


_AT_MOST_EVERY_SECS = 60.0
_LONGEST_PAUSE_SECS = 3600.0


def read_cursor(text: str | bytes | None) -> dict[str, Any]:
    """The cursor's JSON object; an unreadable cursor, or another sensor's, counts as none."""
    try:
        cursor = json.loads(text or "{}")
    except ValueError:
        return {}
    return cursor if isinstance(cursor, dict) else {}


def digest(value: Any) -> str:
    """Short hash of a JSON value, for comparing states without keeping them."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _due(cursor: Mapping[str, Any], now: float) -> bool:
    # Another machine's clock may have written the cursor: a time in the future never silences the
    # sensor.
    return not 0 <= now - number(cursor.get("at"), now + 1) < _pause(cursor)


def _pause(cursor: Mapping[str, Any]) -> float:
    return min(max(number(cursor.get("pause"), 0.0), _AT_MOST_EVERY_SECS), _LONGEST_PAUSE_SECS)


def number(value: Any, otherwise: float) -> float:
    """The value of a cursor, if it is a number."""
    return float(value) if isinstance(value, int | float) else otherwise


def _last_observed(cursor: Mapping[str, Any], now: float) -> dict[str, float]:
    """The time of an observation, and how long none may follow: what never rests is looked at less
    and less.
    """
    pause = _pause(cursor)
    restless = 0 <= now - number(cursor.get("at"), now + 1) < 4 * pause
    return {
        "at": now,
        "pause": min(2 * pause, _LONGEST_PAUSE_SECS) if restless else _AT_MOST_EVERY_SECS,
    }


def cluster_events(
    view: ClusterView,
    http: str,
    cursor: Mapping[str, Any],
    now: float,
    shown: Callable[[dg.AssetKey], dg.AssetKey] = lambda key: key,
) -> tuple[list[Any], dict[str, Any]]:
    """Events for what is new in ``view`` since ``cursor``, and the next cursor; ``http`` is the
    leader's address.

    Checks are evaluated when their findings change, at most once a minute. State is observed when
    it changes, at most once a minute, and after each observation that follows soon upon another one
    half as often, down to once an hour.
    """
    events: list[Any] = []
    observed: dict[str, tuple[Any, Callable[[], dg.AssetObservation]]] = {
        "state": (
            supervisors_state(view),
            lambda: supervisors_observation(view, shown(SUPERVISORS)),
        ),
        # A process that was replaced in place is no change.
        "workers": (
            [row[:-1] for row in _workers(view)],
            lambda: workers_observation(view, shown(WORKERS)),
        ),
        "topologies": (
            topologies_state(view, http),
            lambda: topologies_observation(view, http, shown(TOPOLOGIES)),
        ),
    }
    states = {name: digest(state) for name, (state, _) in observed.items()}
    found = dict(cursor)
    if _due(cursor, now):
        # Of a cluster without topologies, that it has none is no news at the first look.
        nothing = (
            {} if view.topologies else {name: states[name] for name in ("workers", "topologies")}
        )
        known = {**nothing, **cursor}
        events += [
            observe() for name, (_, observe) in observed.items() if states[name] != known.get(name)
        ]
        found.update(states, **(_last_observed(cursor, now) if events else {}))
    if _due({"at": cursor.get("checked")}, now):
        known = cursor.get("checks")
        findings = view_findings(view)
        checks = {
            name: digest([lines, sorted(view.topologies)]) for name, lines in findings.items()
        }
        for name, lines in findings.items():
            if not isinstance(known, dict) or known.get(name) != checks[name]:
                key, severity, _ = CHECK_ASSETS[name]
                result = violations_result(lines, len(view.topologies), severity)
                events.append(outcome_of(result, shown(key), name, dg.AssetCheckEvaluation))
                found.update(checks=checks, checked=now)
    return events, found


def supervisor_sensor(
    context: dg.SensorEvaluationContext, zookeeper: ZooKeeperResource
) -> dg.SensorResult | dg.SkipReason:
    """Observe what changed, and evaluate the checks, at most once a minute."""
    try:
        with zookeeper.cluster() as cluster:
            view, leader = cluster.load_view(), cluster.epoch()
    except Unavailable as error:
        return dg.SkipReason(error.message)
    http = leader[1].http if leader is not None else ""
    events, cursor = cluster_events(
        view, http, read_cursor(context.cursor), time.time(), zookeeper.asset_key
    )
    if not events:
        return dg.SkipReason(
            f"{len(view.supervisors)} supervisors, nothing new, or too soon to report it"
        )
    reason = dg.SkipReason(f"observed {len(view.supervisors)} supervisors")
    return dg.SensorResult(skip_reason=reason, asset_events=events, cursor=json.dumps(cursor))


def leader_sensor(
    context: dg.SensorEvaluationContext, zookeeper: ZooKeeperResource
) -> dg.SensorResult | dg.SkipReason:
    """Observe the leadership, on change, at most once a minute."""
    cursor, now = read_cursor(context.cursor), time.time()
    try:
        with zookeeper.cluster() as cluster:
            known = cluster.epoch()
            master = cluster.state.get_data(paths.NIMBUS_MASTER)
            followers = cluster.state.get_children(paths.NIMBUS_SLAVE)
            cluster_id = cluster.cluster_id()
    except StormDagsterError as error:
        return dg.SkipReason(error.message)
    leader = master.decode(errors="replace") if master else None
    epoch = known[0] if known else 0
    state = digest([leader, epoch, followers])
    if state == cursor.get("state") or not _due(cursor, now):
        return dg.SkipReason(f"{leader or 'nobody'} leads, epoch {epoch}: nothing new")
    observation = dg.AssetObservation(
        asset_key=zookeeper.asset_key(NIMBUS),
        metadata={
            "leader": leader or "none",
            "leader_http": known[1].http if known else "none",
            "epoch": epoch,
            "followers": len(followers),
            "nimbuses": notes(followers),
            "cluster_id": cluster_id,
            **statistics_links(known[1].http if known else ""),
        },
    )
    return dg.SensorResult(
        skip_reason=dg.SkipReason(f"observed that {leader or 'nobody'} leads, epoch {epoch}"),
        asset_events=[observation],
        cursor=json.dumps({"state": state, **_last_observed(cursor, now)}),
    )
