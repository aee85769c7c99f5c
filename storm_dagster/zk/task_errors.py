"""Errors of tasks, the newest ten of each component.

They are in ``/taskerrors/<topology id>/<component>/e<seq>``.
"""

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Corrupt, InvalidRequest
from storm_dagster.model.records import TaskError, TaskTable, decode_record, encode_record
from storm_dagster.zk.state_protocol import ClusterState
from storm_dagster.zk.worker_bounds import bounded_names

_log = logging.getLogger(__name__)

KEPT_ERRORS = 10
"""Errors that are stored of each component."""
_ATTEMPTS = 5
"""Attempts to add an error to the record of its group."""
_MAX_READ_ERRORS = 2 * KEPT_ERRORS
"""Errors that are read of each component, the newest: tasks may add some at the same time."""
_MAX_FORMER_FOLDERS = 16
"""Folders that are read beside those of the topology's components."""
_MAX_ERROR_BYTES = 320 * 1024
"""Largest record of an error: JSON may need six bytes for a character of its text."""
_MAX_ERROR_CHARS = 32 * 1024
"""A longer trace keeps its two ends."""


def _sequence(name: str) -> int:
    """Number in the name of an error node; -1 for another name."""
    digits = name[1:]
    if name.startswith("e") and digits.isascii() and digits.isdigit():
        return int(digits)
    return -1


def _shorten(error: str) -> str:
    if len(error) <= _MAX_ERROR_CHARS:
        return error
    half = _MAX_ERROR_CHARS // 2
    left_out = len(error) - 2 * half
    return f"{error[:half]}\n... {left_out} characters left out ...\n{error[-half:]}"


class _StoredError(NamedTuple):
    """An error node; ``record`` is ``None`` if it is missing or damaged."""

    name: str
    record: TaskError | None
    version: int
    """Data version of the node; -1 without it."""

    @property
    def age_order(self) -> tuple[int, int]:
        """Sort key: the oldest error is first."""
        time = self.record.time if self.record is not None else 0
        return time, _sequence(self.name)


