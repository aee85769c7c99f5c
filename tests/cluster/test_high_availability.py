"""Three nimbuses, three ZooKeeper servers, two supervisors with real workers; each is killed,
frozen and cut off in turn while somebody submits.

The submissions go through the stages that a Dagster run has, in this process; Dagster and Spark
take no part.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from storm_dagster.blobstore import LocalBlobStore
from storm_dagster.model import paths
from storm_dagster.model.errors import Fenced, StormDagsterError, Unavailable
from storm_dagster.model.names import code_key, conf_key, jar_key
from storm_dagster.operations.live import lifecycle
from storm_dagster.testing.task_state import read_task_states
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.chaos.workload import files_below
from storm_rigs.servers.ensemble import ZooKeeperEnsemble
from storm_rigs.servers.fault_proxy import FaultProxy
from storm_rigs.servers.namespaces import Network, missing_requirement
from storm_rigs.stage.daemons import Daemons

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

STEADY = f"{Path(__file__).parent / 'topologies' / 'steady.py'}:Steady"
CONF = {
    "topology.min.replication.count": 2,
    "topology.max.replication.wait.time.sec": 60,
    "storm.zookeeper.session.timeout": 4000,
}


@dataclass
class AvailabilityWorld:
    """The cluster under test, and a topology that must not notice anything."""

    zookeeper: ZooKeeperEnsemble
    daemons: Daemons
    links: dict[str, list[FaultProxy]]
    """Nimbus -> its connections to each ZooKeeper server."""
    network: Network | None
    """Network namespaces of the ZooKeeper servers, where that can be had."""
    steady: str = ""
    workers: dict[tuple[str, int], tuple[int, str]] | None = None
    """(supervisor, port) -> (pid, start token) of its workers."""

    def acked(self) -> int:
        """Number of the steady topology's acked numbers."""
        states = read_task_states(self.daemons.home, "steady", "numbers")
        return sum(int(state.get("acked", 0)) for state in states.values())

    def statuses(self) -> set[str]:
        """Worker records of the steady topology on the supervisors' disks."""
        pids = {pid for pid, _ in (self.workers or {}).values()}
        found = set()
        for path in files_below(self.daemons.home, "workers/*/heartbeat*"):
            try:
                beat = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if beat.get("pid") in pids:
                found.add(beat["status"])
        return found

    @contextmanager
    def cut_off(self, nimbus: str) -> Iterator[None]:
        """Its packets to and from ZooKeeper vanish."""
        for link in self.links[nimbus]:
            link.cut()
        try:
            yield
        finally:
            for link in self.links[nimbus]:
                link.restore()

    def undisturbed(self) -> None:
        """The steady topology runs on, in the very same processes, and goes on counting."""
        assert self.daemons.wait_running(self.steady) == self.workers, (
            "no worker may have been restarted or moved"
        )
        before = self.acked()
        eventually(lambda: self.acked() > before, 60, "numbers on their way")

    def sound(self) -> None:
        """Check the invariants of ``doctor --invariants``, I1 to I8."""
        seen = self.daemons.inspect()
        assert seen.sound, seen.violations


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AvailabilityWorld]:
    folder = tmp_path_factory.mktemp("ha")
    with ExitStack() as stack:
        network = stack.enter_context(Network("sdha", 3)) if missing_requirement() is None else None
        zookeeper = stack.enter_context(
            ZooKeeperEnsemble(
                folder / "zk",
                hosts=[network.address(host) for host in range(3)] if network else None,
                prefixes=[network.prefix(host) for host in range(3)] if network else None,
            )
        )
        links = {
            nimbus: [
                stack.enter_context(FaultProxy(member.host, member.client))
                for member in zookeeper.members
            ]
            for nimbus in ("n1", "n2", "n3")
        }
        daemons = stack.enter_context(
            Daemons(
                folder / "home",
                zookeeper.addresses,
                nimbuses=3,
                supervisors=2,
                slots=3,
                conf=CONF,
                links={nimbus: [link.address for link in own] for nimbus, own in links.items()},
            )
        )
        made = AvailabilityWorld(zookeeper, daemons, links, network)
        made.steady = daemons.submit(STEADY, "steady")
        made.workers = daemons.wait_running(made.steady)
        yield made


