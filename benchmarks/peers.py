"""``make bench ARGS="--only peers"``: the word count and the chain of ten beside Apache Storm and
bytewax, in one run.

Each engine runs alone, with its defaults and with each set of settings below; the column "best
found" has the best value of these. Storm has real daemons from Maven Central, bytewax comes from
PyPI. What cannot be fetched is named, and its columns stay empty. With ``--markdown`` the table
goes between the markers ``peers`` of a document; in one with a section "Recovery" the section is
made before that.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import peer_logs
import psutil
from peer_bytewax import Bytewax
from peer_storm import Storm
from tables import write_table

from storm_dagster import __version__
from storm_dagster.host.java import java_command, java_version
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually

PENDING = {"topology.max.spout.pending": 1_000}
FAILURES = (
    StormDagsterError,
    AssertionError,
    OSError,
    LookupError,
    subprocess.SubprocessError,
    psutil.Error,
)
_STORM_BATCHES = {
    "topology.producer.batch.size": 100,
    "topology.transfer.batch.size": 100,
    "topology.transfer.buffer.size": 10_000,
}
STORM_SETTINGS: dict[str, dict[str, Any]] = {
    "batches of 100": _STORM_BATCHES,
    "batches of 100, flushed every ms, one acker": {
        **_STORM_BATCHES, "topology.flush.tuple.freq.millis": 1, "topology.acker.executors": 1,
    },
    "batches of 1,000, parallel collector": {
        "topology.producer.batch.size": 1_000,
        "topology.transfer.batch.size": 1_000,
        "topology.transfer.buffer.size": 20_000,
        "topology.worker.childopts": "-XX:+UseParallelGC",
    },
}  # fmt: skip
BYTEWAX_SETTINGS: dict[str, dict[str, Any]] = {
    "batches of 100": {"batch": 100},
    "batches of 1,000": {"batch": 1_000},
}


class Engine(Protocol):
    """One engine that runs."""

    @property
    def name(self) -> str: ...

    def submit(self, shape: str, workers: int, conf: Mapping[str, Any]) -> None: ...

    def kill(self) -> None: ...


class Ours:
    """This package, on a local cluster."""

    name = f"storm_dagster {__version__}"

    def __init__(self, folder: Path) -> None:
        self._cluster = LocalCluster(folder / "home", supervisors=1)

    def __enter__(self) -> Ours:
        self._cluster.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.stop()

    def submit(self, shape: str, workers: int, conf: Mapping[str, Any]) -> None:
        """Submit a topology."""
        pairs = [
            part
            for key, value in conf.items()
            for part in ("--conf", f"{key}={str(value).lower()}")
        ]
        target = f"{Path(__file__).with_name('peer_planes.py')}:{shape}"
        self._cluster.cli("submit", target, "--name", "peer", *pairs, "--", str(workers))

    def kill(self) -> None:
        """Kill it, and wait until its workers are gone."""
        self._cluster.cli("kill", "peer", "-w", "0")
        eventually(lambda: not self._cluster.processes("worker"), 60, "the end of its workers")


@dataclass(frozen=True)
class Case:
    """One topology, and the rows that are measured with it."""

    rows: tuple[str, ...]
    measure: Callable[[Path, float, float], tuple[float, ...]]
    """Given the folder of logs, the time of the submission and the seconds of a measurement."""
    shape: str = "words"
    workers: int = 2
    acked: bool = True
    rate: int = 0
    settings: bool = True
    """Whether it is measured with settings other than the defaults."""
    without_acks: bool = False
    """Whether bytewax, which has no acks, is measured too."""


def _throughput(acked: bool) -> Callable[[Path, float, float], tuple[float, ...]]:
    return lambda folder, began, secs: (peer_logs.rate(folder, secs, acked=acked),)


def _quiet(folder: Path, began: float, secs: float) -> tuple[float, ...]:
    used = peer_logs.cores(folder, secs)
    return peer_logs.p99(folder), used, peer_logs.memory(folder)


def _start(folder: Path, began: float, secs: float) -> tuple[float, ...]:
    return (peer_logs.first_tuple(folder) - began,)


def _gap(folder: Path, began: float, secs: float) -> tuple[float, ...]:
    return (peer_logs.gap_after_kill(folder, 10.0),)


QUIET = ("p99 at 1,000/s, ms", "CPU at 1,000/s, cores", "memory of both workers, MiB")
LESS_IS_BETTER = (
    *QUIET,
    "submit to first tuple, s",
    "`kill -9` of a worker: longest time without an ack, s",
)
CASES = (
    Case(("acked, 2 workers, sentences/s",), _throughput(True), without_acks=True),
    Case(("acked, 1 worker",), _throughput(True), workers=1, without_acks=True),
    Case(("not acked, 2 workers",), _throughput(False), acked=False),
    Case(("chain of ten, acked",), _throughput(True), shape="chain", without_acks=True),
    Case(QUIET, _quiet, rate=500),
    Case(LESS_IS_BETTER[3:4], _start, rate=500, settings=False),
    Case(LESS_IS_BETTER[4:], _gap, settings=False),
)


def _run(engine: Engine, case: Case, settings: Mapping[str, Any], secs: float) -> tuple[float, ...]:
    """The values of a case's rows; the topology is submitted, warmed, measured and killed."""
    with tempfile.TemporaryDirectory(prefix="peer-logs-") as logs:
        conf = {
            "bench.rate": case.rate,
            "bench.acked": case.acked,
            "bench.folder": logs,
            **settings,
        }
        if case.acked:
            conf.update(PENDING)
        began = time.time()
        engine.submit(case.shape, case.workers, conf)
        try:
            if case.measure is not _start:
                peer_logs.wait_for_tasks(Path(logs), case.workers if case.shape == "words" else 1)
                time.sleep(secs / 2)
            return case.measure(Path(logs), began, secs)
        finally:
            engine.kill()


