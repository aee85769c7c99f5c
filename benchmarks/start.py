"""From `storm-dagster dev` to ready, and to the first submission: the first start on a machine, and
later ones.

The first start has no class data to share yet (Java's archives, which are made when that cluster
ends).
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storm_dagster.host.endpoints import ClusterFile
from storm_dagster.testing.cluster import run_cli

SENTENCES = str(Path(__file__).with_name("sentences.py"))


def _busy_secs() -> float:
    """CPU seconds of the whole machine since boot."""
    fields = [int(part) for part in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _start_cluster(home: Path) -> Iterator[tuple[float, float]]:
    """A cluster that has just become ready: (seconds, CPU seconds) that this took."""
    began, busy = time.monotonic(), _busy_secs()
    try:
        run_cli("dev", "--detach", "--json", "--ports", "auto", "--home", str(home)).check()
        yield time.monotonic() - began, _busy_secs() - busy
    finally:
        run_cli("stop", "--json", "--home", str(home)).check()


def _spark_listens(home: Path) -> bool:
    cluster = ClusterFile.read(home)
    return cluster is not None and cluster.spark is not None and not cluster.spark.starting


def rows(quick: bool) -> Iterator[tuple[str, str, str]]:
    """The rows of the report."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        try:
            first: list[str] = []
            ready: list[float] = []
            busy: list[float] = []
            spark: list[float] = []
            placed: list[float] = []
            for number in range(3 if quick else 6):
                home = Path(folder) / f"home{number}"
                began = time.monotonic()
                with _start_cluster(home) as (secs, used):
                    if number % 2:
                        # At once: it waits for Spark.
                        run_cli("submit", SENTENCES, "--name", "first", "--json", home=home).check()
                        placed.append(time.monotonic() - began)
                    else:
                        while not _spark_listens(home):
                            time.sleep(0.1)
                        spark.append(time.monotonic() - began)
                        # It makes its class data of what its first jobs have loaded.
                        time.sleep(20.0 if number == 0 else 0.0)
                if number == 0:
                    first = [f"{secs:.1f} s", f"{used:.0f} CPU s", f"{spark.pop():.1f} s"]
                else:
                    ready.append(secs)
                    busy.append(used)
        finally:
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before
    yield "`dev` -> ready", f"first start {first[0]}", f"{statistics.median(ready):.1f} s"
    yield (
        "- machine's CPU until then",
        f"first start {first[1]}",
        f"{statistics.median(busy):.0f} CPU s",
    )
    yield "`dev` -> Spark listens", f"first start {first[2]}", f"{statistics.median(spark):.1f} s"
    yield (
        "`dev` -> all tasks of a submission run, submitted when ready",
        "-",
        f"{statistics.median(placed):.1f} s",
    )
