"""Times of the PySpark assignment, cold and warm, beside those of the local planner. Asserts no
time.

``python benchmarks/assignment.py [--large] [--quick] [--cluster FILE.json] [--markdown FILE]``
prints a markdown table; with ``--markdown`` it also replaces the table between the markers of that
file. ``--large`` adds a million tasks. Every result is checked for its rules, and against the local
planner, outside of the measured time.

*Cold* is the first placement on a server that has just started: session and assignment. *Warm* is
the median of the assignment in a session that has placed before. *Fixed* is the share of the warm
time that one single task takes as well. Memory is the peak of what belongs to each process alone
(PSS), while the warm rounds run.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import psutil
from tables import write_table

from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.model.placement import PlacementBatch, TopologyToPlace
from storm_dagster.operations.read.plan_file import parse_plans
from storm_dagster.spark.planner import ConnectPlanner, FixedSessionIds

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "rigs"))

from storm_rigs.placement.placement_clusters import small_topology, supervisor
from storm_rigs.placement.placement_invariants import placement_faults
from storm_rigs.servers.spark_server import SparkServer

HEADER = (
    "| what is placed | tasks | supervisors | cold s | warm s | tasks/s | fixed | local planner s | driver MiB "
    "| Spark JVM MiB | Python workers MiB |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def one_task(supervisors: int) -> PlacementBatch:
    """One topology of a single task."""
    topology = TopologyToPlace(name="one", tasks={1: "lines"}, parallelism={"lines": 1})
    return PlacementBatch(
        supervisors=tuple(supervisor(number, [6900, 6901]) for number in range(supervisors)),
        topologies=(topology,),
    )


def many_topologies(topologies: int, supervisors: int) -> PlacementBatch:
    """Topologies of 100 tasks on 4 workers each."""
    slots = 4 * topologies // supervisors + 1
    return PlacementBatch(
        supervisors=tuple(
            supervisor(number, range(6900, 6900 + slots)) for number in range(supervisors)
        ),
        topologies=tuple(
            small_topology(
                f"t{number:05d}",
                bolts={"split": (40, ["lines"]), "count": (40, ["split"])},
                spouts={"lines": 18},
                workers=4,
            )
            for number in range(topologies)
        ),
    )


def one_topology(tasks: int, workers: int, supervisors: int) -> PlacementBatch:
    """One topology of ten components."""
    part = tasks // 10
    bolts = {f"b{number}": (part, [f"b{number - 1}" if number else "lines"]) for number in range(9)}
    topology = small_topology(
        "big", bolts=bolts, spouts={"lines": tasks - 9 * part - 2}, workers=workers
    )
    slots = workers // supervisors + 1
    return PlacementBatch(
        supervisors=tuple(
            supervisor(number, range(6900, 6900 + slots)) for number in range(supervisors)
        ),
        topologies=(topology,),
    )


def lost_supervisor(topologies: int, supervisors: int) -> PlacementBatch:
    """The event after one supervisor of a full cluster is gone: every topology that had a worker
    there.
    """
    before = many_topologies(topologies, supervisors)
    lost = before.supervisors[0].id
    placed = {placement.name: placement.workers for placement in plan_placement(before).placements}
    hurt = {
        name for name, workers in placed.items() if any(worker.node == lost for worker in workers)
    }
    used: dict[str, list[int]] = {}
    for name, workers in placed.items():
        for worker in workers if name not in hurt else ():
            used.setdefault(worker.node, []).append(worker.port)
    return PlacementBatch(
        supervisors=tuple(
            node.model_copy(update={"used": tuple(used.get(node.id, ()))})
            for node in before.supervisors
            if node.id != lost
        ),
        topologies=tuple(
            topology.model_copy(
                update={
                    "event": "monitor",
                    "old": placed[topology.name],
                    "dead": tuple(
                        task
                        for worker in placed[topology.name]
                        if worker.node == lost
                        for task in worker.ids
                    ),
                }
            )
            for topology in before.topologies
            if topology.name in hurt
        ),
    )


@dataclass(frozen=True)
class AssignmentCase:
    """One row."""

    name: str
    build: Callable[[], PlacementBatch]
    rounds: int
    of_tasks: int | None = None
    """Tasks of the whole cluster, where the event concerns fewer."""


CASES = (
    AssignmentCase("one task", lambda: one_task(10), 11),
    AssignmentCase("one topology of 100 tasks, 4 workers", lambda: many_topologies(1, 10), 11),
    AssignmentCase("100 topologies of 100 tasks", lambda: many_topologies(100, 100), 7),
    AssignmentCase("1,000 topologies of 100 tasks", lambda: many_topologies(1_000, 1_000), 5),
    AssignmentCase(
        "one topology of 100,000 tasks, 4,000 workers",
        lambda: one_topology(100_000, 4_000, 1_000),
        5,
    ),
    AssignmentCase(
        "one lost supervisor of 1,000, at 100,000 tasks",
        lambda: lost_supervisor(1_000, 1_000),
        7,
        100_000,
    ),
)
LARGE = (
    AssignmentCase("10,000 topologies of 100 tasks", lambda: many_topologies(10_000, 10_000), 3),
)


@contextmanager
def server_of(memory: str) -> Iterator[str]:
    """A fresh Spark Connect server; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="storm-dagster-bench-") as folder:
        with SparkServer(port, Path(folder), memory=memory) as server:
            yield server.remote


