"""Alerts in open-source Dagster.

:func:`build_alert_sensor` calls your function once for each problem. Alert policies are a feature
of Dagster+. Evaluations of checks by sensors do not fail a run, so that Dagster's own
`run_failure_sensor`, which reports failed runs, does not see them.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import dagster as dg

from storm_dagster.defs.observe.sensors import read_cursor
from storm_dagster.model.errors import typed_error_text

_MAX_OPEN = 64
"""Open problems that the cursor holds; further ones wait."""
_MAX_TICK_SECS = 30.0
"""Time after which a tick makes no further call; the next tick continues."""
_FORGET_SECS = 86_400
"""Time after which the problem of a check that is no longer defined is forgotten.

Such a problem would never end.
"""


@dataclass(frozen=True)
class Alert:
    """A new problem, or one that is over."""

    key: str
    """Key of the problem, for tools that count or group alerts."""
    subject: str
    """The asset check."""
    severity: Literal["ERROR", "WARN"]
    text: str
    """The problem."""
    resolved: bool = False
    """True if the problem is over."""

    @property
    def title(self) -> str:
        """One line for a subject or a heading."""
        return f"{'RESOLVED' if self.resolved else self.severity}: {self.subject}"


def _mark(problem: str) -> str:
    """Short hash of a problem's key, for the cursor."""
    return hashlib.sha256(problem.encode()).hexdigest()[:10]


def _subject_of(key: dg.AssetCheckKey) -> str:
    return f"{key.asset_key.to_user_string()}:{key.name}"


def _problem_of(key: dg.AssetCheckKey) -> str:
    """Key of the problem that a check reports when it fails."""
    return f"check {_subject_of(key)}"


def alerts_to_send(alerts: Iterable[Alert], open_problems: Mapping[str, float]) -> list[Alert]:
    """The alerts of new problems, and of ``open_problems`` that are over.

    ``open_problems``: mark of each problem that was reported -> epoch seconds.
    """
    return [alert for alert in alerts if alert.resolved == (_mark(alert.key) in open_problems)]


def check_alerts(
    instance: dg.DagsterInstance, keys: Sequence[dg.AssetCheckKey], *, warnings: bool
) -> list[Alert]:
    """The newest evaluation of each check that has one, as an alert.

    It is ``resolved`` if the check passed, and without ``warnings`` also if it failed with severity
    WARN. A check that is being evaluated now has no alert.
    """
    if not keys:
        return []
    records = instance.event_log_storage.get_latest_asset_check_execution_by_key(keys)
    alerts: list[Alert] = []
    for key, record in sorted(records.items(), key=lambda item: str(item[0])):
        event = record.event.dagster_event if record.event is not None else None
        if event is None or event.event_type != dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            # It is being evaluated now. Its open problem, if any, stays open.
            continue
        evaluation: Any = event.event_specific_data
        is_error = evaluation.severity == dg.AssetCheckSeverity.ERROR
        findings = evaluation.metadata.get("found")
        text = evaluation.description
        if not text and findings is not None:
            text = findings.value
        alerts.append(
            Alert(
                _problem_of(key),
                _subject_of(key),
                "ERROR" if is_error else "WARN",
                str(text or "the check failed"),
                resolved=bool(evaluation.passed) or not (is_error or warnings),
            )
        )
    return alerts


def build_alert_sensor(
    on_alert: Callable[[Alert], object],
    *,
    name: str = "alert_sensor",
    selection: dg.AssetSelection | None = None,
    warnings: bool = False,
    interval_secs: int = 60,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """A sensor that calls ``on_alert`` when an asset check fails, and when it passes.

    It watches the asset checks of ``selection`` (all assets of kind ``storm``). ``on_alert`` is
    called once for each problem and once at its end. If it raises, or if Dagster dies during the
    call, the next tick repeats the call. It should return within seconds. Checks of severity WARN,
    such as a lost host from which the cluster recovers, count only with ``warnings``. Of more than
    64 problems at once, the later ones wait. Dagster's ``run_failure_sensor`` reports failed runs.
    """

    def alert_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        now = time.time()
        open_problems = _read_open_problems(context.cursor)
        checks = _checks_of(context, selection or dg.AssetSelection.kind("storm"))
        alerts = check_alerts(context.instance, checks, warnings=warnings)
        defined = {_mark(_problem_of(key)) for key in checks}
        open_problems = {
            mark: at
            for mark, at in open_problems.items()
            if mark in defined or now - at < _FORGET_SECS
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
                    f"{alert.title}: {typed_error_text(error)}; tried again at the next tick"
                )
                continue
            sent += 1
            if alert.resolved:
                open_problems.pop(_mark(alert.key), None)
            else:
                open_problems[_mark(alert.key)] = round(now)
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
    """Mark of each problem for which ``on_alert`` was called -> epoch seconds."""
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
