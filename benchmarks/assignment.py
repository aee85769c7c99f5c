"""What the PySpark assignment takes: cold, warm, and for large clusters. Prints rows; asserts no time.

``python benchmarks/assignment.py [--remote sc://host:port] [--large] [--cluster FILE.json]``. Without a
remote it starts a server of its own. Every result is checked for its invariants outside of the measured time.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from storm_dagster.model.placement import PlacementBatch
from storm_dagster.operations.plan_file import parse_plans
from storm_dagster.spark.pinned import FixedSessionIds
from storm_dagster.spark.planner import ConnectPlanner
from storm_dagster.spark.server import SparkServer
from storm_dagster.testing.placement_clusters import small_topology, supervisor
from storm_dagster.testing.placement_invariants import placement_faults


def many_topologies(topologies: int, supervisors: int) -> PlacementBatch:
    """Topologies of 100 tasks on 4 workers each."""
    slots = 4 * topologies // supervisors + 1
    return PlacementBatch(
        supervisors=tuple(supervisor(number, range(6900, 6900 + slots)) for number in range(supervisors)),
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
    topology = small_topology("big", bolts=bolts, spouts={"lines": tasks - 9 * part - 2}, workers=workers)
    slots = workers // supervisors + 1
    return PlacementBatch(
        supervisors=tuple(supervisor(number, range(6900, 6900 + slots)) for number in range(supervisors)),
        topologies=(topology,),
    )


def measure(name: str, planner: ConnectPlanner, build: Callable[[], PlacementBatch], rounds: int) -> float:
    """Prints the median of the assignment, and tasks per second; returns the median."""
    batch = build()
    results = [planner(batch) for _ in range(rounds)]
    result = results[-1]
    seconds = [each.assign_secs for each in results]
    faults = placement_faults(batch, result)
    tasks = sum(len(topology.tasks) for topology in batch.topologies)
    median = statistics.median(seconds)
    spread = f"{min(seconds):.2f}..{max(seconds):.2f}"
    failed = sum(placement.status == "failed" for placement in result.placements)
    print(
        f"{name:58} {median:8.2f} s  ({spread}, n={rounds})  {tasks / median:9,.0f} tasks/s"
        + (f"  {failed} topologies do not fit" if failed else "")
        + (f"  BROKEN: {faults[0]}" if faults else ""),
        flush=True,
        file=sys.stderr,
    )
    return median


def report(remote: str, *, quick: bool = False) -> Iterator[tuple[str, str, str]]:
    """(figure, reference, ours) rows of design section 9, on a running server."""
    planner = ConnectPlanner(remote, FixedSessionIds(str(uuid.uuid4())), deadline_secs=600)
    small = many_topologies(1, 2)
    measure("warming up", planner, lambda: small, 5)
    warm = measure("warm, one topology of 100 tasks", planner, lambda: small, 5 if quick else 15)
    yield "assignment, warm session, one topology", "<= 0.7 s", f"{warm:.2f} s"
    rows: list[tuple[str, int, Callable[[], PlacementBatch], str]] = [
        (
            "assignment of 100,000 tasks on 1,000 supervisors",
            100_000,
            lambda: many_topologies(1_000, 1_000),
            "",
        ),
        (
            "assignment of one topology of 100,000 tasks on 4,000 workers",
            100_000,
            lambda: one_topology(100_000, 4_000, 1_000),
            "",
        ),
    ]
    if not quick:
        million = ("assignment of 1,000,000 tasks on 10,000 supervisors", 1_000_000)
        rows.append((*million, lambda: many_topologies(10_000, 10_000), ", <= 20 s"))
    for figure, tasks, build, limit in rows:
        median = measure(figure, planner, build, 2 if quick else 3)
        yield figure, f">= 50,000 tasks/s{limit}", f"{median:.1f} s, {tasks / median:,.0f} tasks/s"
    planner.close(release=True)


def cluster_file(path: Path) -> PlacementBatch:
    """The batch of a plan document."""
    (plan,) = parse_plans(json.dumps(json.loads(path.read_text(encoding="utf-8"))))
    return plan.batch


def run(remote: str, arguments: argparse.Namespace) -> None:
    """All rows on one server."""
    session_id = str(uuid.uuid4())
    small = many_topologies(1, 2)
    for name in ("first job of a fresh server", "a new session", "the same session, another client"):
        planner = ConnectPlanner(
            remote, FixedSessionIds(session_id if "same" in name else str(uuid.uuid4())), deadline_secs=600
        )
        if "same" in name:
            ConnectPlanner(remote, FixedSessionIds(session_id), deadline_secs=600)(small)
        started = time.monotonic()
        result = planner(small)
        whole = time.monotonic() - started
        print(
            f"{name:58} {whole:8.2f} s  (session {result.session_secs:.2f}, assignment {result.assign_secs:.2f})",
            flush=True,
        )
        planner.close(release="same" not in name)
    planner = ConnectPlanner(remote, FixedSessionIds(session_id), deadline_secs=600)
    # A JVM that has just started still compiles: what a cluster of some minutes' age does is measured.
    measure("the next ten jobs", planner, lambda: small, 10)
    measure("warm, one topology of 100 tasks", planner, lambda: small, 11)
    measure(
        "1,000 topologies of 100 tasks, 1,000 supervisors", planner, lambda: many_topologies(1_000, 1_000), 5
    )
    measure(
        "1 topology of 100,000 tasks on 4,000 workers",
        planner,
        lambda: one_topology(100_000, 4_000, 1_000),
        3,
    )
    if arguments.large:
        measure(
            "10,000 topologies of 100 tasks, 10,000 supervisors",
            planner,
            lambda: many_topologies(10_000, 10_000),
            2,
        )
    for path in arguments.cluster:
        measure(path.name, planner, lambda path=path: cluster_file(path), 3)
    planner.close(release=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{'peak memory of this process':58} {peak:8.0f} MiB")


def main() -> None:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--remote", help="a running Spark Connect server")
    parser.add_argument("--large", action="store_true", help="also a million tasks")
    parser.add_argument("--cluster", type=Path, action="append", default=[], help="plan documents (JSON)")
    parser.add_argument("--memory", default="1g", help="heap of the server that is started")
    arguments = parser.parse_args()
    if arguments.remote:
        run(arguments.remote, arguments)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="storm-dagster-bench-") as folder:
        with SparkServer(port, Path(folder), memory=arguments.memory) as server:
            run(server.remote, arguments)


if __name__ == "__main__":
    sys.exit(main())
