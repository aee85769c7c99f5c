"""Dagster metadata of a step.

Tables are cut at 500 rows, with a note; secrets are blotted out by the name of their conf key, because
metadata is stored for ever and shown to everyone who opens the UI.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dagster as dg

from storm_dagster.defs.pictures.placement import SlotTasks, slots_picture
from storm_dagster.defs.pictures.svg import data_uri
from storm_dagster.model.placement import PlacedWorker
from storm_dagster.model.ranges import decode_ranges, encode_ranges
from storm_dagster.model.records import Assignment, TaskTable
from storm_dagster.model.topology import TopologySpec

_MOST_ROWS = 500
_SECRET = re.compile(r"password|passwd|secret|token|credential|payload|private|keytab|api[._-]?key", re.I)
_BLOT = "********"


def mask(value: Any, key: str = "") -> Any:
    """``value`` as plain JSON with every value blotted out whose key names a secret, at any depth."""
    if isinstance(value, Mapping):
        return {str(name): mask(item, str(name)) for name, item in value.items()}
    if key and _SECRET.search(key) and value is not None and not isinstance(value, bool | int | float):
        return _BLOT
    if isinstance(value, list | tuple):
        return [mask(item) for item in value]
    return value


def notes(lines: Iterable[str], nothing: str = "none") -> dg.MarkdownMetadataValue:
    """Sentences as a markdown list."""
    return dg.MetadataValue.md("\n".join(f"- {_md(line)}" for line in lines) or nothing)


def table(
    columns: Sequence[tuple[str, str]], rows: Sequence[Mapping[str, str | int | float | bool | None]]
) -> dg.TableMetadataValue:
    """A table of (name, type) columns; above 500 rows the first column of the last row counts the missing ones."""
    shown = [dict(row) for row in rows[:_MOST_ROWS]]
    if len(rows) > _MOST_ROWS:
        rest: dict[str, str | int | float | bool | None] = dict.fromkeys(name for name, _ in columns)
        text = next((name for name, kind in columns if kind == "string"), None)
        if text is not None:
            rest[text] = f"... and {len(rows) - _MOST_ROWS} more"
        shown.append(rest)
    return dg.MetadataValue.table(
        records=[dg.TableRecord(row) for row in shown],
        schema=dg.TableSchema(columns=[dg.TableColumn(name=name, type=kind) for name, kind in columns]),
    )


def blobs_table(blobs: Iterable[Any]) -> dg.TableMetadataValue:
    """Blobs (anything with key, size and sha256): what is stored, how large, and the content's hash."""
    return table(
        [("key", "string"), ("bytes", "int"), ("sha256", "string")],
        [{"key": blob.key, "bytes": blob.size, "sha256": blob.sha256} for blob in blobs],
    )


def components_table(topology: TopologySpec) -> dg.TableMetadataValue:
    """The topology as its author wrote it: components, parallelism, inputs."""
    rows: list[dict[str, str | int | float | bool | None]] = []
    for component, kind, spec in topology.components():
        code = spec.object.python or " ".join(spec.object.shell or ())
        inputs = ", ".join(
            f"{i.component}{'' if i.stream == 'default' else '.' + i.stream} ({i.grouping.type}"
            f"{': ' + '/'.join(i.grouping.fields) if i.grouping.fields else ''})"
            for i in spec.inputs
        )
        rows.append(
            {
                "component": component,
                "type": kind,
                "parallelism": spec.parallelism,
                "inputs": inputs,
                "code": code,
            }
        )
    return table(
        [
            ("component", "string"),
            ("type", "string"),
            ("parallelism", "int"),
            ("inputs", "string"),
            ("code", "string"),
        ],
        rows,
    )


def tasks_table(tasks: TaskTable) -> dg.TableMetadataValue:
    """Components and the ids of their tasks."""
    return table(
        [("component", "string"), ("type", "string"), ("tasks", "string"), ("count", "int")],
        [
            {"component": name, "type": part.type, "tasks": part.tasks, "count": len(part.ids)}
            for name, part in tasks.components.items()
        ],
    )


