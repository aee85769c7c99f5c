"""Asset keys and tags of a cluster without a name; texts of ``catalog.yaml``.

Other tools rely on the keys. For a named cluster, :class:`DagsterNames` and :func:`cluster_key`
have the names.
"""

import functools
import time
from typing import Any

import dagster as dg
from pydantic import Field

from storm_dagster.model.dagster_names import STAGES as STAGE_NAMES
from storm_dagster.model.dagster_names import DagsterNames
from storm_dagster.model.tables import load_table

GROUP = "submission"
"""Asset group of the stages of a submission."""
OWNER = "team:storm"
"""Owner of this package's assets."""

PARTITIONS_NAME = DagsterNames().partitions

STAGES = tuple(dg.AssetKey(["storm", stage]) for stage in STAGE_NAMES)
"""The six stages of a submission, in order."""
TOPOLOGY_CONF, TOPOLOGY_CODE, TASK_INFO, ASSIGNMENT, PUBLISHED_ASSIGNMENT, ACTIVE_TOPOLOGY = STAGES

SUPERVISORS = dg.AssetKey(["storm", "cluster", "supervisors"])
NIMBUS = dg.AssetKey(["storm", "cluster", "nimbus"])
INBOX = dg.AssetKey(["storm", "cluster", "inbox"])
WORKERS = dg.AssetKey(["storm", "cluster", "workers"])
TOPOLOGIES = dg.AssetKey(["storm", "cluster", "topologies"])

STAGED_BY_TAG = "storm/staged_by"
"""Run tag: the run whose epoch the staging has.

In a re-execution it is another run, until the re-execution takes over.
"""
TOPOLOGY_TAG = "storm/topology"
"""Run tag: the topology's name."""

WAITING_STATUSES = [
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.STARTING,
]
"""Statuses of a run that has not started."""
UNFINISHED_STATUSES = [*WAITING_STATUSES, dg.DagsterRunStatus.STARTED]
"""Statuses of a run that has not finished, and that no user cancels."""
_SILENT_SECS = 7200.0
"""Time without an update after which a run counts as dead, unless it is queued."""


def run_under_way(instance: dg.DagsterInstance, now: float | None = None, **filters: Any) -> bool:
    """True if a run of those ``filters`` (fields of ``RunsFilter``) has not finished.

    ``now`` is epoch seconds. Dagster may keep the status of a run whose process died permanently: a
    run that was not updated for two hours counts only if it is queued.
    """
    statuses = [*UNFINISHED_STATUSES, dg.DagsterRunStatus.CANCELING]
    since = (now or time.time()) - _SILENT_SECS
    for record in instance.get_run_records(dg.RunsFilter(statuses=statuses, **filters)):
        is_queued = record.dagster_run.status == dg.DagsterRunStatus.QUEUED
        if is_queued or record.update_timestamp.timestamp() > since:
            return True
    return False


def topology_tags(name: str) -> dict[str, str]:
    """Tags by which the runs of one topology are found in the UI."""
    return {TOPOLOGY_TAG: name}


@functools.cache
def catalog() -> dict[str, Any]:
    """The content of ``catalog.yaml``, whose first lines describe it."""
    return load_table(__name__, "catalog")


def catalog_field(field: str, **settings: Any) -> Any:
    """A field with the description and the examples of the catalog.

    ``field`` is ``<group>.<name>``; ``settings`` are those of pydantic.
    """
    group, _, name = field.partition(".")
    entry = catalog()["fields"][group][name]
    if isinstance(entry, dict):
        return Field(**entry, **settings)
    return Field(description=entry, **settings)
