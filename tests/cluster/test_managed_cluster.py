"""A code location that brings its own cluster: a run starts it where none runs, sensors never."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from storm_dagster import build_storm_defs
from storm_dagster.defs.keys import PARTITIONS_NAME
from storm_dagster.host.endpoints import ClusterFile
from storm_dagster.testing.cluster import LocalCluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.dagster,
    pytest.mark.long,
    pytest.mark.timeout(900),
]

WORD_COUNT = Path(__file__).parents[2] / "examples" / "wordcount.py"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """Not started here. Nothing but the definitions may know where it is."""
    monkeypatch.delenv("STORM_DAGSTER_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    made = LocalCluster(tmp_path / "home")
    yield made
    made.stop()


def test_a_run_starts_it_where_none_runs_and_a_sensor_never(cluster: LocalCluster) -> None:
    defs = build_storm_defs(home=str(cluster.home), spawn=True, tick_secs=0.0)
    with dg.DagsterInstance.ephemeral() as instance:

        def run(
            job: str, partition: str | None = None, **config: object
        ) -> dg.ExecuteInProcessResult:
            op = "storm__topology_conf" if job == "submit_topology" else f"{job}_op"
            return defs.resolve_job_def(job).execute_in_process(
                instance=instance,
                run_config={"ops": {op: {"config": config}}},
                partition_key=partition,
                raise_on_error=False,
            )

        def tick() -> None:
            with dg.build_sensor_context(
                instance=instance, definitions=defs, resources=dict(defs.resources or {})
            ) as context:
                defs.resolve_sensor_def("supervisor_sensor")(context)

        tick()
        assert not cluster.home.exists(), "a sensor starts nothing"

        instance.add_dynamic_partitions(PARTITIONS_NAME, ["wc"])
        conf = {"topology.workers": 2, "wordcount.lines.per.second": 20}
        assert run("submit_topology", "wc", target=str(WORD_COUNT), conf=conf).success
        assert len(cluster.wait_running("wc", 120)["workers"]) == 2

        cluster.stop()
        assert ClusterFile.read(cluster.home) is None and not cluster.processes()
        tick()
        assert not cluster.processes(), "what somebody stopped stays stopped"

        # The same HOME again: its topology comes back with it.
        assert run("activate_topology", name="wc").success
        supervisors = cluster.endpoints.supervisors
        assert [len(supervisor.ports) for supervisor in supervisors] == [4, 4]
        cluster.wait_running("wc", 120)
        assert run("kill_topology", name="wc", wait_secs=0).success
