"""Chains of Spark components in one query: the same rows and the same statistics as one component
after the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.api import Grouping, SparkBolt, SparkSpout, TopologyBuilder, Tuple
from storm_dagster.api.spark.fused import FusedBolt, make_chain, make_loader
from storm_dagster.api.spark.session import worker_session
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.fusion import CHAIN_KEY, FUSED_ROWS, fuse, fused_components
from storm_dagster.model.topology import TopologySpec
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.builder import Stage
from storm_rigs.worker.spark_component import start

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

CODE = '''
# The Spark server has this module only from the topology's archive.
from pathlib import Path

from storm_dagster.api import Bolt


class Tell(Bolt):
    """Passes on what it reads, with where that came from."""

    outputs = ["origin", "word", "times"]

    def process(self, tup):
        self.emit([tup.component, *tup.values])


def lines(spark, folder):
    return spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(folder)


def split(frame):
    from pyspark.sql import functions as f
    return frame.select(f.explode(f.split("line", " ")).alias("word"))


def lengths(frame):
    from pyspark.sql import functions as f
    return frame.select(f.concat(f.lit("#"), f.length("line")).alias("text"))


def count(frame):
    from pyspark.sql import functions as f
    return frame.groupBy("word").agg(f.count("*").alias("times"))


def drawn(frame):
    from pyspark.sql import functions as f
    return frame.withColumn("x", f.rand())


def same(frame):
    return frame


def nothing(frame):
    """Asks for no row."""


def strange(frame):
    return "rows"


def lost(frame):
    return drawn(frame).select("x")


def store(frame, folder, context):
    if Path(folder, "broken").exists():
        raise RuntimeError("the shelf is full")
    assert context.batch_id and context.component == "sink"
    frame.coalesce(1).write.mode("append").parquet(folder + "/rows")


def replace(frame, folder, context):
    frame.coalesce(1).write.mode("overwrite").parquet(f"{folder}/rows/batch={context.batch_id}")
'''
FILES, LINES = 4, 40
TEXT = "the quick brown fox and the lazy dog"


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The unpacked archive of a topology, beside the packed one."""
    folder = tmp_path_factory.mktemp("chain") / "chain-1-1"
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "chain_code.py").write_text(CODE)
    with zipfile.ZipFile(folder / "stormjar.jar", "w") as packed:
        packed.write(folder / "code" / "chain_code.py", "chain_code.py")
    sys.path.insert(0, str(folder / "code"))
    yield folder / "code"
    sys.path.remove(str(folder / "code"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(FILES):
        (folder / f"{number}.txt").write_text(f"{TEXT}\n" * LINES)
    return folder


def bolt(function: str, schema: str | None = None, **args: Any) -> dict[str, Any]:
    return {"function": f"chain_code:{function}", "schema": schema, "batch_secs": 0.1, "args": args}


def chain(
    source: Path, out: Path, sink: str = "store", conf: dict[str, Any] | None = None
) -> TopologySpec:
    """Lines go to two bolts, whose rows meet in a sink; words are counted too, and a Python bolt
    reads the counts.
    """
    builder = TopologyBuilder("chain", config=conf or {})
    spout = {
        "source": "chain_code:lines",
        "args": {"folder": str(source)},
        "columns": ["value"],
        "checkpoint": str(out / "checkpoint"),
        "trigger": "100 milliseconds",
    }
    builder.set_spout("lines", SparkSpout, args=spout, outputs=["line"], par=2)
    builder.set_bolt(
        "split", SparkBolt, inputs="lines", args=bolt("split"), outputs=["word"], par=2
    )
    builder.set_bolt(
        "lengths", SparkBolt, inputs="lines", args=bolt("lengths", "line string"), outputs=["text"]
    )
    both = {"split": Grouping.fields("word"), "lengths": Grouping.GLOBAL}
    builder.set_bolt("sink", SparkBolt, inputs=both, args=bolt(sink, "row string", folder=str(out)))
    builder.set_bolt(
        "count", SparkBolt, inputs="split", args=bolt("count"), outputs=["word", "times"]
    )
    builder.set_bolt("tell", "chain_code:Tell", inputs="count", outputs=["origin", "word", "times"])
    return builder.build()


def parquet_rows(folder: Path) -> Counter[str]:
    import pyarrow.parquet as parquet

    found: Counter[str] = Counter()
    # Not with pathlib, which does not bear that Spark removes a folder meanwhile.
    paths = [
        Path(where, name)
        for where, _, names in os.walk(folder)
        for name in names
        if name.endswith(".parquet")
    ]
    for path in paths:
        # A file that Spark is writing counts the next time.
        with contextlib.suppress(OSError, ValueError):
            found.update(row["row"] for row in parquet.ParquetFile(path).read().to_pylist())
    return found


@pytest.mark.parametrize("fused", [True, False])
def test_rows_and_statistics_are_those_of_one_component_after_the_other(
    source: Path, tmp_path: Path, archive: Path, spark_remote: str, fused: bool
) -> None:
    spec = chain(source, tmp_path, conf={"topology.spark.fuse": fused})
    conf = {"spark.remote": spark_remote, "topology.message.timeout.secs": 120}
    lines, words = FILES * LINES, FILES * LINES * len(TEXT.split())
    with TopologyHarness(spec, conf=conf, archive=archive) as harness:
        assert (CHAIN_KEY in harness.engine.spec.spouts["lines"].conf) == fused

        def totals(name: str, component: str) -> int:
            parts = [
                each for each in harness.engine.stats().values() if each.component == component
            ]
            return int(sum(part.stats[name] for part in parts))

        told: Counter[str] = Counter()

        def done() -> bool:
            told.clear()
            for origin, word, times in harness.run(timeout=60).values("tell"):
                assert origin == "count"
                told[word] += times
            return told.total() >= words and totals("executed", "sink") >= words + lines

        eventually(done, 150, "all rows", interval=0.2)
        assert told == Counter(
            {word: number * lines for word, number in Counter(TEXT.split()).items()}
        )
        # A row counts as executed when its component has it, and is written when it is acked.
        expected = {
            "lines": (0, lines, lines),
            "split": (lines, lines, words),
            "lengths": (lines, lines, lines),
            "sink": (words + lines, words + lines, 0),
            "count": (words, words, totals("executed", "tell")),
        }

        def counted() -> dict[str, tuple[int, ...]]:
            harness.run(timeout=60)
            return {
                one: tuple(totals(what, one) for what in ("executed", "acked", "emitted"))
                for one in expected
            }

        with contextlib.suppress(AssertionError):
            eventually(lambda: counted() == expected, 60, "all counts")
        assert counted() == expected
        assert totals("emitted", "tell") == totals("executed", "tell")
        assert parquet_rows(tmp_path / "rows") == told + Counter({f"#{len(TEXT)}": lines})
        parts = [each for each in harness.engine.stats().values() if each.component == "sink"]
        by_input = sum((Counter(part.streams["executed"]) for part in parts), Counter())
        assert by_input == {"split:default": words, "lengths:default": lines}
        assert parts[0].stats["execute_ms"] > 0
        assert not harness.errors


@pytest.mark.zookeeper
@pytest.mark.long
def test_a_killed_owner_repeats_its_batch_under_the_same_id(
    source: Path,
    tmp_path: Path,
    archive: Path,
    spark_remote: str,
    stage: Stage,
) -> None:
    bolts = {"split": "1-2", "lengths": "3", "sink": "4", "count": "5", "tell": "6"}
    rig = stage.workers(
        chain(source, tmp_path, sink="replace"),
        {**bolts, "__acker": "7", "__topology_master": "8", "lines": "9-10"},
        code={"chain_code.py": CODE},
        conf={"spark.remote": spark_remote, "topology.message.timeout.secs": 60},
    )
    shutil.copy(archive.parent / "stormjar.jar", rig.code_dir)

    def committed() -> int:
        return len(
            [
                path
                for path in (tmp_path / "checkpoint" / "commits").glob("*")
                if path.name.isdigit()
            ]
        )

    one, two = ("s1", free_port()), ("s2", free_port())
    try:
        # The owner of the query is in the first worker; rows go to bolts in both.
        rig.assign({one: "1,3,7-9", two: "2,4-6,10"})
        owner = rig.start(*one)
        rig.start(*two)
        eventually(lambda: committed() >= 1, 120, "the first batch")
        owner.kill()
        owner.wait(patience(30))
        before = committed()
        rig.start(*one)
        eventually(lambda: committed() == FILES, 150, "all batches")
        assert rig.running() and before < FILES, "it must be killed before the end to show anything"
    finally:
        rig.stop()
    lines = FILES * LINES
    words = Counter({word: number * lines for word, number in Counter(TEXT.split()).items()})
    assert parquet_rows(tmp_path / "rows") == words + Counter({f"#{len(TEXT)}": lines})


@pytest.mark.long
def test_a_function_that_raises_repeats_its_batch_and_is_named(
    source: Path, tmp_path: Path, archive: Path, spark_remote: str
) -> None:
    (tmp_path / "broken").touch()
    spec = chain(source, tmp_path)
    with TopologyHarness(spec, conf={"spark.remote": spark_remote}, archive=archive) as harness:
        eventually(lambda: harness.run(timeout=10) and bool(harness.errors), 100, "the error")
        component, error = harness.errors[0]
        assert component == "lines" and isinstance(error, Unavailable)
        assert "component 'sink': chain_code:store: RuntimeError: the shelf is full" in str(error)
        (tmp_path / "broken").unlink()

        def stored() -> bool:
            harness.run(timeout=10)
            return (tmp_path / "rows").exists() and parquet_rows(
                tmp_path / "rows"
            ).total() >= FILES * LINES * 9

        eventually(stored, 100, "the batches")


def test_each_result_is_computed_once_and_all_are_counted(archive: Path, spark_remote: str) -> None:
    """The function that runs beside Spark, on a batch of a test."""
    session = worker_session({"spark.remote": spark_remote})
    parts: list[dict[str, Any]] = [
        {
            "name": name,
            "sources": sources,
            "function": f"chain_code:{function}",
            "args": {},
            "schema": schema,
        }
        | {"outputs": outputs, "stream": stream, "counted": True}
        for name, sources, function, schema, outputs, stream in [
            ("drawn", ["lines"], "drawn", None, ["n", "x"], ""),
            ("left", ["drawn"], "same", "n long, y double", ["n", "y"], "rows of left"),
            ("right", ["drawn"], "same", None, ["n", "x"], "rows of right"),
            ("both", ["left", "right"], "same", "a int, b string", ["a", "b"], ""),
            ("none", ["both"], "nothing", None, [], ""),
            ("after", ["none"], "same", None, ["n"], ""),
        ]
    ]
    chain = {"root": "lines", "fields": ["n"], "columns": ["id"], "emits": False, "parts": parts}
    tables = dict(make_chain(chain, b"", "counts of ")(session.range(10), 7))
    left, right = (tables[f"rows of {side}"].to_pylist() for side in ("left", "right"))
    assert len(left) == 10 and {row["n"]: row["y"] for row in left} == {
        row["n"]: row["x"] for row in right
    }
    counts = {
        name: json.loads(table["counts"][0].as_py())
        for name, table in tables.items()
        if name[:6] == "counts"
    }
    assert counts["counts of "]["rows"] == 10
    found = {part["name"]: counts[f"counts of {part['name']}"] for part in parts}
    assert {name: one["executed"] for name, one in found.items()} == {
        "drawn": {"lines:default": 10},
        "left": {"drawn:default": 10},
        "right": {"drawn:default": 10},
        "both": {"left:default": 10, "right:default": 10},
        "none": {"both:default": 20},
        "after": {},
    }
    assert [found[name]["emitted"] for name in ("drawn", "left", "both", "none")] == [10, 0, 20, 0]
    # Not counted: rows that bolts hand to each other. What leaves Spark, and what nobody reads, is
    # known anyway.
    some = {**chain, "parts": [{**part, "counted": part["name"] == "none"} for part in parts]}
    tables = dict(make_chain(some, b"", "counts of ")(session.range(10), 7))
    found = {
        part["name"]: json.loads(tables[f"counts of {part['name']}"]["counts"][0].as_py())
        for part in parts
    }
    assert {name: one["executed"] for name, one in found.items()} == {
        "drawn": {"lines:default": 10},
        "left": {},
        "right": {},
        "both": {"left:default": 10, "right:default": 10},
        "none": {},
        "after": {},
    }
    assert tables["rows of left"].num_rows == 10 and found["both"]["emitted"] == 0
    # What a function may not return.
    for function, message in {
        "strange": "it returns str, the bolt declares",
        "lost": "it returns \\['x'\\], the bolt",
    }.items():
        wrong = {**chain, "parts": [{**parts[0], "function": f"chain_code:{function}"}]}
        with pytest.raises(
            RuntimeError, match=f"component 'drawn': chain_code:{function}: ValueError: {message}"
        ):
            make_chain(wrong, b"", "counts of ")(session.range(10), 7)
    many = {**chain, "parts": [{**parts[0], "schema": "a long, b long"}]}
    with pytest.raises(RuntimeError, match=r"it takes 2 columns \(a, b\), its rows have \['n'\]"):
        make_chain(many, b"", "counts of ")(session.range(10), 7)


def test_streams_without_a_schema_meet_by_the_names_of_their_columns(
    archive: Path, spark_remote: str
) -> None:
    session = worker_session({"spark.remote": spark_remote})
    parts = [
        {
            "name": name,
            "sources": sources,
            "function": "chain_code:same",
            "args": {},
            "schema": None,
        }
        | {"outputs": outputs, "stream": stream, "counted": True}
        for name, sources, outputs, stream in [
            ("left", ["lines"], ["a", "b"], ""),
            ("right", ["lines"], ["b", "a"], ""),
            ("both", ["left", "right"], ["a", "b"], "rows"),
        ]
    ]
    chain = {
        "root": "lines",
        "fields": ["a", "b"],
        "columns": ["id", "other"],
        "emits": False,
        "parts": parts,
    }
    frame = session.range(2).selectExpr("id", "id + 10 AS other")
    rows = dict(make_chain(chain, b"", "counts of ")(frame, 7))["rows"].to_pylist()
    assert sorted((row["a"], row["b"]) for row in rows) == [(0, 10), (0, 10), (1, 11), (1, 11)]


def test_the_archive_of_a_batch_goes_with_the_folders_of_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/elsewhere")
    monkeypatch.setattr(sys, "path", [*sys.path])
    with zipfile.ZipFile(tmp_path / "made.zip", "w") as packed:
        packed.writestr("batch_code_in_archive.py", "def here(): return __file__")
    load = make_loader((tmp_path / "made.zip").read_bytes())
    assert Path(load("batch_code_in_archive:here")()).parents[1] == tmp_path
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "gone"))
    monkeypatch.delitem(sys.modules, "batch_code_in_archive")
    other = make_loader((tmp_path / "made.zip").read_bytes())
    assert Path(other("batch_code_in_archive:here")()).is_relative_to(tempfile.gettempdir())
    monkeypatch.delitem(sys.modules, "batch_code_in_archive")