class TaskErrors:
    """Part of the cluster's state: errors of tasks."""

    state: ClusterState

    def report_error(
        self,
        topology_id: str,
        task: int,
        error: str,
        *,
        component: str | None = None,
        host: str = "",
        port: int = 0,
        time: int = 0,
        count: int = 1,
        group: str = "",
    ) -> None:
        """``/taskerrors/<id>/<component>/e<seq>``: store an error of a task.

        The newest ten errors of the component are kept. ``time`` is in epoch seconds. Messages over
        32 Ki characters are shortened. An error of a ``group`` that has a record is added to its
        count, and is dropped if others write that record all the time; without such a record, an
        error without a text is dropped. If no component is given, it is looked up in ``/tasks``;
        ``InvalidRequest`` if the task is not there.
        """
        if not component:
            component = self._component_of(topology_id, task)
        folder = paths.task_errors(topology_id, component)
        record = TaskError(
            task=task,
            host=host,
            port=port,
            time=time,
            error=_shorten(error),
            count=count,
            group=group,
        )
        for _ in range(_ATTEMPTS):
            unread_names, stored_errors = self._read_errors(folder)
            same_group = _last_of_group(stored_errors, record.group)
            if same_group is None:
                break
            name, former, version = same_group
            text = record.error or former.error
            total = former.count + record.count
            merged = record.model_copy(update={"error": text, "count": total})
            with suppress(Conflict):
                self.state.set_data(f"{folder}/{name}", encode_record(merged), version)
                return
        else:
            return
        if record.error:
            self.state.create_sequential(f"{folder}/e", encode_record(record))
            # The stored errors are those before the new one, which counts as well.
            stored_errors.sort(key=lambda stored: stored.age_order)
            excess = max(0, len(stored_errors) + 1 - KEPT_ERRORS)
            excess_names = [stored.name for stored in stored_errors[:excess]]
            # Older ones that another client has added go step by step.
            for name in unread_names[:_MAX_READ_ERRORS] + excess_names:
                self.state.delete_node(f"{folder}/{name}")

    def _component_of(self, topology_id: str, task: int) -> str:
        """Component of a task; ``InvalidRequest`` if ``/tasks`` has no such task."""
        path = paths.tasks(topology_id)
        raw = self.state.get_data(path)
        component = None
        if raw:
            component = decode_record(TaskTable, raw, path).component_of().get(task)
        if component is None:
            raise InvalidRequest(
                f"topology {topology_id} has no task {task}: name the component of the error"
            )
        return component

    def _read_errors(self, folder: str) -> tuple[list[str], list[_StoredError]]:
        """The newest errors of a component, by sequence number, and the names of older ones.

        The names are of errors beyond ``_MAX_READ_ERRORS``, the oldest first: a report never reads
        more.
        """
        all_names = sorted(self.state.find_children(folder) or (), key=_sequence)
        unread_names = all_names[:-_MAX_READ_ERRORS]
        names = all_names[-_MAX_READ_ERRORS:]
        nodes = self.state.get_many([f"{folder}/{name}" for name in names])
        stored_errors: list[_StoredError] = []
        for name, node in zip(names, nodes, strict=True):
            record = None
            version = -1
            if node is not None:
                raw, at = node
                version = at.version
                with suppress(Corrupt):
                    record = decode_record(TaskError, raw, name)
            stored_errors.append(_StoredError(name, record, version))
        return unread_names, stored_errors

    def _component_folders(self, topology_id: str, folders: Sequence[str]) -> list[str]:
        """The folders that are named after components of the topology."""
        path = paths.tasks(topology_id)
        raw = self.state.get_data(path)
        if not raw:
            return []
        table = decode_record(TaskTable, raw, path)
        own = {
            paths.task_errors("", component).rpartition("/")[2] for component in table.components
        }
        return [folder for folder in folders if folder in own]

    def errors_by_component(self, topology_id: str) -> dict[str, list[TaskError]]:
        """Component id -> its errors, newest first."""
        top = paths.task_errors(topology_id)
        all_folders = self.state.find_children(top) or []
        folders = bounded_names(
            top, all_folders, self._component_folders(topology_id, all_folders), _MAX_FORMER_FOLDERS
        )
        lists = self.state.find_children_many([f"{top}/{folder}" for folder in folders])
        locations: list[tuple[str, str]] = []
        for folder, names in zip(folders, lists, strict=True):
            newest_first = sorted(names or (), key=_sequence, reverse=True)
            newest = bounded_names(
                f"{top}/{folder}", newest_first, newest_first[:_MAX_READ_ERRORS], 0
            )
            locations.extend((folder, name) for name in newest)
        nodes = self.state.get_many([f"{top}/{folder}/{name}" for folder, name in locations])
        errors: dict[str, list[TaskError]] = {}
        for (folder, name), node in zip(locations, nodes, strict=True):
            if node is None:
                continue
            if len(node[0]) > _MAX_ERROR_BYTES:
                _log.error("%s/%s/%s is larger than an error may be: left out", top, folder, name)
                continue
            try:
                record = decode_record(TaskError, node[0], f"{top}/{folder}/{name}")
            except Corrupt as error:
                # No decision depends on errors: a damaged one must not hide the others.
                _log.error("%s", error.message)
                continue
            component = folder.replace("%2E", ".").replace("%2F", "/").replace("%25", "%")
            errors.setdefault(component, []).append(record)
        # By time, too: a record to which an error was added keeps its sequence number. The sort is
        # stable.
        for component_errors in errors.values():
            component_errors.sort(key=lambda record: -record.time)
        return errors


def _last_of_group(
    stored_errors: Iterable[_StoredError], group: str
) -> tuple[str, TaskError, int] | None:
    """Name, record and version of the last error of that group.

    ``None`` without one, and for ``""``: such errors have no group.
    """
    last = None
    for name, record, version in stored_errors:
        if group and record is not None and record.group == group:
            last = (name, record, version)
    return last
