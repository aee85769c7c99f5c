"""Outage times, losses and duplicates while a topology is harmed and operated."""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tables import Row, run

from storm_dagster.host.clock import boot_clock
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.task_state import read_task_states
from storm_dagster.testing.waiting import eventually

TOPOLOGY = f"{Path(__file__).with_name('ledger.py')}:RecoveryLedger"
NAME = "recovery"


class Harm:
    """One topology with a ledger on a cluster of its own, and what is done to it."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        folder.mkdir(parents=True)
        self.cluster.cli("submit", TOPOLOGY, "--name", NAME, "--conf", f"bench.ledger={folder}")
        self._seen: tuple[int, int] = (0, 0)

    # -- the ledger --------------------------------------------------------------------------------
    def lines(self) -> Iterator[tuple[int, float]]:
        """(number, boot clock) of everything that was counted."""
        for path in self.folder.glob("*.txt"):
            for line in path.read_text().splitlines():
                number, _, when = line.partition(" ")
                if when:
                    yield int(number), float(when)

    def sent(self) -> tuple[int, int]:
        """(numbers sent, numbers acked from the first on)."""
        for state in read_task_states(self.cluster.home, NAME, "numbers").values():
            return int(state.get("sent", 0)), int(state.get("done", 0))
        return 0, 0

    def caught_up(self) -> int:
        """Waits until all that had been sent is acked; how many numbers that is."""
        until = self.sent()[0]
        eventually(
            lambda: self.sent()[1] >= until, 90, f"the first {until} numbers acked", interval=0.2
        )
        return until

    def balance(self) -> tuple[int, int]:
        """(lost, duplicates) since this was asked last, once everything that had been sent until
        now is acked.

        Numbers go on meanwhile: what failed is only sent again by a spout that is active.
        """
        until = self.caught_up()
        counted = Counter(number for number, _ in self.lines() if number < until)
        lost = until - len(counted)
        twice = sum(counted.values()) - len(counted)
        before, self._seen = self._seen, (lost, twice)
        return lost - before[0], twice - before[1]

    def longest_gap(self, since: float, until: float) -> float:
        """Longest time without a count between two moments, seconds."""
        times = sorted(when for _, when in self.lines() if since - 1 <= when <= until)
        return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)

    # -- the cluster -------------------------------------------------------------------------------
    def runs_again(
        self, changed: Callable[[dict[str, Any]], bool], what: str, timeout: float = 120
    ) -> float:
        """Seconds until the change is there and all tasks run."""
        began = time.monotonic()

        def again() -> bool:
            document = self.cluster.show(NAME)
            return changed(document) and all(
                task["status"] == "running" for task in document["tasks"]
            )

        eventually(again, timeout, what, ignore=(StormDagsterError,), interval=0.02)
        return time.monotonic() - began

    def kill_worker(self, number: int) -> float:
        """kill -9 of a worker until its tasks run again in its slot."""
        workers = self.cluster.show(NAME)["workers"]
        victim = workers[number % len(workers)]
        os.kill(victim["pid"], signal.SIGKILL)

        def replaced(document: dict[str, Any]) -> bool:
            pids = {(w["node"], w["port"]): w["pid"] for w in document["workers"]}
            return pids.get((victim["node"], victim["port"])) not in (None, victim["pid"])

        return self.runs_again(replaced, "the worker again")

    def lose_host(self) -> Lost:
        """A supervisor and its workers die at once and stay away until the tasks run elsewhere."""
        document = self.cluster.show(NAME)
        node = document["workers"][0]["node"]
        (keeper,) = self.cluster.processes("dev")
        # Who would start its supervisor again is held meanwhile.
        os.kill(keeper.pid, signal.SIGSTOP)
        try:
            began = time.time()
            self.cluster.kill("supervisor", node)
            for worker in document["workers"]:
                if worker["node"] == node:
                    os.kill(worker["pid"], signal.SIGKILL)

            def moved(document: dict[str, Any]) -> bool:
                return all(task["node"] not in (None, node) for task in document["tasks"])

            seconds = self.runs_again(moved, "its tasks elsewhere")
        finally:
            os.kill(keeper.pid, signal.SIGCONT)
        requested, first_step = self._run_since(began)
        eventually(
            lambda: any(record.id == node for record in self.cluster.processes("supervisor")),
            60,
            f"supervisor {node} again",
        )
        return Lost(seconds, began, requested, first_step)

    def _run_since(self, since: float) -> tuple[float | None, float | None]:
        """Epoch seconds at which the sensor asked for a reassignment, and at which its first step
        began.
        """
        dagster = self.cluster.endpoints.dagster
        query = """{ runsOrError(filter: {pipelineName: "reassign_topologies"}, limit: 5) {
          ... on Runs { results { creationTime stepStats { startTime } } } } }"""
        assert dagster is not None
        answer = httpx.post(
            f"{dagster.url.rstrip('/')}/graphql", json={"query": query}, timeout=30, trust_env=False
        ).json()
        runs = [
            run for run in answer["data"]["runsOrError"]["results"] if run["creationTime"] >= since
        ]
        if not runs:
            return None, None
        first = min(runs, key=lambda run: run["creationTime"])
        starts = [step["startTime"] for step in first["stepStats"] if step["startTime"]]
        return first["creationTime"], min(starts, default=None)


@dataclass(frozen=True)
class Lost:
    """One lost host: how long its tasks were away, and where the time went (epoch seconds)."""

    seconds: float
    began: float
    requested: float | None
    first_step: float | None

    @property
    def shares(self) -> str:
        """Until the sensor asked, until its run's first step, until all tasks ran; in seconds."""
        if self.requested is None or self.first_step is None:
            return "healed without a run"
        noticed, launched = self.requested - self.began, self.first_step - self.requested
        return (
            f"{noticed:.1f} until the sensor's request, {launched:.1f} until its step, "
            f"{self.seconds - noticed - launched:.1f} until all ran"
        )


