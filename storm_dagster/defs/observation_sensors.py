"""What the daemons do, as observations of external assets: on change, and at most once a minute.

Heartbeats never become events: one event costs Dagster 13 ms and stays for ever.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of the decorated functions.
import hashlib
import json
import time
from typing import Any

import dagster as dg

from storm_dagster.defs.checks import CHECK_ASSETS, view_findings
from storm_dagster.defs.handles import ZooKeeperResource
from storm_dagster.defs.keys import NIMBUS, SUPERVISORS
from storm_dagster.defs.metadata import notes, table
from storm_dagster.model import paths
from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.model.ranges import encode_ranges
from storm_dagster.model.view import ClusterView

__all__ = ["build_observation_sensors", "leader_sensor", "supervisor_sensor"]

_AT_MOST_EVERY_SECS = 60


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


def supervisors_observation(view: ClusterView) -> dg.AssetObservation:
    """The supervisors of ``view`` with their slots, as an observation."""
    used = view.used_ports()
    rows: list[dict[str, str | int | float | bool | None]] = [
        {
            "supervisor": supervisor_id,
            "host": info.host,
            "ports": encode_ranges(info.ports),
            "used": encode_ranges(used.get(supervisor_id, ())),
            "free": len(set(info.ports) - used.get(supervisor_id, set())),
            "restarting": encode_ranges(info.restarting),
            "blacklisted": info.host in view.blacklist,
            "version": info.version,
        }
        for supervisor_id, info in sorted(view.supervisors.items())
    ]
    slots = sum(len(info.ports) for info in view.supervisors.values())
    return dg.AssetObservation(
        asset_key=SUPERVISORS,
        metadata={
            "supervisors": table(
                [
                    ("supervisor", "string"),
                    ("host", "string"),
                    ("ports", "string"),
                    ("used", "string"),
                    ("free", "int"),
                    ("restarting", "string"),
                    ("blacklisted", "bool"),
                    ("version", "string"),
                ],
                rows,
            ),
            "live": len(rows),
            "slots": slots,
            "slots_free": sum(int(row["free"] or 0) for row in rows),
            "topologies": len(view.topologies),
        },
    )


def check_evaluations(findings: dict[str, list[str]], looked_at: int) -> list[dg.AssetCheckEvaluation]:
    """What the cluster-wide checks would say, as evaluations that need no run."""
    return [
        dg.AssetCheckEvaluation(
            asset_key=CHECK_ASSETS[name][0],
            check_name=name,
            passed=not found,
            severity=CHECK_ASSETS[name][1],
            metadata={"violations": len(found), "found": notes(found[:50]), "topologies": looked_at},
        )
        for name, found in findings.items()
    ]


@dg.sensor(
    name="supervisor_sensor",
    minimum_interval_seconds=30,
    default_status=dg.DefaultSensorStatus.RUNNING,
    description="Observes the supervisors and their slots, and evaluates the cluster-wide checks, when they change.",
)
def supervisor_sensor(
    context: dg.SensorEvaluationContext, zookeeper: ZooKeeperResource
) -> dg.SensorResult | dg.SkipReason:
    """Observe the supervisors and evaluate the checks, on change and at most once a minute."""
    cursor, now = read_cursor(context.cursor), time.time()
    try:
        with zookeeper.cluster() as cluster:
            view = cluster.load_view()
    except Unavailable as error:
        return dg.SkipReason(error.message)
    used = view.used_ports()
    state = digest(
        {
            key: (info.host, info.ports, sorted(used.get(key, ())), info.restarting, info.version)
            for key, info in view.supervisors.items()
        }
    )
    findings = view_findings(view)
    checks = digest([findings, sorted(view.topologies)])
    if (state, checks) == (cursor.get("state"), cursor.get("checks")) or not _due(cursor, now):
        return dg.SkipReason(f"{len(view.supervisors)} supervisors, nothing new")
    events: list[Any] = []
    if state != cursor.get("state"):
        events.append(supervisors_observation(view))
    if checks != cursor.get("checks"):
        events.extend(check_evaluations(findings, len(view.topologies)))
    return dg.SensorResult(
        skip_reason=dg.SkipReason(f"observed {len(view.supervisors)} supervisors"),
        asset_events=events,
        cursor=json.dumps({"state": state, "checks": checks, "at": now}),
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
        asset_key=NIMBUS,
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
