"""Rows of nimbuses and supervisors in the document of the cluster."""

import time
from collections.abc import Mapping
from typing import Any

from storm_dagster.core.snapshot.cluster import SupervisorSnapshot


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
        "draining": info.draining,
    }


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
