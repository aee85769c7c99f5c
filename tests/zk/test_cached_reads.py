"""The read cache: as new as ZooKeeper itself, whoever writes and whatever happens to the
connection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storm_dagster.model import paths
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.cached_state import CachedReads
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.disk_cache import SqliteCache, open_disk_cache
from storm_dagster.zk.session import ZkSession
from storm_rigs.servers.request_counts import server_metrics

pytestmark = pytest.mark.zookeeper
TASKS, BASE, BEATS = "/tasks/wc-1-1", "/topology/wc-1-1", "/taskbeats/wc-1-1"


@pytest.fixture
def other(
    zk_state: ZooKeeperClusterState, zk_connect: Callable[..., ZkSession]
) -> ZooKeeperClusterState:
    """The state as another process has it."""
    return ZooKeeperClusterState(zk_connect())


@pytest.fixture
def reads(zk_state: ZooKeeperClusterState, tmp_path: Path) -> Iterator[CachedReads]:
    cache = CachedReads(zk_state, SqliteCache(tmp_path))
    yield cache
    cache.close()


def answered(cache: CachedReads) -> tuple[int, int, int]:
    return cache.metrics.memory, cache.metrics.disk, cache.metrics.zookeeper


def test_the_second_read_comes_from_memory(
    reads: CachedReads, other: ZooKeeperClusterState
) -> None:
    other.create_node(TASKS, b"one")
    assert reads.get_many([TASKS, "/tasks/none"]) == [other.get_data_with_version(TASKS), None]
    assert answered(reads) == (0, 0, 2)
    assert reads.get_data(TASKS) == b"one" and reads.get_data("/tasks/none") is None
    assert answered(reads) == (2, 0, 2), "absence is known as well"


def test_every_write_of_another_is_seen_after_its_watch(
    reads: CachedReads, other: ZooKeeperClusterState
) -> None:
    other.create_node(TASKS, b"0")
    for number in range(1, 200):
        other.set_data(TASKS, str(number).encode())
        # The reader's own server has the write: what is read from it afterwards is as new.
        reads.sync_path(TASKS)
        assert reads.get_data(TASKS) == str(number).encode()
        assert reads.get_data(TASKS) == str(number).encode()
    other.delete_node(TASKS)
    reads.sync_path(TASKS)
    assert reads.get_data(TASKS) is None
    other.create_node(TASKS, b"again")
    reads.sync_path(TASKS)
    assert reads.get_data(TASKS) == b"again"
    assert reads.metrics.memory == 199


def test_what_is_read_here_is_as_new_as_what_was_read_before(
    reads: CachedReads, other: ZooKeeperClusterState
) -> None:
    """A reader that knows a new assignments version never gets the assignment from before it."""
    other.create_node(paths.ASSIGNMENTS, b"")
    other.create_node("/assignments/wc-1-1", b"0")
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            transaction = other.transaction().set(paths.ASSIGNMENTS, str(number).encode(), -1)
            transaction.set("/assignments/wc-1-1", str(number).encode(), -1).commit()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(500):
            assignments_version = int(reads.get_data(paths.ASSIGNMENTS) or b"0")
            assert int(reads.get_data("/assignments/wc-1-1") or b"0") >= assignments_version
    finally:
        stop.set()
        writer.join(10)


def test_many_readers_and_writers_end_with_the_newest(
    reads: CachedReads, other: ZooKeeperClusterState
) -> None:
    nodes = [f"/tasks/t{number}-1-1" for number in range(20)]
    for node in nodes:
        other.create_node(node, b"0")
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            reads.get_many(nodes)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for thread in readers:
        thread.start()
    for number in range(1, 30):
        for node in nodes:
            other.set_data(node, str(number).encode())
    stop.set()
    for thread in readers:
        thread.join(20)
    reads.sync_path("/tasks")
    found = [value and value[0] for value in reads.get_many(nodes)]
    assert found == [b"29"] * 20


def test_lists_of_workers_come_from_memory_until_they_change(
    reads: CachedReads, other: ZooKeeperClusterState
) -> None:
    folder = "/workers/wc-1-1"
    assert reads.find_children_many([folder]) == [None]
    other.create_node(f"{folder}/s1-6900", b"a")
    reads.sync_path(folder)
    assert reads.find_children_many([folder, "/workers/none"]) == [["s1-6900"], None]
    before = reads.metrics.memory
    assert reads.find_children_many([folder, "/workers/none"]) == [["s1-6900"], None]
    assert reads.metrics.memory == before + 2
    other.create_node(f"{folder}/s1-6901", b"b")
    reads.sync_path(folder)
    assert reads.find_children_many([folder]) == [["s1-6900", "s1-6901"]]


def test_no_watch_waits_for_what_does_not_come_back(
    reads: CachedReads, other: ZooKeeperClusterState, zookeeper_server: str
) -> None:
    """Between a list and the read of its nodes, topologies are removed: their ids never come
    again.
    """
    for first in (paths.TOPOLOGY, paths.TASKS, paths.ASSIGNMENTS, paths.WORKERS):
        other.create_node(first)

    def read(number: int) -> list[object]:
        topology_id = f"wc-{number}-1"
        nodes = [
            f"{first}/{topology_id}" for first in (paths.TOPOLOGY, paths.TASKS, paths.ASSIGNMENTS)
        ]
        values = reads.get_many([*nodes, f"{paths.WORKERS}/{topology_id}/s1-6900"])
        return [
            *values,
            *reads.find_children_many(
                [paths.workers(topology_id), paths.gray_upgrade(topology_id)]
            ),
        ]

    assert read(0) == [None] * 6
    before = server_metrics(zookeeper_server)["zk_watch_count"]
    for number in range(1, 50):
        assert read(number) == [None] * 6
    assert server_metrics(zookeeper_server)["zk_watch_count"] == before
    asked = reads.metrics.zookeeper
    assert read(7) == [None] * 6
    assert reads.metrics.zookeeper == asked, "absence is known"
    other.create_node("/workers/wc-7-1/s1-6900", b"worker")
    other.create_node("/tasks/wc-7-1", b"tasks")
    reads.sync_path("/tasks")
    assert [
        found and found[0] for found in reads.get_many(["/tasks/wc-7-1", "/workers/wc-7-1/s1-6900"])
    ] == [
        b"tasks",
        b"worker",
    ]
    assert reads.find_children("/workers/wc-7-1") == ["s1-6900"]


def test_what_has_gone_leaves_neither_a_watch_nor_a_row(
    reads: CachedReads, other: ZooKeeperClusterState, zookeeper_server: str, tmp_path: Path
) -> None:
    """Gone between an interruption, with its list read again, and the read of its value; and after
    it was read.
    """
    nodes = [f"/topology/wc-{number}-1" for number in range(40)]
    for node in nodes:
        other.create_node(node, b"x")
    reads.find_children_many(["/topology"])
    assert reads.get_many(nodes) == other.get_many(nodes)
    before = server_metrics(zookeeper_server)["zk_watch_count"]
    reads._on_interruption("SUSPENDED")
    reads.find_children_many(["/topology"])
    for node in nodes[:20]:
        other.delete_node(node)
    # As it was asked before the deletions were heard of.
    reads._fetch(nodes, {})
    for node in nodes[20:39]:
        other.delete_node(node)
    reads.sync_path(nodes[39])

    def only_one_left() -> bool:
        reads._save_to_disk({nodes[39]: reads.get_many([nodes[39]])[0]})
        assert reads._disk is not None
        return list(reads._disk.get_many(nodes)) == [nodes[39]]

    eventually(only_one_left, 20, "the end of the rows")
    assert server_metrics(zookeeper_server)["zk_watch_count"] <= before - 39 + 1


def test_what_changes_all_the_time_is_not_kept(
    reads: CachedReads, other: ZooKeeperClusterState
) -> None:
    other.create_node(BEATS, b"beat")
    other.create_node("/supervisors/s1", b"info")
    for _ in range(3):
        assert [value and value[0] for value in reads.get_many([BEATS, "/supervisors/s1"])] == [
            b"beat",
            b"info",
        ]
    assert answered(reads) == (0, 0, 0)


def test_an_interruption_empties_the_memory(
    reads: CachedReads, other: ZooKeeperClusterState
) -> None:
    other.create_node(TASKS, b"before")
    assert reads.get_data(TASKS) == b"before"
    reads.session.drop_link()
    eventually(lambda: reads.metrics.invalidated > 0, 20, "the interruption")
    other.set_data(TASKS, b"while it was away")
    eventually(lambda: reads.sync_path(TASKS) or True, 60, "a connection", ignore=(Unavailable,))
    assert reads.get_data(TASKS) == b"while it was away"


def test_a_process_that_is_slow_does_not_read_everything_again(
    reads: CachedReads, other: ZooKeeperClusterState
) -> None:
    nodes = [f"/tasks/t{number}-1-1" for number in range(20)]
    for node in nodes:
        other.create_node(node, b"0")
    reads.get_many(nodes)
    asked, late = reads.metrics.zookeeper, threading.Event()

    def hold() -> None:
        late.wait()

    reads.session.dispatch(hold)
    threading.Timer(1.5, late.set).start()
    assert [found and found[0] for found in reads.get_many(nodes)] == [b"0"] * 20
    assert late.is_set(), "events that had arrived come first"
    assert (reads.metrics.zookeeper, reads.metrics.invalidated) == (asked, 0)


def test_the_disk_answers_after_a_restart_what_is_still_true(
    zk_state: ZooKeeperClusterState, other: ZooKeeperClusterState, tmp_path: Path
) -> None:
    other.create_node(TASKS, b"same")
    other.create_node(BASE, b"old")
    first = CachedReads(zk_state, open_disk_cache(tmp_path, None, reset=True))
    first.get_many([TASKS, BASE])
    first.close()
    other.set_data(BASE, b"new")
    second = CachedReads(zk_state, open_disk_cache(tmp_path, None, reset=False))
    assert [value and value[0] for value in second.get_many([TASKS, BASE])] == [b"same", b"new"]
    assert answered(second) == (0, 1, 1)
    second.close()
    emptied = CachedReads(zk_state, open_disk_cache(tmp_path, None, reset=True))
    emptied.get_many([TASKS, BASE])
    assert answered(emptied) == (0, 0, 2)
    emptied.close()


def test_what_does_not_fit_in_memory_is_on_disk(
    zk_state: ZooKeeperClusterState, other: ZooKeeperClusterState, tmp_path: Path
) -> None:
    nodes = [f"/tasks/t{number}-1-1" for number in range(10)]
    for number, node in enumerate(nodes):
        other.create_node(node, bytes([number]) * 1000)
    cache = CachedReads(zk_state, SqliteCache(tmp_path), max_bytes=3000)
    for _ in range(2):
        assert [value and value[0][0] for value in cache.get_many(nodes)] == list(range(10))
    assert cache.metrics.disk >= 7 and cache.metrics.zookeeper == 10
    other.set_data(nodes[0], b"x")
    cache.sync_path(nodes[0])
    assert cache.get_data(nodes[0]) == b"x", "its watch was armed all the time"
    cache.close()


def test_a_damaged_file_is_only_a_cache(
    zk_state: ZooKeeperClusterState, other: ZooKeeperClusterState, tmp_path: Path
) -> None:
    (tmp_path / "reads.sqlite").write_bytes(b"this is no database" * 100)
    other.create_node(TASKS, b"one")
    cache = CachedReads(zk_state, open_disk_cache(tmp_path, None, reset=False))
    assert cache.get_data(TASKS) == b"one"
    cache.close()


class DictCache(dict[str, bytes]):
    """Named by ``nimbus.cache.class`` below."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def get_many(self, keys):  # type: ignore[no-untyped-def]
        return {key: self[key] for key in keys if key in self}

    def put_many(self, values):  # type: ignore[no-untyped-def]
        self.update(values)

    def remove(self, keys):  # type: ignore[no-untyped-def]
        for key in keys:
            self.pop(key, None)

    def close(self) -> None:
        pass


def test_another_disk_cache_by_name(
    zk_state: ZooKeeperClusterState,
    other: ZooKeeperClusterState,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "my_cache", sys.modules[__name__])
    disk = open_disk_cache(tmp_path, "my_cache:DictCache", reset=True)
    assert isinstance(disk, DictCache) and disk.directory == tmp_path
    other.create_node(TASKS, b"one")
    cache = CachedReads(zk_state, disk)
    cache.get_data(TASKS)
    assert list(disk) == [TASKS]
    with pytest.raises(InvalidRequest, match=r"nimbus\.cache\.class"):
        open_disk_cache(tmp_path, "no_such_module:Cache", reset=True)
    cache.close()
