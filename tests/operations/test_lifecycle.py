"""Activate, deactivate, kill, remove, restart, and what is due."""

from __future__ import annotations

import json
from typing import Any

import pytest

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.core.slots.model import desired_slots
from storm_dagster.core.transitions import DueMemory
from storm_dagster.model import paths
from storm_dagster.model.errors import (
    AlreadyAlive,
    Conflict,
    Corrupt,
    Fenced,
    InvalidTopology,
    NotAlive,
    Unavailable,
)
from storm_dagster.model.names import conf_key, jar_key, topology_name_of
from storm_dagster.operations.context import check_name_free, load_runnable
from storm_dagster.operations.live import lifecycle, rebalance
from storm_dagster.operations.submit import submission
from storm_dagster.operations.submit.staging import upload_key
from storm_dagster.operations.submit.submission import update_differences
from storm_dagster.zk.sensor_memory import decode_memory, encode_memory
from storm_rigs.operations.archives import pack_archive
from storm_rigs.stage.records import WORD_COUNT, Crash, World

pytestmark = pytest.mark.zookeeper


def base(world: World, name: str = "wc") -> Any:
    topology = world.cluster.load_view().topology_named(name)
    return topology and topology.base


def writes(world: World, topology_id: str) -> int:
    return world.cluster.load_view().topologies[topology_id].base_at.mzxid


def test_a_topology_is_turned_off_and_on_and_nothing_is_written_twice(world: World) -> None:
    topology_id = world.submit("wc")
    ctx = world.context()
    report = lifecycle.deactivate(ctx, "wc")
    assert (report.status, report.changed, report.previous) == ("INACTIVE", True, "ACTIVE")
    assert base(world).wanted_status == "INACTIVE"
    before = writes(world, topology_id)
    assert not lifecycle.deactivate(ctx, "wc").changed
    assert writes(world, topology_id) == before, "nothing is written when nothing changes"
    assert lifecycle.activate(ctx, topology_id).status == "ACTIVE", "an id will do for a name"


def test_a_topology_keeps_the_name_that_a_former_release_accepted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidTopology, match="must begin with a letter or digit"):
        world.submit("_wc")
    with monkeypatch.context() as former:
        former.setattr(submission, "check_topology_name", lambda name, **_: name)
        topology_id = world.submit("_wc", "t1")
    world.upload("new", WORD_COUNT)
    report = lifecycle.update(world.context(), "_wc", token="t2", handle="new")
    assert report.topology_id not in (None, topology_id)
    assert topology_name_of(str(report.topology_id)) == "_wc"


def test_unknown_names_are_not_alive(world: World) -> None:
    ctx = world.context()
    for verb in (
        lifecycle.activate,
        lifecycle.deactivate,
        lifecycle.kill,
        lifecycle.restart,
        rebalance.rebalance,
    ):
        with pytest.raises(NotAlive, match="'none'"):
            verb(ctx, "none")


def test_a_kill_waits_for_the_message_timeout_by_default(world: World) -> None:
    topology_id = world.submit("wc", conf={"topology.message.timeout.secs": 7})
    ctx = world.context()
    report = lifecycle.kill(ctx, "wc")
    assert (report.status, report.delay_secs) == ("KILLED", 7)
    assert lifecycle.kill(ctx, "wc", -1).delay_secs == 7
    assert lifecycle.kill(ctx, "wc", 3).delay_secs == 3
    assert world.cluster.read_assignment(topology_id) is not None, "workers drain meanwhile"
    with pytest.raises(Conflict, match="KILLED and cannot be activated"):
        lifecycle.activate(ctx, "wc")
    with pytest.raises(Conflict, match="KILLED and cannot be rebalanced"):
        rebalance.rebalance(ctx, "wc")
    with pytest.raises(
        AlreadyAlive, match="its removal is due 3 s after its kill; wait until then"
    ):
        world.submit("wc", "t2")
    view = world.cluster.load_view()
    for secs_left, text in ((1.2, "is due in 2 s; wait until then"), (0, "is under way")):
        with pytest.raises(AlreadyAlive, match=text):
            check_name_free(view, "wc", secs_until_removal=lambda _, secs=secs_left: secs)