def component_counts(ids: Iterable[int], components: Mapping[int, str]) -> dict[str, int]:
    """Component -> how many of ``ids`` are its tasks."""
    counts: dict[str, int] = {}
    for task in ids:
        name = components.get(task, "?")
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))


def placed_slots(workers: Iterable[PlacedWorker]) -> list[SlotTasks]:
    """A planner's workers as the picture draws them."""
    return [SlotTasks(w.node, w.host, w.port, w.tasks, w.kept) for w in workers]


def assigned_slots(assignment: Assignment) -> list[SlotTasks]:
    """A stored assignment's workers as the picture draws them."""
    return [SlotTasks(w.node, w.host, w.port, w.ids) for w in assignment.workers]


def slots_table(slots: Sequence[SlotTasks], components: Mapping[int, str]) -> dg.TableMetadataValue:
    """The assignment: which slot runs which tasks of which components."""
    return table(
        [
            ("host", "string"),
            ("port", "int"),
            ("supervisor", "string"),
            ("tasks", "string"),
            ("count", "int"),
            ("components", "string"),
            ("kept", "bool"),
        ],
        [
            {
                "host": slot.host,
                "port": slot.port,
                "supervisor": slot.node,
                "tasks": encode_ranges(slot.tasks),
                "count": len(slot.tasks),
                "components": ", ".join(
                    f"{name} x{count}" for name, count in component_counts(slot.tasks, components).items()
                ),
                "kept": slot.kept,
            }
            for slot in slots
        ],
    )


def slots_markdown(slots: Sequence[SlotTasks], components: Mapping[int, str], title: str) -> dg.MarkdownMetadataValue:
    """The picture of tasks on slots, inline: nothing is fetched to show it."""
    return dg.MetadataValue.md(f"![tasks on slots]({data_uri(slots_picture(slots, components, title))})")


def unassigned_table(unassigned: Mapping[int, str], components: Mapping[int, str]) -> dg.TableMetadataValue:
    """Tasks without a slot, grouped by the reason."""
    by_reason: dict[tuple[str, str], list[int]] = {}
    for task, reason in unassigned.items():
        by_reason.setdefault((components.get(task, "?"), reason), []).append(task)
    return table(
        [("component", "string"), ("tasks", "string"), ("reason", "string")],
        [
            {"component": component, "tasks": encode_ranges(tasks), "reason": reason}
            for (component, reason), tasks in sorted(by_reason.items())
        ],
    )


def assignment_metadata(slots: Sequence[SlotTasks], components: Mapping[int, str], title: str) -> dict[str, Any]:
    """Table, picture and the numbers that Dagster plots over time, for one assignment."""
    sizes = [len(slot.tasks) for slot in slots]
    return {
        "assignment": slots_table(slots, components),
        "tasks_on_slots": slots_markdown(slots, components, title),
        "workers": len(slots),
        "tasks": sum(sizes),
        "hosts": len({slot.host for slot in slots}),
        "tasks_per_worker_max": max(sizes, default=0),
        "tasks_per_worker_min": min(sizes, default=0),
        "balance": balance(sizes),
    }


def balance(sizes: Sequence[int]) -> float:
    """Average tasks of a worker by those of the fullest one: 1.0 is perfectly even, 0.5 twice the average."""
    return round(sum(sizes) / (len(sizes) * max(sizes)), 4) if any(sizes) else 1.0


def nodes_table(versions: Mapping[str, Any]) -> dg.TableMetadataValue:
    """ZooKeeper paths and the data version that each has now."""
    return table(
        [("path", "string"), ("version", "int")],
        [{"path": path, "version": getattr(version, "version", version)} for path, version in versions.items()],
    )


def task_count(ranges: str) -> int:
    """Number of tasks in ``"1-3,7"``."""
    return len(decode_ranges(ranges))


def _md(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>])", r"\\\1", text.replace("\n", " "))
