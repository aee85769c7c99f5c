"""Loads of tasks, here and in other workers, for load-aware shuffling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from storm_dagster.worker.dataplane.transport import Transport
from storm_dagster.worker.tasks.runner import Runner

_REFRESH_SECS = 1.0
_VALID_SECS = 4.0
"""A peer repeats a load while its task is busy; without that it has died, or the task has moved."""
_LEAST_REPORTED = 0.05


class Loads:
    """Loads of all busy tasks. A load is the estimated time to process a task's queue, in seconds, at most 1."""

    def __init__(self, conf: Mapping[str, Any], transport: Transport | None) -> None:
        self._transport = transport
        self._enabled = not conf.get("topology.disable.loadaware.messaging")
        self._next = 0.0
        self._mine: dict[int, float] = {}
        self._theirs: dict[int, tuple[float, float]] = {}
        """Task -> (load, its expiry)."""

    def on_report(self, loads: Iterable[tuple[int, float]], now: float) -> None:
        """Store the changed loads of a peer's tasks."""
        self._theirs.update((task, (load, now + _VALID_SECS)) for task, load in loads)

    def refresh(self, now: float, runners: Iterable[Runner]) -> None:
        """Once a second: measure, publish to the peers, and update the shuffles of all tasks."""
        if not self._enabled or now < self._next:
            return
        self._next = now + _REFRESH_SECS
        runners = list(runners)
        before, self._mine = self._mine, {}
        for runner in runners:
            load = min(1.0, runner.backlog_secs())
            if load > _LEAST_REPORTED:
                self._mine[runner.task_id] = round(load, 3)
        if self._transport is not None and (self._mine or before):
            # The end of a load is sent once.
            sent = [*self._mine.items(), *((task, 0.0) for task in before.keys() - self._mine.keys())]
            for peer in self._transport.peers.values():
                peer.loads = sent
        self._theirs = {task: sent for task, sent in self._theirs.items() if sent[1] > now}
        known = {**{task: load for task, (load, _) in self._theirs.items()}, **self._mine}
        for runner in runners:
            for route in runner.routes.values():
                for shuffle in route.shuffles:
                    shuffle.refresh([known.get(link.task, 0.0) for link in shuffle.targets])
