"""Entry points of the definitions: :func:`build_storm_defs`, and the resources alone:
:func:`build_storm_resources`.
"""

from collections.abc import Mapping
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
from storm_dagster.defs.translator import StormAsset, StormTranslator, translate
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
    """The six resources of one cluster, by the keys under which our jobs, sensors and schedules ask
    for them.

    For a code location that uses a sensor or schedule alone; :func:`build_storm_defs` brings its
    own. ``names`` decide about the keys, ``storm_zookeeper`` and so on by default; the other
    arguments are those of :func:`build_storm_defs`.
    """
    where: dict[str, Any] = {
        "home": home,
        "conf_dir": conf_dir,
        "overrides": dict(overrides or {}),
        "spawn": spawn,
        "asset_keys": dict(asset_keys or {}),
    }
    made = {
        "zookeeper": ZooKeeperResource(**where),
        "blobstore": BlobStoreResource(**where, local_dir=blob_dir),
        "nimbus": NimbusResource(**where),
        "spark": SparkResource(**where),
        "supervisors": SupervisorsResource(**where),
        "workers": WorkersResource(**where),
    }
    return {(names or DagsterNames()).resource(key): resource for key, resource in made.items()}


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
    resources: Mapping[str, Any] | None = None,
    translator: StormTranslator | None = None,
    spawn: bool = False,
) -> dg.Definitions:
    """Definitions for one cluster: assets, checks, jobs, sensors, schedules and resources.

    Merge them into your own: ``dg.Definitions.merge(mine, build_storm_defs(home="/srv/storm"))``.
    They set nothing global: no executor, and no resource whose key does not begin with
    ``resource_prefix``. A second cluster beside the first gets a name: with ``cluster="prod"``
    every name begins with ``prod_``, asset keys with ``prod``, and the partitions are its own; set
    ``dagster.cluster: prod`` in the conf of its nimbus, which launches by name. ``default_status``
    is that of all sensors and schedules.

    The cluster is the one of ``conf_dir``, else of ``home``, else of ``STORM_DAGSTER_HOME``;
    ``overrides`` are conf keys laid over it. ``blob_dir`` uses a local blob store without a nimbus
    (tests, repairs), and ``tick_secs`` bounds a tick of the heartbeat sensor; ``resources`` replace
    ours (``zookeeper``, ``spark`` ...). ``translator`` changes keys, groups, owners and tags;
    ``spawn`` (development) starts a local cluster in ``home``, detached, at the first use that
    finds none. Nothing is connected to here: the cluster is looked up by each run and tick, so that
    definitions load while it is down.
    """
    names = DagsterNames(cluster, resource_prefix)
    schedule_status = dg.DefaultScheduleStatus(default_status.value)
    assets = [
        *build_submission_assets(names),
        *_build_cluster_assets(names),
    ]
    specs = [
        spec
        for each in assets
        for spec in ([each] if isinstance(each, dg.AssetSpec) else each.specs)
    ]
    first = len(names.asset_path(()))
    plain = [dg.AssetKey(list(spec.key.path)[first:]) for spec in specs]
    ours = [
        StormAsset("cluster" if spec.key.path[-2] == "cluster" else "stage", spec) for spec in specs
    ]
    translation = translate(translator or StormTranslator(), ours)
    # Our runs and sensors know the plain keys.
    shown = {key: translation.key(cluster_key(names, key)) for key in plain}

    def asset_job(name: str, *keys: dg.AssetKey) -> Any:
        # Checks would be steps of their own; a submission has exactly six.
        selection = dg.AssetSelection.assets(*(shown[key] for key in keys)).without_checks()
        tags, words = queue_tags(name), catalog()["jobs"][name]
        return dg.define_asset_job(
            names.name(name),
            selection,
            executor_def=dg.in_process_executor,
            description=words,
            tags=tags,
        )

    renamed = {
        key.to_user_string(): new.to_user_string() for key, new in shown.items() if new != key
    }
    own = build_storm_resources(
        names,
        home=home,
        conf_dir=conf_dir,
        overrides=overrides,
        blob_dir=blob_dir,
        spawn=spawn,
        asset_keys=renamed,
    )
    definitions = dg.Definitions(
        assets=[
            translation.of_definition(asset)
            if isinstance(asset, dg.AssetsDefinition)
            else translation.specs[asset.key]
            for asset in assets
        ],
        asset_checks=[translation.of_definition(check) for check in build_checks(names)],
        jobs=[
            asset_job(SUBMIT_JOB, *keys.STAGES),
            asset_job(REBALANCE_JOB, keys.ASSIGNMENT, keys.PUBLISHED_ASSIGNMENT),
            *build_lifecycle_jobs(names),
            build_reassign_job(names),
            op_job(names, "clean_inbox", history.clean_inbox),
            op_job(names, "prune_history", history.prune_history),
        ],
        sensors=[
            build_heartbeat_sensor(names, tick_secs=tick_secs, default_status=default_status),
            *(
                sensor(names, each, default_status)
                for each in (lifecycle_sensor, supervisor_sensor, leader_sensor)
            ),
        ],
        schedules=[
            build_rebalance_schedule(
                names, in_cluster_location=True, default_status=schedule_status
            ),
            schedule(names, history.inbox_cleanup_schedule, schedule_status),
            schedule(names, history.prune_history_schedule, schedule_status),
        ],
        resources={**own, **_replacements(names, own, resources or {})},
    )
    return history.remember_own(cluster, definitions)


def _replacements(
    names: DagsterNames, own: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Definitions that the caller gives in place of ours, named with or without the prefix."""
    found = {
        key if key in own else names.resource(key): resource for key, resource in given.items()
    }
    if unknown := sorted(found.keys() - own.keys()):
        raise InvalidRequest(
            f"resources={', '.join(unknown)}: ours are {', '.join(own)}; put resources of your own into your own "
            "Definitions"
        )
    return found


def _build_cluster_assets(names: DagsterNames) -> list[dg.AssetSpec]:
    """External assets: the daemons, which sensors and upkeep jobs observe and Dagster never
    makes.
    """
    shown = (keys.SUPERVISORS, keys.WORKERS, keys.TOPOLOGIES, keys.NIMBUS, keys.INBOX)
    known = {key.path[-1]: key for key in shown}
    return [
        dg.AssetSpec(
            **asset_settings(names, known[name], "external"),
            deps=[cluster_key(names, known[dep]) for dep in row.get("deps", ())],
        )
        for name, row in catalog()["external"].items()
    ]
