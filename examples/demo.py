"""The program behind ``make demo``: a whole cluster, a word count, a killed worker, and exact
counts.

Starts a local cluster in a fresh HOME, submits ``wordcount.py`` on four workers, kills one of them
with ``kill -9`` on the way, and compares what was counted with an independent count. Ends
everything afterwards, unless KEEP=1. Exits non-zero when anything is not as it must be.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import wordcount  # noqa: E402

NAME = "wordcount"
WORKERS = 4
FILES, LIMIT, RATE = 60, 30_000, 3_000


class DemoFailure(Exception):
    """Something is not as it must be."""


class Demo:
    """A cluster and what the sections need of it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.endpoints: dict[str, Any] = {}
        self.background: Future[Any] | None = None
        self._started = time.monotonic()

    def say(self, text: str = "") -> None:
        print(f"[{time.monotonic() - self._started:6.1f} s] {text}" if text else "", flush=True)

    def cli(self, verb: str, *args: str) -> Any:
        """The JSON document of a ``storm-dagster`` verb; its progress goes to the terminal."""
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "storm_dagster",
                verb,
                "--json",
                "--home",
                str(self.home),
                *args,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            try:
                error = json.loads(done.stdout)["error"]
                said = f"{error['type']}: {error['message']}"
            except (ValueError, KeyError, TypeError):
                said = done.stdout[-1000:]
            raise DemoFailure(
                f"storm-dagster {verb} {' '.join(args)} failed with exit code {done.returncode}: {said}"
            )
        return json.loads(done.stdout)

    def show(self, name: str) -> dict[str, Any]:
        """``show NAME --json``, asked over HTTP."""
        from storm_dagster.client import NimbusClient
        from storm_dagster.host.endpoints import cluster_conf

        with NimbusClient.of_cluster(cluster_conf(self.home), self.home) as nimbus:
            return nimbus.get(f"/v1/topologies/{name}")


def check(condition: object, otherwise: str) -> None:
    """Raise :class:`DemoFailure` saying ``otherwise`` unless the condition holds."""
    if not condition:
        raise DemoFailure(otherwise)


def start(demo: Demo) -> None:
    """ZooKeeper, Spark, nimbus, two supervisors of four slots each, Dagster."""
    demo.say(f"starting a cluster in {demo.home}")
    demo.endpoints = demo.cli(
        "dev", "--detach", "--ports", "auto", "--supervisors", "2", "--slots", "4"
    )
    demo.say(f"it is ready; Dagster UI {demo.endpoints['dagster']['url']}")


# -- word count ------------------------------------------------------------------------------------


def submit_wordcount(demo: Demo) -> None:
    """Submit through Dagster: describe, pack, upload, six assets, all tasks running."""
    lines = list(wordcount.read_lines(FILES, LIMIT))
    size = sum(len(line.encode("utf-8")) for _, line in lines)
    demo.say(
        f"the input: {len(lines)} lines, {size / 1e6:.2f} MB, of the source text of Python's own standard library"
    )
    demo.say(f"submitting {NAME} on {WORKERS} workers")
    done = demo.cli(
        "submit", str(HERE / "wordcount.py"), "--name", NAME,
        "--conf", f"topology.workers={WORKERS}", "--conf", "topology.message.timeout.secs=5",
        "--conf", f"wordcount.files={FILES}", "--conf", f"wordcount.limit={LIMIT}",
        "--conf", f"wordcount.lines.per.second={RATE}",
    )  # fmt: skip
    check(done["status"] == "ACTIVE", f"{NAME} is {done['status']} instead of ACTIVE")
    demo.say(f"{done['id']}: all tasks run after {done['seconds']:.1f} s (run {done['run_id']})")


def progress(demo: Demo) -> tuple[int, int]:
    """(lines counted and acked, lines in all), from what the spout has saved."""
    from storm_dagster.testing.task_state import read_task_states

    done = total = 0
    for state in read_task_states(demo.home, NAME, "lines").values():
        done, total = done + state.get("done", 0), total + state.get("total", 0)
    return done, total


