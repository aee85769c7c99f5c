"""Moves without replay: spouts pause until the tuples are done, and the workers know the places."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zmq

from storm_dagster.model.errors import NotAlive, Unavailable
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.blacklist import change_blacklist
from storm_dagster.operations.live.draining import move_off_draining
from storm_dagster.operations.live.lifecycle import finish_due, kill
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.stage.records import Crash, World

pytestmark = pytest.mark.zookeeper

TWO_WORKERS = {"topology.workers": 2, "topology.message.timeout.secs": 1}


class AnsweringWorkers:
    """Processes of workers that answer for their statistics as the test says."""

    def __init__(self, number: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._routers: dict[int, zmq.Socket[bytes]] = {}
        for _ in range(number):
            router = self._context.socket(zmq.ROUTER)
            router.setsockopt(zmq.LINGER, 0)
            self._routers[router.bind_to_random_port("tcp://127.0.0.1")] = router
        self.ports = tuple(sorted(self._routers))
        self.versions: dict[int, int] = {}
        """Port -> version of the assignment that its worker applies; without an entry the first."""
        self.open_trees = 0
        """Of each worker."""
        self.asked: set[int] = set()
        """Ports of the workers that were asked."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        poller = zmq.Poller()
        for router in self._routers.values():
            poller.register(router, zmq.POLLIN)
        ports = {router: port for port, router in self._routers.items()}
        while not self._ended.is_set():
            for router, _ in poller.poll(50):
                sender, *_ = router.recv_multipart()
                document = {"workers": {f"127.0.0.1:{ports[router]}": self._worker(ports[router])}}
                router.send_multipart([sender, json.dumps(document).encode()])

    def _worker(self, port: int) -> dict[str, Any]:
        self.asked.add(port)
        system = {"open_trees": self.open_trees, "waiting_tuples": 0, "active": 0}
        return {"version": self.versions.get(port, 0), "system": system}

    def close(self) -> None:
        self._ended.set()
        self._thread.join(patience(20))
        for router in self._routers.values():
            router.close()
        self._context.term()


@pytest.fixture
def workers() -> Iterator[AnsweringWorkers]:
    """Four worker processes."""
    answering = AnsweringWorkers(4)
    yield answering
    answering.close()


@pytest.fixture
def topology_id(world: World, workers: AnsweringWorkers) -> str:
    """A topology with one worker on each of the supervisors s1 and s2, which have two slots."""
    for supervisor_id, ports in (("s1", workers.ports[:2]), ("s2", workers.ports[2:])):
        world.supervisor(supervisor_id, ports=ports, host="127.0.0.1")
    topology_id = world.submit("wc", conf=TWO_WORKERS)
    world.run_workers(topology_id)
    return topology_id


def _rebalance(ctx: OperationsContext, world: World) -> None:
    rebalance(ctx, "wc", workers=3, wait_secs=0)


def _leave_a_host(ctx: OperationsContext, world: World) -> None:
    """What ``blacklist add --drain`` asks for, once the hosts have names of their own."""
    info = world.cluster.load_view().supervisors["s2"]
    world.supervisor("s2", ports=info.ports, host="127.0.0.2")
    change_blacklist(world.context(), add=["127.0.0.2"])
    rebalance(ctx, "wc", wait_secs=0)


def _drain(ctx: OperationsContext, world: World) -> None:
    info = world.cluster.load_view().supervisors["s2"]
    world.supervisor("s2", ports=info.ports, host="127.0.0.1", draining=True)
    move_off_draining(ctx, "wc")


@pytest.mark.parametrize("move", [_rebalance, _leave_a_host, _drain])
def test_spouts_resume_when_the_last_worker_applies_the_move(
    world: World,
    workers: AnsweringWorkers,
    topology_id: str,
    move: Callable[[OperationsContext, World], None],
) -> None:
    before = world.assignment()
    # Its time stands still, so that no wait ends by itself.
    ctx = world.context(monotonic=lambda: 0.0)
    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(move, ctx, world)
        eventually(lambda: world.assignment() != before, what="the move")
        version = world.named().assignment_at
        assert version is not None
        *early, late = workers.ports
        workers.versions = dict.fromkeys(early, version.version)
        if _is_used(world, late):
            assert not moving.done()
            assert world.named().base.status == "REBALANCING"
        workers.versions[late] = version.version
        moving.result(patience(20))
    assert world.named().base.status == "ACTIVE"


