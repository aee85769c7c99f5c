"""Placement by the planner of a context: its refusals in words, and its stored reasons."""

from collections.abc import Mapping
from typing import Any

from storm_dagster.core.scheduling.obstacles import (
    closed_hosts,
    held_slots,
    isolation_warnings,
)
from storm_dagster.model.errors import (
    StormDagsterError,
    Unavailable,
    error_from_document,
)
from storm_dagster.model.names import placement_key
from storm_dagster.model.placement import (
    PlacementBatch,
    PlacementResult,
    TopologyPlacement,
)
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext, encode_json
from storm_dagster.operations.steps import step


def plan_or_raise(
    ctx: OperationsContext, batch: PlacementBatch, name: str, view: ClusterView
) -> PlacementResult:
    """Plan the batch, which was made from the view.

    If topology ``name`` does not fit, raise the planner's own error with its message:
    :class:`Unavailable` if it names no type, or an unknown one. The error of a topology that finds
    too few slots also names the topologies that isolate hosts or hold slots.
    """
    result = ctx.planner(batch)
    placement = result.placement(name)
    if placement.status != "failed":
        return _with_isolation_warnings(result, batch, name, view)
    message = placement.error or f"topology {name!r} cannot be placed: no reason was given"
    if placement.error_type in (None, "Unavailable"):
        message = _with_obstacles(message, batch, name, view)
    error = error_from_document(
        {"error": {"type": placement.error_type or "Unavailable", "message": message}}
    )
    raise error if type(error) is not StormDagsterError else Unavailable(message)


def _with_isolation_warnings(
    result: PlacementResult, batch: PlacementBatch, name: str, view: ClusterView
) -> PlacementResult:
    """The result, with a warning for each host of the topology's isolation without an effect."""
    (to_place,) = (topology for topology in batch.topologies if topology.name == name)
    warnings = isolation_warnings(view, name, to_place.isolation)
    if not warnings:
        return result
    placements: list[TopologyPlacement] = []
    for placement in result.placements:
        if placement.name == name:
            all_warnings = (*placement.warnings, *warnings)
            placement = placement.model_copy(update={"warnings": all_warnings})
        placements.append(placement)
    return result.model_copy(update={"placements": tuple(placements)})


def _with_obstacles(message: str, batch: PlacementBatch, name: str, view: ClusterView) -> str:
    """The planner's message with the other topologies that are in the way."""
    (to_place,) = (topology for topology in batch.topologies if topology.name == name)
    placing = [topology.id for topology in view.topologies.values() if topology.base.name == name]
    closed = closed_hosts(view, placing, to_place.isolation)
    if closed and not batch.supervisors:
        return f"topology {name!r} cannot be placed: {closed}"
    reasons = [reason for reason in (closed, held_slots(view, placing)) if reason]
    return "; ".join((message, *reasons)) if batch.supervisors else message


def write_reasons(
    ctx: OperationsContext,
    topology_id: str,
    result: PlacementResult,
    name: str,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Store the reasons of a placement, and ``more``, as a blob.

    Its key is ``<id>-placement.json``; ``explain`` reads it. They are stored only after the
    placement was committed, with best effort: an explanation does not wait for a second nimbus, and
    if it cannot be stored the placement is still valid.
    """
    document: dict[str, Any] = {
        "topology_id": topology_id,
        "planner": result.planner,
        "assign_secs": result.assign_secs,
    }
    document.update(result.placement(name).to_document())
    document.update(more or {})
    with step(ctx, "store.placement.json"):
        try:
            ctx.accepting_fewer(minimum=1).blobs.put(
                placement_key(topology_id), encode_json(document)
            )
        except (StormDagsterError, OSError) as error:
            ctx.log.warning("the reasons for the placement of %s are not stored: %s", name, error)
