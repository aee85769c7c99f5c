"""Leadership epochs on a real server: one leader, told of its end, fenced whatever it believes."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Fenced, Unavailable
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.leadership import LeadershipSession
from storm_dagster.zk.session import ZkSession
from storm_dagster.zk.storm_cluster_state import StormClusterState

pytestmark = [pytest.mark.zookeeper, pytest.mark.timeout(90)]

Expire = Callable[[ZkSession], None]
Nimbus = tuple[StormClusterState, LeadershipSession]


@pytest.fixture
def nimbus(
    zk_cluster: StormClusterState, zk_conf: dict[str, object]
) -> Iterator[Callable[[], Nimbus]]:
    """Makes one nimbus's part after the other, each in a session of its own."""
    made: list[Nimbus] = []

    def make() -> Nimbus:
        cluster = StormClusterState.open(zk_conf)
        made.append((cluster, LeadershipSession(cluster)))
        return made[-1]

    yield make
    for cluster, leadership in made:
        leadership.close()
        cluster.disconnect()


def test_the_first_leads_and_the_second_does_not(nimbus: Callable[[], Nimbus]) -> None:
    (cluster, a), (_, b) = nimbus(), nimbus()
    assert cluster.epoch() is None
    assert cluster.load_view().epoch == -1
    assert a.current() is None
    assert a.try_lead("n1:6627", "http://n1:7621") == 1
    assert b.try_lead("n2:6627", "http://n2:7621") is None
    assert (a.is_leader(), a.is_leader(1), a.is_leader(0), b.is_leader()) == (
        True,
        True,
        False,
        False,
    )
    assert (a.held_epoch, b.held_epoch) == (1, None)
    assert a.current() == b.current() == "n1:6627"
    found = cluster.epoch()
    assert found is not None
    assert (found[0], found[1].leader, found[1].http) == (1, "n1:6627", "http://n1:7621")
    assert cluster.load_view().epoch == 1
    # Asking again confirms, and raises no epoch.
    assert a.try_lead("n1:6627", "http://n1:7621") == 1


def test_resigning_lets_the_next_one_lead_in_a_higher_epoch(nimbus: Callable[[], Nimbus]) -> None:
    (cluster, a), (_, b) = nimbus(), nimbus()
    assert a.try_lead("n1:1", "http://n1") == 1
    woken = threading.Event()
    assert b.try_lead("n2:1", "http://n2", wake=woken.set) is None
    a.resign()
    a.resign()
    assert not a.is_leader()
    assert woken.wait(30)
    assert b.try_lead("n2:1", "http://n2") == 2
    b_sees_a = threading.Event()
    a.current(wake=b_sees_a.set)
    a.resign()
    assert b.is_leader(2), "resigning without leading takes nothing from others"
    with pytest.raises(Fenced):
        cluster.fenced(1).create("/topology/x-1-1").commit()


