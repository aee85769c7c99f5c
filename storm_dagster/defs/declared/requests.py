"""Deploy requests of the sensor of a declared topology: one for each change of the code, again after an outage.

What failed because of the code itself, and what somebody cancelled, is not asked for again until the code changes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import dagster as dg

from storm_dagster.defs.declared.declaration import Actual, Declaration, Described, differences
from storm_dagster.defs.keys import UNFINISHED_STATUSES, topology_tags
from storm_dagster.defs.metadata import is_final
from storm_dagster.model.errors import Conflict, Fenced, StormDagsterError

DEPLOY_JOB = "deploy_declared"
"""The job that deploys declared topologies, those that are selected."""

_AUTOMATIC_TAGS = {
    "dagster/schedule_name",
    "dagster/sensor_name",
    "dagster/auto_materialize",
    "dagster/from_automation_condition",
}

_CAUSE_TAG = "storm/deploys"
_FINAL_TAG = "storm/final_error"
_UNFINISHED = [*UNFINISHED_STATUSES, dg.DagsterRunStatus.CANCELING]
_MOST_ATTEMPTS = 20
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 30.0, 1800.0


@contextmanager
def mark_final_failure(context: dg.AssetExecutionContext) -> Iterator[None]:
    """Inside, an error that the same code would only meet again is noted at the run, for the sensor and for people."""
    try:
        yield
    except StormDagsterError as error:
        # Somebody else's change was in the way, or another leader took over: that passes.
        if is_final(error) and not isinstance(error, Conflict | Fenced):
            context.instance.add_run_tags(context.run.run_id, {_FINAL_TAG: type(error).__name__})
        raise


def deploy_request(
    instance: dg.DagsterInstance,
    key: dg.AssetKey,
    declaration: Declaration,
    described: Described,
    actual: Actual | None,
    now: float,
) -> dg.RunRequest | None:
    """The run that deploys the declared code, or goes on with its gray upgrade; ``None`` when there is nothing to do.

    ``now`` is epoch seconds. A topology that was killed stays killed: somebody wanted that.
    """
    cause = _cause(declaration, described, actual)
    if cause is None or under_way(instance, declaration.name):
        return None
    before = instance.get_run_records(dg.RunsFilter(tags={_CAUSE_TAG: cause}), limit=_MOST_ATTEMPTS)
    if before:
        newest = before[0]
        cancelled = newest.dagster_run.status == dg.DagsterRunStatus.CANCELED
        if cancelled or _FINAL_TAG in newest.dagster_run.tags or len(before) == _MOST_ATTEMPTS:
            return None
        pause = min(_FIRST_PAUSE_SECS * 2 ** (len(before) - 1), _LONGEST_PAUSE_SECS)
        if now - (newest.end_time or newest.create_timestamp.timestamp()) < pause:
            return None
    return dg.RunRequest(
        run_key=f"{cause}:{len(before)}",
        job_name=DEPLOY_JOB,
        asset_selection=[key],
        tags={**topology_tags(declaration.name), _CAUSE_TAG: cause},
    )


def under_way(instance: dg.DagsterInstance, name: str) -> bool:
    """Whether a run that changes the topology has not finished."""
    return instance.get_runs_count(dg.RunsFilter(tags=topology_tags(name), statuses=_UNFINISHED)) > 0


def by_hand(tags: Mapping[str, str]) -> bool:
    """Whether somebody launched the run, by its tags: no schedule, sensor or automation condition did."""
    return not _AUTOMATIC_TAGS & tags.keys()


def _cause(declaration: Declaration, described: Described, actual: Actual | None) -> str | None:
    """Name of the deploy that is due, different from those of earlier deploys; ``None`` when none is due."""
    version = described.code_version
    if actual is None or version is None:
        return None
    differ = differences(declaration, described, actual)
    if "code" not in differ or "target" in differ:
        return None
    if actual.status == "UPGRADING" and actual.upgrading_to == version:
        # The run that drove it may have died. Its batches are seldom asked for twice: the key names who is through.
        return f"{actual.code_dir}:{version}:{actual.upgraded}"
    if actual.status not in ("ACTIVE", "INACTIVE"):
        return None
    # By its code's prefix, which every deploy changes: the same code may come back after another.
    return f"{actual.code_dir}:{version}"
