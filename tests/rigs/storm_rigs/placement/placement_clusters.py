"""Clusters and topologies for placement tests: small ones written by hand, and generated ones."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from storm_dagster.model.names import ACKER, TOPOLOGY_MASTER
from storm_dagster.model.placement import (
    PlacementBatch,
    SupervisorSlots,
    TopologyToPlace,
    UserWorker,
)
from storm_dagster.model.ranges import encode_ranges
from storm_dagster.model.records import SupervisorInfo, WorkerSlot


def supervisor(
    number: int, ports: Sequence[int], used: Sequence[int] = (), **more: Any
) -> SupervisorSlots:
    """Supervisor ``s<number>`` on host ``h<number>``; ``more`` are fields of its record."""
    fields = {"host": f"h{number}", "ports": tuple(ports), **more}
    info = SupervisorInfo(**fields, started=0, count=0, version="")
    return SupervisorSlots(id=f"s{number}", info=info, used=tuple(used))


def placed_worker(node: str, host: str, port: int, tasks: Iterable[int], **more: Any) -> WorkerSlot:
    """A worker of an assignment with these tasks."""
    return WorkerSlot(node=node, host=host, port=port, tasks=encode_ranges(tasks), **more)


def small_topology(
    name: str = "wc",
    *,
    bolts: Mapping[str, tuple[int, Sequence[str]]],
    spouts: Mapping[str, int],
    ackers: int = 1,
    **more: Any,
) -> TopologyToPlace:
    """A topology of one-task executors, numbered as at a submission: ``bolts`` maps id to (tasks,
    inputs).
    """
    counts = {
        **{bolt: count for bolt, (count, _) in bolts.items()},
        ACKER: ackers,
        TOPOLOGY_MASTER: 1,
        **spouts,
    }
    tasks: dict[int, str] = {}
    for component, count in counts.items():
        for _ in range(count):
            tasks[len(tasks) + 1] = component
    values: dict[str, Any] = {
        "name": name,
        "tasks": tasks,
        "inputs": {bolt: tuple(inputs) for bolt, (_, inputs) in bolts.items()},
        "parallelism": {
            component: count for component, count in counts.items() if component != TOPOLOGY_MASTER
        },
        **more,
    }
    return TopologyToPlace(**values)


def generated_batch(rng: random.Random) -> PlacementBatch:
    """A cluster with up to four topologies in any kind of event, drawn from ``rng``; often short of
    slots.
    """
    supervisors = _supervisors(rng)
    free = [
        (node.id, node.info.host, port)
        for node in supervisors
        for port in node.info.ports
        if port not in node.used
    ]
    rng.shuffle(free)
    topologies = [
        _topology(rng, f"t{number}", supervisors, free) for number in range(rng.randint(1, 4))
    ]
    rng.shuffle(topologies)
    return PlacementBatch(supervisors=supervisors, topologies=tuple(topologies))


def _supervisors(rng: random.Random) -> tuple[SupervisorSlots, ...]:
    several_on_a_host = rng.random() < 0.2
    result: list[SupervisorSlots] = []
    for number in range(rng.randint(0 if rng.random() < 0.05 else 1, 6)):
        ports = list(range(6900, 6900 + rng.randint(0 if rng.random() < 0.1 else 2, 8)))
        used = [port for port in ports if rng.random() < 0.15]
        rng.shuffle(ports)
        host = f"h{number // 2 if several_on_a_host else number}"
        result.append(supervisor(number, ports, used, host=host))
    rng.shuffle(result)
    return tuple(result)


def _topology(
    rng: random.Random,
    name: str,
    supervisors: Sequence[SupervisorSlots],
    free: list[tuple[str, str, int]],
) -> TopologyToPlace:
    bolts: dict[str, tuple[int, list[str]]] = {}
    spouts = {f"spout{number}": rng.randint(1, 3) for number in range(rng.randint(1, 2))}
    for number in range(rng.randint(0, 4)):
        known = [*spouts, *bolts]
        bolts[f"bolt{number}"] = (
            rng.randint(1, 6),
            rng.sample(known, rng.randint(1, min(2, len(known)))),
        )
    base = small_topology(
        name,
        bolts=bolts,
        spouts=spouts,
        ackers=rng.choice((0, 1, 1, 2, 3)),
        priority=rng.choice((29, 29, 1, 50)),
        workers=rng.choice((1, 2, 2, 3, 3, 3, 4, 5, 10, 12)),
        strategy=rng.choice(("balanced",) * 5 + ("even",) * 2 + ("local",) * (rng.random() < 0.1)),
        single_master=rng.choice((None, None, None, True, False)),
        reserve=rng.choice((0, 0, 0, 0, 1)),
        master_memory_bytes=rng.choice((None, None, 5)),
        event=rng.choice(("new", "new", "monitor", "rebalance")),
        reassign=rng.random() < 0.3,
        use_old=rng.random() < 0.4,
        isolation=tuple(node.info.host for node in supervisors if rng.random() < 0.3)
        if rng.random() < 0.2
        else (),
        differ_node=tuple(rng.sample([*bolts, *spouts], 1)) if rng.random() < 0.3 else (),
    )
    changes: dict[str, Any] = {}
    if rng.random() < 0.3:
        changes["executors"] = _executors(rng, base)
        owners = [base.tasks[group[0]] for group in changes["executors"]]
        changes["parallelism"] = {
            component: owners.count(component) for component in base.parallelism
        }
    if rng.random() < 0.25:
        changes["user_workers"] = _user_workers(rng, base, supervisors)
    if base.strategy == "even" and rng.random() < 0.8:
        # Most of the time without requests that a new topology of this strategy may not make.
        changes.update(differ_node=(), user_workers=(), single_master=None)
    base = base.model_copy(update=changes)
    if base.event != "new" or rng.random() < 0.5:
        base = base.model_copy(update=_past(rng, base, free))
    return base


def _executors(rng: random.Random, topology: TopologyToPlace) -> tuple[tuple[int, ...], ...]:
    groups: list[tuple[int, ...]] = []
    for component in dict.fromkeys(topology.tasks.values()):
        ids = [task for task, owner in topology.tasks.items() if owner == component]
        while ids:
            size = rng.randint(1, min(3, len(ids)))
            groups.append(tuple(ids[:size]))
            ids = ids[size:]
    return tuple(groups)


def _user_workers(
    rng: random.Random, topology: TopologyToPlace, supervisors: Sequence[SupervisorSlots]
) -> tuple[UserWorker, ...]:
    components = list(dict.fromkeys(topology.tasks.values()))
    hosts = [node.info.host for node in supervisors] + ["nowhere"]
    return tuple(
        UserWorker(
            host=rng.choice((None, rng.choice(hosts))),
            port=rng.choice((None, 6900, 6901, 7000)),
            memory_bytes=rng.choice((None, 7)),
            cpu=rng.choice((None, 3)),
            components={
                rng.choice(components): rng.randint(1, 3) for _ in range(rng.randint(1, 2))
            },
        )
        for _ in range(rng.randint(1, 3))
    )


def _past(
    rng: random.Random, topology: TopologyToPlace, free: list[tuple[str, str, int]]
) -> dict[str, Any]:
    """A current assignment over free slots, or over a lost supervisor, and what happened to it."""
    slots = [
        free.pop()
        if free and rng.random() < 0.85
        else (f"lost-{topology.name}", "gone", 6900 + rng.randint(0, 99))
        for _ in range(rng.randint(1, 5))
    ]
    slots = list(dict.fromkeys(slots))
    held: dict[tuple[str, str, int], list[int]] = {slot: [] for slot in slots}
    groups = topology.executors or tuple((task,) for task in topology.tasks)
    for group in groups:
        if rng.random() < 0.95:
            held[rng.choice(slots)].extend(group)
    if rng.random() < 0.2:
        held[slots[0]].append(len(topology.tasks) + 5)
    old = tuple(
        placed_worker(node, host, port, tasks, memory_bytes=rng.choice((0, 9)))
        for (node, host, port), tasks in held.items()
        if tasks
    )
    dead = [
        task for worker in old if rng.random() < 0.4 for task in worker.ids[: rng.randint(1, 3)]
    ]
    unstopped = [
        task
        for worker in old
        if worker.host == "gone" and rng.random() < 0.6
        for task in worker.ids
    ]
    return {"old": old, "dead": tuple(dead), "unstopped": tuple(unstopped)}
