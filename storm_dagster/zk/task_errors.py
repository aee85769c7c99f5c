"""Errors of tasks: ``/taskerrors/<topology id>/<component>/e<seq>``, the newest ten of each component."""

from __future__ import annotations

import logging

from storm_dagster.model import paths
from storm_dagster.model.errors import Corrupt
from storm_dagster.model.records import TaskError, TaskTable, decode_record, encode_record
from storm_dagster.zk.cluster_state import ClusterState

_log = logging.getLogger(__name__)

KEPT_ERRORS = 10
_LONGEST_ERROR = 32 * 1024  # characters; a trace longer than that keeps its two ends


def _sequence(name: str) -> int:
    digits = name[1:]
    return int(digits) if name[:1] == "e" and digits.isascii() and digits.isdigit() else -1


def _shortened(error: str) -> str:
    if len(error) <= _LONGEST_ERROR:
        return error
    half = _LONGEST_ERROR // 2
    left_out = len(error) - 2 * half
    return f"{error[:half]}\n... {left_out} characters left out ...\n{error[-half:]}"


def component_of_task(state: ClusterState, topology_id: str, task: int) -> str | None:
    """The component that the task belongs to, by ``/tasks``; ``None`` when it is not there."""
    path = paths.tasks(topology_id)
    raw = state.get_data(path)
    return decode_record(TaskTable, raw, path).component_of().get(task) if raw else None


def report_error(state: ClusterState, topology_id: str, component: str, record: TaskError) -> None:
    """Keep the error, and of the component's errors the newest ten. Messages over 32 Ki characters are shortened."""
    folder = paths.task_errors(topology_id, component)
    record = record.model_copy(update={"error": _shortened(record.error)})
    state.create_sequential(f"{folder}/e", encode_record(record))
    names = sorted(state.find_children(folder) or (), key=_sequence)
    for name in names[:-KEPT_ERRORS]:
        state.delete_node(f"{folder}/{name}")


def read_errors(state: ClusterState, topology_id: str) -> dict[str, list[TaskError]]:
    """Component id -> its errors, newest first; a topology without any gives an empty map."""
    top = paths.task_errors(topology_id)
    folders = state.find_children(top) or []
    listed = state.find_children_many([f"{top}/{folder}" for folder in folders])
    flat = [
        (folder, name)
        for folder, names in zip(folders, listed, strict=True)
        for name in sorted(names or (), key=_sequence, reverse=True)
    ]
    found = state.get_many([f"{top}/{folder}/{name}" for folder, name in flat])
    errors: dict[str, list[TaskError]] = {}
    for (folder, name), node in zip(flat, found, strict=True):
        if node is None:
            continue
        try:
            record = decode_record(TaskError, node[0], f"{top}/{folder}/{name}")
        except Corrupt as error:
            # Nothing is decided from errors: a damaged one must not hide the others.
            _log.error("%s", error.message)
            continue
        component = folder.replace("%2E", ".").replace("%2F", "/").replace("%25", "%")
        errors.setdefault(component, []).append(record)
    return errors
