"""Settings of the Dagster instance.

They limit a sensor tick, and a check advises on better ones.
"""

from typing import Any

import dagster as dg

from storm_dagster.defs.metadata import table
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.instance_advice import instance_advice, sensors_use_threads

SETTINGS_CHECK = "instance_settings"
"""Name of the check of these settings."""
SHORT_TICK_SECS = 1.0
"""Longest wait of a tick if the sensors of the instance share one thread."""


def read_settings(instance: dg.DagsterInstance) -> dict[str, Any]:
    """Read the settings of :func:`instance_advice`.

    Settings that this release of Dagster does not expose are left out.
    """
    settings: dict[str, Any] = {}
    try:
        for name in ("sensors", "concurrency"):
            settings[name] = dict(instance.get_settings(name))
        coordinator = instance.run_coordinator
        data = getattr(coordinator, "inst_data", None)
        if data:
            settings["run_coordinator"] = data.info_dict()
        else:
            settings["run_coordinator"] = {"class": type(coordinator).__name__}
    except Exception:
        # Another release, or a custom instance: the default values are the safe assumption.
        return settings
    return settings


def tick_limit(context: dg.SensorEvaluationContext, secs: float) -> tuple[float, str]:
    """Seconds that a tick may wait, at most ``secs``, and a note for its history.

    The note is empty unless the seconds are fewer than ``secs``: if sensors share one thread, a
    waiting tick stalls all others of the instance.
    """
    if secs <= SHORT_TICK_SECS or sensors_use_threads(read_settings(context.instance)):
        return secs, ""
    return SHORT_TICK_SECS, (
        "; ticks are short because the sensors of this instance share one thread: "
        "sensors.use_threads: true in dagster.yaml makes it see changes at once"
    )


def tick_conf(conf: ClusterConf, instance: dg.DagsterInstance | None) -> ClusterConf:
    """``conf`` for a tick in ``instance`` (``None``: for a run).

    If sensors share one thread, the tick waits at most two seconds for ZooKeeper.
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
    rows = [[row.setting, row.now, row.better, row.gain, row.cost] for row in advice]
    sentences = [f"{row.setting}: {row.better} instead of {row.now}" for row in advice]
    return dg.AssetCheckResult(
        passed=not advice,
        severity=dg.AssetCheckSeverity.WARN,
        description="; ".join(sentences) or "no advice",
        metadata={"advice": table("setting now better gain cost", rows)},
    )
