"""What a conf may plug in: a scheduling plug-in, another store of cluster state; and the
container's heartbeat.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.core.submission.conf import total_conf
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.model.records import Assignment, StormBase, WorkerSlot, encode_record
from storm_dagster.model.view import Versioned
from storm_dagster.nimbus.daemon import run
from storm_dagster.nimbus.leadership.start import ContainerHeartbeat
from storm_dagster.operations import inimbus
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.transactions import append_assignment, commit
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.storm_cluster_state import StormClusterState, connect_session
from storm_rigs.stage.builder import Stage


class Plugin:
    """A scheduling plug-in as a user writes it."""

    prepared: list[tuple[str, Path]] = []
    assigned: list[tuple[str, list[tuple[str, int]]]] = []

    def prepare(self, conf: Mapping[str, Any], directory: Path) -> None:
        self.prepared.append((conf["storm.zookeeper.root"], directory))
        (directory / "own").write_text("x")

    def assign_slots(self, topology_id: str, slots: Sequence[tuple[str, int]]) -> None:
        self.assigned.append((topology_id, list(slots)))
        raise RuntimeError("a plug-in that fails harms nothing")

    def forced_scheduler(self) -> str | None:
        return "even"


class CountingState(ZooKeeperClusterState):
    """Another ClusterState: ZooKeeper's, counting what is read."""

    reads = 0

    def get_many(
        self, many: Sequence[str], watch: bool = False
    ) -> list[tuple[bytes, Versioned] | None]:
        type(self).reads += len(many)
        return super().get_many(many, watch)


def counting_store(conf: Mapping[str, Any]) -> CountingState:
    return CountingState(connect_session(conf))


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made = types.ModuleType("my_plugins")
    for thing in (Plugin, counting_store):
        setattr(made, thing.__name__, thing)
    made.nothing = lambda conf: object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_plugins", made)
    Plugin.prepared, Plugin.assigned = [], []
    inimbus._plugins.clear()
    yield
    inimbus._plugins.clear()


