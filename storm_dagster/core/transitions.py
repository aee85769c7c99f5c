"""Statuses of a topology and their transitions.

Pure: a base and an event give the next base. A transition that is not allowed raises an error. One
without a change returns the same object, so that the caller need not write. See
``docs/decisions.md#transitions``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from storm_dagster.model.errors import Conflict
from storm_dagster.model.records import StormBase, TopologyStatus
from storm_dagster.model.verbs import StatusEvent
from storm_dagster.model.view import ClusterView, TopologyView

HEALED: frozenset[TopologyStatus] = frozenset(
    {"ACTIVE", "INACTIVE", "REBALANCING", "UPGRADING", "ROLLBACK"}
)
"""Statuses in which dead tasks are reassigned: all but that of a killed topology."""
STEADY: frozenset[TopologyStatus] = frozenset({"ACTIVE", "INACTIVE"})
"""Statuses in which tasks can be moved to spread them better: no other change of the topology is
under way.
"""

_NEXT: Mapping[TopologyStatus, Mapping[StatusEvent, TopologyStatus | Literal["previous"]]] = {
    "ACTIVE": {
        "activate": "ACTIVE",
        "deactivate": "INACTIVE",
        "drain": "INACTIVE",
        "kill": "KILLED",
        "rebalance": "REBALANCING",
        "upgrade": "UPGRADING",
    },
    "INACTIVE": {
        "activate": "ACTIVE",
        "deactivate": "INACTIVE",
        "kill": "KILLED",
        "rebalance": "REBALANCING",
    },
    "KILLED": {"kill": "KILLED"},
    "REBALANCING": {"kill": "KILLED", "finish_rebalance": "previous"},
    "UPGRADING": {"kill": "KILLED", "end_upgrade": "ACTIVE", "rollback": "ROLLBACK"},
    "ROLLBACK": {"kill": "KILLED", "end_upgrade": "ACTIVE"},
}
"""Status -> event -> next status. ``previous`` is the status before a rebalance. An event that is
absent is not allowed. Unlike JStorm, a kill is allowed in every status, and an inactive topology
stays inactive.
"""

_PARTICIPLES: Mapping[StatusEvent, str] = {
    "activate": "activated",
    "deactivate": "deactivated",
    "drain": "drained",
    "kill": "killed",
    "rebalance": "rebalanced",
    "finish_rebalance": "taken out of a rebalance",
    "upgrade": "upgraded",
    "end_upgrade": "taken out of an upgrade",
    "rollback": "rolled back",
}
"""Event -> its participle, for the error where the event is not allowed."""

_REMEDIES: Mapping[TopologyStatus, str] = {
    "ACTIVE": "it runs as it is",
    "INACTIVE": "activate it first",
    "KILLED": "wait until it is gone and submit it again",
    "REBALANCING": "wait until the rebalance ends, or kill it",
    "UPGRADING": "complete the upgrade or roll it back first",
    "ROLLBACK": "wait until the rollback ends",
}
"""Status -> remedy where an event is not allowed."""


def delay_of(wait_secs: int | None, message_timeout_secs: int) -> int:
    """Seconds between a kill or rebalance and its effect.

    The default is the message timeout. A negative number means the default, as in Storm; 0 means at
    once.
    """
    if wait_secs is None or wait_secs < 0:
        return message_timeout_secs
    return wait_secs


def apply_event(base: StormBase, event: StatusEvent, *, delay_secs: int | None = None) -> StormBase:
    """The base after ``event``; the same object if it does not change.

    ``delay_secs`` belongs to ``kill``, ``rebalance`` and ``drain``. A drain stops the spouts of a
    topology that is about to be replaced; if no event ends it, the topology becomes ACTIVE after
    the delay. A kill of a killed topology stores the new delay. :class:`Conflict` if the status
    does not allow the event.
    """
    target = _NEXT[base.status].get(event)
    if target is None:
        raise Conflict(
            f"topology {base.name!r} is {base.status} and cannot be {_PARTICIPLES[event]}: "
            f"{_REMEDIES[base.status]}"
        )
    if target == "previous":
        target = base.previous_status or base.wanted_status
    changes: dict[str, object] = {"status": target}
    if event in ("activate", "deactivate"):
        # The event also ends a drain.
        changes["wanted_status"] = target
        changes["delay_secs"] = None
    elif event in ("kill", "rebalance", "drain"):
        changes["delay_secs"] = delay_secs
        # A second kill must not replace the status of before the first one.
        if event != "drain" and base.status != "KILLED":
            changes["previous_status"] = base.status
    elif event == "finish_rebalance":
        changes["delay_secs"] = None
        changes["previous_status"] = None
    changed_base = base.model_copy(update=changes)
    return base if changed_base == base else changed_base


@dataclass(frozen=True)
class DueAction:
    """Action that follows from a topology's status, and is due."""

    topology_id: str
    name: str
    """Name of the topology."""
    action: Literal["remove", "finish_rebalance", "activate"]


