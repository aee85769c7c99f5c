"""The action listener hears everything in order, and whatever it does the cluster does not feel
it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.model import paths
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.records import StormBase, encode_record
from storm_dagster.nimbus.requests.action_listener import load_listener
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.transactions import NOTIFIER_KEY, pending_actions
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper

LISTENERS = """
import threading

received, release, began = [], threading.Event(), threading.Event()

class Good:
    def prepare(self, conf):
        received.append(("prepare", conf["storm.cluster.mode"]))
    def notify(self, topology_id, action):
        received.append((topology_id, action))
    def cleanup(self):
        received.append(("cleanup", ""))

class Failing(Good):
    def prepare(self, conf):
        raise SystemExit("prepare")
    def notify(self, topology_id, action):
        received.append((topology_id, action))
        raise RuntimeError("no")

class Stuck(Good):
    def notify(self, topology_id, action):
        began.set()
        release.wait(60)
        received.append((topology_id, action))

class Broken:
    def __init__(self):
        raise ValueError("broken")
"""


@pytest.fixture
def listeners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of listeners, new for each test."""
    name = f"listeners_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(LISTENERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__(name)
    yield module
    module.release.set()


def operations(
    zk_conf: dict[str, object], tmp_path: Path, listener: str | None
) -> OperationsContext:
    """What a run of Dagster would act with: another process than the nimbus that tells."""
    state = StormClusterState.open(zk_conf)
    conf = load_cluster_conf(
        None, {**zk_conf, NOTIFIER_KEY: listener, "task.cleanup.timeout.sec": 0}
    )
    return OperationsContext(
        cluster=state, blobs=LocalBlobStore(tmp_path / "other"), conf=conf, planner=plan_placement
    )


def add(ctx: OperationsContext, name: str) -> str:
    base = StormBase(
        name=name, launch_time_secs=1, status="ACTIVE", workers=1, executors={}, token="t"
    )
    ctx.cluster.state.create_node(paths.topology(f"{name}-1-100"), encode_record(base))
    return name


