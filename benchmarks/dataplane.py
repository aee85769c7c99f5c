"""The data plane: word count, a chain of ten bolts, a windowed join, micro-batches on Spark, long
runs.

``make bench ARGS="--only dataplane [--quick] [--minutes N] [--markdown FILE]"`` prints a table;
with ``--markdown`` it also replaces the table between the markers of that file. Quantiles are of
complete latency, as the spouts measured it; CPU is of all workers together, in cores, and for each
tuple of the spouts; memory is the PSS of each worker, at the beginning and at the end of a run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tables import write_table

from storm_dagster.model.errors import NotAlive, StormDagsterError, Unavailable
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually

PLANES = str(Path(__file__).with_name("planes.py"))
HEADER = (
    "| topology | acked | spout tuples/s | p50 ms | p99 ms | CPU cores | CPU µs per tuple "
    "| memory of each worker MiB, first -> last |\n"
    "|---|---|--:|--:|--:|--:|--:|---|"
)
SPOUTS = ("numbers", "others", "sentences")
_NAME = "plane"
_POLL_SECS = 0.5


def pss_mb(pid: int) -> float:
    """Proportional set size of a process, MiB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise LookupError(pid)


@dataclass(frozen=True)
class DataplaneCase:
    """One row: what is submitted, and how."""

    label: str
    target: str
    args: tuple[str, ...] = ()
    conf: Mapping[str, Any] = field(default_factory=dict)
    secs: float | None = None
    """Length of the measurement, when it is not that of the others."""
    warm_secs: float = 5.0


def cases(minutes: float) -> list[DataplaneCase]:
    """All rows, the long ones last."""
    unacked = {"bench.acked": "false"}
    found = [
        *(
            DataplaneCase(f"word count, {n} tasks of each component", "words", (str(n),))
            for n in (1, 2, 4)
        ),
        DataplaneCase("word count", "words", conf=unacked),
        DataplaneCase(
            "word count at 1,000 sentences/s", "words", conf={"bench.rate": 500}, secs=12.0
        ),
        DataplaneCase("chain of 10 bolts", "chain"),
        DataplaneCase("chain of 10 bolts", "chain", conf=unacked),
        DataplaneCase(
            "chain of 10 bolts at 1,000/s", "chain", conf={"bench.rate": 1000}, secs=12.0
        ),
        DataplaneCase("join in windows of 200 ms", "WindowedJoin"),
        DataplaneCase(
            "join in windows of 200 ms at 10,000/s",
            "WindowedJoin",
            conf={**unacked, "bench.rate": 5000},
        ),
        DataplaneCase(
            "SparkBolt at 20,000/s", "spark", conf={"bench.rate": 20_000}, secs=12.0, warm_secs=20.0
        ),
        DataplaneCase("SparkBolt", "spark", secs=12.0, warm_secs=10.0),
        DataplaneCase("fan-out of 20,000 beside a slow bolt", "burst", conf=unacked, secs=30.0),
    ]
    if minutes:
        found += [
            DataplaneCase(f"word count for {minutes:g} minutes", "words", secs=minutes * 60),
            DataplaneCase(
                f"word count beside a slow bolt for {minutes:g} minutes",
                "slowed",
                secs=minutes * 60,
            ),
        ]
    return found


class Reading:
    """Metrics that the spouts have reported at one moment, and CPU and memory of the workers."""

    def __init__(self, cluster: LocalCluster, name: str = _NAME) -> None:
        document = cluster.show(name)
        parts = document["components"]
        self.tasks = sum(task["component"] in SPOUTS for task in document["tasks"])
        reported = {
            task: figures
            for name in SPOUTS
            if name in parts
            for task, figures in parts[name]["metrics"].items()
        }
        self.spouts: dict[str, Any] = {
            task: figures for task, figures in reported.items() if "emitted" in figures
        }
        self.batches: dict[str, Any] = next(
            iter(parts.get("batches", {}).get("metrics", {}).values()), {}
        )
        self.pids: list[int] = sorted(
            worker["pid"] for worker in document["workers"] if worker["pid"]
        )

    def complete(self) -> bool:
        """Whether every task of the spouts has reported."""
        return bool(self.spouts) and len(self.spouts) == self.tasks

    def rate_since(self, first: Reading) -> float:
        """Tuples a second of all spouts, by their own clocks."""
        total = 0.0
        for task, now in self.spouts.items():
            before = first.spouts.get(task)
            if before is not None and now["at"] > before["at"]:
                total += (now["emitted"] - before["emitted"]) / (now["at"] - before["at"])
        return total

    def quantile(self, name: str) -> str:
        """The worst of the tasks'."""
        found = [figures[name] for figures in self.spouts.values() if name in figures]
        return f"{max(found):.1f}" if found else "-"