# -- what is done: each begins at a call, and what it returns ends it ------------------------------


def _kill(world: AvailabilityWorld, role: str, id: str) -> Callable[[], None]:
    world.daemons.kill(role, id)
    return world.daemons.heal


def _hold(manager: Any, until: Callable[[], object]) -> Callable[[], None]:
    """Enter now; on the end wait for ``until``, then leave."""
    manager.__enter__()

    def end() -> None:
        try:
            until()
        finally:
            manager.__exit__(None, None, None)

    return end


def leader_killed(world: AvailabilityWorld) -> Callable[[], None]:
    return _kill(world, "nimbus", world.daemons.leader())


def leader_frozen(world: AvailabilityWorld) -> Callable[[], None]:
    old = world.daemons.leader()
    return _hold(world.daemons.frozen("nimbus", old), lambda: world.daemons.leader(other_than=old))


def leader_cut_off(world: AvailabilityWorld) -> Callable[[], None]:
    old = world.daemons.leader()
    return _hold(world.cut_off(old), lambda: world.daemons.leader(other_than=old))


def follower_killed(world: AvailabilityWorld) -> Callable[[], None]:
    return _kill(world, "nimbus", world.daemons.followers()[0])


def follower_frozen(world: AvailabilityWorld) -> Callable[[], None]:
    return _hold(world.daemons.frozen("nimbus", world.daemons.followers()[0]), lambda: None)


def follower_cut_off(world: AvailabilityWorld) -> Callable[[], None]:
    return _hold(world.cut_off(world.daemons.followers()[0]), lambda: None)


def zookeeper_leader_killed(world: AvailabilityWorld) -> Callable[[], None]:
    world.zookeeper.kill(world.zookeeper.leader())
    return world.zookeeper.heal


def zookeeper_follower_killed(world: AvailabilityWorld) -> Callable[[], None]:
    world.zookeeper.kill(world.zookeeper.followers()[0])
    return world.zookeeper.heal


def _another_leads(world: AvailabilityWorld, old: int) -> None:
    def others() -> bool:
        return any(
            world.zookeeper.mode(m.id) == "leader" for m in world.zookeeper.members if m.id != old
        )

    eventually(others, 90, "another ZooKeeper server leading")


def zookeeper_leader_frozen(world: AvailabilityWorld) -> Callable[[], None]:
    old = world.zookeeper.leader()
    world.zookeeper.freeze(old)

    def end() -> None:
        _another_leads(world, old)
        world.zookeeper.heal()

    return end


def zookeeper_leader_cut_off(world: AvailabilityWorld) -> Callable[[], None]:
    network = _network(world)
    old = world.zookeeper.leader()
    network.cut(old - 1)

    def end() -> None:
        _another_leads(world, old)
        network.restore(old - 1)
        world.zookeeper.heal()

    return end


def zookeeper_follower_cut_off(world: AvailabilityWorld) -> Callable[[], None]:
    network = _network(world)
    cut = world.zookeeper.followers()[0]
    network.cut(cut - 1)

    def end() -> None:
        network.restore(cut - 1)
        world.zookeeper.heal()

    return end


def supervisor_killed(world: AvailabilityWorld) -> Callable[[], None]:
    return _kill(world, "supervisor", "s1")


def supervisor_frozen(world: AvailabilityWorld) -> Callable[[], None]:
    def gone() -> None:
        with world.daemons.cluster() as cluster:
            eventually(
                lambda: "s2" not in cluster.load_view().supervisors, 60, "the end of its session"
            )

    return _hold(world.daemons.frozen("supervisor", "s2"), gone)


def _network(world: AvailabilityWorld) -> Network:
    if world.network is None:
        pytest.skip(f"a ZooKeeper server cannot be cut off here: {missing_requirement()}")
    return world.network


