"""Faults of healing: pauses by operators, and sensors that are slow or switched off.

It registers them in :data:`storm_simulation.faults.KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from storm_dagster.model.errors import StormDagsterError
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.healing_pause import pause_healing, resume_healing
from storm_simulation.dagster_side import operations
from storm_simulation.faults import GROUPS, KINDS, Faults, Undo, fault
from storm_simulation.kernel import Process

if TYPE_CHECKING:
    from storm_simulation.cluster import Cluster

__all__ = ["GROUPS", "KINDS"]

SLOW_SECS = 30.0
"""Time between two ticks of a slow sensor."""
MAX_PAUSE_SECS = 90
PAUSE = "pause-healing"
RESUME = "resume-healing"
_TRIES = 10
_RETRY_SECS = 3.0
Healer = Literal["sensor", "slow sensor", "no sensor", "no daemon"]
"""State of the sensors: as usual, 30 s apart, switched off, without Dagster's daemon."""


def operate(cluster: Cluster, name: str, call: Callable[[OperationsContext], object]) -> Process:
    """The process of an operator who repeats a call until it succeeds, at most ten times.

    It runs beside the leader, whose clock counts.
    """

    def work() -> None:
        for _ in range(_TRIES):
            try:
                with operations(cluster) as ctx:
                    call(ctx)
                    return
            except StormDagsterError:
                cluster.kernel.sleep(_RETRY_SECS)

    leader = cluster.leader()
    return cluster.job(name, work, None if leader is None else leader.host)


def switch_healer(cluster: Cluster, healer: Healer) -> None:
    """Bring Dagster into that state."""
    dagster = cluster.dagster
    slow = healer == "slow sensor"
    dagster.interval_secs = SLOW_SECS if slow else 1.0
    # Sensors that share a thread with others have short ticks.
    dagster.tick_secs = cluster.kernel.rng.choice((1.0, 45.0)) if slow else 45.0
    dagster.sensors_on = healer != "no sensor"
    if healer == "no daemon":
        dagster.switch_off()
    else:
        dagster.switch_on()


def _nothing() -> None:
    pass


@fault("healing paused", "services")
def _paused(faults: Faults) -> Undo | None:
    """An operator pauses healing; another one ends the pause, or it ends by itself."""
    cluster = faults.cluster
    if cluster.rules.pause is not None:
        return None
    secs = faults.rng.choice((2, 10, 40, MAX_PAUSE_SECS))
    faults._what = f"{secs} s"
    operate(cluster, PAUSE, lambda ctx: pause_healing(ctx, secs=secs))
    if faults.rng.random() < 0.5:
        return _nothing
    return lambda: operate(cluster, RESUME, resume_healing)


def _for_long(kind: str, healer: Healer) -> None:
    """A state of the sensors that mostly lasts for longer than other faults."""

    def switch(faults: Faults) -> Undo | None:
        cluster, dagster = faults.cluster, faults.cluster.dagster
        if dagster.interval_secs > 1.0 or not dagster.sensors_on or dagster.switched_off:
            return None
        switch_healer(cluster, healer)
        secs = faults.rng.choice((0.0, 30.0, 90.0))
        return lambda: faults.mend_after(secs, kind, lambda: switch_healer(cluster, "sensor"))

    fault(kind, "services")(switch)


_for_long("sensors slow", "slow sensor")
_for_long("sensors off", "no sensor")
_for_long("daemon of Dagster off", "no daemon")
