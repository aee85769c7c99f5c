"""SparkQuery against a real Spark Connect server: sinks, statistics, one owner, what stops and
starts it, bad input.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.api import SparkQuery, SparkSpout, TopologyBuilder
from storm_dagster.api.spark.errors import query_error
from storm_dagster.api.spark.progress import metrics_of
from storm_dagster.api.spark.session import drop_worker_session, worker_session
from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.core.snapshot.windows import ALL_TIME, task_windows
from storm_dagster.model.errors import Conflict, InvalidTopology, StormDagsterError, Unavailable
from storm_dagster.model.names import AWAITED_METRIC, code_key, conf_key
from storm_dagster.operations.live.cleaner import clean
from storm_dagster.security.spark_remote import query_session_id
from storm_dagster.testing import TopologyHarness
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.servers.spark_server import SparkServer
from storm_rigs.stage.records import World
from storm_rigs.worker.spark_component import start

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

CODE = '''
"""Functions of queries; the Spark server has this module only from the topology's archive."""
import os
from pathlib import Path


def lines(spark, folder, batch=1):
    return spark.readStream.format("text").option("maxFilesPerTrigger", batch).load(folder)


def windows(spark, folder):
    from pyspark.sql import functions as f
    parts = f.split("value", ",")
    events = lines(spark, folder).select(
        f.to_timestamp(parts[0]).alias("at"), parts[1].alias("word"))
    counts = events.withWatermark("at", "10 seconds").groupBy(f.window("at", "10 seconds"), "word").count()
    return counts.select(f.col("window.start").alias("start"), "word", "count")


def by_word(spark, folder):
    return lines(spark, folder).groupBy("value").count()


def by_length(spark, folder):
    from pyspark.sql import functions as f
    return lines(spark, folder).groupBy(f.length("value").alias("size")).agg(f.max("value").alias("most"))


def by_word_of_two(spark, folder):
    return lines(spark, folder).union(lines(spark, folder + "2")).groupBy("value").count()


def at_rest(spark, folder):
    return spark.read.text(folder)


def mistaken(spark, folder):
    return {}["customer"]


def store(frame, batch_id, folder):
    if os.path.exists(folder + "/broken"):
        raise RuntimeError("the shelf is full")
    Path(folder, str(batch_id)).write_text("\\n".join(sorted(row[0] for row in frame.collect())))


