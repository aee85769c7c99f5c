"""Automation conditions below a declared topology, a bolt, a table and a topic: real definitions,
a real instance, and Dagster's own evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from storm_dagster.defs.declared.assets import topology_assets
from storm_dagster.defs.declared.checks import (
    FreshnessAttributes,
    ScheduleAttributes,
    TopologyAlerts,
)
from storm_dagster.defs.declared.declaration import (
    Declaration,
    LoadedFiles,
    RunningTopology,
    describe_declared,
)
from storm_dagster.defs.declared.parts import (
    CompleteParts,
    part_keys,
    part_materializations,
    source_keys,
)
from storm_dagster.defs.declared.runs import topology_definitions
from storm_dagster.defs.declared.sensor import DECLARED_TAG, shared_definitions
from storm_dagster.defs.declared.targets import (
    merge_reports,
    target_path,
    translated_event,
    translated_target_key,
)
from storm_dagster.defs.declared.topology import DeclaredSnapshot, DeclaredTopology
from storm_dagster.defs.resources.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.resources.processes import NimbusResource
from storm_dagster.model.dagster_events import DagsterEvent, target_key

pytestmark = pytest.mark.dagster

CODE = """
from storm_dagster.api import Topology
from storm_dagster.connectors import KafkaSource, PostgresSink, SinkBolt, SourceSpout


class Orders(SourceSpout):
    source = KafkaSource("orders")
    outputs = ["order"]


class Table(SinkBolt):
    sink = PostgresSink("orders")


class Shop(Topology):
    orders = Orders.spec()
    table = Table.spec(inputs=[orders])
