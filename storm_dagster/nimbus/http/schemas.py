"""Schemas of our own documents under ``/v1``: what design 6.1 promises; newer versions may add keys."""

from __future__ import annotations

from storm_dagster.http.schemas import (
    BOOL,
    INT,
    NUM,
    STR,
    Schema,
    arr,
    at_least,
    choice,
    map_of,
    nullable,
    obj,
    text,
)

__all__ = [
    "BLACKLIST",
    "BLACKLIST_CHANGE",
    "CHANGE",
    "CHANGED",
    "CLUSTER",
    "HEALTH",
    "LIST",
    "RUN",
    "SHOW",
    "SUBMISSION",
    "SUBMITTED",
]

_STATUS = choice("ACTIVE", "INACTIVE", "KILLED", "REBALANCING", "UPGRADING", "ROLLBACK")
_NATURAL: Schema = {"type": "integer", "minimum": 0}

HEALTH = at_least(
    {
        "status": choice("ok", "degraded", "no leader", "no connection to ZooKeeper"),
        "leader": BOOL,
        "leader_http": nullable(STR),
        "epoch": nullable(INT),
        "id": STR,
        "address": STR,
        "version": STR,
        "cluster_id": nullable(STR),
        "uptime_secs": INT,
        "missing": nullable(INT),
    }
)
SUBMISSION = obj(
    {"name": text(r"^[A-Za-z0-9._-]{1,200}$"), "handle": text("^[0-9a-f]{32}$")},
    {
        "token": nullable(text(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,235}$")),
        "inactive": BOOL,
        "allow_degraded": BOOL,
    },
)
SUBMITTED = at_least({"run_id": nullable(STR), "token": STR})
RUN = at_least({"status": STR})
LIST = obj(
    {
        "topologies": arr(
            at_least(
                {
                    "id": STR,
                    "name": STR,
                    "status": _STATUS,
                    "uptime_secs": _NATURAL,
                    "workers": _NATURAL,
                    "executors": _NATURAL,
                    "tasks": _NATURAL,
                    "not_running": _NATURAL,
                    "degraded": BOOL,
                }
            )
        )
    }
)
_STATS = map_of(NUM)
SHOW = at_least(
    {
        "id": STR,
        "name": STR,
        "status": _STATUS,
        "uptime_secs": _NATURAL,
        "workers": arr(
            at_least(
                {
                    "node": STR,
                    "host": STR,
                    "port": INT,
                    "pid": nullable(INT),
                    "tasks": arr(INT),
                    "uptime_secs": _NATURAL,
                    "version": nullable(STR),
                }
            )
        ),
        "tasks": arr(
            at_least(
                {
                    "id": INT,
                    "component": STR,
                    "node": nullable(STR),
                    "host": nullable(STR),
                    "port": nullable(INT),
                    "status": choice("starting", "running", "dead", "unassigned"),
                    "uptime_secs": _NATURAL,
                    "stats": _STATS,
                }
            )
        ),
        "components": map_of(
            at_least({"type": choice("spout", "bolt"), "executors": INT, "tasks": arr(INT), "stats": _STATS})
        ),
        "problems": arr(STR),
        "errors": arr(
            at_least({"component": STR, "task": INT, "host": STR, "port": INT, "time": INT, "error": STR})
        ),
    }
)
CHANGE: Schema = {"type": "object"}
"""``wait_secs`` (kill, rebalance), ``workers``, ``executors``, ``reassign`` (rebalance), ``dry_run``: see docs."""
CHANGED = at_least({"run_id": nullable(STR), "id": STR, "name": STR, "status": STR})
BLACKLIST = obj({"hosts": arr(STR)})
BLACKLIST_CHANGE: Schema = {"type": "object"}
CLUSTER = at_least(
    {
        "cluster_id": STR,
        "nimbuses": arr(
            at_least(
                {
                    "host": STR,
                    "port": nullable(INT),
                    "http": nullable(STR),
                    "leader": BOOL,
                    "uptime_secs": nullable(INT),
                    "version": nullable(STR),
                    "missing": nullable(INT),
                }
            )
        ),
        "supervisors": arr(
            at_least(
                {
                    "id": STR,
                    "host": STR,
                    "ports": arr(INT),
                    "used": arr(INT),
                    "uptime_secs": _NATURAL,
                    "version": STR,
                    "http": nullable(STR),
                    "blacklisted": BOOL,
                }
            )
        ),
        "healer": BOOL,
        "corrupt": map_of(STR),
    }
)
