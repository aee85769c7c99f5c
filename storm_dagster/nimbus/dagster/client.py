"""Dagster by plain HTTP: launching runs and reading how they went, without importing dagster.

If Dagster does not respond within ``timeout`` seconds (5 in nimbus), the call raises
:class:`Unavailable`; a request that Dagster refuses raises :class:`InvalidRequest`. Nothing here is
retried, because the caller knows whether there is another way. Where there is none
(:meth:`DagsterClient.launch_once`), a Dagster that is alive has more time to launch a run: on a
busy machine it is slow, not away.
"""

import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.model.dagster_names import PRIORITY_TAGS, STAGES, DagsterNames, storage_problem
from storm_dagster.model.errors import InvalidRequest, KeyNotFound, Misconfigured, Unavailable
from storm_dagster.nimbus.dagster.transport import DagsterTransport, without_storage

_log = logging.getLogger(__name__)

FINISHED = frozenset({"SUCCESS", "FAILURE", "CANCELED"})
_RUN_ID = re.compile(r"[0-9A-Za-z-]{1,64}")
_AGAIN = "ask again (a submission: with its token); what the run had begun is taken up"
_MOST_EVENT_PAGES = 50
_LAUNCH_SECS = 60.0
LOOKUP_SECS = 10.0
"""Longest search for a run by its tag, seconds: on a busy machine even a short query is slow."""
_PARTITION_TAG = "dagster/partition"
REPOSITORY = "__repository__"
"""Repository of the Definitions of a code location, as Dagster names it."""


