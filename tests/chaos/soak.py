"""``make soak``: hours of churn on a real local cluster, and what grows meanwhile.

    python tests/chaos/soak.py --hours 2            or --minutes 15, --seed N, --faults "worker killed,leader frozen"

Rounds of ``make chaos`` go on (submissions, kills, rebalances, updates, faults). Daemons are frozen
and cut off but not ended by default: what is started again proves nothing about growth. Every ten
seconds memory, file descriptors and threads of each process are read, watches and nodes of
ZooKeeper, and the rows of Dagster's storage. Prints a table with the slope of each; exit 1 with a
violation.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil

from storm_dagster.testing.cluster import LocalCluster

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "rigs"))

from storm_rigs.chaos.cut_off import ProxiedNimbus  # noqa: E402
from storm_rigs.chaos.faults import all_faults  # noqa: E402
from storm_rigs.chaos.rounds import ChaosRun  # noqa: E402
from storm_rigs.chaos.workload import WordCount  # noqa: E402
from storm_rigs.servers.request_counts import server_metrics  # noqa: E402

_EVERY_SECS = 10.0
_PASSING = ("worker", "spark-warm-up")
"""Roles whose processes come and go with topologies and runs."""
_OF_PROCESSES = {"memory MiB": 2, "file descriptors": 0, "threads": 0}
"""Metric of a process -> digits shown."""

Sample = dict[str, float]
"""``metric`` or ``metric of ROLE ID PID`` -> value."""


class Sampler(threading.Thread):
    """Reads everything every ten seconds until :meth:`close`."""

    def __init__(self, cluster: LocalCluster) -> None:
        super().__init__(name="sampler", daemon=True)
        self._cluster = cluster
        self._over = threading.Event()
        self._rows: dict[Path, tuple[float, int]] = {}
        self.samples: list[tuple[float, Sample]] = []

    def run(self) -> None:
        """Sample, each time at the next multiple of the interval."""
        began = time.monotonic()
        while not self._over.wait(_EVERY_SECS - (time.monotonic() - began) % _EVERY_SECS):
            self.samples.append((time.monotonic() - began, dict(self._read())))

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self.join(60.0)

    def _read(self) -> Iterator[tuple[str, float]]:
        records = self._cluster.processes()
        for record in records:
            who = f"{record.role} {record.id} {record.pid}"
            with suppress(psutil.Error):
                process = psutil.Process(record.pid)
                yield f"memory MiB of {who}", process.memory_full_info().uss / 2**20
                yield f"file descriptors of {who}", process.num_fds()
                yield f"threads of {who}", process.num_threads()
        yield "processes", len(records)
        watches = nodes = 0
        for record in records:
            if record.role == "zookeeper":
                try:
                    found = server_metrics(f"127.0.0.1:{record.ports['client']}")
                    watches, nodes = (
                        watches + found["zk_watch_count"],
                        max(nodes, found["zk_znode_count"]),
                    )
                except (OSError, KeyError):
                    watches = -1 << 30  # One of them does not answer now: the sum says nothing.
        if watches > 0:
            yield from (("ZooKeeper watches", watches), ("ZooKeeper nodes", nodes))
        yield (
            "rows in Dagster's storage",
            sum(self._stored(path) for path in self._cluster.home.glob("dagster/**/*.db")),
        )

    def _stored(self, path: Path) -> int:
        with suppress(OSError, sqlite3.Error):
            changed = max(
                each.stat().st_mtime for each in (path, *path.parent.glob(f"{path.name}-wal"))
            )
            if self._rows.get(path, (0.0, 0))[0] != changed:
                with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=1.0)) as db:
                    tables = [
                        name
                        for (name,) in db.execute(
                            "SELECT name FROM sqlite_master WHERE type = 'table'"
                        )
                    ]
                    count = sum(
                        db.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0]
                        for name in tables
                    )
                self._rows[path] = changed, count
        return self._rows.get(path, (0.0, 0))[1]


Row = tuple[str, int, str, float, float, float, float]
"""(who, processes, metric, first, last, slope per hour, its standard error); first and last are
medians of a tenth.
"""


def slopes(samples: list[tuple[float, Sample]]) -> Iterator[Row]:
    """Straight lines through the samples; those of a role are its processes' sums, of those that
    lived all the time.
    """
    names: dict[tuple[str, str], list[str]] = {}
    for name in sorted(set().union(*(sample for _, sample in samples))):
        metric, _, who = name.partition(" of ")
        role = who.partition(" ")[0]
        there = sum(name in sample for _, sample in samples)
        # A read may fail while its process is frozen.
        if role not in _PASSING and there >= 0.8 * len(samples):
            names.setdefault((role, metric), []).append(name)
    for (role, metric), summed in sorted(names.items()):
        points = [
            (at / 3600, sum(sample[name] for name in summed))
            for at, sample in samples
            if sample.keys() >= set(summed)
        ]
        hours, values = [at for at, _ in points], [value for _, value in points]
        if len(points) < 10:
            continue
        slope, intercept = statistics.linear_regression(hours, values)
        rest = sum((value - intercept - slope * at) ** 2 for at, value in points) / (
            len(points) - 2
        )
        spread = sum((at - statistics.fmean(hours)) ** 2 for at in hours)
        part = max(1, len(values) // 10)
        ends = statistics.median(values[:part]), statistics.median(values[-part:])
        yield role or "cluster", len(summed), metric, *ends, slope, (rest / spread) ** 0.5


def show(rows: list[Row]) -> None:
    """The table, in Markdown."""
    print(
        "| process | metric | first | last | slope per hour | standard error |\n|---|---|--:|--:|--:|--:|"
    )
    for who, number, metric, first, last, slope, error in rows:
        title = who if number == 1 else f"{who} ({number})"
        digits = _OF_PROCESSES.get(metric, 0)
        print(
            f"| {title} | {metric} | {first:.{digits}f} | {last:.{digits}f} | {slope:+.2f} | {error:.2f} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--minutes", type=float, default=None, help="in the place of --hours")
    parser.add_argument(
        "--warm-up", type=float, default=None, help="minutes that do not count; a tenth, at most 10"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument(
        "--faults", default=None, help=f"comma separated, of: {', '.join(all_faults())}"
    )
    parser.add_argument(
        "--samples", type=Path, default=None, help="write all samples there, as JSON"
    )
    options = parser.parse_args()
    seconds = 3600 * options.hours if options.minutes is None else 60 * options.minutes
    warm_up = min(600.0, seconds / 10) if options.warm_up is None else 60 * options.warm_up
    named = options.faults.split(",") if options.faults else None
    lasting = (
        "worker killed",
        "worker frozen",
        "supervisor frozen",
        "leader frozen",
        "follower frozen",
    )
    faults = {
        name: fault
        for name, fault in all_faults().items()
        if (
            name in named
            if named
            else name in lasting or name.endswith(("cut off", "follower frozen", "quorum lost"))
        )
    }
    began = time.monotonic()

    def log(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", file=sys.stderr, flush=True)

    home = Path(tempfile.mkdtemp(prefix="storm-dagster-soak-"))
    log(f"seed {options.seed}; {seconds / 60:.0f} minutes in {home}; faults: {', '.join(faults)}")
    workload = WordCount(ROOT / "examples" / "wordcount.py", limit=4000)
    with LocalCluster(
        home / "home", supervisors=3, slots=4, nimbuses=2, zookeepers=3, timeout=600
    ) as cluster:
        with ProxiedNimbus(cluster):
            sampler = Sampler(cluster)
            sampler.start()
            try:
                report = ChaosRun(cluster, workload, seed=options.seed, log=log, faults=faults).run(
                    seconds=seconds
                )
            finally:
                sampler.close()
    if options.samples is not None:
        options.samples.write_text(json.dumps(sampler.samples), encoding="utf-8")
    show(list(slopes([(at, sample) for at, sample in sampler.samples if at >= warm_up])))
    print(
        f"\nseed {report.seed}: {sampler.samples[-1][0] / 60:.0f} minutes, the first {warm_up / 60:.1f} not counted; "
        f"{report.rounds} rounds, {report.exact} exact word counts, {sum(report.injected.values())} faults, "
        f"{sum(report.answers.values())} commands, {len(report.violations)} violations"
    )
    for violation in report.violations:
        print(f"VIOLATION {violation}")
    if not report.violations:
        shutil.rmtree(home, ignore_errors=True)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
