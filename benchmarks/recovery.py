"""How long things are away, and what is lost or counted twice, while a topology is harmed and operated."""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from storm_dagster.api import TaskState
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually

TOPOLOGY = f"{Path(__file__).with_name('ledger.py')}:Recovery"
NAME = "recovery"
Row = tuple[str, str, str]


class Harm:
    """One topology with a ledger on a cluster of its own, and what is done to it."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        folder.mkdir(parents=True)
        self.cluster.cli("submit", TOPOLOGY, "--name", NAME, "--conf", f"bench.ledger={folder}")
        self._seen: tuple[int, int] = (0, 0)

    # -- the ledger -----------------------------------------------------------------------------------------
    def lines(self) -> Iterator[tuple[int, float]]:
        """(number, boot clock) of everything that was counted."""
        for path in self.folder.glob("*.txt"):
            for line in path.read_text().splitlines():
                number, _, when = line.partition(" ")
                if when:
                    yield int(number), float(when)

    def sent(self) -> tuple[int, int]:
        """(numbers sent, numbers acked from the first on)."""
        for path in self.cluster.home.glob(f"**/{NAME}/numbers/*.sqlite3"):
            state = TaskState(path)
            try:
                return int(state.get("sent", 0)), int(state.get("done", 0))
            finally:
                state.close()
        return 0, 0

    def balance(self) -> tuple[int, int]:
        """(lost, counted twice) since this was asked last, once everything has come to rest."""
        self.cluster.cli("deactivate", NAME)

        def rest() -> bool:
            sent, done = self.sent()
            return sent > 0 and sent == done

        eventually(rest, 90, "everything that was sent acked", interval=0.2)
        counted = Counter(number for number, _ in self.lines())
        lost = sum(1 for number in range(self.sent()[0]) if number not in counted)
        twice = sum(counted.values()) - len(counted)
        before, self._seen = self._seen, (lost, twice)
        self.cluster.cli("activate", NAME)
        return lost - before[0], twice - before[1]

    def longest_gap(self, since: float, until: float) -> float:
        """Longest time without a count between two moments, seconds."""
        times = sorted(when for _, when in self.lines() if since - 1 <= when <= until)
        return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)

    # -- the cluster ----------------------------------------------------------------------------------------
    def runs_again(self, changed: Callable[[dict[str, Any]], bool], what: str, timeout: float = 120) -> float:
        """Seconds until the change is there and all tasks run."""
        began = time.monotonic()

        def again() -> bool:
            document = self.cluster.show(NAME)
            return changed(document) and all(task["status"] == "running" for task in document["tasks"])

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

    def lose_host(self) -> tuple[float, str]:
        """A supervisor and its workers die until the tasks run elsewhere; with the host's id."""
        # Who would start its daemons again goes with it.
        if self.cluster.processes("dev"):
            self.cluster.kill("dev")
        document = self.cluster.show(NAME)
        node = document["workers"][0]["node"]
        self.cluster.kill("supervisor", node)
        for worker in document["workers"]:
            if worker["node"] == node:
                os.kill(worker["pid"], signal.SIGKILL)

        def moved(document: dict[str, Any]) -> bool:
            return all(task["node"] not in (None, node) for task in document["tasks"])

        return self.runs_again(moved, "its tasks elsewhere"), node

    def first_step(self) -> float | None:
        """Seconds from the sensor's request (the newest reassignment's creation) to the start of its step."""
        dagster = self.cluster.endpoints.dagster
        query = """{ runsOrError(filter: {pipelineName: "reassign_topologies"}, limit: 1) {
          ... on Runs { results { creationTime stepStats { startTime } } } } }"""
        assert dagster is not None
        answer = httpx.post(
            f"{dagster.url.rstrip('/')}/graphql", json={"query": query}, timeout=30, trust_env=False
        ).json()
        for run in answer["data"]["runsOrError"]["results"]:
            starts = [step["startTime"] for step in run["stepStats"] if step["startTime"]]
            return min(starts) - run["creationTime"] if starts else None
        return None


def report(folder: Path, *, quick: bool, conf: dict[str, Any] | None = None) -> Iterator[Row]:
    """The rows, one after the other; on a cluster of its own, because a host of it is taken away."""
    with LocalCluster(folder / "home", supervisors=3, slots=3, conf=conf) as cluster:
        harm = Harm(cluster, folder / "ledger")
        eventually(lambda: harm.sent()[1] > 300, 60, "numbers on their way")
        taken = []
        for number in range(2 if quick else 6):
            taken.append(harm.kill_worker(number))
            if number % 3 == 2:
                time.sleep(61)  # a second crash within a minute would wait out its back-off
        yield "worker kill -9 -> its tasks run again", "Storm: 30-40 s", f"{statistics.median(taken):.2f} s"
        yield _kept("worker kill -9", harm)
        cluster.cli("rebalance", NAME, "-n", "2", "-w", "2")
        yield _kept("rebalance", harm)
        cluster.cli("deactivate", NAME)
        cluster.cli("activate", NAME)
        yield _kept("deactivate, activate", harm)
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        cluster.cli("update", NAME, TOPOLOGY, "--conf", f"bench.ledger={harm.folder}")
        time.sleep(2)
        gap = harm.longest_gap(began, time.clock_gettime(time.CLOCK_BOOTTIME))
        yield "hot deploy: longest time without a count", "-", f"{gap:.2f} s"
        yield _kept("hot deploy", harm)
        seconds, _ = harm.lose_host()
        yield (
            "supervisor host lost -> its tasks run elsewhere",
            "Storm 70 s, JStorm 190 s",
            f"{seconds:.2f} s",
        )
        step = harm.first_step()
        yield "sensor event -> first step of the run", "-", "no run" if step is None else f"{step:.2f} s"
        yield _kept("host lost", harm)


def _kept(operation: str, harm: Harm) -> Row:
    lost, twice = harm.balance()
    return f"tuples lost / counted twice: {operation}", "lost 0", f"{lost} / {twice}"
