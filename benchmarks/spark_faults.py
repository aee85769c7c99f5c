"""Seconds without progress of a query when a part of Spark, or the query's owner, is killed; a
placement on two executors.

On a standalone Spark of two workers: an executor, a worker of Spark, its master. With a classic
session (``spark.master``) in our worker: the owner, whose driver dies with it. From ``kill -9``
until Spark commits the next batch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from assignment import million_tasks
from spark_chain import make_files, pause_after_kill, topology

from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually

WAYS = {"query": "SparkQuery", "chain": "fused chain"}


def newest_batch(checkpoint: str) -> int:
    """Number of the last batch that Spark has committed, -1 before the first. Spark removes old
    ones.
    """
    return max((int(path.name) for path in Path(checkpoint, "commits").glob("[0-9]*")), default=-1)


def kill_executor(cluster: LocalCluster) -> None:
    """Kill the JVM of one executor; its worker of Spark stays."""
    for record in cluster.processes("spark-worker"):
        for process in psutil.Process(record.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # One that ends just now.
                if any("CoarseGrainedExecutorBackend" in word for word in process.cmdline()):
                    os.kill(process.pid, signal.SIGKILL)
                    return
    raise AssertionError("no executor runs")


FAULTS: dict[str, Callable[[LocalCluster], object]] = {
    "executor": kill_executor,
    "worker of Spark": lambda cluster: cluster.kill("spark-worker"),
    "master of Spark": lambda cluster: cluster.kill("spark-master"),
}


def pauses(
    cluster: LocalCluster, target: str, folder: str, out: str, rounds: int
) -> Iterator[tuple[str, list[float]]]:
    """(fault, seconds of each round) under one running topology."""
    stop, checkpoint = topology(cluster, target, folder, out), f"{out}.checkpoint"
    eventually(lambda: newest_batch(checkpoint) >= 2, 200, "the first batches")
    for fault, kill in FAULTS.items():
        taken: list[float] = []
        for _ in range(rounds):
            kill(cluster)
            before, began = newest_batch(checkpoint), time.monotonic()
            # One that was as good as done does not count.
            eventually(
                lambda before=before: newest_batch(checkpoint) > before + 1,
                200,
                "a batch",
                interval=0.05,
            )
            taken.append(time.monotonic() - began)
            # All parts again.
            eventually(
                lambda: len(cluster.processes("spark-worker")) == 2, 60, "both workers of Spark"
            )
            eventually(lambda: bool(cluster.processes("spark-master")), 60, "the master")
            time.sleep(8)
        yield fault, taken
    stop()


def report(folder: Path, *, quick: bool) -> Iterator[tuple[str, str, str]]:
    """Rows of (metric, reference, ours)."""
    rounds = 1 if quick else 3
    many = make_files(folder / "many", 2_000, 1_000)

    def told(seconds: list[float]) -> str:
        return f"{statistics.median(seconds):.1f} s (at most {max(seconds):.1f})"

    with LocalCluster(
        folder / "standalone", supervisors=1, spark_workers=2, timeout=400
    ) as cluster:
        assert cluster.endpoints.spark is not None
        placed = million_tasks(cluster.endpoints.spark.remote, cluster.home, rounds)
        yield (
            "a million tasks on 10,000 supervisors, standalone: two executors",
            "> 50,000 tasks/s",
            placed,
        )
        for target, way in WAYS.items():
            for fault, taken in pauses(
                cluster, target, many, str(folder / f"{target}-standalone"), rounds
            ):
                yield (
                    f"{way}, standalone: {fault} killed -> a whole batch",
                    "goal 10 s",
                    told(taken),
                )
    with LocalCluster(
        folder / "classic", supervisors=1, conf={"spark.master": "local[2]"}, timeout=400
    ) as cluster:
        for target, way in WAYS.items():
            taken = [
                pause_after_kill(cluster, target, many, str(folder / f"{target}-classic{number}"))
                for number in range(rounds)
            ]
            yield f"{way}, classic: owner killed -> next batch", "goal 45 s", told(taken)
