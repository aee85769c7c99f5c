"""SparkSpout and SparkBolt against a real Spark Connect server: every row once acked, replays, a
lost session.
"""

from __future__ import annotations

import sys
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from storm_dagster.api import SparkBolt, SparkSpout, Tuple
from storm_dagster.api.spark.session import drop_worker_session, spark_target, worker_session
from storm_dagster.model.errors import InvalidTopology, Unavailable
from storm_dagster.model.topology import TopologySpec
from storm_dagster.testing.waiting import eventually
from storm_rigs.worker.spark_component import start, take

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

EXAMPLES = Path(__file__).parents[2] / "examples"


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


def spec_of(example: Any, lines: Path, out: Path) -> TopologySpec:
    return example.pipeline(str(out), pattern=str(lines)).build()


def java_children() -> set[int]:
    """Pids of the Java processes below this one."""
    return {
        child.pid for child in psutil.Process().children(recursive=True) if "java" in child.name()
    }


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


@pytest.mark.long
def test_a_query_whose_session_ends_continues_in_a_new_one(
    example: Any, lines: Path, tmp_path: Path, conf: dict[str, Any]
) -> None:
    spec = spec_of(example, lines, tmp_path / "out")
    spout = start(SparkSpout, "lines", spec.spouts["lines"].object.args, spec, conf)
    first = take(spout, 200)
    ended = spout._session
    ended.client.release_session()
    # Its batch was not acked: the next query begins with it.
    again = take(spout, 200)
    assert Counter(values[0] for _, values in again) == Counter(values[0] for _, values in first)
    assert spout._session is not ended
    assert any("Spark is out of reach" in str(error) for error in spout._collector.errors), (
        spout._collector.errors
    )
    spout.close()


def test_micro_batches_are_dataframes_and_are_acked_after_the_function(
    example: Any, lines: Path, tmp_path: Path, conf: dict[str, Any], spark_server: Any
) -> None:
    import pyarrow.parquet as parquet

    out = tmp_path / "out"
    spec = spec_of(example, lines, out)
    bolt = start(
        SparkBolt, "totals", {**spec.bolts["totals"].object.args, "batch_tuples": 300}, spec, conf
    )
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


def counted(spark: Any, most: int, words: str) -> Any:
    """A source in Python: numbers in two partitions for each batch, with an option."""
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

    class Reader(DataSourceStreamReader):
        def __init__(self, options: Any) -> None:
            self.most, self.words = int(options["most"]), options["words"]

        def initialOffset(self) -> dict[str, int]:
            return {"at": 0}

        def latestOffset(self, *_: Any) -> dict[str, int]:
            return {"at": self.most}

        def partitions(self, start: Any, end: Any) -> list[InputPartition]:
            middle = (start["at"] + end["at"]) // 2
            return [InputPartition([start["at"], middle]), InputPartition([middle, end["at"]])]

        def read(self, partition: InputPartition) -> Iterator[tuple[int, str]]:
            for number in range(*partition.value):
                yield number, f"{self.words}{number}"

    class Counted(DataSource):
        @classmethod
        def name(cls) -> str:
            return "counted"

        def schema(self) -> str:
            return "n long, word string"

        def streamReader(self, schema: Any) -> DataSourceStreamReader:
            return Reader(self.options)

    spark.dataSource.register(Counted)
    return spark.readStream.format("counted").option("most", most).option("words", words).load()


def from_kafka(spark: Any, servers: str) -> Any:
    frame = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers)
    return frame.option("subscribe", "orders").load().selectExpr("CAST(value AS STRING) AS word")


def spout_of(
    source: str, source_args: dict[str, Any], outputs: list[str], folder: Path, conf: Any
) -> Any:
    from storm_dagster.api import TopologyBuilder

    builder = TopologyBuilder("source")
    args = {
        "source": f"{__name__}:{source}",
        "args": source_args,
        "checkpoint": str(folder / "checkpoint"),
    }
    builder.set_spout("lines", SparkSpout, outputs=outputs, args=args)
    return start(SparkSpout, "lines", args, builder.build(), conf)


@pytest.mark.long
def test_a_python_data_source_is_read_with_its_options(
    tmp_path: Path, conf: dict[str, Any]
) -> None:
    spout = spout_of("counted", {"most": 100, "words": "w"}, ["word", "n"], tmp_path, conf)
    # Spark starts several Python processes for such a source.
    rows = take(spout, 100, 180.0)
    assert sorted(values for _, values in rows) == sorted([f"w{n}", n] for n in range(100))
    for row_id, _ in rows:
        spout.ack(row_id)
    commits = tmp_path / "checkpoint" / "commits"
    eventually(lambda: [p for p in commits.glob("*") if p.name.isdigit()], 30, "Spark's commit")
    spout.close()
    assert not spout._collector.errors


def test_a_connector_that_spark_lacks_is_said_once_with_the_remedy(
    tmp_path: Path, conf: dict[str, Any]
) -> None:
    spout = spout_of("from_kafka", {"servers": "127.0.0.1:1"}, ["word"], tmp_path, conf)
    for _ in range(3):
        spout._retry_at = 0.0
        spout.next_tuple()
    with pytest.raises(InvalidTopology, match="Spark has no data source 'kafka'") as raised:
        raise spout._collector.errors[0]
    assert len(spout._collector.errors) == 1
    text = str(raised.value)
    assert "component 'lines', task 3" in text
    assert "spark.jars.packages: org.apache.spark:spark-sql-kafka-0-10_2.13:" in text
    spout.close()


