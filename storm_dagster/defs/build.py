"""All of it together: :func:`build_storm_defs`, and the resources alone: :func:`build_storm_resources`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

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
from storm_dagster.defs.translator import StormAsset, StormTranslator, translate
from storm_dagster.defs.upgrade_jobs import build_upgrade_jobs

__all__ = ["build_storm_defs", "build_storm_resources"]


def build_storm_resources(
    *,
    home: str | None = None,
    conf_dir: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    blob_dir: str | None = None,
    spawn: bool = False,
    asset_keys: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The six resources of one cluster, by the names under which our jobs, sensors and schedules ask for them.

    For a code location that uses a sensor or schedule alone; :func:`build_storm_defs` brings its own. The
    arguments are its.
    """
    where: dict[str, Any] = {
        "home": home,
        "conf_dir": conf_dir,
        "overrides": dict(overrides or {}),
        "spawn": spawn,
        "asset_keys": dict(asset_keys or {}),
    }
    return {
        "zookeeper": ZooKeeperResource(**where),
        "blobstore": BlobStoreResource(**where, local_dir=blob_dir),
        "nimbus": NimbusResource(**where),
        "spark": SparkResource(**where),
        "supervisors": SupervisorsResource(**where),
        "workers": WorkersResource(**where),
    }


def build_storm_defs(
    *,
    home: str | None = None,
    conf_dir: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    blob_dir: str | None = None,
    tick_secs: float = 45.0,
    resources: Mapping[str, Any] | None = None,
    translator: StormTranslator | None = None,
    spawn: bool = False,
) -> dg.Definitions:
    """Definitions for one cluster: assets, checks, jobs, sensors, schedules and resources.

    Merge them into your own: ``dg.Definitions.merge(mine, build_storm_defs(home="/srv/storm"))``.

    The cluster is the one of ``conf_dir``, else of ``home``, else of ``STORM_DAGSTER_HOME``; ``overrides``
    are conf keys laid over it. ``blob_dir`` uses a local blob store without a nimbus (tests, repairs), and
    ``tick_secs`` bounds a tick of the heartbeat sensor; ``resources`` replace those of the same name.
    ``translator`` changes keys, groups, owners and tags; ``spawn`` (development) starts a local cluster in
    ``home``, detached, at the first use that finds none. Nothing is connected to here: the cluster is looked
    up by each run and tick, so that definitions load while it is down.
    """
    assets = [*build_submission_assets(), *build_cluster_assets()]
    translation = translate(
        translator or StormTranslator(),
        (StormAsset(_kind(spec.key), spec) for asset in assets for spec in _specs(asset)),
    )
    stages = [translation.key(key) for key in STAGES]
    submission = [
        dg.define_asset_job(
            SUBMIT_JOB,
            # Checks would be steps of their own; a submission has exactly six.
            selection=dg.AssetSelection.assets(*stages).without_checks(),
            executor_def=dg.in_process_executor,
            description="Submit a topology: its name is the partition. By hand, fill in `target`.",
        ),
        dg.define_asset_job(
            REBALANCE_JOB,
            selection=dg.AssetSelection.assets(
                translation.key(ASSIGNMENT), translation.key(PUBLISHED_ASSIGNMENT)
            ).without_checks(),
            executor_def=dg.in_process_executor,
            description="Change the parallelism or spread of a running topology (its name is the partition), live.",
        ),
    ]
    own = build_storm_resources(
        home=home,
        conf_dir=conf_dir,
        overrides=overrides,
        blob_dir=blob_dir,
        spawn=spawn,
        asset_keys=translation.renamed(),
    )
    return dg.Definitions(
        assets=[
            translation.of_definition(asset)
            if isinstance(asset, dg.AssetsDefinition)
            else translation.specs[asset.key]
            for asset in assets
        ],
        asset_checks=[translation.of_definition(check) for check in build_checks()],
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
        resources={**own, **(resources or {})},
        executor=dg.in_process_executor,
    )


def _kind(key: dg.AssetKey) -> Literal["stage", "cluster"]:
    return "stage" if key in STAGES else "cluster"


def _specs(asset: dg.AssetsDefinition | dg.AssetSpec) -> list[dg.AssetSpec]:
    return [asset] if isinstance(asset, dg.AssetSpec) else list(asset.specs)
