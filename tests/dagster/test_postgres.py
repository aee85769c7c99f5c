"""Dagster's storage of production: docker/dagster.yaml over a real PostgreSQL server, with a
password.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from storm_dagster.defs.keys import PARTITIONS_NAME, STAGES
from storm_dagster.model.errors import Unavailable
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually
from storm_rigs.dagster.dagster_results import shown
from storm_rigs.servers.postgres import PostgresServer
from storm_rigs.stage.dagster_world import DagsterWorld

pytestmark = [pytest.mark.dagster, pytest.mark.zookeeper]

WORD_COUNT = Path(__file__).parents[2] / "examples" / "wordcount.py"
DAGSTER_YAML = Path(__file__).parents[2] / "docker" / "dagster.yaml"


def settings_for(server: PostgresServer) -> dict[str, Any]:
    """docker/dagster.yaml as it stands, but for the port."""
    settings = yaml.safe_load(DAGSTER_YAML.read_text(encoding="utf-8"))
    settings["storage"]["postgres"]["postgres_db"]["port"] = server.port
    return settings


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    try:
        server.create()
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(server.folder, ignore_errors=True)


@pytest.fixture
def instance(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dg.DagsterInstance]:
    """Dagster with docker/dagster.yaml as it stands, but for the port."""
    (tmp_path / "dagster.yaml").write_text(yaml.safe_dump(settings_for(postgres)))
    for key, value in postgres.environment.items():
        monkeypatch.setenv(key, value)
    with dg.DagsterInstance.from_config(str(tmp_path)) as made:
        yield made


@pytest.mark.usefixtures("leader")
@pytest.mark.long
def test_a_submission_and_a_kill_are_stored_in_postgres(
    world: DagsterWorld, instance: dg.DagsterInstance
) -> None:
    assert type(instance.run_storage).__name__ == "PostgresRunStorage"
    result = world.submit("wc", conf={"topology.workers": 2})
    assert result.success
    run = instance.get_run_by_id(result.run_id)
    assert run is not None and run.status == dg.DagsterRunStatus.SUCCESS
    assert instance.get_dynamic_partitions(PARTITIONS_NAME) == ["wc"]
    for key in STAGES:
        event = instance.get_latest_materialization_event(key)
        assert event is not None and event.asset_materialization is not None
        assert event.asset_materialization.partition == "wc"
    placed = instance.get_latest_materialization_event(dg.AssetKey(["storm", "assignment"]))
    assert placed is not None and shown(placed.asset_materialization)["workers"] == 2

    form = {"ops": {"kill_topology_op": {"config": {"name": "wc", "wait_secs": 0}}}}
    assert world.run("kill_topology", config=form).success
    assert [run.status for run in instance.get_runs(dg.RunsFilter(job_name="kill_topology"))] == [
        dg.DagsterRunStatus.SUCCESS
    ]
    # The key goes, the history of the name stays.
    assert instance.get_dynamic_partitions(PARTITIONS_NAME) == []
    assert instance.get_latest_materialization_event(STAGES[0]) is not None


@pytest.mark.cluster
@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(900)
def test_topologies_outlive_the_storage_of_dagster(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in postgres.environment.items():
        monkeypatch.setenv(key, value)
    home = tmp_path / "home"
    (home / "dagster").mkdir(parents=True)
    (home / "dagster" / "dagster.yaml").write_text(yaml.safe_dump(settings_for(postgres)))
    fast = {"nimbus.monitor.backstop.secs": 10}
    with LocalCluster(home, conf=fast, timeout=400) as cluster:
        target = (str(WORD_COUNT), "--conf", "wordcount.lines.per.second=50")
        eventually(
            lambda: cluster.cli("submit", *target, "--name", "wc", "--token", "wc"),
            180, "a submission", ignore=(Unavailable,),
        )  # fmt: skip
        before = cluster.wait_running("wc")
        postgres.stop()

        # Whoever asks is told what is missing.
        with pytest.raises(Unavailable, match="storage"):
            cluster.cli("submit", *target, "--name", "other")
        told = cluster.cli("doctor", check=False)
        (finding,) = [row for row in told.document["findings"] if row["check"] == "Dagster"]
        assert told.code == Unavailable.exit_code and finding["state"] == "broken"
        assert "database" in finding["mend"]
        assert cluster.cli("status")["dagster"]["state"] == "broken"

        # What runs goes on, can be steered, and is healed by the leader.
        assert cluster.cli("deactivate", "wc")["status"] == "INACTIVE"
        assert cluster.cli("activate", "wc")["status"] == "ACTIVE"
        now = cluster.show("wc")
        assert [w["pid"] for w in now["workers"]] == [w["pid"] for w in before["workers"]]
        eventually(lambda: emitted(cluster) > emitted_in(now), 60, "tuples flowing", interval=0.5)
        eventually(
            lambda: cluster.cli("status")["healer"] is False, 120, "no armed sensor", interval=1.0
        )
        lost = now["workers"][0]["node"]
        cluster.kill("dev")  # it would start the supervisor again
        cluster.kill("supervisor", lost)
        for worker in now["workers"]:
            if worker["node"] == lost:
                os.kill(worker["pid"], signal.SIGKILL)

        def elsewhere() -> bool:
            tasks = cluster.show("wc")["tasks"]
            return all(task["status"] == "running" and task["node"] != lost for task in tasks)

        eventually(elsewhere, 120, "the lost tasks on the other host", interval=0.5)

        # And when the database is back, so is everything else.
        postgres.start()
        eventually(
            lambda: cluster.cli("submit", *target, "--name", "other", "--token", "other"),
            180, "a submission", ignore=(Unavailable,),
        )  # fmt: skip
        eventually(lambda: cluster.cli("status")["healer"], 120, "an armed sensor", interval=1.0)
        assert cluster.cli("status")["dagster"]["state"] == "ok"


def emitted_in(document: dict[str, Any]) -> int:
    return sum(task["stats"]["emitted"] for task in document["tasks"])


def emitted(cluster: LocalCluster) -> int:
    return emitted_in(cluster.show("wc"))
