"""Is the cluster's Dagster well: its webserver, its storage, its daemon? Asked over HTTP, without importing dagster."""

from __future__ import annotations

from typing import Any, Literal

import httpx

from storm_dagster.model.dagster_errors import STORAGE_REMEDY, storage_trouble

__all__ = ["DagsterFinding", "look_at_dagster"]

DagsterFinding = tuple[Literal["ok", "warning", "broken"], str, str]
"""State, what was found, and how to mend it."""

# Reads runs and heartbeats: both lie in the storage.
_QUERY = """
{ runsOrError(limit: 1) { __typename ... on PythonError { message } }
  instance { daemonHealth { allDaemonStatuses { daemonType required healthy } } } }
"""


def look_at_dagster(url: str, timeout: float = 8.0) -> DagsterFinding:
    """What the Dagster whose GraphQL answers at ``url`` says of itself within ``timeout`` seconds."""
    try:
        answer = httpx.post(url, json={"query": _QUERY}, timeout=timeout, trust_env=False)
        document = answer.json()
    except httpx.TimeoutException:
        return (
            "broken",
            f"{url} did not answer within {timeout:g} s",
            f"look at its webserver's log; {STORAGE_REMEDY}",
        )
    except (httpx.HTTPError, ValueError) as error:
        return (
            "broken",
            f"{url} does not answer ({error or type(error).__name__})",
            "start its webserver, or set dagster.graphql.url",
        )
    trouble = storage_trouble(document)
    if trouble is not None:
        return "broken", f"Dagster's storage does not answer: {trouble}", STORAGE_REMEDY
    try:
        if document["data"]["runsOrError"]["__typename"] != "Runs":
            raise KeyError(document["data"]["runsOrError"])
        rows: list[dict[str, Any]] = document["data"]["instance"]["daemonHealth"]["allDaemonStatuses"]
    except (KeyError, TypeError):
        return "broken", f"{url} answered {str(document)[:300]}", "look at its webserver's log"
    ill = sorted(str(row["daemonType"]).lower() for row in rows if row["required"] and not row["healthy"])
    if ill:
        return (
            "warning",
            f"its daemon does not report ({', '.join(ill)})",
            "start dagster-daemon: without it no sensor and no schedule runs",
        )
    return "ok", f"{url} answers, storage and daemon too", ""
