"""Asset keys and tags as Dagster shows them for a cluster without a name of its own, and the words
of ``catalog.yaml``.

Other tools rely on the keys. What runs for a named cluster asks :class:`DagsterNames` and
:func:`cluster_key`.
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
OWNER = "team:storm"

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
"""Run tag: the run whose epoch the staging has. In a re-execution it is another run's, until it
takes over.
"""
TOPOLOGY_TAG = "storm/topology"
"""Run tag: the topology's name."""

WAITING_STATUSES = [
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.STARTING,
]
UNFINISHED_STATUSES = [*WAITING_STATUSES, dg.DagsterRunStatus.STARTED]
_SILENT_SECS = 7200.0


def run_under_way(instance: dg.DagsterInstance, now: float | None = None, **filters: Any) -> bool:
    """Whether a run of those ``filters`` has not finished.

    Dagster may leave one whose process died as it was for ever: after two hours only the queue is
    believed.
    """
    statuses = [*UNFINISHED_STATUSES, dg.DagsterRunStatus.CANCELING]
    records = instance.get_run_records(dg.RunsFilter(statuses=statuses, **filters))
    since = (now or time.time()) - _SILENT_SECS
    return any(
        r.dagster_run.status.value == "QUEUED" or r.update_timestamp.timestamp() > since
        for r in records
    )


def topology_tags(name: str) -> dict[str, str]:
    """Tags by which the runs of one topology are found in the UI."""
    return {TOPOLOGY_TAG: name}


@functools.cache
def catalog() -> dict[str, Any]:
    """``catalog.yaml``, which says what it holds."""
    return load_table(__name__, "catalog")


def described(field: str, **settings: Any) -> Any:
    """A field with the description and the examples that the catalog has for it; ``settings`` are
    pydantic's.
    """
    group, _, name = field.partition(".")
    words = catalog()["fields"][group][name]
    return Field(**(words if isinstance(words, dict) else {"description": words}), **settings)
