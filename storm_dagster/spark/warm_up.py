"""Warm-up of a new Spark server with its first jobs, so that no submission waits for them."""

import math
import time
import uuid
from collections.abc import Callable

from storm_dagster.model.placement import PlacementBatch, SupervisorSlots, TopologyToPlace
from storm_dagster.model.records import SupervisorInfo, WorkerSlot
from storm_dagster.spark.planner import ConnectPlanner, FixedSessionIds

_NEW = TopologyToPlace(
    name="a",
    tasks={1: "split", 2: "split", 3: "__acker", 4: "__topology_master", 5: "lines"},
    inputs={"split": ("lines",)},
    parallelism={"split": 2, "__acker": 1, "lines": 1},
)
_OLD = WorkerSlot(node="warm", host="warm", port=1, tasks="1-5")
_INFO = SupervisorInfo(host="warm", ports=(1, 2, 3, 4), started=0, count=0, version="")
WARM_BATCH = PlacementBatch(
    supervisors=(SupervisorSlots(id="warm", info=_INFO),),
    topologies=(
        _NEW,
        _NEW.model_copy(update={"name": "b", "event": "rebalance", "workers": 2, "old": (_OLD,)}),
    ),
)
"""One topology of each kind of computation: new, and with a past."""


_DEADLINE_SECS = 180.0
_MOST_ROUNDS = 12
_LONGEST_SECS = 8.0
_FASTER = 0.85
"""A round that takes less than this part of the best one before means that the server is still
compiling.
"""
_IDLE_ROUNDS = 2


def warm_planner(
    planner: Callable[[PlacementBatch], object], placed: Callable[[], None] = lambda: None
) -> None:
    """Run the assignment through every stage; with the cluster's planner its pinned session becomes
    warm.

    ``placed`` is called after the first one, by far the slowest. A submission takes the plain way,
    and healing the way of what has a past: both are repeated until the plain one gets no faster,
    twelve times and eight seconds at most.
    """
    plain = PlacementBatch(supervisors=WARM_BATCH.supervisors, topologies=WARM_BATCH.topologies[:1])
    for batch in (plain, plain, WARM_BATCH):
        planner(batch)
        placed()
    best, idle = math.inf, 0
    until = time.monotonic() + _LONGEST_SECS
    for _ in range(_MOST_ROUNDS):
        began = time.monotonic()
        if began >= until or idle >= _IDLE_ROUNDS:
            return
        planner(plain)
        taken = time.monotonic() - began
        idle = 0 if taken < best * _FASTER else idle + 1
        best = min(best, taken)
        planner(WARM_BATCH)


def warm_up(remote: str) -> None:
    """Run the first jobs on the server at the URL: its JVM has compiled what placements use
    afterwards.

    A URL that names a session warms that session's Python workers too. Raises :class:`Unavailable`.
    """
    planner = ConnectPlanner(
        remote, FixedSessionIds(str(uuid.uuid4())), deadline_secs=_DEADLINE_SECS
    )
    try:
        warm_planner(planner)
    finally:
        planner.close(release=";session_id=" not in remote)
