"""Document of a Dagster run, from GraphQL's answers: its steps and its error."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from storm_dagster.model.dagster_names import STAGES, DagsterNames
from storm_dagster.model.run_result import RunResult

FINISHED = frozenset({"SUCCESS", "FAILURE", "CANCELED"})
"""Statuses of runs that have ended."""
_REPEAT_REMEDY = (
    "repeat the request (a submission: with its token); it continues the work of the run"
)
_NO_PARTITION = re.compile(r"Partition range (\S+) to .*Nonexistent partition keys", re.DOTALL)
"""Error of Dagster for a step whose partition key was dropped, with the key."""


def run_document(
    run: Mapping[str, Any],
    failures: Sequence[Mapping[str, Any]],
    url: str | None,
    names: DagsterNames | None = None,
) -> dict[str, Any]:
    """Return the document of ``GET /v1/runs/{id}``, from GraphQL's answers.

    Steps are in the order in which they began; steps that have not begun follow in the order of the
    stages.
    """
    names = names or DagsterNames()
    status = str(run["status"])
    tags = {str(tag["key"]): str(tag["value"]) for tag in run.get("tags") or ()}
    return {
        "run_id": run["runId"],
        "job": run.get("jobName"),
        "status": status,
        "finished": status in FINISHED,
        "steps": _step_documents(run, names),
        "error": _error_of(status, failures, names),
        "url": url,
        **RunResult.of_tags(tags).to_document(),
    }


def _step_documents(run: Mapping[str, Any], names: DagsterNames) -> list[dict[str, Any]]:
    """Return the steps of a run in the order of :func:`run_document`.

    Of a run of selected steps only those that were selected or began are returned.
    """
    stats = {step["stepKey"]: step for step in run.get("stepStats") or ()}
    plan = run.get("executionPlan") or {}
    # A run that has not started may have no plan, and a plan may lack steps that began.
    keys = [step["key"] for step in plan.get("steps") or ()] or list(stats)
    keys += [key for key in stats if key not in keys]

    def order(key: str) -> tuple[float, int]:
        began = stats.get(key, {}).get("startTime")
        name = names.step_name(key)
        stage = STAGES.index(name) if name in STAGES else len(STAGES)
        return (math.inf if began is None else began, stage)

    keys.sort(key=order)
    selected_keys = run.get("stepKeysToExecute")
    documents: list[dict[str, Any]] = []
    for key in keys:
        if selected_keys and key not in selected_keys and key not in stats:
            continue
        step = stats.get(key, {})
        began = step.get("startTime")
        ended = step.get("endTime")
        seconds = None
        if began is not None and ended is not None:
            seconds = round(ended - began, 3)
        documents.append(
            {
                "name": names.step_name(key),
                "status": step.get("status") or "PENDING",
                "seconds": seconds,
            }
        )
    return documents


def _error_of(
    status: str, failures: Sequence[Mapping[str, Any]], names: DagsterNames
) -> dict[str, str] | None:
    """Return the error of a run as its type and message; ``None`` unless it failed.

    A step leaves the typed error in the metadata of its failure; without one, the message is that
    of the first failure. A run that was ended from outside (its process killed, canceled) is
    ``Unavailable``: the request was right, and repeating it continues the work of the run. A
    step whose partition key was dropped is ``NotAlive``: the key goes with a killed topology.
    """
    if status not in ("FAILURE", "CANCELED"):
        return None
    plain_text: str | None = None
    step_failed = False
    for event in failures:
        metadata = event.get("failureMetadata") or {}
        texts: dict[str, str | None] = {}
        for entry in metadata.get("metadataEntries") or ():
            texts[entry["label"]] = entry.get("text")
        error_type = texts.get("error_type")
        if error_type:
            message = texts.get("message") or metadata.get("description") or "no message"
            return {"type": str(error_type), "message": str(message)}
        if plain_text is None:
            plain_text = _failure_text(event, names)
        if event.get("stepKey") or event.get("error"):
            step_failed = True
    missing_key = _NO_PARTITION.search(plain_text or "")
    if missing_key is not None:
        name = missing_key.group(1)
        message = f"topology {name!r} was killed while its run was under way: submit it again"
        return {"type": "NotAlive", "message": message}
    if status == "FAILURE" and step_failed:
        message = plain_text or "a step failed without a message"
        return {"type": "StormDagsterError", "message": message}
    if plain_text is None and status == "CANCELED":
        plain_text = "the run was canceled"
    elif plain_text is None:
        plain_text = "the run's process ended without a message"
    return {"type": "Unavailable", "message": f"{plain_text.rstrip('.')}: {_REPEAT_REMEDY}"}


def _failure_text(event: Mapping[str, Any], names: DagsterNames) -> str:
    """Return the text of a failure: the innermost cause of its error, or its message."""
    error = event.get("error")
    while isinstance(error, dict) and isinstance(error.get("cause"), dict):
        error = error["cause"]
    if isinstance(error, dict):
        detail = str(error["message"]).strip()
    else:
        detail = str(event.get("message") or "")
    step = names.step_name(str(event.get("stepKey") or ""))
    if step:
        return f"step {step} failed: {detail}"
    return detail or "the run failed"
