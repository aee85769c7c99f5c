"""The stream of the example completes hours, and its hourly asset is requested for each of them."""

from __future__ import annotations

import importlib.util
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import dagster as dg
import pytest

from storm_dagster.api import TopologyBuilder
from storm_dagster.api.spouts import Spout
from storm_dagster.testing.topology_harness import TopologyHarness

pytestmark = pytest.mark.dagster

DEFS = Path(__file__).parents[2] / "examples" / "streams_and_batch" / "defs"


def module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    return found


class Landed(Spout):
    outputs = ["at"]


def at(text: str) -> list[int]:
    return [int(datetime.fromisoformat(f"2026-11-21T{text}+00:00").timestamp() * 1000)]


def test_an_hour_is_reported_a_minute_after_its_end_and_once() -> None:
    clicks = module("clicks", DEFS / "clicks" / "clicks.py")
    builder = TopologyBuilder("clicks")
    builder.set_spout("landed", Landed)
    builder.set_bolt("hours", clicks.Hours, inputs="landed")
    given = [
        at("10:30:00"),
        at("11:00:30"),
        at("11:00:59"),
        at("11:01:00"),
        at("11:40:00"),
        at("10:59:00"),
        at("13:05:00"),
    ]
    with TopologyHarness(builder.build(), {"landed": given}) as harness:
        result = harness.run()
        assert len(result.acked["landed"]) == len(given) and result.errors == []
        events = harness.dagster_events
    assert [(one.asset, one.partition) for one in events] == [
        ("lake/clicks", "2026-11-21-09:00"),
        ("lake/clicks", "2026-11-21-10:00"),
        ("lake/clicks", "2026-11-21-12:00"),
    ]


def test_the_hourly_asset_is_requested_for_every_hour_that_the_stream_completes() -> None:
    batch = module("batch", DEFS / "batch.py")
    defs = dg.Definitions(
        assets=[batch.clicks, batch.pages_by_hour],
        resources={"storm_spark": dg.ResourceDefinition.none_resource()},
    )
    now = datetime.now(tz=timezone.utc)
    hours = [(now - timedelta(hours=back)).strftime("%Y-%m-%d-%H:00") for back in (1, 5)]

    def requested(instance: dg.DagsterInstance, cursor: Any) -> tuple[set[str], Any]:
        result = dg.evaluate_automation_conditions(defs, instance, cursor=cursor)
        return set(result.get_requested_partitions(batch.PAGES_BY_HOUR) or ()), result.cursor

    with dg.DagsterInstance.ephemeral() as instance:
        asked, cursor = requested(instance, None)
        assert asked == set()
        for hour in hours:
            # What nimbus has Dagster store for `self.dagster.materialize`.
            instance.report_runless_asset_event(
                dg.AssetMaterialization(batch.CLICKS, partition=hour)
            )
        asked, cursor = requested(instance, cursor)
        assert asked == set(hours)
        asked, cursor = requested(instance, cursor)
        assert asked == set()
