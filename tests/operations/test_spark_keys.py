"""A topology that runs with a Spark key without effect: it goes on, and its next version is
refused.
"""

from __future__ import annotations

import pytest

from storm_dagster.api import SparkBolt, TopologyBuilder
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.submit.submission import update_differences
from storm_rigs.stage.records import World

REMOTE = "sc://spark1:15002"


def topology() -> dict[str, object]:
    builder = TopologyBuilder("prices")
    builder.set_spout("lines", "wc.spouts:Lines", outputs=["text"])
    builder.set_bolt("totals", SparkBolt, inputs="lines", args={"function": "prices:totals"})
    return builder.build().model_dump(mode="json")


def test_a_topology_with_a_hidden_master_goes_on_until_its_update(world: World) -> None:
    # As a release stored it that did not check these keys.
    world.submit("prices", topology=topology(), conf={"spark.master": "yarn"})
    world.conf["spark.remote"] = REMOTE
    (running,) = world.cluster.load_view().topologies.values()
    lifecycle.restart(world.context(), "prices")
    (after,) = world.cluster.load_view().topologies.values()
    assert after.base.status == "ACTIVE"

    world.upload("new", topology=topology())
    refused = "spark.master 'yarn' .* no effect beside spark.remote"
    with pytest.raises(InvalidTopology, match=refused):
        update_differences(world.context(), after, "new")
    with pytest.raises(InvalidTopology, match=refused):
        lifecycle.update(world.context(), "prices", token="t2", handle="new")
    (still,) = world.cluster.load_view().topologies.values()
    assert still.id == after.id and still.code_dir == running.code_dir

    world.upload("dropped", topology=topology(), conf={"spark.master": None})
    lifecycle.update(world.context(), "prices", token="t3", handle="dropped")
    (new,) = world.cluster.load_view().topologies.values()
    assert new.id != after.id
