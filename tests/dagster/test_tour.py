"""The tour of the documents: a stock project whose batch asset starts because a bolt said so."""

from __future__ import annotations

import importlib
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import dagster as dg
import httpx
import msgspec
import pytest

from storm_dagster.defs.declared.events import EVENTS_SENSOR
from storm_dagster.defs.keys import PARTITIONS_NAME
from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_rigs.dagster.tour import REVENUE, SALES, Tour, write_stock_project
from storm_rigs.stage.dagster_world import DagsterWorld, leading_nimbus

pytestmark = pytest.mark.dagster

HOUR = "2025-01-02-10:00"
BEGIN_MS = int(datetime(2025, 1, 2, 10, tzinfo=timezone.utc).timestamp() * 1000)
OWNER = "shop:prod"


@pytest.fixture
def project(world: DagsterWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dg.Definitions:
    """The project's definitions, on the cluster of ``world``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "project"
    write_stock_project(folder, tmp_path / "lake", home=str(world.home), deployment="prod")
    monkeypatch.syspath_prepend(str(folder / "src"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        monkeypatch.delitem(sys.modules, name)
    return dg.load_from_defs_folder(path_within_project=folder)


def events_of_the_bolt() -> list[DagsterEvent]:
    """What the page's topology reports when two sales of an hour and one of the next have come."""
    sales = [
        [amount, BEGIN_MS + minute * 60_000] for amount, minute in ((30, 1), (12, 59), (5, 61))
    ]
    module = importlib.import_module("shop.defs.sales.sales_topology")
    with TopologyHarness(module.Sales, {"till": sales}, simulated=True) as harness:
        harness.advance(30)
        return list(harness.dagster_events)


def report(url: str, world: DagsterWorld, events: list[DagsterEvent]) -> None:
    """Report the events to the nimbus as a worker does."""
    topology_id = world.topology("sales").id
    worker = next(iter(world.cluster.live_workers(topology_id).values()))
    documents = [
        {**msgspec.to_builtins(event), "component": "complete_hour", "task": 2} for event in events
    ]
    response = httpx.post(
        f"{url}/v1/topologies/{topology_id}/events",
        json={"events": documents},
        headers={"Authorization": f"Bearer {worker.token}"},
        timeout=60,
    )
    assert response.status_code == 200, response.text


def store_tick(defs: dg.Definitions, instance: dg.DagsterInstance) -> None:
    """A tick of the sensor that pulls events, and what Dagster's daemon does with its result."""
    with dg.build_sensor_context(instance=instance, definitions=defs) as context:
        result = defs.resolve_sensor_def(EVENTS_SENSOR)(context)
    assert isinstance(result, dg.SensorResult)
    for event in result.asset_events:
        instance.report_runless_asset_event(event)


@pytest.mark.zookeeper
def test_the_event_of_a_bolt_requests_the_batch_asset_of_its_hour(
    world: DagsterWorld, project: dg.Definitions
) -> None:
    instance = world.instance
    cursor: Any = None

    def requested() -> set[str | None]:
        nonlocal cursor
        result = dg.evaluate_automation_conditions(project, instance, cursor=cursor)
        cursor = result.cursor
        return set(result.get_requested_partitions(REVENUE))

    instance.add_dynamic_partitions(PARTITIONS_NAME, ["sales"])
    conf = {"declared.code.version": "v1", "declared.owner": OWNER}
    assert world.submit("sales", conf=conf).success
    world.run_workers("sales")
    (world.home / "nimbus" / "n1").mkdir(parents=True)
    (world.home / "blobs").rename(world.home / "nimbus" / "n1" / "blobs")
    with leading_nimbus(world) as nimbus:
        assert requested() == set()
        report(nimbus.url, world, events_of_the_bolt())
        store_tick(project, instance)
    (record,) = instance.fetch_materializations(SALES, limit=10).records
    made = record.asset_materialization
    assert made is not None and made.partition == HOUR and made.metadata["sales"].value == 2
    assert requested() == {HOUR}
    assert requested() == set(), "once for each event"
    assert revenue_of(project, instance) == 42


def revenue_of(project: dg.Definitions, instance: dg.DagsterInstance) -> Any:
    """The result of the run that was requested."""
    job = dg.define_asset_job("hour", selection=[REVENUE], executor_def=dg.in_process_executor)
    result = (
        dg.Definitions.merge(project, dg.Definitions(jobs=[job]))
        .resolve_job_def("hour")
        .execute_in_process(instance=instance, partition_key=HOUR)
    )
    (made,) = result.asset_materializations_for_node("lake__revenue")
    return made.metadata["revenue"].value


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_a_batch_asset_starts_because_a_bolt_said_so(tmp_path: Path) -> None:
    """The page, typed as it stands: real cluster, `dg dev` with an instance of its own."""
    with Tour(tmp_path) as tour:
        dagster = tour.dagster
        assert tour.reported_hours() == []
        deploy = dagster.launch("deploy_sales")
        dagster.wait_success(deploy)
        hours = tour.await_batch()
        assert hours == sorted(set(hours)), "each hour once, in order"
        made = [run for run in dagster.instance.get_runs() if run.run_id != deploy]
        assert made and all(
            run.tags["dagster/from_automation_condition"] == "true" for run in made
        ), "nobody launched them"