def kill_one_worker(demo: Demo, document: dict[str, Any]) -> dict[str, Any]:
    """``kill -9`` a worker that counts; returns what ``show`` said of it."""
    counting = {task["id"] for task in document["tasks"] if task["component"] == "count"}
    victim = next(
        worker
        for worker in document["workers"]
        if counting & set(worker["tasks"]) and worker["pid"]
    )
    os.kill(victim["pid"], signal.SIGKILL)
    demo.say(
        f"kill -9 {victim['pid']}: the worker on {victim['host']}:{victim['port']}, tasks {victim['tasks']}"
    )
    return victim


def is_of_the_kill(error: dict[str, Any], victim: dict[str, Any] | None) -> bool:
    """Whether a reported error only says that the worker which the demo killed was killed."""
    return (
        victim is not None
        and (error["host"], error["port"]) == (victim["host"], victim["port"])
        and "signal 9" in error["error"]
    )


def wait_for_stats(demo: Demo, total: int) -> dict[str, Any]:
    """``show``, once the statistics (collected every few seconds) have heard of every line."""
    deadline = time.monotonic() + 8
    while True:
        document = demo.show(NAME)
        spouts = [task for task in document["tasks"] if task["component"] == "lines"]
        acked = sum((task.get("stats") or {}).get("acked") or 0 for task in spouts)
        if acked >= total or time.monotonic() > deadline:
            return document
        time.sleep(0.3)


def run_wordcount(demo: Demo, timeout: float = 240.0) -> None:
    """Watch it count; kill a worker at a third; wait until every line is acked."""
    deadline = time.monotonic() + timeout
    executed: dict[int, int] = {}
    victim: dict[str, Any] | None = None
    back: float | None = None
    killed_at = said_at = 0.0
    while True:
        document = demo.show(NAME)
        tasks = {task["id"]: task for task in document["tasks"]}
        for worker in document["workers"]:
            done_here = sum(
                (tasks[task].get("stats") or {}).get("executed") or 0 for task in worker["tasks"]
            )
            emitted = sum(
                (tasks[task].get("stats") or {}).get("emitted") or 0 for task in worker["tasks"]
            )
            if worker["pid"] and done_here + emitted:
                executed[worker["pid"]] = max(
                    executed.get(worker["pid"], 0), int(done_here or emitted)
                )
        done, total = progress(demo)
        if victim is None and total and done * 3 >= total:
            victim, killed_at = kill_one_worker(demo, document), time.monotonic()
        elif victim is not None and back is None:
            pids = [worker["pid"] for worker in document["workers"]]
            if victim["pid"] not in pids and all(
                task["status"] == "running" for task in tasks.values()
            ):
                back = time.monotonic() - killed_at
                demo.say(f"its tasks run again after {back:.1f} s")
        if time.monotonic() - said_at > 2:
            said_at = time.monotonic()
            demo.say(f"{done} of {total} lines are counted and acked")
        if total and done == total and (back is not None or victim is None):
            break
        check(
            time.monotonic() < deadline,
            f"{done} of {total} lines were counted within {timeout:g} s",
        )
        time.sleep(0.2)
    check(
        victim is not None,
        "all lines were counted before a worker could be killed: raise wordcount.limit",
    )
    check(
        len(executed) >= WORKERS,
        f"only {len(executed)} worker processes executed tuples: {executed}",
    )
    demo.say(
        f"all {total} lines are acked; {len(executed)} worker processes took part (pid: tuples): {executed}"
    )
    document = wait_for_stats(demo, total)
    errors = [error for error in document["errors"] if not is_of_the_kill(error, victim)]
    failed = sum((task.get("stats") or {}).get("failed") or 0 for task in document["tasks"])
    demo.say(
        f"{failed} tuples failed and were replayed; {len(errors)} errors besides the kill itself"
    )
    for error in errors:
        demo.say(
            f"  {error['component']}[{error['task']}]: {error['error'].strip().splitlines()[-1]}"
        )
    check(not errors, "tasks reported errors")