class Watch:
    """Peaks of private memory, in MiB, of this process, of the server's JVM and of its Python
    workers.
    """

    def __init__(self) -> None:
        self.driver = self.jvm = self.python = 0.0
        self._done = Event()
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        me = psutil.Process()
        while not self._done.wait(0.25):
            jvm = python = 0.0
            for process in me.children(recursive=True):
                try:
                    name, held = process.name(), process.memory_full_info().pss / 2**20
                except (psutil.Error, OSError):
                    continue
                if name.startswith("java"):
                    jvm += held
                elif "python" in name:
                    python += held
            self.driver = max(self.driver, me.memory_full_info().pss / 2**20)
            self.jvm, self.python = max(self.jvm, jvm), max(self.python, python)


def planner_of(remote: str, home: Path | None = None) -> ConnectPlanner:
    """A planner in a session of its own; ``home``: the state folder with the server's token."""
    return ConnectPlanner(remote, FixedSessionIds(str(uuid.uuid4())), deadline_secs=600, home=home)


def tasks_of(batch: PlacementBatch) -> int:
    """Tasks in the batch."""
    return sum(len(topology.tasks) for topology in batch.topologies)


def cold_secs(batch: PlacementBatch, memory: str) -> float:
    """Session and assignment of the first placement on a server that has just started."""
    with server_of(memory) as remote:
        planner = planner_of(remote)
        result = planner(batch)
        planner.close()
    return result.session_secs + result.assign_secs


def row(
    case: AssignmentCase, planner: ConnectPlanner, fixed: float | None, memory: str, cold: bool
) -> tuple[str, float]:
    """The markdown row, and the warm seconds."""
    batch = case.build()
    first = cold_secs(batch, memory) if cold else None
    planner(batch)
    with Watch() as watch:
        results = [planner(batch) for _ in range(case.rounds)]
    warm = statistics.median(result.assign_secs for result in results)
    began = time.monotonic()
    local = plan_placement(batch)
    local_secs = time.monotonic() - began
    faults = placement_faults(batch, results[-1])
    if results[-1].placements != local.placements:
        faults.append("the local planner placed otherwise")
    failed = sum(placement.status == "failed" for placement in local.placements)
    tasks = tasks_of(batch)
    name = (
        case.name
        + (f" ({failed} do not fit)" if failed else "")
        + (f" BROKEN: {faults[0]}" if faults else "")
    )
    cells = [
        name,
        f"{tasks:,}" if case.of_tasks is None else f"{tasks:,} of {case.of_tasks:,}",
        f"{len(batch.supervisors):,}",
        "" if first is None else f"{first:.2f}",
        f"{warm:.2f}",
        f"{tasks / warm:,.0f}" if tasks > warm * 10 else f"{tasks / warm:.1f}",
        f"{min(1.0, (fixed if fixed is not None else warm) / warm):.0%}",
        f"{local_secs:.3f}",
        f"{watch.driver:,.0f}",
        f"{watch.jvm:,.0f}",
        f"{watch.python:,.0f}",
    ]
    return f"| {' | '.join(cells)} |", warm


