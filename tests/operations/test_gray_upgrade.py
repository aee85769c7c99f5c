"""Gray upgrades on a real cluster state: begun, continued, completed, expired, rolled back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from storm_dagster.core.liveness.causes import Cause
from storm_dagster.core.slots.model import Work, desired_slots
from storm_dagster.core.upgrade.machine import Move, SlotRun, code_for, pick
from storm_dagster.core.upgrade.selection import Selection, UpgradeSnapshot
from storm_dagster.host.clock import boot_clock
from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Fenced, InvalidRequest, InvalidTopology, NotAlive
from storm_dagster.model.names import conf_key, jar_key
from storm_dagster.model.records import Assignment, GrayWorker
from storm_dagster.operations.live import healing, lifecycle
from storm_dagster.operations.live.cleaner import clean
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.operations.submit.staging import upload_key
from storm_dagster.operations.upgrade import advance_upgrades, check_upgrade
from storm_dagster.operations.upgrade_waiting import await_upgrade
from storm_dagster.supervisor.upgrades import Upgrades
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.gray_upgrades import write_move, write_pick
from storm_rigs.operations.archives import pack_archive
from storm_rigs.operations.losing import LosingCluster
from storm_rigs.operations.upgrades import UpgradeStandIns
from storm_rigs.stage.records import World
from storm_rigs.stage.supervisor_link import LinkedSupervisor

pytestmark = pytest.mark.zookeeper

CONF = {"topology.workers": 3, "topology.master.single.worker": True}
ONE = Selection(number=1)


class Upgraded(UpgradeStandIns):
    """A topology that may be upgraded, and stand-ins for its supervisors and its topology
    master.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world.cluster, world.submit("wc", conf=CONF))
        self.world = world
        self.seen: dict[str, float] = {}

    @property
    def assignment(self) -> Assignment:
        return self.world.assignment()

    @property
    def version(self) -> int:
        """Data version of the assignment."""
        at = self.topology.assignment_at
        assert at is not None
        return at.version

    def upload(self, handle: str = "new", **more: Any) -> str:
        return self.world.upload(
            handle, conf={**CONF, **more.pop("conf", {})}, archive=pack_archive("new"), **more
        )

    def begin(self, selection: Selection = ONE, **more: Any) -> Any:
        handle = self.upload(**{key: more.pop(key) for key in ("conf", "topology") if key in more})
        return lifecycle.gray_upgrade(self.world.context(), "wc", selection, handle=handle, **more)

    def advance(self, **context: Any) -> list[str]:
        return [
            report.outcome for report in advance_upgrades(self.world.context(**context), self.seen)
        ]

    def clean(self) -> None:
        """Nothing of an upgrade stands any more."""
        assert self.topology.base.status == "ACTIVE"
        state = self.world.cluster.state
        assert not state.exists(paths.gray_upgrade(self.id, "conf"))
        for part in ("upgrading_workers", "upgraded_workers"):
            assert not state.find_children(paths.gray_upgrade(self.id, part))


@pytest.fixture
def topology(world: World) -> Upgraded:
    return Upgraded(world)


def test_the_new_code_keeps_the_conf_of_the_submission(topology: Upgraded) -> None:
    world = topology.world
    world.upload("bare", conf={"my.key": 1}, archive=pack_archive("new"))
    lifecycle.gray_upgrade(world.context(), "wc", ONE, handle="bare")
    conf = json.loads(world.blobs.read(conf_key(topology.record.code_dir)))
    assert {key: conf[key] for key in (*CONF, "my.key")} == {**CONF, "my.key": 1}
    keys = tuple(sorted([*CONF, "my.key"]))
    assert conf["topology.submitted.keys"] == list(keys)
    recorded = topology.topology.base.submitted_keys
    assert recorded == {topology.id: tuple(sorted(CONF)), topology.record.code_dir: keys}


