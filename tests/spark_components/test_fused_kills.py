"""Ten random kills of workers and of the Spark server under a fused chain: every row once, by the
id of its batch.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from storm_dagster.api import SparkBolt, SparkSpout, TopologyBuilder
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.servers.ports import free_port
from storm_rigs.servers.spark_server import SparkServer
from storm_rigs.stage.builder import Stage

pytestmark = [pytest.mark.spark, pytest.mark.zookeeper, pytest.mark.long, pytest.mark.timeout(1200)]

CODE = """
def lines(spark, folder):
    return spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(folder)


def split(frame):
    from pyspark.sql import functions as f
    return frame.select(f.explode(f.split("value", " ")).alias("word"))


def count(frame):
    return frame.groupBy("word").count()


def replace(frame, folder, context):
    frame.coalesce(1).write.mode("overwrite").parquet(f"{folder}/batch={context.batch_id}")
"""
KILLS, FILES, LINES = 10, 14, 300


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_word_is_counted_once(seed: int, tmp_path: Path, stage: Stage) -> None:
    import pyarrow.parquet as parquet

    rng = random.Random(seed)
    out, source, ready = tmp_path / "out", tmp_path / "in", tmp_path / "ready"
    source.mkdir()
    ready.mkdir()
    expected: Counter[str] = Counter()
    for number in range(FILES):
        words = [rng.choice("abcdefgh") * rng.randint(1, 3) for _ in range(LINES * 5)]
        expected.update(words)
        text = "\n".join(" ".join(words[at : at + 5]) for at in range(0, len(words), 5))
        (ready / f"{number:03}.txt").write_text(text + "\n")
    builder = TopologyBuilder("kills")
    spout = {
        "source": "kill_code:lines",
        "args": {"folder": str(source)},
        "checkpoint": str(tmp_path / "checkpoint"),
    }
    builder.set_spout(
        "lines", SparkSpout, args={**spout, "trigger": "100 milliseconds"}, outputs=["value"], par=2
    )
    builder.set_bolt(
        "split", SparkBolt, inputs="lines", args={"function": "kill_code:split"}, outputs=["word"]
    )
    args = {"function": "kill_code:count"}
    builder.set_bolt("count", SparkBolt, inputs="split", args=args, outputs=["word", "count"])
    args = {"function": "kill_code:replace", "args": {"folder": str(out)}}
    builder.set_bolt("sink", SparkBolt, inputs="count", args=args)
    bolts = {"split": "1", "count": "2", "sink": "3"}
    tasks = {**bolts, "__acker": "4", "__topology_master": "5", "lines": "6-7"}
    server = SparkServer(free_port(), tmp_path / "spark")
    conf = {"spark.remote": server.remote, "topology.message.timeout.secs": 20}
    rig = stage.workers(builder, tasks, code={"kill_code.py": CODE}, conf=conf)
    with zipfile.ZipFile(rig.code_dir / "stormjar.jar", "w") as packed:
        packed.write(rig.code_dir / "code" / "kill_code.py", "kill_code.py")

    def committed() -> int:
        return len(
            [
                path
                for path in (tmp_path / "checkpoint" / "commits").glob("*")
                if path.name.isdigit()
            ]
        )

    def give(files: int) -> None:
        for path in sorted(ready.iterdir())[:files]:
            shutil.move(path, source / path.name)

    one, two = ("s1", free_port()), ("s2", free_port())
    killed: list[str] = []
    try:
        server.start()
        rig.assign({one: "1,3,5-6", two: "2,4,7"})
        workers = {one: rig.start(*one), two: rig.start(*two)}
        give(2)
        eventually(lambda: committed() >= 1, 200, "the first batch")
        for _ in range(KILLS):
            give(1)
            victim = rng.choice([one, two, "spark"])
            killed.append(str(victim))
            # Somewhere within a batch.
            time.sleep(rng.random() * 0.5)
            if isinstance(victim, str):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(server.process.pid, signal.SIGKILL)
                server.process.wait(patience(30))
                server.start()
            else:
                workers[victim].kill()
                workers[victim].wait(patience(30))
                workers[victim] = rig.start(*victim)
            # A batch for each file. One that was committed just before the kill has none after it.
            eventually(
                lambda: committed() == len(list(source.iterdir())),
                200,
                f"the batches after the kill of {victim}",
            )
        give(FILES)

        def found() -> Counter[str]:
            words: Counter[str] = Counter()
            for path in out.glob("batch=*/*.parquet"):
                with contextlib.suppress(OSError, ValueError):
                    for row in parquet.ParquetFile(path).read().to_pylist():
                        words[row["word"]] += row["count"]
            return words

        eventually(
            lambda: committed() == FILES and found().total() >= expected.total(), 200, "all batches"
        )
        assert found() == expected, killed
    finally:
        rig.stop()
        server.stop()