def report(remote: str, *, quick: bool = False) -> Iterator[tuple[str, str, str]]:
    """(metric, reference, ours) rows of the performance page, on a running server."""
    planner = planner_of(remote)
    small = many_topologies(1, 2)
    for _ in range(5):
        planner(small)
    warm = statistics.median(planner(small).assign_secs for _ in range(5 if quick else 15))
    yield "assignment, warm session, one topology", "<= 0.7 s", f"{warm:.2f} s"
    rows: list[tuple[str, Callable[[], PlacementBatch], str]] = [
        (
            "assignment of 100,000 tasks on 1,000 supervisors",
            lambda: many_topologies(1_000, 1_000),
            "",
        ),
        (
            "assignment of one topology of 100,000 tasks on 4,000 workers",
            lambda: one_topology(100_000, 4_000, 1_000),
            "",
        ),
    ]
    if not quick:
        name = "assignment of 1,000,000 tasks on 10,000 supervisors"
        rows.append((name, lambda: many_topologies(10_000, 10_000), ", <= 20 s, memory <= 4 GiB"))
    for metric, build, limit in rows:
        batch = build()
        with Watch() as watch:
            median = statistics.median(planner(batch).assign_secs for _ in range(2 if quick else 3))
        # The server's processes are only seen when they are children of this one.
        held = f", {watch.driver + watch.jvm + watch.python:,.0f} MiB in all" if watch.jvm else ""
        yield (
            metric,
            f">= 50,000 tasks/s{limit}",
            f"{median:.1f} s, {tasks_of(batch) / median:,.0f} tasks/s{held}",
        )
    planner.close(release=True)


def million_tasks(remote: str, home: Path, rounds: int = 3) -> str:
    """Median of the assignment of a million tasks there, after a first one; every rule is
    checked.
    """
    batch, planner = many_topologies(10_000, 10_000), planner_of(remote, home)
    results = [planner(batch) for _ in range(rounds + 1)]
    planner.close(release=True)
    if faults := placement_faults(batch, results[-1]):
        raise AssertionError(faults[0])
    median = statistics.median(result.assign_secs for result in results[1:])
    return f"{median:.1f} s, {tasks_of(batch) / median:,.0f} tasks/s"


def cluster_case(path: Path) -> AssignmentCase:
    """The row of a plan document."""
    (plan,) = parse_plans(json.dumps(json.loads(path.read_text(encoding="utf-8"))))
    return AssignmentCase(path.name, lambda: plan, 5)


def main() -> None:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="also a million tasks")
    parser.add_argument("--quick", action="store_true", help="no cold starts")
    parser.add_argument(
        "--cluster", type=Path, action="append", default=[], help="plan documents (JSON)"
    )
    parser.add_argument("--markdown", type=Path, help="the document whose table is replaced")
    parser.add_argument("--memory", default="1g", help="heap of the servers that are started")
    arguments = parser.parse_args()
    cases = [*CASES, *(LARGE if arguments.large else ()), *map(cluster_case, arguments.cluster)]
    lines = [HEADER]
    print(HEADER, flush=True)
    with server_of(arguments.memory) as remote:
        planner = planner_of(remote)
        for _ in range(15):
            # A JVM that has just started still compiles: what a cluster of some minutes' age does
            # is measured.
            planner(many_topologies(1, 2))
        fixed: float | None = None
        for case in cases:
            line, warm = row(case, planner, fixed, arguments.memory, not arguments.quick)
            fixed = warm if fixed is None else fixed
            lines.append(line)
            print(line, flush=True)
        planner.close(release=True)
    if arguments.markdown:
        write_table(arguments.markdown, "assignment", "\n".join(lines))


if __name__ == "__main__":
    main()