@dataclass(frozen=True)
class FoundRun:
    """A run that was found."""

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

    Jobs and assets are given by their plain names; ``names`` makes them those of the cluster.
    ``launch_secs`` is the time that :meth:`launch_once` gives Dagster, seconds.
    """

    def __init__(
        self,
        transport: DagsterTransport,
        *,
        location: str = "storm",
        names: DagsterNames | None = None,
        launch_secs: float = _LAUNCH_SECS,
    ) -> None:
        self._transport = transport
        self._launch_secs = launch_secs
        self.names = names or DagsterNames()
        self._selector = {"repositoryLocationName": location, "repositoryName": REPOSITORY}

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    @property
    def site(self) -> str | None:
        """Base URL of Dagster's UI; ``None`` when no Dagster is known."""
        return self._transport.site

    def job_url(self, job: str) -> str | None:
        """URL of the page that launches a job."""
        path = f"locations/{self._selector['repositoryLocationName']}/jobs/{self.names.name(job)}/playground"
        return f"{site}/{path}" if (site := self.site) else None

    def run_url(self, run_id: str) -> str | None:
        """URL of the run's page."""
        return f"{site}/runs/{run_id}" if (site := self.site) else None

    def add_partition(self, key: str, patience: float | None = None) -> None:
        """Register the partition key ``key`` within ``patience`` seconds; it may be registered
        already.
        """
        variables = {"selector": self._selector, "definition": self.names.partitions, "key": key}
        expected = ("AddDynamicPartitionSuccess", "DuplicateDynamicPartitionError")
        doing = f"registering partition {key!r}"
        self._ask_location("AddPartition", variables, doing, *expected, patience=patience)

    def launch(
        self,
        job: str,
        run_config: Mapping[str, Any],
        tags: Mapping[str, str],
        *,
        patience: float | None = None,
    ) -> str:
        """Launch a run of ``job`` and return its id; ``patience`` (seconds) replaces the
        timeout.
        """
        job = self.names.name(job)
        all_tags = {**PRIORITY_TAGS, **tags}
        params = {
            "selector": {**self._selector, "jobName": job},
            "runConfigData": run_config,
            "executionMetadata": {
                "tags": [{"key": key, "value": value} for key, value in all_tags.items()]
            },
        }
        doing = f"launching job {job}"
        result = self._ask_location(
            "LaunchRun", {"params": params}, doing, "LaunchRunSuccess", patience=patience
        )
        run_id = str(result["run"]["runId"])
        _log.info("run %s of job %s is launched", run_id, job, extra={"run": run_id})
        return run_id

    def launch_once(
        self,
        job: str,
        run_config: Mapping[str, Any],
        tags: Mapping[str, str],
        *,
        identity: str,
        partition: str | None = None,
        before_launch: Callable[[], None] | None = None,
    ) -> str:
        """Launch the run that the tag ``identity`` of ``tags`` identifies, and return its id.

        For a caller that has no other way. Dagster must show within the timeout that it is alive,
        and then has ``launch_secs`` to register ``partition`` and to launch. ``before_launch`` is
        called right before the launch. If its response is missing, or Dagster reports an error of
        its own, the run is looked up by the tag, because Dagster may have launched it before.
        :class:`Unavailable` if there is no such run: it may still appear, so the caller repeats the
        launch with the same tag or not at all.
        """
        self._transport.require_life()
        deadline = time.monotonic() + self._launch_secs
        all_tags = dict(tags)
        if partition is not None:
            self.add_partition(partition, self._launch_secs)
            all_tags[_PARTITION_TAG] = partition
        if before_launch is not None:
            before_launch()
        remaining = max(1.0, deadline - time.monotonic())
        try:
            return self.launch(job, run_config, all_tags, patience=remaining)
        except Unavailable as error:
            run_id = self._launched_run(job, identity, tags[identity])
            if run_id is None:
                raise
            _log.info("run %s is launched, although it was not confirmed: %s", run_id, error)
            return run_id

    def _launched_run(self, job: str, tag: str, value: str) -> str | None:
        """Id of the newest run with that tag, unless it failed; ``None`` too if Dagster does not
        respond.
        """
        try:
            run = self.find_run(tag, value, job=job, patience=LOOKUP_SECS)
        except Unavailable as error:
            _log.warning("the run with %s=%s is not looked up: %s", tag, value, error)
            return None
        if run is None or run.failed:
            return None
        return run.run_id

    def find_run(
        self, tag: str, value: str, *, job: str | None = None, patience: float | None = None
    ) -> FoundRun | None:
        """The newest run with that tag (and job), or ``None``; ``patience`` (seconds) replaces the
        timeout.
        """
        run_filter: dict[str, Any] = {"tags": [{"key": tag, "value": value}]}
        if job is not None:
            run_filter["pipelineName"] = self.names.name(job)
        result = self._transport.graphql("FindRuns", {"filter": run_filter, "limit": 1}, patience)
        if result["__typename"] != "Runs":
            raise _refusal("finding a run", result)
        return next(
            (FoundRun(str(run["runId"]), str(run["status"])) for run in result["results"]), None
        )

    def run(self, run_id: str) -> dict[str, Any]:
        """The run as ``GET /v1/runs/{id}`` answers it; :class:`KeyNotFound` when Dagster knows no
        such run.
        """
        if not _RUN_ID.fullmatch(run_id):
            raise KeyNotFound(
                f"{run_id!r:.80} is not a run id: use the one that the submission returned"
            )
        result = self._transport.graphql("Run", {"id": run_id})
        if result["__typename"] == "RunNotFoundError":
            raise KeyNotFound(
                f"Dagster knows no run {run_id}: it was deleted, or ran in another Dagster"
            )
        if result["__typename"] != "Run":
            raise _refusal(f"reading run {run_id}", result)
        failures = self._failures(run_id) if result["status"] in ("FAILURE", "CANCELED") else []
        return run_document(result, failures, self.run_url(run_id), self.names)

    def report(self, asset: Sequence[str], partition: str, description: str) -> None:
        """Log a materialization of ``asset`` for something that was done without a run."""
        params = {
            "eventType": "ASSET_MATERIALIZATION",
            "assetKey": {"path": self.names.asset_path(asset)},
            "partitionKeys": [partition],
            "description": description,
        }
        result = self._transport.graphql("Report", {"params": params})
        if result["__typename"] != "ReportRunlessAssetEventsSuccess":
            raise _refusal("reporting an event", result)

    def report_observation(
        self, asset: Sequence[str], partition: str, description: str, metadata: Mapping[str, str]
    ) -> None:
        """Log an observation of ``asset``: a change that was made without a run.

        The materialization that a submission left stays the newest one of its partition.
        """
        document = {
            "asset_key": list(self.names.asset_path(asset)),
            "partition": partition,
            "description": description,
            "metadata": dict(metadata),
        }
        self._transport.report("report_asset_observation/", document)

    def defines_asset(self, key: Sequence[str]) -> bool:
        """True if a code location of this Dagster defines the asset."""
        result = self._transport.graphql("Asset", {"key": {"path": list(key)}})
        return result["__typename"] == "AssetNode"

    def report_event(self, event: DagsterEvent, origin: Mapping[str, Any]) -> None:
        """Log an event that a component reported, with ``origin`` among its metadata.

        :class:`InvalidRequest` when Dagster will never take it, :class:`Unavailable` when it may
        later.
        """
        document = {
            "asset_key": list(event.key),
            "partition": event.partition,
            "metadata": {**event.metadata, **origin},
        }
        if event.kind == "check":
            document |= {
                "check_name": event.check,
                "passed": event.passed,
                "severity": event.severity,
            }
        else:
            document |= {"description": event.description, "data_version": event.data_version}
        self._transport.report(f"report_asset_{event.kind}/", document)

    def _failures(self, run_id: str) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []
        cursor: str | None = None
        for _ in range(_MOST_EVENT_PAGES):
            result = self._transport.graphql("RunFailures", {"id": run_id, "cursor": cursor})
            if result["__typename"] != "Run":
                break
            page = result["eventConnection"]
            found += [event for event in page["events"] if len(event) > 1]
            if not page["hasMore"]:
                break
            cursor = page["cursor"]
        return found

    def _ask_location(
        self,
        operation: str,
        variables: Mapping[str, Any],
        doing: str,
        *expected: str,
        patience: float | None = None,
    ) -> Mapping[str, Any]:
        """The ``expected`` answer to what needs our code location; if it is another one, the
        location may not be loaded.
        """
        result = self._transport.graphql(operation, variables, patience)
        if result["__typename"] in expected:
            return result
        refusal = _refusal(doing, result)
        if isinstance(refusal, InvalidRequest):
            raise refusal
        seen = self._transport.graphql("Locations", {})
        raise (
            location_problem(doing, seen.get("locationEntries") or [], **self._selector) or refusal
        )