def test_a_kill_without_delay_leaves_only_token_and_backup(world: World) -> None:
    topology_id = world.submit("wc")
    world.cluster.report_error(topology_id, 1, "boom", time=1)
    assert lifecycle.kill(world.context(), "wc", 0).status is None
    state = world.cluster.state
    for parent in (
        paths.TOPOLOGY,
        paths.ASSIGNMENTS,
        paths.TASKS,
        paths.TASKBEATS,
        paths.TASKERRORS,
        paths.METRICS,
        paths.GRAY_UPGRADE,
        paths.WORKERS,
    ):
        assert state.get_children(parent) == [], parent
    assert state.get_children(paths.TOKENS) == ["token-wc"]
    assert state.get_children(paths.ASSIGNMENTS_BAK) == ["wc"]
    assert [key for key in world.blobs.keys("") if not key.startswith("upload.")] == []


def test_only_a_killed_topology_is_removed(world: World) -> None:
    topology_id = world.submit("wc")
    with pytest.raises(Conflict, match="kill it first"):
        lifecycle.remove(world.context(), topology_id)
    assert not lifecycle.remove(world.context(), "gone-1-1").changed


def test_a_worker_that_does_not_end_keeps_its_node(world: World) -> None:
    topology_id = world.submit("wc")
    world.run_workers(topology_id)
    lifecycle.kill(world.context(), "wc", 0)
    assert world.cluster.load_view().topologies == {}
    assert len(world.cluster.live_workers(topology_id)) == 1


def test_delays_run_on_the_observers_clock(world: World) -> None:
    topology_id = world.submit("wc")
    ctx = world.context()
    lifecycle.kill(ctx, "wc", 10)
    first = lifecycle.finish_due(ctx, boot_id="b", boot_now=100.0)
    assert first.done == ()
    memory = decode_memory(DueMemory, encode_memory(first.memory))
    assert lifecycle.finish_due(ctx, memory, boot_id="b", boot_now=109.0).done == ()
    # Another boot has another clock: the full delay begins again.
    again = lifecycle.finish_due(ctx, memory, boot_id="other", boot_now=500.0)
    assert again.done == ()
    done = lifecycle.finish_due(ctx, memory, boot_id="b", boot_now=110.0)
    assert [each.describe() for each in done.done] == [f"remove {topology_id}"]
    assert done.done == (lifecycle.DoneAction("remove", topology_id, "wc"),)
    assert lifecycle.finish_due(ctx, done.memory, boot_id="b", boot_now=111.0).done == ()


def test_an_unfinished_activation_is_finished(world: World) -> None:
    def crash(name: str) -> None:
        if name == "before.activate":
            raise Crash(name)

    with pytest.raises(Crash):
        world.submit("wc", ctx=world.context(checkpoint=crash))
    assert base(world).status == "INACTIVE"
    first = lifecycle.finish_due(world.context(), boot_now=0.0)
    assert base(world).status == "INACTIVE", "the run itself gets a moment"
    report = lifecycle.finish_due(world.context(), first.memory, boot_now=6.0)
    assert len(report.done) == 1 and base(world).status == "ACTIVE"


def test_a_topology_that_was_deactivated_is_left_alone(world: World) -> None:
    world.submit("wc")
    lifecycle.deactivate(world.context(), "wc")
    first = lifecycle.finish_due(world.context(), boot_now=0.0)
    assert lifecycle.finish_due(world.context(), first.memory, boot_now=1000.0).done == ()
    assert base(world).status == "INACTIVE"


def test_a_deposed_leader_changes_nothing(world: World) -> None:
    topology_id = world.submit("wc")
    old = world.context(epoch=world.context().current_epoch())
    world.lead("127.0.0.1:6628")
    before = writes(world, topology_id)
    for verb in (lifecycle.deactivate, lifecycle.kill):
        with pytest.raises(Fenced):
            verb(old, "wc")
    assert writes(world, topology_id) == before
    lifecycle.kill(world.context(), "wc", 10)
    with pytest.raises(Fenced):
        lifecycle.remove(old, topology_id)
    assert base(world).status == "KILLED"
    assert world.blobs.exists(jar_key(topology_id))


