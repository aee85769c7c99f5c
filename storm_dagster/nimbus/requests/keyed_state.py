"""The keyed state of a running topology, read from the workers whose tasks keep it."""

from __future__ import annotations

import json
import re
import time
from typing import Any

from storm_dagster.model.errors import InvalidRequest, KeyNotFound, Unavailable
from storm_dagster.model.security import Security
from storm_dagster.model.view import TopologyView
from storm_dagster.model.wire import StateQuestion
from storm_dagster.operations.live.worker_curve import link_key_of
from storm_dagster.operations.live.worker_requests import ask_worker

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
    most, first, offset = _limit(limit), *_begin(after)
    link_key, deadline = link_key_of(security, topology.id), time.monotonic() + _ALL_SECS
    workers = {task: worker for worker in topology.assignment.workers for task in worker.ids}
    entries: list[dict[str, Any]] = []
    following: str | None = None
    for task in part.ids:
        if task < first:
            continue
        if following is None and (len(entries) >= most or time.monotonic() > deadline):
            following = f"{task}:0"
        if following is not None:
            break
        worker = workers.get(task)
        live = topology.live_workers.get(worker.slot) if worker is not None else None
        if worker is None or live is None:
            raise Unavailable(f"task {task} of {component!r} does not run at this moment: see `explain`, ask again")
        question = StateQuestion(task, _keys(key), offset if task == first and key is None else 0, most - len(entries))
        page = ask_worker(worker.host, worker.port, live.token, "state", 5.0, link_key, state=question)
        entries += [{"task": task, **entry} for entry in page["entries"]]
        if page["next"] is not None:
            following = f"{task}:{page['next']}"
    return {"id": topology.id, "component": component, "entries": entries, "next": following}


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