def test_a_process_that_ends_leaves_no_session_on_the_server(conf: dict[str, Any]) -> None:
    import subprocess

    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    script = f"""
from storm_dagster.api.spark.session import worker_session
print(worker_session({conf!r}).session_id)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=120, capture_output=True
    )
    session_id = ended.stdout.decode().strip()
    again = SparkSession.builder.remote(
        f"{conf['spark.remote']}/;session_id={session_id};user_id=storm"
    ).create()
    with pytest.raises(PySparkException, match="SESSION_CLOSED"):
        again.range(1).count()
    again.client.close()


def test_a_lost_session_is_replaced(conf: dict[str, Any]) -> None:
    first = worker_session(conf)
    assert worker_session(conf) is first
    first.stop()
    drop_worker_session(conf)
    assert worker_session(conf).range(3).count() == 3


def test_where_spark_components_run_is_conf_alone() -> None:
    assert spark_target({"spark.remote": "sc://a", "topology.spark.remote": "sc://b"}) == (
        "remote",
        "sc://b",
    )
    assert spark_target({"spark.remote": "sc://a"}) == ("remote", "sc://a")
    assert spark_target({"spark.master": "spark://m:7077"}) == ("master", "spark://m:7077")
    with pytest.raises(InvalidTopology, match=r"topology\.spark\.remote"):
        spark_target({})


def test_a_spark_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 does not answer"):
        worker_session({"spark.remote": "sc://127.0.0.1:1"})


def wrong_columns(frame: Any) -> Any:
    return frame.withColumnRenamed("word", "letter")


def no_frame(frame: Any) -> Any:
    return 7


def swapped(frame: Any) -> Any:
    return frame.select("n", "word", (frame.n + 1).alias("more"))


def bolt_of(function: str, conf: Mapping[str, Any], **args: Any) -> Any:
    """A SparkBolt between a stream of (word, n) and outputs word and n."""
    from storm_dagster.api import TopologyBuilder

    builder = TopologyBuilder("bad")
    builder.set_spout("lines", "spark_pipeline:Lines", outputs=["word", "n"])
    builder.set_bolt(
        "totals",
        SparkBolt,
        inputs="lines",
        args={"function": f"{__name__}:{function}"},
        outputs=["word", "n"],
    )
    args = {"function": f"{__name__}:{function}", "batch_tuples": 2, **args}
    return start(SparkBolt, "totals", args, builder.build(), conf)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("wrong_columns", "add \\['word'\\] to the DataFrame"),
        ("no_frame", "return a DataFrame, or None"),
    ],
)
def test_a_wrong_schema_is_said_once_with_component_task_and_remedy(
    example: Any, conf: dict[str, Any], function: str, says: str
) -> None:
    bolt = bolt_of(function, conf)
    tuples = [Tuple(n, "lines", "default", 3, ["if", n]) for n in range(6)]
    for tup in tuples:
        bolt.process(tup)
    assert bolt._collector.failed == tuples, "they are replayed by their spout"
    assert not bolt._collector.acked and not bolt._collector.emitted
    assert bolt._collector.metrics["failed_batches"] == 3
    with pytest.raises(InvalidTopology, match=says):
        raise bolt._collector.errors[0]
    assert "component 'totals', task 2" in str(bolt._collector.errors[0])
    assert len(bolt._collector.errors) == 1, "the same mistake is reported once"


def test_rows_are_emitted_by_name_whatever_the_order_of_columns(
    example: Any, conf: dict[str, Any]
) -> None:
    bolt = bolt_of("swapped", conf, schema="word string, n int")
    for n in range(2):
        bolt.process(Tuple(n, "lines", "default", 3, ["if", n]))
    assert sorted(values for _, values in bolt._collector.emitted) == [["if", 0], ["if", 1]]
    assert bolt._collector.metrics["batches"] == 1


def test_a_batch_is_cut_by_bytes_too(example: Any, conf: dict[str, Any]) -> None:
    bolt = bolt_of("swapped", conf, batch_tuples=1000, batch_bytes=100)
    for n in range(4):
        bolt.process(Tuple(n, "lines", "default", 3, ["x" * 20, n]))
    assert len(bolt._collector.acked) == 4
    bolt.process(Tuple(5, "lines", "default", 3, ["x" * 20, 5]))
    assert len(bolt._collector.acked) == 4


@pytest.mark.long
def test_classic_spark_in_the_worker_with_an_injected_conf(tmp_path: Path) -> None:
    import subprocess

    with zipfile.ZipFile(tmp_path / "stormjar.jar", "w") as archive:
        archive.writestr("users_code.py", "def double(x):\n    return 2 * x\n")
    script = """
import sys
from pathlib import Path
from storm_dagster.api.spark.session import drop_worker_session, worker_session
conf = {"spark.master": "local[1]", "topology.spark.conf": {"spark.sql.shuffle.partitions": 3}}
for code in ("first-1-1", ""):
    session = worker_session(conf, Path(sys.argv[1]), code)
    found = session.sparkContext.parallelize([3]).map(lambda x: __import__("users_code").double(x)).collect()
    assert found == [6], "code of the topology's archive, also of one that was added before"
assert session.sparkContext.master == "local[1]", session
assert session.conf.get("spark.sql.shuffle.partitions") == "3"
assert worker_session(conf) is session
drop_worker_session(conf, object())
assert worker_session(conf) is session, "somebody else's lost session changes nothing"
drop_worker_session(conf, session)
"""
    program = [sys.executable, "-c", script, str(tmp_path / "stormjar.jar")]
    subprocess.run(program, check=True, timeout=120, capture_output=True)
