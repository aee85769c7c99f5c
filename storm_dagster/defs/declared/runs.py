"""Definitions of one declared topology: its asset, checks and jobs."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import dagster as dg

from storm_dagster.blobstore.store import BlobStore
from storm_dagster.client.changes import change_topology
from storm_dagster.core.submission.conf import total_conf
from storm_dagster.core.submission.kept_sizes import WORKERS_KEY
from storm_dagster.defs.declared.checks import LAST_UPDATED, check_freshness, configured_checks
from storm_dagster.defs.declared.declaration import (
    Declaration,
    RunningTopology,
    TargetDescription,
    describe_declared,
    differences,
)
from storm_dagster.defs.declared.deploy import (
    DeployPolicy,
    Reconciler,
    RunQueued,
    deploy_lock,
    read_actual,
)
from storm_dagster.defs.declared.owner import ownership_problem
from storm_dagster.defs.declared.parts import part_materializations
from storm_dagster.defs.declared.schedules import DEPLOY_JOB, topology_schedules
from storm_dagster.defs.declared.topology import DeclaredTopology, newest_version
from storm_dagster.defs.keys import catalog_field, run_under_way, topology_tags
from storm_dagster.defs.metadata import changes_metadata, is_final, step_errors
from storm_dagster.defs.observe.checks import outcome_of
from storm_dagster.defs.observe.history import newest_observation
from storm_dagster.model.conf import Conf
from storm_dagster.model.dagster_names import PRIORITY_TAGS, SCHEDULED_TAG
from storm_dagster.model.errors import Conflict, Fenced, InvalidRequest, StormDagsterError
from storm_dagster.operations.live.scheduled_rebalance import unsteady_now
from storm_dagster.operations.results import UpdateChange
from storm_dagster.operations.submit.update_changes import changed_values
from storm_dagster.zk.storm_cluster_state import StormClusterState

DEPLOY_TAG = {"storm/deploy": "declared"}
"""Tag of this package's deploy jobs.

Their runs materialize no asset if no version changed; other runs always do.
"""

_AUTOMATIC_TAGS = {
    "dagster/schedule_name",
    "dagster/sensor_name",
    "dagster/auto_materialize",
    "dagster/from_automation_condition",
}
"""Tags of runs that a schedule, sensor or automation condition launched.

