"""Advice on settings of a Dagster instance: what each improves and what it costs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_STOCK_DEQUEUE_SECS = 5


@dataclass(frozen=True)
class Advice:
    """A setting of ``dagster.yaml`` that could be better. Nothing breaks without it."""

    setting: str
    """Its path, as ``sensors.use_threads``."""
    now: str
    better: str
    gain: str
    cost: str


def sensors_use_threads(settings: Mapping[str, Any]) -> bool:
    """Whether sensors wait side by side; what is not known counts as no."""
    return _section(settings, "sensors").get("use_threads") is True


def instance_advice(settings: Mapping[str, Any]) -> tuple[Advice, ...]:
    """Settings of an instance that could be better; empty when none could.

    ``settings`` are nested as in ``dagster.yaml``, or as the webserver shows them under Deployment > Configuration
    (GraphQL ``instance { info }``); what is missing has its stock value. Settings of another run coordinator than the
    stock queue are the owner's choice: they get no advice.
    """
    return tuple(_advice(settings))


def _advice(settings: Mapping[str, Any]) -> Iterator[Advice]:
    if not sensors_use_threads(settings):
        yield Advice(
            "sensors.use_threads",
            "false",
            "true",
            "heartbeat_sensor waits for changes instead of looking every few seconds: a lost worker is seen within "
            "milliseconds, and no slow sensor delays another",
            "the daemon evaluates sensors in threads (sensors.num_workers, for example 8): your sensors must bear that "
            "others run beside them",
        )
    coordinator = _section(settings, "run_coordinator")
    if coordinator.get("class", "QueuedRunCoordinator") != "QueuedRunCoordinator":
        return
    inner = coordinator.get("config")
    queue = {
        **(inner if isinstance(inner, Mapping) else {}),
        **_section(settings, "run_queue"),
        **_section(_section(settings, "concurrency"), "runs"),
    }
    pause = queue.get("dequeue_interval_seconds", _STOCK_DEQUEUE_SECS)
    if isinstance(pause, int) and pause > 1:
        yield Advice(
            "run_queue.dequeue_interval_seconds",
            str(pause),
            "1",
            f"every run starts up to {pause - 1} s sooner, runs that heal or submit included",
            "the daemon asks its run storage for queued runs every second",
        )
    most = queue.get("max_concurrent_runs")
    if most in (0, 1):
        yield Advice(
            "concurrency.runs.max_concurrent_runs",
            str(most),
            "2 or more",
            "a run that heals or submits starts beside another run; behind it, the leader heals after about two minutes, "
            "and a deploy job of a declared topology ends after 15 s to make room for the run that it waits for",
            "as many runs at once on the machines of your run launcher",
        )


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = settings.get(name)
    return found if isinstance(found, Mapping) else {}
