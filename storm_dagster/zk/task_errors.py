"""Errors of tasks: ``/taskerrors/<topology id>/<component>/e<seq>``, the newest ten of each
component.
"""

import logging
from contextlib import suppress

from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Corrupt, InvalidRequest
from storm_dagster.model.records import TaskError, TaskTable, decode_record, encode_record
from storm_dagster.zk.state_protocol import ClusterState

_log = logging.getLogger(__name__)

KEPT_ERRORS = 10
_TRIES = 5
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


class TaskErrors:
    """The part of the cluster's state that errors of tasks are in."""

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
        """``/taskerrors/<id>/<component>/e<seq>``: keep the error, and of the component's errors
        the newest ten.

        ``time`` is in epoch seconds. Messages over 32 Ki characters are shortened. One of a
        ``group`` that is kept is added to its count; without a text it is dropped if none is. The
        component is looked up in ``/tasks`` when it is not given; ``InvalidRequest`` when that does
        not know the task.
        """
        if not component:
            path = paths.tasks(topology_id)
            raw = self.state.get_data(path)
            component = (
                decode_record(TaskTable, raw, path).component_of().get(task) if raw else None
            )
        if component is None:
            raise InvalidRequest(
                f"topology {topology_id} has no task {task}: name the component of the error"
            )
        folder = paths.task_errors(topology_id, component)
        record = TaskError(
            task=task,
            host=host,
            port=port,
            time=time,
            error=_shortened(error),
            count=count,
            group=group,
        )
        for _ in range(_TRIES):
            names = sorted(self.state.find_children(folder) or (), key=_sequence)
            kept: list[tuple[int, str]] = []
            same = None
            for name, node in zip(
                names, self.state.get_many([f"{folder}/{name}" for name in names]), strict=True
            ):
                try:
                    known = decode_record(TaskError, node[0], name) if node is not None else None
                except Corrupt:
                    known = None
                kept.append((known.time if known is not None else 0, name))
                if (
                    node is not None
                    and known is not None
                    and record.group
                    and known.group == record.group
                ):
                    same = (name, known, node[1].version)
            if same is None:
                break
            name, known, version = same
            both = {"error": record.error or known.error, "count": known.count + record.count}
            with suppress(Conflict):
                self.state.set_data(
                    f"{folder}/{name}", encode_record(record.model_copy(update=both)), version
                )
                return
        else:
            return
        if record.error:
            self.state.create_sequential(f"{folder}/e", encode_record(record))
            kept.sort(key=lambda one: (one[0], _sequence(one[1])))
            for _, name in kept[: max(0, len(kept) + 1 - KEPT_ERRORS)]:
                self.state.delete_node(f"{folder}/{name}")

    def errors_by_component(self, topology_id: str) -> dict[str, list[TaskError]]:
        """Component id -> its errors, newest first; a topology without any gives an empty map."""
        top = paths.task_errors(topology_id)
        folders = self.state.find_children(top) or []
        listed = self.state.find_children_many([f"{top}/{folder}" for folder in folders])
        flat = [
            (folder, name)
            for folder, names in zip(folders, listed, strict=True)
            for name in sorted(names or (), key=_sequence, reverse=True)
        ]
        found = self.state.get_many([f"{top}/{folder}/{name}" for folder, name in flat])
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
        # A record to which another error was added is older than its time; equal times stay in
        # order.
        return {
            component: sorted(found, key=lambda one: -one.time)
            for component, found in errors.items()
        }
