"""Settings of the Dagster instance: the limit of a sensor tick, and a check that advises on better
ones.
"""

from typing import Any

import dagster as dg

from storm_dagster.defs.metadata import table
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.instance_advice import instance_advice, sensors_use_threads

SETTINGS_CHECK = "instance_settings"
SHORT_TICK_SECS = 1.0


def read_settings(instance: dg.DagsterInstance) -> dict[str, Any]:
    """The settings that :func:`instance_advice` reads; what this release of Dagster does not expose
    is left out.
    """
    found: dict[str, Any] = {}
    try:
        for name in ("sensors", "concurrency"):
            found[name] = dict(instance.get_settings(name))
        coordinator = instance.run_coordinator
        data = getattr(coordinator, "inst_data", None)
        found["run_coordinator"] = (
            data.info_dict() if data else {"class": type(coordinator).__name__}
        )
    except Exception:
        # Another release, or an instance of somebody's own: stock values are the careful guess.
        return found
    return found


def tick_limit(context: dg.SensorEvaluationContext, secs: float) -> tuple[float, str]:
    """Seconds that a tick may wait, at most ``secs``, and a note when they are fewer (for the
    tick's history).

    Where sensors share one thread, a waiting tick stalls all others of the instance.
    """
    if secs <= SHORT_TICK_SECS or sensors_use_threads(read_settings(context.instance)):
        return secs, ""
    return SHORT_TICK_SECS, (
        "; ticks are short because the sensors of this instance share one thread: sensors.use_threads: true in "
        "dagster.yaml makes it see changes at once"
    )


def tick_conf(conf: ClusterConf, instance: dg.DagsterInstance | None) -> ClusterConf:
    """``conf`` for a tick in ``instance`` (``None``: for a run): without ZooKeeper it waits no
    longer than others.
    """
    if instance is None or sensors_use_threads(read_settings(instance)):
        return conf
    wait_ms = min(int(conf["storm.zookeeper.connection.timeout"]), int(SHORT_TICK_SECS * 2000))
    return conf.with_values({"storm.zookeeper.connection.timeout": wait_ms}, "a tick")


def settings_check(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
    """:func:`check_settings` of the instance that runs it."""
    return check_settings(context.instance)


def check_settings(instance: dg.DagsterInstance) -> dg.AssetCheckResult:
    """Result of the check: better settings, their gain and their cost."""
    advice = instance_advice(read_settings(instance))
    columns = ("setting", "now", "better", "gain", "cost")
    return dg.AssetCheckResult(
        passed=not advice,
        severity=dg.AssetCheckSeverity.WARN,
        description="; ".join(f"{a.setting}: {a.better} instead of {a.now}" for a in advice)
        or "no advice",
        metadata={
            "advice": table(
                " ".join(columns), [[getattr(row, column) for column in columns] for row in advice]
            )
        },
    )