Results = dict[tuple[str, str], tuple[float, str]]
"""(row, column) -> (value, settings)."""


def _measure(
    column: str, engine: Engine, settings: Mapping[str, Mapping[str, Any]], secs: float
) -> Iterator[Any]:
    for case in CASES:
        if column == "bytewax" and not case.without_acks:
            continue
        for label, conf in {"": {}, **(settings if case.settings else {})}.items():
            try:
                values = _run(engine, case, conf, secs)
            except FAILURES as error:
                print(
                    f"{engine.name}: {case.rows[0]} ({label or 'defaults'}) not measured: {error!s:.300}",
                    flush=True,
                )
                continue
            for row, value in zip(case.rows, values, strict=True):
                print(f"{engine.name}: {row} ({label or 'defaults'}): {value:,.2f}", flush=True)
                yield row, f"{column}, {'best found' if label else 'defaults'}", value, label


def collect(secs: float, quick: bool) -> tuple[Results, list[str]]:
    """Values of all rows and columns, and the names of the engines that were there."""
    found: Results = {}
    names = []
    engines: list[
        tuple[str, Callable[[Path], AbstractContextManager[Engine]], dict[str, dict[str, Any]]]
    ] = [
        ("ours", Ours, {}),
        ("Storm", Storm, STORM_SETTINGS),
        ("bytewax", Bytewax, BYTEWAX_SETTINGS),
    ]
    for column, make, settings in engines:
        tried = dict([*settings.items()][:1]) if quick else settings
        with tempfile.TemporaryDirectory(prefix="peer-") as folder:
            try:
                with make(Path(folder) / column) as engine:
                    names.append(engine.name)
                    for row, where, value, label in _measure(column, engine, tried, secs):
                        better = min if row in LESS_IS_BETTER else max
                        known = found.get((row, where), (value, label))
                        found[(row, where)] = better(
                            known, (value, label), key=lambda pair: pair[0]
                        )
            except FAILURES as error:
                print(f"{column} is left out: {error!s:.500}", flush=True)
    return found, names


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def table(found: Results, names: list[str]) -> str:
    """The table in Markdown, with versions, machine and date, and the settings that were best."""
    columns = [
        "ours, defaults",
        *(f"{peer}, {how}" for peer in ("Storm", "bytewax") for how in ("defaults", "best found")),
    ]
    heads = [column.replace("ours, defaults", "ours") for column in columns]
    lines = [
        f"| | {' | '.join(heads)} | ours : Storm's better |",
        "|---" + "|--:" * (len(columns) + 1) + "|",
    ]
    settings: dict[str, list[str]] = {}
    for row in (row for case in CASES for row in case.rows):
        cells = []
        for column in columns:
            value, label = found.get((row, column), (None, ""))
            cells.append("" if value is None else _shown(value))
            if label:
                settings.setdefault(f"{column.partition(',')[0]} with {label}", []).append(row)
        ours = found.get((row, columns[0]))
        storm = [found[(row, column)][0] for column in columns[1:3] if (row, column) in found]
        best = (min if row in LESS_IS_BETTER else max)(storm, default=0.0)
        cells.append(f"{ours[0] / best:.2f}" if ours and best else "")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    versions = f"Python {platform.python_version()}, Java {java_version(java_command())}"
    described = f"Measured on {time.strftime('%Y-%m-%d')} with {os.cpu_count()} cores, {versions}: {', '.join(names)}."
    notes = ", ".join(f"{label} ({'; '.join(rows)})" for label, rows in settings.items())
    return "\n".join([*lines, "", f"{described} Best found: {notes or 'the defaults'}."])


SECTION = """## Beside other engines

`benchmarks/peers.py` runs the word count (ten-word sentences, `topology.max.spout.pending` 1,000) and a chain of ten
bolts here, on Apache Storm and on bytewax, one after the other on one machine. bytewax has no acks. In the rows from
"p99" on, less is better.

```console
$ make bench ARGS="--only peers --markdown docs/performance.md"
```

<!-- peers: begin -->
<!-- peers: end -->

"""


def report(*, quick: bool, markdown: Path | None) -> None:
    """Measure everything, print the table, and write it into ``markdown``."""
    found, names = collect(4.0 if quick else 20.0, quick)
    made = table(found, names)
    print(f"\n{made}", flush=True)
    if markdown:
        text = markdown.read_text(encoding="utf-8")
        if "<!-- peers: begin -->" not in text:
            markdown.write_text(
                re.sub(r"(?m)^## Recovery$", lambda match: SECTION + match[0], text, count=1),
                encoding="utf-8",
            )
        write_table(markdown, "peers", made)