def location_problem(
    doing: str,
    entries: Sequence[Mapping[str, Any]],
    repositoryLocationName: str,
    repositoryName: str,
) -> Misconfigured | Unavailable | None:
    """The problem of the code location that conf names, by the workspace's entries; ``None`` when
    it is loaded.
    """
    name = repositoryLocationName
    entry = next((entry for entry in entries if entry["name"] == name), None)
    if entry is None:
        there = ", ".join(sorted(repr(str(entry["name"])) for entry in entries)) or "none"
        return Misconfigured(
            f"{doing}: dagster.location is {name!r}, and Dagster has no such code location (it has: {there:.500}): set "
            "dagster.location to the one with build_storm_defs"
        )
    loaded = entry.get("locationOrLoadError") or {}
    if loaded.get("__typename") == "PythonError":
        return Unavailable(
            f"{doing}: code location {name!r} failed to load ({str(loaded.get('message')).strip():.500}): fix it and "
            "reload it in Dagster"
        )
    repositories = [str(each["name"]) for each in loaded.get("repositories") or ()]
    if repositories and repositoryName not in repositories:
        return Misconfigured(
            f"{doing}: code location {name!r} has no repository {repositoryName!r} (it has: {', '.join(repositories)}): "
            "expose build_storm_defs through its Definitions, or set dagster.location to the one that does"
        )
    return None


