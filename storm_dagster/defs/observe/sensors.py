"""Sensors that observe the daemons as external assets: on change, and at most once a minute.

Heartbeats and statistics never become events: one event costs Dagster 13 ms and stays for ever.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of the decorated functions.
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg

from storm_dagster.defs.keys import NIMBUS, SUPERVISORS, TOPOLOGIES, WORKERS
from storm_dagster.defs.observe.checks import CHECK_ASSETS, evaluation_of, view_findings, violations_result
from storm_dagster.defs.observe.observations import (
    statistics_links,
    supervisors_observation,
    supervisors_state,
    topologies_observation,
    topologies_state,
    workers_observation,
    workers_state,
)
from storm_dagster.defs.pictures.metadata import notes
from storm_dagster.defs.resources.handles import ZooKeeperResource
from storm_dagster.model import paths
from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.model.view import ClusterView

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
    # Another machine's clock may have written the cursor: a time in the future never silences the sensor.
    return not 0 <= now - _number(cursor.get("at"), now + 1) < _pause(cursor)


def _pause(cursor: Mapping[str, Any]) -> float:
    return min(max(_number(cursor.get("pause"), 0.0), _AT_MOST_EVERY_SECS), _LONGEST_PAUSE_SECS)


def _number(value: Any, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) else otherwise


def _last_observed(cursor: Mapping[str, Any], now: float) -> dict[str, float]:
    """The time of an observation, and how long none may follow: what never rests is looked at less and less."""
    pause = _pause(cursor)
    restless = 0 <= now - _number(cursor.get("at"), now + 1) < 4 * pause
    return {"at": now, "pause": min(2 * pause, _LONGEST_PAUSE_SECS) if restless else _AT_MOST_EVERY_SECS}


def cluster_events(
    view: ClusterView,
    http: str,
    cursor: Mapping[str, Any],
    now: float,
    shown: Callable[[dg.AssetKey], dg.AssetKey] = lambda key: key,
) -> tuple[list[Any], dict[str, Any]]:
    """Events for what is new in ``view`` since ``cursor``, and the next cursor; ``http`` is the leader's address.

    Checks are evaluated when their findings change, at most once a minute. State is observed when it changes, at
    most once a minute, and after each observation that follows soon upon another one half as often, down to once an
    hour.
    """
    events: list[Any] = []
    observed: dict[str, tuple[Any, Callable[[], dg.AssetObservation]]] = {
        "state": (supervisors_state(view), lambda: supervisors_observation(view, shown(SUPERVISORS))),
        "workers": (workers_state(view), lambda: workers_observation(view, shown(WORKERS))),
        "topologies": (topologies_state(view, http), lambda: topologies_observation(view, http, shown(TOPOLOGIES))),
    }
    states = {name: digest(state) for name, (state, _) in observed.items()}
    found = dict(cursor)
    if _due(cursor, now):
        # Of a cluster without topologies, that it has none is no news at the first look.
        nothing = {} if view.topologies else {name: states[name] for name in ("workers", "topologies")}
        known = {**nothing, **cursor}
        events += [observe() for name, (_, observe) in observed.items() if states[name] != known.get(name)]
        found.update(states, **(_last_observed(cursor, now) if events else {}))
    if _due({"at": cursor.get("checked")}, now):
        known = cursor.get("checks")
        findings = view_findings(view)
        checks = {name: digest([lines, sorted(view.topologies)]) for name, lines in findings.items()}
        for name, lines in findings.items():
            if not isinstance(known, dict) or known.get(name) != checks[name]:
                key, severity, _ = CHECK_ASSETS[name]
                result = violations_result(lines, len(view.topologies), severity)
                events.append(evaluation_of(result, shown(key), name))
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
    events, cursor = cluster_events(view, http, read_cursor(context.cursor), time.time(), zookeeper.asset_key)
    if not events:
        return dg.SkipReason(f"{len(view.supervisors)} supervisors, nothing new, or too soon to report it")
    return dg.SensorResult(
        skip_reason=dg.SkipReason(f"observed {len(view.supervisors)} supervisors"),
        asset_events=events,
        cursor=json.dumps(cursor),
    )


def leader_sensor(context: dg.SensorEvaluationContext, zookeeper: ZooKeeperResource) -> dg.SensorResult | dg.SkipReason:
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
