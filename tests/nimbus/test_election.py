"""Who leads, and what happens when leading fails."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial

import httpx
import pytest

from storm_dagster.blobstore import LocalBlobStore
from storm_dagster.http import server
from storm_dagster.http.server import AnnouncedName, HttpService
from storm_dagster.model import paths
from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.nimbus import daemon
from storm_dagster.nimbus.leadership import election
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.leadership import LeadershipSession
from storm_dagster.zk.session import ZkSession
from storm_dagster.zk.watches import Wake
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.nimbus_thread import NimbusThread

pytestmark = pytest.mark.zookeeper


@pytest.fixture
def state(zk_connect: Callable[..., ZkSession]) -> Callable[[], ZooKeeperClusterState]:
    return lambda: ZooKeeperClusterState(zk_connect())


def acting(nimbuses: list[NimbusThread]) -> list[str]:
    """The nimbuses that accept a write at this moment."""
    found = []
    for nimbus in nimbuses:
        answer = httpx.put(
            f"{nimbus.url}/v1/blobs/probe", content=nimbus.id.encode(), timeout=20, trust_env=False
        )
        if answer.is_success:
            found.append(nimbus.id)
        else:
            assert answer.status_code == 503, answer.text
    return found


def test_of_three_on_one_host_exactly_one_acts(
    stage: Stage, state: Callable[[], ZooKeeperClusterState]
) -> None:
    """Same host, same address: only ports differ. Round after round the leader goes."""
    running = [stage.nimbus(f"n{number}").await_serving() for number in (1, 2, 3)]
    watcher = state()
    epochs: list[int] = []
    while running:
        found = eventually(lambda: acting(running), 40, "a nimbus that acts")
        assert len(found) == 1
        leader = next(nimbus for nimbus in running if nimbus.id == found[0])
        address = leader.health()["address"]
        assert watcher.get_data(paths.NIMBUS_MASTER) == address.encode()
        assert [nimbus.id for nimbus in running if nimbus.health()["leader"]] == found
        others = [nimbus for nimbus in running if nimbus is not leader]
        followers = sorted(nimbus.health()["address"] for nimbus in others)
        # It acts before it is off the list of followers, and before the others have heard of it.
        for parent in (paths.NIMBUS_SLAVE, paths.NIMBUS_SLAVE_DETAIL):
            listed = partial(watcher.find_children, parent)
            eventually(lambda: listed() == followers, 60, f"all others below {parent}")  # noqa: B023

        def refused(url: str) -> bool:
            answer = httpx.put(f"{url}/v1/blobs/k", content=b"x", timeout=20, trust_env=False)
            assert answer.status_code == 503
            return address in answer.json()["error"]["message"]  # noqa: B023

        for nimbus in others:
            eventually(partial(refused, nimbus.url), 60, "the address of the leader")
        epochs.append(leader.health()["epoch"])
        leader.stop()
        running.remove(leader)
    assert epochs == sorted(set(epochs)), "each leader has an epoch of its own"


def test_a_failed_attempt_ends_as_a_follower_that_tries_again(
    stage: Stage,
    state: Callable[[], ZooKeeperClusterState],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    genuine = LeadershipSession.try_lead
    failures = [RuntimeError("surprise"), StormDagsterError("the record is strange")]
    seen: list[bytes | None] = []

    def failing(
        self: LeadershipSession, leader: str, http: str, wake: Wake | None = None
    ) -> int | None:
        if failures:
            # The node was taken before the attempt failed: it must be given back.
            genuine(self, leader, http, wake)
            raise failures.pop(0)
        seen.append(observer.get_data(paths.NIMBUS_MASTER))
        return genuine(self, leader, http, wake)

    observer = state()
    monkeypatch.setattr(LeadershipSession, "try_lead", failing)
    nimbus = stage.nimbus().await_leading()
    assert seen[0] is None, "/nimbus_master was dropped after each failure"
    assert nimbus.health()["epoch"] == 3
    assert "surprise" in caplog.text and "the record is strange" in caplog.text
    assert "tries again in 1 s" in caplog.text and "tries again in 2 s" in caplog.text
    nimbus.stop()
    assert nimbus.code == 0, "a failed attempt does not end the process"


def test_a_leader_that_nobody_can_reach_resigns(
    stage: Stage, state: Callable[[], ZooKeeperClusterState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port accepts connections, and nobody answers there. Alone it stays: it still heals."""
    observer = state()
    monkeypatch.setattr(election, "CHECK_SECS", 0.2)
    monkeypatch.setattr(election, "_ANSWER_SECS", 0.5)
    with monkeypatch.context() as deaf:
        deaf.setattr(daemon.HttpService, "start", lambda service: None)
        first = stage.nimbus("n1")
        former = eventually(lambda: observer.get_data(paths.NIMBUS_MASTER), 60, "the deaf leader")
    second = stage.nimbus("n2").await_leading()
    assert second.health()["address"].encode() == observer.get_data(paths.NIMBUS_MASTER) != former
    monkeypatch.setattr(HttpService, "stop", lambda service: service._listener.close())
    first.stop()


def test_a_daemon_whose_name_moves_to_another_address_ends(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    for name in ("127.0.0.1", "localhost", "no-such-name.invalid"):
        AnnouncedName(name, listener).check()
    with pytest.raises(
        Unavailable, match=r"is now 127\.0\.0\.2, and this daemon listens on 127\.0\.0\.1"
    ):
        AnnouncedName("127.0.0.2", listener).check()
    listener.close()
    monkeypatch.setattr(server, "_CHECK_SECS", 0.2)
    monkeypatch.setattr(
        daemon, "AnnouncedName", lambda host, listener: AnnouncedName("127.0.0.2", listener)
    )
    nimbus = stage.nimbus()
    eventually(lambda: nimbus.code is not None, 60, "the end of the nimbus")
    assert nimbus.code == Unavailable.exit_code and "restart it" in caplog.text


def test_a_leader_without_blobs_deletes_only_those_of_gone_topologies(
    stage: Stage,
) -> None:
    follower_keys = {"nimbus.inbox.jar.expiration.secs": 1}
    leader = stage.nimbus("n1").await_leading()
    rich = LocalBlobStore(stage.home / "nimbus" / "n2" / "blobs")
    left = (
        "gone-1-1-stormjar.jar",
        "gone-1-1.2-stormcode.ser",
        "gone-1-1-placement.json",
        "staging.t.record",
    )
    for key in ("mylib.jar", *left):
        rich.put(key, b"what another leader left here")
    (stage.home / "nimbus" / "n2" / "cluster_id").write_text(leader.health()["cluster_id"])
    follower = stage.nimbus("n2", follower_keys).await_serving()
    eventually(lambda: follower.health()["leader_http"], 30, "a leader known to n2")
    eventually(lambda: not any(map(rich.exists, left)), 60, "the end of what belongs to nothing")
    assert rich.read("mylib.jar") == b"what another leader left here"