A run without one was launched by hand.
"""

_CAUSE_TAG = "storm/deploys"
"""Run tag: the due deploy for which the sensor requested the run."""
_FINAL_TAG = "storm/final_error"
"""Run tag: type of the error that the same code always has."""
_MAX_ATTEMPTS = 20
"""Runs that are requested for one due deploy."""
_FIRST_PAUSE_SECS = 30.0
"""Pause after the first failed run; it doubles with each further one."""
_MAX_PAUSE_SECS = 1800.0
"""Longest pause after a failed run."""


@contextmanager
def mark_final_failure(context: dg.AssetExecutionContext) -> Iterator[None]:
    """Tag the run if the block fails with an error that the same code always has.

    The sensor and users read the tag.
    """
    try:
        yield
    except StormDagsterError as error:
        # A change of another caller, or a new leader: a retry may succeed.
        if is_final(error) and not isinstance(error, Conflict | Fenced):
            context.instance.add_run_tags(context.run.run_id, {_FINAL_TAG: type(error).__name__})
        raise


def deploy_request(
    instance: dg.DagsterInstance,
    key: dg.AssetKey,
    declaration: Declaration,
    described: TargetDescription,
    actual: RunningTopology | None,
    now: float,
) -> dg.RunRequest | None:
    """The run that deploys the declared code, or continues its gray upgrade.

    ``None`` if no deploy is due; ``now`` is epoch seconds. A killed topology stays killed, because
    a user requested that. Each change of the code gets one run, and after an outage up to 19
    retries with growing pauses. A run that failed because of the code itself, or that a user
    cancelled, is not retried until the code changes.
    """
    cause = _cause(declaration, described, actual)
    if cause is None or run_under_way(instance, now, tags=topology_tags(declaration.name)):
        return None
    same_cause = dg.RunsFilter(tags={_CAUSE_TAG: cause})
    attempts = instance.get_run_records(same_cause, limit=_MAX_ATTEMPTS)
    if attempts:
        newest = attempts[0]
        is_cancelled = newest.dagster_run.status == dg.DagsterRunStatus.CANCELED
        is_final_error = _FINAL_TAG in newest.dagster_run.tags
        if is_cancelled or is_final_error or len(attempts) == _MAX_ATTEMPTS:
            return None
        pause_secs = min(_FIRST_PAUSE_SECS * 2 ** (len(attempts) - 1), _MAX_PAUSE_SECS)
        ended_at = newest.end_time or newest.create_timestamp.timestamp()
        if now - ended_at < pause_secs:
            return None
    return dg.RunRequest(
        run_key=f"{cause}:{len(attempts)}",
        job_name=DEPLOY_JOB,
        asset_selection=[key],
        tags={**topology_tags(declaration.name), _CAUSE_TAG: cause},
    )


def _cause(
    declaration: Declaration, described: TargetDescription, actual: RunningTopology | None
) -> str | None:
    """Name of the due deploy, different from those of earlier deploys.

    ``None`` if no deploy is due: without a running topology, a valid target or a difference of the
    code, of a topology of another owner, and while another change of it is under way.
    """
    version = described.code_version
    if actual is None or version is None:
        return None
    differ = differences(declaration, described, actual)
    if "code" not in differ or "target" in differ or "owner" in differ:
        return None
    if actual.status == "UPGRADING" and actual.upgrading_to == version:
        # The run of the upgrade may have died. The key contains the number of upgraded workers, so
        # that a batch is seldom requested twice.
        return f"{actual.code_dir}:{version}:{actual.upgraded}"
    if actual.status not in ("ACTIVE", "INACTIVE"):
        return None
    # With the prefix of the running code, which every deploy changes: the same code may be declared
    # once more after another.
    return f"{actual.code_dir}:{version}"


class DeployConfig(dg.Config):
    """Config of a materialization of the asset."""

    only_submit: bool = catalog_field("deploy.only_submit", default=False)
    deploy_code: bool = catalog_field("deploy.deploy_code", default=False)
    take_over: bool = catalog_field("deploy.take_over", default=False)


class RequestConfig(dg.Config):
    """Config: the topology, and the options of the request."""

    name: str | None = catalog_field("ask.name", default=None)
    wait_secs: int | None = catalog_field("ask.wait_secs", default=None, ge=0)
    take_over: bool = catalog_field("ask.take_over", default=False)


def topology_definitions(topology: DeclaredTopology, *, own_jobs: bool) -> dg.Definitions:
    """All definitions of a topology.

    ``own_jobs`` are `submit_NAME`, `deploy_NAME` and `kill_NAME`.
    """
    try:
        checks = _checks(topology)
    except dg.DagsterInvalidDefinitionError as error:
        if "." not in topology.name:
            raise
        raise InvalidRequest(
            f"topology {topology.name!r}: Dagster {dg.__version__} accepts no dot in the key of an "
            "asset with checks: choose a name without one, or use Dagster 1.13.4 or newer"
        ) from error
    return dg.Definitions(
        assets=[_asset(topology), *topology.specs[1:]],
        asset_checks=[checks],
        jobs=_jobs(topology) if own_jobs else [],
        schedules=topology_schedules(topology),
    )


def _asset(topology: DeclaredTopology) -> dg.AssetsDefinition:
    """The topology's asset, whose materialization applies the declaration.

    No value is materialized if another run makes the change, if the topology does not exist then,
    or if a deploy job of this package has not changed its version.
    """

    @dg.multi_asset(
        name=f"deploy_{topology.identifier}_op",
        specs=[topology.specs[0]],
        **topology.op.options(),
    )
    def deploy(
        context: dg.AssetExecutionContext, config: DeployConfig
    ) -> Iterable[dg.MaterializeResult]:
        # Described here and not when this process loaded it: the version must be that of the files
        # that are packed.
        described = describe_declared(topology.declaration)
        # ``None``: it was never deployed, so that a missing topology was not ended by a user.
        newest = newest_version(context.instance, topology.key)
        with step_errors(), mark_final_failure(context), topology.connect() as (cluster, blobs):
            outcome = _reconcile(
                context,
                config,
                topology,
                described,
                cluster,
                blobs,
                was_deployed=newest is not None,
            )
            snapshot = topology.snapshot(cluster, blobs, cluster.load_view(), context.instance)
            changes = _changed_values(topology, outcome.former, snapshot.actual)
        for line in outcome.actions or [f"{topology.name}: nothing was changed"]:
            context.log.info(line)
        actual = snapshot.actual
        if not outcome.is_deployed or actual is None:
            return
        is_deploy_job = DEPLOY_TAG.items() <= context.run.tags.items()
        if is_deploy_job and newest == actual.data_version:
            return
        if newest != actual.data_version:
            for event in part_materializations(topology, actual, details=snapshot.details):
                context.log_event(event)
        metadata = {**snapshot.metadata, **snapshot.details, **changes_metadata(changes)}
        yield _materialization(topology, described, actual, outcome.actions, metadata)

    return deploy


class _DeployOutcome(NamedTuple):
    """Outcome of one run that deploys."""

    is_deployed: bool
    """False if another run makes the change.

    It is one that deploys the same version now, or a queued one, which is then in the actions.
    """
    actions: list[str]
    """The changes in words."""
    former: RunningTopology | None = None
    """The topology before the run; ``None`` without one."""


def _materialization(
    topology: DeclaredTopology,
    described: TargetDescription,
    actual: RunningTopology,
    actions: Sequence[str],
    metadata: Mapping[str, Any],
) -> dg.MaterializeResult:
    """The materialization after a run, with its actions and the remaining drift."""
    remaining = differences(topology.declaration, described, actual)
    drift = [f"{part}: {text}" for part, text in remaining.items()]
    return dg.MaterializeResult(
        asset_key=topology.key,
        metadata={
            **metadata,
            "done": "; ".join(actions) or "nothing",
            "drift": "; ".join(drift) or "none",
        },
        data_version=dg.DataVersion(actual.data_version),
        tags=actual.version_tags,
    )


def _changed_values(
    topology: DeclaredTopology, former: RunningTopology | None, actual: RunningTopology | None
) -> tuple[UpdateChange, ...]:
    """Values of the topology that a run has changed; empty for a new topology."""
    # The stored conf of one that was just replaced may be gone.
    if former is None or actual is None or not former.conf or not actual.conf:
        return ()
    cluster_conf = topology.zookeeper.conf().values
    return changed_values(_total_values(cluster_conf, former), _total_values(cluster_conf, actual))


def _total_values(cluster_conf: Conf, running: RunningTopology) -> dict[str, Any]:
    """Total conf of the topology, with its numbers of workers and executors."""
    values = {**total_conf(cluster_conf, running.conf), WORKERS_KEY: running.workers}
    for component, count in running.executors.items():
        values[f"parallelism.{component}"] = count
    return values


def _reconcile(
    context: dg.AssetExecutionContext,
    config: DeployConfig,
    topology: DeclaredTopology,
    described: TargetDescription,
    cluster: StormClusterState,
    blobs: BlobStore,
    *,
    was_deployed: bool,
) -> _DeployOutcome:
    """Apply the declaration under the lock of its deploys, as :meth:`Reconciler.run`."""
    run = context.run
    notify = context.log.info
    is_by_hand = not _AUTOMATIC_TAGS & run.tags.keys()
    deploys_code = config.deploy_code or (is_by_hand and run.job_name == DEPLOY_JOB)
    # The policy manual means that code is deployed only by such a run.
    policy: DeployPolicy = topology.policy
    if deploys_code and policy == "manual":
        policy = "hot"
    version = described.code_version
    owner = topology.declaration.owner
    with deploy_lock(cluster, topology.name, version, run.run_id, notify, owner) as is_locked:
        if not is_locked:
            return _DeployOutcome(False, [])
        try:
            with topology.nimbus.client() as nimbus:
                former = read_actual(cluster, blobs, topology.name)
                reconciler = Reconciler(
                    nimbus,
                    topology.declaration,
                    described,
                    policy,
                    topology.batch,
                    token=f"{run.run_id}-{topology.identifier}"[:200],
                    notify=notify,
                    shares_queue=context.instance.has_run,
                    # A run that a sensor or schedule launches never takes a topology over.
                    take_over=config.take_over and is_by_hand,
                )
                actions = reconciler.run(
                    former,
                    only_submit=config.only_submit,
                    may_submit=is_by_hand or not was_deployed,
                )
        except RunQueued as queued:
            return _DeployOutcome(False, [str(queued)])
    return _DeployOutcome(True, actions, former)


def _checks(topology: DeclaredTopology) -> dg.AssetChecksDefinition:
    """The configured checks of the topology's asset, as one op."""
    specs = [
        dg.AssetCheckSpec(name, asset=topology.key, description=rule)
        for name, rule in configured_checks(topology.alerts).items()
    ]

    @dg.multi_asset_check(name=f"check_{topology.identifier}_op", specs=specs, can_subset=True)
    def checks(context: dg.AssetCheckExecutionContext) -> Iterable[dg.AssetCheckResult]:
        with step_errors(), topology.connect() as (cluster, blobs):
            snapshot = topology.snapshot(
                cluster, blobs, cluster.load_view(), context.instance, topology.nimbus.topology
            )
        now = time.time()
        last_running = now
        if not snapshot.runs:
            # The sensor's observations have the time at which all tasks last ran.
            last_running = newest_observation(context.instance, topology.key).get(LAST_UPDATED)
        freshness = check_freshness(last_running, now, topology.freshness)
        results = {**snapshot.check_results, "fresh": freshness}
        for key in sorted(context.selected_asset_check_keys, key=lambda key: key.name):
            yield outcome_of(results[key.name], topology.key, key.name, dg.AssetCheckResult)

    return checks