"""
SHOP = dg.AssetKey(["topologies", "shop"])
PLACES = {
    "topology": SHOP,
    "bolt": dg.AssetKey([*SHOP.path, "table"]),
    "table": dg.AssetKey([*SHOP.path, "table", "postgres", "orders"]),
}
SPOUT = dg.AssetKey([*SHOP.path, "orders"])
START = datetime(2026, 11, 29, 10, 30, tzinfo=timezone.utc)
FIRST = RunningTopology("shop-1-1", "ACTIVE", 1, {}, "v1")
SECOND = RunningTopology("shop-2-1", "ACTIVE", 1, {}, "v2")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> DeclaredTopology:
    folder = tmp_path_factory.mktemp("shop")
    (folder / "shop_code.py").write_text(CODE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        return declared(folder)


def declared(folder: Path) -> DeclaredTopology:
    declaration = Declaration("shop", f"{folder}/shop_code.py:Shop")
    described = describe_declared(declaration)
    assert described.problem is None, described.problem
    common: dict[str, Any] = {"group_name": "g", "owners": [], "tags": {}}
    assets = topology_assets(
        declaration,
        described,
        prefix=["topologies"],
        description=None,
        kinds=["storm"],
        deps=[],
        automation_condition=None,
        **common,
    )
    specs = [asset.spec for asset in assets]
    return DeclaredTopology(
        declaration=declaration,
        described=described,
        files=LoadedFiles(declaration, described),
        identifier="shop",
        specs=[specs[0].merge_attributes(tags=DECLARED_TAG), *specs[1:]],
        components={
            asset.component: asset.spec.key
            for asset in assets
            if asset.component and asset.target is None
        },
        targets={
            target_path(asset.component, asset.target): asset.spec.key
            for asset in assets
            if asset.component and asset.target is not None
        },
        policy="hot",
        batch={},
        alerts=TopologyAlerts(),
        freshness=FreshnessAttributes(),
        schedule=ScheduleAttributes(),
        zookeeper=ZooKeeperResource(home=str(folder)),
        blobstore=BlobStoreResource(home=str(folder), local_dir=str(folder / "blobs")),
        nimbus=NimbusResource(home=str(folder)),
    )


class Below:
    """A batch asset below ``place`` with a condition, and what Dagster requests of it."""

    def __init__(
        self,
        shop: DeclaredTopology,
        instance: dg.DagsterInstance,
        place: dg.AssetKey,
        condition: dg.AutomationCondition,
        partitions: dg.PartitionsDefinition | None = None,
    ) -> None:
        @dg.asset(deps=[place], automation_condition=condition, partitions_def=partitions)
        def report() -> None: ...

        self.key = report.key
        self.shop, self.instance = shop, instance
        self.defs = dg.Definitions.merge(
            dg.Definitions(assets=[report]),
            topology_definitions(shop, own_jobs=False),
            shared_definitions({"shop": shop}),
        )
        self.time = START
        self.cursor: Any = None

    def requested(self, minutes: float = 1.0) -> int:
        """Requests in a tick of the automation sensor, so many minutes later.

        Runs that are requested succeed at once.
        """
        self.time += timedelta(minutes=minutes)
        result = dg.evaluate_automation_conditions(
            self.defs, self.instance, cursor=self.cursor, evaluation_time=self.time
        )
        self.cursor = result.cursor
        for partition in result.get_requested_partitions(self.key):
            self.report(dg.AssetMaterialization(self.key, partition=partition))
        return result.total_requested

    def report(self, *events: Any) -> None:
        for event in events:
            self.instance.report_runless_asset_event(event)

    def deployed(self, actual: RunningTopology) -> None:
        """The events of a deploy, as run and sensor store them."""
        self.report(
            *part_materializations(self.shop, actual),
            dg.AssetMaterialization(SHOP, tags=actual.version_tags),
        )

    def observed(self) -> None:
        """Observations alone, as a release before stored them."""
        self.report(*[dg.AssetObservation(key) for key in (SHOP, *part_keys(self.shop))])

    def reported(self) -> None:
        """A report of the sink on its table."""
        event = DagsterEvent.make("shop/table", "materialization", TABLE_REPORT)
        key = translated_target_key(self.shop, event.key)
        assert key is not None
        self.report(dg.AssetMaterialization(key))


TABLE_REPORT = target_key("table", "postgres/orders")


@pytest.fixture
def below(shop: DeclaredTopology, instance: dg.DagsterInstance) -> Callable[..., Below]:
    return lambda place, condition, **more: Below(shop, instance, PLACES[place], condition, **more)


@pytest.mark.parametrize("place", PLACES)
def test_eager_below_each_place_is_requested_once_for_each_deploy(
    below: Callable[..., Below], place: str
) -> None:
    asset = below(place, dg.AutomationCondition.eager())
    assert asset.requested() == 0
    # The control: an asset with observations alone stays missing.
    asset.observed()
    assert [asset.requested(), asset.requested()] == [0, 0]
    asset.deployed(FIRST)
    assert [asset.requested(), asset.requested()] == [1, 0]
    asset.deployed(SECOND)
    assert [asset.requested(), asset.requested()] == [1, 0]
    asset.reported()
    assert [asset.requested(), asset.requested()] == [int(place == "table"), 0]


@pytest.mark.parametrize("place", PLACES)
def test_on_cron_below_each_place_needs_an_update_after_the_tick(
    below: Callable[..., Below], place: str
) -> None:
    asset = below(place, dg.AutomationCondition.on_cron("0 * * * *"))
    asset.requested()
    asset.observed()
    assert [asset.requested(60), asset.requested()] == [0, 0]
    asset.deployed(FIRST)
    assert [asset.requested(), asset.requested()] == [1, 0]
    # The next tick alone is not enough: below a topology or a bolt only a deploy is an update.
    assert [asset.requested(60), asset.requested()] == [0, 0]
    asset.reported()
    assert [asset.requested(), asset.requested()] == [int(place == "table"), 0]


@pytest.mark.parametrize("place", PLACES)
def test_on_cron_without_the_stream_is_requested_at_each_tick(
    below: Callable[..., Below], place: str
) -> None:
    stream = dg.AssetSelection.assets(PLACES[place])
    asset = below(place, dg.AutomationCondition.on_cron("0 * * * *").ignore(stream))
    asset.requested()
    assert [asset.requested(60), asset.requested(), asset.requested(60)] == [1, 0, 1]


@pytest.mark.parametrize("place", PLACES)
def test_on_missing_below_each_place_requests_new_partitions(
    below: Callable[..., Below], place: str
) -> None:
    hours = dg.HourlyPartitionsDefinition("2026-11-29-08:00")
    asset = below(place, dg.AutomationCondition.on_missing(), partitions=hours)
    asset.requested()
    asset.observed()
    # The partition of a new hour waits for the stream, which is missing.
    assert [asset.requested(60), asset.requested()] == [0, 0]
    asset.deployed(FIRST)
    assert [asset.requested(), asset.requested()] == [1, 0]
    assert [asset.requested(60), asset.requested()] == [1, 0]


def running(actual: RunningTopology) -> DeclaredSnapshot:
    page = dg.MetadataValue.url("http://nimbus/topologies/shop")
    return DeclaredSnapshot({}, actual, details={"page": page})


def test_parts_and_topics_without_a_materialization_get_one(
    shop: DeclaredTopology, instance: dg.DagsterInstance
) -> None:
    """As after an upgrade: the release before materialized the topology alone."""

    topic = dg.AssetKey(["kafka", "orders"])

    @dg.asset(key=topic)
    def made_here() -> None: ...

    assert source_keys(shop) == [topic]
    defs = Below(shop, instance, SHOP, dg.AutomationCondition.eager()).defs
    parts = CompleteParts()
    with dg.build_sensor_context(instance=instance, definitions=defs) as context:
        missing = parts.missing(context, shop, running(FIRST))
        assert {event.asset_key for event in missing} == {*part_keys(shop), topic}
        assert {(event.tags or {})["dagster/data_version"] for event in missing} == {"shop-1-1.v1"}
        pages = {str(event.metadata["page"].value) for event in missing}
        assert pages == {"http://nimbus/topologies/shop"}
        for event in missing:
            instance.report_runless_asset_event(event)
        assert parts.missing(context, shop, running(FIRST)) == []
        # A new version is not one of a topic.
        assert parts.missing(context, shop, running(SECOND)) == []
    # An asset that a run of this location makes is left to that run.
    own = dg.Definitions.merge(defs, dg.Definitions(assets=[made_here]))
    with (
        dg.DagsterInstance.ephemeral() as other,
        dg.build_sensor_context(instance=other, definitions=own) as context,
    ):
        missing = CompleteParts().missing(context, shop, running(FIRST))
        assert {event.asset_key for event in missing} == {*part_keys(shop)}
    # So is one that a translator has given another key.
    renamed = [
        spec.replace_attributes(deps=[SHOP, "mine"]) if spec.key == SPOUT else spec
        for spec in shop.specs
    ]
    assert source_keys(replace(shop, specs=renamed)) == []


def test_a_report_is_translated_and_reports_of_tasks_are_one(shop: DeclaredTopology) -> None:
    renamed = replace(
        shop, targets={("table", "postgres", "orders"): dg.AssetKey(["mart", "orders"])}
    )
    assert translated_target_key(renamed, TABLE_REPORT) == dg.AssetKey(["mart", "orders"])
    assert translated_target_key(renamed, target_key("gone", "postgres/orders")) is None
    assert translated_target_key(renamed, ["lake", "clicks"]) is None
    event = DagsterEvent.make("shop/table", "materialization", TABLE_REPORT)
    translated = translated_event(renamed, event)
    assert translated is not None and translated.asset == "mart/orders"
    assert translated_event(replace(shop, targets={}), event) is None
    clicks = DagsterEvent.make("shop/table", "materialization", "lake/clicks")
    assert translated_event(shop, clicks) is clicks

    def report(task: int, rows: int, **more: Any) -> DagsterEvent:
        metadata = {
            "rows": rows,
            "tasks": 1,
            "task": task,
            "since": f"2026-11-29T10:{task}",
            **more,
        }
        return DagsterEvent.make("shop/table", "materialization", TABLE_REPORT, metadata=metadata)

    users = DagsterEvent.make("shop/table", "materialization", "lake/clicks")
    merged = merge_reports([report(11, 5, newest_event_time="b"), users, report(10, 7), users])
    assert list(merged) == [1, 2, 3] and merged[1] == merged[3] == users
    assert merged[2].metadata == {
        "rows": 12,
        "tasks": 2,
        "since": "2026-11-29T10:10",
        "newest_event_time": "b",
    }