@pytest.mark.parametrize("number", range(1, 6))
def test_resigning_never_takes_the_leadership_of_the_next_one(
    nimbus: Callable[[], Nimbus], zk_expire: Expire, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session ends before any one of its requests, another leads, and the rest comes from a new
    session.
    """
    (cluster_a, a), (_, b) = nimbus(), nimbus()
    assert a.try_lead("n1:1", "http://n1") == 1
    left, call, former = number, cluster_a.session.call, cluster_a.session.session_id

    def interrupted(*given: Any, **more: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            zk_expire(cluster_a.session)
            eventually(
                lambda: b.try_lead("n2:1", "http://n2") == 2, timeout=60, what="the next leader"
            )
            renewed = lambda: cluster_a.session.connected and cluster_a.session.session_id != former  # noqa: E731
            eventually(renewed, timeout=60, what="a new session of the former leader")
        return call(*given, **more)

    monkeypatch.setattr(cluster_a.session, "call", interrupted)
    with contextlib.suppress(Unavailable):
        a.resign()
    assert left > 0 or (b.current() == "n2:1" and b.is_leader(2))


def test_no_write_of_a_deposed_leader_lands_after_its_session_was_killed(
    nimbus: Callable[[], Nimbus], zk_expire: Expire
) -> None:
    (cluster_a, a), (cluster_b, b) = nimbus(), nimbus()
    epoch = a.try_lead("n1:1", "http://n1")
    assert epoch == 1
    accepted: list[int] = []
    refused: list[str] = []
    stop = threading.Event()

    def write_on() -> None:
        # A deposed leader that has not noticed: it goes on writing in its epoch, come what may.
        number = 0
        while not stop.is_set():
            number += 1
            try:
                cluster_a.fenced(epoch).create(f"/topology/t-{number}-1").commit()
                accepted.append(number)
            except (Fenced, Unavailable) as error:
                refused.append(type(error).__name__)

    thread = threading.Thread(target=write_on, daemon=True)
    thread.start()
    eventually(lambda: len(accepted) > 5, what="writes of the leader")
    zk_expire(cluster_a.session)
    assert eventually(lambda: b.try_lead("n2:1", "http://n2"), what="the second leader") == 2
    at_takeover = set(cluster_b.active_storms())
    assert not a.is_leader()
    eventually(lambda: refused.count("Fenced") > 5, what="fenced writes")
    stop.set()
    thread.join(30)
    assert set(cluster_b.active_storms()) == at_takeover
    assert a.try_lead("n1:1", "http://n1") is None
    assert b.is_leader(2)


def test_a_suspended_leader_stops_at_once_and_finds_its_epoch_again(
    nimbus: Callable[[], Nimbus],
) -> None:
    cluster, leadership = nimbus()
    assert leadership.try_lead("n1:1", "http://n1") == 1
    seen: list[bool] = []
    cluster.session.add_listener(lambda state: seen.append(leadership.is_leader()))
    cluster.session.drop_link()
    eventually(lambda: len(seen) == 2, what="suspension and reconnection")
    # At SUSPENDED it is told before any later listener; CONNECTED alone does not restore it.
    assert seen == [False, False]
    assert not leadership.is_leader()
    assert leadership.try_lead("n1:1", "http://n1") == 1
    assert leadership.is_leader(1)


def test_an_expired_leader_leads_anew_only_in_a_new_epoch(
    nimbus: Callable[[], Nimbus], zk_expire: Expire
) -> None:
    cluster, leadership = nimbus()
    assert leadership.try_lead("n1:1", "http://n1") == 1
    held = cluster.session.session_id
    zk_expire(cluster.session)
    eventually(lambda: cluster.session.session_id not in (0, held), what="a new session")
    assert not leadership.is_leader()
    assert leadership.try_lead("n1:1", "http://n1") == 2
    with pytest.raises(Fenced):
        cluster.fenced(1).commit()


def test_many_candidates_one_leader_in_each_round(nimbus: Callable[[], Nimbus]) -> None:
    candidates = [nimbus() for _ in range(4)]
    last = 0
    for _ in range(5):
        won: list[tuple[int, int]] = []

        def race(number: int, won: list[tuple[int, int]] = won) -> None:
            epoch = candidates[number][1].try_lead(f"n{number}:1", f"http://n{number}")
            if epoch is not None:
                won.append((number, epoch))

        threads = [threading.Thread(target=race, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(won) == 1
        number, epoch = won[0]
        assert epoch == last + 1
        last = epoch
        assert [candidate[1].is_leader() for candidate in candidates].count(True) == 1
        candidates[number][1].resign()


def test_followers_are_listed_until_their_session_ends(
    nimbus: Callable[[], Nimbus], zk_expire: Expire
) -> None:
    (cluster_a, a), (_, b) = nimbus(), nimbus()
    woken = threading.Event()
    assert b.followers(wake=woken.set) == {}
    a.register_follower("n-1:6627", 12, {"nimbus.differ.count.zk": 2, "http": "http://n-1:7621"})
    assert woken.wait(30)
    assert b.followers() == {"n-1:6627": {"nimbus.differ.count.zk": 2, "http": "http://n-1:7621"}}
    assert cluster_a.state.get_data(f"{paths.NIMBUS_SLAVE}/n-1:6627") == b"12"
    a.register_follower("n-1:6627", 17, {"nimbus.differ.count.zk": 0})
    assert b.followers() == {"n-1:6627": {"nimbus.differ.count.zk": 0}}
    assert cluster_a.state.owned(f"{paths.NIMBUS_SLAVE}/n-1:6627")
    zk_expire(cluster_a.session)
    eventually(lambda: b.followers() == {}, what="the follower's end")
    b.unregister_follower("n-1:6627")


def test_the_epoch_node_is_never_taken_by_force(nimbus: Callable[[], Nimbus]) -> None:
    (cluster, a), (_, b) = nimbus(), nimbus()
    assert a.try_lead("n1:1", "http://n1") == 1
    with pytest.raises(Conflict):
        cluster.state.create_node(paths.NIMBUS_MASTER, b"n2:1")
    assert b.try_lead("n2:1", "http://n2") is None
    assert a.is_leader(1)


@pytest.mark.parametrize("seed", range(3))
def test_random_interruptions_never_make_two_writers(
    nimbus: Callable[[], Nimbus], zk_expire: Expire, seed: int
) -> None:
    chance = random.Random(seed)
    candidates = [nimbus() for _ in range(3)]
    witness = candidates[0][0]
    epochs: list[int] = []
    for turn in range(20):

        def one_leads(number_of_turn: int = turn) -> tuple[int, int] | None:
            for number, (_, leadership) in enumerate(candidates):
                try:
                    epoch = leadership.try_lead(f"n{number}:1", f"http://n{number}")
                except Unavailable:
                    continue
                if epoch is not None:
                    return number, epoch
            return None

        number, epoch = eventually(one_leads, what=f"a leader in turn {turn} of seed {seed}")
        assert not epochs or epoch >= epochs[-1]
        # Whoever believes to lead writes; only the newest epoch's writes land.
        landed = 0
        for cluster, leadership in candidates:
            held = leadership.held_epoch
            if held is None:
                continue
            try:
                cluster.fenced(held).commit()
                landed += 1
            except (Fenced, Unavailable):
                continue
        assert landed <= 1
        for old in {each for each in epochs if each < epoch}:
            with pytest.raises(Fenced):
                eventually(
                    lambda old=old: witness.fenced(old).commit() is None,
                    what="a refusal",
                    ignore=(Unavailable,),
                )
        epochs.append(epoch)
        cluster, leadership = candidates[number]
        chance.choice(
            [
                leadership.resign,
                cluster.session.drop_link,
                lambda cluster=cluster: zk_expire(cluster.session),
                lambda: None,
            ]
        )()
    assert epochs == sorted(epochs)