def test_the_new_code_keeps_the_version_that_it_was_declared_with(topology: Upgraded) -> None:
    record = topology.begin(
        conf={"declared.code.version": "abc", "topology.upgrade.worker.num": 1}
    ).state.record
    conf = json.loads(topology.world.blobs.read(conf_key(record.code_dir)))
    assert conf["declared.code.version"] == "abc"
    assert "topology.upgrade.worker.num" not in conf


def test_a_recorded_failure_is_not_overwritten_before_it_is_read_again(topology: Upgraded) -> None:
    topology.begin()
    topology.pick()
    (address,) = topology.state.upgrading
    new = topology.record.code_dir
    assignment = topology.assignment
    worker = next(worker for worker in assignment.workers if worker.address == address)
    restarted = SlotRun(worker.port, topology.id, new, started=0.0, running=True)
    upgrades = Upgrades(worker.node, lambda: [restarted], boot_clock, 120.0)
    cluster = topology.world.cluster
    upgrades.read(cluster, topology.id, lambda: None)
    upgrades.on_failure(worker.port, Work(topology.id, new), "it crashed")
    assert upgrades.advance(cluster, {topology.id: assignment}) == {topology.id}
    # ZooKeeper was lost before the supervisor could read the upgrade once more.
    assert upgrades.advance(cluster, {topology.id: assignment}) == {topology.id}
    assert topology.state.upgrading[address].failed == f"{address}: it crashed"
    upgrades.read(cluster, topology.id, lambda: None)
    assert upgrades.advance(cluster, {topology.id: assignment}) == set()


def test_batch_by_batch_until_all_workers_run_the_new_code(topology: Upgraded) -> None:
    """Then the record goes, and the new code is the code."""
    report = topology.begin()
    new = topology.record.code_dir
    assert (report.status, report.outcome) == ("UPGRADING", "begun") and new != topology.id
    assert topology.assignment.code_dir == topology.id, "nothing runs it yet"
    topology.batch()
    first = min(worker.address for worker in topology.assignment.workers if "1" not in worker.tasks)
    assert len(topology.on(new)) == 1, first
    assert topology.advance() == []
    while topology.state.record is not None:
        lifecycle.gray_upgrade(topology.world.context(), "wc", ONE)
        topology.batch()
        topology.advance()
    topology.clean()
    assert topology.assignment.code_dir == new
    assert len(topology.on(new)) == 3 and len(topology.on(topology.id)) == 1, (
        "all but the topology master's"
    )
    assert topology.world.blobs.read(jar_key(new)) == pack_archive("new")
    assert topology.assignment.code[jar_key(new)] == topology.world.blobs.meta(jar_key(new)).sha256
    # What needs the code from now on takes the new one.
    assert lifecycle.restart(topology.world.context(), "wc").topology_id == topology.id
    after = topology.assignment
    works = [
        work
        for node in after.node_host
        for work in desired_slots({topology.id: after}, node).work.values()
    ]
    assert {(work.code_dir, work.restarts) for work in works} == {(new, 1)}, (
        "the topology master's worker too"
    )


def test_while_nothing_is_due_the_cluster_is_not_read(topology: Upgraded) -> None:
    """An upgrade may be paused for a day, and the leader looks each second."""
    topology.begin()
    view = topology.world.cluster.load_view()
    unread = LosingCluster(topology.world.cluster, 0, True, away=1)
    assert (
        advance_upgrades(topology.world.context(cluster=unread), topology.seen, view) == []
        and unread.away == 1
    )


def test_a_repeated_call_takes_no_further_batch(topology: Upgraded) -> None:
    """Its answer was lost, or Dagster executes its run again: one token, one batch, also once that
    is picked and done.
    """
    world = topology.world
    new = topology.begin(token="first").state.record.code_dir
    topology.batch()
    for _ in range(2):
        lifecycle.gray_upgrade(world.context(), "wc", ONE, token="second")
        topology.batch()
    assert (
        lifecycle.gray_upgrade(world.context(), "wc", ONE, handle="new", token="first").outcome
        == "begun"
    )
    assert len(topology.on(new)) == 2
    lifecycle.gray_upgrade(world.context(), "wc", ONE, token="third")
    topology.batch()
    assert len(topology.on(new)) == 3


