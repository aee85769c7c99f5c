"""Two real workers on a real ZooKeeper: counting, dying, freezing, moving."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from kazoo.security import make_digest_acl

from storm_dagster.model import paths
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.exit_codes import EXIT_STOPPED, EXIT_SUPERSEDED
from storm_dagster.model.metric_ids import MetricIds
from storm_dagster.model.records import decode_record
from storm_dagster.operations.live.worker_requests import ask_worker
from storm_dagster.testing.task_state import read_task_states
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.operations.beats import read_beats
from storm_rigs.operations.storm_client import as_storm
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.conf import zookeeper_conf
from storm_rigs.stage.worker_processes import WorkerRig

pytestmark = pytest.mark.zookeeper

Slots = tuple[tuple[str, int], tuple[str, int]]


def expected(lines: int) -> Counter[str]:
    total: Counter[str] = Counter()
    for line in range(lines):
        total.update(f"a b c w{line % 7} a".split())
    return total


def counted(rig: WorkerRig) -> Counter[str]:
    total: Counter[str] = Counter()
    for state in read_task_states(rig.folder / "state", "wc", "count").values():
        total.update(dict(state.items()))
    return total


def metric_ids(rig: WorkerRig) -> MetricIds:
    raw = rig.cluster.state.get_data(paths.metrics(rig.topology_id))
    return decode_record(MetricIds, raw) if raw else MetricIds(sample_rate=0)


def acked(rig: WorkerRig) -> set[int]:
    return {int(line) for path in rig.folder.glob("acked-*") for line in path.read_text().split()}


@pytest.fixture
def slots() -> Slots:
    return ("s1", free_port()), ("s2", free_port())


def start_two(rig: WorkerRig, slots: Slots) -> None:
    one, two = slots
    rig.assign({one: "1,3,5-7", two: "2,4"})
    rig.start(*one)
    rig.start(*two)
    eventually(rig.running, 90, "both workers run")


def test_counts_every_line_once_and_reports(
    make_rig: Callable[..., WorkerRig], slots: Slots
) -> None:
    rig = make_rig(
        {"rig.lines": 2000, "topology.max.spout.pending": 200, "storm.log.format": "json"}
    )
    start_two(rig, slots)
    eventually(lambda: len(acked(rig)) == 2000, what="all lines are acked")
    assert counted(rig) == expected(2000)
    beats = eventually(
        lambda: len(rig.beats().workers) == 2 and rig.beats(), what="beats of both workers"
    )
    assert beats.dead == ""
    first = beats.workers
    eventually(
        lambda: all(rig.beats().workers[key].count > first[key].count for key in first),
        what="counters rise",
    )
    node = rig.live()[slots[0]]
    eventually(
        lambda: (
            sum(
                task["stats"]["executed"]
                for task in ask_worker("127.0.0.1", slots[0][1], node.token, "stats", 20)[
                    "tasks"
                ].values()
                if task["component"] == "count"
            )
            == 4 * 2000
        ),
        what="the topology master knows every executed tuple",
    )
    document = ask_worker("127.0.0.1", slots[0][1], node.token, "stats", 20)
    assert set(document["tasks"]) == {"1", "2", "3", "4", "5", "6", "7"}
    assert document["tasks"]["7"]["stats"]["acked"] == 2000
    assert {
        task["metrics"]["newest"] for task in document["tasks"].values() if task["metrics"]
    } <= set(range(2000))
    registered = eventually(
        lambda: metric_ids(rig).ids and metric_ids(rig), what="ids of the metrics"
    )
    assert registered == MetricIds(sample_rate=0.05, ids={"count:newest": 1})
    spout = document["tasks"]["7"]["stats"]
    assert spout["complete_ms"] > 0, "latencies are sampled, counts are exact"
    assert document["workers"][f"s1:{slots[0][1]}"]["pid"] == node.pid
    assert "stacks" in ask_worker("127.0.0.1", slots[0][1], node.token, "stacks", 20)
    for process in rig.processes.values():
        process.terminate()
    assert [process.wait(patience(60)) for process in rig.processes.values()] == [0, 0]
    assert rig.live() == {}
    assert not list((rig.folder / "run").glob("worker-*"))
    logged = [json.loads(line) for line in rig.log(*slots[0]).splitlines()]
    assert {line["topology"] for line in logged} == {rig.topology_id}
    (of_spout,) = [line for line in logged if line["message"] == "0 lines are acked"]
    assert (of_spout["task"], of_spout["component"], of_spout["level"]) == (7, "lines", "INFO")


def test_a_worker_that_may_do_nothing_any_more_ends(
    make_rig: Callable[..., WorkerRig], slots: Slots
) -> None:
    """Its user in ZooKeeper went with the cluster's former secret: another worker gets the new
    one.
    """
    rig = make_rig({"rig.lines": 10})
    start_two(rig, slots)
    session, path = rig.cluster.session, paths.assignment(rig.topology_id)
    closed = [make_digest_acl("new", "secret", all=True)]
    session.call(lambda client: client.set_acls_async(session.full(path), closed), "an ACL")
    rig.set_status("INACTIVE")
    assert [process.wait(patience(60)) for process in rig.processes.values()] == [EXIT_STOPPED] * 2
    assert "check the credentials" in rig.log(*slots[0])


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.chaos), 1])
def test_a_killed_worker_is_restarted_and_nothing_is_lost(
    make_rig: Callable[..., WorkerRig], slots, victim: int
) -> None:
    rig = make_rig({"rig.lines": 3000, "rig.pause": 0.0005, "topology.message.timeout.secs": 2})
    start_two(rig, slots)
    eventually(lambda: len(acked(rig)) > 300, what="some lines are acked")
    rig.processes[slots[victim]].kill()
    rig.processes[slots[victim]].wait()
    # At once, although the session of the dead process still stands.
    rig.start(*slots[victim])
    eventually(lambda: len(acked(rig)) == 3000, timeout=60, what="all lines are acked")
    assert counted(rig) == expected(3000)


def test_a_tuple_that_breaks_a_bolt_is_replayed_and_shown(
    make_rig: Callable[..., WorkerRig], slots: Slots
) -> None:
    rig = make_rig({"rig.lines": 500}, splitter="Poison")
    start_two(rig, slots)
    pids = {slot: node.pid for slot, node in rig.live().items()}
    eventually(lambda: len(acked(rig)) == 500, what="all lines are acked")
    assert counted(rig) == expected(500)
    errors = eventually(
        lambda: as_storm(rig.cluster).errors(rig.topology_id), what="errors are recorded"
    )
    assert "poison" in errors[0].error and errors[0].task in (1, 2)
    assert {slot: node.pid for slot, node in rig.live().items()} == pids


def test_a_frozen_worker_pauses_before_it_goes_on(
    make_rig: Callable[..., WorkerRig], slots: Slots
) -> None:
    rig = make_rig({"rig.lines": 10**9, "rig.pause": 0.001, "topology.message.timeout.secs": 2})
    start_two(rig, slots)
    eventually(lambda: len(acked(rig)) > 50, what="some lines are acked")
    process = rig.processes[slots[1]]
    os.kill(process.pid, signal.SIGSTOP)
    eventually(lambda: slots[1] not in rig.live(), what="its session ends")
    before = len(acked(rig))
    os.kill(process.pid, signal.SIGCONT)
    eventually(lambda: slots[1] in rig.live(), what="it claims its slot again")
    assert process.poll() is None
    eventually(lambda: len(acked(rig)) > before + 500, what="lines are acked again")
    assert "the lease ended" in rig.log(*slots[1])


def test_a_frozen_worker_whose_tasks_moved_exits(
    make_rig: Callable[..., WorkerRig], slots: Slots
) -> None:
    rig = make_rig({"rig.lines": 3000, "rig.pause": 0.001, "topology.message.timeout.secs": 2})
    start_two(rig, slots)
    eventually(lambda: len(acked(rig)) > 50, what="some lines are acked")
    process = rig.processes[slots[1]]
    os.kill(process.pid, signal.SIGSTOP)
    rig.assign({slots[0]: "1-7"})
    # While the frozen process's node stands, nobody else opens its tasks.
    claims = eventually(
        lambda: rig.live()[slots[0]].version == 1 and rig.live(), what="the new version is applied"
    )
    if slots[1] in claims:
        assert claims[slots[0]].tasks == "1,3,5-7"
    eventually(lambda: rig.live()[slots[0]].tasks == "1-7", what="the tasks have moved")
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(patience(60)) == EXIT_SUPERSEDED
    eventually(lambda: len(acked(rig)) == 3000, timeout=60, what="all lines are acked")
    assert counted(rig) == expected(3000)


def test_tasks_move_in_place(make_rig: Callable[..., WorkerRig], slots: Slots) -> None:
    rig = make_rig({"rig.lines": 4000, "rig.pause": 0.0005, "topology.message.timeout.secs": 2})
    start_two(rig, slots)
    pids = {slot: node.pid for slot, node in rig.live().items()}
    eventually(lambda: len(acked(rig)) > 100, what="some lines are acked")
    rig.assign({slots[0]: "1-2,5-7", slots[1]: "3-4"})
    eventually(rig.running, timeout=90, what="the new places are taken")
    assert {slot: node.pid for slot, node in rig.live().items()} == pids
    eventually(lambda: len(acked(rig)) == 4000, timeout=60, what="all lines are acked")
    assert counted(rig) == expected(4000)


def test_an_inactive_topology_emits_nothing(
    make_rig: Callable[..., WorkerRig], slots: Slots
) -> None:
    rig = make_rig({"rig.lines": 10**9, "rig.pause": 0.001})
    one, two = slots
    rig.assign({one: "1,3,5-7", two: "2,4"}, status="INACTIVE")
    rig.start(*one)
    rig.start(*two)
    eventually(rig.running, timeout=90, what="both workers run")
    assert acked(rig) == set()
    rig.set_status("ACTIVE")
    eventually(lambda: len(acked(rig)) > 50, what="lines are acked")
    rig.set_status("INACTIVE")
    eventually(lambda: "the topology is inactive" in rig.log(*one), what="the spout is told")
    quiet = eventually(lambda: _unchanged(rig), what="nothing is emitted any more")
    assert quiet


def _unchanged(rig: WorkerRig) -> bool:
    import time

    before = len(acked(rig))
    time.sleep(0.3)
    return len(acked(rig)) == before


def test_a_killed_topology_ends_its_workers(
    make_rig: Callable[..., WorkerRig], slots: Slots
) -> None:
    rig = make_rig()
    start_two(rig, slots)
    as_storm(rig.cluster).remove_storm(rig.topology_id)
    assert [process.wait(patience(60)) for process in rig.processes.values()] == [
        EXIT_SUPERSEDED,
        EXIT_SUPERSEDED,
    ]


def test_frames_and_requests_of_unknown_senders_are_dropped(
    make_rig: Callable[..., WorkerRig], slots: Slots
) -> None:
    import zmq

    from storm_dagster.model.wire import Frame, encode_frame

    rig = make_rig()
    start_two(rig, slots)
    node = rig.live()[slots[0]]
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(f"tcp://127.0.0.1:{slots[0][1]}")
    for payload in (
        b"",
        b"\x00" * 100,
        b"\x80\x04\x95pickle",
        b'{"op": "stats", "token": "wrong"}',
        b"{" * 5000,
        encode_frame(Frame("unknown", [(3, 1, "default", [(0, 0, [["x", 1, 1]])])])),
    ):
        socket.send(payload)
    try:

        def dropped() -> bool:
            document = ask_worker("127.0.0.1", slots[0][1], node.token, "stats", 20)
            system = document["workers"][f"s1:{slots[0][1]}"]["system"]
            return system["bad_frames"] >= 4 and system["unknown_frames"] >= 2

        eventually(dropped, what="all of them are counted as dropped")
    finally:
        socket.close()
        context.term()
    assert "x" not in counted(rig)


def test_the_lease_pauses_when_zookeeper_is_silent(
    make_rig: Callable[..., WorkerRig], slots, zookeeper_server: str, tmp_path: Path
) -> None:
    from storm_rigs.servers.embedded_zookeeper import EmbeddedZooKeeper

    with EmbeddedZooKeeper(tmp_path / "own-zk", durable=False) as server:
        conf = {**zookeeper_conf(server.address), "storm.zookeeper.session.timeout": patience(2000)}
        with Stage(tmp_path / "own", conf) as stage:
            model = make_rig()
            tasks = {name: part.tasks for name, part in model.table.components.items()}
            rig = stage.workers(
                model.spec,
                tasks,
                conf={
                    "rig.lines": 10**9,
                    "rig.pause": 0.001,
                    "topology.message.timeout.secs": 2,
                    "task.heartbeat.frequency.secs": 1,
                    "nimbus.task.timeout.secs": patience(3),
                },
                code={"rig_code.py": (model.code_dir / "code" / "rig_code.py").read_text()},
            )
            try:
                start_two(rig, slots)
                eventually(lambda: len(acked(rig)) > 50, what="lines are acked")
                pids = {slot: node.pid for slot, node in rig.live().items()}
                os.kill(server.pid, signal.SIGSTOP)
                try:
                    eventually(
                        lambda: all("the lease ended" in rig.log(*slot) for slot in slots),
                        what="both pause",
                    )
                    assert _unchanged(rig)
                    assert all(process.poll() is None for process in rig.processes.values())
                    time.sleep(patience(3))  # longer than tasks may be silent
                finally:
                    os.kill(server.pid, signal.SIGCONT)
                before = len(acked(rig))
                held_dead: set[str] = set()

                def go_on() -> bool:
                    beats = read_beats(stage.cluster, rig.topology_id)
                    held_dead.add(beats.dead if beats else "no record")
                    return len(acked(rig)) > before + 100

                eventually(go_on, timeout=60, what="they go on", ignore=(Unavailable,))
                assert held_dead == {""}, "paused is not dead"
                eventually(
                    lambda: {slot: node.pid for slot, node in rig.live().items()} == pids,
                    60,
                    "the same processes",
                )
            finally:
                rig.stop()
