"""Statistics come from the worker of the topology master, over its own socket."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zmq
from starlette.concurrency import run_in_threadpool

from storm_dagster.http.responses import run_read
from storm_dagster.model.records import (
    Assignment,
    ComponentTasks,
    StormBase,
    TaskTable,
    WorkerNode,
    WorkerSlot,
)
from storm_dagster.model.view import TopologyView, Versioned
from storm_dagster.model.wire import decode_request
from storm_dagster.nimbus.requests import topology_stats
from storm_dagster.nimbus.requests.topology_stats import SharedValues, TopologyStats


def topology(port: int, *, live: bool = True) -> TopologyView:
    slot = WorkerSlot(node="s1", host="127.0.0.1", port=port, tasks="1-2")
    node = WorkerNode(pid=1, token="secret", version=0, tasks="1-2", started_ms=0, status="running")
    return TopologyView(
        id="wc-1-1",
        base=StormBase(
            name="wc", launch_time_secs=1, status="ACTIVE", workers=1, executors={}, token="t"
        ),
        base_at=Versioned(0, 1),
        tasks=TaskTable(components={"__topology_master": ComponentTasks(type="bolt", tasks="2")}),
        assignment=Assignment(
            topology_id="wc-1-1",
            code_dir="wc-1-1",
            node_host={"s1": "127.0.0.1"},
            workers=(slot,),
            task_start_secs={"1-2": 1},
            timestamp_ms=1,
        ),
        assignment_at=Versioned(0, 1),
        live_workers={slot.slot: node} if live else {},
    )


def test_the_topology_master_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storm_dagster.nimbus.requests.topology_stats._ANSWER_SECS", 30.0)
    context: Any = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    asked: list[Any] = []

    def answer() -> None:
        *envelope, payload = router.recv_multipart()
        asked.append(decode_request(payload))
        router.send_multipart([*envelope, json.dumps({"tasks": {"2": {}}, "workers": {}}).encode()])

    worker = threading.Thread(target=answer)
    worker.start()
    found = TopologyStats().ask(topology(port))
    worker.join(10)
    router.close(linger=0)
    context.term()
    assert found is not None and found["tasks"] == {"2": {}}
    assert (asked[0].op, asked[0].token) == ("stats", "secret")


def test_a_silent_one_is_left_alone_for_a_moment() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        stats = TopologyStats()
        view = topology(listener.getsockname()[1])
        assert stats.ask(view) is None
        assert stats._silent, "it is remembered"
        assert stats.ask(view) is None
    assert TopologyStats().ask(topology(1, live=False)) is None


def test_who_asks_at_the_same_time_shares_one_request() -> None:
    asked: list[str] = []
    go = threading.Event()

    def ask() -> dict[str, Any]:
        asked.append("once")
        go.wait(10)
        return {"tasks": {"1": {}}}

    shared = SharedValues(60.0)
    with ThreadPoolExecutor(20) as pool:
        waiting = [pool.submit(shared.get, 1, ask) for _ in range(20)]
        time.sleep(0.1)
        go.set()
        assert all(one.result(10) == {"tasks": {"1": {}}} for one in waiting)
    assert shared.get(1, ask) == {"tasks": {"1": {}}}
    assert asked == ["once"]


def test_three_hundred_topologies_keep_their_answers() -> None:
    asked: list[int] = []
    shared = SharedValues(60.0)
    for _ in range(2):
        for number in range(300):
            assert shared.get(
                number, lambda number=number: (asked.append(number), {"of": number})[1]
            ) == {"of": number}
    assert len(asked) == 300


def test_an_answer_may_be_shared_for_longer_the_more_it_cost() -> None:
    asked: list[float] = []

    def ask(secs: float) -> dict[str, Any]:
        asked.append(secs)
        until = time.thread_time() + secs
        while time.thread_time() < until:
            pass
        return {"took": secs}

    shared = SharedValues(60.0, times=1000.0)
    for _ in range(3):
        assert shared.get("dear", lambda: ask(0.06)) == {"took": 0.06}
    assert asked == [0.06], "for 60 s"
    cheap = SharedValues(60.0, times=0.0)
    for _ in range(3):
        assert cheap.get("cheap", lambda: ask(0.0)) == {"took": 0.0}
    assert asked == [0.06, 0.0, 0.0, 0.0]


def test_no_answer_is_asked_for_again_and_an_error_keeps_nobody_waiting() -> None:
    answers: list[Any] = [None, ValueError("broken"), {"tasks": {}}]

    def ask() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    shared = SharedValues(60.0)
    assert shared.get(1, ask) is None
    with pytest.raises(ValueError):
        shared.get(1, ask)
    assert shared.get(1, ask) == {"tasks": {}}


def test_a_page_gets_the_answer_before_while_a_topology_master_is_silent() -> None:
    go, answers = threading.Event(), iter([{"number": 1}, {"number": 2}])

    def ask() -> Any:
        answer = next(answers)
        if answer["number"] == 2:
            go.wait(10)
        return answer

    shared = SharedValues(0.0)
    with ThreadPoolExecutor(1) as askers:
        assert shared.latest(1, ask, askers, 10.0)[0] == {"number": 1}
        answer, age = shared.latest(1, ask, askers, 0.05)
        assert answer == {"number": 1} and age >= 0.05
        go.set()
        assert shared.latest(1, ask, askers, 10.0)[0] == {"number": 2}


def test_reads_that_wait_hold_no_thread_of_a_change() -> None:
    go = threading.Event()

    async def serve() -> list[str]:
        reads = [asyncio.create_task(run_read(go.wait, 30)) for _ in range(100)]
        await asyncio.sleep(0.05)
        done = [await run_in_threadpool(lambda: "changed")]
        done.append("reads wait" if not any(read.done() for read in reads) else "reads are over")
        go.set()
        await asyncio.gather(*reads)
        return done

    assert asyncio.run(serve()) == ["changed", "reads wait"]


def test_nobody_waits_for_ever_for_a_request_of_somebody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topology_stats, "_MAX_WAIT_SECS", 0.05)
    shared, answered = SharedValues(60.0), threading.Event()

    def ask() -> dict[str, Any]:
        answered.wait(30)
        return {"tasks": {}}

    with ThreadPoolExecutor(1) as askers:
        try:
            assert shared.latest("wc", ask, askers, 0.0)[0] is None
            assert shared.get("wc", ask) is None
        finally:
            answered.set()
    assert shared.get("wc", ask) == {"tasks": {}}
