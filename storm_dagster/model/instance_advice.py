"""Advice on settings of a Dagster instance, with gain and cost; pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from storm_dagster.model.tables import load_table

_STOCK_DEQUEUE_SECS = 5
"""Dagster's default for ``dequeue_interval_seconds``."""
_TABLE = load_table(__name__, "instance_advice")


@dataclass(frozen=True)
class Advice:
    """A setting of ``dagster.yaml`` that could be better.

    The present one works, too.
    """

    setting: str
    """Its path, as ``sensors.use_threads``."""
    now: str
    better: str
    gain: str
    cost: str


def sensors_use_threads(settings: Mapping[str, Any]) -> bool:
    """True if sensors wait in threads of one process.

    False if the setting is not known.
    """
    return _section(settings, "sensors").get("use_threads") is True


def instance_advice(settings: Mapping[str, Any]) -> tuple[Advice, ...]:
    """Settings of an instance that could be better.

    ``settings`` are nested as in ``dagster.yaml``, or as the webserver shows them under
    Deployment > Configuration (GraphQL ``instance { info }``); a missing one has its stock
    value. Settings of another run coordinator than the stock queue are the owner's choice: they
    get no advice.
    """
    return tuple(_advice(settings))


def _advice(settings: Mapping[str, Any]) -> Iterator[Advice]:
    if not sensors_use_threads(settings):
        yield _row("sensors.use_threads", "false")
    coordinator = _section(settings, "run_coordinator")
    if coordinator.get("class", "QueuedRunCoordinator") != "QueuedRunCoordinator":
        return
    queue = {
        **_section(coordinator, "config"),
        **_section(settings, "run_queue"),
        **_section(_section(settings, "concurrency"), "runs"),
    }
    pause = queue.get("dequeue_interval_seconds", _STOCK_DEQUEUE_SECS)
    if isinstance(pause, int) and pause > 1:
        yield _row("run_queue.dequeue_interval_seconds", pause, secs=pause - 1)
    max_runs = queue.get("max_concurrent_runs")
    if max_runs in (0, 1):
        yield _row("concurrency.runs.max_concurrent_runs", max_runs)


def _row(setting: str, now: object, **values: object) -> Advice:
    row = _TABLE[setting]
    return Advice(setting, str(now), row["better"], row["gain"].format(**values), row["cost"])


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = settings.get(name)
    return section if isinstance(section, Mapping) else {}