def test_a_degraded_topology_can_be_killed_and_is_not_deleted_by_itself(world: World) -> None:
    """Absence is not an order."""
    topology_id = world.submit("wc")
    for key in world.blobs.keys(topology_id):
        world.blobs.delete(key)
    with pytest.raises(Unavailable, match="degraded"):
        rebalance.rebalance(world.context(), "wc", wait_secs=0)
    assert base(world).status == "ACTIVE"
    assert lifecycle.kill(world.context(), "wc").delay_secs == 30
    lifecycle.remove(world.context(), topology_id)
    assert base(world) is None


def test_a_damaged_topology_is_named_and_blocks_its_name(world: World) -> None:
    topology_id = world.submit("wc")
    world.cluster.state.set_data(paths.topology(topology_id), b"{broken")
    with pytest.raises(Corrupt, match="damaged"):
        lifecycle.kill(world.context(), "wc")
    with pytest.raises(AlreadyAlive, match="damaged"):
        world.submit("wc", "t2")


def test_a_restart_replaces_every_worker_and_changes_nothing_else(world: World) -> None:
    topology_id = world.submit("wc", conf={"topology.workers": 2})
    ctx = world.context()
    rebalance.rebalance(ctx, "wc", executors={"count": 3}, wait_secs=0)
    before, blobs = world.named(), sorted(world.blobs.keys(""))
    assert before.assignment is not None
    former = {
        node: desired_slots({topology_id: before.assignment}, node).work
        for node in before.assignment.node_host
    }
    report = lifecycle.restart(ctx, "wc")
    assert (report.topology_id, report.status) == (topology_id, "ACTIVE")
    after = world.named()
    assert after.assignment is not None and (after.base, after.tasks) == (before.base, before.tasks)
    unchanged = {"restarts": 0, "history": before.assignment.history}
    assert after.assignment.model_copy(update=unchanged) == before.assignment
    assert sorted(world.blobs.keys("")) == blobs
    for node, work in former.items():
        wanted = desired_slots({topology_id: after.assignment}, node).work
        assert wanted.keys() == work.keys() and all(wanted[port] != work[port] for port in work)
    # What is placed again later is not restarted again, nor does it forget the restart.
    rebalance.rebalance(ctx, "wc", reassign=True, wait_secs=0)
    assert world.assignment("wc").restarts == 1
    lifecycle.restart(ctx, "wc")
    assert world.assignment("wc").restarts == 2


def test_a_restart_needs_no_code(world: World) -> None:
    """So that it helps where a nimbus that holds the code is away."""
    topology_id = world.submit("wc")
    world.blobs.put(f"{topology_id}-stormconf.ser", b"damaged")
    assert lifecycle.restart(world.context(), "wc").status == "ACTIVE"
    assert world.assignment("wc").restarts == 1


def test_a_hot_deploy_takes_the_place_in_one_step(world: World) -> None:
    old = world.submit("wc")
    before = world.cluster.load_view()
    world.upload("new", archive=pack_archive("new code"))
    report = lifecycle.update(world.context(), "wc", token="t2", handle="new")
    after = world.cluster.load_view()
    assert list(after.topologies) == [report.topology_id] and report.topology_id != old
    assert after.assignments_version == before.assignments_version + 1
    assert world.blobs.read(jar_key(report.topology_id)) == pack_archive("new code")
    assert not world.cluster.state.exists(paths.tasks(old))
    assert (
        lifecycle.update(world.context(), "wc", token="t2", handle="new").topology_id
        == report.topology_id
    )


def test_a_completed_update_is_done_whatever_old_code_remains(
    world: World,
) -> None:
    """What cannot be deleted now is the cleaner's: the new topology runs, and nobody deploys it
    again.
    """
    old = world.submit("wc")
    world.upload("new")

    class Stuck(LocalBlobStore):
        def delete(self, key: str, **terms: Any) -> None:
            if key.startswith(old):
                raise Unavailable("no nimbus answers")
            super().delete(key, **terms)

    ctx = world.context(blobs=Stuck(world.blobs.directory))
    report = lifecycle.update(ctx, "wc", token="t2", handle="new")
    assert report.status == "ACTIVE" and base(world).status == "ACTIVE"
    assert world.blobs.keys(old), "deleted by the cleaner"


