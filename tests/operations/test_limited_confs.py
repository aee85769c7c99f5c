"""Submissions, updates, gray upgrades and rebalances of users who are no administrators: their
topologies take nothing that belongs to all.
"""

from __future__ import annotations

from typing import Any

import pytest

from storm_dagster.core.upgrade.selection import Selection
from storm_dagster.model.errors import InvalidRequest, InvalidTopology, NotAuthorized, Unavailable
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.operations.submit.staging import upload_key
from storm_rigs.operations.acting import submit
from storm_rigs.stage.records import WORD_COUNT, World

pytestmark = pytest.mark.zookeeper


def upload(world: World, handle: str, user: str, conf: Any, source: str = "http") -> str:
    """An upload of a limited user; the handle."""
    world.upload(handle, conf=conf)
    world.blobs.put(upload_key(handle, "submitter"), user.encode())
    world.blobs.put(upload_key(handle, "source"), source.encode())
    return handle


def submit_as(world: World, name: str, user: str, conf: Any, source: str = "http") -> None:
    handle = upload(world, f"h-{name}", user, conf, source)
    submit(world.context(), name=name, token=f"t-{name}", handle=handle)


TAKEN: list[dict[str, Any]] = [
    {"isolation.scheduler.machines": ["s1", "s2"]},
    {"worker.memory.size": 2**60},
    {"topology.priority": 0},
    {"jstorm.reserve.workers": 5},
]


@pytest.mark.parametrize("conf", TAKEN)
@pytest.mark.parametrize("source", ["http", "thrift"])
def test_every_entrance_refuses_what_belongs_to_all(
    world: World, conf: dict[str, Any], source: str
) -> None:
    (key,) = conf
    with pytest.raises(NotAuthorized, match=f"'ann' must not set {key} "):
        submit_as(world, "evil", "ann", conf, source)
    # A gray upgrade needs a topology master that is alone in its worker.
    fair = {"topology.workers": 2, "topology.master.single.worker": True}
    submit_as(world, "fair", "ann", fair, source)
    before = world.named("fair")
    handle = upload(world, "h-new", "ann", {**fair, **conf}, source)
    with pytest.raises(NotAuthorized, match=f"must not set {key} "):
        lifecycle.update(world.context(), "fair", token="u", handle=handle)
    with pytest.raises(NotAuthorized, match=f"must not set {key} "):
        lifecycle.gray_upgrade(
            world.context(), "fair", Selection(number=1), handle=handle, token="g"
        )
    assert world.named("fair") == before


def test_a_conf_of_a_whole_storm_client_is_accepted(world: World) -> None:
    conf = {
        "nimbus.seeds": ["elsewhere"],
        "storm.local.dir": "/somewhere",
        "nimbus.task.timeout.secs": 1,
        "topology.max.task.parallelism": None,
        "topology.priority": 29,
        "topology.workers": 2,
    }
    submit_as(world, "wc", "ann", conf, "thrift")
    assert world.named("wc").base.owner == "ann"
    with pytest.raises(NotAuthorized, match=r"storm\.local\.dir|nimbus\."):
        submit_as(world, "other", "ann", conf)


def test_an_update_keeps_what_an_administrator_set(world: World) -> None:
    topology_id = world.submit(
        "wc",
        conf={"isolation.scheduler.machines": ["s1"], "topology.users": ["ann"]},
    )
    handle = upload(world, "h", "ann", {"isolation.scheduler.machines": ["s1"]})
    lifecycle.update(world.context(), "wc", token="u", handle=handle)
    assert world.named("wc").id != topology_id
    assert world.named("wc").base.isolation == ("s1",)


def test_a_quota_bounds_submissions_and_rebalances(world: World) -> None:
    world.conf["nimbus.user.slots.max"] = 3
    submit_as(world, "a", "ann", {"topology.workers": 2})
    with pytest.raises(
        InvalidRequest, match=r"'ann' would hold 4 slots .*nimbus\.user\.slots\.max"
    ):
        submit_as(world, "b", "ann", {"topology.workers": 2})
    submit_as(world, "c", "carol", {"topology.workers": 3})
    with pytest.raises(InvalidRequest, match=r"nimbus\.user\.slots\.max allows 3"):
        rebalance(world.context(), "a", workers=4, wait_secs=0)
    assert rebalance(world.context(), "a", workers=3, wait_secs=0).workers == 3


def test_a_rebalance_makes_no_more_tasks_than_a_submission_may(world: World) -> None:
    world.submit("wc")
    world.conf["nimbus.tasks.perTopology"] = 10
    with pytest.raises(InvalidTopology, match=r"nimbus\.tasks\.perTopology allows 10"):
        rebalance(world.context(), "wc", executors={"split": 9}, wait_secs=0)
    rebalance(world.context(), "wc", executors={"split": 3}, wait_secs=0)


@pytest.mark.parametrize(
    ("key", "too_many", "fitting"),
    [
        ("slots", {"workers": 4}, {"workers": 3}),
        ("executors", {"executors": {"split": 9}}, {"executors": {"split": 1}}),
    ],
)
def test_a_rebalance_keeps_the_limits_of_a_topology(
    world: World, key: str, too_many: dict[str, Any], fitting: dict[str, Any]
) -> None:
    world.submit("wc", conf={"topology.workers": 2})
    before = world.named()
    world.conf[f"nimbus.{key}.perTopology"] = 3
    with pytest.raises(InvalidTopology, match=rf"nimbus\.{key}\.perTopology allows 3"):
        rebalance(world.context(), "wc", wait_secs=0, **too_many)
    assert world.named() == before
    rebalance(world.context(), "wc", wait_secs=0, **fitting)
    # What was there before the limit may stay, and become less.
    world.conf[f"nimbus.{key}.perTopology"] = 1
    assert rebalance(world.context(), "wc", workers=2, wait_secs=0).workers == 2


def test_a_refusal_names_the_topology_that_isolates_or_holds(world: World) -> None:
    world.submit(
        "evil",
        conf={
            "isolation.scheduler.machines": ["s1", "s2"],
            "topology.submitter.user": "ann",
        },
    )
    expected = r"every host is isolated by topology 'evil' of user 'ann' \(s1, s2\)"
    with pytest.raises(Unavailable, match=expected):
        world.submit("carols", topology=WORD_COUNT)
    lifecycle.kill(world.context(), "evil", wait_secs=0)
    world.submit("big", conf={"topology.workers": 6})
    with pytest.raises(Unavailable, match="topology 'big' holds 6"):
        world.submit("more", conf={"topology.workers": 6})
