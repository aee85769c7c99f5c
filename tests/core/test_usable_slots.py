"""Slots that a topology may use: isolation of its own and of others, blacklist, reserve and bounds
of users. Placement and healing read the same slots.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.liveness.causes import LivenessMemory
from storm_dagster.core.liveness.detection import observe
from storm_dagster.core.liveness.limits import LivenessLimits
from storm_dagster.core.reassignment import Runnable, monitor_batch, new_batch
from storm_dagster.core.scheduling.free_slots import slots_beyond
from storm_dagster.core.scheduling.obstacles import closed_hosts, isolation_warnings, slot_limits
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.core.usable_slots import UserBounds, hosts_closed_to, usable_slots
from storm_dagster.model.placement import TopologyPlacement
from storm_dagster.model.records import (
    Assignment,
    ComponentTasks,
    StormBase,
    SupervisorInfo,
    TaskTable,
    WorkerNode,
    WorkerSlot,
)
from storm_dagster.model.slot import Slot
from storm_dagster.model.topology import TopologySpec
from storm_dagster.model.view import ClusterView, TopologyView, Versioned

HOSTS = ("h1", "h2", "h3", "h4")
TASKS = 12
TABLE = TaskTable(components={"b": ComponentTasks(type="bolt", tasks=f"1-{TASKS}")})


def topology(
    name: str,
    slots: tuple[Slot, ...] = (),
    *,
    workers: int = TASKS,
    isolation: tuple[str, ...] = (),
    owner: str = "",
) -> TopologyView:
    """A topology whose workers all run, each with an equal share of its tasks."""
    topology_id = f"{name}-1-1"
    parts = [range(1 + number, TASKS + 1, len(slots)) for number in range(len(slots))]
    assigned = tuple(
        WorkerSlot.of_tasks(slot, f"h{slot.node[1:]}", list(part), memory_bytes=1, cpu=1)
        for slot, part in zip(slots, parts, strict=True)
    )
    live = {
        worker.slot: WorkerNode(
            pid=1, token="x", version=0, tasks=worker.tasks, started_ms=0, status="running"
        )
        for worker in assigned
    }
    return TopologyView(
        id=topology_id,
        base=StormBase(
            name=name,
            launch_time_secs=0,
            status="ACTIVE",
            workers=workers,
            executors={"b": TASKS},
            token="k",
            owner=owner,
            isolation=isolation,
        ),
        base_at=Versioned(1, 1),
        tasks=TABLE,
        assignment=Assignment(
            topology_id=topology_id,
            code_dir=topology_id,
            node_host={},
            workers=assigned,
            task_start_secs={},
            timestamp_ms=0,
        ),
        assignment_at=Versioned(0, 1),
        live_workers=live,
    )


def cluster(
    *topologies: TopologyView,
    hosts: tuple[str, ...] = HOSTS,
    ports: int = 2,
    blacklist: tuple[str, ...] = (),
) -> ClusterView:
    """Supervisor ``s1`` on host ``h1``, and so on."""
    supervisors = {
        f"s{host[1:]}": SupervisorInfo(
            host=host, ports=tuple(range(1, ports + 1)), started=0, count=1, version="t"
        )
        for host in hosts
    }
    by_id = {part.id: part for part in topologies}
    return ClusterView("c", 1, 1, supervisors, by_id, blacklist=frozenset(blacklist))


def nodes(view: ClusterView, name: str) -> set[str]:
    return {slot.node for slot in usable_slots(view, placing=[f"{name}-1-1"]).free}


def test_an_isolated_topology_may_use_its_hosts_and_others_may_not() -> None:
    view = cluster(topology("alone", isolation=("h1", "h2")), topology("other"))
    assert nodes(view, "alone") == {"s1", "s2"}
    assert nodes(view, "other") == {"s3", "s4"}
    # While none of its hosts is there, it is confined to none.
    lost = cluster(topology("alone", isolation=("h1",)), topology("other"), hosts=("h3", "h4"))
    assert nodes(lost, "alone") == nodes(lost, "other") == {"s3", "s4"}


def test_blacklisted_avoided_withheld_and_held_slots_are_not_free() -> None:
    holder = topology("holder", (Slot("s2", 1),))
    view = cluster(holder, topology("t"), blacklist=("h1",))
    usable = usable_slots(view, placing=["t-1-1"], avoid=["s4"], withheld=[Slot("s3", 2)])
    assert usable.free == (Slot("s2", 2), Slot("s3", 1))
    assert [supervisor.id for supervisor in usable.supervisors] == ["s2", "s3"]
    # Its own slots are its own, not free ones.
    assert Slot("s2", 1) not in usable_slots(view, placing=[holder.id]).free
    nowhere = cluster(topology("t"), blacklist=HOSTS)
    assert usable_slots(nowhere, placing=["t-1-1"]).supervisors == ()
    assert "every host is blacklisted" in closed_hosts(nowhere, ["t-1-1"], ())


def limits(view: ClusterView, name: str, reserve: int = 0, avoid: tuple[str, ...] = ()) -> str:
    topology_id = f"{name}-1-1"
    usable = usable_slots(view, placing=[topology_id], reserve=reserve, avoid=avoid)
    lacks_workers = bool(reserve)
    return slot_limits(view, view.topologies[topology_id], usable, lacks_workers=lacks_workers)


def test_each_limit_of_the_slots_is_named() -> None:
    alone = topology("alone", isolation=("h1", "h2"))
    view = cluster(alone, topology("other"))
    assert limits(view, "alone") == "isolation.scheduler.machines leaves 2 of 4 hosts"
    assert limits(view, "other") == "the isolation of other topologies leaves 2 of 4 hosts"
    black = cluster(alone, topology("other"), blacklist=("h2", "h3"))
    text = "isolation.scheduler.machines and the blacklist leave 1 of 4 hosts"
    assert limits(black, "alone") == text
    text = "the blacklist and the isolation of other topologies leave 1 of 4 hosts"
    assert limits(black, "other") == text
    # A blacklisted host that its isolation excludes anyway is not a limit.
    elsewhere = cluster(alone, blacklist=("h4",))
    assert limits(elsewhere, "alone") == "isolation.scheduler.machines leaves 2 of 4 hosts"
    everywhere = cluster(topology("t"))
    assert limits(everywhere, "t") == ""
    assert limits(everywhere, "t", reserve=3) == "jstorm.reserve.workers keeps 3 of 8 slots free"
    assert limits(everywhere, "t", avoid=("s4",)) == (
        "nimbus.rebalance.quiet.secs leaves 3 of 4 hosts"
    )


@pytest.mark.parametrize(("reserve", "count"), [(0, 8), (3, 5), (8, 0), (100, 0)])
def test_the_reserve_stays_free(reserve: int, count: int) -> None:
    view = cluster(topology("t"))
    assert usable_slots(view, placing=["t-1-1"], reserve=reserve).count == count


@given(free=st.integers(0, 100), reserve=st.integers(-3, 120))
def test_a_topology_takes_no_slot_of_the_reserve_and_none_that_is_not_free(
    free: int, reserve: int
) -> None:
    taken = slots_beyond(free, reserve)
    assert 0 <= taken <= free
    assert taken == 0 or free - taken >= reserve


def test_a_host_is_closed_by_the_blacklist_or_by_isolation_of_others_alone() -> None:
    """A host that no supervisor runs on is not listed."""
    first = topology("first", isolation=("h2", "h3", "h9"))
    second = topology("second", isolation=("h3", "h1"))
    view = cluster(first, second, topology("t"), blacklist=("h1", "h8"))
    closed = hosts_closed_to(view, ["t-1-1"])
    assert closed.blacklisted == {"h1"}
    assert closed.isolated == {"h2": (first,), "h3": (first, second)}
    assert [host for host in HOSTS if host in closed] == ["h1", "h2", "h3"]


@pytest.mark.parametrize(
    ("placing", "isolation", "closed"),
    [
        (["first-1-1"], (), {"h4"}),
        (["second-1-1"], (), {"h2"}),
        # A new topology that is to be isolated beside another one.
        (["new-1-1"], ("h3",), {"h2", "h4"}),
        # A topology, and the one that replaces it.
        (["first-1-1", "second-1-1"], (), set()),
        ([], (), {"h2", "h3", "h4"}),
    ],
)
def test_topologies_may_be_isolated_on_the_same_host(
    placing: list[str], isolation: tuple[str, ...], closed: set[str]
) -> None:
    view = cluster(
        topology("first", isolation=("h2", "h3")), topology("second", isolation=("h3", "h4"))
    )
    hosts = hosts_closed_to(view, placing, isolation)
    assert {host for host in HOSTS if host in hosts} == closed


@pytest.mark.parametrize(
    "bounds", [UserBounds(max_slots=5), UserBounds(max_bytes=5, worker_bytes=1)]
)
def test_a_user_gets_no_workers_beyond_its_bounds(bounds: UserBounds) -> None:
    mine = topology("mine", (Slot("s1", 1),), owner="ann")
    more = topology("more", (Slot("s1", 2), Slot("s2", 1)), owner="ann")
    free = topology("free", (Slot("s2", 2),))
    view = cluster(mine, more, free)
    assert usable_slots(view, placing=[mine.id], bounds=bounds).count == 2
    assert usable_slots(view, placing=[free.id], bounds=bounds).count == 4
    lowered = replace(bounds, max_slots=2, max_bytes=2)
    assert usable_slots(view, placing=[mine.id], bounds=lowered).count == 0


def test_healing_spreads_a_topology_up_to_the_bounds_of_its_user() -> None:
    mine = topology("mine", (Slot("s1", 1),), owner="ann")
    view = cluster(mine)
    conf = {"topology.scheduler.strategy": "even", "nimbus.user.slots.max": 3}
    runnable = Runnable(TopologySpec(name="mine"), conf)
    limits = LivenessLimits(users=UserBounds.from_conf(conf))
    causes = spread_causes(view, limits)
    assert [cause.name for cause in causes] == ["mine"]
    batch = monitor_batch(view, mine, runnable, TABLE, causes)
    placement = plan_placement(batch).placement("mine")
    assert (placement.status, len(placement.workers)) == ("assigned", 3)
    none_left = LivenessLimits(users=UserBounds(max_slots=1))
    assert not spread_causes(view, none_left)


def spread_causes(view: ClusterView, limits: LivenessLimits | None = None):
    """Causes of a healer that has seen the same cluster for a while."""
    memory = LivenessMemory()
    causes = ()
    for now in (0.0, 1.0):
        result = observe(view, memory, limits or LivenessLimits(), boot_id="b", boot_now=now)
        memory = result.memory
        causes = result.causes
    return [cause for cause in causes if cause.kind == "too_few_workers"]


def test_an_isolated_topology_gets_the_slots_of_its_hosts_back() -> None:
    """Its host was lost, and has come back."""
    squeezed = topology("t", (Slot("s1", 1),), isolation=("h1", "h2"))
    other = topology("other", (Slot("s3", 1),), workers=1)
    assert [cause.name for cause in spread_causes(cluster(squeezed, other))] == ["t"]


def test_free_slots_of_hosts_that_are_closed_to_it_are_no_cause() -> None:
    """Neither those of its neighbor's isolation, nor those outside of its own."""
    own_host_full = topology("t", (Slot("s1", 1), Slot("s1", 2)), isolation=("h1",))
    assert not spread_causes(cluster(own_host_full))
    other_full = topology("other", (Slot("s2", 1), Slot("s2", 2)))
    alone = topology("alone", (Slot("s1", 1),), workers=1, isolation=("h1",))
    assert not spread_causes(cluster(alone, other_full, hosts=("h1", "h2")))


