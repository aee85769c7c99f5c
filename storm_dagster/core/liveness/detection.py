"""Detection of dead tasks, workers and hosts by counters and a monotonic clock.

See ``docs/decisions.md#liveness``. :func:`observe` takes a view and the observer's memory, and
returns causes for a reassignment and the next memory. No wall clock is read: a limit starts when
this observer first saw the current state, so that a new observer (another boot id, a new leader,
the end of an outage) grants one full timeout.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from msgspec import UNSET

from storm_dagster.core.liveness.causes import (
    Cause,
    FirstSeen,
    LivenessMemory,
    TopologyMemory,
)
from storm_dagster.core.liveness.limits import LivenessLimits
from storm_dagster.core.liveness.topology_check import LivenessCheck, TopologyCheck, first_seen
from storm_dagster.core.transitions import HEALED
from storm_dagster.model.records import Assignment
from storm_dagster.model.slot import Slot
from storm_dagster.model.view import ClusterView, TopologyView, Versioned

_MASS_LOSS_SUPERVISORS = 3
"""Minimum number of supervisors with lost workers for a mass loss: fewer are a fault of hosts."""


@dataclass(frozen=True)
class LivenessResult:
    """Result of one check of the cluster."""

    causes: tuple[Cause, ...]
    """Reasons to reassign tasks, in topology id order; empty while frozen."""
    memory: LivenessMemory
    frozen: str | None = None
    """Reason of the freeze: the mass loss (``docs/decisions.md#mass-loss``)."""
    silent_supervisors: tuple[str, ...] = ()
    """Registered supervisors whose counter does not rise: they get no new work."""
    restarting: tuple[tuple[str, str, int], ...] = ()
    """(topology id, supervisor id, port) of workers that are restarted in place.

    They are only recorded.
    """
    waiting: tuple[str, ...] = ()
    """Problems whose limit has not passed yet, in words."""
    next_check: float | None = None
    """Boot clock at which the next limit passes if the cluster does not change.

    ``None`` if no limit is running.
    """


def observe(
    view: ClusterView,
    memory: LivenessMemory,
    limits: LivenessLimits,
    *,
    boot_id: str,
    boot_now: float,
    restart_limits: bool = False,
) -> LivenessResult:
    """Check the cluster; return the causes and the memory for the next check.

    ``memory`` is that of the last check. ``boot_id`` and ``boot_now`` are the boot and its clock on
    the observer's machine. ``restart_limits``: all limits begin now, for an observer that was cut
    off from ZooKeeper.
    """
    memory = _starting_memory(view, memory, limits, boot_id, boot_now, restart_limits)
    supervisors: dict[str, FirstSeen] = {}
    silent: set[str] = set()
    for supervisor_id, info in view.supervisors.items():
        counter = first_seen(info.count, memory.supervisors.get(supervisor_id), boot_now)
        supervisors[supervisor_id] = counter
        if boot_now - counter.since > limits.supervisor_secs:
            silent.add(supervisor_id)
    last_signs = _last_signs(view, memory, limits)
    check = LivenessCheck(view, memory, limits, boot_now, frozenset(silent), last_signs)
    topologies: dict[str, TopologyMemory] = {}
    for topology, assignment, assignment_at in _healed(view):
        topology_check = TopologyCheck(check, topology, assignment, assignment_at)
        topologies[topology.id] = topology_check.run()
    # After the checks of all topologies, which add their causes and deadlines to ``check``.
    lost = _lost_workers(check)
    frozen_since, frozen = _mass_loss(check, lost)
    return LivenessResult(
        causes=() if frozen else tuple(check.causes),
        memory=LivenessMemory(
            boot_id=boot_id,
            since=memory.since,
            topologies=topologies,
            supervisors=supervisors,
            frozen_since=frozen_since,
            cold=memory.cold,
            lost=lost or UNSET,
            last_signs=last_signs or UNSET,
        ),
        frozen=frozen,
        silent_supervisors=tuple(sorted(silent)),
        restarting=tuple(check.restarting),
        waiting=tuple(check.waiting),
        next_check=min(check.deadlines, default=None),
    )


def _starting_memory(
    view: ClusterView,
    memory: LivenessMemory,
    limits: LivenessLimits,
    boot_id: str,
    boot_now: float,
    restart_limits: bool,
) -> LivenessMemory:
    """The memory that a check starts from: that of the last check, or an empty one.

    It is empty, so that all limits begin, after a restart of the cluster, with ``restart_limits``,
    and if the last check had another boot's clock.
    """
    cold = _cluster_restarted(view, memory)
    # No check stores a ``since`` that is further ahead than one window.
    is_invalid = memory.boot_id != boot_id or memory.since > boot_now + limits.window_secs
    if not (cold or restart_limits or is_invalid):
        return memory
    # An outage that cut off this observer also ends other sessions, up to one window after the
    # observer's reconnection. These workers must count as missing since the first check, not as
    # lost later. A new observer, or one after a reboot, was not cut off.
    late = limits.window_secs if restart_limits and memory.boot_id == boot_id else 0
    return LivenessMemory(boot_id=boot_id, since=boot_now + late, cold=cold)


def _mass_loss(check: LivenessCheck, lost: Mapping[str, float]) -> tuple[float | None, str | None]:
    """Boot clock at which a mass loss was first seen, and the reason of the freeze.

    ``None`` without a mass loss. The reason is also ``None`` after the freeze, but the time is kept
    while the loss lasts: one loss freezes healing once. The deadlines get the end of the freeze.
    """
    limits = check.limits
    nodes = {Slot.parse(key).node for key in lost}
    total = sum(len(assignment.workers) for _, assignment, _ in _healed(check.view))
    share = 100 * len(lost) / total if total else 0.0
    if share <= limits.mass_loss_percent or len(nodes) < _MASS_LOSS_SUPERVISORS:
        return None, None
    frozen_since = check.memory.frozen_since
    if frozen_since is None:
        frozen_since = check.now
    # The freeze is bounded: a host that is still missing after a launch window does not come back,
    # and its tasks must not stay dead permanently.
    if check.now - frozen_since > limits.launch_secs:
        return frozen_since, None
    check.deadlines.append(frozen_since + limits.launch_secs)
    return frozen_since, (
        f"{len(lost)} of {total} workers on {len(nodes)} supervisors vanished at once: "
        f"no task is reassigned for {limits.launch_secs:g} s; check the network and ZooKeeper"
    )


def _cluster_restarted(view: ClusterView, memory: LivenessMemory) -> bool:
    """True if all supervisor processes of the last check have ended.

    The whole cluster was stopped or restarted. A process that was replaced counts its beats from
    the beginning.
    """
    if not memory.supervisors:
        return False
    for supervisor_id, counter in memory.supervisors.items():
        info = view.supervisors.get(supervisor_id)
        if info is not None and info.count >= counter.value:
            return False
    return True


def _last_signs(
    view: ClusterView, memory: LivenessMemory, limits: LivenessLimits
) -> dict[str, float]:
    """Last rise of the counter of each supervisor that is gone but still has tasks.

    Supervisor id -> boot clock at which its counter last rose, if the observer saw that.
    """
    with_tasks: set[str] = set()
    for _, assignment, _ in _healed(view):
        with_tasks.update(worker.node for worker in assignment.workers)
    rises: dict[str, float] = {}
    for supervisor_id, counter in memory.supervisors.items():
        rises[supervisor_id] = counter.since
    rises.update(memory.last_signs or {})
    # The stored memory of the sensor has placeholders with ``since`` 0 in place of counters
    # (HealingMemory.to_record). Below ``oldest`` they do not count: their rises were not seen.
    oldest = memory.since
    if memory.cold:
        # The restart of the cluster may fall in an outage of the observer: then ``since`` is one
        # window after the observer's first poll, and rises since that poll count.
        oldest -= limits.window_secs
    signs: dict[str, float] = {}
    for supervisor_id, rose_at in rises.items():
        is_gone = supervisor_id not in view.supervisors
        if is_gone and supervisor_id in with_tasks and rose_at >= oldest:
            signs[supervisor_id] = rose_at
    return signs


def _lost_workers(check: LivenessCheck) -> dict[str, float]:
    """``"node:port"`` -> boot clock at which its worker last counted as lost.

    Workers that were moved already count, too: a fault comes in parts, and a freeze lasts until its
    hosts are back. Those of this check are read from ``check.causes``, so all topologies must have
    been checked.
    """
    live: set[str] = set()
    for topology, _, _ in _healed(check.view):
        live.update(slot.key for slot in topology.live_workers)
    frozen_since = check.memory.frozen_since
    frozen = frozen_since is not None and check.now - frozen_since <= check.limits.launch_secs
    lost: dict[str, float] = {}
    for key, lost_at in (check.memory.lost or {}).items():
        is_recent = check.now - lost_at <= check.limits.window_secs
        is_kept_by_freeze = frozen and Slot.parse(key).node not in check.view.supervisors
        if key not in live and (is_recent or is_kept_by_freeze):
            lost[key] = lost_at
    for cause in check.causes:
        if cause.kind in ("lost_host", "dead_worker"):
            lost[cause.slot.key] = check.now
    return lost


def _healed(view: ClusterView) -> Iterator[tuple[TopologyView, Assignment, Versioned]]:
    """Yield the topologies whose dead tasks are reassigned, by id."""
    for _, topology in sorted(view.topologies.items()):
        if topology.base.status in HEALED and topology.assignment and topology.assignment_at:
            yield topology, topology.assignment, topology.assignment_at
