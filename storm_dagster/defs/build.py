"""Entry points of the definitions.

:func:`build_storm_defs` builds all of them, :func:`build_storm_resources` the resources alone.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import dagster as dg

from storm_dagster.defs import keys
from storm_dagster.defs.binding import asset_settings, cluster_key, op_job, schedule, sensor
from storm_dagster.defs.healing.heartbeat_sensor import build_heartbeat_sensor
from storm_dagster.defs.healing.reassign_job import build_reassign_job
from storm_dagster.defs.keys import catalog
from storm_dagster.defs.lifecycle.jobs import build_lifecycle_jobs
from storm_dagster.defs.lifecycle.rebalance_schedule import build_rebalance_schedule
from storm_dagster.defs.lifecycle.sensor import lifecycle_sensor
from storm_dagster.defs.observe import history
from storm_dagster.defs.observe.checks import build_checks
from storm_dagster.defs.observe.sensors import leader_sensor, supervisor_sensor
from storm_dagster.defs.resources.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.resources.processes import (
    NimbusResource,
    SupervisorsResource,
    WorkersResource,
)
from storm_dagster.defs.resources.spark import SparkResource
from storm_dagster.defs.submission.assets import build_submission_assets
from storm_dagster.defs.translator import StormAsset, StormTranslator, Translation, translate
from storm_dagster.model.dagster_names import REBALANCE_JOB, SUBMIT_JOB, DagsterNames, queue_tags
from storm_dagster.model.errors import InvalidRequest

_RUNNING = dg.DefaultSensorStatus.RUNNING


def build_storm_resources(
    names: DagsterNames | None = None,
    *,
    home: str | None = None,
    conf_dir: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    blob_dir: str | None = None,
    spawn: bool = False,
    asset_keys: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The six resources of one cluster, by key.

    For a code location that uses a sensor or schedule alone; :func:`build_storm_defs` has its own.
    The keys are those that this package's jobs, sensors and schedules use: ``storm_zookeeper`` and
    so on by default, otherwise those of ``names``. The other arguments are those of
    :func:`build_storm_defs`.
    """
    settings: dict[str, Any] = {
        "home": home,
        "conf_dir": conf_dir,
        "overrides": dict(overrides or {}),
        "spawn": spawn,
        "asset_keys": dict(asset_keys or {}),
    }
    resources = {
        "zookeeper": ZooKeeperResource(**settings),
        "blobstore": BlobStoreResource(**settings, local_dir=blob_dir),
        "nimbus": NimbusResource(**settings),
        "spark": SparkResource(**settings),
        "supervisors": SupervisorsResource(**settings),
        "workers": WorkersResource(**settings),
    }
    names = names or DagsterNames()
    return {names.resource(key): resource for key, resource in resources.items()}


def build_storm_defs(
    *,
    cluster: str | None = None,
    resource_prefix: str = "storm_",
    default_status: dg.DefaultSensorStatus = _RUNNING,
    home: str | None = None,
    conf_dir: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    blob_dir: str | None = None,
    tick_secs: float = 45.0,
    sensor_interval_secs: int = 1,
    resources: Mapping[str, Any] | None = None,
    translator: StormTranslator | None = None,
    spawn: bool = False,
) -> dg.Definitions:
    """Definitions for one cluster.

    They are assets, checks, jobs, sensors, schedules and resources. Merge them into your own:
    ``dg.Definitions.merge(mine, build_storm_defs(home="/srv/storm"))``. They define no global
    settings: no executor, and no resource whose key does not begin with ``resource_prefix``. A
    second cluster beside the first gets a name: with ``cluster="prod"`` every name begins with
    ``prod_``, asset keys with ``prod``, and the partitions are separate; set ``dagster.cluster:
    prod`` in the conf of its nimbus, which launches by name. ``default_status`` is that of all
    sensors and schedules.

    The cluster is that of ``conf_dir``, else of ``home``, else of ``STORM_DAGSTER_HOME``;
    ``overrides`` are conf keys that replace its own. ``blob_dir`` uses a local blob store without a
    nimbus (tests, repairs), and ``tick_secs`` limits a tick of the heartbeat sensor. Ticks of each
    sensor begin at least ``sensor_interval_secs`` apart, as some services of Dagster demand (30):
    the leader heals what would wait too long for one. ``resources``
    replace those of this package (``zookeeper``, ``spark`` ...). ``translator`` changes keys,
    groups, owners and tags; ``spawn`` (development) starts a local cluster in ``home``, detached,
    at the first use that finds none. No connection is opened here: each run and tick looks the
    cluster up, so that definitions load while it is down.
    """
    names = DagsterNames(cluster, resource_prefix)
    assets = [
        *build_submission_assets(names),
        *_build_cluster_assets(names),
    ]
    storm_assets = _storm_assets(assets)
    translation = translate(translator or StormTranslator(), storm_assets)
    translated_keys = _translated_keys(names, storm_assets, translation)

    # Resources report under the translated keys.
    asset_keys = {
        key.to_user_string(): translated.to_user_string()
        for key, translated in translated_keys.items()
        if translated != key
    }
    default_resources = build_storm_resources(
        names,
        home=home,
        conf_dir=conf_dir,
        overrides=overrides,
        blob_dir=blob_dir,
        spawn=spawn,
        asset_keys=asset_keys,
    )
    definitions = dg.Definitions(
        assets=[_translated(asset, translation) for asset in assets],
        asset_checks=[translation.of_definition(check) for check in build_checks(names)],
        jobs=_build_jobs(names, translated_keys),
        sensors=_build_sensors(names, tick_secs, sensor_interval_secs, default_status),
        schedules=_build_schedules(names, dg.DefaultScheduleStatus(default_status.value)),
        resources=_replace_resources(names, default_resources, resources or {}),
    )
    return history.remember_own(cluster, definitions)


