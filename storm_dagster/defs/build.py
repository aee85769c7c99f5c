"""All of it together: :func:`build_storm_defs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from storm_dagster.defs.checks import build_checks
from storm_dagster.defs.cluster_assets import build_cluster_assets
from storm_dagster.defs.cluster_jobs import build_cluster_jobs
from storm_dagster.defs.cluster_resources import SupervisorsResource, WorkersResource
from storm_dagster.defs.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.heartbeat_sensor import build_heartbeat_sensor
from storm_dagster.defs.inbox_cleanup import clean_inbox, inbox_cleanup_schedule
from storm_dagster.defs.keys import ASSIGNMENT, PUBLISHED_ASSIGNMENT, REBALANCE_JOB, STAGES, SUBMIT_JOB
from storm_dagster.defs.lifecycle_jobs import build_lifecycle_jobs
from storm_dagster.defs.lifecycle_sensor import lifecycle_sensor
from storm_dagster.defs.metrics_rollup import metrics_rollup_schedule, roll_up_metrics
from storm_dagster.defs.nimbus_resource import NimbusResource
from storm_dagster.defs.observation_sensors import build_observation_sensors
from storm_dagster.defs.reassign_job import build_reassign_job
from storm_dagster.defs.rebalance_schedule import rebalance_schedule
from storm_dagster.defs.spark_resource import SparkResource
from storm_dagster.defs.submission_assets import build_submission_assets
from storm_dagster.defs.upgrade_jobs import build_upgrade_jobs

__all__ = ["build_storm_defs"]


def build_storm_defs(
    *,
    home: str | None = None,
    conf_dir: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    blob_dir: str | None = None,
    tick_secs: float = 45.0,
    resources: Mapping[str, Any] | None = None,
) -> dg.Definitions:
    """Definitions for one cluster: assets, checks, jobs, sensors, schedules and resources.

    The cluster is the one of ``conf_dir``, else of ``home``, else of ``STORM_DAGSTER_HOME``; ``overrides``
    are conf keys laid over it. ``blob_dir`` uses a local blob store without a nimbus (tests, repairs), and
    ``tick_secs`` bounds a tick of the heartbeat sensor; ``resources`` replace those of the same name. Nothing is connected to here: the cluster is looked
    up by each run and tick, so that definitions load while it is down.
    """
    where: dict[str, Any] = {"home": home, "conf_dir": conf_dir, "overrides": dict(overrides or {})}
    submission = [
        dg.define_asset_job(
            SUBMIT_JOB,
            # Checks would be steps of their own; a submission has exactly six.
            selection=dg.AssetSelection.assets(*STAGES).without_checks(),
            executor_def=dg.in_process_executor,
            description="Submit a topology: its name is the partition. By hand, fill in `target`.",
        ),
        dg.define_asset_job(
            REBALANCE_JOB,
            selection=dg.AssetSelection.assets(ASSIGNMENT, PUBLISHED_ASSIGNMENT).without_checks(),
            executor_def=dg.in_process_executor,
            description="Change the parallelism or spread of a running topology (its name is the partition), live.",
        ),
    ]
    return dg.Definitions(
        assets=[*build_submission_assets(), *build_cluster_assets()],
        asset_checks=build_checks(),
        jobs=[
            *submission,
            *build_lifecycle_jobs(),
            *build_upgrade_jobs(),
            build_reassign_job(),
            *build_cluster_jobs(),
            clean_inbox,
            roll_up_metrics,
        ],
        sensors=[
            build_heartbeat_sensor(tick_secs=tick_secs),
            lifecycle_sensor,
            *build_observation_sensors(),
        ],
        schedules=[rebalance_schedule, inbox_cleanup_schedule, metrics_rollup_schedule],
        resources={
            "zookeeper": ZooKeeperResource(**where),
            "blobstore": BlobStoreResource(**where, local_dir=blob_dir),
            "nimbus": NimbusResource(**where),
            "spark": SparkResource(**where),
            "supervisors": SupervisorsResource(**where),
            "workers": WorkersResource(**where),
            **(resources or {}),
        },
        executor=dg.in_process_executor,
    )
