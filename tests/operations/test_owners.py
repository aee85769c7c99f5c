"""Whose topology a call means, and whose it stays."""

from __future__ import annotations

import dataclasses
import json

import pytest

from storm_dagster.model.errors import NotAuthorized
from storm_dagster.operations.context import topology_by_name
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.submit.staging import read_topology, upload_key
from storm_dagster.operations.submit.submission import stage_conf, update_differences
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper


def test_an_id_is_found_before_a_name(world: World) -> None:
    world.submit("wc")
    view = world.cluster.load_view()
    (mine,) = view.topologies.values()
    named = mine.base.model_copy(update={"name": mine.id})
    other = dataclasses.replace(mine, id="other-2-2", base=named)
    both = dataclasses.replace(view, topologies={other.id: other, mine.id: mine})
    assert topology_by_name(both, mine.id) is mine and topology_by_name(both, other.id) is other


def test_an_update_of_a_limited_user_keeps_the_owner(world: World) -> None:
    world.upload("h", conf={"topology.submitter.user": "root"})
    world.blobs.put(upload_key("h", "submitter"), b"alice")
    stage_conf(world.context(), name="wc", token="t", handle="h")
    staged, _ = read_topology(world.context(), "t")
    assert (staged["topology.submitter.user"], staged["topology.users"]) == ("alice", ["alice"])
    world.submit("wc", conf={"topology.submitter.user": "alice", "topology.users": ["alice"]})
    plain = json.loads(world.blobs.read(upload_key("h", "topology")))
    for part in ("conf", "code"):
        theirs = {"topology.users": ["mallory"]}
        world.upload(
            part,
            topology={**plain, "conf": theirs if part == "code" else {}},
            conf=theirs if part == "conf" else {},
        )
        world.blobs.put(upload_key(part, "submitter"), b"mallory")
        (running,) = world.cluster.load_view().topologies.values()
        with pytest.raises(NotAuthorized, match=r"'mallory' must not change topology\.users"):
            update_differences(world.context(), running, part)
        with pytest.raises(NotAuthorized):
            lifecycle.update(world.context(), "wc", token=f"t-{part}", handle=part)
    for source in (None, b"thrift"):
        handle = f"new-{source is None}"
        world.upload(handle, topology=plain)
        world.blobs.put(upload_key(handle, "submitter"), b"bob")
        if source:
            world.blobs.put(upload_key(handle, "source"), source)
        lifecycle.update(world.context(), "wc", token=handle, handle=handle)
        (running,) = world.cluster.load_view().topologies.values()
        conf, _ = read_topology(world.context(), handle)
        assert (conf["topology.submitter.user"], conf["topology.users"]) == ("alice", ["alice"])