@pytest.mark.parametrize("way", ["completed", "asked for", "failed"])
def test_a_call_that_is_repeated_after_the_end_is_told_of_it(topology: Upgraded, way: str) -> None:
    """Its answer was lost, and the upgrade ended before it was asked again: another one would
    restart workers for nothing.
    """
    ctx = topology.world.context()
    topology.begin(Selection(number=3), token="t")
    topology.batch()
    if way == "completed":
        assert topology.advance() == ["completed"]
    else:
        lifecycle.roll_back(ctx, "wc", "s1:6700 died" if way == "failed" else None)
        topology.supervise()
        assert topology.advance() == ["rolled back"]
    topology.clean()
    code = topology.assignment.code_dir
    again = topology.begin(Selection(number=3), token="t")
    assert not again.changed and topology.assignment.code_dir == code
    topology.clean()
    if way == "completed":
        assert (
            await_upgrade(ctx, again, wait_secs=5, on_worker=lambda *_: None).outcome == "completed"
        )
        return
    with pytest.raises(InvalidTopology if way == "failed" else Conflict, match="rolled back"):
        await_upgrade(ctx, again, wait_secs=5, on_worker=lambda *_: None)


@pytest.mark.parametrize("picked", [False, True])
def test_a_batch_whose_reply_was_lost_is_the_callers_own(topology: Upgraded, picked: bool) -> None:
    topology.begin(token="first")
    topology.batch()
    cluster = LosingCluster(topology.world.cluster, 1, landed=True)

    def sleep(_: float) -> None:
        if picked:  # By the supervisor of the topology master, before the caller reads again.
            topology.batch()

    result = lifecycle.gray_upgrade(
        topology.world.context(cluster=cluster, sleep=sleep), "wc", ONE, token="second"
    )
    assert result.outcome == "continued" and topology.record.batch_token == "second"


def test_completing_early_leaves_the_other_workers_alone(topology: Upgraded) -> None:
    """For those who want only some workers, or one component, upgraded."""
    new = topology.begin(Selection(component="split", number=1)).state.record.code_dir
    topology.batch()
    before = dict(topology.runs)
    report = lifecycle.complete_upgrade(topology.world.context(), "wc")
    assert (report.status, report.outcome) == ("ACTIVE", "completed")
    topology.clean()
    topology.supervise()
    assert topology.runs == before and topology.assignment.code_dir == new
    with pytest.raises(Conflict, match="no upgrade is under way"):
        lifecycle.complete_upgrade(topology.world.context(), "wc")


def test_rolling_back_brings_back_the_exact_former_code(topology: Upgraded) -> None:
    former = {
        key: topology.world.blobs.meta(key).sha256 for key in topology.world.blobs.keys(topology.id)
    }
    new = topology.begin(Selection(number=2)).state.record.code_dir
    topology.batch()
    assert len(topology.on(new)) == 2
    report = lifecycle.roll_back(topology.world.context(), "wc")
    assert report.status == "ROLLBACK"
    assert not lifecycle.roll_back(topology.world.context(), "wc").changed
    assert topology.advance() == [], "not before the workers are back"
    topology.supervise()
    assert topology.advance() == ["rolled back"]
    topology.clean()
    assert (
        topology.on(topology.id) == set(topology.runs)
        and topology.assignment.code_dir == topology.id
    )
    for key, sha256 in former.items():
        assert topology.world.blobs.meta(key).sha256 == sha256
    clean(topology.world.context(), grace_secs=0, upload_secs=0)
    assert not [key for key in topology.world.blobs.keys("") if key.startswith(new)]
    # And it may be upgraded again.
    assert topology.begin().outcome == "begun"


def test_a_picked_batch_is_rolled_back_before_it_started(topology: Upgraded) -> None:
    topology.begin(Selection(number=3))
    topology.pick()
    lifecycle.roll_back(topology.world.context(), "wc")
    topology.supervise()
    assert topology.advance() == ["rolled back"]
    topology.clean()


