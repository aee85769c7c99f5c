"""Checks of healing in a calm cluster: who heals, how soon, and with how many runs."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from storm_dagster.operations.live.healing_pause import pause_healing, resume_healing
from storm_simulation.healing_faults import (
    MAX_PAUSE_SECS,
    PAUSE,
    RESUME,
    Healer,
    operate,
    switch_healer,
)

if TYPE_CHECKING:
    from storm_simulation.calm import Calm
    from storm_simulation.cluster import Cluster

SESSION_SECS = 4.0
HEAL_SECS = SESSION_SECS + 36.0
"""Time from the loss of a host until its tasks run elsewhere.

They are placed within session + 30 s, and their workers then start.
"""
_NEW_LEADER_SECS = SESSION_SECS + 30.0 + 20.0
"""Time that a leader which was just elected gives each worker, and then the sensor."""
_FRUITLESS_SECS = 60.0
"""Time after a run that changed nothing in which the sensor leaves the topology to the leader."""
_LATE_RUN_SECS = (22.0, 45.0)
"""Least and longest time until a run starts, beyond the leader's backstop."""
_LATE_RUNS = 4
_ELSEWHERE: tuple[Healer, ...] = ("slow sensor", "no sensor", "no daemon")


def choose_healer(cluster: Cluster) -> Healer:
    """Switch the sensors to a state by chance, which lasts for a while already, or not."""
    rng = cluster.kernel.rng
    healer: Healer = "sensor" if rng.random() < 0.6 else rng.choice(_ELSEWHERE)
    switch_healer(cluster, healer)
    if healer != "sensor":
        cluster.run(rng.choice((0.0, 5.0, 40.0)))
    return healer


def secs_until_healed(cluster: Cluster, gone: list[str], *, is_alone: bool) -> float:
    """Time until the tasks of lost hosts run elsewhere.

    ``gone`` are the hosts, ``is_alone``: no sensor heals. Only a leader that is lost with the
    sensor takes longer: the next one has seen no heartbeat yet.
    """
    leader = cluster.leader()
    times = cluster.dagster.healing_runs.empty.values()
    last_empty = max((max(each) for each in times), default=-_FRUITLESS_SECS)
    sensor_waits = cluster.kernel.now - last_empty < _FRUITLESS_SECS
    is_new_leader = leader is None or leader.host.name in gone
    if is_new_leader and (is_alone or sensor_waits):
        return HEAL_SECS + _NEW_LEADER_SECS
    return HEAL_SECS


def await_end_of_pause(calm: Calm) -> None:
    """A pause that an operator asked for while much failed ends by itself."""
    cluster = calm.cluster
    names = (PAUSE, RESUME)
    asked = cluster.until(
        lambda: all(process.name not in names for process in cluster.processes.values()), 90.0
    )
    if not asked or not cluster.until(lambda: cluster.rules.pause is None, MAX_PAUSE_SECS + 10.0):
        calm.fail("pause", "a pause of healing does not end")


def check_pause(calm: Calm) -> None:
    """What dies in a pause of healing is healed soon after its end, and not before."""
    cluster, rng = calm.cluster, calm.cluster.kernel.rng
    if not calm.spare_hosts() or not calm.await_leader():
        return
    # A loss right after the last one would be one of many hosts at once.
    cluster.run(10.0)
    choose_healer(cluster)
    secs = rng.choice((10, 30, 60))
    process = operate(cluster, PAUSE, lambda ctx: pause_healing(ctx, secs=secs))
    cluster.until(lambda: process.dead, 60.0)
    host = cluster.hosts[rng.choice(sorted(cluster.supervisors))]
    cluster.lose_host(host)
    calm.faults.counts["host lost in a pause"] += 1
    if rng.random() < 0.5:
        cluster.run(rng.uniform(0.0, secs))
        operate(cluster, RESUME, resume_healing)
    if not cluster.until(lambda: cluster.rules.pause is None, secs + 10.0):
        calm.fail("pause", f"a pause of {secs} s does not end")
    calm.await_healed(HEAL_SECS, "after the end of a pause of healing")
    cluster.boot_host(host)
    switch_healer(cluster, "sensor")


def check_late_runs(calm: Calm) -> None:
    """Where runs start late the leader heals in time, and few runs find its placements."""
    cluster, rng = calm.cluster, calm.cluster.kernel.rng
    if not calm.spare_hosts() or rng.random() < 0.5:
        return
    calm.await_healed(HEAL_SECS + 60.0, "before runs are late")
    begin = cluster.kernel.now
    cluster.dagster.run_delays = _LATE_RUN_SECS
    for _ in range(_LATE_RUNS):
        host = cluster.hosts[rng.choice(sorted(cluster.supervisors))]
        cluster.lose_host(host)
        calm.await_healed(HEAL_SECS, f"after {host.name} was lost while runs are late")
        cluster.boot_host(host)
        cluster.run(rng.uniform(2.0, 8.0))
    cluster.dagster.reset_delays()
    calm.faults.counts["host lost, runs late"] += _LATE_RUNS
    check_runs(calm, begin)


def check_runs(calm: Calm, begin: float) -> None:
    """At most one run in a minute, and ten in a day, change nothing for a topology."""
    for topology_id, times in calm.cluster.dagster.healing_runs.empty.items():
        recent = sorted(at for at in times if at >= begin)
        is_too_soon = any(later - at < _FRUITLESS_SECS for at, later in pairwise(recent))
        if is_too_soon or len(recent) > 10:
            rounded = [round(at - begin) for at in recent]
            calm.fail("runs", f"of {topology_id} runs change nothing at {rounded} s")


def check_sensor(calm: Calm) -> None:
    """A sensor that is armed has asked for a run: workers were lost with their hosts.

    Without it the leader heals as soon. Any run of the program counts: after one without an effect,
    or one that does not end, the sensor leaves the next loss to the leader.
    """
    if not calm.cluster.dagster.storage.runs:
        calm.fail("healer", "hosts were lost with their workers, and the sensor asked for no run")
