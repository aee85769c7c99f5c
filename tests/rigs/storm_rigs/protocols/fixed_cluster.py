"""A nimbus that reads a cluster made by hand: for documents that must not change by a byte.

Everything is a value: the view, the responses of the topology masters, errors, code. Reader and
pages are those of the product.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from storm_dagster.api import Bolt, Grouping, Spout, TopologyBuilder
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.model.errors import KeyNotFound
from storm_dagster.model.event_log import EventLogSummary
from storm_dagster.model.names import code_key, conf_key, topology_name_of
from storm_dagster.model.records import (
    Assignment,
    ComponentTasks,
    StateHome,
    StormBase,
    SupervisorInfo,
    TaskBeats,
    TaskError,
    TaskTable,
    WorkerNode,
    WorkerSlot,
)
from storm_dagster.model.slot import Slot
from storm_dagster.model.view import ClusterView, TopologyView, UpgradeState, Versioned
from storm_dagster.nimbus.member import Identity, Nimbus
from storm_dagster.nimbus.requests.launches import Launches
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.requests.topology_stats import TopologyStats

NOW_SECS = 1_700_000_000
SHOP, QUIET, HALF = "shop-1-1", "quiet-2-1", "half-3-1"


class Orders(Spout):
    """A source that is behind."""

    outputs = ["order"]

    def next_tuple(self) -> None:
        """Emit nothing."""


class Price(Bolt):
    """A bolt with two inputs and a stream of its own."""

    outputs = ["price"]


def _base(name: str, status: str, age_secs: int, **fields: Any) -> StormBase:
    return StormBase.model_validate(
        {
            "name": name,
            "launch_time_secs": NOW_SECS - age_secs,
            "status": status,
            "workers": 2,
            "executors": {},
            "token": f"t-{name}",
            **fields,
        }
    )


def _assignment(topology_id: str, placed_secs: int, *workers: WorkerSlot) -> Assignment:
    return Assignment(
        topology_id=topology_id,
        code_dir=topology_id,
        node_host={worker.node: worker.host for worker in workers},
        workers=workers,
        task_start_secs={worker.tasks: placed_secs for worker in workers},
        timestamp_ms=placed_secs * 1000,
    )


def _node(pid: int, tasks: str, age_secs: int, status: str = "running") -> WorkerNode:
    return WorkerNode.model_validate(
        {
            "pid": pid,
            "token": f"token-{pid}",
            "version": 0,
            "tasks": tasks,
            "started_ms": (NOW_SECS - age_secs) * 1000,
            "status": status,
            "code": "0123456789abcdef",
        }
    )


def shop() -> TopologyView:
    """An active topology with a task in each status."""
    topology = TaskTable(
        components={
            "__acker": ComponentTasks(type="bolt", tasks="1"),
            "__topology_master": ComponentTasks(type="bolt", tasks="2"),
            "count": ComponentTasks(type="bolt", tasks="3-5"),
            "orders": ComponentTasks(type="spout", tasks="6-7"),
            "price": ComponentTasks(type="bolt", tasks="8-9"),
        }
    )
    return TopologyView(
        id=SHOP,
        base=_base("shop", "ACTIVE", 4000, executors={"count": 2}, owner="ann"),
        base_at=Versioned(0, 10),
        tasks=topology,
        assignment=_assignment(
            SHOP,
            NOW_SECS - 3900,
            WorkerSlot(node="s1", host="h1", port=6700, tasks="1-4", memory_bytes=2**28, cpu=50),
            WorkerSlot(node="s2", host="h2", port=6701, tasks="5-7", memory_bytes=2**27, cpu=25),
            WorkerSlot(node="s3", host="h3", port=6702, tasks="8"),
        ),
        assignment_at=Versioned(3, 20),
        beats=TaskBeats(topology_id=SHOP, topology_master=2, dead="7", version=3),
        beats_at=Versioned(1, 30),
        live_workers={
            Slot("s1", 6700): _node(4001, "1-4", 3000),
            Slot("s2", 6701): _node(4002, "5-7", 60),
        },
    )


def _latencies(kind: str, **by_key: dict[int, int]) -> dict[str, Any]:
    keys = {key.replace("__from_", ":"): buckets for key, buckets in by_key.items()}
    return {kind: keys}


def _task(component: str, slot: tuple[str, int], **fields: Any) -> dict[str, Any]:
    return {
        "status": "running",
        "component": component,
        "uptime_secs": 2990,
        "stats": {},
        "windows": {},
        "streams": {},
        "window_streams": {},
        "errors": 0,
        "metrics": {},
        "latencies": {},
        "waiting": 0,
        "busy_ns": 0,
        "timed": 0,
        "held_ms": 0,
        "node": slot[0],
        "port": slot[1],
        **fields,
    }


def _stats(**given: float) -> dict[str, float]:
    return {
        "emitted": 0,
        "transferred": 0,
        "executed": 0,
        "acked": 0,
        "failed": 0,
        "execute_ms": 0.0,
        "process_ms": 0.0,
        "complete_ms": 0.0,
        **given,
    }


def shop_report() -> dict[str, Any]:
    """The response of its topology master, as workers of release b0118e28 give it."""
    first, second = Slot("s1", 6700), Slot("s2", 6701)
    many = _stats(
        emitted=40,
        transferred=40,
        executed=700,
        acked=690,
        failed=10,
        execute_ms=1.2345,
        process_ms=1.2345,
    )
    few = _stats(executed=70, acked=70, execute_ms=0.5, process_ms=0.5)
    spout = _stats(emitted=900, transferred=1700, acked=850, failed=5, complete_ms=20.125)
    spout_recent = _stats(emitted=90, transferred=170, acked=85, failed=1, complete_ms=33.3)
    count_buckets = {"orders:default": {-80: 30, -72: 4}, "price:cheap": {-64: 2}}
    tasks = {
        "1": _task("__acker", first, stats=_stats(executed=1234, acked=1234)),
        "2": _task("__topology_master", first, stats=_stats(executed=55, acked=55)),
        "3": _task(
            "count",
            first,
            stats=many,
            windows={"600": few, "10800": many, "86400": many, ":all-time": many},
            streams={
                "emitted": {"default": 38, "__metrics": 2},
                "transferred": {"default": 40},
                "remote_bytes": {"default": 4096},
                "executed": {"orders:default": 500, "price:cheap": 200},
            },
            window_streams={
                "600": {"emitted": {}, "transferred": {}, "executed": {"orders:default": 70}}
            },
            latencies={
                "600": {"execute": {"orders:default": {-80: 3}}},
                ":all-time": {"execute": count_buckets},
            },
            metrics={"rows": 5, "note": "text"},
            waiting=7,
            busy_ns=1_000_000,
            timed=35,
            rate=120.0,
            busy=0.4,
        ),
        "4": _task("count", first, status="starting", uptime_secs=4, rate=0.0, busy=0.0),
        "5": _task(
            "count",
            second,
            stats=_stats(executed=300, acked=300, execute_ms=0.1, process_ms=0.1),
            streams={"executed": {"orders:default": 300}},
            latencies={":all-time": {"execute": {"orders:default": {-96: 15}}}},
            waiting=2,
            rate=50.5,
            busy=0.9,
        ),
        "6": _task(
            "orders",
            second,
            stats=spout,
            windows={"600": spout_recent, "10800": spout, "86400": spout, ":all-time": spout},
            streams={
                "emitted": {"default": 800, "cheap": 100, "__ack_init": 900},
                "transferred": {"default": 1600, "cheap": 100},
                "remote_bytes": {"default": 70000, "cheap": 900, "__peers": 7},
                "remote_tuples": {"default": 800, "cheap": 12, "__peers": 1},
            },
            window_streams={
                "600": {"emitted": {"default": 80, "cheap": 10}, "transferred": {"default": 170}}
            },
            latencies={
                "600": {"complete": {"default": {-45: 4}}},
                ":all-time": {"complete": {"default": {-45: 40, -40: 2}, "cheap": {-50: 1}}},
            },
            metrics={
                "lag": 40,
                "lag_by_partition": {"orders[1]": [30, 1.5], "orders[0]": [10, None]},
            },
            rate=11.0,
            busy=0.0,
            held_ms=100,
        ),
        "7": _task("orders", second, metrics={"lag": 2.5}, rate=1.0, busy=0.0),
    }
    figures = {
        "acked": 20.0,
        "failed": 2.0,
        "p50_ms": 1.0,
        "p95_ms": 2.0,
        "p99_ms": 3.5,
        "capacity": 0.0,
        "held": 0.1,
        "waiting": 0.0,
        "lag": 42.5,
        "lag_rate": 3.0,
        "rate": 12.0,
    }
    return {
        "tasks": tasks,
        "workers": {
            "s1:6700": {
                "pid": 4001,
                "host": "h1",
                "uptime_secs": 2995,
                "version": 3,
                "status": "running",
                "beats": 900,
                "silent_secs": 0.4,
                "restarts": 0,
                "cpu": 0.55,
                "system": {"memory_bytes": 2**27, "back_pressure": 1},
            },
            "s2:6701": {
                "pid": 4002,
                "host": "h2",
                "uptime_secs": 58,
                "version": 3,
                "status": "running",
                "beats": 20,
                "silent_secs": 14.0,
                "restarts": 3,
                "cpu": 0.2,
                "system": {"memory_bytes": 2**26},
            },
        },
        "components": {
            "orders": figures,
            "count": {
                **figures,
                "capacity": 0.9,
                "held": 0.0,
                "waiting": 900.0,
                "lag": None,
                "lag_rate": None,
                "rate": 170.5,
            },
        },
        "edges": {"count": {"orders:default": 150.0, "price:cheap": 20.5}},
        "timeout_secs": 30.0,
        "report_secs": 3.0,
    }


def quiet() -> TopologyView:
    """A topology whose topology master does not respond, deactivated."""
    tasks = TaskTable(
        components={
            "__topology_master": ComponentTasks(type="bolt", tasks="1"),
            "orders": ComponentTasks(type="spout", tasks="2"),
        }
    )
    return TopologyView(
        id=QUIET,
        base=_base("quiet", "INACTIVE", 500),
        base_at=Versioned(0, 11),
        tasks=tasks,
        assignment=_assignment(
            QUIET, NOW_SECS - 400, WorkerSlot(node="s1", host="h1", port=6701, tasks="1-2")
        ),
        assignment_at=Versioned(0, 21),
        live_workers={Slot("s1", 6701): _node(4100, "1-2", 390, "starting")},
    )


def half() -> TopologyView:
    """A topology that is not placed yet."""
    tasks = TaskTable(components={"orders": ComponentTasks(type="spout", tasks="1-2")})
    return TopologyView(
        id=HALF, base=_base("half", "ACTIVE", 5), base_at=Versioned(0, 12), tasks=tasks
    )


def view() -> ClusterView:
    """The cluster."""
    supervisors = {
        f"s{number}": SupervisorInfo(
            host=f"h{number}",
            ports=(6700, 6701, 6702),
            started=NOW_SECS - 5000,
            count=9,
            version="0.1.0",
            http=f"http://h{number}:8000" if number < 3 else None,
            cpu=400 if number == 1 else 0,
            memory_mb=4096 if number == 1 else 0,
        )
        for number in range(1, 4)
    }
    return ClusterView(
        cluster_id="c-1",
        epoch=4,
        assignments_version=7,
        supervisors=supervisors,
        topologies={part.id: part for part in (shop(), quiet(), half())},
        blacklist=frozenset({"h3"}),
    )


def shop_errors() -> dict[str, list[TaskError]]:
    """Component -> its errors."""
    text = "Traceback (most recent call last):\n  File x\nKeyError: 'price'"
    return {
        "count": [
            TaskError(task=3, host="h1", port=6700, time=NOW_SECS - 100, error=text, count=2),
            TaskError(task=5, host="h2", port=6701, time=NOW_SECS - 50, error="boom"),
        ]
    }


def code_blobs(topology_id: str) -> dict[str, bytes]:
    """The blobs of the code of a topology of these components."""
    builder = TopologyBuilder(topology_id.partition("-")[0])
    builder.set_spout("orders", Orders, par=2)
    builder.set_bolt("price", Price, inputs="orders", par=2, outputs=["price"])
    builder.set_bolt(
        "count",
        Price,
        inputs={"orders": Grouping.fields("order"), "price": Grouping.SHUFFLE},
        par=3,
        outputs=["total"],
    )
    conf = {"topology.name": topology_id.partition("-")[0], "topology.message.timeout.secs": 30}
    return {
        conf_key(topology_id): json.dumps(conf).encode(),
        code_key(topology_id): builder.build().to_json(),
    }


class FixedBlobs:
    """Blobs in memory, one holder each."""

    shared = True

    def __init__(self, blobs: Mapping[str, bytes]) -> None:
        self._blobs = blobs
        self.base = SimpleNamespace(keys=lambda: list(self._blobs))

    def read(self, key: str) -> bytes:
        """The content."""
        try:
            return self._blobs[key]
        except KeyError:
            raise KeyNotFound(f"no blob {key!r}") from None

    def exists(self, key: str) -> bool:
        """True if it is stored."""
        return key in self._blobs


class FixedMasters(TopologyStats):
    """Responses of the topology masters."""

    def __init__(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._reports = reports

    def ask(self, topology: TopologyView, history: Any = None) -> Mapping[str, Any] | None:
        """The response, or ``None``."""
        return self._reports.get(topology.id) if history is None else None


@dataclass
class FixedCluster:
    """A view, responses and errors, and the nimbus that reads them."""

    view: ClusterView = field(default_factory=view)
    reports: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {SHOP: shop_report()})
    errors: Mapping[str, Mapping[str, list[TaskError]]] = field(
        default_factory=lambda: {SHOP: shop_errors()}
    )

    def nimbus(self) -> Nimbus:
        """A nimbus that leads and has these values."""
        blobs = FixedBlobs(
            {key: raw for one in self.view.topologies for key, raw in code_blobs(one).items()}
        )
        conf = load_cluster_conf(None, {"supervisor.http.port": 8000})
        cluster = SimpleNamespace(
            errors_by_component=lambda topology_id: self.errors.get(topology_id, {}),
            read_state_home=lambda topology_id: StateHome(marker=""),
            read_upgrade=lambda topology_id: UpgradeState(),
            state=SimpleNamespace(
                get_data=lambda path: None,
                exists=lambda path: False,
                find_children=lambda path, watch=False: [],
                get_many=lambda paths: [],
            ),
            session=SimpleNamespace(connected=True),
            cluster_id=lambda: "c-1",
            epoch=lambda: None,
        )
        events = {
            topology_name_of(SHOP): EventLogSummary(
                log="0" * 32,
                owner="shop:default",
                declared=True,
                waiting=12,
                since=NOW_SECS - 90,
                bytes=3456,
                dropped=3,
            )
        }
        cluster.event_logs = lambda: events
        cluster.event_log_document = lambda name: (
            events[name].to_document() if name in events else None
        )
        context = SimpleNamespace(cluster=cluster, blobs=blobs, values=lambda: conf.values)
        nimbus = SimpleNamespace(
            conf=conf,
            identity=Identity("n1", "nimbus1", 6627, 8080, "0.1.0"),
            cluster=cluster,
            blobs=blobs,
            registry=SimpleNamespace(
                read=lambda keys: {
                    key: SimpleNamespace(newest_holders=lambda: ["n1"]) for key in keys
                }
            ),
            leadership=SimpleNamespace(current=lambda: None, followers=dict),
            status=SimpleNamespace(
                epoch=4, snapshot=SimpleNamespace(lacking=(), missing=0, leader_http="")
            ),
            operations=lambda epoch: context,
            shown_view=lambda: self.view,
            reads=None,
            uploads=(),
            inbox=Path("/"),
            unreported=(),
            alarm=None,
            paused_causes=(),
            launches=Launches(),
            dagster=SimpleNamespace(site=None, run_url=lambda run: None, job_url=lambda job: None),
        )
        return cast("Nimbus", nimbus)

    @contextmanager
    def reading(self) -> Iterator[tuple[Nimbus, ClusterReader]]:
        """The nimbus and its reader."""
        nimbus = self.nimbus()
        reader = ClusterReader(nimbus, FixedMasters(self.reports))
        try:
            yield nimbus, reader
        finally:
            reader.close()
