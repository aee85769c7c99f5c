"""Parts of the documents of the cluster: nimbuses, supervisors, the pause of healing, health."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from storm_dagster.core.authorization import LIMITED_USER
from storm_dagster.core.liveness.pause import pause_text
from storm_dagster.core.snapshot.cluster import SupervisorSnapshot
from storm_dagster.host.disk import disk_room
from storm_dagster.http.clocks import clock_ahead_secs
from storm_dagster.model.healing_pause import HealingPause
from storm_dagster.model.view import ClusterView
from storm_dagster.nimbus.member import Nimbus

_MAX_WAITING = 20
"""Causes that the document of a pause of healing names."""


def supervisor_row(supervisor: SupervisorSnapshot) -> dict[str, Any]:
    info = supervisor.info
    return {
        "id": supervisor.id,
        "host": info.host,
        "ports": info.ports,
        "used": supervisor.used,
        "uptime_secs": supervisor.uptime_secs,
        "version": info.version,
        "http": info.http,
        "blacklisted": supervisor.blacklisted,
        "withdrawn": info.withdrawn or None,
        "cpu": info.cpu,
        "cpu_source": info.cpu_source,
        "memory_mb": info.memory_mb,
        "memory_source": info.memory_source,
        "draining": info.draining,
    }


def healing_document(
    pause: HealingPause | None, waiting: Sequence[str], is_armed: bool
) -> dict[str, Any]:
    """Healer, and the pause by operators with the causes that wait for its end.

    ``is_armed``: a sensor of Dagster is. A user of single topologies sees no causes, because they
    name topologies of others.
    """
    document: dict[str, Any] = {"by": "sensor" if is_armed else "leader", "pause": None}
    if pause is not None:
        visible = () if LIMITED_USER.get() else waiting
        document["pause"] = {
            "since_ms": pause.since_ms,
            "until_ms": pause.until_ms,
            "user": pause.user or None,
            "text": pause_text(pause),
            "waiting": list(visible[:_MAX_WAITING]),
            "waiting_causes": len(waiting),
        }
    return document


def nimbus_row(address: str, leader: bool, detail: Mapping[str, Any]) -> dict[str, Any]:
    """Row of a nimbus.

    ``detail`` is the registration of a follower, which has the time of its start, or the health of
    the leader, which has its uptime.
    """
    host, _, port = address.rpartition(":")
    uptime_secs = detail.get("uptime_secs")
    started_secs = detail.get("started_secs")
    if uptime_secs is None and isinstance(started_secs, int):
        uptime_secs = max(0, int(time.time()) - started_secs)
    return {
        "host": host,
        "port": int(port) if port.isdecimal() else None,
        "http": detail.get("http"),
        "leader": leader,
        "uptime_secs": uptime_secs,
        "version": detail.get("version"),
        "missing": detail.get("missing"),
    }


def pause_fields(view: ClusterView) -> dict[str, str]:
    """``{"healing_pause": TEXT}`` while operators have paused healing, else empty."""
    pause = view.healing_pause
    return {} if pause is None else {"healing_pause": pause_text(pause)}


def alarm_of(healer: bytes | None) -> str | None:
    """Reason why healing is frozen, from the node of the armed sensor."""
    try:
        reason = json.loads(healer or b"{}").get("alarm")
    except (ValueError, AttributeError):
        return None
    return reason if isinstance(reason, str) else None


def health_document(nimbus: Nimbus) -> dict[str, Any]:
    """``/healthz``; it makes no requests, so that it responds also without ZooKeeper."""
    leadership = nimbus.status.snapshot
    leading = nimbus.status.epoch is not None
    disk = disk_room(nimbus.inbox)
    if not nimbus.cluster.session.connected:
        word = "no connection to ZooKeeper"
    elif leading or leadership.leader_http:
        word = "degraded" if leadership.missing else "ok"
    else:
        word = "no leader"
    return {
        "status": word,
        "leader": leading,
        "leader_http": nimbus.identity.http if leading else leadership.leader_http,
        "epoch": nimbus.status.epoch,
        "id": nimbus.identity.id,
        "address": nimbus.identity.address,
        "version": nimbus.identity.version,
        "cluster_id": nimbus.cluster.cluster_id(),
        "uptime_secs": nimbus.identity.uptime_secs,
        "missing": leadership.missing,
        "disk_free_mb": disk.free_mb,
        "disk_mb": disk.total_mb,
    }


def read_peer_health(http: httpx.Client, url: str) -> dict[str, Any] | None:
    """Document of ``/healthz`` of another nimbus, with its clock; ``None`` without an answer.

    ``http`` limits the wait.
    """
    asked_at = time.time()
    try:
        response = http.get(f"{url}/healthz")
        document = response.json()
    except (httpx.HTTPError, ValueError):
        return None
    if not isinstance(document, dict):
        return None
    behind_secs = clock_ahead_secs(response.headers, asked_at)
    ahead_secs = None if behind_secs is None else -behind_secs
    return {**document, "clock_ahead_secs": ahead_secs}
