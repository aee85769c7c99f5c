"""Running workers asked by nimbus: log levels, stacks of threads, and what tasks keep (keyed state,
dead letters).

Changed levels are kept for workers that begin later.
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
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.model.wire import DeadLetterQuery, LevelChange, Query, StateQuery
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.operations.live.log_levels import keep_log_levels
from storm_dagster.operations.live.worker_requests import ask_worker, link_key_of
from storm_dagster.security.settings import Security

_log = logging.getLogger(__name__)
_ANSWER_SECS = 2.0
_AT_ONCE = 8
_ALL_SECS = 10.0
_MOST = 1000
_AFTER = re.compile(r"(\d{1,9}):(\d{1,15})")


class WorkerLevels:
    """Storm's dynamic log levels."""

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus
        self._security = Security.of(nimbus.conf)

    def change(self, topology: TopologyView, changes: Mapping[str, LevelChange]) -> None:
        """Change levels in every worker of the topology, and in those that will be started in their
        places.

        At the leader. :class:`Unavailable` when a worker did not answer: the others have changed
        then, and that one does when it starts again.
        """
        epoch = self._nimbus.status.require()
        if not changes:
            return
        keep_log_levels(self._nimbus.operations(epoch), topology.id, changes)
        silent = [who for who, answer in self._ask_all(topology, dict(changes)) if answer is None]
        if silent:
            raise Unavailable(
                f"log levels of topology {topology.base.name!r} are kept, and not yet changed at "
                f"{', '.join(sorted(silent))}: those workers did not answer and take them when they start again; try again"
            )

    def current(self, topology: TopologyView) -> dict[str, dict[str, Any]]:
        """Logger -> ``{"level", "secs", "reset"}``: what is changed in any worker that answers."""
        return {
            name: change
            for _, answer in self._ask_all(topology, {})
            for name, change in (answer or {}).items()
        }

    def _ask_all(
        self, topology: TopologyView, changes: dict[str, LevelChange]
    ) -> list[tuple[str, dict[str, Any] | None]]:
        def ask(worker: WorkerSlot) -> tuple[str, dict[str, Any] | None]:
            who, answer = f"{worker.host}:{worker.port}", None
            try:
                answer = _ask(topology, worker, self._security, "log_levels", levels=changes)
            except StormDagsterError as error:
                _log.info("%s gave no log levels: %s", who, error)
            return who, None if answer is None else dict(answer.get("levels") or {})

        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="nimbus-levels") as pool:
            return list(pool.map(ask, topology.workers))


def stacks_of_worker(
    topology: TopologyView, host: str, port: int, security: Security
) -> dict[str, Any]:
    """Thread -> frames of one worker.

    :class:`KeyNotFound` when the topology has no worker there, :class:`Unavailable` when that does
    not run or answer.
    """
    for worker in topology.workers:
        if (worker.host, worker.port) != (host, port):
            continue
        answer = _ask(topology, worker, security, "stacks")
        if answer is None:
            raise Unavailable(
                f"the worker at {host}:{port} does not run at this moment: see its log"
            )
        return answer["stacks"]
    raise KeyNotFound(
        f"topology {topology.base.name!r} has no worker at {host}:{port}".replace("\n", " ")
    )


def stacks_at(view: ClusterView, port: int, security: Security) -> str:
    """The stacks of every worker of the cluster on that port, as text; :class:`KeyNotFound` when
    there is none.
    """
    blocks: list[str] = []
    for topology in view.topologies.values():
        for worker in topology.workers:
            if worker.port != port:
                continue
            live = topology.live_workers.get(worker.slot)
            header = f"topology {topology.id} worker {worker.host}:{port} pid {live.pid if live else '-'}"
            try:
                blocks.append(
                    stacks_text(header, stacks_of_worker(topology, worker.host, port, security))
                )
            except StormDagsterError as error:
                blocks.append(stacks_text(header, None, error.message))
    if not blocks:
        raise KeyNotFound(f"no worker has port {port}: see /api/v1/supervisor/summary")
    return "\n".join(blocks)