class DueMemory(msgspec.Struct, frozen=True):
    """Times at which the observer first saw the current bases, by its boot clock.

    A base has a delay but no time, because clocks of other machines are never compared. A new
    observer (with another boot id) waits for the full delay, as Storm's new leader does.
    """

    boot_id: str = ""
    seen: Mapping[str, tuple[int, float]] = msgspec.field(default_factory=dict)
    """Topology id -> (mzxid of the base, boot clock)."""


_UNFINISHED_ACTIVATION_SECS = 5
"""Delay of an activation that follows a publication. The submission normally makes it at once; only
if it died in between, the action becomes due.
"""


def due_actions(
    view: ClusterView, memory: DueMemory, *, boot_id: str, boot_now: float, late_secs: float = 0.0
) -> tuple[list[DueAction], DueMemory]:
    """Actions due now, in topology id order, and the memory for the next call.

    The removal of a killed topology and the end of a rebalance are due when their delay has passed
    on the observer's clock; with a delay of 0 at once. The activation of a topology that was
    published for ACTIVE and is still INACTIVE is due after five seconds; that of a topology whose
    drain no event ended, after its delay. ``late_secs`` are added to the delay of each action but a
    removal, which does not wait for another process.
    """
    earlier = memory.seen if memory.boot_id == boot_id else {}
    seen: dict[str, tuple[int, float]] = {}
    due: list[DueAction] = []
    for topology_id, topology in sorted(view.topologies.items()):
        base = topology.base
        action: Literal["remove", "finish_rebalance", "activate"]
        if base.status == "KILLED":
            action = "remove"
            delay = base.delay_secs or 0
        elif base.status == "REBALANCING":
            action = "finish_rebalance"
            delay = (base.delay_secs or 0) + late_secs
        elif base.status == "INACTIVE" and base.wanted_status == "ACTIVE":
            action = "activate"
            # With a delay, the topology is drained for its successor, which ends the drain;
            # without, it was just published.
            delay = _UNFINISHED_ACTIVATION_SECS if base.delay_secs is None else base.delay_secs
            delay += late_secs
        else:
            continue
        # A base that was written since has a new time, and so has one whose time lies ahead, which
        # is of another clock.
        zxid, since = earlier.get(topology_id, (-1, boot_now))
        if zxid != topology.base_at.mzxid or since > boot_now:
            zxid = topology.base_at.mzxid
            since = boot_now
        seen[topology_id] = (zxid, since)
        if boot_now - since >= delay:
            due.append(DueAction(topology_id, base.name, action))
    return due, DueMemory(boot_id, seen)


def secs_until_removal(
    memory: DueMemory, topology: TopologyView, *, boot_id: str, boot_now: float
) -> float | None:
    """Seconds until the observer of ``memory`` finds the removal of a killed topology due.

    0 or less: it is due, and may be under way. ``None`` if the observer has not seen the current
    base of the topology yet.
    """
    zxid, since = memory.seen.get(topology.id, (-1, boot_now))
    if memory.boot_id != boot_id or zxid != topology.base_at.mzxid or since > boot_now:
        return None
    return since + (topology.base.delay_secs or 0) - boot_now
