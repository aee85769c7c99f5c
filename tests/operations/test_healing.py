"""Dead workers, lost hosts and silent masters on a real cluster state: observed, placed again,
fenced.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, get_args

import pytest

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.core.liveness.causes import Cause, LivenessMemory
from storm_dagster.core.liveness.detection import observe
from storm_dagster.core.liveness.limits import LivenessLimits
from storm_dagster.core.transitions import DueMemory
from storm_dagster.model import paths
from storm_dagster.model.errors import Fenced, Unavailable
from storm_dagster.model.names import placement_key
from storm_dagster.model.records import TopologyStatus, encode_record
from storm_dagster.operations.context import load_runnable
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.live.blacklist import change_blacklist
from storm_dagster.operations.live.deploy import restart
from storm_dagster.operations.live.healing import reassign
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.operations.read.explaining import explain_document
from storm_dagster.zk.sensor_memory import decode_memory, encode_memory
from storm_rigs.operations.snapshots import show
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper

LIMITS = LivenessLimits()


class Observer:
    """One observer with a clock of its own."""

    def __init__(self, world: World, limits: LivenessLimits = LIMITS) -> None:
        self.world = world
        self.limits = limits
        self.now = 1000.0
        self.memory = LivenessMemory()

    def poll(self, after: float = 1.0, **options: Any) -> Any:
        """Look ``after`` seconds later; supervisors have completed a loop meanwhile."""
        self.now += after
        for supervisor_id, info in self.world.cluster.load_view().supervisors.items():
            beat = encode_record(info.model_copy(update={"count": info.count + 1}))
            self.world.cluster.state.set_ephemeral_node(paths.supervisor(supervisor_id), beat)
        view = self.world.cluster.load_view()
        seen = observe(view, self.memory, self.limits, boot_id="b", boot_now=self.now, **options)
        self.memory = decode_memory(LivenessMemory, encode_memory(seen.memory))
        assert self.memory == seen.memory
        return seen


def started(world: World, workers: int = 2) -> tuple[str, Any]:
    topology_id = world.submit("wc", conf={"topology.workers": workers})
    world.run_workers(topology_id)
    observer = Observer(world)
    assert observer.poll().causes == ()
    return topology_id, observer


def assignment_of(world: World, topology_id: str) -> Any:
    return world.cluster.load_view().topologies[topology_id].assignment


def lose_first_worker(world: World, topology_id: str) -> None:
    """The host of the first worker is gone: its supervisor and this worker."""
    worker = assignment_of(world, topology_id).workers[0]
    world.cluster.state.delete_node(paths.supervisor(worker.node))
    world.stop_worker(topology_id, *worker.slot)


def test_a_lost_host_is_placed_elsewhere_at_once(world: World) -> None:
    topology_id, observer = started(world)
    old = assignment_of(world, topology_id)
    world.cluster.state.delete_node(paths.supervisor("s2"))
    assert observer.poll().causes == (), "a lost supervisor alone moves nothing"
    (lost,) = [worker for worker in old.workers if worker.node == "s2"]
    world.stop_worker(topology_id, "s2", lost.port)
    (cause,) = observer.poll().causes
    assert (cause.kind, cause.node, cause.tasks) == ("lost_host", "s2", lost.ids)
    world.time += 50
    (report,) = reassign(world.context(), [Cause.from_json(cause.to_json())])
    assert report.status == "assigned" and report.moved == len(lost.ids)
    new = assignment_of(world, topology_id)
    assert {worker.node for worker in new.workers} == {"s1"}
    assert set(new.node_host) == {"s1"}
    assert new.history[0].outage_secs == 2, "since its counter last rose"
    slots, starts = new.task_slots(), new.start_secs()
    for task, slot in old.task_slots().items():
        if task in lost.ids:
            assert starts[task] == world.time
        else:
            assert slots[task] == slot and starts[task] == world.time - 50
    # The same cause again is void: it speaks of an older assignment.
    assert [part.status for part in reassign(world.context(), [cause])] == ["void"]
    world.run_workers(topology_id)
    assert observer.poll().causes == ()


@pytest.mark.parametrize("changes", [1, 2])
def test_a_run_heals_also_if_the_leader_changes_before_its_commit(
    world: World, changes: int
) -> None:
    """A host and the leader are lost together: the run is one, and needs no second one."""
    topology_id, observer = started(world)
    (lost,) = [
        worker for worker in assignment_of(world, topology_id).workers if worker.node == "s2"
    ]
    world.cluster.state.delete_node(paths.supervisor("s2"))
    world.stop_worker(topology_id, "s2", lost.port)
    causes = observer.poll().causes
    left = [changes]

    def change_leader(point: str) -> None:
        if point == "before.reassign" and left[0]:
            left[0] -= 1
            world.lead()

    (report,) = reassign(world.context(checkpoint=change_leader), causes)
    assert (report.status, report.moved) == ("assigned", len(lost.ids))
    assert {worker.node for worker in assignment_of(world, topology_id).workers} == {"s1"}


def test_a_worker_that_crashed_is_its_supervisors_business_until_the_limit(world: World) -> None:
    topology_id, observer = started(world)
    worker = assignment_of(world, topology_id).workers[0]
    world.stop_worker(topology_id, *worker.slot)
    world.supervisor(worker.node, restarting=(worker.port,))
    seen = observer.poll()
    assert seen.causes == () and seen.restarting == ((topology_id, *worker.slot),)
    assert seen.next_check == observer.now + 120
    assert observer.poll(119).causes == ()
    (cause,) = observer.poll(2).causes
    assert cause.kind == "dead_worker"
    (report,) = reassign(world.context(), [cause])
    new = assignment_of(world, topology_id)
    assert worker.slot not in {part.slot for part in new.workers}, (
        "its port is not offered in this round"
    )
    assert report.planner == "python"


def test_a_worker_that_nobody_restarts_is_dead_after_the_task_timeout(world: World) -> None:
    topology_id, observer = started(world)
    worker = assignment_of(world, topology_id).workers[0]
    world.stop_worker(topology_id, *worker.slot)
    observer.poll()
    assert observer.poll(30).causes == ()
    (cause,) = observer.poll(1).causes
    assert cause.kind == "dead_worker" and cause.tasks == worker.ids


def test_an_assignment_history_has_action_reason_and_run(world: World) -> None:
    topology_id, observer = started(world)
    worker = assignment_of(world, topology_id).workers[0]
    world.stop_worker(topology_id, *worker.slot)
    observer.poll()
    (cause,) = observer.poll(31).causes
    (report,) = reassign(world.context(run="run-7"), [Cause.from_json(cause.to_json())])
    rebalance(world.context(), "wc", executors={"split": 3}, wait_secs=0)
    restart(world.context(), "wc")
    found = assignment_of(world, topology_id).history
    assert [change.action for change in found] == ["restarted", "rebalanced", "healed", "submitted"]
    assert "split with 3 executors instead of" in found[1].why and not found[1].run
    healed = found[2]
    assert healed.why == f"worker {worker.address} did not come back ({len(worker.ids)} tasks)"
    assert (healed.moved, healed.outage_secs, healed.run) == (report.moved, 31, "run-7")
    for _ in range(25):
        restart(world.context(), "wc")
    assert [change.action for change in assignment_of(world, topology_id).history] == [
        "restarted"
    ] * 20


def test_a_worker_that_comes_back_is_forgotten(world: World) -> None:
    topology_id, observer = started(world)
    worker = assignment_of(world, topology_id).workers[0]
    world.stop_worker(topology_id, *worker.slot)
    observer.poll()
    world.run_workers(topology_id)
    observer.poll(29)
    world.stop_worker(topology_id, *worker.slot)
    assert observer.poll(10).causes == ()


def test_a_launch_has_its_own_limit(world: World) -> None:
    world.submit("wc")
    observer = Observer(world)
    observer.poll()
    assert observer.poll(120).causes == ()
    assert [cause.kind for cause in observer.poll(1).causes] == ["dead_worker"]


def test_a_new_observer_grants_one_full_timeout(world: World) -> None:
    topology_id, _ = started(world)
    for worker in assignment_of(world, topology_id).workers:
        world.stop_worker(topology_id, *worker.slot)
    world.cluster.state.delete_node(paths.supervisor("s1"))
    world.cluster.state.delete_node(paths.supervisor("s2"))
    observer = Observer(world)
    assert observer.poll().causes == ()
    assert observer.poll(30).causes == ()
    assert len(observer.poll(1).causes) == 2
    assert observer.poll(1, restart_limits=True).causes == (), (
        "after an outage everything begins from zero"
    )


def test_dead_tasks_take_their_whole_worker(world: World) -> None:
    topology_id, observer = started(world)
    hung = next(worker for worker in world.assignment().workers if 6 not in worker.ids)
    beats = world.beats().model_copy(update={"dead": str(hung.ids[0])})
    world.cluster.write_beats(topology_id, beats, assignment_version=0)
    (cause,) = observer.poll().causes
    assert (cause.kind, cause.tasks) == ("dead_task", hung.ids)
    (report,) = reassign(world.context(), [cause])
    assert report.status == "assigned"
    # The record is older than the new placement: it says nothing about it.
    world.run_workers(topology_id)
    assert observer.poll().causes == ()


def test_a_silent_topology_master_loses_its_worker_only(world: World) -> None:
    topology_id, observer = started(world)
    beats = world.beats().model_copy(update={"dead": "1-4"})
    world.cluster.write_beats(topology_id, world.beats(), assignment_version=0)
    observer.poll()
    for _ in range(3):
        alive = beats.model_copy(update={"dead": ""})
        world.cluster.write_beats(topology_id, alive, assignment_version=0)
        assert observer.poll(29).causes == ()
    (cause,) = observer.poll(31).causes
    assert cause.kind == "silent_master" and 6 in cause.tasks


def test_beats_before_the_first_report_have_the_launch_limit(world: World) -> None:
    _, observer = started(world)
    assert observer.poll(118).causes == ()
    assert [cause.kind for cause in observer.poll(5).causes] == ["silent_master"]


def test_the_local_planner_steps_in_when_spark_is_out_of_reach(world: World) -> None:
    def planner(batch: Any) -> Any:
        raise Unavailable("Spark is out of reach")

    topology_id, observer = started(world)
    lose_first_worker(world, topology_id)
    (cause,) = observer.poll().causes
    (report,) = reassign(world.context(planner=planner), [cause])
    assert (report.status, report.planner) == ("assigned", "python")
    assert report.why_planner == "Spark is out of reach"


def test_what_finds_no_slot_fails_with_the_reason_and_stays(world: World) -> None:
    topology_id, observer = started(world)
    before = assignment_of(world, topology_id)
    world.supervisor("s1", ports=tuple(w.port for w in before.workers if w.node == "s1"))
    world.cluster.state.delete_node(paths.supervisor("s2"))
    for worker in before.workers:
        if worker.node == "s2":
            world.stop_worker(topology_id, *worker.slot)
    causes = observer.poll().causes
    (report,) = reassign(world.context(), causes)
    assert report.status == "failed" and "slot" in (report.error or "")
    assert assignment_of(world, topology_id) == before


def test_a_deposed_leader_reassigns_nothing(world: World) -> None:
    topology_id, observer = started(world)
    lose_first_worker(world, topology_id)
    causes = observer.poll().causes
    old = world.context(epoch=world.context().current_epoch())
    world.lead("127.0.0.1:6628")
    before = world.cluster.read_assignment(topology_id)
    with pytest.raises(Fenced):
        reassign(old, causes)
    assert world.cluster.read_assignment(topology_id) == before


def test_topologies_that_went_or_are_going_are_left_alone(world: World) -> None:
    topology_id, observer = started(world)
    lose_first_worker(world, topology_id)
    (cause,) = observer.poll().causes
    lifecycle.kill(world.context(), "wc", 60)
    assert observer.poll().causes == ()
    outsider = replace(cause, topology_id="none-1-1", name="none")
    assert [part.status for part in reassign(world.context(), [cause, outsider])] == [
        "gone",
        "gone",
    ]


def test_a_blacklisted_host_gets_nothing_and_keeps_what_runs(world: World) -> None:
    topology_id, observer = started(world)
    before = assignment_of(world, topology_id)
    world.supervisor("s3")
    change_blacklist(world.context(), add=["s1"])
    lost = next(worker for worker in before.workers if worker.node == "s2")
    world.cluster.state.delete_node(paths.supervisor("s2"))
    world.stop_worker(topology_id, *lost.slot)
    (report,) = reassign(world.context(), observer.poll().causes)
    assert report.status == "assigned"
    assert {worker.node for worker in assignment_of(world, topology_id).workers} == {"s1", "s3"}


def test_too_few_workers_take_slots_that_join_with_the_fewest_moves(world: World) -> None:
    world.cluster.state.delete_node(paths.supervisor("s2"))
    conf = {"topology.scheduler.strategy": "even", "topology.workers": 6}
    topology_id = world.submit("wc", conf=conf)
    world.run_workers(topology_id)
    observer = Observer(world, replace(LIMITS, window_secs=8))
    before = assignment_of(world, topology_id)
    assert observer.poll().causes == () and len(before.workers) == 4
    world.supervisor("s2")
    assert observer.poll().causes == (), "it may go again"
    assert observer.poll(7).causes == ()
    (cause,) = observer.poll(1).causes
    assert (
        cause.describe()
        == "topology 'wc': it has fewer workers than it asked for, and slots are free"
    )
    ctx = world.context()
    # What it is while its status is another one, or a worker is dead, is decided when the run
    # starts.
    base = world.named("wc").base
    for status in ("REBALANCING", "ACTIVE"):
        changed = encode_record(base.model_copy(update={"status": status}))
        world.cluster.state.set_data(paths.topology(topology_id), changed)
        (report,) = reassign(ctx, [Cause.from_json(cause.to_json())])
        assert report.status == ("void" if status == "REBALANCING" else "assigned")
    after = assignment_of(world, topology_id)
    old, new = before.task_slots(), after.task_slots()
    assert len(after.workers) == 6 and {worker.node for worker in after.workers} == {"s1", "s2"}
    # No plan of six workers has fewer: each new worker takes its share, all else stays.
    joined = [worker for worker in after.workers if worker.node == "s2"]
    assert (
        report.moved
        == sum(old[task] != slot for task, slot in new.items())
        == sum(len(w.ids) for w in joined)
    )
    # A host that goes is healed; when it is back at once nothing moves again.
    world.run_workers(topology_id)
    world.cluster.state.delete_node(paths.supervisor("s2"))
    for worker in joined:
        world.stop_worker(topology_id, *worker.slot)
    observer.poll()
    reassign(ctx, observer.poll().causes)
    assert {worker.node for worker in assignment_of(world, topology_id).workers} == {"s1"}
    world.run_workers(topology_id)
    world.supervisor("s2")
    assert [observer.poll(after).causes for after in (1, 20, 20)] == [(), (), ()]
    (again,) = [cause for after in (20,) * 30 for cause in observer.poll(after).causes][-1:]
    assert again.kind == "too_few_workers"


@pytest.mark.parametrize("status", sorted(get_args(TopologyStatus)))
def test_dead_tasks_are_healed_in_every_status_but_the_last(
    world: World, status: TopologyStatus
) -> None:
    topology_id, observer = started(world)
    base = world.named().base.model_copy(
        update={"status": status, "previous_status": "ACTIVE", "delay_secs": 600}
    )
    world.cluster.state.set_data(paths.topology(topology_id), encode_record(base))
    lose_first_worker(world, topology_id)
    causes = observer.poll().causes
    if status == "KILLED":
        assert causes == ()
        return
    (report,) = reassign(world.context(), causes)
    assert report.status == "assigned" and report.assignment and world.named().base == base
    if status == "REBALANCING":
        world.run_workers(topology_id)
        lifecycle.finish_due(
            world.context(),
            DueMemory("b", {topology_id: (world.named().base_at.mzxid, 0.0)}),
            boot_id="b",
            boot_now=601.0,
        )
        assert world.named().base.status == "ACTIVE"
        assert {worker.node for worker in assignment_of(world, topology_id).workers} == {
            report.assignment.workers[0].node
        }


def test_reasons_that_cannot_be_stored_keep_nothing_from_being_placed(
    world: World, monkeypatch: Any
) -> None:
    topology_id, observer = started(world)
    stored = LocalBlobStore.put

    def put(store: LocalBlobStore, key: str, *args: Any, **options: Any) -> Any:
        if key == placement_key(topology_id):
            raise OSError(28, "No space left on device")
        return stored(store, key, *args, **options)

    monkeypatch.setattr(LocalBlobStore, "put", put)
    lose_first_worker(world, topology_id)
    before = json.loads(world.blobs.read(placement_key(topology_id)))
    (report,) = reassign(world.context(), observer.poll().causes)
    assert report.status == "assigned"
    assert rebalance(world.context(), "wc", workers=1, wait_secs=0).outcome == "assigned"
    view = world.cluster.load_view()
    topology, ctx = view.topologies[topology_id], world.context()
    said = explain_document(view, topology, load_runnable(ctx, topology), before, ())
    assert said["reasons"].keys() == before["reasons"].keys() == said["slots"].keys()
    former = {
        str(task): (one["node"], one["port"]) for one in before["workers"] for task in one["tasks"]
    }
    slots = assignment_of(world, topology_id).task_slots()
    moved = {str(task) for task, slot in slots.items() if former[str(task)] != slot}
    for task in moved:
        assert (
            explain_document(view, topology, load_runnable(ctx, topology), before, (), int(task))[
                "choice"
            ]
            is None
        )
    assert (
        moved
        == {task for task, why in said["reasons"].items() if "could not be stored" in why}
        != set()
    )
    assert {task: said["reasons"][task] for task in former.keys() - moved}.items() <= before[
        "reasons"
    ].items()


def hang(world: World, topology_id: str, worker: Any, observer: Any) -> None:
    version = world.named().assignment_at.version  # type: ignore[union-attr]
    beats = world.beats().model_copy(update={"dead": worker.tasks, "version": version})
    world.cluster.write_beats(topology_id, beats, assignment_version=version)


def lose(world: World, topology_id: str, worker: Any, observer: Any) -> None:
    world.cluster.state.delete_node(paths.supervisor(worker.node))
    world.stop_worker(topology_id, *worker.slot)


def crash(world: World, topology_id: str, worker: Any, observer: Any) -> None:
    world.stop_worker(topology_id, *worker.slot)
    observer.poll()
    observer.now += 31


def start_for_ever(world: World, topology_id: str, worker: Any, observer: Any) -> None:
    world.run_workers(topology_id, status="starting")
    world.cluster.write_beats(topology_id, world.beats(), assignment_version=0)
    observer.poll()
    observer.now += 90
    world.cluster.write_beats(topology_id, world.beats(), assignment_version=0)
    observer.poll()
    observer.now += 31


def silence(world: World, topology_id: str, worker: Any, observer: Any) -> None:
    world.cluster.write_beats(topology_id, world.beats(), assignment_version=0)
    observer.poll()
    observer.now += 31


@pytest.mark.parametrize(
    ("kind", "fail"),
    [
        ("dead_task", hang),
        ("lost_host", lose),
        ("dead_worker", crash),
        ("never_ran", start_for_ever),
        ("silent_master", silence),
    ],
)
@pytest.mark.parametrize("recovers", [True, False])
def test_a_run_judges_again_when_it_starts(
    world: World, kind: str, fail: Any, recovers: bool
) -> None:
    topology_id, observer = started(world)
    before = assignment_of(world, topology_id)
    fail(world, topology_id, before.workers[0], observer)
    causes = [Cause.from_json(cause.to_json()) for cause in observer.poll().causes]
    assert {cause.kind for cause in causes} == {kind}
    if recovers:
        world.supervisor(before.workers[0].node)
        world.run_workers(topology_id)
        world.cluster.write_beats(
            topology_id, world.beats().model_copy(update={"dead": ""}), assignment_version=0
        )
    world.supervisor("s3")
    (report,) = reassign(world.context(), causes)
    assert report.status == ("void" if recovers else "assigned")
    assert (assignment_of(world, topology_id) == before) is recovers


def test_a_report_about_a_former_assignment_kills_nothing(world: World) -> None:
    topology_id, observer = started(world)
    worker = world.assignment().workers[0]
    lose(world, topology_id, worker, observer)
    (report,) = reassign(world.context(), observer.poll().causes)
    world.run_workers(topology_id)
    # Judged by the slots of version 0, and written when version 1 was in force already.
    beats = world.beats().model_copy(update={"dead": worker.tasks, "version": 0})
    world.cluster.write_beats(topology_id, beats, assignment_version=1)
    assert report.version == 1 and observer.poll().causes == ()
    assert {
        task["status"] for task in show(world.cluster.load_view(), "wc", now_secs=0)["tasks"]
    } == {"running"}


def test_two_healers_at_once_move_nothing_twice(world: World) -> None:
    topology_id, observer = started(world)
    lose(world, topology_id, world.assignment().workers[0], observer)
    causes = observer.poll().causes
    with ThreadPoolExecutor(4) as pool:
        reports = [
            part
            for found in pool.map(lambda _: reassign(world.context(), causes), range(4))
            for part in found
        ]
    assert sorted(report.status for report in reports) == ["assigned", "void", "void", "void"]
    assert world.named().assignment_at.version == 1  # type: ignore[union-attr]
