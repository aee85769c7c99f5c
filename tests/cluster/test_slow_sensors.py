"""A Dagster whose sensors tick 30 s apart, or whose daemon is off: the leader heals real workers,
and readers say who heals.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pytest
import yaml

from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.records import AssignmentChange
from storm_dagster.testing.cluster import run_cli
from storm_dagster.testing.waiting import eventually
from storm_rigs.stage.child import start_child, stop_child
from storm_rigs.stage.daemons import Daemons
from storm_rigs.stage.stock_dagster import StockDagster

pytestmark = [
    pytest.mark.long,
    pytest.mark.zookeeper,
    pytest.mark.dagster,
    pytest.mark.cluster,
    pytest.mark.timeout(900),
]

STEADY = Path(__file__).parent / "topologies" / "steady.py"
# Sensors that share one thread have ticks of a second: between two of them this one sees nothing.
SETTINGS = "telemetry: {enabled: false}"
DEFINITIONS = """
from pathlib import Path

from storm_dagster import build_storm_defs

defs = build_storm_defs(conf_dir=str(Path(__file__).parent / "conf"), sensor_interval_secs=30)
"""


@dataclass
class SlowDagster:
    """A Dagster with sensors 30 s apart beside a cluster of three supervisors."""

    folder: Path
    dagster: StockDagster
    daemons: Daemons
    daemon: subprocess.Popen[bytes]
    """Dagster's own daemon, which evaluates the sensors."""

    def healer(self) -> str:
        """Who heals, by nimbus: ``sensor`` or ``leader``."""
        with self.daemons.client() as nimbus:
            return nimbus.get("/v1/cluster")["healing"]["by"]

    def doctor(self) -> str:
        """What `doctor` has found, in words."""
        done = run_cli("doctor", "--json", "--conf-dir", str(self.folder / "conf"))
        return "\n".join(str(row) for row in done.document["findings"])

    def nodes(self, topology_id: str) -> set[str]:
        """Supervisors of the topology's workers, once all of them run."""
        return {slot.node for slot in self.daemons.wait_running(topology_id)}

    def lose_host(self, topology_id: str) -> str:
        """Kill a supervisor with all of its workers; its id."""
        with self.daemons.cluster() as cluster:
            workers = self.daemons.workers(cluster, topology_id)
        node = min(slot.node for slot in workers)
        self.daemons.kill("supervisor", node)
        for slot, worker in workers.items():
            if slot.node == node:
                os.kill(worker.pid, signal.SIGKILL)
        return node

    def newest_change(self, topology_id: str) -> AssignmentChange:
        with self.daemons.cluster() as cluster:
            topology = cluster.load_view().topologies[topology_id]
        assert topology.assignment is not None
        return topology.assignment.history[0]

    def healing_runs(self) -> list[dg.DagsterRun]:
        return list(self.dagster.instance.get_runs(dg.RunsFilter(job_name="reassign_topologies")))


@pytest.fixture
def slow(zookeeper_server: str, tmp_path: Path) -> Iterator[SlowDagster]:
    folder = tmp_path / "slow"
    (folder / "conf").mkdir(parents=True)
    (folder / "slow_definitions.py").write_text(DEFINITIONS)
    # Without a daemon: the test starts and ends that itself.
    webserver = ("dagster-webserver", "-m", "slow_definitions")
    dagster = StockDagster(
        folder, "slow_definitions", tmp_path / "dagster", SETTINGS, command=webserver
    )
    host, _, port = zookeeper_server.rpartition(":")
    conf = {
        "storm.zookeeper.port": int(port),
        "storm.zookeeper.root": f"/t-{uuid.uuid4().hex[:12]}",
        "storm.zookeeper.session.timeout": 4000,
        "dagster.graphql.url": dagster.url,
        "dagster.location": dagster.module,
    }
    daemons = Daemons(tmp_path / "home", [host], nimbuses=1, supervisors=3, conf=conf)
    seeds = [daemons.url(nimbus).removeprefix("http://") for nimbus in daemons.nimbuses]
    known = {**conf, "storm.zookeeper.servers": [host], "nimbus.seeds": seeds}
    (folder / "conf" / "storm.yaml").write_text(yaml.safe_dump(known))
    program = str(Path(sys.executable).with_name("dagster-daemon"))
    with daemons, dagster:
        daemon = start_child(
            [program, "run", "-m", dagster.module],
            tmp_path / "daemon.log",
            env={"DAGSTER_HOME": str(dagster.home), "DAGSTER_DISABLE_TELEMETRY": "yes"},
            without=["STORM_DAGSTER_HOME"],
            cwd=folder,
        )
        try:
            yield SlowDagster(folder, dagster, daemons, daemon)
        finally:
            stop_child(daemon)


def test_the_leader_heals_where_sensors_are_slow_or_off(slow: SlowDagster) -> None:
    topology_id = slow.daemons.submit(f"{STEADY}:Steady", "numbers")
    assert len(slow.nodes(topology_id)) == 2

    # A sensor that ticks every 30 s stays armed between two ticks.
    eventually(lambda: slow.healer() == "sensor", 120, "an armed sensor", interval=0.5)
    assert "healing sensor armed: it heals" in slow.doctor()
    check_healed_by_leader(slow, topology_id)

    stop_child(slow.daemon)
    eventually(lambda: slow.healer() == "leader", 60, "the end of the sensor", interval=0.5)
    assert "the leader heals instead" in slow.doctor()
    check_healed_by_leader(slow, topology_id)
    assert slow.healing_runs() == []


def check_healed_by_leader(slow: SlowDagster, topology_id: str) -> None:
    """A host is lost, and its tasks run elsewhere without a run of Dagster."""
    node = slow.lose_host(topology_id)
    eventually(
        lambda: node not in slow.nodes(topology_id),
        120,
        "live workers elsewhere",
        interval=0.5,
        ignore=(AssertionError, StormDagsterError),
    )
    change = slow.newest_change(topology_id)
    assert (change.action, change.run) == ("healed", "")
    slow.daemons.launch("supervisor", node)
    eventually(
        lambda: node in {row["id"] for row in supervisors(slow)}, 60, "the supervisor", interval=0.5
    )


def supervisors(slow: SlowDagster) -> list[dict[str, str]]:
    with slow.daemons.client() as nimbus:
        return nimbus.get("/v1/cluster")["supervisors"]
