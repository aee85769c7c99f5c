"""Warm-up of a new Spark server with its first jobs.

So no submission waits for them.
"""

import math
import time
import uuid
from collections.abc import Callable

from storm_dagster.model.placement import PlacementBatch, SupervisorSlots, TopologyToPlace
from storm_dagster.model.records import SupervisorInfo, WorkerSlot
from storm_dagster.security.server_identity import TrustedServers
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
"""One topology of each kind of computation: new, and with a history."""


_DEADLINE_SECS = 180.0
"""Time for each placement of a server that has just started."""
_MAX_ROUNDS = 12
"""Maximum number of rounds after the first three placements."""
_MAX_SECS = 8.0
"""Time after which no further round begins."""
_FASTER = 0.85
"""Ratio of a round's time to the former best one.

Below it the server is still compiling.
"""
_IDLE_ROUNDS = 2
"""Rounds in a row without such a gain after which the server is warm."""


def warm_planner(
    planner: Callable[[PlacementBatch], object], on_placed: Callable[[], None] = lambda: None
) -> None:
    """Run the assignment through every stage, to warm the planner's session.

    With the cluster's planner that is the pinned session. ``on_placed`` is called after each of the
    first three placements, of which the first is by far the slowest. A submission uses the plan
    without a history, healing the one with a history: both are repeated until the former gets no
    faster, at most twelve times and eight seconds.
    """
    new_batch = PlacementBatch(
        supervisors=WARM_BATCH.supervisors, topologies=WARM_BATCH.topologies[:1]
    )
    for batch in (new_batch, new_batch, WARM_BATCH):
        planner(batch)
        on_placed()
    best_secs = math.inf
    idle_rounds = 0
    deadline = time.monotonic() + _MAX_SECS
    for _ in range(_MAX_ROUNDS):
        began = time.monotonic()
        if began >= deadline or idle_rounds >= _IDLE_ROUNDS:
            return
        planner(new_batch)
        round_secs = time.monotonic() - began
        if round_secs < best_secs * _FASTER:
            idle_rounds = 0
        else:
            idle_rounds += 1
        best_secs = min(best_secs, round_secs)
        planner(WARM_BATCH)


def warm_up(remote: str, trusted: TrustedServers | None = None) -> None:
    """Run the first jobs on the server at the URL, if it is ``trusted``.

    Then its JVM has compiled the plans of placements. A URL that names a session also warms that
    session's Python workers. Raises :class:`Unavailable`.
    """
    planner = ConnectPlanner(
        remote,
        FixedSessionIds(str(uuid.uuid4())),
        deadline_secs=_DEADLINE_SECS,
        trusted=trusted or TrustedServers(),
    )
    try:
        warm_planner(planner)
    finally:
        planner.close(release=";session_id=" not in remote)
