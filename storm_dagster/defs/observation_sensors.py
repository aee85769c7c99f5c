"""What the daemons do, as observations of external assets: on change, and at most once a minute.

Heartbeats never become events: one event costs Dagster 13 ms and stays for ever.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of the decorated functions.
import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

import dagster as dg

from storm_dagster.defs.checks import CHECK_ASSETS, view_findings
from storm_dagster.defs.cluster_observations import (
    Curves,
    supervisors_observation,
    supervisors_state,
    topologies_observation,
    topologies_state,
    workers_observation,
    workers_state,
)
from storm_dagster.defs.handles import ZooKeeperResource
from storm_dagster.defs.keys import NIMBUS, SUPERVISORS, TOPOLOGIES, WORKERS
from storm_dagster.defs.metadata import notes
from storm_dagster.defs.nimbus_resource import NimbusResource
from storm_dagster.model import paths
from storm_dagster.model.errors import NotAlive, StormDagsterError, Unavailable
from storm_dagster.model.view import ClusterView

__all__ = ["build_observation_sensors", "leader_sensor", "supervisor_sensor"]

_AT_MOST_EVERY_SECS = 60
_MOST_TOPOLOGIES = 100


def read_cursor(text: str | None) -> dict[str, Any]:
    """The cursor's JSON object; an unreadable or foreign cursor counts as none."""
    try:
        cursor = json.loads(text or "{}")
    except ValueError:
        return {}
    return cursor if isinstance(cursor, dict) else {}


def digest(value: Any) -> str:
    """Short hash of a JSON value, for comparing states without keeping them."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _due(cursor: dict[str, Any], now: float) -> bool:
    # Another machine's clock may have written the cursor: a time in the future never silences the sensor.
    last = cursor.get("at")
    return not isinstance(last, int | float) or not 0 <= now - last < _AT_MOST_EVERY_SECS


def check_evaluations(
    findings: dict[str, list[str]], looked_at: int, shown: Callable[[dg.AssetKey], dg.AssetKey]
) -> list[dg.AssetCheckEvaluation]:
    """What the cluster-wide checks would say, as evaluations that need no run."""
    return [
        dg.AssetCheckEvaluation(
            asset_key=shown(CHECK_ASSETS[name][0]),
            check_name=name,
            passed=not found,
            severity=CHECK_ASSETS[name][1],
            metadata={"violations": len(found), "found": notes(found[:50]), "topologies": looked_at},
        )
        for name, found in findings.items()
    ]


def _show_documents(nimbus: NimbusResource, view: ClusterView) -> dict[str, dict[str, Any]]:
    """Topology name -> what `show` says of it; without nimbus nothing, and the observations do without figures."""
    found: dict[str, dict[str, Any]] = {}
    if not view.topologies:
        return found
    try:
        with nimbus.client(patience_secs=1.0) as client:
            for topology in list(view.topologies.values())[:_MOST_TOPOLOGIES]:
                try:
                    found[topology.base.name] = client.get(f"/v1/topologies/{topology.base.name}")
                except NotAlive:
                    continue
    except StormDagsterError:
        return found
    return found


@dg.sensor(
    name="supervisor_sensor",
    minimum_interval_seconds=30,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Observes supervisors, workers and topologies, and evaluates the cluster-wide checks, when they change.",
)
def supervisor_sensor(
    context: dg.SensorEvaluationContext, zookeeper: ZooKeeperResource, nimbus: NimbusResource
) -> dg.SensorResult | dg.SkipReason:
    """Observe what changed, and evaluate the checks, at most once a minute."""
    cursor, now = read_cursor(context.cursor), time.time()
    try:
        with zookeeper.cluster() as cluster:
            view = cluster.load_view()
    except Unavailable as error:
        return dg.SkipReason(error.message)
    findings = view_findings(view)
    states = {
        "state": digest(supervisors_state(view)),
        "workers": digest(workers_state(view)),
        "checks": digest([findings, sorted(view.topologies)]),
    }
    if not _due(cursor, now):
        return dg.SkipReason(f"{len(view.supervisors)} supervisors, observed less than a minute ago")
    documents = _show_documents(nimbus, view)
    curves = Curves.from_json(cursor.get("curves"))
    curves = curves.with_sample(documents, now)
    states["topologies"] = digest(topologies_state(view, documents))
    # Of a cluster without topologies, that it has none is no news at the first look.
    before = {"workers": digest({}), "topologies": digest({}), **cursor}
    changed = {name for name, state in states.items() if state != before.get(name)}
    if not changed:
        return dg.SkipReason(f"{len(view.supervisors)} supervisors, nothing new")
    shown = zookeeper.asset_key
    events: list[Any] = []
    if "state" in changed:
        events.append(supervisors_observation(view, shown(SUPERVISORS)))
    if "workers" in changed:
        events.append(workers_observation(view, shown(WORKERS), now))
    if "topologies" in changed:
        events.append(topologies_observation(view, documents, curves, shown(TOPOLOGIES)))
    if "checks" in changed:
        events.extend(check_evaluations(findings, len(view.topologies), shown))
    return dg.SensorResult(
        skip_reason=dg.SkipReason(f"observed {len(view.supervisors)} supervisors"),
        asset_events=events,
        cursor=json.dumps({**states, "at": now, "curves": curves.to_json()}),
    )


@dg.sensor(
    name="leader_sensor",
    minimum_interval_seconds=30,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Observes which nimbus leads, under which epoch, and which follow.",
)
def leader_sensor(
    context: dg.SensorEvaluationContext, zookeeper: ZooKeeperResource
) -> dg.SensorResult | dg.SkipReason:
    """Observe the leadership, on change and at most once a minute."""
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
        },
    )
    return dg.SensorResult(
        skip_reason=dg.SkipReason(f"observed that {leader or 'nobody'} leads, epoch {epoch}"),
        asset_events=[observation],
        cursor=json.dumps({"state": state, "at": now}),
    )


def build_observation_sensors() -> list[dg.SensorDefinition]:
    """Both sensors."""
    return [supervisor_sensor, leader_sensor]
