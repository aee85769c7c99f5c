"""Upkeep: `prune_history` deletes old runs of our jobs, `clean_inbox` garbage that is old enough.

Dagster keeps runs permanently; old ticks it deletes itself (``retention`` in dagster.yaml). Runs of
other jobs are never touched, and neither is the run that made what an asset, or a topology that
lives, shows now.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

import dagster as dg

from storm_dagster.defs.keys import INBOX
from storm_dagster.defs.metadata import notes, step_errors
from storm_dagster.defs.resources.handles import ZooKeeperResource
from storm_dagster.defs.resources.operating import Handles, connect, operations
from storm_dagster.host.clock import boot_clock, boot_id
from storm_dagster.model.dagster_names import DagsterNames
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.operations.live.cleaner import clean, survey
from storm_dagster.operations.results import CleanResult

REPOSITORY_TAG = ".dagster/repository"
"""Dagster's tag of a run: the code location that it belongs to."""
_ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
_MOST_DELETED = 1000
_PAGE = 100

DECLARED = ""
"""In the place of a cluster: the declared topologies of the code location."""
_own_jobs: defaultdict[str | None, set[str]] = defaultdict(set)
"""Cluster -> names of its jobs that this process has built."""


def remember_own(cluster: str | None, definitions: dg.Definitions) -> dg.Definitions:
    """Note that the jobs of ``definitions`` are ours, so that their history is; returns the
    definitions.
    """
    _own_jobs[cluster].update(job.name for job in definitions.jobs or ())
    return definitions


def own_jobs(names: DagsterNames) -> set[str]:
    """Names of our jobs in this code location, which every run loads as a whole."""
    return _own_jobs[names.cluster] | _own_jobs[DECLARED]


def newest_observation(instance: dg.DagsterInstance, key: dg.AssetKey) -> dict[str, Any]:
    """Values of the metadata of the asset's newest observation, and ``at``, its time; empty when
    there is none.
    """
    for record in instance.fetch_observations(key, limit=1).records:
        metadata = record.asset_observation.metadata if record.asset_observation else {}
        return {**{name: value.value for name, value in metadata.items()}, "at": record.timestamp}
    return {}


def prune_runs(
    instance: dg.DagsterInstance,
    names: DagsterNames,
    before: datetime,
    *,
    repository: str | None = None,
    most: int = _MOST_DELETED,
) -> int:
    """Delete the oldest of our runs that ended and were created before ``before``, at most
    ``most``; returns how many.

    A run that made the newest materialization of an asset, or of the partition of a topology that
    lives, stays.
    """
    alive = set(instance.get_dynamic_partitions(names.partitions))
    tags = {REPOSITORY_TAG: repository} if repository is not None else {}
    deleted = 0
    for job in sorted(own_jobs(names)):
        filters = dg.RunsFilter(job_name=job, statuses=_ENDED, created_before=before, tags=tags)
        kept: str | None = None
        while deleted < most:
            page = instance.get_run_records(filters, limit=_PAGE, ascending=True, cursor=kept)
            for record in page[: most - deleted]:
                run_id = record.dagster_run.run_id
                if _is_shown(instance, run_id, alive):
                    kept = run_id
                else:
                    instance.delete_run(run_id)
                    deleted += 1
            if len(page) < _PAGE:
                break
    return deleted


def _is_shown(instance: dg.DagsterInstance, run_id: str, alive: Collection[str]) -> bool:
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION):
        made = entry.asset_materialization
        if made is None or not (made.partition is None or made.partition in alive):
            continue
        which = dg.AssetRecordsFilter(
            asset_key=made.asset_key,
            asset_partitions=None if made.partition is None else [made.partition],
        )
        newest = instance.fetch_materializations(which, limit=1).records
        if newest and newest[0].run_id == run_id:
            return True
    return False


def prune_history(
    context: dg.OpExecutionContext, names: DagsterNames, zookeeper: ZooKeeperResource
) -> None:
    """Delete what is older than the conf allows."""
    with step_errors():
        conf = zookeeper.conf()
        days = float(conf["dagster.history.retention.days"])
    before = datetime.now(tz=timezone.utc) - timedelta(days=days)
    repository = context.run.tags.get(REPOSITORY_TAG)
    deleted = prune_runs(context.instance, names, before, repository=repository)
    context.log.info(f"deleted {deleted} runs older than {days:g} days")


def prune_history_schedule(context: dg.ScheduleEvaluationContext) -> dg.RunRequest:
    """Ask for it each time."""
    return dg.RunRequest()


_MEMORY = "seen"
_GRACE_SECS = 60.0
_log = logging.getLogger(__name__)


def load_inbox_memory(instance: dg.DagsterInstance, key: dg.AssetKey = INBOX) -> dict[str, float]:
    """Garbage -> boot clock when it was first seen; empty after another boot, which only delays."""
    document = newest_observation(instance, key).get(_MEMORY)
    if not isinstance(document, dict) or document.get("boot_id") != boot_id():
        return {}
    first = document.get("first_seen")
    if not isinstance(first, dict):
        return {}
    return {
        str(key): float(since) for key, since in first.items() if isinstance(since, int | float)
    }


def observation(
    memory: Mapping[str, float], report: CleanResult | None, waiting: int, key: dg.AssetKey = INBOX
) -> dg.AssetObservation:
    """Metadata: what waits, what was removed, and the memory."""
    removed = [*report.nodes, *report.blobs, *report.tokens] if report else []
    return dg.AssetObservation(
        asset_key=key,
        metadata={
            "removed": len(removed),
            "what": notes(removed[:100]),
            "problems": notes(report.problems if report else ()),
            "waiting": waiting,
            _MEMORY: dg.MetadataValue.json({"boot_id": boot_id(), "first_seen": dict(memory)}),
        },
    )


def clean_inbox(context: dg.OpExecutionContext, handles: Handles) -> None:
    """Remove garbage, in fenced steps.

    What was seen when stands in the newest observation of `storm/cluster/inbox`, because a schedule
    has no cursor. The leader cleans too; whichever comes second finds nothing.
    """
    key = handles.zookeeper.asset_key(INBOX)
    with operations(context, handles) as ops:
        report, memory = clean(
            ops,
            load_inbox_memory(context.instance, key),
            boot_now=boot_clock(),
            grace_secs=_GRACE_SECS,
        )
    for problem in report.problems:
        context.log.warning(problem)
    context.log_event(observation(memory, report, report.waiting, key))


def inbox_cleanup_schedule(
    context: dg.ScheduleEvaluationContext, handles: Handles
) -> dg.RunRequest | dg.SkipReason:
    """Look for garbage; only what has been garbage for its time is worth a run."""
    key = handles.zookeeper.asset_key(INBOX)
    try:
        with connect(handles, _log) as ops:
            before = load_inbox_memory(context.instance, key)
            garbage, memory = survey(ops, before, boot_now=boot_clock(), grace_secs=_GRACE_SECS)
    except StormDagsterError as error:
        return dg.SkipReason(error.message)
    if json.dumps(memory, sort_keys=True) != json.dumps(before, sort_keys=True):
        context.instance.report_runless_asset_event(observation(memory, None, garbage.waiting, key))
    found = [*garbage.nodes, *garbage.blobs, *garbage.tokens]
    if not found:
        return dg.SkipReason(
            f"nothing to clean now, {garbage.waiting} things are not old enough yet"
        )
    return dg.RunRequest(tags={"storm/garbage": str(len(found))})
