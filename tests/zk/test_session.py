"""Sessions on a real server: deadlines, leases, interruptions, the end."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storm_dagster.host.clock import boot_clock
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.testing.waiting import eventually, patience
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.session import LEASE_MARGIN_SECS, ZkSession
from storm_rigs.servers.embedded_zookeeper import EmbeddedZooKeeper, ping

pytestmark = [pytest.mark.zookeeper, pytest.mark.timeout(90)]

Connect = Callable[..., ZkSession]


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedZooKeeper]:
    """A server that the test may stop and freeze."""
    server = EmbeddedZooKeeper(tmp_path / "zk", durable=False).start()
    yield server
    if server.running:
        os.kill(server.pid, signal.SIGCONT)
    server.stop()


def listen(session: ZkSession) -> list[str]:
    """The connection states from now on."""
    states: list[str] = []
    session.add_listener(states.append)
    return states


def test_an_address_on_which_nobody_listens_is_unavailable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Unavailable, match="does not answer"):
        ZkSession(
            f"127.0.0.1:{port}", root="/x", session_timeout_ms=2000, connection_timeout_ms=300
        )


def test_a_server_that_accepts_and_says_nothing() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(Unavailable):
            ZkSession(
                f"127.0.0.1:{silent.getsockname()[1]}",
                root="/x",
                session_timeout_ms=1000,
                connection_timeout_ms=300,
            )


@pytest.mark.parametrize("hosts", ["", "a b", "h:1/chroot", "h:1,,h:2"])
def test_malformed_hosts_are_refused(hosts: str) -> None:
    with pytest.raises(InvalidRequest):
        ZkSession(hosts, root="/x", session_timeout_ms=1000)


@pytest.mark.parametrize("root", ["x", "", "/a/../b"])
def test_a_malformed_root_is_refused(root: str) -> None:
    with pytest.raises(InvalidRequest):
        ZkSession("127.0.0.1:1", root=root, session_timeout_ms=1000)


def test_negotiated_timeout_and_ids(zk_connect: Connect) -> None:
    session = zk_connect(session_timeout_ms=4000)
    assert session.lease().negotiated_ms == 4000
    assert session.session_id != 0
    # Two ticks are the least that the server grants.
    assert zk_connect(session_timeout_ms=100).lease().negotiated_ms == 1000


def test_lease_follows_answered_requests(zk_connect: Connect) -> None:
    session = zk_connect(session_timeout_ms=patience(4000))
    for _ in range(3):
        before = boot_clock()
        ping(session)
        after = boot_clock()
        assert before <= session.lease().answered_boot <= after
        end = session.lease_end(session.session_id)
        assert end == session.lease().answered_boot + patience(4000) / 1000 - LEASE_MARGIN_SECS
        assert boot_clock() < session.lease_end()
    assert session.lease_end(session.session_id + 1) == 0.0
    assert boot_clock() >= session.lease_end(session.session_id + 1)


def test_errors_are_answers_too(zk_connect: Connect) -> None:
    session = zk_connect()
    before = boot_clock()
    assert ZooKeeperClusterState(session).get_data("/absent") is None
    assert session.lease().answered_boot >= before


def test_idle_pings_keep_the_lease(zk_connect: Connect) -> None:
    session = zk_connect(session_timeout_ms=patience(4000))
    first = session.lease().answered_boot
    eventually(lambda: session.lease().answered_boot > first, what="an idle ping")
    assert boot_clock() < session.lease_end()


def test_a_frozen_server_ends_the_lease_and_no_call_hangs(own_server: EmbeddedZooKeeper) -> None:
    session = ZkSession(own_server.address, root="/", session_timeout_ms=patience(2000))
    states = listen(session)
    held = session.session_id
    os.kill(own_server.pid, signal.SIGSTOP)
    with pytest.raises(Unavailable):
        while True:
            ping(session)
    eventually(lambda: boot_clock() >= session.lease_end(held), what="the end of the lease")
    assert "LOST" not in states
    # The server slept as well, so that its clock for the session may not have run out.
    os.kill(own_server.pid, signal.SIGCONT)
    eventually(lambda: session.connected, what="a connection")
    ping(session)
    assert boot_clock() < session.lease_end(session.session_id)
    assert session.close()


def test_calls_while_disconnected_are_refused_and_later_ones_work(
    own_server: EmbeddedZooKeeper,
) -> None:
    session = ZkSession(own_server.address, root="/", session_timeout_ms=60_000)
    state = ZooKeeperClusterState(session)
    state.set_data("/kept", b"1")
    held = session.session_id
    own_server.kill()
    eventually(lambda: not session.connected, what="the disconnection")
    with pytest.raises(Unavailable):
        state.set_data("/lost", b"1")
    with pytest.raises(Unavailable):
        state.get_data("/kept")
    with pytest.raises(Unavailable):
        state.transaction().create("/lost", b"").commit()
    own_server.start()
    eventually(lambda: session.connected, what="a connection")
    assert state.get_data("/kept") == b"1"
    assert session.session_id == held, "a server's restart does not end sessions"
    # Refused means never sent.
    assert state.get_data("/lost") is None
    assert session.close()


def test_a_session_goes_on_after_a_cut_link(zk_connect: Connect) -> None:
    session = zk_connect()
    states = listen(session)
    held = session.session_id
    session.drop_link()
    eventually(lambda: states == ["SUSPENDED", "CONNECTED"], what="the reconnection")
    assert session.session_id == held
    ping(session)


def test_expired_session_gets_another_id(
    zk_connect: Connect, zk_expire: Callable[[ZkSession], None]
) -> None:
    session = zk_connect()
    states = listen(session)
    held = session.session_id
    zk_expire(session)
    eventually(lambda: states[-1:] == ["CONNECTED"], what="a new session")
    assert states == ["SUSPENDED", "LOST", "CONNECTED"]
    assert session.session_id not in (0, held)
    assert session.lease_end(held) == 0.0
    ping(session)
    assert boot_clock() < session.lease_end(session.session_id)


def test_ephemerals_come_back_through_the_loop(
    zk_session: ZkSession, zk_expire: Callable[[ZkSession], None]
) -> None:
    state = ZooKeeperClusterState(zk_session)
    state.set_ephemeral_node("/supervisor", b"1")
    held = zk_session.session_id
    zk_expire(zk_session)
    eventually(
        lambda: zk_session.connected and zk_session.session_id not in (0, held),
        what="a new session",
    )
    assert not state.exists("/supervisor")
    state.set_ephemeral_node("/supervisor", b"2")
    assert state.owned("/supervisor")


def test_a_raising_listener_disturbs_no_other(zk_connect: Connect) -> None:
    session = zk_connect()

    def raising(state: str) -> None:
        raise RuntimeError(state)

    session.add_listener(raising)
    states = listen(session)
    session.drop_link()
    eventually(lambda: states == ["SUSPENDED", "CONNECTED"], what="the reconnection")
    session.remove_listener(raising)
    session.remove_listener(raising)


def test_close_during_a_dead_connection_has_a_deadline(own_server: EmbeddedZooKeeper) -> None:
    session = ZkSession(own_server.address, root="/", session_timeout_ms=20_000)
    os.kill(own_server.pid, signal.SIGSTOP)
    closed: list[bool] = []
    thread = threading.Thread(
        target=lambda: closed.append(session.close(deadline=0.5)), daemon=True
    )
    thread.start()
    thread.join(patience(15))
    assert closed == [False]
    with pytest.raises(Unavailable):
        ping(session)


def test_close_twice_and_from_a_watch_callback(zk_session: ZkSession) -> None:
    state = ZooKeeperClusterState(zk_session)
    done = threading.Event()

    def close(kind: str, path: str) -> None:
        zk_session.close(deadline=1.0)
        done.set()

    state.register(close)
    state.get_data("/x", watch=True)
    state.set_data("/x", b"")
    assert done.wait(30)
    assert zk_session.close()
    assert zk_session.closed


@pytest.mark.skipif(sys.platform == "win32", reason="no fork there")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused(zk_connect: Connect) -> None:
    session = zk_connect()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"no error"
        try:
            ping(session)
        except InvalidRequest as error:
            said = str(error).encode()
        finally:
            # Closing must not end the parent's session either.
            session.close()
            os.write(writer, said)
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        said = answer.read()
    os.waitpid(child, 0)
    assert b"forked" in said
    ping(session)
    assert session.connected


def test_a_session_used_by_many_threads(zk_session: ZkSession) -> None:
    state = ZooKeeperClusterState(zk_session)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(30):
                state.set_data(f"/t{number}", str(turn).encode())
                assert state.get_data(f"/t{number}") == str(turn).encode()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


def test_reads_survive_cut_links(zk_session: ZkSession) -> None:
    state = ZooKeeperClusterState(zk_session)
    state.set_data("/r", b"x")
    stop = threading.Event()

    def cut() -> None:
        while not stop.wait(0.3):
            zk_session.drop_link()

    thread = threading.Thread(target=cut, daemon=True)
    thread.start()
    answered = 0
    deadline = time.monotonic() + patience(5)
    while answered < 200 and time.monotonic() < deadline:
        try:
            assert state.get_data("/r") == b"x"
            answered += 1
        except Unavailable:
            continue
    stop.set()
    thread.join(10)
    eventually(lambda: state.get_data("/r") == b"x", what="a read", ignore=(Unavailable,))
    assert answered > 0
