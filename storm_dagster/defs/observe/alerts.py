"""Alerts in open-source Dagster: :func:`build_alert_sensor` calls a function of yours once for each
problem.

Alert policies are a feature of Dagster+. Evaluations of checks that come from sensors fail no run
either, so that Dagster's own `run_failure_sensor` does not see them.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, Literal

import dagster as dg

from storm_dagster.defs.keys import TOPOLOGY_TAG
from storm_dagster.defs.observe.history import REPOSITORY_TAG, is_own_run, remember_own
from storm_dagster.defs.observe.sensors import number, read_cursor
from storm_dagster.model.dagster_names import DagsterNames

_MOST_OPEN = 64
_MOST_RUNS = 500
_LONGEST_SECS = 30.0
# A run that failed and was never repeated does not concern the present; the next failure is a new
# problem.
_FORGET_SECS = 86_400


@dataclass(frozen=True)
class Alert:
    """A problem that has just appeared, or one that is over."""

    key: str
    """Key of the problem, for tools that count or join alerts."""
    kind: Literal["check", "run"]
    subject: str
    """The asset check, or the job with its topology."""
    severity: Literal["ERROR", "WARN"]
    text: str
    """The problem, or the reason of the failure."""
    resolved: bool = False
    """The problem is over."""

    @property
    def title(self) -> str:
        """One line."""
        return f"{'RESOLVED' if self.resolved else self.severity}: {self.subject}"


def _mark(alert: Alert) -> str:
    return hashlib.sha256(alert.key.encode()).hexdigest()[:10]


def alerts_to_send(found: Iterable[Alert], open_problems: Mapping[str, float]) -> list[Alert]:
    """Those of ``found`` that are news when ``open_problems`` are known: the last state of each key
    counts.
    """
    last = {alert.key: alert for alert in found}
    return [alert for alert in last.values() if alert.resolved == (_mark(alert) in open_problems)]


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
                "check",
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


def run_alerts(
    instance: dg.DagsterInstance, names: DagsterNames, since: float, repository: str | None
) -> tuple[list[Alert], float]:
    """Runs of ours that succeeded or failed after ``since``, in that order, and from where to go
    on.
    """
    records = instance.get_run_records(
        dg.RunsFilter(
            statuses=[dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE],
            updated_after=datetime.fromtimestamp(since, tz=timezone.utc),
        ),
        limit=_MOST_RUNS,
        order_by="update_timestamp",
        ascending=True,
    )
    found: list[Alert] = []
    for record in records:
        run = record.dagster_run
        since = max(since, record.update_timestamp.timestamp())
        if not is_own_run(run, names, repository if REPOSITORY_TAG in run.tags else None):
            continue
        where = run.tags.get("dagster/partition") or run.tags.get(TOPOLOGY_TAG)
        subject = f"{run.job_name} of {where}" if where else run.job_name
        failed = run.status == dg.DagsterRunStatus.FAILURE
        found.append(
            Alert(
                f"run {subject}", "run", subject, "ERROR", f"run {run.run_id}", resolved=not failed
            )
        )
    return found, since


def _reason(instance: dg.DagsterInstance, alert: Alert) -> Alert:
    """The alert of a failed run with the error of its first failed step."""
    if alert.kind != "run" or alert.resolved:
        return alert
    entries = instance.all_logs(
        alert.text.removeprefix("run "), of_type=dg.DagsterEventType.STEP_FAILURE
    )
    for entry in entries:
        error = getattr(
            entry.dagster_event and entry.dagster_event.event_specific_data, "error", None
        )
        if error is not None:
            cause = error.cause or error
            return replace(alert, text=f"{alert.text}: {cause.message.strip()[:1000]}")
    return alert


def build_alert_sensor(
    on_alert: Callable[[Alert], object],
    *,
    name: str = "alert_sensor",
    cluster: str | None = None,
    selection: dg.AssetSelection | None = None,
    warnings: bool = False,
    interval_secs: int = 60,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """A sensor that calls ``on_alert`` when a check or a run of ours fails, and when that is over.

    It watches the asset checks of ``selection`` (all assets of kind ``storm``) and the runs of the
    jobs of ``cluster`` and of declared topologies. ``on_alert`` is called once for each problem and
    once at its end, at least once if it raises or if Dagster dies meanwhile: it is then called
    again at the next tick. It should return within seconds. Checks of severity WARN, such as a host
    from whose loss the cluster heals, count with ``warnings``. A failed run is over when the job
    succeeds for the same topology, and forgotten after a day. Of more than 64 problems at once the
    rest waits.
    """
    names = DagsterNames(cluster)

    def alert_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        cursor, now = read_cursor(context.cursor), time.time()
        since = number(cursor.get("since"), now)
        open_problems = cursor.get("told")
        open_problems = dict(open_problems) if isinstance(open_problems, dict) else {}
        repository = None
        checks: list[dg.AssetCheckKey] = []
        if context.repository_def is not None:
            graph = context.repository_def.asset_graph
            assets = (selection or dg.AssetSelection.kind("storm")).resolve(graph)
            checks = [key for key in graph.asset_check_keys if key.asset_key in assets]
            if (origin := context.code_location_origin) is not None:
                repository = f"{context.repository_def.name}@{origin.location_name}"
        runs, reached = run_alerts(context.instance, names, since, repository)
        found = [*check_alerts(context.instance, checks, warnings=warnings), *runs]
        marks = {_mark(one) for one in found}
        open_problems = {
            key: at for key, at in open_problems.items() if now - at < _FORGET_SECS or key in marks
        }
        sent = 0
        for alert in alerts_to_send(found, open_problems):
            if len(open_problems) >= _MOST_OPEN and not alert.resolved:
                continue
            if time.time() - now > _LONGEST_SECS:
                reached = since
                break
            try:
                on_alert(_reason(context.instance, alert))
            except Exception as error:
                context.log.error(
                    f"{alert.title}: {type(error).__name__}: {error}; tried again at the next tick"
                )
                reached = since
                continue
            sent += 1
            if alert.resolved:
                open_problems.pop(_mark(alert), None)
            else:
                open_problems[_mark(alert)] = round(now)
        return dg.SensorResult(
            skip_reason=dg.SkipReason(f"{sent} alerts sent, {len(open_problems)} problems known"),
            cursor=json.dumps({"since": reached, "told": open_problems}),
        )

    sensor = dg.sensor(
        name=name,
        minimum_interval_seconds=interval_secs,
        default_status=default_status,
        description="Reports failed asset checks and failed runs of the cluster, and their end, once each.",
    )(alert_sensor)
    remember_own(cluster, dg.Definitions(sensors=[sensor]))
    return sensor
