"""Checks of a declared topology: it runs, it is as declared, and it keeps its limits."""

import math
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import dagster as dg
from pydantic import ConfigDict

from storm_dagster.core.snapshot.windows import Totals, read_totals, sum_totals
from storm_dagster.defs.declared.declaration import Actual, Declaration, Described, differences
from storm_dagster.defs.keys import catalog, catalog_field
from storm_dagster.defs.metadata import table


class _Strict(dg.Model, dg.Resolvable):
    model_config = ConfigDict(extra="forbid")


class ScheduleAttributes(_Strict):
    """Schedule of a periodic action. Empty: never."""

    deploy: str | None = catalog_field("schedule.deploy", default=None)
    rebalance: str | None = catalog_field("schedule.rebalance", default=None)
    timezone: str | None = catalog_field("schedule.timezone", default=None)


class TopologyAlerts(_Strict):
    """Limits beyond which a check fails. Empty: not looked at."""

    complete_ms: float | None = catalog_field("alerts.complete_ms", default=None, gt=0)
    failed_ratio: float | None = catalog_field("alerts.failed_ratio", default=None, ge=0, le=1)
    errors: int | None = catalog_field("alerts.errors", default=None, ge=0)


class GrayAttributes(_Strict):
    """Batches of a gray upgrade."""

    number: int = catalog_field("gray.number", default=1, ge=1)
    component: str | None = catalog_field("gray.component", default=None)


class FreshnessAttributes(_Strict):
    """Limits of the check `fresh`: minutes since all tasks of the topology were last seen
    running.
    """

    warn_minutes: int = catalog_field("freshness.warn_minutes", default=10, ge=6)
    fail_minutes: int = catalog_field("freshness.fail_minutes", default=20, ge=7)


LAST_UPDATED = "dagster/last_updated_timestamp"
"""Dagster's metadata key for the time of which an observation speaks."""

_LIMITS = {
    "latency_within_limit": "complete_ms",
    "failures_within_limit": "failed_ratio",
    "errors_within_limit": "errors",
}
"""Check -> the limit of ``alerts`` that it holds."""


def wanted_checks(alerts: TopologyAlerts) -> dict[str, str]:
    """Check name -> its rule; of the limits only those that are set."""
    words = catalog()["declared_checks"].items()
    return {
        name: text
        for name, text in words
        if name not in _LIMITS or getattr(alerts, _LIMITS[name]) is not None
    }


def check_results(
    declaration: Declaration,
    described: Described,
    actual: Actual | None,
    document: Mapping[str, Any] | None,
    alerts: TopologyAlerts,
    *,
    newer: bool = False,
    measured: bool = True,
) -> dict[str, dg.AssetCheckResult]:
    """Results of all wanted checks but `fresh`. ``document`` is `show`, ``None`` when nothing runs.

    With ``newer`` the files on disk are not those of the declaration. Without ``measured`` the
    document has no statistics, and limits are not checked.
    """
    if actual is None or actual.status == "KILLED":
        document = None
    found = {
        "all_tasks_run": _all_tasks_run(declaration.name, document),
        "as_declared": _as_declared(declaration, described, actual, newer),
    }
    if document is not None and not measured:
        return found
    spouts = spout_totals(document)
    values = {
        "complete_ms": round(spouts.complete_ms, 3),
        "failed_ratio": round(spouts.failed_ratio, 5),
        "errors": float(len((document or {}).get("errors", ()))),
    }
    for name, limit_name in _LIMITS.items():
        value, limit = values[limit_name], getattr(alerts, limit_name)
        if limit is not None:
            found[name] = dg.AssetCheckResult(
                passed=document is not None and value <= limit,
                description=f"{limit_name} is {value:g}, the limit is {limit:g}"
                if document is not None
                else f"topology {declaration.name!r} does not run",
                severity=dg.AssetCheckSeverity.WARN,
                metadata={limit_name: value, "limit": float(limit)},
            )
    return found


def spout_totals(document: Mapping[str, Any] | None) -> Totals:
    """Statistics of all spouts of a `show` document, of all time."""
    components: Mapping[str, Any] = (document or {}).get("components") or {}
    spouts = [part for part in components.values() if part.get("type") == "spout"]
    return sum_totals(read_totals(part.get("stats") or {}) for part in spouts)


def _all_tasks_run(name: str, document: Mapping[str, Any] | None) -> dg.AssetCheckResult:
    if document is None:
        return dg.AssetCheckResult(passed=False, description=f"topology {name!r} does not run")
    tasks = document["tasks"]
    waiting = [task["id"] for task in tasks if task["status"] != "running"]
    words = f"all {len(tasks)} tasks of {document['id']} run"
    if waiting or not tasks:
        words = f"{len(waiting)} of {len(tasks)} tasks of {document['id']} do not run"
    return dg.AssetCheckResult(
        passed=bool(tasks) and not waiting,
        description=words,
        metadata={
            "topology_id": str(document["id"]),
            "not_running": len(waiting),
            "tasks": len(tasks),
        },
    )


def fresh(seen: float | None, now: float, limits: FreshnessAttributes) -> dg.AssetCheckResult:
    """Whether all tasks were seen running lately; ``seen`` is the last time that they were, in
    epoch seconds.
    """
    age = math.inf if seen is None else max(0.0, now - seen) / 60
    return dg.AssetCheckResult(
        passed=age <= limits.warn_minutes,
        description=f"all tasks were last seen running {datetime.fromtimestamp(seen, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
        if seen is not None
        else "all tasks were never seen running",
        severity=dg.AssetCheckSeverity.ERROR
        if age > limits.fail_minutes
        else dg.AssetCheckSeverity.WARN,
        metadata={} if seen is None else {LAST_UPDATED: dg.MetadataValue.timestamp(seen)},
    )


def _as_declared(
    declaration: Declaration, described: Described, actual: Actual | None, newer: bool
) -> dg.AssetCheckResult:
    differ = differences(declaration, described, actual)
    if newer:
        differ["disk"] = "the code on disk is newer than this code location: reload definitions"
    # Changed code that waits for somebody to reload or deploy it, or an upgrade under way, is no
    # fault.
    heavy = [
        part for part in differ if part not in ("code", "disk") and not part.startswith("conf.")
    ]
    return dg.AssetCheckResult(
        passed=not differ,
        description="; ".join(f"{part}: {text}" for part, text in differ.items())
        or "everything is as declared",
        severity=dg.AssetCheckSeverity.ERROR if heavy else dg.AssetCheckSeverity.WARN,
        metadata={"drift": table("what how", list(differ.items())), "differences": len(differ)},
    )