def request_job(
    verb: str,
    job: str,
    description: str,
    topologies: Mapping[str, DeclaredTopology],
    tags: Mapping[str, str],
) -> dg.JobDefinition:
    """A job that requests the kill or the rebalance of one of ``topologies``.

    The request goes to nimbus; the job does not wait for its effect. A topology of another owner is
    only changed with the field ``take_over``, and stays the other's. A rebalance that a schedule
    asks for is not requested if the topology is no longer steady. Of a single topology the config
    needs no name. ``topologies`` is read by a run, and may be filled later.
    """

    @dg.op(name=f"{job}_op", out=dg.Out(dg.Nothing), description=description)
    def request(context: dg.OpExecutionContext, config: RequestConfig) -> None:
        name = config.name or ""
        if not name and len(topologies) == 1:
            (name,) = topologies
        with step_errors():
            if name not in topologies:
                raise InvalidRequest(
                    f"name is {name!r}, declared are {', '.join(sorted(topologies))}: "
                    "name one of them"
                )
            if not config.take_over:
                _require_own(topologies[name])
            if verb == "rebalance" and SCHEDULED_TAG in context.run.tags:
                reason = _unsteady_now(topologies[name])
                if reason:
                    context.log.info(f"{name}: {reason}")
                    context.add_output_metadata({"topology": name, "reason": reason})
                    return
            with topologies[name].nimbus.client() as nimbus:
                change = change_topology(
                    nimbus, name, verb=verb, wait=False, wait_secs=config.wait_secs
                )
        context.add_output_metadata({"topology": name, "run_id": str(change.run_id or "none")})

    @dg.job(
        name=job,
        executor_def=dg.in_process_executor,
        description=description,
        tags={**tags, **PRIORITY_TAGS},
    )
    def job_of_request() -> None:
        request()

    return job_of_request


