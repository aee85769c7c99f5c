"""Table of a topology's statuses and transitions (``docs/decisions.md#transitions``).

Pure: a base and an event give the next base. A transition that is not allowed raises; one that
changes nothing returns the very same object, so that the caller writes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from storm_dagster.model.errors import Conflict
from storm_dagster.model.records import StormBase, TopologyStatus
from storm_dagster.model.verbs import StatusEvent
from storm_dagster.model.view import ClusterView

HEALED: frozenset[TopologyStatus] = frozenset(
    {"ACTIVE", "INACTIVE", "REBALANCING", "UPGRADING", "ROLLBACK"}
)
"""Statuses in which dead tasks are reassigned: all but that of a topology which goes anyway."""
STEADY: frozenset[TopologyStatus] = frozenset({"ACTIVE", "INACTIVE"})
"""Statuses in which tasks may be moved to spread them better: no other change of the topology is
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


def delay_of(asked: int | None, message_timeout_secs: int) -> int:
    """Seconds between a kill or rebalance and its effect: what was asked, else the message timeout.

    Negative means the default, as in Storm; 0 is allowed and means at once.
    """
    return message_timeout_secs if asked is None or asked < 0 else asked


def apply_event(base: StormBase, event: StatusEvent, *, delay_secs: int | None = None) -> StormBase:
    """The base after ``event``; the same object when nothing changes.

    ``delay_secs`` goes with ``kill`` and ``rebalance``, and with ``drain``, which silences the
    spouts of a topology that is about to be replaced: when nobody ends it, it becomes ACTIVE again
    after the delay. Raises :class:`Conflict` when the status does not allow the event. Killing a
    killed topology stores the new delay.
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
        # A drain that was under way is over, whoever ends it.
        changes |= {"wanted_status": target, "delay_secs": None}
    elif event in ("kill", "rebalance", "drain"):
        changes["delay_secs"] = delay_secs
        if event != "drain" and base.status != "KILLED":
            changes["previous_status"] = base.status
    elif event == "finish_rebalance":
        changes |= {"delay_secs": None, "previous_status": None}
    changed = base.model_copy(update=changes)
    return base if changed == base else changed


@dataclass(frozen=True)
class DueAction:
    """Action that a topology's status asks for and that is due."""

    topology_id: str
    name: str
    action: Literal["remove", "finish_rebalance", "activate"]


class DueMemory(msgspec.Struct, frozen=True):
    """Boot clock at which the observer first saw each base as it is: topology id -> (mzxid, boot
    clock).

    A base carries a delay but no time, because clocks of other machines are never compared. A new
    observer (another boot id) waits the full delay again, as Storm's new leader does.
    """

    boot_id: str = ""
    seen: Mapping[str, tuple[int, float]] = msgspec.field(default_factory=dict)


# A submission normally activates right after it publishes; only one that died between the two is
# finished here.
_UNFINISHED_ACTIVATION_SECS = 5


def due_actions(
    view: ClusterView, memory: DueMemory, *, boot_id: str, boot_now: float, late_secs: float = 0.0
) -> tuple[list[DueAction], DueMemory]:
    """Actions due now, in topology id order, and the memory for the next call.

    Removal of a killed topology and the end of a rebalance are due when their delay has passed on
    the observer's clock; a delay of 0 at once. The activation of a topology that was published for
    ACTIVE and is still INACTIVE is due after five seconds, that of one whose drain nobody ended
    after its delay. Each ``late_secs`` later but a removal, which waits for no other process.
    """
    known = memory.seen if memory.boot_id == boot_id else {}
    seen: dict[str, tuple[int, float]] = {}
    due: list[DueAction] = []
    for topology_id, topology in sorted(view.topologies.items()):
        base = topology.base
        action: Literal["remove", "finish_rebalance", "activate"]
        more_secs = late_secs
        if base.status == "KILLED":
            action, delay = "remove", base.delay_secs or 0
            more_secs = 0.0
        elif base.status == "REBALANCING":
            action, delay = "finish_rebalance", base.delay_secs or 0
        elif base.status == "INACTIVE" and base.wanted_status == "ACTIVE":
            # With a delay it is being drained for its successor, who ends it; without, it was just
            # published.
            delay = _UNFINISHED_ACTIVATION_SECS if base.delay_secs is None else base.delay_secs
            action = "activate"
        else:
            continue
        zxid, since = known.get(topology_id, (-1, boot_now))
        if zxid != topology.base_at.mzxid or since > boot_now:
            zxid, since = topology.base_at.mzxid, boot_now
        seen[topology_id] = (zxid, since)
        if boot_now - since >= delay + more_secs:
            due.append(DueAction(topology_id, base.name, action))
    return due, DueMemory(boot_id, seen)
