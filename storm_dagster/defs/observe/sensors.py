"""Sensors that observe the daemons as external assets.

They observe changes, at most once a minute. Heartbeats and statistics never become events, because
one event costs Dagster 13 ms and is stored permanently.
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
    MAX_LOGS,
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

_MIN_PAUSE_SECS = 60.0
"""Shortest pause after an observation of a sensor."""
_MAX_PAUSE_SECS = 3600.0
"""Longest pause after an observation, while the state changes all the time."""


def statistics_links(http: str, name: str = "") -> dict[str, dg.UrlMetadataValue]:
    """Links to the state of the topologies, or of one, at the leader.

    ``http`` is the leader's address. Empty without a leader.
    """
    if not http:
        return {}
    pages = {
        "page": f"/topologies/{name}" if name else "/",
        "statistics": f"/v1/topologies/{name}" if name else "/v1/topologies",
        "metrics": "/metrics",
    }
    address = http.rstrip("/")
    return {title: dg.MetadataValue.url(f"{address}{path}") for title, path in pages.items()}


def drawn_supervisors(view: ClusterView) -> list[DrawnSupervisor]:
    """The supervisors of ``view``, including missing ones that assignments name."""
    now_secs = int(time.time())
    drawn: list[DrawnSupervisor] = []
    for supervisor in supervisors_of(view, now_secs=now_secs, workers=True):
        slots = drawn_slots(supervisor.slots)
        drawn.append(DrawnSupervisor(supervisor.id, supervisor.info.host, slots))
    for supervisor_id, workers in workers_by_supervisor(view, now_secs=now_secs).items():
        if supervisor_id not in view.supervisors:
            drawn += running_supervisors(workers, gone=True)
    return sorted(drawn, key=lambda supervisor: (supervisor.host, supervisor.id))


def supervisors_state(view: ClusterView) -> dict[str, Any]:
    """Supervisor id -> the fields whose change is observed.

    They are host, ports, used ports, blacklisted, version.
    """
    used = view.used_ports()
    state: dict[str, Any] = {}
    for supervisor_id, info in view.supervisors.items():
        is_blacklisted = info.host in view.blacklist
        used_ports = sorted(used.get(supervisor_id, ()))
        fields = (info.host, info.ports, used_ports, is_blacklisted, info.version)
        state[supervisor_id] = fields
    return state


def supervisors_observation(view: ClusterView, key: dg.AssetKey) -> dg.AssetObservation:
    """The supervisors of ``view`` with their slots, as an observation."""
    used = view.used_ports()
    slots = 0
    free_slots = 0
    # The cells of the columns below.
    rows: list[tuple[str, str, str, str, int, bool, str]] = []
    for supervisor_id, info in sorted(view.supervisors.items()):
        used_ports = used.get(supervisor_id, set())
        free = len(set(info.ports) - used_ports)
        slots += len(info.ports)
        free_slots += free
        rows.append(
            (
                supervisor_id,
                info.host,
                encode_ranges(info.ports).replace(",", ", "),
                encode_ranges(used_ports).replace(",", ", "),
                free,
                info.host in view.blacklist,
                info.version,
            )
        )
    picture = slots_picture(drawn_supervisors(view), "Supervisors and slots")
    return dg.AssetObservation(
        asset_key=key,
        metadata={
            "supervisors": table(
                "supervisor host ports used free:int blacklisted:bool version", rows
            ),
            "tasks_on_slots": picture_markdown(picture),
            "live": len(rows),
            "slots": slots,
            "slots_free": free_slots,
            "topologies": len(view.topologies),
        },
    )


def _workers(view: ClusterView) -> list[tuple[str, str, int, str, str]]:
    """(topology, host, port, status, task ranges) of each worker, sorted."""
    now_secs = int(time.time())
    rows: list[tuple[str, str, int, str, str]] = []
    for topology in view.topologies.values():
        for worker in workers_of(topology, now_secs=now_secs):
            tasks = encode_ranges(worker.tasks)
            rows.append((worker.topology_name, worker.host, worker.port, worker.state, tasks))
    return sorted(rows, key=lambda row: row[:3])


def _log_links(view: ClusterView) -> list[tuple[str, str]]:
    """(topology, link to its log) of each worker whose supervisor is registered."""
    links: list[tuple[str, str]] = []
    for topology in view.topologies.values():
        for worker in topology.workers:
            supervisor = view.supervisors.get(worker.node)
            if supervisor is not None:
                link = log_link(topology.id, worker.host, worker.port, supervisor.http)
                links.append((topology.base.name, link))
    return sorted(links)


def workers_observation(view: ClusterView, key: dg.AssetKey) -> dg.AssetObservation:
    """Every slot that an assignment names, with the status of its process."""
    rows = _workers(view)
    links = [f"- {name} {link}" for name, link in _log_links(view)[:MAX_LOGS]]
    running = sum(status == "running" for _, _, _, status, _ in rows)
    return dg.AssetObservation(
        asset_key=key,
        metadata={
            "workers": table("topology host port:int status tasks", rows),
            "logs": dg.MetadataValue.md("\n".join(links)),
            "wanted": len(rows),
            "running": running,
            "not_running": len(rows) - running,
        },
    )


def topologies_state(view: ClusterView, http: str) -> list[Any]:
    """State of the topologies whose change is observed.

    The first item is ``http``, the leader's address; the others are (topology id, status, version
    of the assignment).
    """
    state: list[Any] = [http]
    for _, topology in sorted(view.topologies.items()):
        version = topology.assignment_at.version if topology.assignment_at else None
        state.append((topology.id, topology.base.status, version))
    return state


def topologies_observation(view: ClusterView, http: str, key: dg.AssetKey) -> dg.AssetObservation:
    """Every topology, with links to its statistics at ``http``, the leader's address."""
    rows: list[tuple[str, str, int, int]] = []
    for topology in sorted(view.topologies.values(), key=lambda topology: topology.base.name):
        tasks = len(topology.tasks.component_of()) if topology.tasks is not None else 0
        rows.append((topology.base.name, topology.base.status, len(topology.workers), tasks))
    return dg.AssetObservation(
        asset_key=key,
        metadata={
            "topologies": table("topology status workers:int tasks:int", rows),
            "live": len(rows),
            "not_active": sum(status != "ACTIVE" for _, status, _, _ in rows),
            **statistics_links(http),
        },
    )


