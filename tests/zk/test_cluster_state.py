"""The storage layer on a real server: what Storm's own tests ask of it, and the races that they
leave out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, InvalidRequest, Unavailable
from storm_dagster.model.records import MAX_NODE_BYTES
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.cluster_state import ClusterState, ZooKeeperClusterState
from storm_dagster.zk.session import ZkSession
from storm_rigs.servers.embedded_zookeeper import ping

pytestmark = [pytest.mark.zookeeper, pytest.mark.timeout(60)]

Connect = Callable[..., ZkSession]


class Events:
    """What a registered callback was told."""

    def __init__(self, state: ClusterState) -> None:
        self.seen: list[tuple[str, str]] = []
        self.registration = state.register(lambda kind, path: self.seen.append((kind, path)))

    def take(self, count: int = 1) -> list[tuple[str, str]]:
        """The next ``count`` events, waited for."""
        eventually(lambda: len(self.seen) >= count, what=f"{count} events")
        taken, self.seen = self.seen, []
        return taken


@pytest.fixture
def other(zk_session: ZkSession, zk_connect: Connect) -> ZooKeeperClusterState:
    """A second client."""
    return ZooKeeperClusterState(zk_connect())


@pytest.fixture
def third(zk_session: ZkSession, zk_connect: Connect) -> ZooKeeperClusterState:
    """A third client."""
    return ZooKeeperClusterState(zk_connect())


def drain_events(state: ZooKeeperClusterState) -> None:
    """Return after every event of earlier writes has been delivered to ``state``."""
    # Events come in order with answers on one connection, then pass one callback thread.
    ping(state.session)
    passed = threading.Event()
    state.session.dispatch(passed.set)
    assert passed.wait(30)


def test_it_is_a_cluster_state(zk_state: ZooKeeperClusterState) -> None:
    assert isinstance(zk_state, ClusterState)


def test_what_is_written_is_read_and_parents_and_children_follow(
    zk_state: ZooKeeperClusterState,
) -> None:
    zk_state.set_data("/root", b"\x01\x02\x03")
    assert zk_state.get_data("/root") == b"\x01\x02\x03"
    assert zk_state.get_data("/a") is None
    zk_state.set_data("/root/a", b"\x01\x02")
    zk_state.set_data("/root", b"\x01")
    assert zk_state.get_data("/root") == b"\x01"
    assert zk_state.get_data("/root/a") == b"\x01\x02"
    zk_state.set_data("/a/b/c/d", b"\x99")
    assert zk_state.get_data("/a/b/c/d") == b"\x99"
    zk_state.mkdirs("/lalala")
    zk_state.mkdirs("/lalala")
    zk_state.mkdirs("/")
    assert zk_state.get_children("/lalala") == []
    assert zk_state.get_children("/") == ["a", "lalala", "root"]
    zk_state.delete_node("/a")
    zk_state.delete_node("/a")
    assert zk_state.get_children("/") == ["lalala", "root"]
    assert zk_state.get_data("/a/b/c/d") is None
    with pytest.raises(Conflict) as missing:
        zk_state.get_children("/a")
    assert missing.value.path == "/a"


def test_two_clients_see_each_others_writes_and_deletions(
    zk_state: ZooKeeperClusterState, other: ZooKeeperClusterState
) -> None:
    zk_state.set_data("/root", b"\x01")
    assert other.get_data("/root") == b"\x01"
    other.set_data("/a", b"\x02")
    assert zk_state.get_data("/a") == b"\x02"
    zk_state.delete_node("/a")
    assert other.get_data("/a") is None


def test_an_ephemeral_node_goes_with_its_owner_only(
    zk_state: ZooKeeperClusterState, other: ZooKeeperClusterState, third: ZooKeeperClusterState
) -> None:
    zk_state.set_ephemeral_node("/a", b"\x01")
    assert zk_state.owned("/a")
    assert not other.owned("/a")
    third.close()
    assert other.get_data("/a") == b"\x01"
    zk_state.close()
    assert other.get_data("/a") is None


def test_a_watch_is_one_shot(zk_state: ZooKeeperClusterState, other: ZooKeeperClusterState) -> None:
    first, second = Events(zk_state), Events(other)
    zk_state.set_data("/root", b"\x01")
    other.get_data("/root", watch=True)
    other.set_data("/root", b"\x02")
    assert second.take() == [("data-changed", "/root")]
    other.set_data("/root", b"\x03")
    drain_events(other)
    assert second.seen == []
    assert first.seen == []


def test_a_watch_tells_of_deletion_and_creation(
    zk_state: ZooKeeperClusterState, other: ZooKeeperClusterState
) -> None:
    events = Events(other)
    zk_state.set_data("/root", b"\x01")
    other.get_data("/root", watch=True)
    other.get_data("/root")
    zk_state.delete_node("/root")
    assert events.take() == [("deleted", "/root")]
    assert other.get_data("/root", watch=True) is None
    zk_state.set_ephemeral_node("/root", b"\x01")
    assert events.take() == [("created", "/root")]


def test_a_watch_on_children_tells_of_a_new_child(
    zk_state: ZooKeeperClusterState, other: ZooKeeperClusterState
) -> None:
    first, second = Events(zk_state), Events(other)
    assert zk_state.get_children("/", watch=True) == []
    other.set_data("/a", b"\x01")
    assert first.take() == [("children-changed", "/")]
    drain_events(other)
    assert second.seen == []


def test_an_ephemeral_node_written_again_is_a_change(
    zk_state: ZooKeeperClusterState, other: ZooKeeperClusterState
) -> None:
    events = Events(other)
    zk_state.set_ephemeral_node("/root", b"\x01")
    other.get_data("/root", watch=True)
    zk_state.set_ephemeral_node("/root", b"\x02")
    assert events.take() == [("data-changed", "/root")]
    assert other.get_data("/root") == b"\x02"


def test_a_creation_reaches_the_watch_on_the_node_and_on_its_parent(
    zk_state: ZooKeeperClusterState, other: ZooKeeperClusterState
) -> None:
    first, second = Events(zk_state), Events(other)
    zk_state.mkdirs("/ccc")
    zk_state.get_children("/ccc", watch=True)
    assert other.get_data("/ccc/b", watch=True) is None
    other.set_data("/ccc/b", b"\x08")
    assert second.take() == [("created", "/ccc/b")]
    assert first.take() == [("children-changed", "/ccc")]


def test_the_end_of_an_owner_deletes_its_node_for_watchers(
    zk_state: ZooKeeperClusterState, other: ZooKeeperClusterState
) -> None:
    events = Events(other)
    zk_state.set_ephemeral_node("/root", b"\x01")
    other.get_data("/root", watch=True)
    zk_state.close()
    assert events.take() == [("deleted", "/root")]
    other.get_data("/root2", watch=True)
    other.set_ephemeral_node("/root2", b"")
    assert events.take() == [("created", "/root2")]


def test_deletion_of_a_node_watched_twice_is_one_event(zk_state: ZooKeeperClusterState) -> None:
    events = Events(zk_state)
    zk_state.mkdirs("/both")
    zk_state.get_data("/both", watch=True)
    zk_state.get_children("/both", watch=True)
    zk_state.delete_node("/both")
    drain_events(zk_state)
    assert events.take() == [("deleted", "/both")]


def test_a_raising_callback_is_called_once_and_stops_no_other(
    zk_state: ZooKeeperClusterState,
) -> None:
    calls: list[str] = []

    def raising(kind: str, path: str) -> None:
        calls.append(path)
        raise TypeError("inside the callback")

    zk_state.register(raising)
    events = Events(zk_state)
    zk_state.get_data("/x", watch=True)
    zk_state.set_data("/x", b"")
    assert events.take() == [("created", "/x")]
    drain_events(zk_state)
    assert calls == ["/x"]


def test_an_unregistered_callback_hears_nothing(zk_state: ZooKeeperClusterState) -> None:
    gone, stays = Events(zk_state), Events(zk_state)
    assert gone.registration != stays.registration
    zk_state.unregister(gone.registration)
    zk_state.unregister(gone.registration)
    zk_state.get_data("/x", watch=True)
    zk_state.set_data("/x", b"")
    stays.take()
    assert gone.seen == []


def test_ephemeral_of_a_former_session_is_replaced(
    zk_state: ZooKeeperClusterState, other: ZooKeeperClusterState
) -> None:
    # Storm's trap: writing to a node that an older session owns succeeds, and then it vanishes.
    zk_state.set_ephemeral_node("/sup", b"old")
    other.set_ephemeral_node("/sup", b"new")
    assert other.owned("/sup")
    zk_state.close()
    assert other.get_data("/sup") == b"new"


def test_ephemeral_replaces_a_persistent_node_and_refuses_one_with_children(
    zk_state: ZooKeeperClusterState,
) -> None:
    zk_state.set_data("/p", b"")
    zk_state.set_ephemeral_node("/p", b"mine")
    assert zk_state.owned("/p")
    zk_state.set_data("/q/child", b"")
    with pytest.raises(Conflict):
        zk_state.set_ephemeral_node("/q", b"mine")


def test_many_race_for_one_ephemeral_node(
    zk_state: ZooKeeperClusterState, zk_connect: Connect
) -> None:
    rivals = [ZooKeeperClusterState(zk_connect()) for _ in range(4)]
    won: list[bool] = []
    threads = [
        threading.Thread(
            target=lambda rival=rival: won.append(rival.claim_ephemeral_node("/healer", b"x"))
        )
        for rival in rivals
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(won) == [False, False, False, True]
    assert sum(rival.owned("/healer") for rival in rivals) == 1
    owner = next(rival for rival in rivals if rival.owned("/healer"))
    assert owner.claim_ephemeral_node("/healer", b"y")
    assert owner.get_data("/healer") == b"x"


def test_compare_and_set_holds_for_version_zero(
    zk_state: ZooKeeperClusterState, other: ZooKeeperClusterState
) -> None:
    zk_state.create_node("/fresh", b"a")
    assert zk_state.get_version("/fresh") == 0
    assert other.set_data("/fresh", b"b", version=0) == 1
    with pytest.raises(Conflict) as lost:
        zk_state.set_data("/fresh", b"c", version=0)
    assert lost.value.path == "/fresh"
    assert zk_state.get_data_with_version("/fresh")[0] == b"b"  # type: ignore[index]
    with pytest.raises(Conflict):
        zk_state.set_data("/absent", b"", version=0)
    with pytest.raises(Conflict):
        zk_state.create_node("/fresh")


def test_a_counter_under_contention_loses_no_increment(
    zk_state: ZooKeeperClusterState, zk_connect: Connect
) -> None:
    zk_state.create_node("/counter", b"0")

    def add(state: ZooKeeperClusterState) -> None:
        done = 0
        while done < 25:
            found = state.get_data_with_version("/counter")
            assert found is not None
            try:
                state.set_data(
                    "/counter", str(int(found[0]) + 1).encode(), version=found[1].version
                )
            except Conflict:
                continue
            done += 1

    threads = [
        threading.Thread(target=add, args=(ZooKeeperClusterState(zk_connect()),), daemon=True)
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert zk_state.get_data("/counter") == b"75"


def test_versions_rise_and_name_the_change(zk_state: ZooKeeperClusterState) -> None:
    zk_state.set_data("/v", b"a")
    before = zk_state.get_data_with_version("/v")
    assert zk_state.set_data("/v", b"b") == 1
    after = zk_state.get_data_with_version("/v")
    assert before is not None and after is not None
    assert (before[1].version, after[1].version) == (0, 1)
    assert after[1].mzxid > before[1].mzxid
    assert zk_state.get_version("/absent") is None
    assert zk_state.get_data_with_version("/absent") is None


def test_sequential_nodes_are_numbered_in_order(zk_state: ZooKeeperClusterState) -> None:
    made = [zk_state.create_sequential("/errors/e", str(n).encode()) for n in range(3)]
    assert made == sorted(made)
    assert made[0] == "/errors/e0000000000"
    assert [zk_state.get_data(path) for path in made] == [b"0", b"1", b"2"]


def test_a_node_over_the_limit_is_refused_before_it_is_sent(
    zk_state: ZooKeeperClusterState,
) -> None:
    zk_state.set_data("/big", b"x" * MAX_NODE_BYTES)
    for size in (MAX_NODE_BYTES + 1, 1024 * 1024 - 1, 1024 * 1024 + 1, 2 * 1024 * 1024):
        with pytest.raises(InvalidRequest):
            zk_state.set_data("/big", b"x" * size)
        with pytest.raises(InvalidRequest):
            zk_state.set_ephemeral_node("/big-ephemeral", b"x" * size)
        with pytest.raises(InvalidRequest):
            zk_state.create_sequential("/big-sequence", b"x" * size)
        with pytest.raises(InvalidRequest):
            zk_state.transaction().create("/big-create", b"x" * size)
    assert zk_state.session.connected
    assert len(zk_state.get_data("/big") or b"") == MAX_NODE_BYTES


def test_many_reads_at_once(zk_state: ZooKeeperClusterState) -> None:
    for number in range(300):
        zk_state.set_data(f"/many/{number:03}", str(number).encode())
    wanted = [f"/many/{number:03}" for number in range(0, 600)]
    found = zk_state.get_many(wanted)
    assert [None if node is None else int(node[0]) for node in found] == [
        *range(300),
        *[None] * 300,
    ]
    assert zk_state.find_children_many(["/many", "/none", "/many/001"]) == [
        [f"{number:03}" for number in range(300)],
        None,
        [],
    ]


def test_watches_on_many_missing_nodes(zk_state: ZooKeeperClusterState) -> None:
    events = Events(zk_state)
    assert zk_state.get_many(["/m1", "/m2"], watch=True) == [None, None]
    assert zk_state.find_children("/m3", watch=True) is None
    for path in ("/m1", "/m2", "/m3"):
        zk_state.set_data(path, b"")
    assert sorted(events.take(3)) == [("created", "/m1"), ("created", "/m2"), ("created", "/m3")]


def test_a_watched_read_of_what_went_meanwhile_leaves_no_watch(
    zk_state: ZooKeeperClusterState, other: ZooKeeperClusterState
) -> None:
    # A supervisor reads an assignment, finds that it has work there, and reads it again with a
    # watch.
    zk_state.awaits_all = False
    events, gone = (
        Events(zk_state),
        [paths.assignment("a-1-1"), paths.gray_upgrade("a-1-1"), f"{paths.workers('a-1-1')}/s1-1"],
    )
    assert (
        zk_state.get_many(gone, watch=True) == [None] * 3
        and zk_state.find_children(gone[0], watch=True) is None
    )
    for path in gone:
        other.set_data(path, b"")
    drain_events(zk_state)
    assert events.seen == []


def test_blobstore_holder_names_with_dashes(zk_state: ZooKeeperClusterState) -> None:
    for name in ("nimbus-1:8000-2", "nimbus-1:8000-10", "nimbus-1:80001-1", "nimbus-10:8000-1"):
        zk_state.set_data(f"/blobstore/key/{name}", b"")
    zk_state.delete_node_blobstore("/blobstore/key", "nimbus-1:8000")
    assert zk_state.get_children("/blobstore/key") == ["nimbus-10:8000-1", "nimbus-1:80001-1"]
    zk_state.delete_node_blobstore("/blobstore/absent", "nimbus-1:8000")


def test_concurrent_deletion_and_creation_of_folders(
    zk_state: ZooKeeperClusterState, zk_connect: Connect
) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def delete(state: ZooKeeperClusterState) -> None:
        while not stop.is_set():
            try:
                state.delete_node("/d")
            except Conflict:
                continue
            except BaseException as error:
                failures.append(error)
                return

    thread = threading.Thread(
        target=delete, args=(ZooKeeperClusterState(zk_connect()),), daemon=True
    )
    thread.start()
    for number in range(50):
        try:
            zk_state.set_data(f"/d/e/f/{number}", b"")
        except Conflict:
            continue
    stop.set()
    thread.join(30)
    assert failures == []


def test_paths_are_normalised_and_checked(zk_state: ZooKeeperClusterState) -> None:
    zk_state.set_data("//a///b", b"1")
    assert zk_state.get_data("/a/b/") == b"1"
    for path in ("a", "/a/../b", "/./a", "/a\0b"):
        with pytest.raises(InvalidRequest):
            zk_state.get_data(path)
    with pytest.raises(InvalidRequest):
        zk_state.delete_node("/")


def test_children_below_an_ephemeral_node_are_refused(zk_state: ZooKeeperClusterState) -> None:
    zk_state.set_ephemeral_node("/e", b"")
    with pytest.raises(Conflict):
        zk_state.set_data("/e/child", b"")


def test_nothing_creates_the_root(zk_connect: Connect) -> None:
    state = ZooKeeperClusterState(zk_connect())
    for write in (
        lambda: state.set_data("/a/b", b""),
        lambda: state.set_ephemeral_node("/e", b""),
        lambda: state.mkdirs("/m"),
        lambda: state.create_sequential("/s/e", b""),
    ):
        with pytest.raises(Unavailable, match="does not exist"):
            write()
    assert not state.exists("/")


def test_events_while_disconnected_are_logged_and_delivered(
    zk_state: ZooKeeperClusterState, caplog: pytest.LogCaptureFixture
) -> None:
    from kazoo.protocol.states import EventType, KeeperState, WatchedEvent

    events = Events(zk_state)
    full = zk_state.session.full("/late")
    zk_state.session.close()
    with caplog.at_level(logging.WARNING, logger="storm_dagster.zk.cluster_state"):
        zk_state._on_event(WatchedEvent(EventType.CHANGED, KeeperState.CONNECTING, full))
        zk_state._on_event(WatchedEvent(EventType.NONE, KeeperState.CONNECTING, None))
    assert events.seen == [("data-changed", "/late")]
    assert "disconnected" in caplog.text


def test_a_closed_state_delivers_nothing_and_refuses_use(zk_state: ZooKeeperClusterState) -> None:
    zk_state.close()
    with pytest.raises(Unavailable, match="closed"):
        zk_state.get_data("/x")
    zk_state.close()


def test_after_a_sync_the_latest_write_is_read(
    zk_state: ZooKeeperClusterState, other: ZooKeeperClusterState
) -> None:
    zk_state.set_data("/s", b"1")
    other.sync_path("/s")
    assert other.get_data("/s") == b"1"


def test_a_look_that_the_server_refuses_finds_no_node(zk_state: ZooKeeperClusterState) -> None:
    zk_state.set_data("/there", b"1")
    there, away = (zk_state.session.full(path) for path in ("/there", "/away"))
    stats = zk_state._stats([there, away], "a look")
    assert stats[0] is not None and stats[1] is None
    # The server takes no NUL in a name: its refusal is neither a node nor that there is none.
    with pytest.raises(Conflict, match="BadArguments"):
        zk_state._stats([there, f"{away}\0"], "a look")
