"""Pruning of Dagster's history: our own old runs, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import dagster as dg
import pytest
from dagster.components.testing import create_defs_folder_sandbox

from storm_dagster import StormTopologyComponent, build_rebalance_schedule
from storm_dagster.defs import build_storm_defs
from storm_dagster.defs.observe import history
from storm_dagster.defs.observe.history import own_jobs, prune_runs
from storm_dagster.model.dagster_names import DagsterNames
from storm_rigs.stage.dagster_world import DagsterWorld

pytestmark = pytest.mark.dagster
NAMES = DagsterNames()
STAGE = dg.AssetKey(["storm", "active_topology"])


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as made:
        yield made


def ended(
    instance: dg.DagsterInstance,
    job_name: str,
    partition: str | None = None,
    tags: dict[str, str] | None = None,
) -> str:
    """A run that ended; with a partition, one that materialized a stage of that topology."""

    @dg.op(name=f"{job_name}_op")
    def op() -> None:
        if partition is not None:
            dg.OpExecutionContext.get().log_event(
                dg.AssetMaterialization(STAGE, partition=partition)
            )

    @dg.job(name=job_name, tags=tags)
    def job() -> None:
        op()

    return job.execute_in_process(instance=instance).run_id


@pytest.fixture(autouse=True)
def built() -> None:
    """What a code location builds when it is loaded."""
    build_storm_defs()


def left(instance: dg.DagsterInstance) -> set[str]:
    return {run.run_id for run in instance.get_runs()}


def tomorrow() -> datetime:
    return datetime.now(tz=timezone.utc) + timedelta(days=1)


def test_old_runs_of_ours_go_and_others_stay(
    sqlite: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_PAGE", 2)
    sqlite.add_dynamic_partitions("storm_topologies", ["wc"])
    theirs = ended(sqlite, "nightly")
    gone = [ended(sqlite, "submit_topology", "killed"), ended(sqlite, "submit_topology", "wc")]
    shown = ended(sqlite, "submit_topology", "wc")
    gone += [ended(sqlite, "clean_inbox") for _ in range(4)]
    elsewhere = ended(sqlite, "clean_inbox", tags={history.REPOSITORY_TAG: "__repository__@other"})
    unfinished = sqlite.create_run_for_job(
        build_storm_defs().resolve_job_def("clean_inbox"), status=dg.DagsterRunStatus.STARTED
    ).run_id
    assert prune_runs(sqlite, NAMES, datetime.now(tz=timezone.utc) - timedelta(days=1)) == 0
    here = {theirs, shown, elsewhere, unfinished}
    assert prune_runs(sqlite, NAMES, tomorrow(), repository="__repository__@storm") == 0
    assert prune_runs(sqlite, NAMES, tomorrow(), max_deleted=3) == 3
    assert left(sqlite) >= here
    prune_runs(sqlite, NAMES, tomorrow())
    assert left(sqlite) == here - {elsewhere}
    assert not left(sqlite) & set(gone)
    # What the topology's asset shows is as it was.
    newest = sqlite.fetch_materializations(
        dg.AssetRecordsFilter(STAGE, asset_partitions=["wc"]), limit=1
    ).records
    assert newest[0].run_id == shown
    # Another cluster's runs have other names.
    assert prune_runs(sqlite, DagsterNames("prod"), tomorrow()) == 0


def declared() -> dg.Definitions:
    """A code location with one declared topology, `wc`."""
    attributes = {"name": "wc", "target": "wc.py:WordCount", "schedule": {"deploy": "*/10 * * * *"}}
    contents = {"type": "storm_dagster.StormTopologyComponent", "attributes": attributes}
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(
            component_cls=StormTopologyComponent, defs_yaml_contents=contents
        )
        with sandbox.load_component_and_build_defs(defs_path=path) as (_, defs):
            return defs


@pytest.mark.long
def test_history_of_all_that_is_built_goes_that_of_declared_topologies_too(
    sqlite: dg.DagsterInstance,
) -> None:
    everything = dg.Definitions.merge(build_storm_defs(), declared())
    ask = build_rebalance_schedule(name="nightly_rebalance").job
    jobs = [*everything.resolve_all_job_defs(), ask]
    names = {job.name for job in jobs if job.name != "__ASSET_JOB"}
    assert names >= {"submit_topology", "clean_inbox", "ask_for_rebalance"}
    assert names >= {
        "deploy_declared",
        "kill_declared",
        "rebalance_declared",
        "submit_wc",
        "deploy_wc",
        "kill_wc",
    }
    theirs = ended(sqlite, "nightly")
    for name in sorted(names):
        ended(sqlite, name)
    assert prune_runs(sqlite, NAMES, tomorrow()) == len(names)
    assert left(sqlite) == {theirs}
    # Another cluster of the location has names of its own.
    assert not own_jobs(DagsterNames("prod")) & {"submit_topology", "ask_for_rebalance"}


@pytest.mark.zookeeper
def test_the_job_prunes_by_the_conf(world: DagsterWorld) -> None:
    world.instance.add_dynamic_partitions("storm_topologies", ["wc"])
    ended(world.instance, "clean_inbox")
    assert world.run("prune_history").success
    assert len(world.instance.get_runs()) == 2, "nothing is a month old yet"
