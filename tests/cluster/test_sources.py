"""Sources of a whole cluster: what is read while a topology is turned off, rebalanced and deployed
anew comes once.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.model.errors import StormDagsterError
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually
from storm_rigs.servers.kafka import KafkaRig

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.dagster,
    pytest.mark.long,
    pytest.mark.timeout(900),
]

CODE = '''
"""Numbers of a topic and of files; each that comes is written down."""
import os
from storm_dagster.api import Bolt, Topology
from storm_dagster.connectors import FileSource, KafkaSource, SourceSpout


class Records(SourceSpout):
    source = KafkaSource("TOPIC")
    outputs = ["n"]


class Lines(SourceSpout):
    source = FileSource("FOLDER/in/*.jsonl")
    outputs = ["n"]


class Use(Bolt):
    def initialize(self, conf, context):
        name = f"FOLDER/seen/{VERSION}-{os.getpid()}-{context.task_id}"
        self.file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def process(self, tup):
        os.write(self.file, b"%s %d\\n" % (tup.component.encode(), tup.values[0]))


class Reading(Topology):
    records = Records.spec(par=2)
    lines = Lines.spec(par=2)
    use = Use.spec(inputs=[records, lines], par=2)
    config = {"topology.workers": 2}
'''


class Written:
    """Numbers that come all the time, in a topic and in files, and what the bolts got of them."""

    def __init__(self, folder: Path, kafka: KafkaRig) -> None:
        self.folder, self.kafka, self.topic = folder, kafka, kafka.topic()
        self.total = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)
        for name in ("in", "seen"):
            (folder / name).mkdir()
        self._thread.start()

    def code(self, version: int) -> str:
        """Target of a version of the topology."""
        path = self.folder / str(version) / "reading.py"
        path.parent.mkdir()
        text = CODE.replace("FOLDER", str(self.folder)).replace("TOPIC", self.topic)
        path.write_text(f"VERSION = {version}\n{text}")
        return str(path)

    def _write(self) -> None:
        while not self._stop.wait(0.2):
            numbers = range(self.total, self.total + 40)
            self.kafka.produce(self.topic, numbers)
            half = self.folder / "in" / "_half"
            half.write_text("".join(f"{n}\n" for n in numbers))
            half.rename(self.folder / "in" / f"{self.total:08d}.jsonl")
            self.total += 40

    def stop(self) -> int:
        """Write no more: so many are there of each kind."""
        self._stop.set()
        self._thread.join()
        return self.total

    def seen(self, version: str = "") -> Counter[tuple[str, int]]:
        """(component, number) -> how often it came."""
        found: Counter[tuple[str, int]] = Counter()
        for path in (self.folder / "seen").glob(f"{version}*"):
            found.update(
                (part, int(n))
                for part, n in (line.split() for line in path.read_text().splitlines())
            )
        return found

    def wait_for_more(self, version: str = "") -> None:
        """Until both spouts have read more than until now."""
        before = {part for part, _ in self.seen(version)}, self.total
        eventually(
            lambda: all(
                any(n >= before[1] for part, n in self.seen(version) if part == name) for name in ("records", "lines")
            ),
            90, f"numbers from {before[1]} of both spouts",
        )  # fmt: skip


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Written]:
    kafka = KafkaRig()
    made = Written(tmp_path, kafka)
    yield made
    made.stop()
    kafka.close()


def test_each_record_is_read_once_through_pause_move_and_redeploy(
    shared_cluster: LocalCluster, written: Written, tmp_path: Path
) -> None:
    cluster = shared_cluster
    conf = (
        *("--conf", f"kafka.bootstrap.servers={written.kafka.bootstrap}"),
        *("--conf", f"topology.state.dir={tmp_path / 'state'}"),
    )
    document: dict[str, Any] = cluster.cli("submit", written.code(1), "--name", "reading", *conf)
    cluster.wait_running("reading")
    written.wait_for_more()

    cluster.cli("deactivate", "reading")
    cluster.cli("activate", "reading")
    written.wait_for_more()

    cluster.cli("rebalance", "reading", "-n", "3", "-e", "records=3", "-e", "lines=1", "-w", "3")
    eventually(
        lambda: len(cluster.show("reading")["workers"]) == 3, 60, "three workers", ignore=(StormDagsterError,)
    )  # fmt: skip
    cluster.wait_running("reading")
    written.wait_for_more()

    done = cluster.cli("update", "reading", written.code(2), *conf)
    assert done["id"] != document["id"] and done["status"] == "ACTIVE"
    written.wait_for_more("2")

    total = written.stop()
    expected = {(part, n) for part in ("records", "lines") for n in range(total)}
    eventually(lambda: written.seen().keys() >= expected, 90, "everything is read")
    group = "reading.records"
    eventually(
        lambda: written.kafka.committed(group, written.topic) == written.kafka.ends(written.topic),
        30,
    )
    cluster.cli("kill", "reading", "-w", "0")
    seen = written.seen()
    assert seen.keys() == expected and [which for which, times in seen.items() if times > 1] == []
