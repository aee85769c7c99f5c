"""What a limited user may set and hold, and what a refusal says about the topologies in the way."""

from __future__ import annotations

from typing import Any

import pytest

from storm_dagster.core.scheduling.obstacles import closed_hosts, held_slots
from storm_dagster.core.submission.quotas import check_quotas
from storm_dagster.core.submission.setters import check_setters
from storm_dagster.model.conf import CONF_KEYS, default_conf
from storm_dagster.model.errors import InvalidRequest, NotAuthorized
from storm_dagster.model.records import Assignment, StormBase, SupervisorInfo, WorkerSlot
from storm_dagster.model.topology import TopologySpec
from storm_dagster.model.view import ClusterView, TopologyView, Versioned

AT = Versioned(0, 0)


def spec(conf: Any = None, component_conf: Any = None) -> TopologySpec:
    spout = {"object": {"python": "m:S"}, "conf": component_conf or {}}
    return TopologySpec.model_validate({"name": "t", "spouts": {"s": spout}, "conf": conf or {}})


def checked(conf: dict[str, Any], current: dict[str, Any] | None = None, **options: Any) -> Any:
    topology = options.pop("topology", spec())
    options = {"ignores_cluster_keys": False, **options}
    return check_setters("ann", conf, topology, {**default_conf(), **(current or {})}, **options)


VALUES: dict[str, Any] = {
    "isolation.scheduler.machines": ["h1"],
    "worker.memory.size": 2**60,
    "topology.master.worker.memory.size": 2**60,
    "topology.priority": 0,
    "jstorm.reserve.workers": 3,
    "nimbus.slots.perTopology": 99,
    "nimbus.user.slots.max": 99,
    "supervisor.worker.memory.enforce": True,
}


@pytest.mark.parametrize("key", VALUES)
def test_a_limited_user_sets_no_key_of_the_cluster(key: str) -> None:
    with pytest.raises(NotAuthorized, match=f"must not set {key} "):
        checked({key: VALUES[key]})
    with pytest.raises(NotAuthorized, match=f"must not set {key} "):
        checked({}, topology=spec({key: VALUES[key]}))


def test_every_key_of_administrators_is_refused_in_a_component() -> None:
    for key, conf_key in CONF_KEYS.items():
        if conf_key.setter == "administrator" and key in VALUES:
            with pytest.raises(NotAuthorized, match=f"{key} .conf of spout 's'"):
                checked({}, topology=spec(component_conf={key: VALUES[key]}))


@pytest.mark.parametrize(("value", "is_refused"), [(3, False), (5, False), (6, True), (None, True)])
def test_a_component_may_lower_the_clusters_maximum(value: Any, is_refused: bool) -> None:
    topology = spec(component_conf={"topology.max.task.parallelism": value})
    current = {"topology.max.task.parallelism": 5}
    if is_refused:
        with pytest.raises(NotAuthorized, match=r"topology\.max\.task\.parallelism"):
            checked({}, current, topology=topology)
    else:
        checked({}, current, topology=topology)


def test_current_values_and_keys_of_users_are_accepted() -> None:
    conf = {
        "topology.workers": 3,
        "topology.priority": 29,
        "own.key": {"a": 1},
        "isolation.scheduler.machines": ["h1"],
    }
    counted, _, warnings = checked(conf, {"isolation.scheduler.machines": ["h1"]})
    assert counted == conf
    assert warnings == []


def test_null_under_a_key_of_the_cluster_keeps_its_value() -> None:
    counted, topology, _ = checked(
        {"topology.max.task.parallelism": None},
        {"topology.max.task.parallelism": 5},
        topology=spec({"topology.max.task.parallelism": None}),
    )
    assert counted == {}
    assert topology.conf == {}


def test_keys_of_the_cluster_that_a_storm_client_repeats_are_left_out() -> None:
    conf = {"nimbus.seeds": ["other"], "storm.local.dir": "/x", "topology.workers": 2}
    counted, _, (warning,) = checked(conf, ignores_cluster_keys=True)
    assert counted == {"topology.workers": 2}
    assert "nimbus.seeds, storm.local.dir" in warning
    with pytest.raises(NotAuthorized, match=r"topology\.priority"):
        checked({"topology.priority": 1}, ignores_cluster_keys=True)


