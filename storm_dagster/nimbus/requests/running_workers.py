"""Requests of nimbus to running workers.

They concern log levels, stacks of threads, keyed state and dead letters. Changed levels are stored
for workers that start later.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from storm_dagster.core.snapshot.statuses import topology_slots
from storm_dagster.http.logs.pages import stacks_text
from storm_dagster.model.errors import InvalidRequest, KeyNotFound, StormDagsterError, Unavailable
from storm_dagster.model.records import ComponentTasks, WorkerSlot
from storm_dagster.model.requests import parse_number
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.model.wire import DeadLetterQuery, LevelChange, Query, StateQuery
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.operations.live.log_levels import keep_log_levels
from storm_dagster.operations.live.worker_requests import WorkerLinks, ask_worker

_log = logging.getLogger(__name__)
_ANSWER_SECS = 2.0
"""Longest wait for the answer of one worker."""
_READ_SECS = 5.0
"""Longest wait for a page of state or dead letters of one task."""
_AT_ONCE = 8
"""Workers whose log levels are exchanged at the same time."""
_ALL_SECS = 10.0
"""Time after which a page ends before its next task."""
_DEFAULT_LIMIT = 100
"""Entries of a page without ``limit``."""
_MAX_LIMIT = 1000
"""Largest ``limit``."""
_AFTER = re.compile(r"(\d{1,9}):(\d{1,15})")
"""``next`` of a page: task and offset."""


class WorkerLevels:
    """Storm's dynamic log levels, in all workers of a topology."""

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus
        self._links = WorkerLinks.of(nimbus.conf)

    def change(self, topology: TopologyView, changes: Mapping[str, LevelChange]) -> None:
        """Change levels in every worker of the topology, now and at its later starts.

        Only at the leader. :class:`Unavailable` names the workers that did not answer: the others
        have changed then, and those change at their next start.
        """
        epoch = self._nimbus.status.require()
        if not changes:
            return
        keep_log_levels(self._nimbus.operations(epoch), topology.id, changes)
        levels_by_address = self._exchange_levels(topology, dict(changes))
        silent = [address for address, levels in levels_by_address if levels is None]
        if silent:
            raise Unavailable(
                f"log levels of topology {topology.base.name!r} are kept, and not yet changed at "
                f"{', '.join(sorted(silent))}: those workers did not answer and take them when "
                "they restart; repeat the request to change them now"
            )

    def current(self, topology: TopologyView) -> dict[str, dict[str, Any]]:
        """Logger -> ``{"level", "secs", "reset"}``, as changed in workers that answer.

        If workers have different changes of a logger, one of them is returned.
        """
        changes: dict[str, dict[str, Any]] = {}
        for _, levels in self._exchange_levels(topology, {}):
            changes.update(levels or {})
        return changes

    def _exchange_levels(
        self, topology: TopologyView, changes: dict[str, LevelChange]
    ) -> list[tuple[str, dict[str, Any] | None]]:
        """Send ``changes`` to every worker, and return (address, changed levels) of each.

        Without changes the levels are only read. The levels are all that are changed there, also by
        former requests. ``None``: the worker gave an error, or no process runs in its slot.
        """

        def exchange_with(worker: WorkerSlot) -> tuple[str, dict[str, Any] | None]:
            address = f"{worker.host}:{worker.port}"
            try:
                answer = _ask(topology, worker, self._links, "log_levels", levels=changes)
            except StormDagsterError as error:
                _log.info("%s gave no log levels: %s", address, error)
                return address, None
            if answer is None:
                return address, None
            return address, dict(answer.get("levels") or {})

        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="nimbus-levels") as pool:
            return list(pool.map(exchange_with, topology.workers))


def stacks_of_worker(
    topology: TopologyView, host: str, port: int, links: WorkerLinks
) -> dict[str, Any]:
    """Thread -> frames, of one worker.

    :class:`KeyNotFound` if the topology has no worker at that address, :class:`Unavailable` if the
    worker does not run or answer.
    """
    for worker in topology.workers:
        if (worker.host, worker.port) != (host, port):
            continue
        answer = _ask(topology, worker, links, "stacks")
        if answer is None:
            raise Unavailable(
                f"the worker at {host}:{port} does not run at this moment: see its log"
            )
        return answer["stacks"]
    raise KeyNotFound(
        f"topology {topology.base.name!r} has no worker at {host}:{port}".replace("\n", " ")
    )


def stacks_at(view: ClusterView, port: int, links: WorkerLinks) -> str:
    """Stacks of every worker of the cluster on that port, as text.

    :class:`KeyNotFound` if no worker has it.
    """
    blocks: list[str] = []
    for topology in view.topologies.values():
        for worker in topology.workers:
            if worker.port != port:
                continue
            live = topology.live_workers.get(worker.slot)
            pid = live.pid if live else "-"
            header = f"topology {topology.id} worker {worker.host}:{port} pid {pid}"
            try:
                stacks = stacks_of_worker(topology, worker.host, port, links)
                text = stacks_text(header, stacks)
            except StormDagsterError as error:
                text = stacks_text(header, None, error.message)
            blocks.append(text)
    if not blocks:
        raise KeyNotFound(f"no worker has port {port}: see /api/v1/supervisor/summary")
    return "\n".join(blocks)


