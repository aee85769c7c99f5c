"""The code of live topologies in nimbus's blob store: kept, whoever asks."""

from __future__ import annotations

import pytest

from storm_dagster.client.blobs import NimbusBlobClient
from storm_dagster.model.errors import Conflict, StormDagsterError
from storm_dagster.model.names import code_keys
from storm_dagster.operations.live import lifecycle
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper


def test_the_leader_keeps_the_code_of_a_live_topology(stage: Stage) -> None:
    nimbus = stage.nimbus().await_leading()
    cluster = StormClusterState.open(nimbus.conf)
    with NimbusBlobClient(nimbus.url) as blobs:
        world = World(cluster, blobs, dict(nimbus.conf.values))  # type: ignore[arg-type]
        world.supervisor("s1")
        topology_id = world.submit("wc")
        for key in code_keys(topology_id):
            content = blobs.read(key)
            with pytest.raises(Conflict, match="is alive"):
                blobs.delete(key)
            with pytest.raises(Conflict, match="is alive"):
                blobs.put(key, b"other code")
            # The same content repairs a damaged copy.
            assert blobs.put(key, content).key == key
            assert blobs.read(key) == content
        blobs.put("mine", b"1")
        blobs.delete("mine")
        with_newer_code = f"{topology_id}.7-stormjar.jar"
        blobs.put(with_newer_code, b"code of an upgrade that has not begun")
        blobs.delete(with_newer_code)
        lifecycle.kill(world.context(), "wc", wait_secs=0)
        with pytest.raises(StormDagsterError):
            blobs.read(code_keys(topology_id)[0])
    cluster.disconnect()
