"""State of tasks (``context.state``) outside a worker: for tests and tools."""

import os
from pathlib import Path

from storm_dagster.api.state import TaskState
from storm_dagster.worker.state.log_files import read_newest
from storm_dagster.worker.state.storage import open_task_log
from storm_dagster.worker.state.task_store import TaskStore, TaskView, task_folder


def open_task_state(folder: Path, topology: str, component: str, task: int) -> TaskState:
    """Open the state of a task as its worker does.

    ``folder`` is ``topology.state.dir``. From then on a worker that has it open is refused: to read
    the state of a running topology, use :func:`read_task_states`.
    """
    path = task_folder(folder, topology, component, task)
    return TaskState(TaskStore(open_task_log(path, lambda: True)))


def read_task_states(folder: Path, topology: str, component: str) -> dict[int, TaskState]:
    """Current saved state of each task of a component, by task id.

    Its ``save`` is refused. ``folder`` is ``topology.state.dir``, or any folder above it, such as
    the HOME of a cluster. The tasks may run.
    """
    component_folder = task_folder(Path(), topology, component, 0).parent
    states: dict[int, TaskState] = {}
    # Not Path.glob, which raises if a folder disappears during the walk.
    for root, names, _ in os.walk(folder):
        if not Path(root).match(str(component_folder)):
            continue
        for name in names:
            task, _, suffix = name.partition(".")
            if suffix == "state" and task.isdecimal():
                path = Path(root, name)
                states[int(task)] = TaskState(TaskView(path, read_newest(path, 0)))
    return states