TROUBLE = [leader_killed]
MORE_TROUBLE = [
    leader_cut_off,
    zookeeper_leader_killed,
    leader_frozen,
    follower_killed,
    follower_frozen,
    follower_cut_off,
    zookeeper_leader_frozen,
    zookeeper_leader_cut_off,
    zookeeper_follower_killed,
    zookeeper_follower_cut_off,
    supervisor_killed,
    supervisor_frozen,
]


@pytest.mark.parametrize(
    "trouble",
    [*TROUBLE, *(pytest.param(one, marks=pytest.mark.chaos) for one in MORE_TROUBLE)],
    ids=lambda trouble: trouble.__name__,
)
def test_a_submission_survives_and_what_runs_does_not_notice(
    world: AvailabilityWorld, trouble: Callable[[AvailabilityWorld], Callable[[], None]]
) -> None:
    name = trouble.__name__.replace("_", "-")
    daemons = world.daemons
    with daemons.cluster() as cluster:
        known = cluster.epoch()
    assert known is not None
    reached, harmed = threading.Event(), threading.Event()
    answer: list[str | Exception] = []

    def stand_still(point: str) -> None:
        # Right before it becomes visible: what was read and staged until then is as old as can be.
        if not reached.is_set() and "publish" in point:
            reached.set()
            harmed.wait(patience(60))

    def submit() -> None:
        try:
            answer.append(
                daemons.submit(STEADY, name, checkpoint=stand_still, conf={"topology.workers": 1})
            )
        except Exception as error:
            answer.append(error)

    asking = threading.Thread(target=submit)
    asking.start()
    try:
        assert reached.wait(patience(120)), f"the submission came to nothing: {answer}"
        end = trouble(world)
    finally:
        harmed.set()
    end()
    asking.join(patience(240))
    (topology_id,) = answer
    assert isinstance(topology_id, str), f"the submission ended with {topology_id!r}"
    daemons.heal()
    daemons.wait_running(topology_id)
    world.undisturbed()
    # Everything that was acknowledged is there, once, and nobody else claims to lead.
    with daemons.cluster() as cluster:
        view = cluster.load_view()

        def epoch_of_who_leads() -> int | None:
            now = cluster.epoch()
            return (
                now[0]
                if now and [daemons.url(id) for id in daemons.leaders()] == [now[1].http]
                else None
            )

        epoch = eventually(epoch_of_who_leads, 60, "one leader, whose epoch it is")
    assert {view.topologies[id].base.name for id in view.topologies} == {"steady", name}
    assert all(topology.base.status == "ACTIVE" for topology in view.topologies.values())
    if epoch != known[0]:
        with daemons.operations(epoch=known[0]) as deposed, pytest.raises(Fenced):
            lifecycle.deactivate(deposed, "steady")
    world.sound()
    with daemons.operations() as ctx:
        lifecycle.kill(ctx, name, 0)


def test_what_a_frozen_leader_was_asked_does_not_land_when_it_wakes(
    world: AvailabilityWorld,
) -> None:
    """Requests that wait in its socket are answered with an error by the deposed leader."""
    daemons = world.daemons
    old = daemons.leader()
    epoch = eventually(lambda: daemons.health(old), 60, "the leader's health")["epoch"]
    answers: list[httpx.Response] = []

    def ask(method: str, path: str, **more: Any) -> None:
        answers.append(
            httpx.request(method, f"{daemons.url(old)}{path}", timeout=120, trust_env=False, **more)
        )

    asking = [
        threading.Thread(
            target=ask, args=("POST", "/v1/topologies/steady/deactivate"), kwargs={"json": {}}
        ),
        threading.Thread(
            target=ask,
            args=("POST", "/v1/topologies/steady/kill"),
            kwargs={"json": {"wait_secs": 0}},
        ),
        threading.Thread(
            target=ask,
            args=("PUT", "/v1/blobs/upload.late.archive"),
            kwargs={"content": b"x", "headers": {"X-Storm-Epoch": str(epoch)}},
        ),
    ]
    with daemons.frozen("nimbus", old):
        for thread in asking:
            thread.start()
        new = daemons.leader(other_than=old)
    for thread in asking:
        thread.join(patience(150))
    assert len(answers) == 3
    assert all(answer.status_code in (409, 503) for answer in answers), [a.text for a in answers]
    eventually(lambda: daemons.leaders() == [new], 60, "one leader")
    late = httpx.head(
        f"{daemons.url(new)}/v1/blobs/upload.late.archive", timeout=60, trust_env=False
    )
    assert late.status_code == 404
    with daemons.cluster() as cluster:
        assert cluster.load_view().topologies[world.steady].base.status == "ACTIVE"
    world.undisturbed()