def test_one_batch_at_a_time_and_one_upgrade_at_a_time(topology: Upgraded) -> None:
    """And no new code while an upgrade is under way."""
    ctx = topology.world.context()
    with pytest.raises(InvalidRequest, match="not being upgraded"):
        lifecycle.gray_upgrade(ctx, "wc", ONE)
    topology.begin(token="t")
    assert not topology.begin(token="t").changed, "a repeated call is the same call"
    with pytest.raises(Conflict, match="is being upgraded already"):
        topology.begin(token="another")
    with pytest.raises(Conflict, match="not picked yet"):
        lifecycle.gray_upgrade(ctx, "wc", ONE)
    topology.pick()
    with pytest.raises(Conflict, match="wait until its workers run the new code"):
        lifecycle.gray_upgrade(ctx, "wc", ONE)
    topology.supervise()
    (done,) = topology.state.upgraded
    with pytest.raises(InvalidRequest, match="run the new code already"):
        lifecycle.gray_upgrade(ctx, "wc", Selection(workers=(done,)))
    assert lifecycle.gray_upgrade(ctx, "wc", ONE).outcome == "continued"


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"selection": Selection()}, InvalidRequest, "no workers are selected"),
        ({"selection": Selection(workers=("x:1",))}, InvalidRequest, "no worker x:1"),
        ({"selection": Selection(component="nope")}, InvalidRequest, "no component 'nope'"),
        ({"conf": {"topology.workers": 0}}, InvalidTopology, "topology.workers"),
        ({"topology": {"spouts": {}}}, InvalidTopology, "spout"),
        (
            {"topology": {"spouts": {"s": {"object": {"python": "wc.spouts:S"}}}, "bolts": {}}},
            InvalidTopology,
            "storm-dagster update",
        ),
    ],
)
def test_what_cannot_be_touches_nothing(
    topology: Upgraded, given: Any, error: Any, says: str
) -> None:
    before = topology.topology.base_at
    with pytest.raises(error, match=says):
        topology.begin(given.pop("selection", ONE), **given)
    assert topology.topology.base_at == before
    assert topology.state.record is None
    assert [key for key in topology.world.blobs.keys("") if key.startswith(f"{topology.id}.")] == []


def test_a_broken_archive_touches_nothing(topology: Upgraded) -> None:
    ctx = topology.world.context()
    handle = topology.world.upload("broken", conf=CONF, archive=b"no archive")
    with pytest.raises(InvalidTopology, match="neither zip"):
        lifecycle.gray_upgrade(ctx, "wc", ONE, handle=handle)
    with pytest.raises(NotAlive, match="upload 'gone' does not exist"):
        lifecycle.gray_upgrade(ctx, "wc", ONE, handle="gone")
    topology.clean()


@pytest.mark.parametrize("part", ["topology", "conf"])
def test_an_upload_of_which_the_leader_lacks_a_part_upgrades_nothing(
    topology: Upgraded, part: str
) -> None:
    """A nimbus that leads since a moment may have some of the parts only."""
    handle = topology.world.upload("half", conf={**CONF, "topology.submitter.user": "ann"})
    topology.world.blobs.delete(upload_key(handle, part))
    with pytest.raises(NotAlive, match="upload 'half' does not exist"):
        lifecycle.gray_upgrade(topology.world.context(), "wc", ONE, handle=handle)
    topology.clean()


