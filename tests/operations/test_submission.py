"""Six stages end in one running topology, or in nothing."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from storm_dagster.core.invariants.rules import violations
from storm_dagster.model import paths
from storm_dagster.model.errors import (
    AlreadyAlive,
    Conflict,
    Corrupt,
    Fenced,
    InvalidRequest,
    InvalidTopology,
    NotAlive,
    Unavailable,
)
from storm_dagster.model.names import code_key, conf_key, jar_key
from storm_dagster.model.ranges import decode_ranges
from storm_dagster.model.removed_keys import REMOVED_KEYS
from storm_dagster.model.slot import Slot
from storm_dagster.model.topology import decode_topology
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.live.cleaner import clean
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.operations.read.inspection import take_snapshot
from storm_dagster.operations.submit import submission
from storm_dagster.operations.submit.staging import (
    read_client_token,
    read_record,
    staging_key,
    upload_key,
)
from storm_rigs.operations.acting import submit
from storm_rigs.operations.archives import pack_archive
from storm_rigs.stage.records import WORD_COUNT, World

pytestmark = pytest.mark.zookeeper


def visible(world: World) -> dict[str, str]:
    return {
        part.base.name: part.base.status for part in world.cluster.load_view().topologies.values()
    }


def test_a_submission_ends_active_with_every_task_placed(world: World) -> None:
    topology_id = world.submit("wc", conf={"topology.workers": 2})
    assert topology_id == "wc-1-1700000000"
    topology = world.cluster.load_view().topologies[topology_id]
    assert topology.base.status == topology.base.wanted_status == "ACTIVE"
    keys = [jar_key(topology_id), conf_key(topology_id), code_key(topology_id)]
    assert topology.assignment is not None
    assert topology.assignment.code == {key: world.blobs.meta(key).sha256 for key in keys}
    assert topology.base.executors == {
        "split": 2,
        "count": 2,
        "__acker": 1,
        "__topology_master": 1,
        "lines": 1,
    }
    assert world.tasks().component_of() == {
        1: "split",
        2: "split",
        3: "count",
        4: "count",
        5: "__acker",
        6: "__topology_master",
        7: "lines",
    }
    assert sorted(world.assignment().task_slots()) == [1, 2, 3, 4, 5, 6, 7]
    assert len(world.assignment().workers) == 2
    assert world.beats().topology_master == 6
    assert world.blobs.read(jar_key(topology_id)) == pack_archive("archive")
    for path in (
        paths.task_errors(topology_id),
        paths.gray_upgrade(topology_id),
        paths.workers(topology_id),
        paths.assignment_backup("wc"),
    ):
        assert world.cluster.state.exists(path), path


def test_an_inactive_submission_stays_inactive(world: World) -> None:
    topology_id = world.submit("wc", inactive=True)
    base = world.cluster.load_view().topologies[topology_id].base
    assert (base.status, base.wanted_status) == ("INACTIVE", "INACTIVE")


def test_nothing_is_visible_before_publication(world: World) -> None:
    ctx = world.context()
    handle = world.upload("h1")
    submission.stage_conf(ctx, name="wc", token="t1", handle=handle)
    submission.stage_code(ctx, token="t1")
    submission.stage_tasks(ctx, token="t1")
    submission.stage_assignment(ctx, token="t1")
    assert visible(world) == {}
    assert world.cluster.state.find_children(paths.ASSIGNMENTS) == []
    report = submission.publish_assignment(ctx, token="t1")
    assert report.status == "INACTIVE"
    assert visible(world) == {"wc": "INACTIVE"}


def stage(world: World, token: str) -> None:
    """The stages of a submission of ``wc`` before it is published."""
    ctx = world.context()
    submission.stage_conf(ctx, name="wc", token=token, handle=world.upload(f"handle-{token}"))
    submission.stage_code(ctx, token=token)
    submission.stage_tasks(ctx, token=token)
    submission.stage_assignment(ctx, token=token)


def staged_placement(world: World, token: str) -> dict[str, Any]:
    """The placement as it is staged."""
    return json.loads(world.blobs.read(staging_key(token, "placement")))


def test_the_workers_that_are_staged_are_those_of_the_assignment(world: World) -> None:
    stage(world, "t1")
    (placement,) = staged_placement(world, "t1")["result"]["placements"]
    assignment = submission.publish_assignment(world.context(), token="t1").assignment
    written = world.cluster.state.get_data_with_version(paths.assignment(assignment.topology_id))
    assert written is not None
    assert placement["workers"] == json.loads(written[0])["workers"]


def as_a_former_release(document: dict[str, Any]) -> dict[str, Any]:
    """A staged placement as the release before staged it: task ids one by one, no schema number."""
    for placement in document["result"]["placements"]:
        kept = placement.pop("kept")
        placement["workers"] = [
            {
                **worker,
                "tasks": list(decode_ranges(worker["tasks"])),
                "kept": Slot(worker["node"], worker["port"]).key in kept,
            }
            for worker in placement["workers"]
        ]
    del document["v"]
    return document


def test_a_placement_that_a_former_release_staged_is_published(world: World) -> None:
    stage(world, "t1")
    staged = staged_placement(world, "t1")
    former = as_a_former_release(staged_placement(world, "t1"))
    assert former["result"]["placements"][0]["workers"][0]["tasks"] == [1, 2, 3, 4, 5, 6, 7]
    world.blobs.put(staging_key("t1", "placement"), json.dumps(former).encode())
    ctx = world.context()
    report = submission.publish_assignment(ctx, token="t1")
    assert report.replanned == 0
    workers = [worker.model_dump(mode="json") for worker in report.assignment.workers]
    assert workers == staged["result"]["placements"][0]["workers"]
    assert submission.stage_assignment(ctx, token="t1").placement == report.placement


def test_a_damaged_placement_of_a_former_release_is_named(world: World) -> None:
    stage(world, "t1")
    former = as_a_former_release(staged_placement(world, "t1"))
    del former["result"]["placements"][0]["workers"][0]["tasks"]
    world.blobs.put(staging_key("t1", "placement"), json.dumps(former).encode())
    with pytest.raises(Corrupt, match="materialize storm/assignment again"):
        submission.publish_assignment(world.context(), token="t1")
    assert visible(world) == {}


def test_repeating_with_the_same_token_gives_the_same_topology(world: World) -> None:
    ctx = world.context()
    first = world.submit("wc", "t1")
    before = world.cluster.load_view()
    world.time += 100
    assert world.submit("wc", "t1") == first
    after = world.cluster.load_view()
    assert after.topologies[first].base_at == before.topologies[first].base_at
    assert after.assignments_version == before.assignments_version
    assert submission.publish_assignment(ctx, token="t1").already


def test_a_repetition_never_replaces_the_code_that_runs(world: World) -> None:
    topology_id = world.submit("wc", "t1")
    world.upload("other", archive=b"something else")
    ctx = world.context()
    report = submission.stage_conf(ctx, name="wc", token="t1", handle="other")
    assert report.published
    submission.stage_code(ctx, token="t1")
    assert world.blobs.read(jar_key(topology_id)) == pack_archive("archive")


def test_a_late_repetition_does_not_bring_a_killed_topology_back(world: World) -> None:
    world.submit("wc", "t1")
    lifecycle.kill(world.context(), "wc", 0)
    with pytest.raises(Conflict, match="new token"):
        submission.stage_conf(world.context(), name="wc", token="t1", handle="handle-t1")
    assert visible(world) == {}
    assert world.submit("wc", "t2").startswith("wc-2-")


def test_a_name_in_use_is_refused_before_anything_is_stored(world: World) -> None:
    world.submit("wc", "t1")
    handle = world.upload("h2")
    before = world.blobs.keys()
    with pytest.raises(AlreadyAlive, match="wc-1-"):
        submission.stage_conf(world.context(), name="wc", token="t2", handle=handle)
    assert world.blobs.keys() == before
    assert read_client_token(world.context(), "t2") is None


def test_names_with_dots_do_not_collide(world: World) -> None:
    world.submit("aXb", "t1")
    world.submit("a.b", "t2")
    assert visible(world) == {"aXb": "ACTIVE", "a.b": "ACTIVE"}


def test_a_name_taken_between_the_stages_is_refused_at_publication(world: World) -> None:
    ctx = world.context()
    submission.stage_conf(ctx, name="wc", token="slow", handle=world.upload("h1"))
    submission.stage_code(ctx, token="slow")
    submission.stage_tasks(ctx, token="slow")
    submission.stage_assignment(ctx, token="slow")
    world.submit("wc", "fast")
    with pytest.raises(AlreadyAlive, match="came first"):
        submission.publish_assignment(ctx, token="slow")
    assert len(world.cluster.load_view().topologies) == 1


def test_an_invalid_topology_leaves_nothing(world: World) -> None:
    broken = {"spouts": {}, "bolts": {}}
    with pytest.raises(InvalidTopology, match="no spout"):
        world.submit("wc", "t1", topology=broken)
    assert read_client_token(world.context(), "t1") is None
    assert [key for key in world.blobs.keys("") if not key.startswith("upload.")] == []


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"topology.workers": 0}, "at least 1"),
        ({"topology.acker.executors": -1}, "at least 0"),
        ({"topology.wrokers": 2}, "did you mean 'topology.workers'"),
        ({"storm.local.dir": "/elsewhere"}, "storm.local.dir"),
        (["not", "a", "map"], "must be a map"),
    ],
)
def test_a_wrong_conf_is_refused(world: World, conf: Any, message: str) -> None:
    with pytest.raises(InvalidTopology, match=message):
        world.submit("wc", conf=conf)


def test_unknown_keys_are_warnings_for_thrift(world: World) -> None:
    ctx = world.context()
    handle = world.upload("h1", conf={"topology.kryo.register": []})
    world.blobs.put("upload.h1.source", b"thrift")
    report = submission.stage_conf(ctx, name="wc", token="t1", handle=handle)
    assert len(report.warnings) == 1 and "topology.kryo.register" in report.warnings[0]
    # A later stage run reads what is staged, where the key still stands.
    assert "topology.kryo.register" in report.conf
    submission.stage_conf(ctx, name="wc", token="t1", handle=None)


def test_a_key_of_an_earlier_release_is_a_warning_of_the_submission(world: World) -> None:
    handle = world.upload("h1", conf=dict.fromkeys(REMOVED_KEYS, "old"))
    report = submission.stage_conf(world.context(), name="wc", token="t1", handle=handle)
    assert len(report.warnings) == len(REMOVED_KEYS)
    for key, remedy in REMOVED_KEYS.items():
        assert any(key in warning and remedy in warning for warning in report.warnings), key


# A number that JSON writers write in different ways.
LARGE = {"lines": {"object": {"python": "wc.spouts:Lines", "args": {"most": 1e22}}}}


@pytest.mark.parametrize(("own", "unchanged"), [({}, True), ({"topology.debug": True}, False)])
def test_each_content_is_stored_once(
    world: World, monkeypatch: pytest.MonkeyPatch, own: Any, unchanged: bool
) -> None:
    """Staged and final keys name what is there already: only what normalization changes is stored
    beside the upload.
    """
    uploaded = decode_topology(json.dumps({"name": "wc", "conf": own, "spouts": LARGE})).to_json()
    handle = world.upload("h", json.loads(uploaded), {"topology.workers": 2})
    world.blobs.put(upload_key("h", "topology"), uploaded)
    sent: list[str] = []
    put = world.blobs.put
    monkeypatch.setattr(
        world.blobs, "put", lambda key, raw, **more: (sent.append(key), put(key, raw, **more))[1]
    )
    submit(world.context(), name="wc", token="t", handle=handle)
    topology_id = read_record(world.context(), "t").topology_id

    metas = {meta.key: meta for meta in world.blobs.list()}
    same: dict[str, set[str]] = {}
    for key, meta in metas.items():
        same.setdefault(meta.sha256, set()).add(key)
    topologies = {staging_key("t", "topology"), code_key(topology_id)}
    assert {frozenset(keys) for keys in same.values() if len(keys) > 1} == {
        frozenset({upload_key("h", "archive"), jar_key(topology_id)}),
        frozenset({staging_key("t", "conf"), conf_key(topology_id)}),
        frozenset({*topologies, upload_key("h", "topology")} if unchanged else topologies),
    }
    on_disk = [path.stat().st_size for path in (world.blobs.directory / "objects").iterdir()]
    assert sum(on_disk) == sum(metas[min(keys)].size for keys in same.values()) and len(
        on_disk
    ) == len(same)
    # And none of them is handed to the store a second time.
    assert not {jar_key(topology_id), conf_key(topology_id), code_key(topology_id)} & set(sent)
    assert (staging_key("t", "topology") in sent) is not unchanged

    # A content stays as long as some key names it, and no longer.
    for key in (
        *(upload_key("h", part) for part in ("archive", "conf", "topology")),
        staging_key("t", "topology"),
    ):
        world.blobs.delete(key)
    world.blobs.clean_abandoned(-1)
    assert decode_topology(world.blobs.read(code_key(topology_id))).spouts["lines"].object.args == {
        "most": 1e22
    }
    assert world.blobs.exists(jar_key(topology_id))
    lifecycle.kill(world.context(), "wc", 0)
    clean(world.context(), boot_now=1, grace_secs=0, token_secs=0, upload_secs=0)
    assert list((world.blobs.directory / "objects").iterdir()) == []


def test_what_is_staged_is_not_checked_and_normalized_again(world: World) -> None:
    """A stage that runs again without its upload gives the same, whatever the cluster's conf says
    by now.
    """
    world.upload("h", conf={"topology.kryo.register": []})
    world.blobs.put(upload_key("h", "source"), b"thrift")
    first = submission.stage_conf(world.context(), name="wc", token="t", handle="h")
    for part in ("archive", "conf", "topology", "source"):
        world.blobs.delete(upload_key("h", part))
    world.conf["topology.tasks"] = 7
    again = submission.stage_conf(world.context(), name="wc", token="t", handle="h")
    assert (again.conf, again.topology, again.warnings) == (first.conf, first.topology, ())
    with pytest.raises(Conflict, match="token of its own"):
        submission.stage_conf(world.context(), name="other", token="t", handle=None)


def test_what_does_not_fit_fails_at_once_with_the_planners_words(world: World) -> None:
    with pytest.raises(Unavailable, match=r"needs \d+ slots"):
        world.submit("wide", conf={"topology.workers": 9}, topology=wide(12))
    assert visible(world) == {}


def wide(parallelism: int) -> dict[str, Any]:
    return {
        "spouts": {
            "lines": {
                "object": {"python": "m:L"},
                "outputs": {"default": {"fields": ["x"]}},
                "parallelism": parallelism,
            }
        },
        "bolts": {},
    }


def test_a_deposed_epoch_publishes_nothing(world: World) -> None:
    ctx = world.context()
    submission.stage_conf(ctx, name="wc", token="t1", handle=world.upload("h1"))
    submission.stage_code(ctx, token="t1")
    submission.stage_tasks(ctx, token="t1")
    submission.stage_assignment(ctx, token="t1")
    world.lead("127.0.0.1:6628")
    with pytest.raises(Fenced):
        submission.publish_assignment(ctx, token="t1")
    assert visible(world) == {}
    # Executed again, the first stage takes the current epoch.
    submission.stage_conf(ctx, name="wc", token="t1", handle="h1")
    submission.publish_assignment(ctx, token="t1")
    # What is published is activated under any leader, which would do it itself.
    world.lead("127.0.0.1:6629")
    submission.activate_topology(ctx, token="t1")
    assert visible(world) == {"wc": "ACTIVE"}


def test_without_a_leader_nothing_is_submitted(world: World) -> None:
    world.cluster.state.set_data(paths.EPOCH, b"")
    with pytest.raises(Unavailable, match="no leader"):
        world.submit("wc")


def test_replication_that_is_not_reached_is_unavailable_unless_allowed(world: World) -> None:
    conf = {"topology.min.replication.count": 2, "topology.max.replication.wait.time.sec": 0}
    with pytest.raises(Unavailable, match="allow-degraded"):
        world.submit("wc", "t1", conf=conf)
    assert visible(world) == {}
    assert world.submit("wc", "t2", conf=conf, allow_degraded=True)


def test_replication_counts_the_nimbuses_that_announce_a_blob(world: World) -> None:
    ctx = world.context()
    conf = {"topology.min.replication.count": 2, "topology.max.replication.wait.time.sec": 0}
    report = submission.stage_conf(ctx, name="wc", token="t1", handle=world.upload("h1", conf=conf))
    for suffix in ("stormjar.jar", "stormconf.ser", "stormcode.ser"):
        for holder in ("n1:6627-1", "n2:6627-1"):
            world.cluster.state.mkdirs(paths.blob(f"{report.topology_id}-{suffix}", holder))
    code = submission.stage_code(ctx, token="t1")
    assert set(code.copies.values()) == {2} and not code.degraded


def test_a_missing_upload_and_an_unknown_token_say_so(world: World) -> None:
    with pytest.raises(NotAlive, match="upload again"):
        submission.stage_conf(world.context(), name="wc", token="t1", handle="never")
    with pytest.raises(NotAlive, match="no staged record"):
        submission.stage_code(world.context(), token="unknown")


def test_two_submissions_never_share_a_slot(world: World) -> None:
    ctx = world.context()
    for token, name in (("t1", "a"), ("t2", "b")):
        submission.stage_conf(ctx, name=name, token=token, handle=world.upload(token))
        submission.stage_code(ctx, token=token)
        submission.stage_tasks(ctx, token=token)
        submission.stage_assignment(ctx, token=token)
    submission.publish_assignment(ctx, token="t1")
    report = submission.publish_assignment(ctx, token="t2")
    assert report.replanned == 1
    slots = [
        worker.slot
        for topology in world.cluster.load_view().topologies.values()
        for worker in world.assignment(topology.base.name).workers
    ]
    assert len(slots) == len(set(slots)) == 2


def test_a_supervisor_that_went_is_planned_around(world: World) -> None:
    ctx = world.context()
    submission.stage_conf(ctx, name="wc", token="t1", handle=world.upload("h1"))
    submission.stage_code(ctx, token="t1")
    submission.stage_tasks(ctx, token="t1")
    staged = submission.stage_assignment(ctx, token="t1")
    node = staged.placement.workers[0].node
    world.cluster.state.delete_node(paths.supervisor(node))
    report = submission.publish_assignment(ctx, token="t1")
    assert report.replanned == 1
    assert {worker.node for worker in report.assignment.workers} == {"s1", "s2"} - {node}


def test_many_clients_with_one_name_and_one_wins(world: World) -> None:
    """Through sessions of their own, at the same time."""
    from storm_dagster.zk.storm_cluster_state import StormClusterState

    outcomes: list[str] = []
    lock = threading.Lock()

    def client(number: int) -> None:
        cluster = StormClusterState.open(world.conf)
        try:
            world.submit("wc", f"client-{number}", ctx=world.context(cluster=cluster))
            outcome = "won"
        except AlreadyAlive:
            outcome = "lost"
        finally:
            cluster.disconnect()
        with lock:
            outcomes.append(outcome)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(outcomes) == ["lost"] * 5 + ["won"]
    assert visible(world) == {"wc": "ACTIVE"}


def test_many_topologies_at_once_are_all_placed_apart(world: World) -> None:
    from storm_dagster.zk.storm_cluster_state import StormClusterState

    failures: list[BaseException] = []

    def client(number: int) -> None:
        cluster = StormClusterState.open(world.conf)
        try:
            world.submit(f"wc{number}", ctx=world.context(cluster=cluster))
        except BaseException as error:
            failures.append(error)
        finally:
            cluster.disconnect()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    slots = [
        worker.slot
        for topology in world.cluster.load_view().topologies.values()
        for worker in world.assignment(topology.base.name).workers
    ]
    assert len(slots) == len(set(slots)) == 6


def test_staged_parts_are_json_and_keep_the_order_of_components(world: World) -> None:
    topology = {
        "spouts": {"z": {"object": {"python": "m:Z"}, "outputs": {"default": {"fields": ["x"]}}}},
        "bolts": {
            name: {
                "object": {"python": "m:B"},
                "inputs": [{"component": "z", "grouping": {"type": "shuffle"}}],
            }
            for name in ("zeta", "alpha", "mid")
        },
    }
    topology_id = world.submit("order", "t1", topology=topology)
    stored = json.loads(world.blobs.read(f"{topology_id}-stormcode.ser"))
    assert list(stored["bolts"]) == ["zeta", "alpha", "mid"]
    table = world.tasks("order").component_of()
    assert [table[task] for task in (1, 2, 3)] == ["zeta", "alpha", "mid"]


def test_a_large_topology_is_published_in_parts_and_removed_whole(world: World) -> None:
    """The assignment of 2,500 workers does not fit into one node's share."""
    for number in range(100):
        world.supervisor(f"supervisor-with-a-long-name-{number:03}", ports=tuple(range(6900, 6925)))
    conf = {"topology.workers": 2500, "topology.scheduler.strategy": "even"}
    topology_id = world.submit("large", topology=wide(5000), conf=conf)
    assert len(world.assignment("large").workers) >= 2500
    assert world.cluster.state.get_children(paths.assignment(topology_id)), "it was cut"
    lifecycle.kill(world.context(), "large", 0)
    assert world.cluster.state.get_children(paths.ASSIGNMENTS) == []


def test_a_component_without_tasks_survives_every_operation_unplaced(
    world: World,
) -> None:
    bolts = {
        **WORD_COUNT["bolts"],
        "split": {**WORD_COUNT["bolts"]["split"], "conf": {"topology.tasks": 0}},
    }
    world.submit("wc", topology={**WORD_COUNT, "bolts": bolts})
    assert "split" not in world.tasks().components and "split" not in world.named().base.executors
    assert (
        rebalance(world.context(), "wc", workers=2, executors={"count": 3}, wait_secs=0).outcome
        != "unchanged"
    )
    lifecycle.restart(world.context(), "wc")
    assert set(world.named().base.executors) == {"lines", "count", "__acker", "__topology_master"}
    with pytest.raises(InvalidRequest, match="split"):
        rebalance(world.context(), "wc", executors={"split": 1}, wait_secs=0)
    run = take_snapshot(world.context())
    assert [each.sentence for each in violations(run)] == []
