"""Which workers an upgrade takes, what it comes to, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from storm_dagster.core.upgrade.machine import (
    SlotRun,
    UpgradeEvent,
    code_for,
    due,
    early_failure,
    landed,
    next_move,
    pick,
    transition,
)
from storm_dagster.core.upgrade.selection import (
    Selection,
    UpgradeSnapshot,
    check_compatible,
    check_master_alone,
    check_selection,
    parse_workers,
    selection_of_conf,
)
from storm_dagster.model.errors import Conflict, InvalidRequest, InvalidTopology
from storm_dagster.model.records import (
    Assignment,
    ComponentTasks,
    GrayUpgrade,
    GrayWorker,
    StormBase,
    TaskTable,
    WorkerSlot,
)
from storm_dagster.model.topology import TopologySpec
from storm_dagster.model.view import UpgradeState

# The topology master alone; split runs on a:6901, b:6901 and b:6902 in all these tests.
SLOTS = {"a:6900": "1", "b:6902": "6,9", "a:6902": "5", "b:6901": "4,8", "a:6901": "2-3,7"}
TABLE = TaskTable(
    components={
        "__topology_master": ComponentTasks(type="bolt", tasks="1"),
        "split": ComponentTasks(type="bolt", tasks="3-4,6"),
        "count": ComponentTasks(type="bolt", tasks="2,5"),
        "lines": ComponentTasks(type="spout", tasks="7-9"),
    }
)
ALL = ("a:6901", "a:6902", "b:6901", "b:6902")


def assignment(**changes: Any) -> Assignment:
    workers = []
    for address, tasks in SLOTS.items():
        host, port = address.split(":")
        workers.append(WorkerSlot(node=f"s-{host}", host=host, port=int(port), tasks=tasks))
    given: dict[str, Any] = {
        "topology_id": "wc-1-1",
        "code_dir": "wc-1-1",
        "node_host": {"s-a": "a", "s-b": "b"},
        "workers": tuple(workers),
        "task_start_secs": {},
        "timestamp_ms": 1,
    }
    return Assignment(**{**given, **changes})


def state(*upgraded: str, upgrading: tuple[str, ...] = (), **record: Any) -> UpgradeState:
    wanted = {"expires": 1000, "code_dir": "wc-1-1.2", **record}
    asked = wanted.pop("continue_", True)
    return UpgradeState(
        at=3,
        record=GrayUpgrade(**wanted).model_copy(update={"continue_": asked}),
        upgrading=dict.fromkeys(upgrading, GrayWorker()),
        upgraded=dict.fromkeys(upgraded, GrayWorker(boot_id="b", started=100.0)),
    )


def snapshot(found: UpgradeState, placed: Assignment | None = None) -> UpgradeSnapshot:
    return UpgradeSnapshot(found, placed or assignment(), TABLE)


def picked(found: UpgradeState) -> tuple[str, ...]:
    batch = pick(snapshot(found))
    assert batch is not None
    assert not batch.record.continue_ and batch.record.workers == ()
    return batch.workers


def test_a_number_takes_the_lowest_hosts_and_ports() -> None:
    assert picked(state(number=2)) == ("a:6901", "a:6902")
    assert picked(state("a:6901", number=2)) == ("a:6902", "b:6901")
    assert picked(state(number=9)) == ALL


def test_a_component_takes_its_workers_and_is_cleared_when_none_is_left() -> None:
    def component(found: UpgradeState) -> tuple[tuple[str, ...], str | None]:
        batch = pick(snapshot(found))
        assert batch is not None
        return batch.workers, batch.record.component

    assert component(state(component="split")) == (("a:6901", "b:6901", "b:6902"), None)
    assert component(state(component="split", number=2)) == (("a:6901", "b:6901"), "split")
    assert component(state(component="split", number=3)) == (("a:6901", "b:6901", "b:6902"), None)
    assert component(state("a:6901", component="split", number=1)) == (("b:6901",), "split")


def test_named_workers_count_before_all_else() -> None:
    assert picked(state(workers=("b:6902", "a:6901"), component="count", number=1)) == (
        "a:6901",
        "b:6902",
    )
    assert picked(state("a:6901", workers=("a:6901", "b:6902"))) == ("b:6902",)
    # What was asked for may have gone since: then nothing is taken, and the caller may ask again.
    assert picked(state(workers=("x:1",))) == ()


def test_the_topology_masters_worker_is_never_taken() -> None:
    assert "a:6900" not in picked(state(number=100))
    assert picked(state(component="__topology_master")) == ()


@pytest.mark.parametrize(
    "waiting",
    [
        UpgradeState(at=1),
        state(number=1, continue_=False),
        state(number=1, upgrading=("a:6901",)),
        state(number=1, rollback=True),
    ],
)
def test_nothing_is_picked_unasked_during_a_batch_or_a_rollback(waiting: UpgradeState) -> None:
    assert pick(snapshot(waiting)) is None


@pytest.mark.parametrize(
    ("selection", "says"),
    [
        (Selection(), "no workers are selected"),
        (Selection(number=-1), "-1 workers"),
        (Selection(workers=("x:1",)), "no worker x:1"),
        (Selection(workers=("a:6900",)), "topology master"),
        (Selection(component="nope"), "no component 'nope'"),
        (Selection(component="__topology_master"), "no component"),
        (Selection(workers=("a:6901",)), "run the new code already"),
    ],
)
def test_a_selection_that_cannot_be_is_refused(selection: Selection, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        check_selection(selection, snapshot(state("a:6901")))


def test_a_selection_that_can_be() -> None:
    for selection in (
        Selection(number=1),
        Selection(component="split"),
        Selection(workers=("a:6901", "b:6901")),
    ):
        check_selection(selection, snapshot(state("a:6901")))


def test_workers_are_read_from_text_lists_and_conf() -> None:
    assert parse_workers("h1:6900, h2:6901,h1:6900") == ("h1:6900", "h2:6901")
    assert parse_workers(["::1:6900"]) == ("::1:6900",)
    assert parse_workers("") == ()
    for wrong in ("bad", "h1:x", ":1", "h1:6900,bad", [1], 5):
        with pytest.raises(InvalidRequest):
            parse_workers(wrong)  # type: ignore[arg-type]
    conf = {
        "topology.upgrade.workers": "a:1",
        "topology.upgrade.component": "split",
        "topology.upgrade.worker.num": 2,
    }
    assert selection_of_conf(conf) == Selection(("a:1",), "split", 2)
    assert selection_of_conf({}).empty


def test_the_topology_master_needs_a_worker_of_its_own() -> None:
    check_master_alone(snapshot(state()))
    shared = assignment(workers=(WorkerSlot(node="s-a", host="a", port=6900, tasks="1-9"),))
    with pytest.raises(InvalidRequest, match=r"topology\.master\.single\.worker=true"):
        check_master_alone(snapshot(state(), shared))


def worker(address: str) -> WorkerSlot:
    return next(one for one in assignment().workers if one.address == address)


def test_each_worker_is_told_one_version() -> None:
    under_way = state("a:6901", upgrading=("a:6902",))
    assert code_for(worker("a:6901"), assignment(), under_way) == ("wc-1-1.2", True)
    assert code_for(worker("a:6902"), assignment(), under_way) == ("wc-1-1.2", True)
    assert code_for(worker("b:6901"), assignment(), under_way) == ("wc-1-1", False)
    back = state("a:6901", upgrading=("a:6902",), rollback=True)
    assert {code_for(one, assignment(), back)[0] for one in assignment().workers} == {"wc-1-1"}
    assert code_for(worker("a:6902"), assignment(), back)[1], (
        "a worker with the new code must go for the former"
    )
    # Afterwards the new code is for everybody's next start, and ends nobody's process.
    after = assignment(code_dir="wc-1-1.2")
    assert code_for(worker("b:6901"), after, UpgradeState(at=9)) == ("wc-1-1.2", False)
    assert code_for(worker("b:6901"), assignment(type="UpdateTopology"), None) == ("wc-1-1", True)


def run(code: str, *, running: bool = True, started: float = 100.0) -> SlotRun:
    return SlotRun(6901, "wc-1-1", code, started, running)


def move(found: UpgradeState, process: SlotRun | None, now: float = 110.0) -> Any:
    made = next_move("a:6901", found, "wc-1-1", process, boot_id="b", boot_now=now, launch_secs=120)
    return None if made is None else (made.kind, made.record.started, made.record.failed)


def test_a_worker_counts_as_upgraded_when_its_tasks_run() -> None:
    under_way = state(upgrading=("a:6901",))
    assert move(under_way, run("wc-1-1")) is None
    assert move(under_way, None) is None
    assert move(under_way, run("wc-1-1.2", running=False)) is None
    assert move(under_way, run("wc-1-1.2")) == ("upgraded", 100.0, None)
    kind, _, failed = move(under_way, run("wc-1-1.2", running=False), now=221.0)
    assert kind == "failed" and "within 120 s" in failed
    assert move(state("a:6901"), run("wc-1-1.2")) is None


def test_a_task_that_cannot_be_opened_fails_the_upgrade_at_once() -> None:
    text = "count[7]: ValueError: no file (wc.py, line 12)"
    under_way = state(upgrading=("a:6901",))
    kind, _, failed = move(under_way, replace(run("wc-1-1.2", running=False), failure=text))
    assert kind == "failed" and failed.startswith("a:6901: ") and text in failed
    # Of the former code it is no failure of the upgrade.
    assert move(under_way, replace(run("wc-1-1", running=False), failure=text)) is None


def test_a_worker_is_back_when_its_tasks_run_the_former_code() -> None:
    back = state("a:6901", rollback=True)
    assert move(back, run("wc-1-1.2")) is None
    assert move(back, run("wc-1-1", running=False)) is None
    assert move(back, run("wc-1-1")) == ("back", 0, None)
    assert move(state("b:6901", rollback=True), run("wc-1-1")) is None


def test_only_the_first_minute_of_the_new_code_fails_an_upgrade() -> None:
    def fails(
        found: UpgradeState, code: str = "wc-1-1.2", now: float = 130.0, boot: str = "b"
    ) -> bool:
        return early_failure("a:6901", found, code, "ended", boot_id=boot, boot_now=now) is not None

    assert fails(state(upgrading=("a:6901",))), "it never came up"
    assert fails(state("a:6901"))
    assert not fails(state("a:6901"), now=161.0), "later it is restarted like any other"
    assert not fails(state("a:6901"), boot="another boot")
    assert not fails(state("a:6901"), code="wc-1-1")
    assert not fails(state("b:6901"))
    assert not fails(state("a:6901", rollback=True))
    assert not fails(UpgradeState(at=1))


def test_what_an_upgrade_comes_to() -> None:
    def comes_to(
        found: UpgradeState, now: int = 10, placed: Assignment | None = None
    ) -> UpgradeEvent | None:
        return due(snapshot(found, placed), age_secs=now)

    assert comes_to(state("a:6901", upgrading=("a:6902",))) is None
    done = comes_to(state(*ALL))
    assert done is not None and done.action == "complete"
    late = comes_to(state("a:6901"), now=86_400)
    assert late is not None and late.action == "expire" and "1 of 4" in late.reason
    broken = state("a:6901")
    broken = UpgradeState(
        broken.at, broken.record, {"a:6902": GrayWorker(failed="a:6902: boom")}, broken.upgraded
    )
    failed = comes_to(broken, now=5000)
    assert failed == UpgradeEvent("roll_back", "a:6902: boom", "a:6902"), "also when its time is up"
    assert comes_to(state("a:6901", rollback=True)) is None
    back = comes_to(state(rollback=True))
    assert back is not None and back.action == "finish_rollback"
    # A host that is lost takes its entries along once its tasks are elsewhere.
    moved = assignment(workers=tuple(one for one in assignment().workers if one.host != "b"))
    assert comes_to(state("b:6901", rollback=True), placed=moved) is not None
    assert comes_to(state("a:6901", "a:6902"), placed=moved) == UpgradeEvent(
        "complete", "all 2 workers run the new code"
    )
    gone = comes_to(UpgradeState(at=2))
    assert gone is not None and gone.action == "abandon"


def base(status: str = "UPGRADING") -> StormBase:
    return StormBase(
        name="wc",
        status=status,
        launch_time_secs=0,
        workers=3,
        executors={},
        token="t",
        wanted_status="ACTIVE",
    )


BEGIN = UpgradeEvent(
    "begin",
    selection=Selection(number=1),
    record=GrayUpgrade(expires=1000, code_dir="wc-1-1.2"),
    former="wc-1-1",
)


@pytest.mark.parametrize(
    ("status", "found", "event", "outcome", "then"),
    [
        ("ACTIVE", UpgradeState(at=1), BEGIN, "begun", "UPGRADING"),
        (
            "UPGRADING",
            state("a:6901", continue_=False),
            UpgradeEvent("continue", selection=Selection(number=1)),
            "continued",
            "UPGRADING",
        ),
        ("UPGRADING", state("a:6901"), UpgradeEvent("complete"), "completed", "ACTIVE"),
        ("UPGRADING", state("a:6901"), UpgradeEvent("expire"), "expired", "ACTIVE"),
        ("UPGRADING", state("a:6901"), UpgradeEvent("roll_back"), "rolling back", "ROLLBACK"),
        ("UPGRADING", UpgradeState(at=1), UpgradeEvent("roll_back"), "abandoned", "ACTIVE"),
        ("UPGRADING", UpgradeState(at=1), UpgradeEvent("complete"), "abandoned", "ACTIVE"),
        ("UPGRADING", UpgradeState(at=1), UpgradeEvent("abandon"), "rolled back", "ACTIVE"),
        (
            "ROLLBACK",
            state(rollback=True),
            UpgradeEvent("finish_rollback"),
            "rolled back",
            "ACTIVE",
        ),
    ],
)
def test_each_event_has_one_transition(
    status: str, found: UpgradeState, event: UpgradeEvent, outcome: str, then: str
) -> None:
    made = transition(base(status), snapshot(found), event)
    assert (made.outcome, made.base.status) == (outcome, then) and made.step is not None
    assert (made.record is None) == (then == "ACTIVE"), "the record lives as long as the upgrade"
    assert (made.code_dir is not None) == (outcome in ("completed", "expired")), (
        "only an end brings the new code"
    )


@pytest.mark.parametrize(
    ("status", "found", "event"),
    [
        ("ROLLBACK", state("a:6901", rollback=True), UpgradeEvent("roll_back")),
        ("ROLLBACK", state("a:6901", rollback=True), UpgradeEvent("finish_rollback")),
        ("UPGRADING", state("a:6901"), UpgradeEvent("abandon")),
    ],
)
def test_an_event_that_is_overtaken_writes_nothing(
    status: str, found: UpgradeState, event: UpgradeEvent
) -> None:
    assert transition(base(status), snapshot(found), event).step is None


@pytest.mark.parametrize(
    ("status", "found", "event", "says"),
    [
        ("UPGRADING", state("a:6901"), BEGIN, "being upgraded already"),
        ("INACTIVE", UpgradeState(at=1), BEGIN, "activate it first"),
        ("ACTIVE", UpgradeState(at=1), replace(BEGIN, former="wc-1-1.1"), "was replaced after"),
        (
            "UPGRADING",
            state(),
            UpgradeEvent("continue", selection=Selection(number=1)),
            "not picked yet",
        ),
        ("ROLLBACK", state(rollback=True), UpgradeEvent("complete"), "is being rolled back"),
        ("ACTIVE", UpgradeState(at=1), UpgradeEvent("complete"), "nothing to complete"),
        ("ACTIVE", UpgradeState(at=1), UpgradeEvent("roll_back"), "nothing to roll back"),
    ],
)
def test_an_event_at_the_wrong_time_is_refused(
    status: str, found: UpgradeState, event: UpgradeEvent, says: str
) -> None:
    with pytest.raises(Conflict, match=says):
        transition(base(status), snapshot(found), event)


def test_a_transition_whose_reply_was_lost_is_recognized() -> None:
    begun = transition(base("ACTIVE"), snapshot(UpgradeState(at=1)), BEGIN)
    assert not landed(begun, base("ACTIVE"), snapshot(UpgradeState(at=1)))
    assert landed(begun, base(), snapshot(state(upgrading=("a:6901",), continue_=False))), (
        "picked since"
    )
    assert not landed(begun, base(), snapshot(state(code_dir="wc-1-1.3"))), "somebody else's"
    more = UpgradeEvent("continue", selection=Selection(number=1))
    continued = transition(base(), snapshot(state("a:6901", continue_=False)), more)
    assert landed(continued, base(), snapshot(state("a:6901", number=1)))
    assert not landed(continued, base(), snapshot(state("a:6901", number=2))), "somebody else's"
    completed = transition(base(), snapshot(state("a:6901")), UpgradeEvent("complete"))
    after = snapshot(UpgradeState(at=4), assignment(code_dir="wc-1-1.2"))
    assert landed(completed, base("ACTIVE"), after)
    assert not landed(completed, base("ACTIVE"), snapshot(UpgradeState(at=4))), (
        "rolled back by somebody else"
    )


def test_the_upgrade_in_words() -> None:
    found = snapshot(state("a:6901", upgrading=("b:6901",), number=1)).to_document()
    assert found is not None
    assert found["workers"] == {
        "a:6901": "upgraded",
        "a:6902": "former",
        "b:6901": "upgrading",
        "b:6902": "former",
    }
    assert (found["code"], found["former_code"]) == ("wc-1-1.2", "wc-1-1")
    assert snapshot(UpgradeState(at=1)).to_document() is None


SPEC: dict[str, Any] = {
    "spouts": {
        "lines": {"object": {"python": "a:Lines"}, "outputs": {"default": {"fields": ["line"]}}}
    },
    "bolts": {
        "count": {
            "object": {"python": "a:Count"},
            "inputs": [{"component": "lines", "grouping": {"type": "shuffle"}}],
        }
    },
}


def spec(**bolt: Any) -> TopologySpec:
    bolts = {"count": {**SPEC["bolts"]["count"], **bolt}}
    return TopologySpec.model_validate({**SPEC, "bolts": bolts})


def test_versions_run_side_by_side_only_with_the_same_wiring() -> None:
    check_compatible("wc", spec(), spec(object={"python": "b:Other"}, parallelism=9, conf={"x": 1}))
    with pytest.raises(
        InvalidTopology, match=r"inputs of bolt .count. differ.*storm-dagster update"
    ):
        grouping = {"type": "fields", "fields": ["line"]}
        check_compatible("wc", spec(), spec(inputs=[{"component": "lines", "grouping": grouping}]))
    with pytest.raises(InvalidTopology, match="streams of bolt 'count' differ"):
        check_compatible("wc", spec(), spec(outputs={"default": {"fields": ["word"]}}))
    more = TopologySpec.model_validate(
        {**SPEC, "spouts": {**SPEC["spouts"], "other": SPEC["spouts"]["lines"]}}
    )
    with pytest.raises(InvalidTopology, match="has a new spout 'other'"):
        check_compatible("wc", spec(), more)
    with pytest.raises(InvalidTopology, match="has no spout 'other'"):
        check_compatible("wc", more, spec())
