"""Garbage goes, what is referenced stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from storm_dagster.model import paths
from storm_dagster.model.errors import Fenced, Unavailable
from storm_dagster.model.operation_record import TokenRecord
from storm_dagster.operations.live import cleaner, lifecycle
from storm_dagster.operations.live.cleaner import Inventory, clean, find_garbage
from storm_dagster.operations.submit import submission
from storm_rigs.stage.records import World

LIMITS = {"grace_secs": 60.0, "token_secs": 3600.0, "upload_secs": 3600.0}


def token(topology_id: str, published: bool = False) -> TokenRecord:
    return TokenRecord(topology_id=topology_id, name="wc", epoch=1, published=published)


def test_what_belongs_to_a_living_topology_stays() -> None:
    inventory = Inventory(
        blobs=("wc-1-1-stormjar.jar", "staging.t.record", "staging-of.wc", "my data"),
        nodes={paths.TASKS: ("wc-1-1",), paths.TASKERRORS: ("not an id",)},
        tokens={"t": token("wc-1-1", published=True)},
        topologies=("wc-1-1",),
        newest={"staging-of.wc": "t"},
    )
    garbage, _ = find_garbage(inventory, {"token t": -1e9}, boot_now=0.0, **LIMITS)
    assert garbage.blobs == garbage.nodes == garbage.tokens == () and garbage.waiting == 0


def test_garbage_waits_for_its_grace_time() -> None:
    inventory = Inventory(
        blobs=("wc-1-1-stormjar.jar",), nodes={paths.TASKS: ("wc-1-1",)}, tokens={}
    )
    garbage, memory = find_garbage(inventory, {}, boot_now=100.0, **LIMITS)
    assert garbage.waiting == 2 and garbage.blobs == ()
    garbage, memory = find_garbage(inventory, memory, boot_now=159.0, **LIMITS)
    assert garbage.waiting == 2
    garbage, memory = find_garbage(inventory, memory, boot_now=160.0, **LIMITS)
    assert garbage.blobs == ("wc-1-1-stormjar.jar",) and garbage.nodes == ("/tasks/wc-1-1",)


def test_a_token_pins_its_staging_and_upload_until_it_expires() -> None:
    inventory = Inventory(
        blobs=(
            "wc-1-1-stormjar.jar",
            "staging.t.record",
            "upload.h.archive",
            "upload.other.archive",
        ),
        nodes={},
        tokens={"t": token("wc-1-1")},
        handles={"t": "h"},
    )
    garbage, memory = find_garbage(inventory, {}, boot_now=0.0, **LIMITS)
    garbage, memory = find_garbage(inventory, memory, boot_now=3600.0 - 1, **LIMITS)
    assert garbage.blobs == () and garbage.tokens == ()
    garbage, memory = find_garbage(inventory, memory, boot_now=3600.0, **LIMITS)
    assert garbage.tokens == ("t",) and garbage.blobs == ("upload.other.archive",)
    garbage, memory = find_garbage(inventory, memory, boot_now=3660.0, **LIMITS)
    assert set(garbage.blobs) == {"wc-1-1-stormjar.jar", "staging.t.record", "upload.other.archive"}


def test_whose_an_upload_is_outlives_its_parts() -> None:
    """Without that a submission of a limited user would have no limits."""
    begun = Inventory(blobs=("upload.h.submitter",), nodes={}, tokens={})
    _, memory = find_garbage(begun, {}, boot_now=0.0, **LIMITS)
    sent = replace(begun, blobs=("upload.h.archive", "upload.h.conf", "upload.h.submitter"))
    garbage, memory = find_garbage(sent, memory, boot_now=3599.0, **LIMITS)
    garbage, memory = find_garbage(sent, memory, boot_now=3600.0, **LIMITS)
    assert garbage.blobs == ()
    garbage, memory = find_garbage(sent, memory, boot_now=3599.0 + 3600.0, **LIMITS)
    assert set(garbage.blobs) == {"upload.h.archive", "upload.h.conf"}
    _, memory = find_garbage(begun, memory, boot_now=7200.0, **LIMITS)
    garbage, _ = find_garbage(begun, memory, boot_now=7200.0 + 3600.0, **LIMITS)
    assert garbage.blobs == ("upload.h.submitter",)


def test_an_upload_that_waits_for_dagster_stays_for_a_week() -> None:
    """Its submitter was told that it is taken; there is no token before its run."""
    parts = ("upload.h.archive", "upload.h.conf", "upload.h.pending")
    inventory, memory = Inventory(blobs=(*parts, "upload.other.archive"), nodes={}, tokens={}), {}
    _, memory = find_garbage(inventory, memory, boot_now=0.0, **LIMITS)
    garbage, memory = find_garbage(inventory, memory, boot_now=6 * 86_400.0, **LIMITS)
    assert garbage.blobs == ("upload.other.archive",)
    garbage, _ = find_garbage(inventory, memory, boot_now=7 * 86_400.0, **LIMITS)
    assert set(garbage.blobs) == {*inventory.blobs}, "whatever was given up does not stay for ever"


def test_a_damaged_token_pins_its_staging() -> None:
    inventory = Inventory(blobs=("staging.t.record",), nodes={}, tokens={}, damaged_tokens=("t",))
    garbage, _ = find_garbage(inventory, {"blob staging.t.record": -1e9}, boot_now=0.0, **LIMITS)
    assert garbage.blobs == ()


def test_nodes_of_a_worker_that_still_lives_are_left() -> None:
    inventory = Inventory(
        blobs=(), nodes={paths.WORKERS: ("wc-1-1",)}, tokens={}, busy_workers=("wc-1-1",)
    )
    garbage, _ = find_garbage(
        inventory, {}, boot_now=0.0, grace_secs=0, token_secs=0, upload_secs=0
    )
    assert garbage.nodes == ()


@pytest.mark.zookeeper
def test_a_running_topology_survives_every_cleaning(world: World) -> None:
    topology_id = world.submit("wc")
    ctx = world.context()
    before = world.cluster.load_view().topologies[topology_id]
    keys = [key for key in world.blobs.keys("") if not key.startswith("upload.")]
    memory: dict[str, float] = {}
    for now in (0.0, 10_000.0, 20_000.0):
        report, memory = clean(ctx, memory, boot_now=now, grace_secs=0)
        assert report.nodes == report.tokens == () and not report.problems
    assert world.blobs.keys() == keys, "only the upload went"
    after = world.cluster.load_view().topologies[topology_id]
    assert (after.base_at, after.assignment_at) == (before.base_at, before.assignment_at)
    assert submission.publish_assignment(ctx, token="token-wc").already


@pytest.mark.zookeeper
def test_orphans_of_every_kind_go(world: World) -> None:
    topology_id = world.submit("wc")
    lifecycle.kill(world.context(), "wc", 0)
    for path in (
        paths.tasks(topology_id),
        paths.assignment(topology_id),
        paths.task_errors(topology_id, "split"),
        paths.workers(topology_id),
        paths.gray_upgrade(topology_id, "upgraded_workers"),
    ):
        world.cluster.state.mkdirs(path)
    world.blobs.put(f"{topology_id}-stormjar.jar", b"late")
    report, memory = clean(world.context(), boot_now=0.0, grace_secs=0)
    assert len(report.nodes) == 5 and report.blobs == (f"{topology_id}-stormjar.jar",)
    clean(world.context(), memory, boot_now=3600.0, grace_secs=0)
    assert world.cluster.state.get_children(paths.TOKENS) == []
    assert world.blobs.keys() == []


@pytest.mark.zookeeper
def test_a_deposed_cleaner_deletes_nothing(world: World) -> None:
    world.blobs.put("wc-1-1-stormjar.jar", b"x")
    old = world.context(epoch=world.context().current_epoch())
    world.lead("127.0.0.1:6628")
    with pytest.raises(Fenced):
        clean(old, boot_now=0.0, grace_secs=0)
    assert world.blobs.exists("wc-1-1-stormjar.jar")


@pytest.mark.zookeeper
def test_a_deposed_cleaner_ends_at_the_first_node(world: World) -> None:
    old = world.context(epoch=world.context().current_epoch())
    world.cluster.state.mkdirs(paths.tasks("wc-9-9"))
    world.lead("127.0.0.1:6628")
    with pytest.raises(Fenced):
        clean(old, boot_now=0.0, grace_secs=0)
    assert world.cluster.state.exists(paths.tasks("wc-9-9"))


@pytest.mark.zookeeper
def test_an_emptied_root_deletes_no_blob(world: World) -> None:
    """The wrong root, or a wiped ZooKeeper, is no order to delete code."""
    topology_id = world.submit("wc")
    epoch = world.context().current_epoch()
    for child in world.cluster.state.get_children("/"):
        world.cluster.state.delete_node(f"/{child}")
    with pytest.raises(Unavailable):
        clean(world.context(epoch=epoch), boot_now=0.0, grace_secs=0)
    assert world.blobs.exists(f"{topology_id}-stormjar.jar")


@pytest.mark.zookeeper
def test_backups_of_assignments_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaner, "_MAX_BACKUPS", 3)
    for name in ("old", "a", "b", "c", "d"):
        world.submit(name)
        if name != "a":
            lifecycle.kill(world.context(), name, 0)
        world.time += 86_400 * 26 if name == "old" else 3600
    memory: dict[str, float] = {}

    def kept() -> set[str]:
        nonlocal memory
        _, memory = clean(world.context(), memory, boot_now=0.0, grace_secs=0)
        return set(world.cluster.state.get_children(paths.ASSIGNMENTS_BAK))

    assert kept() == {"a", "b", "c", "d"}, "the newest three, and that of a topology that lives"
    world.time += 86_400 * 30 - 7200
    assert kept() == {"a", "c", "d"}, "thirty days old"


@pytest.mark.zookeeper
def test_a_spark_that_does_not_answer_keeps_no_topology(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    args = {"query": "m:f", "checkpoint": "/c", "path": "/p"}
    query = {"object": {"python": "storm_dagster.api.spark.query:SparkQuery", "args": args}}
    topology_id = world.submit(
        "wc",
        topology={"spouts": {"q": query}, "bolts": {}},
        conf={"topology.spark.remote": "sc://127.0.0.1:1"},
    )
    lifecycle.kill(world.context(), "wc", 0)
    assert world.blobs.keys(topology_id) == []
    assert f"queries of {topology_id} on Spark may still run: " in caplog.text
