"""Checks of a declared topology: its tasks, its drift and its limits."""

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import dagster as dg
from pydantic import ConfigDict

from storm_dagster.core.snapshot.windows import Totals, read_totals, sum_totals
from storm_dagster.defs.declared.declaration import (
    Declaration,
    RunningTopology,
    TargetDescription,
    differences,
)
from storm_dagster.defs.keys import catalog, catalog_field
from storm_dagster.defs.metadata import table
from storm_dagster.model.amounts import utc_text
from storm_dagster.model.errors import InvalidRequest


class _Strict(dg.Model, dg.Resolvable):
    """Attributes of ``defs.yaml``; an unknown one is an error."""

    model_config = ConfigDict(extra="forbid")


class ScheduleAttributes(_Strict):
    """Schedule of a periodic action. Empty: never."""

    deploy: str | None = catalog_field("schedule.deploy", default=None)
    rebalance: str | None = catalog_field("schedule.rebalance", default=None)
    timezone: str | None = catalog_field("schedule.timezone", default=None)


class TopologyAlerts(_Strict):
    """Limits beyond which a check fails; an empty limit is not checked."""

    complete_ms: float | None = catalog_field("alerts.complete_ms", default=None, gt=0)
    failed_ratio: float | None = catalog_field("alerts.failed_ratio", default=None, ge=0, le=1)
    errors: int | None = catalog_field("alerts.errors", default=None, ge=0)


class GrayAttributes(_Strict):
    """Batches of a gray upgrade."""

    number: int = catalog_field("gray.number", default=1, ge=1)
    component: str | None = catalog_field("gray.component", default=None)


class FreshnessAttributes(_Strict):
    """Limits of the check `fresh`, and of the freshness policy of the tables.

    The check is about minutes since all tasks were last seen running, the policy about minutes
    since a sink last reported rows.
    """

    warn_minutes: int = catalog_field("freshness.warn_minutes", default=10, ge=6)
    fail_minutes: int = catalog_field("freshness.fail_minutes", default=20, ge=7)
    tables_warn_minutes: int | None = catalog_field(
        "freshness.tables_warn_minutes", default=None, ge=1
    )
    tables_fail_minutes: int | None = catalog_field(
        "freshness.tables_fail_minutes", default=None, ge=2
    )

    def tables_policy(self) -> dg.FreshnessPolicy | None:
        """Freshness policy of the tables; ``None`` without a limit.

        :class:`InvalidRequest` for limits that exclude each other.
        """
        warn = self.tables_warn_minutes
        fail = self.tables_fail_minutes
        if fail is None:
            if warn is not None:
                raise InvalidRequest(
                    "freshness has tables_warn_minutes without tables_fail_minutes: set both"
                )
            return None
        if warn is not None and warn >= fail:
            raise InvalidRequest(
                f"freshness has tables_warn_minutes {warn} and tables_fail_minutes {fail}: "
                "the first must be smaller"
            )
        return dg.FreshnessPolicy.time_window(
            fail_window=timedelta(minutes=fail),
            warn_window=None if warn is None else timedelta(minutes=warn),
        )


LAST_UPDATED = "dagster/last_updated_timestamp"
"""Dagster's metadata key for the time of an observation's content."""

_LIMITS = {
    "latency_within_limit": "complete_ms",
    "failures_within_limit": "failed_ratio",
    "errors_within_limit": "errors",
}
"""Check -> its limit of ``alerts``."""


def configured_checks(alerts: TopologyAlerts) -> dict[str, str]:
    """Check name -> its rule; without the checks whose limit is not set."""
    checks: dict[str, str] = {}
    for name, rule in catalog()["declared_checks"].items():
        limit = _LIMITS.get(name)
        if limit is None or getattr(alerts, limit) is not None:
            checks[name] = rule
    return checks