def test_the_listener_is_notified_of_every_action_in_order(
    stage: Stage, zk_conf: dict[str, object], tmp_path: Path, listeners: ModuleType
) -> None:
    name = f"{listeners.__name__}:Good"
    nimbus = stage.nimbus(conf={NOTIFIER_KEY: name}).await_leading()
    ctx = operations(zk_conf, tmp_path, name)
    ids = [add(ctx, f"t{number}") for number in range(5)]

    def life(topology_id: str) -> None:
        for verb in (lifecycle.deactivate, lifecycle.deactivate, lifecycle.activate):
            verb(ctx, topology_id)
        lifecycle.kill(ctx, topology_id, 3600)

    threads = [threading.Thread(target=life, args=(topology_id,)) for topology_id in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    eventually(lambda: len(listeners.received) >= 16, what="fifteen actions", timeout=30)
    assert listeners.received[0] == ("prepare", "distributed")
    for topology_id in ids:
        mine = [action for topology, action in listeners.received if topology == topology_id]
        # The second deactivation changed nothing: nobody hears of it.
        assert mine == ["deactivate", "activate", "killTopology"]
    eventually(lambda: pending_actions(ctx) == [], what="nothing left to tell")
    assert nimbus.stop() == 0
    assert listeners.received[-1] == ("cleanup", "")
    ctx.cluster.disconnect()


def test_a_submission_is_announced_and_then_its_activation(
    stage: Stage, zk_conf: dict[str, object], tmp_path: Path, listeners: ModuleType
) -> None:
    name = f"{listeners.__name__}:Good"
    stage.nimbus(conf={NOTIFIER_KEY: name}).await_leading()
    ctx = operations(zk_conf, tmp_path, name)
    world = World(ctx.cluster, LocalBlobStore(tmp_path / "other"), {**zk_conf, NOTIFIER_KEY: name})
    world.supervisor("s1")
    world.submit("wc-1")
    world.submit("quiet", inactive=True)
    lifecycle.update(world.context(), "wc-1", token="next", handle=world.upload("next"))
    lifecycle.kill(ctx, "wc-1", 3600)
    told = [("wc-1", "submitTopology"), ("wc-1", "activate"), ("quiet", "submitTopology")]
    told += [("wc-1", "updateTopology"), ("wc-1", "activate"), ("wc-1", "killTopology")]
    eventually(lambda: listeners.received[1:] == told, what="every action", timeout=60)
    ctx.cluster.disconnect()


def test_a_listener_that_fails_is_notified_of_the_next_action(
    stage: Stage, zk_conf: dict[str, object], tmp_path: Path, listeners: ModuleType
) -> None:
    name = f"{listeners.__name__}:Failing"
    nimbus = stage.nimbus(conf={NOTIFIER_KEY: name}).await_leading()
    ctx = operations(zk_conf, tmp_path, name)
    topology_id = add(ctx, "wc")
    lifecycle.deactivate(ctx, "wc")
    lifecycle.activate(ctx, "wc")
    eventually(
        lambda: listeners.received == [(topology_id, "deactivate"), (topology_id, "activate")],
        what="both actions",
    )
    assert nimbus.leads()
    ctx.cluster.disconnect()


def test_a_listener_that_hangs_holds_up_nobody(
    stage: Stage, zk_conf: dict[str, object], tmp_path: Path, listeners: ModuleType
) -> None:
    name = f"{listeners.__name__}:Stuck"
    nimbus = stage.nimbus(conf={NOTIFIER_KEY: name}).await_leading()
    ctx = operations(zk_conf, tmp_path, name)
    topology_id = add(ctx, "wc")
    lifecycle.deactivate(ctx, "wc")
    assert listeners.began.wait(30)
    # While the listener hangs, everything goes on; what happens waits in order.
    assert lifecycle.activate(ctx, "wc").status == "ACTIVE"
    assert lifecycle.kill(ctx, "wc", 0).status is None
    assert nimbus.leads() and nimbus.get("/v1/topologies").json()["topologies"] == []
    listeners.release.set()
    eventually(lambda: len(listeners.received) == 4, what="the rest", timeout=45)
    assert listeners.received[1:] == [
        (topology_id, action) for action in ("deactivate", "activate", "killTopology")
    ]
    ctx.cluster.disconnect()


def test_the_next_leader_notifies_of_the_rest(
    stage: Stage, zk_conf: dict[str, object], tmp_path: Path, listeners: ModuleType
) -> None:
    name = f"{listeners.__name__}:Good"
    first = stage.nimbus().await_leading()
    ctx = operations(zk_conf, tmp_path, name)
    topology_id = add(ctx, "wc")
    lifecycle.deactivate(ctx, "wc")
    assert [action.action for action in pending_actions(ctx)] == ["deactivate"]
    first.stop()
    stage.nimbus("n2", {NOTIFIER_KEY: name}).await_leading()
    eventually(
        lambda: (topology_id, "deactivate") in listeners.received, what="the action of before"
    )
    ctx.cluster.disconnect()


def test_without_a_listener_nothing_is_written(
    stage: Stage, zk_conf: dict[str, object], tmp_path: Path
) -> None:
    stage.nimbus().await_leading()
    ctx = operations(zk_conf, tmp_path, None)
    add(ctx, "wc")
    lifecycle.deactivate(ctx, "wc")
    assert pending_actions(ctx) == []
    ctx.cluster.disconnect()


@pytest.mark.parametrize(
    ("suffix", "says"),
    [
        ("", "not of the form"),
        (":Nothing", "cannot be loaded"),
        (":Broken", "ValueError: broken"),
        (":received", "TypeError"),
    ],
)
def test_a_wrong_name_says_what_is_wrong(listeners: ModuleType, suffix: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        load_listener(f"{listeners.__name__}{suffix}")


def test_a_listener_that_cannot_be_loaded_does_not_stop_a_nimbus(
    stage: Stage, zk_conf: dict[str, object], tmp_path: Path
) -> None:
    nimbus = stage.nimbus(conf={NOTIFIER_KEY: "no.such:Thing"}).await_leading()
    ctx = operations(zk_conf, tmp_path, "no.such:Thing")
    add(ctx, "wc")
    lifecycle.deactivate(ctx, "wc")
    eventually(
        lambda: pending_actions(ctx) == [], what="actions that nobody can hear being dropped"
    )
    assert nimbus.leads()
    ctx.cluster.disconnect()
