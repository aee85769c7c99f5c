"""Traces of a job that changes a topology: an observation at its asset, and the run's tag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from storm_dagster.defs.keys import ACTIVE_TOPOLOGY, TOPOLOGY_TAG
from storm_dagster.defs.resources.operating import Handles


def observe_change(
    context: dg.OpExecutionContext,
    handles: Handles,
    verb: str,
    name: str,
    outcome: str,
    metadata: Mapping[str, Any],
) -> None:
    """Record at the topology's asset what ``verb`` came to, and tag the run with the topology's name."""
    context.log_event(
        dg.AssetObservation(
            asset_key=handles.zookeeper.asset_key(ACTIVE_TOPOLOGY),
            partition=name,
            description=f"{verb}: {outcome}",
            metadata={"verb": verb, **metadata},
        )
    )
    context.add_output_metadata(dict(metadata))
    if not context.has_tag(TOPOLOGY_TAG):
        context.instance.add_run_tags(context.run.run_id, {TOPOLOGY_TAG: name})