def conf_of(world: World, topology_id: str) -> dict[str, Any]:
    return json.loads(world.blobs.read(conf_key(topology_id)))


def forget_submitted_keys(world: World, topology_id: str) -> None:
    """Make the topology's record one of the release before."""
    path = paths.topology(topology_id)
    document = json.loads(world.cluster.state.get_data(path) or b"")
    del document["submitted_keys"]
    world.cluster.state.set_data(path, json.dumps(document).encode())


def test_new_code_keeps_the_conf_of_the_submission(world: World) -> None:
    """What was given is kept, what is given again counts, what came with the old code goes with
    it.
    """
    world.upload("plain")
    plain = json.loads(world.blobs.read(upload_key("plain", "topology")))
    old_code = {**plain, "conf": {"topology.debug": True, "topology.message.timeout.secs": 7}}
    world.submit(
        "wc", topology=old_code, conf={"topology.workers": 3, "my.key": "a", "my.other": 1}
    )
    lifecycle.restart(world.context(), "wc")
    new_code = {**plain, "conf": {"topology.workers": 1, "topology.message.timeout.secs": 9}}
    world.upload("new", topology=new_code, conf={"my.key": "b", "my.other": None})
    (running,) = world.cluster.load_view().topologies.values()
    differ = update_differences(world.context(), running, "new")
    assert differ["my.key"] == {"old": "a", "new": "b"} and differ["my.other"] == {
        "old": 1,
        "new": None,
    }
    assert differ["topology.debug"] == {"old": True, "new": False}
    assert differ["topology.message.timeout.secs"] == {"old": 7, "new": 9}
    assert "topology.workers" not in differ and "topology.id" not in differ
    report = lifecycle.update(world.context(), "wc", token="t2", handle="new")
    conf = conf_of(world, report.topology_id)
    assert (conf["topology.workers"], conf["my.key"]) == (3, "b") and "topology.debug" not in conf
    # And so does the next one, which gives nothing at all.
    world.upload("newer", topology=new_code)
    again = conf_of(
        world, lifecycle.update(world.context(), "wc", token="t3", handle="newer").topology_id
    )
    assert (again["topology.workers"], again["my.key"]) == (3, "b") and again["my.other"] is None


def test_a_whole_conf_replaces_the_former_one(world: World) -> None:
    """Storm clients send the whole conf each time; so does who says that nothing is to be kept."""
    world.submit("wc", conf={"topology.workers": 3, "my.key": "a"})
    world.upload("thrift", conf={"topology.workers": 2})
    world.blobs.put(upload_key("thrift", "source"), b"thrift")
    conf = conf_of(
        world, lifecycle.update(world.context(), "wc", token="t2", handle="thrift").topology_id
    )
    assert conf["topology.workers"] == 2 and "my.key" not in conf
    world.upload("plain", conf={"my.key": "b", "topology.update.keep.conf": False})
    conf = conf_of(
        world, lifecycle.update(world.context(), "wc", token="t3", handle="plain").topology_id
    )
    assert (conf["topology.workers"], conf["my.key"]) == (
        1,
        "b",
    ) and "topology.update.keep.conf" not in conf


def test_readers_do_not_see_which_keys_were_submitted(world: World) -> None:
    """The topology's record names them, and so does the stored conf for the release before."""
    topology_id = world.submit("wc", conf={"my.key": "a"})
    assert conf_of(world, topology_id)["topology.submitted.keys"] == ["my.key"]
    (topology,) = world.cluster.load_view().topologies.values()
    assert topology.base.submitted_keys == {topology_id: ("my.key",)}
    runnable = load_runnable(world.context(), topology)
    assert runnable.submitted_keys == {"my.key"}
    assert "topology.submitted.keys" not in runnable.conf