@pytest.mark.zookeeper
def test_the_plug_in_of_a_nimbus_is_prepared_before_it_serves(stage: Stage) -> None:
    nimbus = stage.nimbus(nimbus__inimbus__class="my_plugins:Plugin").await_serving()
    assert Plugin.prepared == [(stage.conf["storm.zookeeper.root"], nimbus.folder / "ininumbus")]
    assert (nimbus.folder / "ininumbus" / "own").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module:X", "cannot be loaded"),
        ("my_plugins", "module:attribute"),
        ("builtins:dict", "no method prepare"),
    ],
)
def test_a_wrong_plug_in_stops_the_start_and_says_why(
    name: str, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    conf = load_cluster_conf(
        None, {"nimbus.inimbus.class": name, "nimbus.http.port": 0, "nimbus.thrift.port": 0}
    )
    assert run(conf, tmp_path, "n1", threading.Event()) == InvalidRequest.exit_code
    assert says in caplog.text and "nimbus.inimbus.class" in caplog.text
    assert not list(tmp_path.glob("run/*"))


@pytest.mark.zookeeper
def test_the_plug_in_is_notified_of_new_slots_once_they_are_published(
    zk_cluster: StormClusterState, tmp_path: Path
) -> None:
    zk_cluster.state.set_data("/epoch", b"{}")
    conf = load_cluster_conf(None, {"nimbus.inimbus.class": "my_plugins:Plugin"})
    ctx = OperationsContext(
        cluster=zk_cluster,
        blobs=None,  # type: ignore[arg-type]
        conf=conf,
        planner=None,  # type: ignore[arg-type]
        inimbus=inimbus.load_inimbus(conf, tmp_path / "plugin"),
    )

    base = StormBase(
        name="wc", launch_time_secs=1, status="ACTIVE", workers=2, executors={}, token="t"
    )
    zk_cluster.state.set_data("/topology/wc-1-1", encode_record(base))

    def publish(*ports: int) -> list[tuple[str, list[tuple[str, int]]]]:
        workers = tuple(
            WorkerSlot(node="s1", host="h", port=port, tasks=str(number + 1))
            for number, port in enumerate(ports)
        )
        assignment = Assignment(
            topology_id="wc-1-1",
            code_dir="wc-1-1",
            node_host={"s1": "h"},
            workers=workers,
            task_start_secs={f"1-{len(ports)}" if len(ports) > 1 else "1": 1},
            timestamp_ms=1,
        )
        transaction = ctx.cluster.fenced(zk_cluster.state.get_version("/epoch") or 0)
        append_assignment(ctx, transaction, zk_cluster.load_view(), "wc", assignment)
        before = len(Plugin.assigned)
        commit(ctx, transaction, "publish")
        return Plugin.assigned[before:]

    assert publish(6900, 6901) == [("wc-1-1", [("s1", 6900), ("s1", 6901)])]
    assert publish(6901, 6902) == [("wc-1-1", [("s1", 6902)])]
    assert publish(6901) == [], "nothing new, nothing told"


def test_a_forced_scheduler_wins_over_the_topologys_own(tmp_path: Path) -> None:
    conf = load_cluster_conf(None, {"nimbus.inimbus.class": "my_plugins:Plugin"})
    ctx = OperationsContext(
        cluster=None,  # type: ignore[arg-type]
        blobs=None,  # type: ignore[arg-type]
        conf=conf,
        planner=None,  # type: ignore[arg-type]
        inimbus=inimbus.load_inimbus(conf, tmp_path / "plugin"),
    )
    asked = {"topology.scheduler.strategy": "balanced", "topology.workers": 3}
    total = total_conf(ctx.values(), asked)
    assert total["topology.scheduler.strategy"] == "even" and total["topology.workers"] == 3
    assert set(total) <= set(conf.values) | set(asked), "no other key appears"
    plain = load_cluster_conf(None, {})
    assert total_conf(plain.values, asked)["topology.scheduler.strategy"] == "balanced"


@pytest.mark.zookeeper
def test_another_store_of_cluster_state(
    zk_conf: dict[str, Any], stage: Stage, zk_cluster: StormClusterState
) -> None:
    store = {"storm.cluster.state.store": "my_plugins:counting_store"}
    with StormClusterState.open({**zk_conf, **store}) as cluster:
        assert isinstance(cluster.state, CountingState) and cluster.load_view().cluster_id
    before = CountingState.reads
    stage.nimbus(storm__cluster__state__store="my_plugins:counting_store").await_leading()
    assert CountingState.reads > before, "a nimbus reads through it"
    with pytest.raises(InvalidRequest, match="not a ClusterState"):
        StormClusterState.open({**zk_conf, "storm.cluster.state.store": "my_plugins:nothing"})


def test_a_container_that_goes_takes_nimbus_along(tmp_path: Path) -> None:
    now = [0.0]
    container, own = tmp_path / "container", tmp_path / "own"
    beats = ContainerHeartbeat(
        container,
        own,
        timeout_secs=240,
        pause_secs=10,
        clock=lambda: now[0],
        wall=lambda: 1000 + now[0],
    )
    for _ in range(30):
        now[0] += 10
        beats.tick()  # nothing there yet: tolerated thirty times
    assert len(list(own.iterdir())) == 10 and max(int(path.name) for path in own.iterdir()) == 1300
    container.mkdir()
    (container / "5").touch()
    (container / "not a number").touch()
    beats.tick()
    now[0] += 240
    beats.tick()
    (container / "4").touch()
    now[0] += 1
    with pytest.raises(Unavailable, match="unchanged for 241 s"):
        beats.tick()
    (container / "6").touch()
    beats.tick()
    for path in container.iterdir():
        path.unlink()
    for _ in range(30):
        beats.tick()  # the misses before the container's beats do not count
    with pytest.raises(Unavailable, match="after 31 checks"):
        beats.tick()


@pytest.mark.zookeeper
def test_a_nimbus_without_its_container_ends_in_order(stage: Stage, tmp_path: Path) -> None:
    container = tmp_path / "container"
    container.mkdir()
    (container / "1").touch()
    nimbus = stage.nimbus(
        container__nimbus__heartbeat=str(container),
        container__heartbeat__timeout__seconds=1,
        container__heartbeat__frequence=1,
    )
    eventually(lambda: nimbus.code is not None, 60, "the end of nimbus")
    assert nimbus.code == Unavailable.exit_code
    assert not list(nimbus.home.glob("run/*"))
    assert list((nimbus.folder / "nimbus.heartbeat").iterdir())
