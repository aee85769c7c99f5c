"""Waiting for Dagster runs, running tasks, and statuses of topologies."""

import time
from collections.abc import Callable, Mapping
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
"""Workers start within a second or two: with longer pauses, polling would be most of the wait."""
_GROWTH = 1.2
"""Factor from one pause to the next."""
_SILENCE_PAUSE_SECS = 1.0
"""Pause between two calls while Dagster does not respond."""
_DAGSTER_STEP = "Dagster"
"""Progress step that is shown while Dagster does not respond."""
_MAX_NAMED_TASKS = 8
"""Number of tasks that the error of a wait names."""


class RunContinues(Unavailable):
    """The wait for a run, or for its effect, ended before it; both continue."""


def _run_error(run_id: str, document: dict[str, Any]) -> StormDagsterError:
    """The typed error of a failed run, by its document.

    Without a type of this package in the document, it is a :class:`StormDagsterError` that names
    the run and its page.
    """
    error = document.get("error")
    if not isinstance(error, dict):
        detail = str(error or "no reason given")
    elif error.get("type"):
        return error_from_document({"error": error})
    else:
        detail = str(error.get("message"))
    return StormDagsterError(
        f"run {run_id} ended as {document.get('status')}: {detail}; "
        f"see {document.get('url') or 'the Dagster UI'}"
    )


class _DagsterSilence:
    """Time in which the leader gets no response from Dagster about a run."""

    def __init__(self, run_id: str, max_secs: float, progress: Progress | None) -> None:
        self._run_id = run_id
        self._max_secs = max_secs
        self._progress = progress or (lambda step, state: None)
        self._since: float | None = None
        """Time of the first call without a response; ``None`` while Dagster responds."""

    def extend(self, error: Unavailable, deadline: float) -> None:
        """Record a call without a response, whose error is ``error``.

        :class:`Unavailable` at ``deadline``, or if the silence has lasted for ``max_secs``.
        """
        now = time.monotonic()
        if self._since is None:
            self._since = now
            self._progress(_DAGSTER_STEP, "does not respond")
        if now >= min(deadline, self._since + self._max_secs):
            raise RunContinues(
                f"run {self._run_id} may still continue, but {error.message}"
            ) from error

    def end(self) -> None:
        """Record that Dagster responds."""
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
    on_failure: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Wait for a run and return its document; raise the typed error of a failed run.

    ``deadline`` is of the monotonic clock; :class:`RunContinues` when it passes.
    While Dagster does not respond, the run continues, and so does the wait: Dagster may be silent
    for the time that the launch of a run may take. ``on_document`` is called with each document of
    the running run; its errors end the wait. ``on_failure`` is called before the error of a run
    that has ended is raised.
    """
    reported: dict[str, str] = {}
    pauses = Backoff(0.1, 0.2, factor=_GROWTH)
    silence = _DagsterSilence(run_id, nimbus.launch_secs, progress)
    while True:
        try:
            document = nimbus.get(f"/v1/runs/{run_id}")
        except UnavailableAtLeader as error:
            silence.extend(error, deadline)
            time.sleep(_SILENCE_PAUSE_SECS)
            continue
        silence.end()
        for step in document.get("steps", ()):
            name = str(step.get("name"))
            status = str(step.get("status"))
            if progress is not None and status != "PENDING" and reported.get(name) != status:
                reported[name] = status
                progress(name, status)
        if document.get("finished"):
            if document.get("status") != "SUCCESS":
                on_failure()
                raise _run_error(run_id, document)
            return document
        on_document(document)
        if time.monotonic() >= deadline:
            status = document.get("status")
            cause = ""
            if status == "QUEUED":
                cause = " (the run queue is full: see concurrency.runs.max_concurrent_runs)"
            raise RunContinues(
                f"run {run_id} is still {status}{cause}: it continues; see it in the Dagster UI "
                f"({document.get('url') or 'no URL known'})"
            )
        time.sleep(pauses.next_pause())


def wait_for_tasks(
    nimbus: NimbusClient, name: str, *, deadline: float, progress: Progress | None = None
) -> dict[str, Any]:
    """Wait until all tasks of a topology run, and return its document.

    :class:`RunContinues` at the deadline; it names the tasks that do not run. :class:`NotAlive` if
    the topology is gone.
    """
    pauses = Backoff(0.05, _TASKS_PAUSE_SECS, factor=_GROWTH)
    reported = ""
    while True:
        document = nimbus.get(f"/v1/topologies/{name}")
        tasks = document.get("tasks", [])
        stopped_tasks = [task for task in tasks if task.get("status") != "running"]
        running = len(tasks) - len(stopped_tasks)
        state = f"{running} of {len(tasks)} run"
        if progress is not None and state != reported:
            reported = state
            progress("tasks", state)
        if tasks and not stopped_tasks:
            return document
        if time.monotonic() >= deadline:
            titles = [
                f"{task.get('id')} ({task.get('component')}, {task.get('status')})"
                for task in stopped_tasks[:_MAX_NAMED_TASKS]
            ]
            raise RunContinues(
                f"topology {name!r}: {running} of {len(tasks)} tasks run, waiting for "
                f"{', '.join(titles)}{_newest_error(document)}: "
                f"see `storm-dagster show {name}` and `storm-dagster logs {name}`"
            )
        time.sleep(pauses.next_pause())


def _newest_error(topology: Mapping[str, Any]) -> str:
    """Last line of the newest error of a topology's document, as the end of a clause.

    Empty without an error.
    """
    errors = topology.get("errors", [])
    if not errors:
        return ""
    lines = str(errors[0].get("error", "")).strip().splitlines()
    if not lines:
        return ""
    return f"; newest error: {lines[-1]}"


def find_topology(nimbus: NimbusClient, name: str) -> dict[str, Any] | None:
    """Return the document of a topology; ``None`` if it is gone."""
    try:
        return nimbus.get(f"/v1/topologies/{name}")
    except NotAlive:
        return None


def list_operations(nimbus: NimbusClient) -> list[dict[str, Any]]:
    """Return the rows of ``GET /v1/operations``.

    A nimbus of the release before lacks it: then there are none.
    """
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
    """Wait until ``done`` is true of a topology's document, and return the document.

    The document is ``None`` if the topology is gone. :class:`RunContinues` at the deadline; it
    names the awaited event by ``what``.
    """
    pauses = Backoff(0.1, 1.0, factor=_GROWTH)
    while True:
        document = find_topology(nimbus, name)
        if done(document):
            return document
        if time.monotonic() >= deadline:
            status = document.get("status") if document else "gone"
            raise RunContinues(
                f"topology {name!r} is {status}, waited for {what}: it continues; see "
                "`storm-dagster list` later"
            )
        time.sleep(pauses.next_pause())
