"""Components of Spark without a worker: what they send out is recorded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storm_dagster.api import Tuple
from storm_dagster.api.context import TopologyContext
from storm_dagster.model.names import AWAITED_METRIC
from storm_dagster.model.topology import TopologySpec
from storm_dagster.testing.waiting import eventually

TASKS = {1: "keywords", 2: "totals", 3: "lines", 4: "hours"}
"""Task -> component of every topology here."""


class Recorder:
    """Collector that keeps what a component sends out."""

    def __init__(self) -> None:
        self.emitted: list[tuple[Any, list[Any]]] = []
        self.acked: list[Tuple] = []
        self.failed: list[Tuple] = []
        self.errors: list[BaseException] = []
        self.metrics: dict[str, Any] = {}
        self.written: list[int] = []
        self.told: list[tuple[int, list[Any]]] = []

    def emit(
        self,
        tup: Any,
        stream: str | None,
        anchors: Any,
        direct_task: int | None,
        need_task_ids: bool,
        tup_id: Any,
    ) -> None:
        self.emitted.append((tup_id, list(tup)))

    def ack(self, tup: Tuple) -> None:
        self.acked.append(tup)

    def ack_all(self, tups: Any) -> None:
        self.acked += tups

    def fail(self, tup: Tuple, reason: Any = None) -> None:
        self.failed.append(tup)

    def error(self, error: BaseException, tup: Any = None) -> None:
        self.errors.append(error)

    def metric(self, name: str, value: Any) -> None:
        self.metrics[name] = value

    def awaits(self, source: str, text: str) -> None:
        self.metrics[AWAITED_METRIC] = text

    def count_batch(self, rows: int, nanos: int) -> None:
        self.written.append(rows)

    def joint(self, tups: Any) -> Tuple:
        return Tuple(0, "", "", 0, ())

    def send_to_peer(self, task: int, values: Any) -> None:
        self.told.append((task, list(values)))


def start(
    cls: type,
    component: str,
    args: Mapping[str, Any],
    spec: TopologySpec,
    conf: Mapping[str, Any],
    *,
    topology_id: str = "keywords-1-1",
    archive: Path | None = None,
    version: int = 0,
) -> Any:
    """A component as a worker starts it, with a recorder for a collector.

    ``version`` is the one of the assignment. ``archive``: the folder of the topology's unpacked
    archive.
    """
    made = cls(**args)
    made._collector = Recorder()
    task = next(number for number, name in TASKS.items() if name == component)
    made.context = TopologyContext(
        topology_id=topology_id,
        spec=spec,
        tasks=TASKS,
        task_id=task,
        component=component,
        conf=conf,
        port=6700 + version,
        archive=archive,
        assignment_version=version,
    )
    made.conf = conf
    made.initialize(conf, made.context)
    return made


def take(spout: Any, rows: int, timeout: float = 60.0) -> list[tuple[Any, list[Any]]]:
    """The next rows that the spout emits."""
    emitted = spout._collector.emitted

    def enough() -> bool:
        while len(emitted) < rows:
            before = len(emitted)
            spout.next_tuple()
            if len(emitted) == before:
                return False
        return True

    eventually(enough, timeout, f"{rows} rows of Spark", interval=0.02)
    found = emitted[:rows]
    del emitted[:rows]
    return found
