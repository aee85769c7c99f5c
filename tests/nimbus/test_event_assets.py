"""Assets of workers' events at a leading nimbus: by the stored code that the workers run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from storm_dagster.client.blobs import NimbusBlobClient
from storm_dagster.core.upgrade.selection import Selection
from storm_dagster.model.dagster_events import DagsterEvent, target_key
from storm_dagster.operations.live import lifecycle
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.nimbus_thread import NimbusThread
from storm_rigs.stage.records import WORD_COUNT, World

pytestmark = pytest.mark.zookeeper

CONF = {"topology.workers": 2, "topology.master.single.worker": True}
CLICKS = ["lake", "clicks"]
SALES = ["lake", "sales"]


class Road:
    """A leading nimbus, and a topology ``wc`` whose workers report."""

    def __init__(self, nimbus: NimbusThread, world: World) -> None:
        self.nimbus = nimbus
        self.world = world

    def upload(self, *assets: str) -> str:
        """An upload whose bolt ``count`` declares the assets; its handle."""
        count = dict(WORD_COUNT["bolts"]["count"])
        if assets:
            count["conf"] = {"topology.component.assets": list(assets)}
        topology = {**WORD_COUNT, "bolts": {**WORD_COUNT["bolts"], "count": count}}
        return self.world.upload(f"handle-{'-'.join(assets).replace('/', '.')}", topology, CONF)

    def update(self, *assets: str) -> None:
        """Replace the code by one that declares the assets, and run its workers."""
        former_id = self.world.named("wc").id
        for node, port in self.world.cluster.live_workers(former_id):
            # A topology without live workers is replaced at once.
            self.world.stop_worker(former_id, node, port)
        handle = self.upload(*assets)
        lifecycle.update(self.world.context(), "wc", token=handle, handle=handle)
        self.run()

    def run(self) -> None:
        """Run the workers of the current code."""
        self.world.run_workers(self.world.named("wc").id)

    def report(self, *keys: list[str], component: str | None = "count") -> dict[str, Any]:
        """Report an observation of each asset; the response, with keys in place of ids."""
        topology_id = self.world.named("wc").id
        worker = next(iter(self.world.cluster.live_workers(topology_id).values()))
        reporter = {} if component is None else {"component": component, "task": 4}
        events = [DagsterEvent.make("wc/count", "observation", key) for key in keys]
        response = httpx.post(
            f"{self.nimbus.url}/v1/topologies/wc/events",
            json={"events": [{**msgspec.to_builtins(event), **reporter} for event in events]},
            headers={"Authorization": f"Bearer {worker.token}"},
            timeout=60,
            trust_env=False,
        )
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        assert answer["stored"] == [event.id for event in events]
        assert (answer["refused"], answer["problem"]) == ({}, None)
        names = {event.id: event.asset for event in events}
        return {names[event_id]: text for event_id, text in answer["undefined"].items()}


@pytest.fixture
def road(stage: Stage) -> Iterator[Road]:
    nimbus = stage.nimbus().await_leading()
    with NimbusBlobClient(nimbus.url) as blobs:
        world = World(stage.cluster, blobs, dict(nimbus.conf.values))  # type: ignore[arg-type]
        world.supervisor("s1")
        made = Road(nimbus, world)
        world.submit("wc", topology=WORD_COUNT, conf=CONF)
        made.run()
        yield made


def test_an_undeclared_asset_is_stored_with_one_warning(road: Road) -> None:
    """A topology that the release before has stored declares none, and continues."""
    warnings = road.report(CLICKS, list(target_key("count", "postgres/orders")))
    assert warnings.keys() == {"lake/clicks", "@target/count/postgres/orders"}
    assert "is not declared by component 'count'" in warnings["lake/clicks"]
    assert "the next release refuses it" in warnings["lake/clicks"]
    assert road.report(CLICKS) == {}, "one warning an hour"
    assert road.report(CLICKS, component=None).keys() == {"lake/clicks"}
    assert len(road.report(*([f"lake{number}"] for number in range(60)))) < 60, "they are bounded"


def test_an_update_changes_the_declared_assets(road: Road) -> None:
    road.update("lake/clicks")
    assert road.report(CLICKS, SALES).keys() == {"lake/sales"}
    assert road.report(CLICKS, component="split").keys() == {"lake/clicks"}
    road.update("lake/sales")
    assert road.report(CLICKS, SALES).keys() == {"lake/clicks"}


def test_both_codes_of_a_gray_upgrade_declare(road: Road) -> None:
    road.update("lake/clicks")
    handle = road.upload("lake/sales")
    context = road.world.context()
    lifecycle.gray_upgrade(context, "wc", Selection(number=1), handle=handle, token="g")
    assert road.report(CLICKS, SALES, ["lake", "other"]).keys() == {"lake/other"}
