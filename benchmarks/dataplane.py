"""The data plane: word count by parallelism, a chain of ten bolts, a windowed join, micro-batches on Spark.

``python benchmarks/dataplane.py [--quick] [--minutes N] [--markdown FILE]`` prints a table; with ``--markdown`` it
also replaces the table between the markers of that file. Quantiles are of complete latency, as the spouts
measured it; CPU is of all workers together, in cores; memory is the PSS of the largest worker, at the beginning and
at the end of a run.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))

from run import SENTENCES, kill, pss_mb

from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually

PLANES = str(Path(__file__).with_name("planes.py"))
MARKERS = ("<!-- dataplane: begin -->", "<!-- dataplane: end -->")
HEADER = (
    "| topology | acked | spout tuples/s | p50 ms | p99 ms | CPU cores | memory MiB, first and last |\n"
    "|---|---|--:|--:|--:|--:|--:|"
)


def _cpu(pids: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def _emitted(document: dict[str, Any]) -> int:
    return sum(task["stats"]["emitted"] for task in document["tasks"] if task["component"] in SPOUTS)


SPOUTS = ("numbers", "others", "sentences")


def measure(
    cluster: LocalCluster, label: str, target: str, seconds: float, *conf: str, rebalance: int = 0
) -> str:
    """One row: the topology submitted, warmed for five seconds, watched, killed."""
    pairs = [part for pair in conf for part in ("--conf", pair)]
    cluster.cli("submit", target, "--name", "plane", *pairs)
    if rebalance:
        wider = [part for name in ("sentences", "split", "count") for part in ("-e", f"{name}={rebalance}")]
        cluster.cli("rebalance", "plane", "-w", "0", *wider)
    eventually(lambda: _emitted(cluster.show("plane")) > 0, 60, "the first tuples")
    time.sleep(5)
    first = cluster.show("plane")
    pids = [worker["pid"] for worker in first["workers"] if worker["pid"]]
    began, cpu, memory = time.monotonic(), _cpu(pids), max(map(pss_mb, pids))
    time.sleep(seconds)
    # Counts reach the topology master every three seconds.
    last = cluster.show("plane")
    took = time.monotonic() - began
    cores, after = (_cpu(pids) - cpu) / took, max(map(pss_mb, pids))
    said = [figures for part in last["components"].values() for figures in part["metrics"].values()]

    def quantile(name: str) -> str:
        found = [figures[name] for figures in said if name in figures]
        return f"{max(found):.1f}" if found else "-"

    batches = [figures["batch_ms"] for figures in said if "batch_ms" in figures]
    kill(cluster, "plane")
    note = f", newest batch {batches[0]:.0f} ms" if batches else ""
    acked = "no" if "bench.acked=false" in conf else "yes"
    rate = (_emitted(last) - _emitted(first)) / took
    return (
        f"| {label}{note} | {acked} | {rate:,.0f} | {quantile('p50_ms')} | {quantile('p99_ms')} | {cores:.2f} "
        f"| {memory:.0f}, {after:.0f} |"
    )


def rows(cluster: LocalCluster, seconds: float, minutes: float) -> Iterator[str]:
    """All rows."""
    for acked in ("true", "false"):
        yield measure(cluster, "chain of 10 bolts", f"{PLANES}:chain", seconds, f"bench.acked={acked}")
    yield measure(cluster, "chain of 10 bolts at 1,000/s", f"{PLANES}:chain", seconds, "bench.rate=1000")
    for acked in ("true", "false"):
        pace = ("bench.rate=5000",) if acked == "false" else ()
        label = "join in windows of 200 ms" + (" at 10,000/s" if pace else "")
        yield measure(cluster, label, f"{PLANES}:WindowedJoin", seconds, f"bench.acked={acked}", *pace)
    yield measure(cluster, "SparkBolt, batches of 20,000", f"{PLANES}:spark", seconds)
    for wide in (1, 2, 4):
        label = f"word count, {wide} tasks of each component"
        yield measure(cluster, label, SENTENCES, seconds, rebalance=wide)
    if minutes:
        yield measure(cluster, f"word count for {minutes:g} minutes", SENTENCES, minutes * 60)


def write_table(path: Path, table: str) -> None:
    """Replaces what stands between the markers of a document; exits when they are not there."""
    begin, end = MARKERS
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
    if not pattern.search(text):
        sys.exit(f"{path} has no lines {begin} and {end}: put the two where the table belongs")
    path.write_text(pattern.sub(lambda _: f"{begin}\n{table}\n{end}", text), encoding="utf-8")


def main() -> None:
    """Runs everything and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="six seconds for each row")
    parser.add_argument("--minutes", type=float, default=0.0, help="length of the long run; 0: none")
    parser.add_argument("--markdown", type=Path, help="the document whose table is replaced")
    arguments = parser.parse_args()
    lines = [HEADER]
    print(HEADER, flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        LocalCluster(Path(folder) / "home") as cluster,
    ):
        for line in rows(cluster, 6.0 if arguments.quick else 20.0, arguments.minutes):
            print(line, flush=True)
            lines.append(line)
    if arguments.markdown:
        write_table(arguments.markdown, "\n".join(lines))


if __name__ == "__main__":
    main()
