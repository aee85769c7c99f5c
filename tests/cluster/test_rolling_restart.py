"""Rolling restart of supervisors whose end is the end of their workers, as in containers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.testing.task_state import read_task_states
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.servers.pid_namespaces import missing_requirement
from storm_rigs.stage.daemons import Daemons

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.zookeeper,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(missing_requirement() is not None, reason=missing_requirement() or ""),
]

TOPOLOGY = Path(__file__).parent / "topologies" / "counted.py"


@pytest.fixture
def daemons(tmp_path: Path, zookeeper_server: str, zk_root: str) -> Iterator[Daemons]:
    """Two nimbuses, and four supervisors of two slots, each in a container."""
    conf = {
        "storm.zookeeper.root": zk_root,
        "supervisor.on.term": "drain",
        "supervisor.drain.secs": 60,
    }
    with Daemons(
        tmp_path / "home",
        [zookeeper_server],
        nimbuses=2,
        supervisors=4,
        conf=conf,
        containers=True,
    ) as made:
        yield made


class Notes:
    """The notes of the spout in ``topologies/counted.py``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _lines(self, kind: str) -> list[list[str]]:
        """Fields of the notes of that kind: itself, boot clock, number."""
        path = self._folder / "notes"
        if not path.exists():
            return []
        lines = [line.split() for line in path.read_text().split("\n")[:-1]]
        return [line for line in lines if line[0] == kind]

    def _read(self, kind: str) -> list[int]:
        """Numbers of the notes of that kind."""
        return [int(number) for _, _, number in self._lines(kind)]

    def acks(self) -> int:
        return len(self._lines("acked"))

    def failures(self) -> int:
        return len(self._lines("failed"))

    def longest_gap(self) -> float:
        """Longest time between two acks, in seconds."""
        times = sorted(float(when) for _, when, _ in self._lines("acked"))
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def more_acks(self, number: int = 200) -> None:
        """Wait for acks."""
        before = self.acks()
        eventually(lambda: self.acks() >= before + number, 60, f"{number} acks")

    def finish(self) -> int:
        """End the spout; the number of tuples once all are acked."""
        (self._folder / "stop").touch()
        (total,) = eventually(lambda: self._read("stopped"), 20, "the spout's end")
        eventually(lambda: {*self._read("acked")} == {*range(total)}, 60, f"{total} acks")
        return total


def submitted(daemons: Daemons, folder: Path) -> tuple[str, Notes]:
    """The word count, running; its topology id and its notes."""
    conf = {"counted.folder": str(folder)}
    topology_id = daemons.submit(f"{TOPOLOGY}:Counted", "counted", conf=conf)
    daemons.wait_running(topology_id)
    notes = Notes(folder)
    notes.more_acks()
    return topology_id, notes


def nodes(daemons: Daemons, topology_id: str) -> set[str]:
    """Supervisors that have workers of the topology."""
    with daemons.cluster() as cluster:
        return {worker.node for worker in cluster.load_view().topologies[topology_id].workers}


def restart(daemons: Daemons, *supervisors: str) -> None:
    """End the supervisors together, wait, and start them."""
    for supervisor in supervisors:
        daemons.term("supervisor", supervisor)
    for supervisor in supervisors:
        assert daemons.wait_ended("supervisor", supervisor, 90) == 0
        last = daemons.log("supervisor", supervisor).rpartition("the drain is over: ")[2]
        assert last.startswith("all slots are empty"), last
    for supervisor in supervisors:
        daemons.launch("supervisor", supervisor)
    with daemons.cluster() as cluster:
        eventually(
            lambda: {*daemons.supervisors} <= {*cluster.load_view().supervisors},
            60,
            "their return",
        )


def is_exact(daemons: Daemons, notes: Notes) -> None:
    """Each number came once, and none was replayed."""
    total = notes.finish()
    times: dict[str, int] = {}
    for state in read_task_states(daemons.home, "counted", "count").values():
        times.update(dict(state.items()))
    assert sorted(map(int, times)) == list(range(total))
    assert {*times.values()} == {1}, "a number came twice"
    assert notes.failures() == 0


def test_a_rolling_restart_of_all_supervisors_replays_nothing(
    daemons: Daemons, tmp_path: Path
) -> None:
    topology_id, notes = submitted(daemons, tmp_path)
    moved = 0
    for supervisor in daemons.supervisors:
        moved += supervisor in nodes(daemons, topology_id)
        restart(daemons, supervisor)
        daemons.wait_running(topology_id)
        notes.more_acks()
    assert moved >= 3, "each worker moved at least once"
    # Two at once: one move, or two that follow each other.
    first, second, *_ = sorted(nodes(daemons, topology_id))
    restart(daemons, first, second)
    daemons.wait_running(topology_id)
    notes.more_acks()
    gap = notes.longest_gap()
    print(f"longest time without an ack: {gap:.2f} s")
    assert gap <= patience(5)
    is_exact(daemons, notes)


def test_a_drain_waits_for_the_next_leader(daemons: Daemons, tmp_path: Path) -> None:
    topology_id, notes = submitted(daemons, tmp_path)
    supervisor = min(nodes(daemons, topology_id))
    for nimbus in daemons.nimbuses:
        daemons.kill("nimbus", nimbus)
    daemons.term("supervisor", supervisor)
    eventually(lambda: "draining, at most" in daemons.log("supervisor", supervisor), 20, "drain")
    notes.more_acks()
    daemons.heal()
    assert daemons.wait_ended("supervisor", supervisor, 90) == 0
    assert supervisor not in nodes(daemons, topology_id)
    daemons.wait_running(topology_id)
    notes.more_acks()
    is_exact(daemons, notes)


def test_rebalances_replay_nothing(daemons: Daemons, tmp_path: Path) -> None:
    topology_id, notes = submitted(daemons, tmp_path)
    with daemons.operations() as ctx:
        for workers_wanted in (2, 4, 3):
            moved = rebalance(ctx, "counted", workers=workers_wanted, wait_secs=3)
            assert moved.outcome == "assigned" and moved.status == "ACTIVE"
            daemons.wait_running(topology_id)
            notes.more_acks()
    is_exact(daemons, notes)