def read_state(
    topology: TopologyView,
    component: str,
    links: WorkerLinks,
    *,
    key: str | None = None,
    limit: str | None = None,
    after: str | None = None,
) -> dict[str, Any]:
    """Read a page of at most ``limit`` entries of a component's state.

    The page is ``{"id", "component", "entries": [{"task", "key", "value"}], "next"}``. Tasks come
    in ascending order, each with its keys in the order in which they were first set; ``next``
    (``None`` at the end) is the ``after`` of the following page. A long value has the beginning of
    its text as ``shown``. With ``key`` only that key, by its text or, if the text is JSON, by the
    decoded value; each task may have one. :class:`KeyNotFound` for an unknown component,
    :class:`InvalidRequest` for one without state, :class:`Unavailable` while a task of it does not
    run.
    """
    components = _components(topology)
    tasks = components.get(component)
    if tasks is None:
        names = ", ".join(sorted(name for name in components if not name.startswith("__")))
        raise KeyNotFound(
            f"topology {topology.base.name!r} has no component {component!r:.80}: it has {names}"
        )
    keys = _keys(key)

    def arguments(task: int, offset: int, count: int) -> dict[str, Any]:
        if key is not None:
            offset = 0  # An offset counts all keys of the task, but only ``key`` is wanted.
        return {"op": "state", "state": StateQuery(task, keys, offset, count)}

    entries, next_page = _read_pages(topology, tasks.ids, links, limit, after, arguments)
    return {"id": topology.id, "component": component, "entries": entries, "next": next_page}


def dead_letters(
    topology: TopologyView,
    links: WorkerLinks,
    *,
    component: str | None = None,
    limit: str | None = None,
    after: str | None = None,
    replay: bool = False,
    delete_older_secs: float | None = None,
) -> dict[str, Any]:
    """Read a page of the dead letters of a spout, or of all spouts.

    The page is ``{"id", "letters": [...], "next"}``, like that of :func:`read_state`. With
    ``replay`` the spouts emit the letters once more; letters that were emitted already, or cannot
    be, are left out. With ``delete_older_secs`` the letters whose last failure is at least as long
    ago are deleted, and the page has these.
    """
    spouts = {
        name: tasks.ids for name, tasks in _components(topology).items() if tasks.type == "spout"
    }
    if component is not None and component not in spouts:
        raise KeyNotFound(
            f"topology {topology.base.name!r} has no spout {component!r:.80}: "
            f"it has {', '.join(spouts)}"
        )
    spout_tasks: list[int] = []
    for name, task_ids in spouts.items():
        if component in (None, name):
            spout_tasks += task_ids

    def arguments(task: int, offset: int, count: int) -> dict[str, Any]:
        query = DeadLetterQuery(task, offset, count, replay, delete_older_secs)
        return {"op": "dead_letters", "letters": query}

    letters, next_page = _read_pages(topology, sorted(spout_tasks), links, limit, after, arguments)
    return {"id": topology.id, "letters": letters, "next": next_page}


def _read_pages(
    topology: TopologyView,
    tasks: Iterable[int],
    links: WorkerLinks,
    limit: str | None,
    after: str | None,
    arguments: Callable[[int, int, int], dict[str, Any]],
) -> tuple[list[dict[str, Any]], str | None]:
    """Read the entries of tasks; return them and the start of the next page.

    The start is ``None`` at the end. The tasks are in ascending order. ``limit`` and ``after`` are
    texts of the request. ``arguments`` makes the arguments of :func:`_ask` from a task, an offset
    and a maximum number of entries.
    """
    max_entries = _limit(limit)
    first_task, first_offset = _begin(after)
    deadline = time.monotonic() + _ALL_SECS
    workers = topology_slots(topology)
    entries: list[dict[str, Any]] = []
    for task in tasks:
        if task < first_task:
            continue
        if len(entries) >= max_entries or time.monotonic() > deadline:
            return entries, f"{task}:0"
        offset = first_offset if task == first_task else 0
        page = _ask(
            topology,
            workers.get(task),
            links,
            secs=_READ_SECS,
            **arguments(task, offset, max_entries - len(entries)),
        )
        if page is None:
            component = None
            if topology.tasks is not None:
                component = topology.tasks.component_of().get(task)
            raise Unavailable(
                f"task {task} of {component!r} does not run at this moment: "
                "see `explain`, then repeat the request"
            )
        entries += [{"task": task, **entry} for entry in page["entries"]]
        if page["next"] is not None:
            return entries, f"{task}:{page['next']}"
    return entries, None


def _ask(
    topology: TopologyView,
    worker: WorkerSlot | None,
    links: WorkerLinks,
    op: Query,
    secs: float = _ANSWER_SECS,
    **fields: Any,
) -> dict[str, Any] | None:
    """Send a request to a worker and return its answer.

    ``fields`` are those of ``op``. ``None`` if no process runs in the worker's slot.
    """
    if worker is None:
        return None
    live = topology.live_workers.get(worker.slot)
    if live is None:
        return None
    key, trusted = links.to(topology)
    return ask_worker(worker.host, worker.port, live.token, op, secs, key, trusted, **fields)


def _components(topology: TopologyView) -> Mapping[str, ComponentTasks]:
    """Components with their tasks; :class:`Unavailable` while the topology is not placed."""
    if topology.tasks is None or topology.assignment is None:
        raise Unavailable(
            f"topology {topology.base.name!r} has no assignment yet: wait until it is healed"
        )
    return topology.tasks.components


def _keys(key: str | None) -> list[Any]:
    """Keys that a text may mean: the text and, if it is JSON, its value.

    A JSON object is only its text, because no key is a mapping.
    """
    if key is None:
        return []
    try:
        value = json.loads(key)
    except ValueError:
        return [key]
    if isinstance(value, dict):
        return [key]
    return [key, value]


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LIMIT
    return parse_number("limit", text, lowest=1, highest=_MAX_LIMIT)


def _begin(after: str | None) -> tuple[int, int]:
    """Task and offset at which the page begins."""
    if after is None:
        return 0, 0
    match = _AFTER.fullmatch(after)
    if match is None:
        raise InvalidRequest(
            f"after must be `next` of an earlier page, such as 5:100, got {after!r:.40}"
        )
    return int(match[1]), int(match[2])