_SLOTS = st.sets(st.sampled_from([Slot(f"s{n}", p) for n in range(1, 5) for p in (1, 2)]))
_SOME_HOSTS = st.lists(st.sampled_from([*HOSTS, "h9"]), max_size=3).map(tuple)


@given(
    held=_SLOTS,
    isolation=_SOME_HOSTS,
    isolation_of_other=_SOME_HOSTS,
    blacklist=_SOME_HOSTS,
    reserve=st.integers(0, 9),
)
def test_a_placement_takes_all_usable_slots_and_no_other(
    held: set[Slot],
    isolation: tuple[str, ...],
    isolation_of_other: tuple[str, ...],
    blacklist: tuple[str, ...],
    reserve: int,
) -> None:
    other = topology("other", tuple(sorted(held)), isolation=isolation_of_other)
    view = cluster(other, blacklist=blacklist)
    usable = usable_slots(view, placing=["t-1-1"], isolation=isolation, reserve=reserve)
    placement = place_anew(view, isolation, reserve)
    taken = {worker.slot for worker in placement.workers}
    assert taken <= set(usable.free)
    assert len(taken) == usable.count
    assert (placement.status == "failed") == (usable.count == 0)


def place_anew(view: ClusterView, isolation: tuple[str, ...], reserve: int) -> TopologyPlacement:
    """A new topology that asks for more workers than there are slots."""
    conf = {
        "topology.scheduler.strategy": "even",
        "isolation.scheduler.machines": list(isolation),
        "jstorm.reserve.workers": reserve,
    }
    batch = new_batch(
        view,
        name="t",
        topology_id="t-1-1",
        runnable=Runnable(TopologySpec(name="t"), conf),
        table=TABLE,
        executors={"b": TASKS},
        workers=TASKS,
        backup=None,
    )
    return plan_placement(batch).placement("t")


def test_a_reserve_above_the_cluster_is_refused_with_the_key() -> None:
    placement = place_anew(cluster(), (), 100)
    assert placement.status == "failed"
    assert placement.error is not None
    assert "topology 't' needs 1 slot, 8 are free" in placement.error
    assert "lower jstorm.reserve.workers" in placement.error


def test_unknown_and_repeated_isolation_hosts_are_named() -> None:
    view = cluster()
    assert isolation_warnings(view, "t", ("h1", "h2")) == ()
    (repeated,) = isolation_warnings(view, "t", ("h1", "h1"))
    assert "topology 't': isolation.scheduler.machines lists h1 more than once" in repeated
    (some,) = isolation_warnings(view, "t", ("h1", "h8", "h9"))
    assert "no supervisor is registered on h8, h9 of its isolation.scheduler.machines" in some
    assert "any host" not in some
    (all_unknown,) = isolation_warnings(view, "t", ("h9",))
    assert "so the topology is placed on any host" in all_unknown
