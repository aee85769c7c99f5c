"""Alerts in open-source Dagster: :func:`build_alert_sensor` calls a function of yours once for each
problem.

Alert policies are a feature of Dagster+. Evaluations of checks that come from sensors fail no run
either, so that Dagster's own `run_failure_sensor`, which reports failed runs, does not see them.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import dagster as dg

from storm_dagster.defs.observe.sensors import read_cursor

_MAX_OPEN = 64
_MAX_TICK_SECS = 30.0
# A check that is no longer defined is never evaluated again; if it comes back, its failure is a new
# problem.
_FORGET_SECS = 86_400


@dataclass(frozen=True)
class Alert:
    """A problem that has just appeared, or one that is over."""

    key: str
    """Key of the problem, for tools that count or join alerts."""
    subject: str
    """The asset check."""
    severity: Literal["ERROR", "WARN"]
    text: str
    """The problem."""
    resolved: bool = False
    """The problem is over."""

    @property
    def title(self) -> str:
        """One line."""
        return f"{'RESOLVED' if self.resolved else self.severity}: {self.subject}"


def _mark(alert: Alert) -> str:
    return hashlib.sha256(alert.key.encode()).hexdigest()[:10]


def alerts_to_send(alerts: Iterable[Alert], open_problems: Mapping[str, float]) -> list[Alert]:
    """The alerts that are news when ``open_problems`` are known."""
    return [alert for alert in alerts if alert.resolved == (_mark(alert) in open_problems)]


def check_alerts(
    instance: dg.DagsterInstance, keys: Sequence[dg.AssetCheckKey], *, warnings: bool
) -> list[Alert]:
    """The newest evaluation of each check that has one."""
    records = (
        instance.event_log_storage.get_latest_asset_check_execution_by_key(keys) if keys else {}
    )
    found: list[Alert] = []
    for key, record in sorted(records.items(), key=lambda item: str(item[0])):
        event = record.event.dagster_event if record.event is not None else None
        if event is None or event.event_type != dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            continue  # It is being evaluated now: what was known stays.
        evaluation: Any = event.event_specific_data
        subject = f"{key.asset_key.to_user_string()}:{key.name}"
        severe = evaluation.severity == dg.AssetCheckSeverity.ERROR
        text = evaluation.metadata.get("found")
        found.append(
            Alert(
                f"check {subject}",
                subject,
                "ERROR" if severe else "WARN",
                str(
                    evaluation.description
                    or (text.value if text is not None else "")
                    or "the check failed"
                ),
                resolved=bool(evaluation.passed) or not (severe or warnings),
            )
        )
    return found


def build_alert_sensor(
    on_alert: Callable[[Alert], object],
    *,
    name: str = "alert_sensor",
    selection: dg.AssetSelection | None = None,
    warnings: bool = False,
    interval_secs: int = 60,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """A sensor that calls ``on_alert`` when an asset check fails, and when that is over.

    It watches the asset checks of ``selection`` (all assets of kind ``storm``). ``on_alert`` is
    called once for each problem and once at its end, at least once if it raises or if Dagster dies
    meanwhile: it is then called again at the next tick. It should return within seconds. Checks of
    severity WARN, such as a host from whose loss the cluster heals, count with ``warnings``. Of
    more than 64 problems at once the rest waits. Failed runs are reported by Dagster's
    ``run_failure_sensor``.
    """

    def alert_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        now = time.time()
        open_problems = _read_open_problems(context.cursor)
        checks = _checks_of(context, selection or dg.AssetSelection.kind("storm"))
        alerts = check_alerts(context.instance, checks, warnings=warnings)
        marks = {_mark(alert) for alert in alerts}
        open_problems = {
            key: at for key, at in open_problems.items() if now - at < _FORGET_SECS or key in marks
        }
        sent = 0
        for alert in alerts_to_send(alerts, open_problems):
            if len(open_problems) >= _MAX_OPEN and not alert.resolved:
                continue
            if time.time() - now > _MAX_TICK_SECS:
                break
            try:
                on_alert(alert)
            except Exception as error:
                context.log.error(
                    f"{alert.title}: {type(error).__name__}: {error}; tried again at the next tick"
                )
                continue
            sent += 1
            if alert.resolved:
                open_problems.pop(_mark(alert), None)
            else:
                open_problems[_mark(alert)] = round(now)
        return dg.SensorResult(
            skip_reason=dg.SkipReason(f"{sent} alerts sent, {len(open_problems)} problems known"),
            cursor=json.dumps({"told": open_problems}),
        )

    return dg.sensor(
        name=name,
        minimum_interval_seconds=interval_secs,
        default_status=default_status,
        description="Reports failed asset checks of the cluster, and their end, once each.",
    )(alert_sensor)


def _read_open_problems(cursor: str | None) -> dict[str, float]:
    """Marks of the problems that ``on_alert`` was called for -> seconds since 1970."""
    stored = read_cursor(cursor).get("told")
    if not isinstance(stored, dict):
        return {}
    return {str(mark): float(at) for mark, at in stored.items() if isinstance(at, int | float)}


def _checks_of(
    context: dg.SensorEvaluationContext, selection: dg.AssetSelection
) -> list[dg.AssetCheckKey]:
    """Asset checks of the selected assets in the sensor's code location."""
    if context.repository_def is None:
        return []
    graph = context.repository_def.asset_graph
    assets = selection.resolve(graph)
    return [key for key in graph.asset_check_keys if key.asset_key in assets]