def read_state(
    topology: TopologyView,
    component: str,
    security: Security,
    *,
    key: str | None = None,
    limit: str | None = None,
    after: str | None = None,
) -> dict[str, Any]:
    """``{"id", "component", "entries": [{"task", "key", "value"}], "next"}``: a page of at most
    ``limit`` entries.

    Tasks come in ascending order, each with its keys in the order in which they were first set;
    ``next`` (``None`` at the end) is the ``after`` of the following page. A long value has the
    beginning of its text as ``shown``. With ``key`` only that key, by its text or, when that is
    JSON, by the decoded value; each task may have one. :class:`KeyNotFound` for an unknown
    component, :class:`InvalidRequest` for one without state, :class:`Unavailable` while a task of
    it does not run.
    """
    components = _components(topology)
    part = components.get(component)
    if part is None:
        known = ", ".join(sorted(name for name in components if not name.startswith("__")))
        raise KeyNotFound(
            f"topology {topology.base.name!r} has no component {component!r:.80}: it has {known}"
        )

    def question(task: int, offset: int, most: int) -> dict[str, Any]:
        return {
            "op": "state",
            "state": StateQuery(task, _keys(key), offset if key is None else 0, most),
        }

    entries, following = _read_pages(topology, part.ids, security, limit, after, question)
    return {"id": topology.id, "component": component, "entries": entries, "next": following}


def dead_letters(
    topology: TopologyView,
    security: Security,
    *,
    component: str | None = None,
    limit: str | None = None,
    after: str | None = None,
    replay: bool = False,
) -> dict[str, Any]:
    """``{"id", "letters": [...], "next"}``: a page of the dead letters of a spout, or of all; as
    :func:`read_state`.

    With ``replay`` the spouts emit them again; those that were already, or cannot be, are left out.
    """
    spouts = {
        name: part.ids for name, part in _components(topology).items() if part.type == "spout"
    }
    if component is not None and component not in spouts:
        raise KeyNotFound(
            f"topology {topology.base.name!r} has no spout {component!r:.80}: it has {', '.join(spouts)}"
        )

    def question(task: int, number: int, most: int) -> dict[str, Any]:
        return {"op": "dead_letters", "letters": DeadLetterQuery(task, number, most, replay)}

    tasks = sorted(
        task for name, ids in spouts.items() if component in (None, name) for task in ids
    )
    letters, following = _read_pages(topology, tasks, security, limit, after, question)
    return {"id": topology.id, "letters": letters, "next": following}


def _read_pages(
    topology: TopologyView,
    tasks: Iterable[int],
    security: Security,
    limit: str | None,
    after: str | None,
    question: Callable[[int, int, int], dict[str, Any]],
) -> tuple[list[dict[str, Any]], str | None]:
    """The ``entries`` that the workers of these tasks (ascending) give, and where the following
    page begins.

    ``question`` makes the arguments of :func:`_ask` from a task, an offset and the number of
    entries wanted.
    """
    most, first, offset = _limit(limit), *_begin(after)
    deadline = time.monotonic() + _ALL_SECS
    workers = topology_slots(topology)
    entries: list[dict[str, Any]] = []
    for task in tasks:
        if task < first:
            continue
        if len(entries) >= most or time.monotonic() > deadline:
            return entries, f"{task}:0"
        asked = question(task, offset if task == first else 0, most - len(entries))
        page = _ask(topology, workers.get(task), security, secs=5.0, **asked)
        if page is None:
            component = (
                topology.tasks.component_of().get(task) if topology.tasks is not None else None
            )
            raise Unavailable(
                f"task {task} of {component!r} does not run at this moment: see `explain`, ask again"
            )
        entries += [{"task": task, **entry} for entry in page["entries"]]
        if page["next"] is not None:
            return entries, f"{task}:{page['next']}"
    return entries, None


def _ask(
    topology: TopologyView,
    worker: WorkerSlot | None,
    security: Security,
    op: Query,
    secs: float = _ANSWER_SECS,
    **asked: Any,
) -> dict[str, Any] | None:
    """The answer of a worker; ``None`` when no process lives in its slot."""
    live = topology.live_workers.get(worker.slot) if worker is not None else None
    if worker is None or live is None:
        return None
    return ask_worker(
        worker.host, worker.port, live.token, op, secs, link_key_of(security, topology.id), **asked
    )


def _components(topology: TopologyView) -> Mapping[str, ComponentTasks]:
    if topology.tasks is None or topology.assignment is None:
        raise Unavailable(
            f"topology {topology.base.name!r} has no assignment yet: wait until it is healed"
        )
    return topology.tasks.components


def _keys(key: str | None) -> list[Any]:
    if key is None:
        return []
    try:
        meant = json.loads(key)
    except ValueError:
        return [key]
    return [key] if isinstance(meant, dict) else [key, meant]


def _limit(text: str | None) -> int:
    if text is None:
        return 100
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= _MOST:
        raise InvalidRequest(f"limit must be a whole number from 1 to {_MOST}, got {text!r:.40}")
    return int(text)


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
