"""Pages of what the tasks of a running topology keep: keyed state and dead letters, read from their workers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from storm_dagster.model.errors import InvalidRequest, KeyNotFound, Unavailable
from storm_dagster.model.security import Security
from storm_dagster.model.view import TopologyView
from storm_dagster.model.wire import LetterQuestion, StateQuestion
from storm_dagster.operations.live.worker_requests import ask_worker, link_key_of

_ALL_SECS = 10.0
_MOST = 1000
_AFTER = re.compile(r"(\d{1,9}):(\d{1,15})")


def read_state(
    topology: TopologyView,
    component: str,
    security: Security,
    *,
    key: str | None = None,
    limit: str | None = None,
    after: str | None = None,
) -> dict[str, Any]:
    """``{"id", "component", "entries": [{"task", "key", "value"}], "next"}``: a page of at most ``limit`` entries.

    Tasks come in ascending order, each with its keys in the order in which they were first set; ``next`` (``None`` at
    the end) is the ``after`` of the following page. A long value has the beginning of its text as ``shown``. With
    ``key`` only that key, by its text or, when that is JSON, by the decoded value; each task may have one.
    :class:`KeyNotFound` for an unknown component, :class:`InvalidRequest` for one without state,
    :class:`Unavailable` while a task of it does not run.
    """
    if topology.tasks is None or topology.assignment is None:
        raise Unavailable(f"topology {topology.base.name!r} has no assignment yet: wait until it is healed")
    part = topology.tasks.components.get(component)
    if part is None:
        known = ", ".join(sorted(name for name in topology.tasks.components if not name.startswith("__")))
        raise KeyNotFound(f"topology {topology.base.name!r} has no component {component!r:.80}: it has {known}")
    entries, following = _read_pages(
        topology,
        part.ids,
        security,
        limit,
        after,
        lambda task, offset, most: {
            "op": "state",
            "state": StateQuestion(task, _keys(key), offset if key is None else 0, most),
        },
    )
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
    """``{"id", "letters": [...], "next"}``: a page of the dead letters of a spout, or of all; as :func:`read_state`.

    With ``replay`` the spouts emit them again; those that were already, or cannot be, are left out.
    """
    if topology.tasks is None or topology.assignment is None:
        raise Unavailable(f"topology {topology.base.name!r} has no assignment yet: wait until it is healed")
    spouts = {name: part.ids for name, part in topology.tasks.components.items() if part.type == "spout"}
    if component is not None and component not in spouts:
        raise KeyNotFound(f"topology {topology.base.name!r} has no spout {component!r:.80}: it has {', '.join(spouts)}")
    letters, following = _read_pages(
        topology,
        sorted(task for name, ids in spouts.items() if component in (None, name) for task in ids),
        security,
        limit,
        after,
        lambda task, number, most: {"op": "dead_letters", "letters": LetterQuestion(task, number, most, replay)},
    )
    return {"id": topology.id, "letters": letters, "next": following}


def _read_pages(
    topology: TopologyView,
    tasks: Iterable[int],
    security: Security,
    limit: str | None,
    after: str | None,
    question: Callable[[int, int, int], dict[str, Any]],
) -> tuple[list[dict[str, Any]], str | None]:
    """The ``entries`` that the workers of these tasks (ascending) give, and where the following page begins.

    ``question`` makes the arguments of ``ask_worker`` from a task, an offset and the number of entries wanted."""
    assert topology.assignment is not None
    most, first, offset = _limit(limit), *_begin(after)
    link_key, deadline = link_key_of(security, topology.id), time.monotonic() + _ALL_SECS
    workers = {task: worker for worker in topology.assignment.workers for task in worker.ids}
    entries: list[dict[str, Any]] = []
    for task in tasks:
        if task < first:
            continue
        if len(entries) >= most or time.monotonic() > deadline:
            return entries, f"{task}:0"
        worker = workers.get(task)
        live = topology.live_workers.get(worker.slot) if worker is not None else None
        if worker is None or live is None:
            component = topology.tasks.component_of().get(task) if topology.tasks is not None else None
            raise Unavailable(f"task {task} of {component!r} does not run at this moment: see `explain`, ask again")
        asked = question(task, offset if task == first else 0, most - len(entries))
        page = ask_worker(worker.host, worker.port, live.token, timeout=5.0, link_key=link_key, **asked)
        entries += [{"task": task, **entry} for entry in page["entries"]]
        if page["next"] is not None:
            return entries, f"{task}:{page['next']}"
    return entries, None


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
        raise InvalidRequest(f"after must be `next` of an earlier page, such as 5:100, got {after!r:.40}")
    return int(match[1]), int(match[2])
