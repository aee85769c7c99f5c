"""Reasons, in words, why the workers of a supervisor that drains cannot move. Pure."""

from storm_dagster.core.usable_slots import usable_slots
from storm_dagster.model.view import ClusterView, TopologyView

_TOPOLOGIES_NAMED = 5
"""Topologies that a text names."""


def drain_obstacles(view: ClusterView, supervisor_id: str) -> str:
    """Reasons why topologies cannot leave the slots of the supervisor now; empty if all can.

    The bounds of users and the placement rules of a topology are not known here: the leader logs
    what they refuse.
    """
    texts: list[str] = []
    for topology in sorted(view.topologies.values(), key=lambda topology: topology.base.name):
        ports = sorted(worker.port for worker in topology.workers if worker.node == supervisor_id)
        if not ports:
            continue
        reason = _obstacle(view, topology)
        if reason:
            slots = ", ".join(map(str, ports))
            texts.append(f"{topology.base.name} ({slots}): {reason}")
    if len(texts) > _TOPOLOGIES_NAMED:
        number = len(texts) - _TOPOLOGIES_NAMED
        texts[_TOPOLOGIES_NAMED:] = [f"and {number} more topologies"]
    return "; ".join(texts)


def _obstacle(view: ClusterView, topology: TopologyView) -> str:
    """Reason why no worker of the topology can move now; empty without one."""
    if topology.base.status in ("UPGRADING", "ROLLBACK"):
        return "its gray upgrade has not ended"
    if topology.base.status == "REBALANCING":
        return "its rebalance has not ended"
    if topology.base.status == "KILLED":
        return "it is being killed, and its delay has not passed"
    if usable_slots(view, placing=[topology.id]).count < 1:
        return "no slot is free for it on another host"
    return ""
