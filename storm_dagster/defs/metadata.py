"""Dagster metadata: tables, pictures, and reports of the stages of a submission.

Tables are cut at 500 rows, with a note. Secrets are masked by the name of their conf key, because
metadata is stored permanently and shown to every user of the UI.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import dagster as dg

from storm_dagster.core.pictures.slots import placed_supervisors, slots_picture
from storm_dagster.core.pictures.svg import data_uri
from storm_dagster.model import paths
from storm_dagster.model.conf import mask
from storm_dagster.model.errors import Conflict, Corrupt, Fenced, InvalidRequest, StormDagsterError
from storm_dagster.model.multimap import multimap
from storm_dagster.model.placement import TopologyPlacement
from storm_dagster.model.ranges import encode_ranges
from storm_dagster.model.records import Assignment, TaskTable, WorkerSlot
from storm_dagster.model.topology import InputSpec, TopologySpec
from storm_dagster.operations import results
from storm_dagster.operations.context import OperationsContext

_FINAL = (InvalidRequest, Conflict, Fenced, Corrupt)
"""Errors that a retry inside the run cannot change.

The request is wrong, the state forbids it, the epoch is over (a re-execution takes the new one), or
the bytes are damaged.
"""
_MAX_ROWS = 500
"""Rows of a table; of a longer one the last row names the number of missing rows."""
MAX_LOGS = 100
"""Maximum of workers whose logs one entry links to."""

Cell = str | int | float | bool | None
"""A value of a table."""


def is_final(error: StormDagsterError) -> bool:
    """True if a repetition of the same call must fail as well."""
    return isinstance(error, _FINAL)


def failure_of(error: StormDagsterError) -> dg.Failure:
    """The failure that ends a step because of ``error``."""
    metadata = {"error_type": error.kind, "message": error.message}
    return dg.Failure(
        description=error.message, metadata=metadata, allow_retries=not is_final(error)
    )


@contextmanager
def step_errors() -> Iterator[None]:
    """Turn a :class:`StormDagsterError` of the block into a :class:`dagster.Failure`.

    Other exceptions pass unchanged. Services read ``error_type`` and ``message`` from the failure's
    metadata and return the same error to their callers (contract of ``GET /v1/runs/{id}``).
    """
    try:
        yield
    except StormDagsterError as error:
        raise failure_of(error) from error


def notes(lines: Iterable[str]) -> dg.MarkdownMetadataValue:
    """Sentences as a markdown list; ``none`` without one."""
    escaped = [re.sub(r"([\\`*_\[\]<>])", r"\\\1", line.replace("\n", " ")) for line in lines]
    return dg.MetadataValue.md("\n".join(f"- {line}" for line in escaped) or "none")


def log_link(topology_id: str, host: str, port: int, service: str | None) -> str:
    """A worker in markdown, with a link to its log.

    The link leads to its supervisor's HTTP ``service``; without one the text has no link.
    """
    if not service:
        return f"{host}:{port}"
    file = quote(f"{topology_id}/{port}/worker.log", safe="")
    return f"[{host}:{port}]({service}/api/v1/log?file={file})"


def table(columns: str, rows: Sequence[Sequence[Cell]]) -> dg.TableMetadataValue:
    """A table of rows.

    ``columns`` are the names, separated by blanks; a column that does not contain strings has a
    type: ``"task:int component"``. Above 500 rows the first column of strings names in the last row
    the number of missing rows.
    """
    kinds: dict[str, str] = {}
    for column in columns.split():
        name, _, kind = column.partition(":")
        kinds[name] = kind or "string"
    records = [dict(zip(kinds, row, strict=True)) for row in rows[:_MAX_ROWS]]
    if len(rows) > _MAX_ROWS:
        records.append(_missing_rows_record(kinds, len(rows) - _MAX_ROWS))
    schema = dg.TableSchema(
        columns=[dg.TableColumn(name=name, type=kind) for name, kind in kinds.items()]
    )
    return dg.MetadataValue.table(
        records=[dg.TableRecord(record) for record in records], schema=schema
    )


def _missing_rows_record(kinds: Mapping[str, str], missing: int) -> dict[str, Cell]:
    """Last row of a table that was cut."""
    record: dict[str, Cell] = dict.fromkeys(kinds)
    for name, kind in kinds.items():
        if kind == "string":  # A column of another type cannot have a text.
            record[name] = f"... and {missing} more"
            break
    return record


def components_table(topology: TopologySpec) -> dg.TableMetadataValue:
    """The topology as its author wrote it: components, parallelism, inputs."""
    rows: list[Sequence[Cell]] = []
    for component, kind, spec in topology.components():
        code = spec.object.python or " ".join(spec.object.shell or ())
        inputs = ", ".join(_describe_input(source) for source in spec.inputs)
        rows.append((component, kind, spec.parallelism, inputs, code))
    return table("component type parallelism:int inputs code", rows)


def _describe_input(source: InputSpec) -> str:
    """Component, stream and grouping of an input: ``split.words (fields: word)``."""
    name = source.component
    if source.stream != "default":
        name += f".{source.stream}"
    grouping: str = source.grouping.type
    if source.grouping.fields:
        grouping += f": {'/'.join(source.grouping.fields)}"
    return f"{name} ({grouping})"


def tasks_table(tasks: TaskTable) -> dg.TableMetadataValue:
    """Components and the ids of their tasks."""
    rows = [(name, part.type, part.tasks, len(part.ids)) for name, part in tasks.components.items()]
    return table("component type tasks count:int", rows)


def component_counts(ids: Iterable[int], components: Mapping[int, str]) -> dict[str, int]:
    """Component -> number of its tasks among ``ids``; ``?`` for unknown tasks."""
    counts = Counter(components.get(task, "?") for task in ids)
    return dict(sorted(counts.items()))


def slots_table(
    tasks: Iterable[tuple[WorkerSlot, Sequence[int]]],
    components: Mapping[int, str],
    former_slots: Set[str],
) -> dg.TableMetadataValue:
    """The assignment: slots with their tasks and components.

    ``tasks`` has each worker and its task ids; ``former_slots`` has the keys of the slots that the
    topology used before.
    """
    rows: list[Sequence[Cell]] = []
    for worker, ids in tasks:
        counts = component_counts(ids, components)
        names = ", ".join(f"{name} x{count}" for name, count in counts.items())
        is_kept = worker.slot.key in former_slots
        rows.append((worker.host, worker.port, worker.node, worker.tasks, len(ids), names, is_kept))
    return table("host port:int supervisor tasks count:int components kept:bool", rows)


def picture_markdown(svg: str) -> dg.MarkdownMetadataValue:
    """A picture of tasks on slots, inline, so that it needs no request."""
    return dg.MetadataValue.md(f"![tasks on slots]({data_uri(svg)})")


def unassigned_table(
    unassigned: Mapping[int, str], components: Mapping[int, str]
) -> dg.TableMetadataValue:
    """Tasks without a slot, grouped by the reason."""
    by_reason = multimap(
        ((components.get(task, "?"), reason), task) for task, reason in unassigned.items()
    )
    rows = [
        (component, encode_ranges(tasks), reason)
        for (component, reason), tasks in sorted(by_reason.items())
    ]
    return table("component tasks reason", rows)


def assignment_metadata(
    workers: Sequence[WorkerSlot],
    components: Mapping[int, str],
    name: str,
    caption: str = "tasks on slots",
    kept: Collection[str] = (),
) -> dict[str, Any]:
    """Table, picture and plotted numbers of one assignment of the topology ``name``.

    ``kept`` has the keys of the slots that the topology used before. Dagster plots the numbers over
    time.
    """
    tasks = [(worker, worker.ids) for worker in workers]
    sizes = [len(ids) for _, ids in tasks]
    former_slots = frozenset(kept)
    supervisors = placed_supervisors(tasks, components, name, former_slots)
    picture = slots_picture(supervisors, f"{name}: {caption}", by_component=True)
    # Average tasks of a worker by those of the fullest one: 1.0 is perfectly even, 0.5 twice the
    # average.
    balance = 1.0
    if any(sizes):
        balance = round(sum(sizes) / (len(sizes) * max(sizes)), 4)
    return {
        "assignment": slots_table(tasks, components, former_slots),
        "tasks_on_slots": picture_markdown(picture),
        "workers": len(workers),
        "tasks": sum(sizes),
        "hosts": len({worker.host for worker in workers}),
        "tasks_per_worker_max": max(sizes, default=0),
        "tasks_per_worker_min": min(sizes, default=0),
        "balance": balance,
    }


def nodes_table(versions: Mapping[str, int]) -> dg.TableMetadataValue:
    """ZooKeeper paths and their current data versions."""
    return table("path version:int", list(versions.items()))


def fields_of(report: results.TopologyResult, names: str) -> dict[str, Any]:
    """The fields ``names`` (separated by blanks) of a result."""
    return {name: getattr(report, name) for name in names.split()}


def conf_metadata(report: results.ConfResult) -> dict[str, Any]:
    """Stage 1: id, token, epoch, the normalized conf, components, warnings."""
    components = list(report.topology.components())
    return {
        **fields_of(report, "topology_id token epoch"),
        "conf": dg.MetadataValue.json(mask(report.conf)),
        "components": components_table(report.topology),
        "warnings": notes(report.warnings),
        "warning_count": len(report.warnings),
        "component_count": len(components),
        "executors": sum(spec.parallelism for _, _, spec in components),
        "already_published": report.published,
        "replaces": report.replaces or "nothing",
    }


def code_metadata(report: results.CodeResult) -> dict[str, Any]:
    """Stage 2: the blobs with size and hash, and the number of copies of each."""
    return {
        **fields_of(report, "topology_id degraded"),
        "blobs": table(
            "key bytes:int sha256", [(blob.key, blob.size, blob.sha256) for blob in report.blobs]
        ),
        "copies": table("key copies:int", list(report.copies.items())),
        "code_bytes": sum(blob.size for blob in report.blobs),
        "copies_min": min(report.copies.values(), default=0),
        "copies_wanted": report.wanted_copies,
    }


def tasks_metadata(report: results.TasksResult) -> dict[str, Any]:
    """Stage 3: the tasks and the executors of each component, and the changes of an update."""
    return {
        **fields_of(report, "topology_id tasks workers"),
        "tasks_by_component": tasks_table(report.table),
        "executors_by_component": dg.MetadataValue.json(dict(report.executors)),
        "executors": sum(report.executors.values()),
        **changes_metadata(report.changes),
    }


def changes_metadata(changes: Sequence[results.UpdateChange]) -> dict[str, Any]:
    """Values that an update changes, as a table; empty without a change."""
    if not changes:
        return {}
    rows = [(change.key, change.old_text, change.new_text) for change in changes]
    return {"changes": table("key old new", rows)}


def placement_metadata(
    placement: TopologyPlacement,
    components: Mapping[int, str],
    caption: str = "tasks on slots",
) -> dict[str, Any]:
    """Result of a planner: slots, picture, moved and unassigned tasks, reasons."""
    reasons = [
        (task, components.get(task, "?"), reason)
        for task, reason in sorted(placement.reasons.items())
    ]
    assignment = assignment_metadata(
        placement.workers, components, placement.name, caption, placement.kept
    )
    return {
        **assignment,
        "outcome": placement.status,
        "moved_tasks": placement.moved,
        "unassigned_tasks": len(placement.unassigned),
        "unassigned": unassigned_table(placement.unassigned, components),
        "warnings": notes(placement.warnings),
        "reasons": table("task:int component why", reasons),
    }


def planned_metadata(
    report: results.AssignmentResult, components: Mapping[int, str]
) -> dict[str, Any]:
    """Stage 4: the placement, its planner and the seconds of planning."""
    return {
        **fields_of(report, "topology_id planner"),
        **placement_metadata(report.placement, components),
        "session_seconds": round(report.session_secs, 3),
        "assign_seconds": round(report.assign_secs, 3),
        "supervisors_offered": report.supervisors,
    }


def running_metadata(
    report: results.AssignmentResult, assignment: Assignment, components: Mapping[int, str]
) -> dict[str, Any]:
    """Stage 4 of a topology that runs: the assignment in force, which a rebalance may have made.

    The stage makes no plan then.
    """
    return {
        **fields_of(report, "topology_id"),
        "note": "the topology runs: this is its assignment in force; rebalance it to change that",
        **stored_metadata(assignment, components, report.name),
        "supervisors_offered": report.supervisors,
    }


def stored_metadata(
    assignment: Assignment, components: Mapping[int, str], name: str
) -> dict[str, Any]:
    """The stored assignment."""
    return {
        **assignment_metadata(assignment.workers, components, name),
        "assignment_type": assignment.type,
        "assigned_at": dg.MetadataValue.timestamp(assignment.timestamp_ms / 1000),
    }


def in_force_metadata(
    report: results.RebalanceResult | results.ReassignResult, components: Mapping[int, str]
) -> dict[str, Any]:
    """The assignment after a change, and the version of its node; empty without one."""
    metadata: dict[str, Any] = {}
    if report.assignment is not None:
        metadata = stored_metadata(report.assignment, components, report.name)
    if report.version is not None:
        path = paths.assignment(report.topology_id)
        metadata["zookeeper"] = nodes_table({path: report.version})
    return metadata


def task_components(ops: OperationsContext, topology_id: str) -> dict[int, str]:
    """Task id -> component of a topology, from its tasks in ZooKeeper."""
    tasks = ops.cluster.read_tasks(topology_id)
    return tasks.component_of() if tasks is not None else {}


def published_metadata(
    report: results.PublishResult, components: Mapping[int, str]
) -> dict[str, Any]:
    """Stage 5: the written nodes with their versions, and the attempts."""
    return {
        **fields_of(report, "topology_id status planner attempts replanned"),
        **stored_metadata(report.assignment, components, report.name),
        "zookeeper": nodes_table(report.versions),
        "nodes_written": 0 if report.already else len(report.versions),
        "already_published": report.already,
        "replaced": report.replaced or "nothing",
    }


def active_metadata(report: results.ActivateResult) -> dict[str, Any]:
    """Stage 6: the current status of the topology."""
    return {**fields_of(report, "topology_id status changed"), "base_version": report.version}