def _require_own(topology: DeclaredTopology) -> None:
    """Raise :class:`Conflict` for a running topology of another owner."""
    with topology.connect() as (cluster, blobs):
        actual = read_actual(cluster, blobs, topology.name)
    owned_by = None if actual is None else actual.owner
    problem = ownership_problem(topology.name, topology.declaration.owner, owned_by)
    if problem is not None:
        raise Conflict(f"topology {topology.name!r} is {problem}")


def _unsteady_now(topology: DeclaredTopology) -> str:
    """Reason why a schedule's run must not rebalance the topology now; empty if it may."""
    with topology.connect() as (cluster, blobs):
        return unsteady_now(topology.operations(cluster, blobs), topology.name)


def _jobs(topology: DeclaredTopology) -> list[Any]:
    """The jobs `kill_NAME`, `submit_NAME` and `deploy_NAME`."""
    name = topology.name
    identifier = topology.identifier
    tags = topology.run_tags

    def deploy_job(verb: str, config: DeployConfig, description: str) -> Any:
        return dg.define_asset_job(
            f"{verb}_{identifier}",
            selection=dg.AssetSelection.assets(topology.key).without_checks(),
            executor_def=dg.in_process_executor,
            description=description,
            tags={**tags, **DEPLOY_TAG, **PRIORITY_TAGS},
            config=dg.RunConfig(ops={f"deploy_{identifier}_op": config}),
        )

    kill_description = (
        f"Ends {name}: its spouts pause, and it is removed after a delay. "
        "It stays ended until a user deploys it by hand."
    )
    return [
        request_job("kill", f"kill_{identifier}", kill_description, {name: topology}, tags),
        deploy_job(
            "submit",
            DeployConfig(only_submit=True),
            f"Submits {name} as declared; does not change a running one.",
        ),
        deploy_job(
            "deploy",
            DeployConfig(deploy_code=True),
            f"Applies the declaration of {name}: submits, deploys, rebalances.",
        ),
    ]