def report(folder: Path, *, quick: bool, conf: dict[str, Any] | None = None) -> Iterator[Row]:
    """The rows, one after the other; on a cluster of its own, because hosts of it are taken
    away.
    """
    with LocalCluster(folder / "home", supervisors=3, slots=3, conf=conf) as cluster:
        session = cluster.conf["storm.zookeeper.session.timeout"] / 1000
        harm = Harm(cluster, folder / "ledger")
        eventually(lambda: harm.sent()[1] > 300, 60, "numbers on their way")
        taken: list[float] = []
        for number in range(2 if quick else 6):
            taken.append(harm.kill_worker(number))
            harm.caught_up()
            if number % 3 == 2:
                time.sleep(61)  # a second crash within a minute would wait out its back-off
        yield (
            "worker kill -9 -> its tasks run again",
            "Storm: 30-40 s; aim: 1 s",
            f"{statistics.median(taken):.2f} s",
        )
        yield _kept("worker kill -9", harm)
        cluster.cli("rebalance", NAME, "-n", "2", "-w", "2")
        yield _kept("rebalance", harm)
        cluster.cli("deactivate", NAME)
        cluster.cli("activate", NAME)
        yield _kept("deactivate, activate", harm)
        began = boot_clock()
        cluster.cli("update", NAME, TOPOLOGY, "--conf", f"bench.ledger={harm.folder}")
        time.sleep(2)
        gap = harm.longest_gap(began, boot_clock())
        yield "hot deploy: longest time without a count", "-", f"{gap:.2f} s"
        yield _kept("hot deploy", harm)
        lost: list[Lost] = []
        for _ in range(1 if quick else 3):
            lost.append(harm.lose_host())
            harm.caught_up()
        middle = sorted(lost, key=lambda each: each.seconds)[len(lost) // 2]
        yield (
            "supervisor host lost -> its tasks run elsewhere",
            f"Storm 70 s, JStorm 190 s; aim: session ({session:g} s) + 2 s",
            f"{middle.seconds:.2f} s ({middle.shares})",
        )
        steps = [e.first_step - e.requested for e in lost if e.first_step and e.requested]
        yield (
            "sensor event -> first step of the run",
            "-",
            f"{statistics.median(steps):.2f} s" if steps else "no run: the leader healed",
        )
        yield _kept("host lost", harm)


def _kept(operation: str, harm: Harm) -> Row:
    lost, twice = harm.balance()
    return f"tuples lost / duplicates: {operation}", "lost 0", f"{lost} / {twice}"


def _rows(quick: bool) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        yield from report(Path(folder), quick=quick)


if __name__ == "__main__":
    run("recovery", __doc__, _rows)