number = 7
'''

EXAMPLES = Path(__file__).parents[2] / "examples"
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The unpacked archive of a topology, beside the packed one."""
    folder = tmp_path_factory.mktemp("query") / "query-1-1"
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "query_code.py").write_text(CODE)
    shutil.copy(EXAMPLES / "spark_pipeline.py", folder / "code")
    with zipfile.ZipFile(folder / "stormjar.jar", "w") as packed:
        for path in (folder / "code").glob("*.py"):
            packed.write(path, path.name)
    sys.path.insert(0, str(folder / "code"))
    yield folder / "code"
    sys.path.remove(str(folder / "code"))


@pytest.fixture(scope="module")
def conf(spark_server: Any) -> dict[str, Any]:
    return {
        "spark.remote": spark_server.remote,
        "topology.spark.conf": {"spark.sql.shuffle.partitions": 1},
    }


@pytest.fixture
def make(archive: Path, conf: dict[str, Any], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes a started query over the files of ``in``; closed after the test."""
    made: list[Any] = []
    (tmp_path / "in").mkdir()

    def make(
        query: str, *, name: str = "query", version: int = 0, outputs: Any = None, **args: Any
    ) -> Any:
        builder = TopologyBuilder(name)
        args = {
            "query": f"query_code:{query}",
            "args": {"folder": str(tmp_path / "in")},
            "checkpoint": str(tmp_path / "checkpoint"),
            "trigger": "100 milliseconds",
            **args,
        }
        builder.set_spout("lines", SparkQuery, args=args, outputs=outputs)
        made.append(
            start(
                SparkQuery,
                "lines",
                args,
                builder.build(),
                conf,
                topology_id=f"{name}-1-1",
                archive=archive,
                version=version,
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def write(folder: Path, *lines: str) -> None:
    """Add a file for the source, at once."""
    path = folder / f".{next(NUMBERS)}"
    path.write_text("\n".join(lines) + "\n")
    path.rename(folder / f"{path.name[1:]}.txt")


def run_until(query: Any, done: Callable[[], bool], what: str, timeout: float = 120.0) -> None:
    """Poll the component, as its thread does, without pauses."""

    def polled() -> bool:
        query._retry_at = 0.0
        query.next_tuple()
        return done()

    eventually(polled, timeout, what, interval=0.1)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Rows of the files that the sink's log names: of a batch that is repeated, once."""
    import pyarrow.parquet as parquet

    written = "".join(each.read_text() for each in (folder / "_spark_metadata").glob("[0-9]*"))
    files = [path for path in folder.glob("*.parquet") if path.name in written]
    return [row for path in files for row in parquet.read_table(path).to_pylist()]


def test_windows_of_event_time_go_to_files_once_across_stop_and_start(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    out, source = tmp_path / "out", tmp_path / "in"
    query = make("windows", path=str(out))
    write(source, "2026-11-23 10:00:01,a", "2026-11-23 10:00:02,b", "2026-11-23 10:00:03,a")
    run_until(query, lambda: sum(query._collector.written) == 3, "the first rows")
    query.deactivate()
    assert query._query is None
    write(source, "2026-11-23 10:00:04,a", "2026-11-23 10:01:00,a")
    run_until(
        query,
        lambda: sum(query._collector.written) == 5,
        "the rows that came while it was inactive",
    )
    # The first row is late: its window is over, and Spark counts a late row until it has written
    # the window.
    run_until(query, lambda: len(rows(out)) == 2, "the first windows")
    write(source, "2026-11-23 10:00:05,a", "2026-11-23 10:02:00,a")
    run_until(query, lambda: len(rows(out)) == 3, "the windows")
    assert Counter({(row["start"].minute, row["word"]): row["count"] for row in rows(out)}) == {
        (0, "a"): 3,
        (0, "b"): 1,
        (1, "a"): 1,
    }
    metrics = query._collector.metrics
    assert metrics["state_rows"] >= 1 and metrics["state_bytes"] > 0
    assert metrics["watermark_secs"] > 1.7e9 and metrics["watermark_lag_secs"] != 0
    assert metrics["batches"] >= 3 and metrics["batch_ms"] > 0
    assert not query._collector.errors


def test_a_function_gets_batch_and_id_and_its_errors_are_reported(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "broken").touch()
    query = make("lines", each_batch="query_code:store", batch_args={"folder": str(out)})
    errors = query._collector.errors
    write(tmp_path / "in", "one", "two")
    run_until(query, lambda: bool(errors), "the error")
    assert isinstance(errors[0], Unavailable)
    assert "component 'lines', task 3: query_code:lines: a batch failed" in str(errors[0])
    assert "RuntimeError: the shelf is full" in str(errors[0])
    (out / "broken").unlink()

    def stored(batch_id: str) -> str:
        """The content of the batch's file, which exists before it is written."""
        path = out / batch_id
        return path.read_text() if path.exists() else ""

    run_until(query, lambda: stored("0") == "one\ntwo", "the batch")
    write(tmp_path / "in", "three")
    run_until(query, lambda: stored("1") == "three", "the next batch")


@pytest.mark.long
def test_a_python_process_of_sparks_that_starts_slowly_is_no_error(
    make: Callable[..., Any], tmp_path: Path, spark_server: SparkServer
) -> None:
    (tmp_path / "out").mkdir()
    first, slow = tmp_path / "first", spark_server.python_path / "sitecustomize.py"
    first.touch()
    # Spark gives it ten seconds; the second one comes in time.
    slow.write_text(
        "import pathlib, sys, time\n"
        "if 'foreach_batch_worker' in ' '.join(sys.orig_argv):\n"
        f"    try: pathlib.Path({str(first)!r}).unlink()\n"
        "    except FileNotFoundError: pass\n"
        "    else: time.sleep(12)\n"
    )
    try:
        query = make(
            "lines", each_batch="query_code:store", batch_args={"folder": str(tmp_path / "out")}
        )
        session = worker_session(query._conf, query._archive, query._code)
        write(tmp_path / "in", "one")
        run_until(query, lambda: (tmp_path / "out" / "0").exists(), "the batch")
    finally:
        slow.unlink()
    assert not first.exists(), "the first process must have been slow to show anything"
    assert not query._collector.errors
    assert query._session is session, "a session with slow processes is not lost"


def test_a_session_that_another_component_closed_is_replaced(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    query = make("lines", path=str(tmp_path / "out"))
    run_until(query, lambda: query._query is not None, "the query")
    drop_worker_session(query._conf, query._session, query._code)
    write(tmp_path / "in", "one")
    # The batch may end before the query is found again.
    run_until(query, lambda: query._collector.written == [1], "the row")
    assert all(isinstance(error, Unavailable) for error in query._collector.errors), (
        query._collector.errors
    )
    assert not query._session.client.is_closed


def test_the_example_counts_lines_by_hour_of_file_change(
    make: Callable[..., Any], tmp_path: Path, conf: dict[str, Any], archive: Path
) -> None:
    import pyarrow.parquet as parquet
    import spark_pipeline

    out = tmp_path / "ages"
    for name, hour, text in (("a", 10, "1\n2\n3\n"), ("b", 10, "4\n"), ("c", 12, "5\n6\n")):
        (tmp_path / "in" / name).write_text(text)
        os.utime(tmp_path / "in" / name, (hour * 3600, hour * 3600))
    spec = spark_pipeline.ages(str(out), pattern=str(tmp_path / "in")).build()
    args = spec.spouts["hours"].object.args
    query = start(SparkQuery, "hours", args, spec, conf, topology_id="ages-1-1", archive=archive)
    run_until(query, lambda: sum(query._collector.written) == 6, "the lines")
    query.close()
    found = [
        row
        for path in out.glob("batch=*/*.parquet")
        for row in parquet.ParquetFile(path).read().to_pylist()
    ]
    assert sorted((row["hour"].hour, row["lines"]) for row in found) == [(10, 4), (12, 2)]


def test_a_table_of_spark_takes_the_rows(
    make: Callable[..., Any], tmp_path: Path, conf: dict[str, Any]
) -> None:
    query = make("lines", table="query_rows")
    write(tmp_path / "in", "one", "two")
    run_until(query, lambda: query._collector.written == [2], "the rows")
    assert sorted(
        row[0] for row in worker_session(conf, code=query._code).table("query_rows").collect()
    ) == [
        "one",
        "two",
    ]


def test_rows_are_counted_and_timed_as_the_statistics_show_them(
    archive: Path, conf: dict[str, Any], tmp_path: Path
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    builder = TopologyBuilder("counted")
    args = {
        "query": "query_code:lines",
        "args": {"folder": str(source)},
        "checkpoint": str(tmp_path / "checkpoint"),
    }
    builder.set_spout(
        "files", SparkQuery, args={**args, "path": str(out), "trigger": "100 milliseconds"}
    )
    builder.set_spout(
        "tuples", SparkQuery, args={**args, "checkpoint": f"{out}.2"}, outputs=["value"]
    )
    write(source, "one", "two", "three")
    with TopologyHarness(builder.build(), conf=conf, archive=archive) as harness:
        rows: list[Any] = []

        def both() -> bool:
            rows[:] = harness.run(timeout=60).values("tuples")
            reports = {report.component: report for report in harness.engine.stats().values()}
            return len(rows) == 3 and reports["files"].stats["acked"] == 3

        eventually(both, 120, "the rows of both")
        assert sorted(rows) == [["one"], ["three"], ["two"]]
        (report,) = [one for one in harness.engine.stats().values() if one.component == "files"]
        entry = {
            "windows": report.windows,
            "streams": report.streams,
            "latencies": report.latencies,
        }
        stats = task_windows(entry, "spout")[ALL_TIME]
        assert (stats.totals().emitted, stats.totals().acked) == (3, 3)
        assert stats.percentiles()["complete"]["p99_ms"] > 0 and stats.totals().complete_ms > 0
        assert report.metrics["batch_rows"] == 3
        assert not harness.errors


def test_of_two_owners_the_older_one_loses_and_names_the_other(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    first = make("lines", path=str(tmp_path / "out"), version=1)
    write(tmp_path / "in", "one")
    run_until(first, lambda: first._collector.written == [1], "the first row")
    second = make("lines", path=str(tmp_path / "out"), version=2)
    run_until(second, lambda: second._query is not None, "the second owner")
    assert second._query.runId == first._query.runId, "the query goes on"
    write(tmp_path / "in", "two")
    run_until(second, lambda: second._collector.written == [1], "the second row")
    first._check_at = first._retry_at = 0.0
    first.next_tuple()
    (error,) = first._collector.errors
    assert isinstance(error, Conflict)
    assert "now belongs to task 3 at 127.0.0.1:6702, so task 3 at 127.0.0.1:6701 leaves it" in str(
        error
    )
    # An older assignment does not take it back, whatever happens.
    for _ in range(2):
        first._retry_at = 0.0
        first.next_tuple()
        assert first._query is None
        assert first._retry_at > time.monotonic() + 30
    first.close()
    assert second._query.isActive, "the loser leaves the query that it no longer owns alone"
    assert sorted(row["value"] for row in rows(tmp_path / "out")) == ["one", "two"]


def test_of_two_runs_spark_stops_the_older_whose_owner_names_the_other(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    first = make("lines", path=str(tmp_path / "out"), version=1)
    write(tmp_path / "in", "one")
    run_until(first, lambda: first._collector.written == [1], "the first row")
    # As the next release of the topology: its code has a session of its own.
    second = make("lines", path=str(tmp_path / "out"), version=2)
    second._code = "another-release"
    run_until(second, lambda: second._query is not None, "the second run")
    assert second._query.runId != first._query.runId
    run_until(first, lambda: bool(first._collector.errors), "the loser's error")
    assert "now belongs to task 3 at 127.0.0.1:6702" in str(first._collector.errors[0])
    write(tmp_path / "in", "two")
    run_until(second, lambda: second._collector.written == [1], "the second row")
    second.close()
    drop_worker_session(second._conf, code="another-release")
    assert sorted(row["value"] for row in rows(tmp_path / "out")) == ["one", "two"]


OWNER = """
import json, sys, time
given = json.loads(sys.argv[1])
sys.path[:0] = given["path"]
from pathlib import Path
from storm_dagster.api import SparkQuery, TopologyBuilder
from storm_rigs.worker.spark_component import start
from storm_rigs.servers.spark_server import SparkServer
builder = TopologyBuilder("query")
builder.set_spout("lines", SparkQuery, args=given["args"])
query = start(SparkQuery, "lines", given["args"], builder.build(), given["conf"], topology_id="query-1-1",
              archive=Path(given["path"][0]), version=1)
while not query._collector.written:
    time.sleep(0.1)
    query.next_tuple()
    for error in query._collector.errors:
        raise error
print(query._query.runId, flush=True)
time.sleep(600)
"""


@pytest.mark.zookeeper
def test_a_query_outlives_its_owner_and_ends_with_its_topology(
    make: Callable[..., Any],
    tmp_path: Path,
    archive: Path,
    conf: dict[str, Any],
    zk_cluster: StormClusterState,
) -> None:
    args = {"args": {"folder": str(tmp_path / "in")}, "checkpoint": str(tmp_path / "checkpoint")}
    args |= {
        "query": "query_code:lines",
        "path": str(tmp_path / "out"),
        "trigger": "100 milliseconds",
    }
    write(tmp_path / "in", "one")
    given = json.dumps({"path": [str(archive), *sys.path], "args": args, "conf": conf})
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, given], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    run_id = owner.stdout.readline().strip()
    owner.kill()
    owner.wait()
    write(tmp_path / "in", "two")
    eventually(lambda: len(rows(tmp_path / "out")) == 2, 60, "a batch that nobody watches")
    query = make("lines", path=str(tmp_path / "out"), version=2)
    run_until(query, lambda: query._query is not None, "the successor")
    assert query._query.runId == run_id
    assert not query._collector.written, "what ended before is not counted again"
    write(tmp_path / "in", "three")
    run_until(query, lambda: query._collector.written == [1], "the next row")
    # What is left of a topology of that id goes, its queries with it.
    code = archive.parent.name
    world = World(zk_cluster, LocalBlobStore(tmp_path / "blobs"), conf)
    world.lead()
    world.blobs.put(code_key(code), query.context.spec.to_json())
    world.blobs.put(conf_key(code), b"{}")
    _, seen = clean(world.context(), boot_now=0.0)
    assert query._query.isActive, "it is not garbage for long enough"
    result, _ = clean(world.context(), seen, boot_now=60.0)
    assert set(result.blobs) == {code_key(code), conf_key(code)}
    with pytest.raises(Exception, match="SESSION_CLOSED"):
        query._query.isActive  # noqa: B018
    # A server refuses the id of a closed session for ever: the next one is used.
    drop_worker_session(conf, code=code)
    renewed: Any = worker_session(conf, code=code)
    assert renewed.session_id == query_session_id(code, 1)
    assert not query._collector.errors


@pytest.mark.parametrize("unknown", ["after-an-error", "stop-fails", "predecessor"])
def test_an_inactive_topology_has_no_running_query(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unknown: str
) -> None:
    def fails(*_: Any) -> None:
        raise OSError("the network is down")

    query = make("lines", path=str(tmp_path / "out"), version=1)
    run_until(query, lambda: query._query is not None, "the query")
    session, running = query._session, query._query
    if unknown == "after-an-error":
        with monkeypatch.context() as patch:
            patch.setattr(query, "_report_progress", fails)
            query._retry_at = 0.0
            query.next_tuple()
        assert not query._query
    elif unknown == "stop-fails":
        monkeypatch.setattr(running, "stop", fails)
    else:
        # Its worker was killed, and the next one opens while the topology is inactive.
        query._query = None
        query = make("lines", path=str(tmp_path / "out"), version=2)
    query.deactivate()
    # What its thread calls ten times a second, also while the topology is inactive.
    query._on_clock()
    assert [one.name for one in session.streams.active if one.name == "query/lines"] == []
    query.activate()
    write(tmp_path / "in", "one")
    run_until(query, lambda: query._collector.written == [1], "the row after the pause")
    assert query._query.runId != running.runId


def test_a_checkpoint_of_another_component_is_refused_with_its_name(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    first = make("lines", path=str(tmp_path / "out"))
    write(tmp_path / "in", "one")
    run_until(first, lambda: first._collector.written == [1], "the row")
    other = make("lines", path=str(tmp_path / "out2"), name="other")
    other.next_tuple()
    (error,) = other._collector.errors
    assert isinstance(error, InvalidTopology)
    assert (
        "belongs to component 'lines' of topology 'query' (task 3 at 127.0.0.1:6700), not to"
        in str(error)
    )
    assert f"remove {tmp_path}/checkpoint/owner" in str(error)
    assert first._query.isActive, "nothing is half started"
    assert not (tmp_path / "out2").exists()


@pytest.mark.parametrize(
    "other", ["by_length", pytest.param("by_word_of_two", marks=pytest.mark.long)]
)
def test_a_change_against_the_checkpoint_is_an_error_with_remedy(
    make: Callable[..., Any], tmp_path: Path, other: str
) -> None:
    (tmp_path / "in2").mkdir()
    first = make("by_word", format="noop", output_mode="update")
    write(tmp_path / "in", "one")
    run_until(first, lambda: first._collector.written == [1], "the row")
    first.close()
    changed = make(other, format="noop", output_mode="update")
    write(tmp_path / "in", "two")
    run_until(changed, lambda: bool(changed._collector.errors), "the error")
    assert isinstance(changed._collector.errors[0], InvalidTopology)
    assert "cannot continue from checkpoint" in str(changed._collector.errors[0])
    assert "name a new checkpoint" in str(changed._collector.errors[0])
    again = make("by_word", format="noop", output_mode="update")
    run_until(again, lambda: again._collector.metrics.get("state_rows") == 2, "the state as it was")


@pytest.mark.parametrize(
    ("query", "sink", "says"),
    [
        ("at_rest", {"path": "/dev/null/x"}, "must return a streaming DataFrame"),
        ("number", {"path": "/dev/null/x"}, "is a int, not a function"),
        ("lines", {"path": "/dev/null/x"}, "Spark refuses the query or its sink"),
        ("by_word", {"format": "noop"}, "Spark refuses the query or its sink"),
        ("lines", {"format": "no.such"}, "Spark has no data source 'no.such'"),
    ],
    ids=["no-stream", "no-function", "no-folder", "no-append", "no-sink"],
)
def test_what_cannot_run_is_refused(
    make: Callable[..., Any], tmp_path: Path, query: str, sink: dict[str, str], says: str
) -> None:
    write(tmp_path / "in", "one")
    with pytest.raises(StormDagsterError, match=says) as raised:
        wrong = make(query, **sink)
        run_until(wrong, lambda: bool(wrong._collector.errors), "the error")
        raise wrong._collector.errors[0]
    assert "lines" in str(raised.value)
    assert not (tmp_path / "checkpoint" / "commits").exists()


def test_a_mistake_in_the_query_is_an_error_with_file_and_line(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    query = make("mistaken", path=str(tmp_path / "out"))
    run_until(query, lambda: bool(query._collector.errors), "the error")
    (error,) = query._collector.errors
    assert str(error).endswith("raises KeyError: 'customer': correct it; it is retried")
    report = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    assert 'query_code.py", line ' in report
    assert not query._collector.metrics.get(AWAITED_METRIC), "it is no outage"


def test_a_spark_that_does_not_answer_is_unavailable_and_tried_again(
    make: Callable[..., Any], tmp_path: Path, conf: dict[str, Any]
) -> None:
    query = make("lines", path=str(tmp_path / "out"))
    query._conf = {"spark.remote": "sc://127.0.0.1:1"}
    query.next_tuple()
    (error,) = query._collector.errors
    assert isinstance(error, Unavailable)
    assert "127.0.0.1:1 does not answer" in str(error)
    query._conf = conf
    write(tmp_path / "in", "one")
    run_until(query, lambda: query._collector.written == [1], "the row")


@pytest.mark.parametrize(
    ("args", "more", "says"),
    [
        ({"table": "t", "path": "/p"}, {}, "spout 'q': m:f has the sinks table and path: name one"),
        (
            {},
            {},
            "spout 'q' has neither a sink nor outputs: give table, path, each_batch or format",
        ),
        ({"path": "/p"}, {"outputs": ["a"]}, "spout 'q' has a sink and outputs: remove one"),
        ({"path": "/p"}, {"par": 2}, "spout 'q' has a sink and par=2: one task owns a query"),
        (
            {"path": "/p", "output_mode": "all"},
            {},
            "has output_mode 'all': give one of append, complete, update",
        ),
        ({"path": "/p", "checkpoint": ""}, {}, "spout 'q' has no checkpoint: give a folder or URL"),
        ({"path": "/p", "query": "os:nothing"}, {}, "spout 'q': cannot find 'os:nothing'"),
        (
            {"path": "/p", "query": "nothing"},
            {},
            "spout 'q': 'nothing' is not of the form 'module:function'",
        ),
        ({"each_batch": "os:sep"}, {}, "spout 'q': 'os:sep' is a str, not a function"),
        ({"path": "/p", "flows": 2}, {}, "spout 'q': .* unexpected keyword argument 'flows'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_cannot_be_right_are_refused_when_the_topology_is_built(
    args: dict[str, Any], more: dict[str, Any], says: str
) -> None:
    builder = TopologyBuilder("wrong")
    builder.set_spout("q", SparkQuery, args={"query": "m:f", "checkpoint": "/c", **args}, **more)
    with pytest.raises(InvalidTopology, match=says):
        builder.build()


def test_two_components_with_one_checkpoint_are_refused_when_the_topology_is_built() -> None:
    builder = TopologyBuilder("wrong")
    builder.set_spout("q", SparkQuery, args={"query": "m:f", "checkpoint": "/c", "path": "/p"})
    builder.set_spout("s", SparkSpout, args={"source": "m:f", "checkpoint": "/c"}, outputs=["a"])
    with pytest.raises(
        InvalidTopology, match="spouts 'q' and 's' have one checkpoint, /c: give each its own"
    ):
        builder.build()


def test_the_lag_is_reported_by_the_source_or_computed_from_offsets() -> None:
    report: dict[str, Any] = {"batchId": 4, "durationMs": {"triggerExecution": 20}}
    kafka = {
        "numInputRows": 2,
        "inputRowsPerSecond": 1.5,
        "endOffset": {"orders": {"0": 10, "1": 4}, "returns": {"0": 8}},
        "latestOffset": {"orders": {"0": 14, "1": 6, "2": 1}, "returns": {"0": 8}},
        "metrics": {
            "avgOffsetsBehindLatest": "2.0",
            "maxOffsetsBehindLatest": "4",
            "minOffsetsBehindLatest": "0",
        },
    }
    rate = {"numInputRows": 3, "latestOffset": "12", "endOffset": "10", "metrics": {}}
    assert metrics_of({**report, "sources": [kafka, rate]}) == {
        "batch_id": 4,
        "batch_rows": 5,
        "batch_ms": 20,
        "input_rows_per_sec": 1.5,
        "processed_rows_per_sec": 0,
        "lag": 9,
    }
    event = {"eventTime": {"watermark": "2026-11-23T10:00:00.500Z"}}
    found = metrics_of({**report, "sources": [{"endOffset": {"log": 3}}], **event}, 1_795_428_010.5)
    assert (found["watermark_secs"], found["watermark_lag_secs"]) == (1_795_428_000.5, 10.0)
    assert "lag" not in found


def test_an_error_of_a_batch_is_the_line_that_says_what_happened() -> None:
    text = (
        '[STREAM_FAILED] Query x\nTraceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\n\
ValueError: no such shelf\n\nJVM stacktrace:\norg.apache.Some: thing'
    )
    error = query_error(Exception(text), "component 'q', task 1: m:f", "/c", "4.1")
    assert str(error) == (
        "component 'q', task 1: m:f: a batch failed (Exception: ValueError: no such shelf): "
        "it is repeated from the checkpoint until it succeeds"
    )
    assert "another run of the query uses checkpoint /c" in str(
        query_error(Exception("[CONCURRENT_STREAM_LOG_UPDATE] Batch 3"), "q", "/c", "4.1")
    )
    assert query_error(Conflict("as it is"), "q", "/c", "4.1").message == "as it is"