def _cpu(pids: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def measure(cluster: LocalCluster, case: DataplaneCase, secs: float) -> str:
    """One row: the topology submitted, warmed, watched, killed."""
    pairs = [part for key, value in case.conf.items() for part in ("--conf", f"{key}={value}")]
    rest = ("--", *case.args) if case.args else ()
    cluster.cli("submit", f"{PLANES}:{case.target}", "--name", _NAME, *pairs, *rest)
    try:
        eventually(
            lambda: Reading(cluster).complete(), 120, "the first tuples", ignore=(Unavailable,)
        )
        time.sleep(case.warm_secs)
        first = Reading(cluster)
        began, cpu, memory = time.monotonic(), _cpu(first.pids), [pss_mb(pid) for pid in first.pids]
        batches: dict[int, float] = {}
        last = first
        while time.monotonic() - began < (case.secs or secs):
            time.sleep(_POLL_SECS if case.target == "spark" else min(5.0, case.secs or secs))
            last = Reading(cluster)
            if last.batches.get("batches", 0) > first.batches.get("batches", 0):
                batches[last.batches["batches"]] = last.batches["batch_ms"]
        cores = (_cpu(first.pids) - cpu) / (time.monotonic() - began)
        after = [pss_mb(pid) for pid in first.pids]
    finally:
        _remove(cluster)
    rate = last.rate_since(first)
    note = ""
    if case.target == "spark":
        size = last.batches.get("batch_tuples", 0)
        took = f"{statistics.median(batches.values()):.0f} ms" if batches else "none ended"
        note = f", batches of {size:,.0f}: median {took} ({len(batches)} seen)"
    acked = "no" if case.conf.get("bench.acked") == "false" else "yes"
    sizes = ", ".join(f"{one:.0f} -> {two:.0f}" for one, two in zip(memory, after, strict=True))
    each = f"{cores / rate * 1e6:.1f}" if rate else "-"
    return (
        f"| {case.label}{note} | {acked} | {rate:,.0f} | {last.quantile('p50_ms')} | {last.quantile('p99_ms')} "
        f"| {cores:.2f} | {each} | {sizes} |"
    )


def _remove(cluster: LocalCluster) -> None:
    try:
        cluster.cli("kill", _NAME, "-w", "0")
    except NotAlive:
        return
    eventually(lambda: not cluster.processes("worker"), 60, "the end of its workers")


def rows(
    cluster: LocalCluster, *, quick: bool, minutes: float | None = None, like: str = ""
) -> Iterator[str]:
    """Each row as soon as it is measured; one that cannot be measured has the reason. ``like``:
    only those rows.
    """
    long = (0.5 if quick else 10.0) if minutes is None else minutes
    for case in cases(long):
        if like and like not in case.label:
            continue
        try:
            yield measure(cluster, case, 6.0 if quick else 20.0)
        except (StormDagsterError, AssertionError, OSError, psutil.Error) as error:
            yield f"| {case.label} | not measured: {' '.join(str(error).split())[:200]} |  |  |  |  |  |  |"


def report(
    cluster: LocalCluster, *, quick: bool, minutes: float | None, like: str, markdown: Path | None
) -> None:
    """Prints the table, and writes it into ``markdown``."""
    lines = [HEADER]
    print(f"\n{HEADER}", flush=True)
    for line in rows(cluster, quick=quick, minutes=minutes, like=like):
        print(line, flush=True)
        lines.append(line)
    if markdown:
        write_table(markdown, "dataplane", "\n".join(lines))