def _build_jobs(
    names: DagsterNames, translated_keys: Mapping[dg.AssetKey, dg.AssetKey]
) -> list[Any]:
    """The jobs of the cluster."""
    assignment_keys = (keys.ASSIGNMENT, keys.PUBLISHED_ASSIGNMENT)
    return [
        _asset_job(names, SUBMIT_JOB, [translated_keys[key] for key in keys.STAGES]),
        _asset_job(names, REBALANCE_JOB, [translated_keys[key] for key in assignment_keys]),
        *build_lifecycle_jobs(names),
        build_reassign_job(names),
        op_job(names, "clean_inbox", history.clean_inbox),
        op_job(names, "prune_history", history.prune_history),
    ]


def _asset_job(names: DagsterNames, name: str, asset_keys: Iterable[dg.AssetKey]) -> Any:
    """The job that materializes these assets."""
    # Without checks, which would be additional steps; a submission has exactly six.
    selection = dg.AssetSelection.assets(*asset_keys).without_checks()
    return dg.define_asset_job(
        names.name(name),
        selection,
        executor_def=dg.in_process_executor,
        description=catalog()["jobs"][name],
        tags=queue_tags(name),
    )


def _build_sensors(
    names: DagsterNames,
    tick_secs: float,
    interval_secs: int,
    default_status: dg.DefaultSensorStatus,
) -> list[dg.SensorDefinition]:
    """The sensors of the cluster."""
    heartbeat_sensor = build_heartbeat_sensor(
        names,
        tick_secs=tick_secs,
        interval_secs=interval_secs,
        default_status=default_status,
    )
    others = (lifecycle_sensor, supervisor_sensor, leader_sensor)
    return [
        heartbeat_sensor,
        *(sensor(names, evaluate, default_status, interval_secs) for evaluate in others),
    ]


def _build_schedules(
    names: DagsterNames, status: dg.DefaultScheduleStatus
) -> list[dg.ScheduleDefinition]:
    """The schedules of the cluster."""
    return [
        build_rebalance_schedule(names, in_cluster_location=True, default_status=status),
        schedule(names, history.inbox_cleanup_schedule, status),
        schedule(names, history.prune_history_schedule, status),
    ]


def _storm_assets(assets: Iterable[dg.AssetsDefinition | dg.AssetSpec]) -> list[StormAsset]:
    """Input of the translator: the spec of each asset with its kind."""
    storm_assets: list[StormAsset] = []
    for asset in assets:
        specs = [asset] if isinstance(asset, dg.AssetSpec) else asset.specs
        for spec in specs:
            kind = "cluster" if spec.key.path[-2] == "cluster" else "stage"
            storm_assets.append(StormAsset(kind, spec))
    return storm_assets


def _translated_keys(
    names: DagsterNames, assets: Iterable[StormAsset], translation: Translation
) -> dict[dg.AssetKey, dg.AssetKey]:
    """Key in a cluster without a name -> translated key, of each asset.

    The runs and sensors of this package use the keys of a cluster without a name.
    """
    prefix_length = len(names.asset_path(()))
    translated_keys: dict[dg.AssetKey, dg.AssetKey] = {}
    for asset in assets:
        unnamed_key = dg.AssetKey(list(asset.spec.key.path)[prefix_length:])
        translated_keys[unnamed_key] = translation.key(cluster_key(names, unnamed_key))
    return translated_keys


def _translated(
    asset: dg.AssetsDefinition | dg.AssetSpec, translation: Translation
) -> dg.AssetsDefinition | dg.AssetSpec:
    """The asset with its translated spec."""
    if isinstance(asset, dg.AssetsDefinition):
        return translation.of_definition(asset)
    return translation.specs[asset.key]


def _replace_resources(
    names: DagsterNames, defaults: Mapping[str, Any], replacements: Mapping[str, Any]
) -> dict[str, Any]:
    """The resources with the caller's replacements, named with or without the prefix.

    :class:`InvalidRequest` for a name that is not one of the defaults.
    """
    resources = dict(defaults)
    unknown: list[str] = []
    for key, resource in replacements.items():
        full_key = key if key in defaults else names.resource(key)
        if full_key not in defaults:
            unknown.append(full_key)
        resources[full_key] = resource
    if unknown:
        raise InvalidRequest(
            f"resources={', '.join(sorted(unknown))}: ours are {', '.join(defaults)}; "
            "put resources of your own into your own Definitions"
        )
    return resources


def _build_cluster_assets(names: DagsterNames) -> list[dg.AssetSpec]:
    """External assets: the daemons, which sensors and retention jobs observe.

    Dagster never materializes them.
    """
    external_keys = (keys.SUPERVISORS, keys.WORKERS, keys.TOPOLOGIES, keys.NIMBUS, keys.INBOX)
    key_of_name = {key.path[-1]: key for key in external_keys}
    specs: list[dg.AssetSpec] = []
    for name, row in catalog()["external"].items():
        deps = [cluster_key(names, key_of_name[dep]) for dep in row.get("deps", ())]
        settings = asset_settings(names, key_of_name[name], "external")
        specs.append(dg.AssetSpec(**settings, deps=deps))
    return specs
