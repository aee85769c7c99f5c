"""Statistics come from the worker of the topology master, over its own socket."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import zmq

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
from storm_dagster.nimbus.requests.reading import TopologyStats


def topology(port: int, *, live: bool = True) -> TopologyView:
    slot = WorkerSlot(node="s1", host="127.0.0.1", port=port, tasks="1-2")
    node = WorkerNode(pid=1, token="secret", version=0, tasks="1-2", started_ms=0, status="running")
    return TopologyView(
        id="wc-1-1",
        base=StormBase(name="wc", launch_time_secs=1, status="ACTIVE", workers=1, executors={}, token="t"),
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


def test_the_topology_master_is_asked() -> None:
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