def _is_used(world: World, port: int) -> bool:
    """True if a worker that lives is assigned to that port."""
    topology = world.named()
    return any(
        worker.port == port and worker.slot in topology.live_workers for worker in topology.workers
    )


def test_a_drain_moves_tasks_when_no_tuple_is_under_way(
    world: World, workers: AnsweringWorkers, topology_id: str
) -> None:
    workers.open_trees = 1
    before = world.assignment()
    ctx = world.context(monotonic=lambda: 0.0)
    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(_drain, ctx, world)
        eventually(lambda: world.named().base.status == "REBALANCING", what="the pause")
        assert world.assignment() == before and not moving.done()
        workers.open_trees = 0
        workers.versions = dict.fromkeys(workers.ports, 2**31)
        moving.result(patience(20))
    assert {worker.node for worker in world.assignment().workers} == {"s1"}
    assert world.named().base.status == "ACTIVE"


def test_a_drain_does_not_wait_for_tuples_of_a_lost_worker(
    world: World, workers: AnsweringWorkers, topology_id: str
) -> None:
    """A container is killed while it drains: the trees of its tuples only time out."""
    workers.open_trees = 1
    workers.versions = dict.fromkeys(workers.ports, 2**31)
    before = world.assignment()
    lost = next(worker for worker in before.workers if worker.node == "s2")
    ctx = world.context(monotonic=lambda: 0.0)
    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(_drain, ctx, world)
        eventually(lambda: len(workers.asked) == 2, what="a poll of both workers")
        assert world.assignment() == before and not moving.done()
        world.stop_worker(topology_id, lost.node, lost.port)
        moving.result(patience(20))
    assert {worker.node for worker in world.assignment().workers} == {"s1"}
    assert world.named().base.status == "ACTIVE"


def _die_after(step: str) -> Callable[[str], None]:
    """An observer with which the process ends after that step."""

    def observe(point: str) -> None:
        if point == f"after.{step}":
            raise Crash

    return observe


def test_spouts_resume_without_the_planner_once_the_tasks_have_moved(world: World) -> None:
    world.submit("wc", conf=TWO_WORKERS)
    with pytest.raises(Crash):
        rebalance(
            world.context(checkpoint=_die_after("finish_rebalance")), "wc", workers=3, wait_secs=0
        )
    moved = world.assignment()
    assert len(moved.workers) == 3 and world.named().base.status == "REBALANCING"

    def away(batch: object) -> Any:
        raise Unavailable("Spark does not answer")

    seen = finish_due(world.context(planner=away), boot_id="b", boot_now=0)
    assert world.named().base.status == "REBALANCING"
    finish_due(world.context(planner=away), seen.memory, boot_id="b", boot_now=6)
    assert world.named().base.status == "ACTIVE"
    assert world.assignment() == moved


def test_the_end_of_a_move_leaves_a_later_rebalance_alone(world: World) -> None:
    world.submit("wc", conf=TWO_WORKERS)

    def other_process(point: str) -> None:
        if point != "after.finish_rebalance":
            return
        seen = finish_due(world.context(), boot_id="b", boot_now=0)
        finish_due(world.context(), seen.memory, boot_id="b", boot_now=6)
        rebalance(world.context(), "wc", workers=4, wait_secs=3600, waits_for_delay=False)

    result = rebalance(world.context(checkpoint=other_process), "wc", workers=3, wait_secs=0)
    assert result.outcome == "assigned"
    base = world.named().base
    assert (base.status, base.delay_secs, base.workers) == ("REBALANCING", 3600, 3)


def test_a_topology_killed_while_its_workers_learn_the_move_stays_killed(world: World) -> None:
    world.submit("wc", conf=TWO_WORKERS)

    def observe(point: str) -> None:
        if point == "after.finish_rebalance":
            kill(world.context(), "wc", wait_secs=60)

    with pytest.raises(NotAlive, match="was killed while it was rebalanced"):
        rebalance(world.context(checkpoint=observe), "wc", workers=3, wait_secs=0)
    assert world.named().base.status == "KILLED"