def test_tuples_between_fusing_and_other_workers_are_replayed(
    tmp_path: Path,
) -> None:
    spec = chain(tmp_path, tmp_path)
    apart = start(SparkBolt, "totals", spec.bolts["count"].object.args, spec, {})
    tup = Tuple(1, "lines", FUSED_ROWS + "count", 1, ["a", 1])
    apart.process(tup)
    assert apart._collector.failed == [tup] and not apart._waiting
    assert "runs the chain the other way (topology.spark.fuse)" in str(apart._collector.errors[0])
    fused = start(FusedBolt, "totals", {}, fuse(spec, {}), {})
    with pytest.raises(
        Unavailable, match=r"component 'totals' cannot take a tuple: .* \(topology.spark.fuse\)"
    ):
        fused.process(Tuple(2, "split", "default", 1, ["a"]))
    fused.process(tup)
    assert [values for _, values in fused._collector.emitted] == [["a", 1]]


def test_what_is_fused(tmp_path: Path) -> None:
    spec = chain(tmp_path, tmp_path)
    assert fused_components(spec, {}) == dict.fromkeys(
        ["split", "lengths", "sink", "count"], "lines"
    )
    assert fuse(spec, {"topology.spark.fuse": False}) is spec
    counted = {
        name: {
            part["name"]: part["counted"] for part in made.spouts["lines"].conf[CHAIN_KEY]["parts"]
        }
        for name, conf in {"as it is": {}, "not": {"topology.spark.fuse.counts": False}}.items()
        for made in [fuse(spec, conf)]
    }
    bolts = ["split", "lengths", "sink", "count"]
    assert counted == {"as it is": dict.fromkeys(bolts, True), "not": dict.fromkeys(bolts, False)}
    # A bolt of which one input is not of the chain, or gets a tuple several times, is not; nor is
    # what reads it.
    for name, change in {
        "all": {"split": Grouping.ALL},
        "python": {"split": Grouping.SHUFFLE, "tell": Grouping.SHUFFLE},
    }.items():
        builder = TopologyBuilder(name)
        args = {"source": "chain_code:lines", "checkpoint": "/c"}
        builder.set_spout("lines", SparkSpout, args=args, outputs=["line"])
        builder.set_bolt("split", SparkBolt, inputs="lines", args=bolt("split"), outputs=["word"])
        builder.set_bolt("tell", "chain_code:Tell", inputs="lines", outputs=["word"])
        builder.set_bolt(
            "count", SparkBolt, inputs=change, args=bolt("count"), outputs=["word", "times"], par=2
        )
        builder.set_bolt("last", SparkBolt, inputs="count", args=bolt("count"))
        found = builder.build()
        assert fused_components(found, {}) == {"split": "lines"}, name
        # What is left reads the tasks of the fused bolt as before.
        fused = fuse(found, {})
        assert (
            fused.bolts["count"] == found.bolts["count"]
            and fused.bolts["tell"] == found.bolts["tell"]
        )
        assert (
            fused.bolts["split"].parallelism == 1
            and fused.bolts["split"].outputs == found.bolts["split"].outputs
        )
    builder = TopologyBuilder("kept")
    builder.set_spout(
        "lines",
        SparkSpout,
        args={"source": "chain_code:lines", "checkpoint": "/c"},
        outputs=["line"],
    )
    config = {"topology.spark.fuse": False}
    builder.set_bolt(
        "split", SparkBolt, inputs="lines", args=bolt("split"), outputs=["word"], config=config
    )
    assert fused_components(builder.build(), {}) == {}
