"""``make bench``: the benchmarks, measured side by side in one run on a whole local cluster.

Medians; no figure is asserted. ``make bench ARGS=--quick`` takes fewer samples.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from dataplane import Reading, pss_mb
from dataplane import report as dataplane_report
from multilang_chain import sentences_per_second

from storm_dagster.testing.cluster import LocalCluster, run_cli
from storm_dagster.testing.waiting import eventually

SENTENCES = str(Path(__file__).with_name("sentences.py"))


def row(metric: str, reference: str, ours: str) -> None:
    """One row of the report."""
    print(f"| {metric} | {reference} | {ours} |", flush=True)


def word_rate(document: dict[str, Any]) -> int:
    """Words counted so far."""
    return sum(t["stats"]["executed"] for t in document["tasks"] if t["component"] == "count")


def submit(cluster: LocalCluster, name: str, *conf: str) -> float:
    """Seconds from the shell command until all tasks run."""
    pairs = [part for pair in conf for part in ("--conf", pair)]
    began = time.monotonic()
    run_cli("submit", SENTENCES, "--name", name, *pairs, "--json", home=cluster.home).check()
    return time.monotonic() - began


def kill(cluster: LocalCluster, name: str) -> None:
    """Remove a topology and wait until its slots are free."""
    cluster.cli("kill", name, "-w", "0")
    eventually(lambda: not cluster.processes("worker"), 60, "the end of its workers")


def measure_submit(cluster: LocalCluster, samples: int) -> None:
    """Submit to all tasks running, four workers."""
    taken = []
    for number in range(samples):
        taken.append(submit(cluster, f"s{number}", "topology.workers=4", "bench.rate=10"))
        kill(cluster, f"s{number}")
    row(
        "submit -> all tasks running, 4 workers",
        "Storm: up to 10 s + worker start",
        f"{statistics.median(taken):.2f} s",
    )


def measure_rate(cluster: LocalCluster, seconds: float, *conf: str) -> float:
    """Sentences counted per second."""
    submit(cluster, "rate", *conf)
    time.sleep(4)
    first, began = word_rate(cluster.show("rate")), time.monotonic()
    time.sleep(seconds)
    rate = (word_rate(cluster.show("rate")) - first) / 10 / (time.monotonic() - began)
    kill(cluster, "rate")
    return rate


def measure_throughput(cluster: LocalCluster, seconds: float) -> None:
    """Word count acked and not, against the multilang chain in the same run."""
    baseline = sentences_per_second(seconds)
    acked = measure_rate(cluster, seconds, "bench.acked=true")
    unacked = measure_rate(cluster, seconds, "bench.acked=false")
    row("multilang chain (pystorm), sentences/s", f"{baseline:,.0f}", "1x")
    row(
        "word count, acked, 2 workers, sentences/s",
        f"{baseline:,.0f}",
        f"{acked:,.0f} ({acked / baseline:.1f}x)",
    )
    row(
        "word count, not acked, 2 workers",
        f"{baseline:,.0f}",
        f"{unacked:,.0f} ({unacked / baseline:.1f}x)",
    )


def measure_latency(cluster: LocalCluster) -> None:
    """Complete latency at 1,000 sentences/s, and the memory of its workers when idle."""
    submit(cluster, "latency", "bench.rate=500")
    # The quantiles are of the last five seconds or so: not of the first ones.
    time.sleep(20)
    reported = Reading(cluster, "latency")
    row("word count at 1,000 sentences/s, p50", "-", f"{reported.quantile('p50_ms')} ms")
    row("word count at 1,000 sentences/s, p99", "-", f"{reported.quantile('p99_ms')} ms")
    kill(cluster, "latency")
    submit(cluster, "idle", "bench.rate=0.001")
    time.sleep(5)
    sizes = [pss_mb(worker["pid"]) for worker in cluster.show("idle")["workers"]]
    row("idle worker memory (PSS)", "Storm: 768 MB heap", f"{statistics.median(sizes):.0f} MB")
    kill(cluster, "idle")


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument(
        "--only",
        choices=[
            "submit", "recovery", "leader", "throughput", "latency", "assignment", "cache", "nimbus", "dataplane",
            "submission", "start", "peers", "pages", "doctor", "spark", "spark-faults", "event-log",
        ],
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, help="length of each long run of the data plane; 0: none"
    )
    parser.add_argument(
        "--like", default="", help="only the data plane's rows with this in their name"
    )
    parser.add_argument(
        "--markdown",
        type=Path,
        help="the document whose table (of the data plane, or beside peers) is replaced",
    )
    options = parser.parse_args()
    if options.only == "peers":
        # Only if it is asked for: it fetches other engines.
        from peers import report as peers_report

        peers_report(quick=options.quick, markdown=options.markdown)
        return
    if options.only == "pages":
        # Only if it is asked for: it needs a Chromium.
        from pages import report as pages_report

        print("| metric | reference | ours |\n|---|---|---|", flush=True)
        for metric, reference, ours in pages_report(quick=options.quick):
            row(metric, reference, ours)
        return
    if options.only == "doctor":
        from doctor import report as doctor_report

        print("| metric | reference | ours |\n|---|---|---|", flush=True)
        for metric, reference, ours in doctor_report(quick=options.quick):
            row(metric, reference, ours)
        return
    samples, seconds = (2, 4.0) if options.quick else (7, 15.0)
    if options.only != "dataplane":
        print("| metric | reference | ours |\n|---|---|---|", flush=True)
    parts: dict[str, Callable[[LocalCluster], None]] = {
        "submit": lambda cluster: measure_submit(cluster, samples),
        "throughput": lambda cluster: measure_throughput(cluster, seconds),
        "latency": measure_latency,
    }
    if options.only in (None, "cache"):
        # Without a cluster: a ZooKeeper server of its own, full of topologies.
        from cache import report as cache_report

        for metric, reference, ours in cache_report(quick=options.quick):
            row(metric, reference, ours)
        if options.only:
            return
    if options.only in (None, "event-log"):
        # Without a cluster: views of one, and a ZooKeeper server for the memory of sensors.
        from event_log import report as event_log_report

        for metric, reference, ours in event_log_report():
            row(metric, reference, ours)
        if options.only:
            return
    if options.only in (None, "nimbus"):
        # A nimbus and a ZooKeeper server alone.
        from nimbus_http import report as nimbus_report

        for metric, reference, ours in nimbus_report(quick=options.quick):
            row(metric, reference, ours)
        if options.only:
            return
    if options.only in (None, "recovery"):
        # On a cluster of its own: a host of it is taken away.
        from recovery import report as recovery_report

        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            for metric, reference, ours in recovery_report(Path(folder), quick=options.quick):
                row(metric, reference, ours)
        from ack_gaps import report as gaps_report

        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            for metric, reference, ours in gaps_report(Path(folder), quick=options.quick):
                row(metric, reference, ours)
        if options.only:
            return
    if options.only in (None, "submission"):
        # On a cluster of its own: one of its hosts stands still for a while.
        from submission import rows as submission_rows

        for metric, reference, ours in submission_rows(options.quick):
            row(metric, reference, ours)
        if options.only:
            return
    if options.only in (None, "start"):
        # Clusters of its own, and a cache of its own.
        from start import rows as start_rows

        for metric, reference, ours in start_rows(options.quick):
            row(metric, reference, ours)
        if options.only:
            return
    if options.only in (None, "leader"):
        # On a cluster of its own, with three nimbuses.
        from leader import report as leader_report

        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            for metric, reference, ours in leader_report(Path(folder), quick=options.quick):
                row(metric, reference, ours)
        if options.only:
            return
    if options.only in (None, "spark-faults"):
        # On clusters of its own: with a standalone Spark, with none.
        from spark_faults import report as spark_faults_report

        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            for metric, reference, ours in spark_faults_report(Path(folder), quick=options.quick):
                row(metric, reference, ours)
        if options.only:
            return
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        LocalCluster(Path(folder) / "home") as cluster,
    ):
        for name, part in parts.items():
            if options.only in (None, name):
                part(cluster)
        remote = cluster.endpoints.spark.remote if cluster.endpoints.spark else None
        if options.only in (None, "assignment") and remote:
            from assignment import report

            for metric, reference, ours in report(remote, quick=options.quick):
                row(metric, reference, ours)
        if options.only in (None, "spark"):
            from spark_chain import report as chain_report

            for metric, reference, ours in chain_report(cluster, Path(folder), quick=options.quick):
                row(metric, reference, ours)
        if options.only in (None, "dataplane"):
            dataplane_report(
                cluster,
                quick=options.quick,
                minutes=options.minutes,
                like=options.like,
                markdown=options.markdown,
            )


if __name__ == "__main__":
    main()
