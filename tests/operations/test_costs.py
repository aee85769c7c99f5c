"""Reads grow with changes, never with topologies times supervisors; what is gone leaves no watch
and no node.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.blobstore import BlobMeta
from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.core.leader_priority import needed_blobs
from storm_dagster.defs.healing.sensor_watch import SensorWatch
from storm_dagster.model import paths
from storm_dagster.model.records import Assignment, encode_record
from storm_dagster.nimbus.blobs.registry import BlobRegistry
from storm_dagster.operations.live import cleaner, lifecycle
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.operations.transactions import append_change
from storm_dagster.testing.waiting import eventually, patience
from storm_dagster.zk.cached_state import CachedReads
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.gray_upgrades import upgrades_under_way
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.operations.storm_client import as_storm
from storm_rigs.servers.request_counts import RequestCounts, count_requests, server_metrics
from storm_rigs.stage.records import World
from storm_rigs.stage.supervisor_link import LinkedSupervisor

pytestmark = pytest.mark.zookeeper

ONE_WORKER = {"topology.workers": 1, "topology.acker.executors": 0}


class Costs:
    """A world whose supervisors are links, and the requests of everybody."""

    def __init__(self, world: World, address: str, counts: RequestCounts) -> None:
        self.world, self.address, self.counts = world, address, counts
        self.supervisors: list[LinkedSupervisor] = []
        self.submitted = 0

    def grow(self, supervisors: int, topologies: int) -> None:
        for number in range(len(self.supervisors), supervisors):
            made = LinkedSupervisor(self.world.conf, f"sup{number}", tuple(range(6900, 6912)))
            made.link.start()
            self.supervisors.append(made)
        eventually(
            lambda: all(each.runs() or each.beats for each in self.supervisors),
            what="all supervisors",
        )
        for number in range(len(self.world.cluster.active_storms()), topologies):
            self.submit(f"t{number}")

    def submit(self, name: str) -> str:
        self.submitted += 1
        topology_id = self.world.submit(name, f"token-{self.submitted}", conf=ONE_WORKER)
        named = {worker.node for worker in self.world.assignment(name).workers}
        wanted = [each for each in self.supervisors if each.name in named]
        assert wanted
        eventually(
            lambda: all(topology_id in each.runs() for each in wanted),
            what=f"{name} at its supervisor",
        )
        self.quiet()
        return topology_id

    def remove(self, name: str) -> None:
        topology_id = self.world.named(name).id
        lifecycle.kill(self.world.context(), name, wait_secs=0)
        lifecycle.remove(self.world.context(), topology_id)
        eventually(
            lambda: all(topology_id not in each.runs() for each in self.supervisors),
            what=f"the end of {name}",
        )
        self.quiet()

    def quiet(self) -> None:
        """Wait until each supervisor has read up to the newest change."""
        newest, _ = self.world.cluster.assignment_changes()
        eventually(
            lambda: all(each.link._version == newest for each in self.supervisors),
            what="all changes read",
        )

    def reads_per_beat(self) -> float:
        """Reads of the supervisors while nothing changes, for each of their heartbeats."""
        before = {each.name: each.beats for each in self.supervisors}
        self.counts.reset()
        eventually(
            lambda: all(each.beats >= before[each.name] + 3 for each in self.supervisors),
            what="three beats",
        )
        beats = sum(each.beats - before[each.name] for each in self.supervisors)
        return self.reads() / beats

    def reads(self) -> int:
        return self.counts.reads(each.session for each in self.supervisors)

    def reads_per_change(self) -> float:
        """Reads of one supervisor for one submission and one removal, heartbeats included."""
        self.counts.reset()
        before = sum(each.beats for each in self.supervisors)
        self.submit("one-more")
        self.remove("one-more")
        beats = sum(each.beats for each in self.supervisors) - before
        return (self.reads() - 3 * beats) / len(self.supervisors)


@pytest.fixture
def costs(zookeeper_server: str, zk_root: str, tmp_path: Path) -> Iterator[Costs]:
    host, _, port = zookeeper_server.rpartition(":")
    conf = {
        "storm.zookeeper.servers": [host],
        "storm.zookeeper.port": int(port),
        "storm.zookeeper.root": zk_root,
        "storm.zookeeper.session.timeout": patience(20000),
        "task.cleanup.timeout.sec": 0,
    }
    with StormClusterState.open(conf, create_root=True) as cluster, count_requests() as counts:
        world = World(cluster, LocalBlobStore(tmp_path / "blobs"), conf)
        world.lead()
        made = Costs(world, zookeeper_server, counts)
        yield made
        for each in made.supervisors:
            each.link.close()


def test_reads_of_supervisors_grow_with_changes_only(costs: Costs) -> None:
    for supervisors, topologies in ((5, 10), (10, 10), (20, 20)):
        costs.grow(supervisors, topologies)
        assert costs.reads_per_beat() <= 4, (
            f"{supervisors} supervisors, {topologies} topologies, nothing changes"
        )
        # One read of what changed for all, and a few of the one that it concerns.
        assert costs.reads_per_change() <= 8, (
            f"{supervisors} supervisors, {topologies} topologies, two changes"
        )


def test_topologies_that_are_gone_leave_no_watch_and_no_node(costs: Costs) -> None:
    costs.grow(3, 2)
    costs.submit("again")
    costs.remove("again")
    before = server_metrics(costs.address)
    slots = [
        len(each.link._cluster.watches._slots) for each in costs.supervisors if each.link._cluster
    ]
    for _ in range(5):
        costs.submit("again")
        costs.remove("again")
    after = server_metrics(costs.address)
    assert after["zk_watch_count"] == before["zk_watch_count"]
    # Only the client tokens, one for each submission, which the cleaner removes when they expire.
    tokens = len(costs.world.cluster.state.get_children(paths.TOKENS))
    assert after["zk_znode_count"] - before["zk_znode_count"] <= tokens
    assert slots == [
        len(each.link._cluster.watches._slots) for each in costs.supervisors if each.link._cluster
    ]


def test_an_empty_assignment_node_costs_nothing(costs: Costs) -> None:
    costs.grow(3, 1)
    costs.world.cluster.state.create_node("/assignments/wc-9-9")
    assert costs.reads_per_beat() <= 4
    # The same node, as a supervisor that starts now finds it.
    costs.grow(4, 1)
    assert costs.reads_per_beat() <= 4
    costs.submit("next")


def test_a_change_without_a_record_is_seen(costs: Costs) -> None:
    costs.grow(2, 1)
    version, _ = costs.world.cluster.assignment_changes()
    # As another release writes it.
    as_storm(costs.world.cluster).set_assignment(
        "wc-7-7", costs.world.assignment("t0").model_copy(update={"topology_id": "wc-7-7"})
    )
    assert costs.world.cluster.assignment_changes() == (version + 1, b"")
    costs.quiet()
    node = costs.world.assignment("t0").workers[0].node
    holder = next(each for each in costs.supervisors if each.name == node)
    assert holder.link.desired is not None
    assert any("wc-7-7" in ids for ids in holder.link.desired.contested.values())


def test_the_record_of_changes_is_bounded(costs: Costs) -> None:
    costs.grow(2, 1)
    assignment: Assignment = costs.world.assignment("t0")
    many = assignment.model_copy(update={"workers": assignment.workers * 400})
    view = costs.world.cluster.load_view()
    for number in range(200):
        raw = append_change(view, {f"{'x' * 200}-{number}-1": many})
        assert len(raw) <= 8192


def test_reads_of_the_sensor_grow_with_changes_only(costs: Costs) -> None:
    world = costs.world
    for number in range(4):
        world.supervisor(f"s{number}", tuple(range(6900, 6910)))
    with StormClusterState.open(world.conf) as cluster:
        watch = SensorWatch(cluster)
        for topologies in (4, 16):
            for number in range(len(world.cluster.active_storms()), topologies):
                world.run_workers(world.submit(f"t{number}", conf=ONE_WORKER))
            assert len(watch.poll().topologies) == topologies

            def reads(watch: SensorWatch = watch) -> int:
                watch.cluster.state.sync_path(paths.TOPOLOGY)
                costs.counts.reset()
                watch.poll()
                return costs.counts.reads([watch.cluster.session])

            reads()
            assert reads() <= 3, (
                "that the root is there, and the records of topology masters and supervisors"
            )
            for number in range(topologies):
                beats = world.beats(f"t{number}")
                path = paths.taskbeats(beats.topology_id)
                world.cluster.state.set_data(
                    path, encode_record(beats.model_copy(update={"dead": "1"}))
                )
                world.supervisor(f"s{number % 4}", tuple(range(6900, 6910)), count=number + 2)
            assert reads() <= 3, "heartbeats are no changes"
            assert all(
                each.beats and each.beats.dead == "1" for each in watch.poll().topologies.values()
            )
            (worker, *_) = world.assignment("t0").workers
            world.stop_worker(world.named("t0").id, *worker.slot)
            assert reads() <= 8, "one worker is gone"
            assert worker.slot not in watch.poll().topologies[world.named("t0").id].live_workers
            world.run_workers(world.named("t0").id)
            reads()
            lifecycle.deactivate(world.context(), "t1")
            assert reads() <= 8, "one topology has changed"
            lifecycle.activate(world.context(), "t1")


def test_what_a_nimbus_looks_at_all_the_time_costs_nothing(costs: Costs) -> None:
    world = costs.world
    world.supervisor("s1", tuple(range(6900, 6920)))
    with StormClusterState.open(world.conf) as cluster:
        assert isinstance(cluster.state, ZooKeeperClusterState)
        reads = CachedReads(cluster.state, None)
        registry = BlobRegistry(cluster, "127.0.0.1:6627", reads)

        def look() -> int:
            cluster.state.sync_path(paths.TOPOLOGY)
            costs.counts.reset()
            assert upgrades_under_way(reads) == []
            keys = needed_blobs(registry.topologies(), registry.keys())
            assert set(registry.survey(keys)) == keys
            return costs.counts.reads([cluster.session])

        key = ""
        for topologies in (4, 16):
            for number in range(len(world.cluster.active_storms()), topologies):
                key = f"{world.submit(f't{number}', conf=ONE_WORKER)}-stormjar.jar"
                registry.register_written(BlobMeta(key, 1, "0" * 64), epoch=world.epoch())
            look()
            assert look() == 0, f"{topologies} topologies"
            registry.register_written(BlobMeta(key, 1, "1" * 64), epoch=world.epoch())
            assert look() <= 4, "one blob has changed"


def test_plans_of_many_topologies_read_the_cluster_once(costs: Costs) -> None:
    world = costs.world
    world.supervisor("s1", tuple(range(6900, 6920)))
    for number in range(6):
        world.run_workers(world.submit(f"t{number}", conf=ONE_WORKER))
    view, ctx = world.cluster.load_view(), world.context()
    costs.counts.reset()
    for number in range(6):
        rebalance(ctx, f"t{number}", dry_run=True, view=view)
    assert costs.counts.reads([world.cluster.session]) <= 6, "the epoch"


def test_looking_for_garbage_reads_lists_and_no_topology(costs: Costs) -> None:
    world, found = costs.world, set()
    world.supervisor("s1", tuple(range(6900, 6920)))
    for topologies in (2, 8):
        for number in range(len(world.cluster.active_storms()), topologies):
            world.run_workers(world.submit(f"t{number}", conf=ONE_WORKER))
        costs.counts.reset()
        cleaner.survey(world.context(), boot_now=0.0)
        found.add(costs.counts.reads([world.cluster.session]))
    assert len(found) == 1, "it grew with topologies"


def strings_in(found: Any) -> set[str]:
    """All texts in these containers."""
    if isinstance(found, dict):
        return strings_in([*found, *found.values()])
    if isinstance(found, list | tuple | set | frozenset):
        return set().union(*map(strings_in, found))
    return {found} if isinstance(found, str) else set()


def test_what_is_gone_is_in_no_memory_of_the_reader(world: World) -> None:
    world.supervisor("s1")
    assert isinstance(world.cluster.state, ZooKeeperClusterState)
    cache = CachedReads(world.cluster.state, None)
    registry, other = (BlobRegistry(world.cluster, f"127.0.0.1:{port}", cache) for port in (1, 2))
    identity = world.cluster.cluster_id()
    stays = world.submit("stays")
    kept = cache.load_view(identity).topologies[stays]
    ids, records = [], []
    for number in range(18):
        ids.append(world.submit("goes", f"token-{number}"))
        for key in [f"{ids[-1]}.{version}-stormjar.jar" for version in range(1, 7)]:
            registry.register_written(BlobMeta(key, 1, "0" * 64), epoch=world.epoch())
        records.append(weakref.ref(cache.load_view(identity).topologies[ids[-1]].base))
        lifecycle.kill(world.context(), "goes", wait_secs=0)
        lifecycle.remove(world.context(), ids[-1])
        for version in range(1, 7):
            other.forget(f"{ids[-1]}.{version}-stormjar.jar", epoch=world.epoch())
    view = cache.load_view(identity)
    registry.keys()
    gc.collect()
    assert [each() for each in records] == [None] * 18, (
        "a record of a topology that is gone is kept"
    )
    assert view.topologies[stays].base is kept.base, "what did not change is not decoded again"
    # The number of changes of a node is kept, up to 100,000 of them.
    memory = {
        name: value
        for name, value in [*vars(cache).items(), *vars(registry).items()]
        if name != "_changes"
    }
    left = {
        name: [text for text in strings_in(value) if any(each in text for each in ids[:10])]
        for name, value in memory.items()
    }
    assert not any(left.values()), left
    cache.close()
