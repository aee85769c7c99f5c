"""Retention: `prune_history` deletes old runs, `clean_inbox` old garbage.

Dagster keeps runs permanently; it deletes old ticks itself (``retention`` in dagster.yaml). Only
runs of this package's jobs are deleted. The run that made the newest materialization of an asset,
or of a live topology's partition, stays.
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
_MAX_DELETED = 1000
"""Runs that one call deletes; the next tick continues."""
_PAGE = 100
"""Runs that are read at one time."""
_MEMORY = "seen"
"""Metadata key of the memory in an observation of the inbox."""
_GRACE_SECS = 60.0
"""Time for which garbage must have been seen before it is removed."""
_log = logging.getLogger(__name__)

DECLARED = ""
"""Key in place of a cluster: the declared topologies of the code location."""
_own_jobs: defaultdict[str | None, set[str]] = defaultdict(set)
"""Cluster -> names of its jobs that this process has built."""


def remember_own(cluster: str | None, definitions: dg.Definitions) -> dg.Definitions:
    """Note that the jobs of ``definitions`` belong to this package.

    So their history is pruned. Returns the definitions.
    """
    _own_jobs[cluster].update(job.name for job in definitions.jobs or ())
    return definitions


def own_jobs(names: DagsterNames) -> set[str]:
    """Names of this package's jobs in the code location.

    Every run loads the location completely.
    """
    return _own_jobs[names.cluster] | _own_jobs[DECLARED]


def newest_observation(instance: dg.DagsterInstance, key: dg.AssetKey) -> dict[str, Any]:
    """Metadata values of the asset's newest observation, and ``at``, its time.

    Empty without an observation.
    """
    records = instance.fetch_observations(key, limit=1).records
    if not records:
        return {}
    observation = records[0].asset_observation
    values: dict[str, Any] = {}
    if observation is not None:
        values = {name: value.value for name, value in observation.metadata.items()}
    values["at"] = records[0].timestamp
    return values


def prune_runs(
    instance: dg.DagsterInstance,
    names: DagsterNames,
    before: datetime,
    *,
    repository: str | None = None,
    max_deleted: int = _MAX_DELETED,
) -> int:
    """Delete the oldest ended runs of this package, created before ``before``.

    At most ``max_deleted`` runs; returns the number of deleted runs. A run that made the newest
    materialization of an asset, or of a live topology's partition, stays. ``repository``: only runs
    of the code location with that value of :data:`REPOSITORY_TAG`.
    """
    alive = set(instance.get_dynamic_partitions(names.partitions))
    tags = {REPOSITORY_TAG: repository} if repository is not None else {}
    deleted = 0
    for job in sorted(own_jobs(names)):
        filters = dg.RunsFilter(job_name=job, statuses=_ENDED, created_before=before, tags=tags)
        cursor: str | None = None
        while deleted < max_deleted:
            page = instance.get_run_records(filters, limit=_PAGE, ascending=True, cursor=cursor)
            for record in page[: max_deleted - deleted]:
                run_id = record.dagster_run.run_id
                if _is_shown(instance, run_id, alive):
                    # The next page begins after the last run that stays, because the others are
                    # gone by then.
                    cursor = run_id
                else:
                    instance.delete_run(run_id)
                    deleted += 1
            if len(page) < _PAGE:
                break
    return deleted


def _is_shown(instance: dg.DagsterInstance, run_id: str, alive: Collection[str]) -> bool:
    """True if the run made the newest value of an asset or of a live partition."""
    for entry in instance.all_logs(run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION):
        materialization = entry.asset_materialization
        if materialization is None:
            continue
        partition = materialization.partition
        if partition is not None and partition not in alive:
            continue
        records_filter = dg.AssetRecordsFilter(
            asset_key=materialization.asset_key,
            asset_partitions=None if partition is None else [partition],
        )
        newest = instance.fetch_materializations(records_filter, limit=1).records
        if newest and newest[0].run_id == run_id:
            return True
    return False


def prune_history(
    context: dg.OpExecutionContext, names: DagsterNames, zookeeper: ZooKeeperResource
) -> None:
    """Delete the runs that are older than the conf permits."""
    with step_errors():
        conf = zookeeper.conf()
        days = float(conf["dagster.history.retention.days"])
    before = datetime.now(tz=timezone.utc) - timedelta(days=days)
    repository = context.run.tags.get(REPOSITORY_TAG)
    deleted = prune_runs(context.instance, names, before, repository=repository)
    context.log.info(f"deleted {deleted} runs older than {days:g} days")


def prune_history_schedule(context: dg.ScheduleEvaluationContext) -> dg.RunRequest:
    """Request the run at each tick."""
    return dg.RunRequest()


def load_inbox_memory(instance: dg.DagsterInstance, key: dg.AssetKey = INBOX) -> dict[str, float]:
    """Garbage -> boot clock when it was first seen.

    Empty after another boot, which only delays the removal.
    """
    document = newest_observation(instance, key).get(_MEMORY)
    if not isinstance(document, dict) or document.get("boot_id") != boot_id():
        return {}
    first_seen = document.get("first_seen")
    if not isinstance(first_seen, dict):
        return {}
    return {
        str(garbage): float(since)
        for garbage, since in first_seen.items()
        if isinstance(since, int | float)
    }


def observation(
    memory: Mapping[str, float], report: CleanResult | None, waiting: int, key: dg.AssetKey = INBOX
) -> dg.AssetObservation:
    """Observation of the inbox: waiting garbage, removed garbage, and the memory.

    ``report`` is ``None`` if no garbage was removed; ``waiting`` is a number.
    """
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

    The newest observation of `storm/cluster/inbox` contains the times at which garbage was first
    seen, because a schedule has no cursor. The leader cleans as well; the later of the two has no
    garbage to remove.
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
    """Search for garbage; request a run if some of it is old enough."""
    key = handles.zookeeper.asset_key(INBOX)
    try:
        with connect(handles, _log) as ops:
            before = load_inbox_memory(context.instance, key)
            garbage, memory = survey(ops, before, boot_now=boot_clock(), grace_secs=_GRACE_SECS)
    except StormDagsterError as error:
        return dg.SkipReason(error.message)
    # An observation stays permanently: none is made of an unchanged memory.
    if json.dumps(memory, sort_keys=True) != json.dumps(before, sort_keys=True):
        context.instance.report_runless_asset_event(observation(memory, None, garbage.waiting, key))
    count = len(garbage.nodes) + len(garbage.blobs) + len(garbage.tokens)
    if not count:
        return dg.SkipReason(
            f"nothing to clean now, {garbage.waiting} things are not old enough yet"
        )
    return dg.RunRequest(tags={"storm/garbage": str(count)})
