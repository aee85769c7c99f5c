"""Targets of a declared topology: the assets that its bolts write.

A sink reports its table from a worker, which does not know the keys of a code location. Its event
names the component and the asset that the component writes, below ``@target``. This module
translates such a key, and merges the reports of several tasks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg
import msgspec

from storm_dagster.defs.declared.topology import DeclaredTopology
from storm_dagster.model.dagster_events import DagsterEvent, is_target_key


def translated_target_key(topology: DeclaredTopology, key: Sequence[str]) -> dg.AssetKey | None:
    """The key in this code location of the target that an event's ``key`` names.

    The key is that of the translator, or of the YAML's ``translation``. ``None`` for a key of
    users, which names an asset itself, and for a target that the declaration no longer has. Tell
    the two apart with :func:`is_target_key`: an event of such a target is dropped.
    """
    if not is_target_key(key):
        return None
    return topology.targets.get(tuple(key[1:]))


def translated_event(topology: DeclaredTopology, event: DagsterEvent) -> DagsterEvent | None:
    """The event with the key of its asset in this code location.

    Events under keys of users stay as they are. ``None`` for a report on a target that the
    declaration no longer has: it is dropped.
    """
    if not is_target_key(event.key):
        return event
    key = translated_target_key(topology, event.key)
    if key is None:
        return None
    return msgspec.structs.replace(event, key=tuple(key.path))


def merge_reports(events: Sequence[DagsterEvent]) -> dict[int, DagsterEvent]:
    """Index in ``events`` -> the event to store there, in their order.

    The reports that tasks made of one target are merged into the last one of them, so that a tick
    stores one event for each table: ``rows`` and ``tasks`` are sums, ``since`` is the first and
    ``newest_event_time`` the last time. Every other event stays as it is.
    """
    merged: dict[int, DagsterEvent] = {}
    last_of_target: dict[tuple[str, ...], int] = {}
    for index, event in enumerate(events):
        if not is_target_key(event.key):
            merged[index] = event
            continue
        former_index = last_of_target.get(event.key)
        if former_index is not None:
            former = merged.pop(former_index)
            metadata = _sum_metadata(former.metadata, event.metadata)
            event = msgspec.structs.replace(event, metadata=metadata)
        merged[index] = event
        last_of_target[event.key] = index
    return merged


def _sum_metadata(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of two reports of one target, as that of one report."""
    merged = {**first, **second}
    # The report is of several tasks.
    merged.pop("task", None)
    for name in ("rows", "tasks"):
        merged[name] = int(first.get(name, 0)) + int(second.get(name, 0))
    times = [part["newest_event_time"] for part in (first, second) if "newest_event_time" in part]
    if times:
        merged["newest_event_time"] = max(times)
    since = [part["since"] for part in (first, second) if "since" in part]
    if since:
        merged["since"] = min(since)
    return merged


def target_path(component: str, asset: str) -> tuple[str, ...]:
    """Key of a target among those of its topology: the component, then the parts of its asset."""
    return (component, *asset.split("/"))