def check_results(
    declaration: Declaration,
    described: TargetDescription,
    actual: RunningTopology | None,
    document: Mapping[str, Any] | None,
    alerts: TopologyAlerts,
    *,
    newer: bool = False,
    measured: bool = True,
) -> dict[str, dg.AssetCheckResult]:
    """Results of all configured checks but `fresh`.

    ``document`` is that of `show`, ``None`` if the topology does not run. With ``newer`` the files
    on disk are not those of the declaration. Without ``measured`` the document has no statistics,
    and limits are not checked.
    """
    if actual is None or actual.status == "KILLED":
        document = None
    results = {
        "all_tasks_run": _all_tasks_run(declaration.name, document),
        "as_declared": _as_declared(declaration, described, actual, newer, document),
    }
    # Of a topology that does not run each limit fails, without statistics.
    if document is not None and not measured:
        return results
    spouts = spout_totals(document)
    values = {
        "complete_ms": round(spouts.complete_ms, 3),
        "failed_ratio": round(spouts.failed_ratio, 5),
        "errors": float(len((document or {}).get("errors", ()))),
    }
    for name, limit_name in _LIMITS.items():
        limit = getattr(alerts, limit_name)
        if limit is None:
            continue
        value = values[limit_name]
        description = f"topology {declaration.name!r} does not run"
        if document is not None:
            description = f"{limit_name} is {value:g}, the limit is {limit:g}"
        results[name] = dg.AssetCheckResult(
            passed=document is not None and value <= limit,
            description=description,
            severity=dg.AssetCheckSeverity.WARN,
            metadata={limit_name: value, "limit": float(limit)},
        )
    return results


def spout_totals(document: Mapping[str, Any] | None) -> Totals:
    """All-time statistics of all spouts of a `show` document."""
    components: Mapping[str, Any] = (document or {}).get("components") or {}
    spouts = [part for part in components.values() if part.get("type") == "spout"]
    return sum_totals(read_totals(part.get("stats") or {}) for part in spouts)


def _all_tasks_run(name: str, document: Mapping[str, Any] | None) -> dg.AssetCheckResult:
    """Result of the check `all_tasks_run`; it fails without a running topology."""
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


def check_freshness(
    last_running: float | None, now: float, limits: FreshnessAttributes
) -> dg.AssetCheckResult:
    """Result of the check `fresh`: it passes if all tasks were seen running lately.

    ``last_running`` and ``now`` are epoch seconds; ``None``: the tasks were never seen running.
    """
    age_minutes = math.inf
    description = "all tasks were never seen running"
    metadata: dict[str, Any] = {}
    if last_running is not None:
        age_minutes = max(0.0, now - last_running) / 60
        description = f"all tasks were last seen running {utc_text(last_running)}"
        metadata[LAST_UPDATED] = dg.MetadataValue.timestamp(last_running)
    severity = dg.AssetCheckSeverity.WARN
    if age_minutes > limits.fail_minutes:
        severity = dg.AssetCheckSeverity.ERROR
    return dg.AssetCheckResult(
        passed=age_minutes <= limits.warn_minutes,
        description=description,
        severity=severity,
        metadata=metadata,
    )


def _as_declared(
    declaration: Declaration,
    described: TargetDescription,
    actual: RunningTopology | None,
    newer: bool,
    document: Mapping[str, Any] | None,
) -> dg.AssetCheckResult:
    """Result of the check `as_declared`; arguments as of :func:`check_results`."""
    differ = differences(declaration, described, actual)
    failed = (document or {}).get("failed_upgrade")
    if failed and "code" in differ:
        # The reason why the declared code does not run.
        log = f" (log: {failed['log']})" if failed["log"] else ""
        differ["upgrade"] = f"rolled back: {failed['reason']}{log}"
    if newer:
        differ["disk"] = "the code on disk is newer than this code location: reload definitions"
    # Changed code that waits for a reload or a deploy, and an upgrade under way, are not errors.
    severity = dg.AssetCheckSeverity.WARN
    for part in differ:
        if part not in ("code", "disk") and not part.startswith("conf."):
            severity = dg.AssetCheckSeverity.ERROR
    sentences = [f"{part}: {text}" for part, text in differ.items()]
    return dg.AssetCheckResult(
        passed=not differ,
        description="; ".join(sentences) or "everything is as declared",
        severity=severity,
        metadata={"drift": table("what how", list(differ.items())), "differences": len(differ)},
    )
