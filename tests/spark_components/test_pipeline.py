"""SparkSpout and SparkBolt against a real Spark Connect server: every row once acked, replays, a lost session."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from storm_dagster.api import SparkBolt, SparkSpout, Tuple
from storm_dagster.api.context import TopologyContext
from storm_dagster.api.spark_session import drop_worker_session, spark_target, worker_session
from storm_dagster.model.errors import InvalidTopology, Unavailable
from storm_dagster.model.topology import TopologySpec
from storm_dagster.testing.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

EXAMPLES = Path(__file__).parents[2] / "examples"
TASKS = {1: "keywords", 2: "totals", 3: "lines"}


class Recorder:
    """Keeps what a component sends out."""

    def __init__(self) -> None:
        self.emitted: list[tuple[Any, list[Any]]] = []
        self.acked: list[Tuple] = []
        self.failed: list[Tuple] = []
        self.errors: list[BaseException] = []

    def emit(
        self,
        tup: Any,
        stream: str | None,
        anchors: Any,
        direct_task: int | None,
        need_task_ids: bool,
        tup_id: Any,
    ) -> None:
        self.emitted.append((tup_id, list(tup)))

    def ack(self, tup: Tuple) -> None:
        self.acked.append(tup)

    def fail(self, tup: Tuple) -> None:
        self.failed.append(tup)

    def error(self, error: BaseException, tup: Any = None) -> None:
        self.errors.append(error)

    def metric(self, name: str, value: Any) -> None:
        return None


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    sys.path.insert(0, str(EXAMPLES))
    import spark_pipeline

    yield spark_pipeline
    sys.path.remove(str(EXAMPLES))


@pytest.fixture
def conf(spark_remote: str) -> Iterator[dict[str, Any]]:
    conf = {"spark.remote": spark_remote}
    yield conf
    drop_worker_session(conf)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(4):
        text = "".join(f"if x{number} is not None and line == {n}:\n" for n in range(50))
        (folder / f"file{number}.py").write_text(text)
    return folder


def start(
    cls: type, component: str, args: Mapping[str, Any], spec: TopologySpec, conf: Mapping[str, Any]
) -> Any:
    """A component as a worker starts it, with a recorder for a collector."""
    made = cls(**args)
    made._collector = Recorder()
    task = next(number for number, name in TASKS.items() if name == component)
    made.context = TopologyContext(
        topology_id="keywords-1-1", spec=spec, tasks=TASKS, task_id=task, component=component, conf=conf
    )
    made.conf = conf
    made.initialize(conf, made.context)
    return made


def spec_of(example: Any, lines: Path, out: Path) -> TopologySpec:
    return example.pipeline(str(out), pattern=str(lines)).build()


def take(spout: Any, rows: int) -> list[tuple[Any, list[Any]]]:
    """The next rows that the spout emits."""
    emitted = spout._collector.emitted

    def enough() -> bool:
        while len(emitted) < rows:
            before = len(emitted)
            spout.next_tuple()
            if len(emitted) == before:
                return False
        return True

    eventually(enough, 60, f"{rows} rows of Spark", interval=0.02)
    found = emitted[:rows]
    del emitted[:rows]
    return found


def java_children() -> set[int]:
    """Pids of the Java processes below this one."""
    return {child.pid for child in psutil.Process().children(recursive=True) if "java" in child.name()}


def test_rows_come_once_and_the_checkpoint_waits_for_their_acks(
    example: Any, lines: Path, tmp_path: Path, conf: dict[str, Any]
) -> None:
    spec = spec_of(example, lines, tmp_path / "out")
    args = spec.spouts["lines"].object.args
    spout = start(SparkSpout, "lines", args, spec, conf)
    rows = take(spout, 200)
    assert len({row_id for row_id, _ in rows}) == 200
    for row_id, _ in rows[:-1]:
        spout.ack(row_id)
    commits = Path(args["checkpoint"]) / "commits"
    assert not [path for path in commits.glob("*") if path.name.isdigit()], (
        "Spark must not commit before the last ack"
    )
    # The worker dies: the batch, one row of which was never acked, comes again in whole.
    spout.close()
    again = start(SparkSpout, "lines", args, spec, conf)
    repeated = take(again, 200)
    assert Counter(values[0] for _, values in repeated) == Counter(values[0] for _, values in rows)
    again.fail(repeated[0][0])
    assert take(again, 1) == [repeated[0]]
    for row_id, _ in repeated:
        again.ack(row_id)
    eventually(lambda: [p for p in commits.glob("*") if p.name.isdigit()], 30, "Spark's commit")
    again.close()
    assert not again._collector.errors


def test_micro_batches_are_dataframes_and_are_acked_after_the_function(
    example: Any, lines: Path, tmp_path: Path, conf: dict[str, Any], spark_server: Any
) -> None:
    import pyarrow.parquet as parquet

    out = tmp_path / "out"
    spec = spec_of(example, lines, out)
    bolt = start(SparkBolt, "totals", {**spec.bolts["totals"].object.args, "batch_tuples": 300}, spec, conf)
    tuples = [Tuple(n, "keywords", "default", 1, ["if" if n % 3 else "is", 2]) for n in range(300)]
    jobs, java = spark_server.jobs(), java_children()
    for tup in tuples:
        bolt.process(tup)
    assert bolt._collector.acked == tuples and not bolt._collector.failed
    written: Counter[str] = Counter()
    for path in out.glob("*.parquet"):
        for row in parquet.read_table(path).to_pylist():
            written[row["keyword"]] += row["times"]
    assert written == {"if": 400, "is": 200}
    assert spark_server.jobs() > jobs, "the jobs must run on the shared server"
    assert java_children() == java, "no Spark of its own may run below a worker"


def test_a_batch_whose_function_raises_fails_as_a_whole(
    example: Any, lines: Path, tmp_path: Path, conf: dict[str, Any]
) -> None:
    spec = spec_of(example, lines, tmp_path / "out")
    args = {
        "function": "spark_pipeline:write_totals",
        "args": {"out": "/dev/null/nowhere"},
        "batch_tuples": 5,
    }
    bolt = start(SparkBolt, "totals", {**args, "schema": "keyword string, times long"}, spec, conf)
    tuples = [Tuple(n, "keywords", "default", 1, ["if", 1]) for n in range(5)]
    for tup in tuples:
        bolt.process(tup)
    assert bolt._collector.failed == tuples and not bolt._collector.acked
    assert len(bolt._collector.errors) == 1


def test_a_lost_session_is_replaced(conf: dict[str, Any]) -> None:
    first = worker_session(conf)
    assert worker_session(conf) is first
    first.stop()
    drop_worker_session(conf)
    assert worker_session(conf).range(3).count() == 3


def test_where_spark_components_run_is_conf_alone() -> None:
    assert spark_target({"spark.remote": "sc://a", "topology.spark.remote": "sc://b"}) == ("remote", "sc://b")
    assert spark_target({"spark.remote": "sc://a"}) == ("remote", "sc://a")
    assert spark_target({"spark.master": "spark://m:7077"}) == ("master", "spark://m:7077")
    with pytest.raises(InvalidTopology, match=r"topology\.spark\.remote"):
        spark_target({})


def test_a_spark_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 does not answer"):
        worker_session({"spark.remote": "sc://127.0.0.1:1"})