def compare_counts(demo: Demo) -> None:
    """Compare what the bolts saved with an independent count of the same lines."""
    from storm_dagster.testing.task_state import read_task_states

    counted: Counter[str] = Counter()
    for state in read_task_states(demo.home, NAME, "count").values():
        for word, times in state.items():
            check(word not in counted, f"{word!r} was counted by two tasks")
            counted[word] = times
    expected: Counter[str] = Counter()
    for _, line in wordcount.read_lines(FILES, LIMIT):
        expected.update(wordcount.words_of(line))
    wrong = {
        word: (counted[word], expected[word])
        for word in counted | expected
        if counted[word] != expected[word]
    }
    check(
        not wrong,
        f"{len(wrong)} words were counted wrongly (counted, expected): {dict(list(wrong.items())[:5])}",
    )
    demo.say(
        f"{sum(counted.values())} words, {len(counted)} different ones: equal to the independent count"
    )
    for word, times in counted.most_common(10):
        print(f"    {word:<16}{times:>8}")


def show_placement(demo: Demo) -> None:
    """Task on host:port."""
    document = demo.show(NAME)
    print("    task  component           slot")
    for task in document["tasks"]:
        print(
            f"    {task['id']:>4}  {task['component']:<18}  {task['host']}:{task['port']} ({task['node']})"
        )


# -- the pipeline on Spark -------------------------------------------------------------------------


def submit_spark_pipeline(demo: Demo) -> None:
    """Submit the Spark example while the words are counted; :func:`check_spark_pipeline` waits for
    it.
    """
    import spark_pipeline

    files = spark_pipeline.source_files()
    size = sum(path.stat().st_size for path in files)
    demo.say(
        f"submitting the pipeline on Spark over {len(files)} files, {size / 1e6:.1f} MB, beside it"
    )

    def submit() -> None:
        for name, target in (("keywords", "pipeline"), ("ages", "ages")):
            code = f"{HERE / 'spark_pipeline.py'}:{target}"
            demo.cli("submit", code, "--name", name, "--", str(demo.home / name))

    demo.background = ThreadPoolExecutor(1).submit(submit)


def check_spark_pipeline(demo: Demo, timeout: float = 180.0) -> None:
    """Wait until every line of the files is acked, and check the Parquet that was written."""
    import pyarrow.parquet as parquet
    import spark_pipeline

    out = demo.home / "keywords"
    files = spark_pipeline.source_files()
    lines = sum(_spark_lines(path) for path in files)
    expected: Counter[str] = Counter()
    for path in files:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            expected.update(spark_pipeline.keywords_of(line))
    if demo.background is not None:
        demo.background.result(timeout)
    deadline = time.monotonic() + timeout
    said_at = time.monotonic()
    while True:
        document = demo.show("keywords")
        acked = sum(
            int(t["stats"]["acked"]) for t in document["tasks"] if t["component"] == "lines"
        )
        if acked >= lines:
            break
        if time.monotonic() - said_at > 3:
            said_at = time.monotonic()
            demo.say(
                f"{acked} of {lines} lines went through Spark, were counted, written and acked"
            )
        check(
            time.monotonic() < deadline, f"{acked} of {lines} lines were acked within {timeout:g} s"
        )
        time.sleep(0.3)
    for worker in document["workers"]:
        check(not _has_java(worker["pid"]), f"a Spark of its own runs in worker {worker['pid']}")
    failed = sum(int(task["stats"]["failed"]) for task in document["tasks"])
    check(
        not document["errors"] and not failed,
        f"{failed} tuples failed, errors: {document['errors'][:2]}",
    )
    written: Counter[str] = Counter()
    parts = sorted(out.glob("*.parquet"))
    for part in parts:
        for row in parquet.read_table(part).to_pylist():
            written[row["keyword"]] += row["times"]
    check(
        written == expected,
        f"the Parquet says {written.most_common(3)}, it must be {expected.most_common(3)}",
    )
    demo.say(
        f"{len(parts)} Parquet files by micro-batches on the cluster's Spark: equal to the independent count"
    )
    for word, times in written.most_common(5):
        print(f"    {word:<16}{times:>8}")
    fused = demo.cli("explain", "keywords")["fused"]
    check(fused == {"indents": "lines", "indent_totals": "lines"}, f"fused are {fused}")
    indented = Counter[int]()
    for part in (demo.home / "keywords.indents").glob("*.parquet"):
        for row in parquet.read_table(part).to_pylist():
            indented[row["spaces"]] += row["count"]
    check(indented.total() == lines, f"the fused bolts counted {indented.total()} of {lines} lines")
    demo.say(
        f"{' and '.join(fused)} ran in the query of lines: all {lines} lines counted by their indent"
    )
    check_query(demo, lines, deadline)


