"""Client of Dagster by plain HTTP, without an import of dagster.

It launches and reads runs. If Dagster does not respond within ``timeout`` seconds (5 in nimbus),
the call raises :class:`Unavailable`; a request that Dagster refuses raises :class:`InvalidRequest`.
No call is retried here: the caller knows if there is another way. If there is none
(:meth:`DagsterClient.launch_once`), a Dagster that is alive gets more time to launch a run, because
on a busy machine it is slow, not unreachable.
"""

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.model.dagster_names import PRIORITY_TAGS, DagsterNames, storage_problem
from storm_dagster.model.errors import InvalidRequest, KeyNotFound, Misconfigured, Unavailable
from storm_dagster.nimbus.dagster.run_documents import FINISHED, run_document
from storm_dagster.nimbus.dagster.transport import DagsterTransport, without_storage

_log = logging.getLogger(__name__)

_RUN_ID = re.compile(r"[0-9A-Za-z-]{1,64}")
_MAX_EVENT_PAGES = 50
"""Limit of the pages of a run's events that are searched for failures."""
_LAUNCH_SECS = 60.0
"""Default of ``launch_secs``."""
LOOKUP_SECS = 10.0
"""Limit of a search for a run by its tag: on a busy machine even a short query is slow."""
_PARTITION_TAG = "dagster/partition"
"""Dagster's tag of the partition key of a run."""
REPOSITORY = "__repository__"
"""Repository of the Definitions of a code location, as Dagster names it."""


@dataclass(frozen=True)
class FoundRun:
    """Run that a search returned."""

    run_id: str
    status: str

    @property
    def failed(self) -> bool:
        """True if it ended without success."""
        return self.status in ("FAILURE", "CANCELED")

    @property
    def finished(self) -> bool:
        """True if it ended."""
        return self.status in FINISHED