def run_document(
    run: Mapping[str, Any],
    failures: Sequence[Mapping[str, Any]],
    url: str | None,
    names: DagsterNames | None = None,
) -> dict[str, Any]:
    """The document of ``GET /v1/runs/{id}`` from GraphQL's answers.

    Steps are in the order in which they began; those still to come follow in the order of the
    stages.
    """
    names = names or DagsterNames()
    stats = {step["stepKey"]: step for step in run.get("stepStats") or ()}
    plan = run.get("executionPlan") or {}
    keys = [step["key"] for step in plan.get("steps") or ()] or list(stats)
    keys += [key for key in stats if key not in keys]

    def order(key: str) -> tuple[float, int]:
        began = stats.get(key, {}).get("startTime")
        name = names.step_name(key)
        return (
            math.inf if began is None else began,
            STAGES.index(name) if name in STAGES else len(STAGES),
        )

    keys.sort(key=order)
    chosen = run.get("stepKeysToExecute")
    steps = []
    for key in keys if not chosen else (key for key in keys if key in chosen or key in stats):
        step = stats.get(key, {})
        began, ended = step.get("startTime"), step.get("endTime")
        seconds = round(ended - began, 3) if began is not None and ended is not None else None
        steps.append(
            {
                "name": names.step_name(key),
                "status": step.get("status") or "PENDING",
                "seconds": seconds,
            }
        )
    status = str(run["status"])
    return {
        "run_id": run["runId"],
        "job": run.get("jobName"),
        "status": status,
        "finished": status in FINISHED,
        "steps": steps,
        "error": _error_of(status, failures, names),
        "url": url,
    }


def _error_of(
    status: str, failures: Sequence[Mapping[str, Any]], names: DagsterNames
) -> dict[str, str] | None:
    """The typed error that a step left in its failure's metadata, else what is known of the
    failure.

    A run that was ended from outside (its process killed, canceled) is ``Unavailable``: nothing was
    wrong with the request, and what it had begun is taken up when it is made again.
    """
    if status not in ("FAILURE", "CANCELED"):
        return None
    plain: str | None = None
    for event in failures:
        metadata = event.get("failureMetadata") or {}
        texts = {
            entry["label"]: entry.get("text") for entry in metadata.get("metadataEntries") or ()
        }
        if texts.get("error_type"):
            message = texts.get("message") or metadata.get("description") or "no message"
            return {"type": str(texts["error_type"]), "message": str(message)}
        if plain is None:
            plain = _plain_failure(event, names)
    if status == "FAILURE" and any(
        event.get("stepKey") or event.get("error") for event in failures
    ):
        return {"type": "StormDagsterError", "message": plain or "a step failed without saying why"}
    ended = (
        "the run was canceled"
        if status == "CANCELED"
        else "the run's process ended without saying why"
    )
    return {"type": "Unavailable", "message": f"{(plain or ended).rstrip('.')}: {_AGAIN}"}


def _plain_failure(event: Mapping[str, Any], names: DagsterNames) -> str:
    error = event.get("error")
    while isinstance(error, dict) and isinstance(error.get("cause"), dict):
        error = error["cause"]
    detail = (
        str(error["message"]).strip()
        if isinstance(error, dict)
        else str(event.get("message") or "")
    )
    step = names.step_name(str(event.get("stepKey") or ""))
    return f"step {step} failed: {detail}" if step else detail or "the run failed"


def _refusal(doing: str, result: Mapping[str, Any]) -> InvalidRequest | Unavailable:
    kind = result["__typename"]
    detail = result.get("message") or "; ".join(
        str(error.get("message")) for error in result.get("errors") or ()
    )
    if (
        kind != "RunConfigValidationInvalid"
        and (problem := storage_problem(str(detail or ""))) is not None
    ):
        return without_storage(doing, problem)
    text = f"{doing}: Dagster answered {kind}{': ' + str(detail).strip() if detail else ''}"
    if kind == "RunConfigValidationInvalid":
        return InvalidRequest(text)
    # A job or location that is not loaded now may be loaded in a moment; nothing of ours was run.
    return Unavailable(text[:2000])