def test_the_record_of_the_topology_decides_which_keys_were_submitted(world: World) -> None:
    """A later release need not write them into the stored conf."""
    topology_id = world.submit("wc", conf={"my.key": "a", "topology.workers": 3})
    document = conf_of(world, topology_id)
    del document["topology.submitted.keys"]
    world.blobs.put(conf_key(topology_id), json.dumps(document).encode())
    lifecycle.restart(world.context(), "wc")
    world.upload("new")
    report = lifecycle.update(world.context(), "wc", token="t2", handle="new")
    conf = conf_of(world, report.topology_id)
    assert (conf["my.key"], conf["topology.workers"]) == ("a", 3)
    assert base(world).submitted_keys == {report.topology_id: ("my.key", "topology.workers")}


def test_a_topology_of_the_release_before_keeps_its_submitted_conf(world: World) -> None:
    """Its record does not name the keys, and its stored conf does."""
    topology_id = world.submit("wc", conf={"my.key": "a"})
    forget_submitted_keys(world, topology_id)
    world.upload("new")
    report = lifecycle.update(world.context(), "wc", token="t2", handle="new")
    assert conf_of(world, report.topology_id)["my.key"] == "a"
    assert base(world).submitted_keys == {report.topology_id: ("my.key",)}


def test_a_null_takes_back_what_was_submitted(world: World) -> None:
    world.submit("wc", conf={"topology.workers": 3, "topology.max.spout.pending": 5})
    world.upload("new", conf={"topology.workers": None, "topology.max.spout.pending": None})
    report = lifecycle.update(world.context(), "wc", token="t2", handle="new")
    (topology,) = world.cluster.load_view().topologies.values()
    conf = load_runnable(world.context(), topology).conf
    assert conf["topology.workers"] == 1, "null under a key with a default: not submitted"
    assert conf["topology.max.spout.pending"] is None, "a value of its own, also over the cluster's"
    assert conf_of(world, report.topology_id)["topology.max.spout.pending"] is None


@pytest.mark.parametrize("cluster_secs", [30, 40])
def test_a_null_keeps_no_value_of_the_code_that_ran(world: World, cluster_secs: int) -> None:
    """Null under a key with a default: the submission sets nothing, so the new code's value
    counts.
    """
    key = "topology.message.timeout.secs"
    world.conf = {**world.conf, key: cluster_secs}
    world.submit("wc", topology={**WORD_COUNT, "conf": {key: 7}}, conf={key: None})
    assert base(world).submitted_keys == {world.named().id: ()}
    world.upload("new", topology={**WORD_COUNT, "conf": {key: 9}})
    report = lifecycle.update(world.context(), "wc", token="t2", handle="new")
    assert conf_of(world, report.topology_id)[key] == 9
    # The release before noted the key: what its topology does not store is not the cluster's value.
    world.submit("former", conf={key: None})
    former = world.named("former")
    document = {**conf_of(world, former.id), "topology.submitted.keys": [key]}
    world.blobs.put(conf_key(former.id), json.dumps(document).encode())
    forget_submitted_keys(world, former.id)
    world.upload("new-2", topology={**WORD_COUNT, "conf": {key: 9}})
    report = lifecycle.update(world.context(), "former", token="t4", handle="new-2")
    assert conf_of(world, report.topology_id)[key] == 9


def test_conf_keys_that_no_record_has_room_for_are_refused(world: World) -> None:
    with pytest.raises(InvalidTopology, match="names of the 500 submitted conf keys"):
        world.submit("wc", conf={f"my.{number:04}.{'x' * 60}": number for number in range(500)})
    assert not world.cluster.load_view().topologies


def test_an_update_does_not_keep_a_removed_key(world: World) -> None:
    """A topology of the release before may have been submitted with one."""
    topology_id = world.submit("wc", conf={"my.key": "a"})
    forget_submitted_keys(world, topology_id)
    former = {
        **conf_of(world, topology_id),
        "topology.state.remember.secs": 600,
        "topology.submitted.keys": ["my.key", "topology.state.remember.secs"],
    }
    world.blobs.put(conf_key(topology_id), json.dumps(former).encode())
    lifecycle.restart(world.context(), "wc")
    world.upload("new")
    report = lifecycle.update(world.context(), "wc", token="t2", handle="new")
    conf = conf_of(world, report.topology_id)
    assert conf["my.key"] == "a" and "topology.state.remember.secs" not in conf
    assert conf["topology.submitted.keys"] == ["my.key"]


