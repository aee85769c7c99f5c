"""Longest time without an ack at the spout after each kind of kill -9, at full load with
``topology.max.spout.pending``.

The second value is the time from the kill to the last replay of what was in flight.
"""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tables import Row, run

from storm_dagster.api import Bolt, Spout, Topology, Tuple
from storm_dagster.host.clock import boot_clock
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually

TOPOLOGY = f"{Path(__file__)}:AckGaps"
NAME = "gaps"
KINDS = {
    "a bolt's worker": ["relay"],
    "the acker's": ["__acker"],
    "the spout's": ["numbers"],
    "two at once": ["relay", "end"],
}
_RESOLUTION_SECS = 0.005
_BACKOFF_SECS = 61.0


class GapSpout(Spout):
    """Emits as fast as it may, and writes down when it was acked (at most every 5 ms) and when
    tuples failed.
    """

    outputs = ["number"]

    def initialize(self, conf: Any, context: Any) -> None:
        self._times = (Path(conf["bench.folder"]) / f"times-{os.getpid()}").open("a", buffering=1)
        self._next, self._written = 0, 0.0
        self._again: list[int] = []

    def next_tuple(self) -> None:
        if self._again:
            number = self._again.pop()
        else:
            number, self._next = self._next, self._next + 1
        self.emit([number], tup_id=number)

    def ack(self, tup_id: int) -> None:
        now = boot_clock()
        if now - self._written >= _RESOLUTION_SECS:
            self._written = now
            self._times.write(f"acked {now:.4f}\n")

    def fail(self, tup_id: int) -> None:
        self._times.write(f"failed {boot_clock():.4f}\n")
        self._again.append(tup_id)


class RelayBolt(Bolt):
    """Passes on."""

    outputs = ["number"]

    def process(self, tup: Tuple) -> None:
        self.emit(list(tup.values))


class EndBolt(Bolt):
    """Takes what comes."""

    def process(self, tup: Tuple) -> None:
        pass


class AckGaps(Topology):
    """numbers -> relay -> end, a task in each of its workers."""

    config = {
        "topology.workers": 4,
        "topology.max.spout.pending": 1000,
        "topology.message.timeout.secs": 30,
    }

    numbers = GapSpout.spec()
    relay = RelayBolt.spec(inputs=[numbers])
    end = EndBolt.spec(inputs=[relay])


def times(folder: Path, kind: str, since: float) -> list[float]:
    """When something was ``acked`` or ``failed`` after a moment of the boot clock, ascending."""
    found: list[float] = []
    for path in folder.glob("times-*"):
        for line in path.read_text().split("\n")[:-1]:
            what, when = line.split()
            if what == kind and float(when) >= since:
                found.append(float(when))
    return sorted(found)


def kill(cluster: LocalCluster, folder: Path, components: Sequence[str]) -> tuple[float, float]:
    """(longest time without an ack, kill to last replay) after a kill of the workers of these
    components.
    """
    document = cluster.wait_running(NAME)
    slots = {
        (task["node"], task["port"])
        for task in document["tasks"]
        if task["component"] in components
    }
    pids = [
        worker["pid"] for worker in document["workers"] if (worker["node"], worker["port"]) in slots
    ]
    began = boot_clock()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: times(folder, "acked", began + 1.5), 60, "acks after the kill")
    time.sleep(3)
    acked = times(folder, "acked", began - 1)
    gap = max(later - earlier for earlier, later in itertools.pairwise(acked))
    return gap, max(times(folder, "failed", began), default=began) - began


def report(folder: Path, *, quick: bool) -> Iterator[Row]:
    """The rows, on a cluster of their own."""
    with LocalCluster(folder / "home", supervisors=2, slots=2) as cluster:
        ledger = folder / "times"
        ledger.mkdir()
        cluster.cli("submit", TOPOLOGY, "--name", NAME, "--conf", f"bench.folder={ledger}")
        cluster.wait_running(NAME)
        eventually(lambda: times(ledger, "acked", 0.0), 60, "acks")
        for number, (kind, components) in enumerate(KINDS.items()):
            if number and not quick:
                # A second crash of a slot within a minute would wait out its back-off.
                time.sleep(_BACKOFF_SECS)
            gap, replayed = kill(cluster, ledger, components)
            yield (
                f"kill -9 of {kind}: longest time without an ack; kill -> last replay",
                "aim: 1 s; 1.5 s",
                f"{gap:.2f} s; {replayed:.2f} s",
            )


def _rows(quick: bool) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        yield from report(Path(folder), quick=quick)


if __name__ == "__main__":
    run("ack-gaps", __doc__, _rows)