class DagsterClient:
    """Calls of one Dagster webserver; safe to share between threads.

    Callers pass plain names of jobs and assets; ``names`` turns them into those of the cluster.
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
        """GraphQL selector of the code location of the cluster."""

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    @property
    def site(self) -> str | None:
        """Base URL of Dagster's UI; ``None`` when no Dagster is known."""
        return self._transport.site

    def job_url(self, job: str) -> str | None:
        """URL of the page that launches a job."""
        site = self.site
        if not site:
            return None
        location = self._selector["repositoryLocationName"]
        return f"{site}/locations/{location}/jobs/{self.names.name(job)}/playground"

    def run_url(self, run_id: str) -> str | None:
        """URL of the run's page."""
        site = self.site
        return f"{site}/runs/{run_id}" if site else None

    def add_partition(self, key: str, patience: float | None = None) -> None:
        """Register a partition key within ``patience`` seconds; ``None`` for the timeout.

        A key that is registered already is left alone.
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
        """Launch a run of ``job`` and return its id.

        ``patience`` (seconds) replaces the timeout. If the launch fails because of the code
        location, the error names its problem.
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
        """Launch the run that the tag ``identity`` identifies, and return its id.

        For a caller that has no other way. Dagster must show within the timeout that it is alive,
        and then has ``launch_secs`` to register ``partition`` and to launch. ``before_launch`` is
        called right before the launch. A key that is dropped until the run exists is registered
        again. If the response to the launch is missing, or Dagster reports
        an internal error, the run is looked up by the tag, because Dagster may have launched it
        before.
        :class:`Unavailable` if Dagster does not have the run: it may still appear, so the caller
        repeats the launch with the same tag or not at all.
        """
        self._transport.require_life()
        deadline = time.monotonic() + self._launch_secs
        all_tags = dict(tags)
        if partition is not None:
            self.add_partition(partition, self._launch_secs)
            all_tags[_PARTITION_TAG] = partition
        if before_launch is not None:
            before_launch()
        # After a slow registration the launch still gets a second.
        remaining = max(1.0, deadline - time.monotonic())
        try:
            run_id = self.launch(job, run_config, all_tags, patience=remaining)
        except Unavailable as error:
            found_id = self._launched_run(job, identity, tags[identity])
            if found_id is None:
                raise
            run_id = found_id
            _log.info("run %s is launched, although it was not confirmed: %s", run_id, error)
        if partition is not None:
            self._restore_partition(partition, run_id)
        return run_id

    def _restore_partition(self, key: str, run_id: str) -> None:
        """Register the partition key of a launched run once more.

        ``lifecycle_sensor`` may have dropped it between its registration and the launch, because no
        run of it existed. From now on the sensor finds the run, and keeps the key. An error is only
        logged, because the run is launched; in most cases the key is still registered.
        """
        try:
            self.add_partition(key)
        except (InvalidRequest, Misconfigured, Unavailable) as error:
            _log.warning("partition %r of run %s is not registered again: %s", key, run_id, error)

    def _launched_run(self, job: str, tag: str, value: str) -> str | None:
        """Return the id of the newest run with that tag.

        ``None`` if there is no such run, if it failed, or if Dagster does not respond.
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
        """Return the newest run with that tag (and job), or ``None``.

        ``patience`` (seconds) replaces the timeout.
        """
        run_filter: dict[str, Any] = {"tags": [{"key": tag, "value": value}]}
        if job is not None:
            run_filter["pipelineName"] = self.names.name(job)
        result = self._transport.graphql("FindRuns", {"filter": run_filter, "limit": 1}, patience)
        if result["__typename"] != "Runs":
            raise _refusal("finding a run", result)
        runs = result["results"]
        if not runs:
            return None
        return FoundRun(str(runs[0]["runId"]), str(runs[0]["status"]))

    def run(self, run_id: str) -> dict[str, Any]:
        """Return the document of ``GET /v1/runs/{id}``.

        :class:`KeyNotFound` if Dagster does not have the run.
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
        failures: list[Mapping[str, Any]] = []
        if result["status"] in ("FAILURE", "CANCELED"):
            failures = self._failures(run_id)
        return run_document(result, failures, self.run_url(run_id), self.names)

    def tags_of_run(self, run_id: str) -> dict[str, str]:
        """Return the tags of a run; empty if Dagster does not have the run."""
        result = self._transport.graphql("RunTags", {"id": run_id})
        return {str(tag["key"]): str(tag["value"]) for tag in result.get("tags") or ()}

    def terminate(self, run_id: str) -> None:
        """End a run: a queued one is canceled, the process of a started one is interrupted.

        A run that Dagster does not have, or that has ended, is not an error.
        """
        result = self._transport.graphql("TerminateRun", {"id": run_id})
        ended = ("TerminateRunSuccess", "TerminateRunFailure", "RunNotFoundError")
        if result["__typename"] not in ended:
            raise _refusal(f"ending run {run_id}", result)

    def report(self, asset: Sequence[str], partition: str, description: str) -> None:
        """Log a materialization of ``asset`` for a change that was made without a run."""
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

    def report_event(self, event: DagsterEvent, origin: Mapping[str, Any]) -> None:
        """Log an event that a component reported, with ``origin`` among its metadata.

        :class:`InvalidRequest` if Dagster will never accept it, :class:`Unavailable` if it may
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
        """Return the events of the failures of a run and its steps, in the order of its log.

        Those behind the limit of pages are left out.
        """
        failures: list[Mapping[str, Any]] = []
        cursor: str | None = None
        for _ in range(_MAX_EVENT_PAGES):
            result = self._transport.graphql("RunFailures", {"id": run_id, "cursor": cursor})
            if result["__typename"] != "Run":
                break
            page = result["eventConnection"]
            # Events of other types have only the field of their type.
            failures += [event for event in page["events"] if len(event) > 1]
            if not page["hasMore"]:
                break
            cursor = page["cursor"]
        return failures

    def _ask_location(
        self,
        operation: str,
        variables: Mapping[str, Any],
        doing: str,
        *expected: str,
        patience: float | None = None,
    ) -> Mapping[str, Any]:
        """Return the ``expected`` answer to an operation on the cluster's code location.

        ``doing`` names the operation in errors. If the answer is another one, a request that
        Dagster refuses raises :class:`InvalidRequest`; else the error names the problem of the code
        location, if it has one.
        """
        result = self._transport.graphql(operation, variables, patience)
        if result["__typename"] in expected:
            return result
        refusal = _refusal(doing, result)
        if isinstance(refusal, InvalidRequest):
            raise refusal
        locations = self._transport.graphql("Locations", {})
        entries = locations.get("locationEntries") or []
        raise location_problem(doing, entries, **self._selector) or refusal


def location_problem(
    doing: str,
    entries: Sequence[Mapping[str, Any]],
    repositoryLocationName: str,  # The names are the keys of Dagster's selector.
    repositoryName: str,
) -> Misconfigured | Unavailable | None:
    """Return the problem of the code location that the conf names.

    ``doing`` names the operation that failed. ``entries`` are those of Dagster's workspace.
    ``None`` if the location is loaded and has the repository.
    """
    name = repositoryLocationName
    entry = None
    for candidate in entries:
        if candidate["name"] == name:
            entry = candidate
            break
    if entry is None:
        locations = (
            ", ".join(sorted(repr(str(candidate["name"])) for candidate in entries)) or "none"
        )
        return Misconfigured(
            f"{doing}: dagster.location is {name!r}, and Dagster has no such code location (it "
            f"has: {locations:.500}): set dagster.location to the one with build_storm_defs"
        )
    location = entry.get("locationOrLoadError") or {}
    if location.get("__typename") == "PythonError":
        message = str(location.get("message")).strip()
        return Unavailable(
            f"{doing}: code location {name!r} failed to load ({message:.500}): fix it and reload "
            "it in Dagster"
        )
    repositories = [str(repository["name"]) for repository in location.get("repositories") or ()]
    if repositories and repositoryName not in repositories:
        return Misconfigured(
            f"{doing}: code location {name!r} has no repository {repositoryName!r} (it has: "
            f"{', '.join(repositories)}): expose build_storm_defs through its Definitions, or set "
            "dagster.location to the one that does"
        )
    return None


def _refusal(doing: str, result: Mapping[str, Any]) -> InvalidRequest | Unavailable:
    """Return the error of an operation that Dagster refused.

    :class:`InvalidRequest` only for an invalid config of a run; anything else may pass.
    """
    kind = result["__typename"]
    detail = result.get("message")
    if not detail:
        errors = result.get("errors") or ()
        detail = "; ".join(str(error.get("message")) for error in errors)
    is_config_error = kind == "RunConfigValidationInvalid"
    problem = None if is_config_error else storage_problem(str(detail))
    if problem is not None:
        return without_storage(doing, problem)
    text = f"{doing}: Dagster answered {kind}"
    if detail:
        text = f"{text}: {str(detail).strip()}"
    if is_config_error:
        return InvalidRequest(text)
    # A job or location that is not loaded now may be loaded in a moment; no run was launched.
    return Unavailable(text[:2000])