def read_cursor(text: str | bytes | None) -> dict[str, Any]:
    """The cursor's JSON object; empty if it is unreadable or another sensor's."""
    try:
        cursor = json.loads(text or "{}")
    except ValueError:
        return {}
    return cursor if isinstance(cursor, dict) else {}


def digest(value: Any) -> str:
    """Short hash of a JSON value, to compare states without storing them."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _due(cursor: Mapping[str, Any], now: float) -> bool:
    """True if the pause after the last observation, at ``cursor["at"]``, has passed."""
    # Another machine's clock may have written the cursor: a time in the future never silences the
    # sensor.
    return not 0 <= now - number(cursor.get("at"), now + 1) < _pause_secs(cursor)


def _pause_secs(cursor: Mapping[str, Any]) -> float:
    """The pause after the last observation, limited to one minute up to one hour."""
    pause_secs = max(number(cursor.get("pause"), 0.0), _MIN_PAUSE_SECS)
    return min(pause_secs, _MAX_PAUSE_SECS)


def number(value: Any, default: float) -> float:
    """The value of a cursor if it is a number, else ``default``."""
    return float(value) if isinstance(value, int | float) else default


def _last_observed(cursor: Mapping[str, Any], now: float) -> dict[str, float]:
    """Time of an observation (``at``), and the ``pause`` after it, for the cursor.

    The pause doubles if the former observation is less than four of its pauses ago; otherwise it
    is the shortest one.
    """
    former_secs = _pause_secs(cursor)
    pause_secs = _MIN_PAUSE_SECS
    if 0 <= now - number(cursor.get("at"), now + 1) < 4 * former_secs:
        pause_secs = min(2 * former_secs, _MAX_PAUSE_SECS)
    return {"at": now, "pause": pause_secs}


def cluster_events(
    view: ClusterView,
    http: str,
    cursor: Mapping[str, Any],
    now: float,
    asset_key: Callable[[dg.AssetKey], dg.AssetKey] = lambda key: key,
) -> tuple[list[Any], dict[str, Any]]:
    """Events for the changes in ``view`` since ``cursor``, and the next cursor.

    ``http`` is the leader's address. Checks are evaluated when their findings change, at most once
    a minute. State is observed when it changes, at most once a minute; after each observation that
    follows soon after another one half as often, down to once an hour.
    """
    events, changes = _state_events(view, http, cursor, now, asset_key)
    check_events, check_changes = _check_events(view, cursor, now, asset_key)
    return events + check_events, {**cursor, **changes, **check_changes}


def _state_events(
    view: ClusterView,
    http: str,
    cursor: Mapping[str, Any],
    now: float,
    asset_key: Callable[[dg.AssetKey], dg.AssetKey],
) -> tuple[list[Any], dict[str, Any]]:
    """Observations of the states that changed, and the changes of the cursor."""
    if not _due(cursor, now):
        return [], {}
    states = {
        "state": digest(supervisors_state(view)),
        # Without the last column: a process that was replaced in place is not a change.
        "workers": digest([row[:-1] for row in _workers(view)]),
        "topologies": digest(topologies_state(view, http)),
    }
    observe: dict[str, Callable[[], dg.AssetObservation]] = {
        "state": lambda: supervisors_observation(view, asset_key(SUPERVISORS)),
        "workers": lambda: workers_observation(view, asset_key(WORKERS)),
        "topologies": lambda: topologies_observation(view, http, asset_key(TOPOLOGIES)),
    }
    former_states: dict[str, Any] = {}
    if not view.topologies:
        # The first poll of a cluster without topologies does not observe that it has none.
        former_states = {"workers": states["workers"], "topologies": states["topologies"]}
    # After the first poll the cursor has all states, and replaces these.
    former_states.update(cursor)
    events = [observe[name]() for name, state in states.items() if state != former_states.get(name)]
    changes: dict[str, Any] = dict(states)
    if events:
        changes.update(_last_observed(cursor, now))
    return events, changes


def _check_events(
    view: ClusterView,
    cursor: Mapping[str, Any],
    now: float,
    asset_key: Callable[[dg.AssetKey], dg.AssetKey],
) -> tuple[list[Any], dict[str, Any]]:
    """Evaluations of the changed checks, and the changes of the cursor.

    None within a minute after the last evaluations: without a ``pause`` it is the shortest one.
    """
    if not _due({"at": cursor.get("checked")}, now):
        return [], {}
    former_checks = cursor.get("checks")
    if not isinstance(former_checks, dict):
        former_checks = {}
    findings = view_findings(view)
    # A check is evaluated as well when topologies come or go, because its result counts them.
    topology_ids = sorted(view.topologies)
    checks = {name: digest([lines, topology_ids]) for name, lines in findings.items()}
    events: list[Any] = []
    for name, lines in findings.items():
        if former_checks.get(name) == checks[name]:
            continue
        key, severity, _ = CHECK_ASSETS[name]
        result = violations_result(lines, len(view.topologies), severity)
        events.append(outcome_of(result, asset_key(key), name, dg.AssetCheckEvaluation))
    return events, {"checks": checks, "checked": now} if events else {}


def supervisor_sensor(
    context: dg.SensorEvaluationContext, zookeeper: ZooKeeperResource
) -> dg.SensorResult | dg.SkipReason:
    """Observe the changes, and evaluate the checks, at most once a minute."""
    try:
        with zookeeper.cluster() as cluster:
            view = cluster.load_view()
            leader = cluster.epoch()
    except Unavailable as error:
        return dg.SkipReason(error.message)
    http = ""
    if leader is not None:
        _, leader_record = leader
        http = leader_record.http
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
    """Observe the leadership when it changes, at most once a minute."""
    cursor = read_cursor(context.cursor)
    now = time.time()
    try:
        with zookeeper.cluster() as cluster:
            stored_epoch = cluster.epoch()
            master = cluster.state.get_data(paths.NIMBUS_MASTER)
            followers = cluster.state.get_children(paths.NIMBUS_SLAVE)
            cluster_id = cluster.cluster_id()
    except StormDagsterError as error:
        return dg.SkipReason(error.message)
    leader = master.decode(errors="replace") if master else None
    epoch = 0
    http = ""
    if stored_epoch is not None:
        epoch, leader_record = stored_epoch
        http = leader_record.http
    state = digest([leader, epoch, followers])
    if state == cursor.get("state") or not _due(cursor, now):
        return dg.SkipReason(f"{leader or 'no nimbus'} leads, epoch {epoch}: nothing new")
    observation = dg.AssetObservation(
        asset_key=zookeeper.asset_key(NIMBUS),
        metadata={
            "leader": leader or "none",
            "leader_http": http if stored_epoch else "none",
            "epoch": epoch,
            "followers": len(followers),
            "nimbuses": notes(followers),
            "cluster_id": cluster_id,
            **statistics_links(http),
        },
    )
    return dg.SensorResult(
        skip_reason=dg.SkipReason(f"observed that {leader or 'no nimbus'} leads, epoch {epoch}"),
        asset_events=[observation],
        cursor=json.dumps({"state": state, **_last_observed(cursor, now)}),
    )