def test_a_requested_worker_has_the_memory_of_all() -> None:
    workers = [{"host": "h1", "memory_bytes": 2**40}]
    with pytest.raises(NotAuthorized, match=r"worker\.memory\.size"):
        checked({"use.userdefine.assignment": workers})
    checked({"use.userdefine.assignment": [{"host": "h1", "memory_bytes": 2**20}]})


def topology(name: str, owner: str, workers: int, isolation: tuple[str, ...] = ()) -> TopologyView:
    base = StormBase(
        name=name,
        launch_time_secs=1,
        status="ACTIVE",
        workers=workers,
        executors={},
        token="t",
        owner=owner,
        isolation=isolation,
    )
    slots = tuple(
        WorkerSlot(node="n", host="h", port=1 + port, tasks="", memory_bytes=10)
        for port in range(workers)
    )
    assignment = Assignment(
        topology_id=f"{name}-1-1",
        code_dir=f"{name}-1-1",
        node_host={},
        workers=slots,
        task_start_secs={},
        timestamp_ms=1,
    )
    return TopologyView(f"{name}-1-1", base, AT, assignment=assignment, assignment_at=AT)


def view_of(*topologies: TopologyView, blacklist: tuple[str, ...] = ()) -> ClusterView:
    info = {
        host: SupervisorInfo(host=host, ports=(1,), started=0, count=1, version="t")
        for host in ("h1", "h2")
    }
    return ClusterView(
        cluster_id="c",
        epoch=1,
        assignments_version=0,
        supervisors=info,
        topologies={part.id: part for part in topologies},
        blacklist=frozenset(blacklist),
    )


@pytest.mark.parametrize(("key", "limit"), [("slots", 5), ("memory", 50)])
def test_a_user_holds_no_more_than_its_quota(key: str, limit: int) -> None:
    conf = {**default_conf(), f"nimbus.user.{key}.max": limit}
    mine = topology("mine", "ann", 3)
    view = view_of(mine, topology("other", "bob", 9), topology("free", "", 9))
    new = topology("new", "ann", 2).workers
    check_quotas(conf, view, "ann", new, ["new-1-1"])
    check_quotas(conf, view, "bob", topology("other", "bob", 8).workers, ["other-1-1"])
    check_quotas(conf, view, "", topology("free", "", 20).workers, [])
    with pytest.raises(InvalidRequest, match=f"nimbus.user.{key}.max allows {limit}"):
        check_quotas(conf, view, "ann", topology("new", "ann", 3).workers, ["new-1-1"])
    # A rebalance replaces the topology's own workers.
    check_quotas(conf, view, "ann", topology("mine", "ann", 5).workers, [mine.id])
    check_quotas(default_conf(), view, "ann", topology("new", "ann", 99).workers, [])


def test_a_refusal_names_who_isolates_the_hosts() -> None:
    evil = topology("evil", "ann", 1, ("h1", "h2", "h9"))
    text = closed_hosts(view_of(evil), ["bobs-1-1"], ())
    assert "every host is isolated by topology 'evil' of user 'ann' (h1, h2)" in text
    assert closed_hosts(view_of(evil), [evil.id], ()) == ""
    part = closed_hosts(view_of(topology("e", "", 1, ("h1",)), blacklist=("h2",)), [], ())
    assert "h1 is isolated by topology 'e': " in part
    assert "h2 is blacklisted" in part
    assert "every host is blacklisted (h1, h2)" in closed_hosts(
        view_of(blacklist=("h1", "h2")), [], ()
    )


def test_a_refusal_names_who_holds_the_slots() -> None:
    view = view_of(topology("a", "ann", 3), topology("b", "", 5))
    expected = "of the slots in use topology 'b' holds 5, topology 'a' of user 'ann' holds 3"
    assert held_slots(view, []) == expected
    assert held_slots(view, ["a-1-1", "b-1-1"]) == ""
