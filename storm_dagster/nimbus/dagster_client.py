"""Dagster by plain HTTP: launching runs and reading how they went, without importing dagster.

An answer that does not come within ``timeout`` seconds (5 by design 6.6), or is no answer, is
:class:`Unavailable`; what Dagster refuses is :class:`InvalidRequest`. Nothing here is retried: the caller knows
whether there is another way. Where there is none, a launch waits longer for a Dagster that shows within those
seconds that it lives: on a busy machine it is slow, not away.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from storm_dagster.model.dagster_errors import STORAGE_REMEDY, storage_trouble
from storm_dagster.model.errors import InvalidRequest, KeyNotFound, Unavailable
from storm_dagster.nimbus import dagster_queries as queries

__all__ = ["PARTITIONS", "TOKEN_TAG", "DagsterClient", "FoundRun", "run_document"]

_log = logging.getLogger(__name__)

PARTITIONS = "storm_topologies"
"""Name of the dynamic partitions whose keys are topology names."""
TOKEN_TAG = "storm/token"
"""Run tag that carries the client token of a submission."""

STAGES = (
    "topology_conf",
    "topology_code",
    "task_info",
    "assignment",
    "published_assignment",
    "active_topology",
)
"""Steps of a submission, in order."""
FINISHED = frozenset({"SUCCESS", "FAILURE", "CANCELED"})
_RUN_ID = re.compile(r"[0-9A-Za-z-]{1,64}")
_AGAIN = "ask again (a submission: with its token); what the run had begun is taken up"
_MOST_EVENT_PAGES = 50
_SLOW_SECS = 18.0
"""A Dagster that lives may take this long to launch a run; with the look before, less than a client waits."""


@dataclass(frozen=True)
class FoundRun:
    """A run that was looked up."""

    run_id: str
    status: str

    @property
    def failed(self) -> bool:
        """Whether it ended without success."""
        return self.status in ("FAILURE", "CANCELED")

    @property
    def finished(self) -> bool:
        """Whether it ended."""
        return self.status in FINISHED


class DagsterClient:
    """Calls of one Dagster webserver; safe to share between threads.

    ``url`` is asked before each call for the GraphQL address, because a local webserver may start after this
    nimbus; ``None`` means that no Dagster is configured.
    """

    def __init__(
        self,
        url: Callable[[], str | None],
        *,
        location: str = "storm",
        repository: str = "__repository__",
        timeout: float = 5.0,
    ) -> None:
        self._url = url
        self._selector = {"repositoryLocationName": location, "repositoryName": repository}
        self._timeout = timeout
        self._http = httpx.Client(timeout=timeout, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def run_url(self, run_id: str) -> str | None:
        """Where people look at the run."""
        url = self._url()
        return f"{url.rstrip('/').removesuffix('/graphql')}/runs/{run_id}" if url else None

    def add_partition(self, key: str) -> None:
        """Register the partition key ``key``; it may be registered already."""
        variables = {"selector": self._selector, "definition": PARTITIONS, "key": key}
        result = self._call(queries.ADD_PARTITION, variables, "addDynamicPartition")
        if result["__typename"] not in ("AddDynamicPartitionSuccess", "DuplicateDynamicPartitionError"):
            raise _refusal(f"registering partition {key!r}", result)

    def drop_partition(self, key: str) -> None:
        """Remove the partition key ``key``; its history stays. It may be gone already."""
        variables = {"selector": self._selector, "definition": PARTITIONS, "keys": [key]}
        result = self._call(queries.DROP_PARTITION, variables, "deleteDynamicPartitions")
        if result["__typename"] != "DeleteDynamicPartitionsSuccess":
            raise _refusal(f"dropping partition {key!r}", result)

    def launch(
        self,
        job: str,
        run_config: Mapping[str, Any],
        tags: Mapping[str, str],
        *,
        assets: Sequence[Sequence[str]] | None = None,
        patient: bool = False,
    ) -> str:
        """Launch a run of ``job`` and return its id. ``assets`` narrows an asset job to those keys.

        A ``patient`` caller has no other way: a Dagster that lives gets ``_SLOW_SECS`` for the launch.
        """
        selector: dict[str, Any] = {**self._selector, "jobName": job}
        if assets is not None:
            selector["assetSelection"] = [{"path": list(path)} for path in assets]
        params = {
            "selector": selector,
            "runConfigData": run_config,
            "executionMetadata": {"tags": [{"key": key, "value": value} for key, value in tags.items()]},
        }
        patience = self._timeout
        if patient:
            self._require_life()
            patience = max(patience, _SLOW_SECS)
        result = self._call(queries.LAUNCH, {"params": params}, "launchRun", patience)
        if result["__typename"] != "LaunchRunSuccess":
            raise _refusal(f"launching job {job}", result)
        return str(result["run"]["runId"])

    def find_run(self, tag: str, value: str, *, job: str | None = None) -> FoundRun | None:
        """The newest run with that tag (and job), or ``None``."""
        wanted: dict[str, Any] = {"tags": [{"key": tag, "value": value}]}
        if job is not None:
            wanted["pipelineName"] = job
        result = self._call(queries.FIND_RUNS, {"filter": wanted, "limit": 1}, "runsOrError")
        if result["__typename"] != "Runs":
            raise _refusal("looking for a run", result)
        for run in result["results"]:
            return FoundRun(str(run["runId"]), str(run["status"]))
        return None

    def run(self, run_id: str) -> dict[str, Any]:
        """The run as ``GET /v1/runs/{id}`` answers it; :class:`KeyNotFound` when Dagster knows no such run."""
        if not _RUN_ID.fullmatch(run_id):
            raise KeyNotFound(f"{run_id!r:.80} is no run id: use the one that the submission returned")
        result = self._call(queries.RUN, {"id": run_id}, "runOrError")
        if result["__typename"] == "RunNotFoundError":
            raise KeyNotFound(f"Dagster knows no run {run_id}: it was deleted, or ran in another Dagster")
        if result["__typename"] != "Run":
            raise _refusal(f"reading run {run_id}", result)
        failures: list[Mapping[str, Any]] = []
        if result["status"] in ("FAILURE", "CANCELED"):
            failures = self._failures(run_id)
        return run_document(result, failures, self.run_url(run_id))

    def report(self, asset: Sequence[str], partition: str, description: str) -> None:
        """Log a materialization of ``asset`` for something that was done without a run."""
        params = {
            "eventType": "ASSET_MATERIALIZATION",
            "assetKey": {"path": list(asset)},
            "partitionKeys": [partition],
            "description": description,
        }
        result = self._call(queries.REPORT, {"params": params}, "reportRunlessAssetEvents")
        if result["__typename"] != "ReportRunlessAssetEventsSuccess":
            raise _refusal("reporting an event", result)

    def _failures(self, run_id: str) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []
        cursor: str | None = None
        for _ in range(_MOST_EVENT_PAGES):
            result = self._call(queries.FAILURES, {"id": run_id, "cursor": cursor}, "runOrError")
            if result["__typename"] != "Run":
                break
            page = result["eventConnection"]
            found += [event for event in page["events"] if len(event) > 1]
            if not page["hasMore"]:
                break
            cursor = page["cursor"]
        return found

    def _require_life(self) -> None:
        """:class:`Unavailable` unless the webserver answers its cheapest question in time."""
        url = self._url()
        if not url:
            return  # the call itself says what is missing
        try:
            self._http.get(_server_info(url))
        except httpx.TimeoutException:
            raise _silence(url, self._timeout) from None
        except httpx.HTTPError:
            return

    def _slow(self, url: str, secs: float) -> Unavailable:
        """The error of a question that was not answered in time: what answers still says what is missing."""
        try:
            lives = self._http.get(_server_info(url), timeout=1.0).is_success
        except httpx.HTTPError:
            lives = False
        if not lives:
            return _silence(url, secs)
        return Unavailable(
            f"Dagster at {url} did not answer within {secs:g} s although its webserver lives: its storage may be out "
            f"of reach, or the machine busy: {STORAGE_REMEDY}; then try again"
        )

    def _call(
        self, query: str, variables: Mapping[str, Any], field: str, patience: float | None = None
    ) -> dict[str, Any]:
        url = self._url()
        patience = patience or self._timeout
        if not url:
            raise Unavailable(
                "no Dagster is configured: start one with `storm-dagster dev`, or set dagster.graphql.url"
            )
        try:
            response = self._http.post(url, json={"query": query, "variables": variables}, timeout=patience)
            document = response.json()
        except httpx.TimeoutException:
            raise self._slow(url, patience) from None
        except (httpx.HTTPError, ValueError) as error:
            raise Unavailable(
                f"Dagster at {url} does not answer ({error or type(error).__name__}): start its webserver, "
                "or set dagster.graphql.url"
            ) from None
        data = document.get("data") if isinstance(document, dict) else None
        result = data.get(field) if isinstance(data, dict) else None
        if not isinstance(result, dict):
            errors = document.get("errors") if isinstance(document, dict) else document
            if (trouble := storage_trouble(errors)) is not None:
                raise _without_storage(f"Dagster at {url}", trouble)
            raise Unavailable(f"Dagster at {url} answered {field} with an error: {errors!r:.500}")
        return result


def run_document(
    run: Mapping[str, Any], failures: Sequence[Mapping[str, Any]], url: str | None
) -> dict[str, Any]:
    """The document of ``GET /v1/runs/{id}`` from GraphQL's answers.

    Steps stand in the order in which they began; those still to come follow in the order of the stages.
    """
    stats = {step["stepKey"]: step for step in run.get("stepStats") or ()}
    plan = run.get("executionPlan") or {}
    keys = [step["key"] for step in plan.get("steps") or ()] or list(stats)
    keys += [key for key in stats if key not in keys]

    def order(key: str) -> tuple[float, int]:
        began = stats.get(key, {}).get("startTime")
        name = key.removeprefix("storm__")
        return (math.inf if began is None else began, STAGES.index(name) if name in STAGES else len(STAGES))

    keys.sort(key=order)
    chosen = run.get("stepKeysToExecute")
    steps = []
    for key in keys:
        if chosen and key not in chosen and key not in stats:
            continue
        step = stats.get(key, {})
        began, ended = step.get("startTime"), step.get("endTime")
        steps.append(
            {
                "name": key.removeprefix("storm__"),
                "status": step.get("status") or "PENDING",
                "seconds": round(ended - began, 3) if began is not None and ended is not None else None,
            }
        )
    status = str(run["status"])
    return {
        "run_id": run["runId"],
        "job": run.get("jobName"),
        "status": status,
        "finished": status in FINISHED,
        "steps": steps,
        "error": _error_of(status, failures),
        "url": url,
    }


def _error_of(status: str, failures: Sequence[Mapping[str, Any]]) -> dict[str, str] | None:
    """The typed error that a step left in its failure's metadata, else what is known of the failure.

    A run that was ended from outside (its process killed, canceled) is ``Unavailable``: nothing was wrong with the
    request, and what it had begun is taken up when it is made again.
    """
    if status not in ("FAILURE", "CANCELED"):
        return None
    plain: str | None = None
    for event in failures:
        metadata = event.get("failureMetadata") or {}
        texts = {entry["label"]: entry.get("text") for entry in metadata.get("metadataEntries") or ()}
        if texts.get("error_type"):
            message = texts.get("message") or metadata.get("description") or "no message"
            return {"type": str(texts["error_type"]), "message": str(message)}
        if plain is None:
            plain = _plain_failure(event)
    if status == "FAILURE" and any(event.get("stepKey") or event.get("error") for event in failures):
        return {"type": "StormDagsterError", "message": plain or "a step failed without saying why"}
    ended = "the run was canceled" if status == "CANCELED" else "the run's process ended without saying why"
    return {"type": "Unavailable", "message": f"{(plain or ended).rstrip('.')}: {_AGAIN}"}


def _plain_failure(event: Mapping[str, Any]) -> str:
    error = event.get("error")
    while isinstance(error, dict) and isinstance(error.get("cause"), dict):
        error = error["cause"]
    said = str(error["message"]).strip() if isinstance(error, dict) else str(event.get("message") or "")
    step = str(event.get("stepKey") or "").removeprefix("storm__")
    return f"step {step} failed: {said}" if step else said or "the run failed"


def _server_info(url: str) -> str:
    return f"{url.rstrip('/').removesuffix('/graphql')}/server_info"


def _silence(url: str, secs: float) -> Unavailable:
    return Unavailable(
        f"Dagster at {url} did not answer within {secs:g} s: look at its webserver, then try again"
    )


def _without_storage(doing: str, trouble: str) -> Unavailable:
    return Unavailable(f"{doing}: Dagster's storage does not answer ({trouble}): {STORAGE_REMEDY}")


def _refusal(doing: str, result: Mapping[str, Any]) -> InvalidRequest | Unavailable:
    kind = result["__typename"]
    said = result.get("message") or "; ".join(
        str(error.get("message")) for error in result.get("errors") or ()
    )
    if kind != "RunConfigValidationInvalid" and (trouble := storage_trouble(str(said or ""))) is not None:
        return _without_storage(doing, trouble)
    text = f"{doing}: Dagster answered {kind}{': ' + str(said).strip() if said else ''}"
    if kind == "RunConfigValidationInvalid":
        return InvalidRequest(text)
    # A job or location that is not loaded now may be loaded in a moment; nothing of ours was run.
    return Unavailable(text[:2000])