def test_a_topology_of_an_older_release_is_updated_as_ever(world: World) -> None:
    """Its stored conf does not say what was given: it may be the code's own, so nothing of it is
    kept.
    """
    topology_id = world.submit("wc", conf={"topology.workers": 3})
    forget_submitted_keys(world, topology_id)
    conf = {
        key: v for key, v in conf_of(world, topology_id).items() if key != "topology.submitted.keys"
    }
    world.blobs.put(conf_key(topology_id), json.dumps(conf).encode())
    lifecycle.restart(world.context(), "wc")
    world.upload("new")
    report = lifecycle.update(world.context(), "wc", token="t2", handle="new")
    assert conf_of(world, report.topology_id)["topology.workers"] == 1


@pytest.mark.parametrize(
    ("topology", "conf", "archive"),
    [
        ({"spouts": {}}, {}, pack_archive("x")),
        (None, {"topology.workers": 0}, pack_archive("x")),
        (
            None,
            {"topology.workers": 99, "topology.spout.parallelism": {"lines": 99}},
            pack_archive("x"),
        ),
        (None, {}, None),
        (None, {}, b"no archive at all"),
        (None, {}, pack_archive("x", ["wc.spouts"])),
        (None, {}, pack_archive("x\nthis is no Python")),
    ],
)
def test_a_hot_deploy_that_is_wrong_leaves_the_old_one_running(
    world: World, topology: Any, conf: Any, archive: bytes | None
) -> None:
    """Broken topology, wrong conf, too large, no archive, a broken one, modules that are missing or
    no Python.
    """
    old = world.submit("wc")
    before = world.cluster.load_view().topologies[old]
    options = {} if topology is None else {"topology": topology}
    world.upload("new", conf=conf, archive=archive, **options)
    with pytest.raises((InvalidTopology, Unavailable, NotAlive)):
        lifecycle.update(world.context(), "wc", token="t2", handle="new")
    view = world.cluster.load_view()
    assert list(view.topologies) == [old]
    assert view.topologies[old].base_at == before.base_at
    assert world.blobs.read(jar_key(old)) == pack_archive("archive")


def test_a_hot_deploy_uses_the_slots_of_the_old_one(world: World) -> None:
    world.supervisor("s1", ports=(6900,))
    world.cluster.state.delete_node(paths.supervisor("s2"))
    world.submit("wc")
    world.upload("new")
    lifecycle.update(world.context(), "wc", token="t2", handle="new")
    assert len(world.cluster.load_view().topologies) == 1
    assert [worker.slot for worker in world.assignment().workers] == [("s1", 6900)]


def test_only_what_runs_can_be_replaced(world: World) -> None:
    world.upload("new")
    with pytest.raises(NotAlive):
        lifecycle.update(world.context(), "wc", token="t1", handle="new")
    world.submit("wc", "t2")
    lifecycle.kill(world.context(), "wc", 60)
    with pytest.raises(NotAlive, match="KILLED and cannot be replaced"):
        lifecycle.update(world.context(), "wc", token="t3", handle="new")


def test_a_removal_that_is_begun_elsewhere_holds_no_other_transition(world: World) -> None:
    world.submit("slow", "t1")
    world.submit("wc", "t2")
    lifecycle.kill(world.context(), "slow", wait_secs=60)
    slow_id = world.named("slow").id
    lifecycle.mark_killed(world.context(), "slow", wait_secs=0)
    begun: list[tuple[str, str]] = []
    result = lifecycle.finish_due(
        world.context(), start_removal=lambda topology_id, name: begun.append((topology_id, name))
    )
    assert begun == [(slow_id, "slow")]
    assert result.done == () and slow_id in world.cluster.load_view().topologies
