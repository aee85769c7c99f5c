"""Dagster metadata of a step.

Tables are cut at 500 rows, with a note; secrets are blotted out by the name of their conf key, because
metadata is stored for ever and shown to everyone who opens the UI.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dagster as dg

from storm_dagster.core.pictures.placement import SlotTasks, slots_picture
from storm_dagster.core.pictures.svg import data_uri
from storm_dagster.model.ranges import encode_ranges
from storm_dagster.model.records import TaskTable
from storm_dagster.model.topology import TopologySpec

_MOST_ROWS = 500

Cell = str | int | float | bool | None
"""What a table may hold."""


def notes(lines: Iterable[str], nothing: str = "none") -> dg.MarkdownMetadataValue:
    """Sentences as a markdown list."""
    return dg.MetadataValue.md("\n".join(f"- {_md(line)}" for line in lines) or nothing)


def table(columns: str, rows: Sequence[Sequence[Cell]]) -> dg.TableMetadataValue:
    """A table. ``columns`` are names in one text, those of no strings with their type: ``"task:int component"``.

    Above 500 rows the first column of strings says in the last row how many are missing.
    """
    kinds = {name: kind or "string" for name, _, kind in (column.partition(":") for column in columns.split())}
    shown: list[dict[str, Cell]] = [dict(zip(kinds, row, strict=True)) for row in rows[:_MOST_ROWS]]
    if len(rows) > _MOST_ROWS:
        more = [f"... and {len(rows) - _MOST_ROWS} more"]
        shown.append({name: more.pop() if more and kind == "string" else None for name, kind in kinds.items()})
    return dg.MetadataValue.table(
        records=[dg.TableRecord(row) for row in shown],
        schema=dg.TableSchema(columns=[dg.TableColumn(name=name, type=kind) for name, kind in kinds.items()]),
    )


def blobs_table(blobs: Iterable[Any]) -> dg.TableMetadataValue:
    """Blobs (anything with key, size and sha256): what is stored, how large, and the content's hash."""
    return table("key bytes:int sha256", [(blob.key, blob.size, blob.sha256) for blob in blobs])


def components_table(topology: TopologySpec) -> dg.TableMetadataValue:
    """The topology as its author wrote it: components, parallelism, inputs."""
    rows: list[Sequence[Cell]] = []
    for component, kind, spec in topology.components():
        code = spec.object.python or " ".join(spec.object.shell or ())
        inputs = ", ".join(
            f"{i.component}{'' if i.stream == 'default' else '.' + i.stream} ({i.grouping.type}"
            f"{': ' + '/'.join(i.grouping.fields) if i.grouping.fields else ''})"
            for i in spec.inputs
        )
        rows.append((component, kind, spec.parallelism, inputs, code))
    return table("component type parallelism:int inputs code", rows)


def tasks_table(tasks: TaskTable) -> dg.TableMetadataValue:
    """Components and the ids of their tasks."""
    return table(
        "component type tasks count:int",
        [(name, part.type, part.tasks, len(part.ids)) for name, part in tasks.components.items()],
    )


def component_counts(ids: Iterable[int], components: Mapping[int, str]) -> dict[str, int]:
    """Component -> how many of ``ids`` are its tasks."""
    return dict(sorted(Counter(components.get(task, "?") for task in ids).items()))


def slots_table(slots: Sequence[SlotTasks], components: Mapping[int, str]) -> dg.TableMetadataValue:
    """The assignment: which slot runs which tasks of which components."""
    rows: list[Sequence[Cell]] = []
    for slot in slots:
        counts = component_counts(slot.tasks, components)
        names = ", ".join(f"{name} x{count}" for name, count in counts.items())
        rows.append((slot.host, slot.port, slot.node, encode_ranges(slot.tasks), len(slot.tasks), names, slot.kept))
    return table("host port:int supervisor tasks count:int components kept:bool", rows)


def picture_markdown(svg: str) -> dg.MarkdownMetadataValue:
    """A picture of tasks on slots, inline: nothing is fetched to show it."""
    return dg.MetadataValue.md(f"![tasks on slots]({data_uri(svg)})")


def unassigned_table(unassigned: Mapping[int, str], components: Mapping[int, str]) -> dg.TableMetadataValue:
    """Tasks without a slot, grouped by the reason."""
    by_reason: dict[tuple[str, str], list[int]] = {}
    for task, reason in unassigned.items():
        by_reason.setdefault((components.get(task, "?"), reason), []).append(task)
    return table(
        "component tasks reason",
        [(component, encode_ranges(tasks), reason) for (component, reason), tasks in sorted(by_reason.items())],
    )


def assignment_metadata(slots: Sequence[SlotTasks], components: Mapping[int, str], title: str) -> dict[str, Any]:
    """Table, picture and the numbers that Dagster plots over time, for one assignment."""
    sizes = [len(slot.tasks) for slot in slots]
    return {
        "assignment": slots_table(slots, components),
        "tasks_on_slots": picture_markdown(slots_picture(slots, components, title)),
        "workers": len(slots),
        "tasks": sum(sizes),
        "hosts": len({slot.host for slot in slots}),
        "tasks_per_worker_max": max(sizes, default=0),
        "tasks_per_worker_min": min(sizes, default=0),
        # Average tasks of a worker by those of the fullest one: 1.0 is perfectly even, 0.5 twice the average.
        "balance": round(sum(sizes) / (len(sizes) * max(sizes)), 4) if any(sizes) else 1.0,
    }


def nodes_table(versions: Mapping[str, Any]) -> dg.TableMetadataValue:
    """ZooKeeper paths and the data version that each has now."""
    return table("path version:int", [(path, getattr(at, "version", at)) for path, at in versions.items()])


def _md(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>])", r"\\\1", text.replace("\n", " "))
