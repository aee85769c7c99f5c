"""Waiting for a Dagster run, and then for every task to run."""

import time
from collections.abc import Callable
from typing import Any

from storm_dagster.client.http import NimbusClient
from storm_dagster.client.leader import UnavailableAtLeader
from storm_dagster.host.waiting import Backoff
from storm_dagster.model.errors import (
    InvalidRequest,
    NotAlive,
    StormDagsterError,
    Unavailable,
    error_from_document,
)

Progress = Callable[[str, str], None]
"""Called with (step, state): ``("assignment", "SUCCESS")``, ``("tasks", "3 of 8 run")``."""


_TASKS_PAUSE_SECS = 0.25
"""Workers come up within a second or two: polling seldom would be most of the wait."""

_GROWTH = 1.2
"""Factor from one pause to the next."""
_SILENCE_PAUSE_SECS = 1.0
_DAGSTER_STEP = "Dagster"
"""Progress step that is shown while Dagster does not respond."""


def _run_error(run_id: str, document: dict[str, Any]) -> StormDagsterError:
    error = document.get("error")
    if isinstance(error, dict) and error.get("type"):
        return error_from_document({"error": error})
    detail = (
        str(error.get("message")) if isinstance(error, dict) else str(error or "no reason given")
    )
    return StormDagsterError(
        f"run {run_id} ended as {document.get('status')}: {detail}; see {document.get('url') or 'the Dagster UI'}"
    )


class _DagsterSilence:
    """Time in which the leader gets no response from Dagster about a run that goes on."""

    def __init__(self, run_id: str, longest_secs: float, progress: Progress | None) -> None:
        self._run_id = run_id
        self._longest_secs = longest_secs
        self._progress = progress or (lambda step, state: None)
        self._since: float | None = None

    def go_on(self, error: Unavailable, deadline: float) -> None:
        """Note one more call without a response; :class:`Unavailable` when the silence has lasted
        too long.
        """
        now = time.monotonic()
        if self._since is None:
            self._since = now
            self._progress(_DAGSTER_STEP, "does not respond")
        if now >= min(deadline, self._since + self._longest_secs):
            raise Unavailable(f"run {self._run_id} may still go on, but {error.message}") from error

    def end(self) -> None:
        """Note that Dagster responds."""
        if self._since is not None:
            self._since = None
            self._progress(_DAGSTER_STEP, "SUCCESS")


def wait_for_run(
    nimbus: NimbusClient,
    run_id: str,
    *,
    deadline: float,
    progress: Progress | None = None,
    on_document: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """The finished run's document; the typed error of a run that failed.

    ``deadline`` is of the monotonic clock; :class:`Unavailable` when it passes (the run goes on). A
    Dagster that does not respond for a while does not end the run, so it does not end the wait
    either: it may be silent for as long as it may take to launch a run. ``on_document`` gets each
    document; what it raises ends the wait.
    """
    shown: dict[str, str] = {}
    pauses = Backoff(0.1, 0.2, factor=_GROWTH)
    silence = _DagsterSilence(run_id, nimbus.launch_secs, progress)
    while True:
        try:
            document = nimbus.get(f"/v1/runs/{run_id}")
        except UnavailableAtLeader as error:
            silence.go_on(error, deadline)
            time.sleep(_SILENCE_PAUSE_SECS)
            continue
        silence.end()
        for step in document.get("steps", ()):
            name, status = str(step.get("name")), str(step.get("status"))
            if progress is not None and status != "PENDING" and shown.get(name) != status:
                shown[name] = status
                progress(name, status)
        if document.get("finished"):
            if document.get("status") != "SUCCESS":
                raise _run_error(run_id, document)
            return document
        on_document(document)
        if time.monotonic() >= deadline:
            queued = document.get("status") == "QUEUED"
            where = (
                " (the run queue is full: see concurrency.runs.max_concurrent_runs)"
                if queued
                else ""
            )
            raise Unavailable(
                f"run {run_id} is still {document.get('status')}{where}: it goes on; see it in the Dagster UI "
                f"({document.get('url') or 'no URL known'})"
            )
        time.sleep(pauses.next_pause())


def wait_for_tasks(
    nimbus: NimbusClient, name: str, *, deadline: float, progress: Progress | None = None
) -> dict[str, Any]:
    """The topology's document once every one of its tasks runs; :class:`Unavailable` at the
    deadline.
    """
    pauses = Backoff(0.05, _TASKS_PAUSE_SECS, factor=_GROWTH)
    shown = ""
    while True:
        document = nimbus.get(f"/v1/topologies/{name}")
        tasks = document.get("tasks", [])
        running = sum(1 for task in tasks if task.get("status") == "running")
        state = f"{running} of {len(tasks)} run"
        if progress is not None and state != shown:
            shown = state
            progress("tasks", state)
        if tasks and running == len(tasks):
            return document
        if time.monotonic() >= deadline:
            left = [task for task in tasks if task.get("status") != "running"]
            waiting = [
                f"{task.get('id')} ({task.get('component')}, {task.get('status')})" for task in left
            ]
            errors = [
                str(error.get("error", "")).strip().splitlines()
                for error in document.get("errors", [])
            ]
            newest = f"; newest error: {errors[0][-1]}" if errors and errors[0] else ""
            raise Unavailable(
                f"topology {name!r}: {running} of {len(tasks)} tasks run, waiting for {', '.join(waiting[:8])}{newest}: "
                f"see `storm-dagster show {name}` and `storm-dagster logs {name}`"
            )
        time.sleep(pauses.next_pause())


def find_topology(nimbus: NimbusClient, name: str) -> dict[str, Any] | None:
    """The topology's document; ``None`` when it is gone."""
    try:
        return nimbus.get(f"/v1/topologies/{name}")
    except NotAlive:
        return None


def list_operations(nimbus: NimbusClient) -> list[dict[str, Any]]:
    """Rows of ``GET /v1/operations``; none of a nimbus of the release before, which lacks it."""
    try:
        document = nimbus.get("/v1/operations")
    except InvalidRequest:
        return []
    return list(document.get("operations", []))


def wait_for_status(
    nimbus: NimbusClient,
    name: str,
    done: Callable[[dict[str, Any] | None], bool],
    *,
    deadline: float,
    what: str,
) -> dict[str, Any] | None:
    """The topology's document (``None``: it is gone) once ``done`` holds; :class:`Unavailable`
    else.
    """
    pauses = Backoff(0.1, 1.0, factor=_GROWTH)
    while True:
        document = find_topology(nimbus, name)
        if done(document):
            return document
        if time.monotonic() >= deadline:
            status = document.get("status") if document else "gone"
            raise Unavailable(
                f"topology {name!r} is {status}, waited for {what}: it goes on; ask `list` later"
            )
        time.sleep(pauses.next_pause())
