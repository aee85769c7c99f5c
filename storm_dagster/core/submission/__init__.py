"""Submission of a topology: normalize, validate, add the system's components, number tasks."""

from __future__ import annotations

from storm_dagster.core.submission.conf import (
    ONE_TIME_KEYS,
    SUBMITTED_KEYS,
    UPGRADE_KEYS,
    conf_differences,
    kept_conf,
    message_timeout_secs,
    normalize_conf,
    total_conf,
)
from storm_dagster.core.submission.parallelism import normalize_topology, wanted_executors
from storm_dagster.core.submission.system import with_system_components
from storm_dagster.core.submission.tasks import (
    executors_of,
    fixed_task_components,
    number_tasks,
    partition,
    rescale,
    topology_master_task,
)
from storm_dagster.core.submission.validation import normalize_submission, validate_topology

__all__ = [
    "ONE_TIME_KEYS",
    "SUBMITTED_KEYS",
    "UPGRADE_KEYS",
    "conf_differences",
    "executors_of",
    "fixed_task_components",
    "kept_conf",
    "message_timeout_secs",
    "normalize_conf",
    "normalize_submission",
    "normalize_topology",
    "number_tasks",
    "partition",
    "rescale",
    "topology_master_task",
    "total_conf",
    "validate_topology",
    "wanted_executors",
    "with_system_components",
]
