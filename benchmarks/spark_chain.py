"""Words per second of source, split, count and Parquet on Spark: by hand, as a SparkQuery, as a
fused chain, not fused.

Side by side on one embedded Spark server, one after the other, in turns. The rate is that of the
batches which Spark has committed after the first ones: the same files, the same measure for all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chain_topology
import pyarrow.parquet as parquet

from storm_dagster.api.spark.fused import make_loader
from storm_dagster.security.spark_remote import with_spark_token
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually

LINE = "to be or not to be that is the question"
WORDS = len(LINE.split())
TOPOLOGIES = str(Path(__file__).with_name("chain_topology.py"))


def make_files(folder: Path, files: int, lines: int) -> str:
    """Text of so many files."""
    folder.mkdir()
    for number in range(files):
        (folder / f"{number:03}.txt").write_text(f"{LINE}\n" * lines)
    return str(folder)


def committed(checkpoint: str) -> list[float]:
    """When Spark committed each batch."""
    return sorted(path.stat().st_mtime for path in Path(checkpoint, "commits").glob("[0-9]*"))


def rate_of(checkpoint: str, files: int, words: int, skip: int, seconds: float = 600) -> float:
    """Words per second of the batches after the first ones, once all are committed."""
    eventually(lambda: len(committed(checkpoint)) >= files, seconds, "all batches")
    moments = committed(checkpoint)
    return words * (files - 1 - skip) / (moments[files - 1] - moments[skip])


def check_rows(out: str, words: int) -> None:
    """Every word counted."""
    rows = [
        row
        for path in Path(out).glob("*.parquet")
        for row in parquet.ParquetFile(path).read().to_pylist()
    ]
    if (total := sum(row["count"] for row in rows)) != words:
        raise AssertionError(f"{out} has {total:,} words, not {words:,}")


def by_hand(remote: str, home: Path, folder: str, out: str) -> Callable[[], None]:
    """Start the query as a user of Spark alone would; the result stops it."""
    from pyspark.sql import SparkSession

    spark: Any = SparkSession.builder.remote(with_spark_token(remote, [remote], home)).create()
    load = make_loader(_packed())

    def whole(frame: Any, batch_id: int) -> None:
        load("chain_topology:whole")(frame, batch_id, out)

    writer = chain_topology.lines(spark, folder).writeStream.foreachBatch(whole)
    query = (
        writer.option("checkpointLocation", f"{out}.checkpoint")
        .trigger(processingTime="0 seconds")
        .start()
    )

    def stop() -> None:
        query.stop()
        spark.stop()

    return stop


def _packed() -> bytes:
    import io
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.write(TOPOLOGIES, "chain_topology.py")
    return buffer.getvalue()


def topology(
    cluster: LocalCluster, target: str, folder: str, out: str, *conf: str
) -> Callable[[], None]:
    """Submit one; the result removes it."""
    name = Path(out).name
    cluster.cli("submit", f"{TOPOLOGIES}:{target}", "--name", name, *conf, "--", folder, out)

    def stop() -> None:
        cluster.cli("kill", name, "-w", "0")
        eventually(lambda: not cluster.processes("worker"), 60, "the end of its workers")

    return stop


def pause_after_kill(cluster: LocalCluster, target: str, folder: str, out: str) -> float:
    """Seconds from ``kill -9`` of the owner of the query until the next batch is committed."""
    stop = topology(cluster, target, folder, out)
    eventually(lambda: len(committed(f"{out}.checkpoint")) >= 3, 200, "the first batches")
    cluster.kill("worker")
    before, began = len(committed(f"{out}.checkpoint")), time.monotonic()
    eventually(
        lambda: len(committed(f"{out}.checkpoint")) > before, 200, "the next batch", interval=0.05
    )
    taken = time.monotonic() - began
    stop()
    return taken


def report(cluster: LocalCluster, folder: Path, *, quick: bool) -> Iterator[tuple[str, str, str]]:
    """Rows of (metric, reference, ours)."""
    files, lines, rounds = (5, 100_000, 1) if quick else (9, 200_000, 3)
    source, skip = make_files(folder / "in", files, lines), 2
    spark = cluster.endpoints.spark
    assert spark is not None
    ways: dict[str, Callable[[str], Callable[[], None]]] = {
        "by hand": lambda out: by_hand(spark.remote, cluster.home, source, out),
        "SparkQuery": lambda out: topology(cluster, "query", source, out),
        "fused chain": lambda out: topology(cluster, "chain", source, out),
        "not counted": lambda out: topology(
            cluster, "chain", source, out, "--conf", "topology.spark.fuse.counts=false"
        ),
    }
    rates: dict[str, list[float]] = {}
    for number in range(rounds):
        for way, start in ways.items():
            out = str(folder / f"{way.replace(' ', '-')}-{number}")
            stop = start(out)
            rates.setdefault(way, []).append(
                rate_of(f"{out}.checkpoint", files, lines * WORDS, skip)
            )
            time.sleep(1)
            check_rows(out, files * lines * WORDS)
            stop()
    many = make_files(folder / "many", 400, 1_000)
    for target, way in (("query", "SparkQuery"), ("chain", "fused chain")):
        pauses = [
            pause_after_kill(cluster, target, many, str(folder / f"{target}-k{n}"))
            for n in range(rounds)
        ]
        yield (
            f"{way}: owner killed -> next batch committed",
            "goal 10 s",
            f"{statistics.median(pauses):.1f} s",
        )
    # Each row of it passes the worker three times: few files, each a fiftieth as long, so that
    # fixed costs count too.
    small = make_files(folder / "small", 4, lines // 50)
    out = str(folder / "apart")
    options = ("--conf", "topology.spark.fuse=false", "--conf", "topology.message.timeout.secs=300")
    stop = topology(cluster, "chain", small, out, *options)
    apart = rate_of(f"{out}.checkpoint", 4, lines // 50 * WORDS, 1)
    stop()
    hand = statistics.median(rates["by hand"])
    names = {"not counted": "fused chain without topology.spark.fuse.counts"}
    for way in list(ways)[1:]:
        ours = statistics.median(rates[way])
        yield (
            f"{names.get(way, way)}: split, count, Parquet, words/s",
            f"by hand {hand:,.0f}",
            f"{ours:,.0f} ({ours / hand:.2f}x)",
        )
    yield (
        "the same chain, not fused, words/s",
        f"by hand {hand:,.0f}",
        f"{apart:,.0f} ({apart / hand:.3f}x)",
    )