@pytest.mark.chaos
def test_copies_come_back_to_a_nimbus_that_lost_its_disk(world: AvailabilityWorld) -> None:
    """A nimbus fetches missing blobs; nothing is deleted for that."""
    daemons = world.daemons
    follower = daemons.followers()[0]
    daemons.kill("nimbus", follower)
    store = daemons.home / "nimbus" / follower / "blobs"
    shutil.rmtree(store)
    keys = [make(world.steady) for make in (jar_key, conf_key, code_key)]
    daemons.heal()

    def held() -> bool:
        return all(LocalBlobStore(store).exists(key) for key in keys)

    eventually(held, 60, "the copies on its disk", ignore=(OSError, StormDagsterError))
    with daemons.cluster() as cluster:
        eventually(
            lambda: all(len(cluster.state.get_children(paths.blob(key))) == 3 for key in keys),
            60,
            "three registered copies of each",
        )
    world.undisturbed()
    world.sound()


def test_without_a_quorum_local_reads_succeed_and_writes_are_unavailable(
    world: AvailabilityWorld,
) -> None:
    daemons, zookeeper = world.daemons, world.zookeeper
    leader = daemons.leader()
    key = jar_key(world.steady)
    content = httpx.get(
        f"{daemons.url(leader)}/v1/blobs/{key}", timeout=60, trust_env=False
    ).content
    with daemons.operations() as ctx:
        lost = [zookeeper.leader(), eventually(zookeeper.followers, 60, "a follower")[0]]
        for server in lost:
            zookeeper.kill(server)
        try:
            eventually(lambda: not daemons.leaders(), 60, "nobody acting as leader")
            for nimbus in daemons.nimbuses:
                eventually(
                    lambda nimbus=nimbus: (
                        (daemons.health(nimbus) or {}).get("status") == "no connection to ZooKeeper"
                    ),
                    60,
                    f"what {nimbus} says of it",
                )
                blob = httpx.get(
                    f"{daemons.url(nimbus)}/v1/blobs/{key}", timeout=60, trust_env=False
                )
                assert blob.status_code == 200 and blob.content == content
            for method, path, body in (
                ("POST", "/v1/uploads", None),
                ("POST", "/v1/submit", {"name": "nobody", "handle": "x"}),
                ("POST", "/v1/topologies/steady/deactivate", {}),
                ("PUT", "/v1/blobs/upload.k.archive", None),
            ):
                refused = httpx.request(
                    method, f"{daemons.url(leader)}{path}", json=body, timeout=60, trust_env=False
                )
                error = refused.json()["error"]
                assert (refused.status_code, error["type"]) == (503, "Unavailable"), (
                    path,
                    refused.text,
                )
            with pytest.raises(Unavailable):
                lifecycle.deactivate(ctx, "steady")
            eventually(lambda: world.statuses() == {"paused"}, 60, "its workers paused")
            still = world.acked()
            assert world.statuses() == {"paused"} and world.acked() == still
        finally:
            zookeeper.heal()
    eventually(lambda: world.statuses() == {"running"}, 90, "its workers going on")
    daemons.heal()
    world.undisturbed()
    world.sound()