def test_a_request_continues_when_the_leader_changes_at_any_step(topology: Upgraded) -> None:
    world = topology.world
    points: list[str] = []

    def note(point: str) -> None:
        points.append(point)

    lifecycle.gray_upgrade(
        world.context(checkpoint=note), "wc", ONE, handle=topology.upload(), token="first"
    )
    steps = len(points)
    assert steps > 5
    for number in range(steps):
        lifecycle.roll_back(world.context(), "wc")
        topology.supervise()
        topology.advance()
        left = [number]

        def change_leader(point: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                world.lead()

        ctx = world.context(checkpoint=change_leader, run="run-1")
        token = f"t{number}"
        begun = lifecycle.gray_upgrade(ctx, "wc", ONE, handle=topology.upload(), token=token)
        assert left[0] < 0
        assert (begun.outcome, topology.topology.base.status) == ("begun", "UPGRADING")
        record = topology.state.record
        assert record is not None
        assert (record.token, record.number) == (token, 1)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_request_ends_if_its_topology_was_killed_or_changed_since(
    topology: Upgraded, is_new: bool
) -> None:
    world = topology.world
    step = "before.gray_upgrade" if is_new else "before.continue_upgrade"
    handle = topology.upload() if is_new else None
    if not is_new:
        topology.begin()
        topology.pick()
        topology.supervise()

    def interfere(point: str) -> None:
        if point == step:
            world.lead()
            action = lifecycle.deactivate if is_new else lifecycle.roll_back
            action(world.context(), "wc")

    with pytest.raises(Conflict, match="was changed while this change of it was planned"):
        lifecycle.gray_upgrade(
            world.context(checkpoint=interfere, run="run-1"), "wc", ONE, handle=handle, token="t"
        )
    expected = "INACTIVE" if is_new else "ROLLBACK"
    assert topology.topology.base.status == expected


def test_a_request_after_three_leaders_names_state_and_remedy(topology: Upgraded) -> None:
    world = topology.world

    def change_leader(point: str) -> None:
        if point == "before.gray_upgrade":
            world.lead()

    handle = topology.upload()
    ctx = world.context(checkpoint=change_leader)
    with pytest.raises(Fenced, match="no worker was upgraded, and the topology runs its former"):
        lifecycle.gray_upgrade(ctx, "wc", ONE, handle=handle, token="t")
    topology.clean()
    # The remedy: the same request again.
    begun = lifecycle.gray_upgrade(world.context(), "wc", ONE, handle=handle, token="t")
    assert (begun.outcome, topology.topology.base.status) == ("begun", "UPGRADING")


def test_the_selection_may_stand_in_the_new_codes_conf(topology: Upgraded) -> None:
    """The keys topology.upgrade.worker.num and the like; they are not kept."""
    keys = {"topology.upgrade": True, "topology.upgrade.worker.num": 2}
    record = topology.begin(Selection(), conf={**keys, "topology.upgrade.ttl": 60_000}).state.record
    assert (record.number, record.expires - topology.world.time) == (2, 60)
    stored = topology.world.blobs.read(conf_key(record.code_dir))
    assert b"topology.upgrade.worker.num" not in stored and b"topology.upgrade.ttl" in stored


def test_only_an_active_topology_with_a_topology_master_on_its_own(world: World) -> None:
    """In every other status, and with a shared worker, the upgrade is refused."""
    world.submit("shared")
    handle = world.upload("h")
    ctx = world.context()
    with pytest.raises(InvalidRequest, match=r"topology\.master\.single\.worker=true"):
        lifecycle.gray_upgrade(ctx, "shared", ONE, handle=handle)
    lifecycle.deactivate(ctx, "shared")
    with pytest.raises(Conflict, match="is INACTIVE and cannot be upgraded: activate it first"):
        check_upgrade(ctx, "shared", ONE, new=True)
    with pytest.raises(NotAlive):
        lifecycle.gray_upgrade(ctx, "nobody", ONE, handle=handle)


def test_meanwhile_no_other_verb_but_kill(topology: Upgraded) -> None:
    topology.begin()
    ctx = topology.world.context()
    for verb in (
        lambda: lifecycle.deactivate(ctx, "wc"),
        lambda: lifecycle.activate(ctx, "wc"),
        lambda: rebalance(ctx, "wc", workers=2, wait_secs=0),
        lambda: lifecycle.restart(ctx, "wc"),
        lambda: lifecycle.update(ctx, "wc", token="u", handle="new"),
    ):
        with pytest.raises(Conflict, match="UPGRADING"):
            verb()
    lifecycle.kill(ctx, "wc", 0)
    assert not topology.world.cluster.load_view().topologies
    assert not topology.world.cluster.state.exists(paths.gray_upgrade(topology.id))
    assert [key for key in topology.world.blobs.keys("") if key.startswith(topology.id)] == []


def test_an_upgrade_expires(topology: Upgraded) -> None:
    """What was upgraded stays so."""
    new = topology.begin(conf={"topology.upgrade.ttl": 60_000}).state.record.code_dir
    topology.batch()
    # The clock of a host a day ahead decides nothing; the leader's own, counted from when it first
    # saw the upgrade, does.
    topology.world.time += 86_400
    assert topology.advance(monotonic=lambda: 1000.0) == []
    assert topology.advance(monotonic=lambda: 1059.0) == []
    topology.seen.clear()
    assert topology.advance(monotonic=lambda: 1061.0) == [], "a new leader counts from zero"
    assert topology.advance(monotonic=lambda: 1121.0) == ["expired"]
    topology.clean()
    assert topology.assignment.code_dir == new


def test_a_worker_that_fails_rolls_the_upgrade_back(topology: Upgraded) -> None:
    topology.begin(Selection(number=2))
    topology.batch()
    (first, *_) = sorted(topology.state.upgraded)
    failed = GrayWorker(boot_id="b", failed=f"{first}: its worker ended with exit code 1")
    write_move(
        topology.world.cluster.state, topology.id, topology.state, Move(first, "failed", failed)
    )
    assert topology.advance() == ["rolling back"]
    assert (topology.record.reason, topology.record.failed_worker) == (failed.failed, first)
    topology.supervise()
    assert topology.advance() == ["rolled back"]
    kept = topology.topology.base.last_upgrade
    assert kept is not None and kept.ended_secs == topology.world.time
    assert (kept.reason, kept.failed_worker) == (failed.failed, first)
    assert topology.on(topology.id) == set(topology.runs)


def dead(topology: Upgraded, address: str) -> Cause:
    worker = next(one for one in topology.assignment.workers if one.address == address)
    version = topology.version
    return Cause(
        topology.id, "wc", version, "dead_worker", worker.node, worker.host, worker.port, worker.ids
    )


def test_an_upgraded_worker_that_is_judged_dead_rolls_the_upgrade_back(topology: Upgraded) -> None:
    new = topology.begin().state.record.code_dir
    topology.batch()
    (upgraded,) = topology.state.upgraded
    (report,) = healing.reassign(topology.world.context(), [dead(topology, upgraded)])
    assert report.status == "assigned"
    assert topology.topology.base.status == "ROLLBACK"
    assert "did not come back" in (topology.record.reason or "")
    assert topology.record.failed_worker == upgraded
    assert upgraded not in {worker.address for worker in topology.assignment.workers}
    # The worker that took its place runs the former code, and the lost one holds nothing up.
    moved = {worker.address for worker in topology.assignment.workers}
    assert all(
        code_for(one, topology.assignment, topology.state)[0] != new
        for one in topology.assignment.workers
    )
    assert topology.advance() == ["rolled back"] and len(moved) == 4
    topology.clean()


def test_another_worker_that_dies_is_placed_again_with_the_former_code(topology: Upgraded) -> None:
    topology.begin()
    topology.batch()
    (upgraded,) = topology.state.upgraded
    other = max(
        one.address
        for one in topology.assignment.workers
        if len(one.ids) > 1 and one.address != upgraded
    )
    (report,) = healing.reassign(topology.world.context(), [dead(topology, other)])
    assert report.status == "assigned" and topology.topology.base.status == "UPGRADING"
    codes = {
        one.address: code_for(one, topology.assignment, topology.state)[0]
        for one in topology.assignment.workers
    }
    assert [address for address, code in codes.items() if code != topology.id] == [upgraded]


def test_nobody_acts_on_an_upgrade_that_has_moved_on(topology: Upgraded) -> None:
    """Supervisors and the topology master check the record they read, the leader its epoch."""
    topology.begin(Selection(number=2))
    topology.pick()
    read, epoch = topology.state, topology.world.epoch()
    lifecycle.roll_back(topology.world.context(), "wc")
    address = min(read.upgrading)
    with pytest.raises(Conflict):
        write_move(topology.world.cluster.state, topology.id, read, Move(address, "upgraded"))
    topology.supervise()
    topology.advance()
    # A later upgrade's versions go on from there: nothing read before is ever valid again.
    topology.begin(Selection(number=2))
    with pytest.raises(Conflict):
        write_move(topology.world.cluster.state, topology.id, read, Move(address, "upgraded"))
    batch = pick(UpgradeSnapshot(topology.state, topology.assignment, topology.world.tasks()))
    assert batch is not None
    version = topology.version
    for wrong in ({"epoch": epoch, "assignment_version": version + 1}, {"epoch": epoch - 1}):
        with pytest.raises((Conflict, Fenced)):
            write_pick(
                topology.world.cluster.state,
                topology.id,
                topology.state,
                batch,
                **{"epoch": epoch, "assignment_version": version, **wrong},
            )
    topology.world.lead()
    with pytest.raises(Fenced):
        lifecycle.roll_back(topology.world.context(epoch=epoch), "wc")


def test_the_batch_is_picked_where_the_topology_master_runs(topology: Upgraded) -> None:
    """Workers do not: whoever writes the record names the code that supervisors fetch and run."""
    topology.begin()
    master = UpgradeSnapshot(topology.state, topology.assignment, topology.world.tasks()).master
    assert master is not None
    other = next(
        worker.node for worker in topology.assignment.workers if worker.node != master.node
    )
    links = [LinkedSupervisor(topology.world.conf, name) for name in (other, master.node)]
    try:
        links[0].link.start()
        eventually(
            lambda: topology.id in links[0].runs() and links[0].beats > 2,
            what="the supervisor of another worker",
        )
        assert not topology.state.upgrading and topology.record.continue_
        links[1].link.start()
        eventually(lambda: topology.state.upgrading, what="the batch")
        assert len(topology.state.upgrading) == 1 and not topology.record.continue_
    finally:
        for each in links:
            each.link.close()


def test_a_new_leader_ends_what_the_old_one_began(topology: Upgraded) -> None:
    topology.begin(Selection(number=3))
    topology.batch()
    topology.world.lead()
    assert topology.advance() == ["completed"]
    topology.clean()


def test_an_upgrade_whose_record_is_gone_ends(topology: Upgraded) -> None:
    topology.begin()
    topology.batch()
    topology.world.cluster.state.delete_node(paths.gray_upgrade(topology.id, "conf"))
    assert topology.advance() == ["rolled back"]
    topology.clean()


def history(topology: Upgraded) -> list[tuple[str, str]]:
    """(action, reason) of the changes since the submission, oldest first."""
    changes = [(change.action, change.why) for change in topology.assignment.history]
    assert changes.pop() == ("submitted", f"as {topology.id}")
    return changes[::-1]


def test_the_history_has_the_begin_and_the_completion(topology: Upgraded) -> None:
    code = topology.begin(Selection(component="split", number=1)).state.record.code_dir
    begun = ("upgrade begun", f"to {code}: first 1 of the workers of split")
    assert history(topology) == [begun]
    topology.batch()
    lifecycle.gray_upgrade(topology.world.context(), "wc", Selection(number=9))
    topology.batch()
    assert topology.advance() == ["completed"]
    assert history(topology) == [begun, ("upgrade completed", "all 3 workers run the new code")]
    assert topology.assignment.code_dir == code


@pytest.mark.parametrize("reason", [None, "h:1: a task could not be opened"])
def test_the_history_has_a_rollback_with_its_reason(topology: Upgraded, reason: str | None) -> None:
    topology.begin()
    topology.batch()
    lifecycle.roll_back(topology.world.context(), "wc", reason)
    topology.supervise()
    assert topology.advance() == ["rolled back"]
    assert history(topology)[1:] == [("upgrade rolled back", reason or "it was asked for")]
    assert topology.assignment.code_dir == topology.id