def check_query(demo: Demo, lines: int, deadline: float) -> None:
    """Wait until the query over event-time windows has counted every line."""
    import pyarrow.parquet as parquet

    hours: dict[str, int] = {}
    while sum(hours.values()) != lines:
        check(
            time.monotonic() < deadline,
            f"the query's windows have {sum(hours.values())} of {lines} lines",
        )
        time.sleep(0.3)
        done = {path.parent for path in (demo.home / "ages").glob("batch=*/_SUCCESS")}
        for batch in sorted(done, key=lambda path: int(path.name.partition("=")[2])):
            for part in batch.glob("*.parquet"):
                hours |= {
                    str(row["hour"]): row["lines"]
                    for row in parquet.ParquetFile(part).read().to_pylist()
                }
    demo.say(f"a query of Spark's own counted the same lines in {len(hours)} windows of an hour")


def _spark_lines(path: Path) -> int:
    """Lines of a file as Spark's text source splits it: at line feeds, a last empty one not
    counted.
    """
    raw = path.read_bytes().replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return raw.count(b"\n") + (not raw.endswith(b"\n") and bool(raw))


def _has_java(pid: int) -> bool:
    """Whether the process has a Java process below it."""
    import psutil

    try:
        return any("java" in child.name() for child in psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return False


# -- the whole -------------------------------------------------------------------------------------

SECTIONS: list[tuple[str, Callable[[Demo], None]]] = [
    ("cluster", start),
    ("submit", submit_wordcount),
    ("submit beside it", submit_spark_pipeline),
    ("run", run_wordcount),
    ("counts", compare_counts),
    ("placement", show_placement),
    ("spark", check_spark_pipeline),
]
"""Steps of the demo, in order; each raises :class:`DemoFailure`."""


def main() -> int:
    """Run all sections; 0 when everything was as it must be."""
    given = os.environ.get("DEMO_HOME")
    home = Path(given) if given else Path(tempfile.mkdtemp(prefix="storm-dagster-demo-"))
    keep = os.environ.get("KEEP") == "1"
    demo = Demo(home)
    code = 0
    try:
        for _, section in SECTIONS:
            section(demo)
        dagster = demo.endpoints["dagster"]["url"]
        demo.say(f"Dagster UI: {dagster}    nimbus: {demo.endpoints['nimbuses'][0]['http']}")
        demo.say("everything was as it must be")
    except DemoFailure as error:
        demo.say(f"FAILED: {error}")
        code = 1
    except KeyboardInterrupt:
        demo.say("interrupted")
        code = 130
    if keep:
        demo.say(
            f"the cluster stays up: storm-dagster status --home {home}; storm-dagster stop --home {home}"
        )
        return code
    try:
        ended = demo.cli("stop")
        demo.say(f"{ended['ended']} processes ended")
    except DemoFailure as error:
        demo.say(f"FAILED: {error}")
        code = code or 1
    if code == 0 and not given:
        shutil.rmtree(home, ignore_errors=True)
    elif code:
        demo.say(f"logs are in {home / 'logs'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
