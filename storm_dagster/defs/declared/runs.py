"""Definitions of one declared topology: its asset, checks, jobs and schedules."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import dagster as dg

from storm_dagster.client.changes import change_topology
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.defs.declared.checks import LAST_UPDATED, fresh, wanted_checks
from storm_dagster.defs.declared.declaration import (
    Actual,
    Declaration,
    Described,
    describe_declared,
    differences,
)
from storm_dagster.defs.declared.deploy import LeftToQueue, Reconciler, alone, read_actual
from storm_dagster.defs.declared.topology import DeclaredTopology, newest_version
from storm_dagster.defs.keys import catalog_field, run_under_way, topology_tags
from storm_dagster.defs.metadata import is_final, step_errors
from storm_dagster.defs.observe.checks import outcome_of
from storm_dagster.defs.observe.history import newest_observation
from storm_dagster.model.dagster_names import PRIORITY_TAGS
from storm_dagster.model.errors import Conflict, Fenced, InvalidRequest, StormDagsterError
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.rebalance import rebalance as plan_rebalance

DEPLOY_JOB = "deploy_declared"
"""The job that deploys declared topologies, those that are selected."""

_AUTOMATIC_TAGS = {
    "dagster/schedule_name",
    "dagster/sensor_name",
    "dagster/auto_materialize",
    "dagster/from_automation_condition",
}
"""Tags of runs that a schedule, sensor or automation condition launched. Without one, somebody
did.
"""

_CAUSE_TAG = "storm/deploys"
_FINAL_TAG = "storm/final_error"
_MOST_ATTEMPTS = 20
_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 30.0, 1800.0


@contextmanager
def mark_final_failure(context: dg.AssetExecutionContext) -> Iterator[None]:
    """Inside, an error that the same code would only meet again is noted at the run, for the sensor
    and for people.
    """
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
    """The run that deploys the declared code, or goes on with its gray upgrade; ``None`` when there
    is nothing to do.

    ``now`` is epoch seconds. A topology that was killed stays killed: somebody wanted that. One for
    each change of the code, again after an outage: what failed because of the code itself, and what
    somebody cancelled, is not asked for again until the code changes.
    """
    cause = _cause(declaration, described, actual)
    if cause is None or run_under_way(instance, now, tags=topology_tags(declaration.name)):
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
    run_key, tags = f"{cause}:{len(before)}", {**topology_tags(declaration.name), _CAUSE_TAG: cause}
    return dg.RunRequest(run_key=run_key, job_name=DEPLOY_JOB, asset_selection=[key], tags=tags)


def _cause(declaration: Declaration, described: Described, actual: Actual | None) -> str | None:
    """Name of the deploy that is due, different from those of earlier deploys; ``None`` when none
    is due.
    """
    version = described.code_version
    if actual is None or version is None:
        return None
    differ = differences(declaration, described, actual)
    if "code" not in differ or "target" in differ:
        return None
    if actual.status == "UPGRADING" and actual.upgrading_to == version:
        # The run that drove it may have died. Its batches are seldom asked for twice: the key names
        # who is through.
        return f"{actual.code_dir}:{version}:{actual.upgraded}"
    if actual.status not in ("ACTIVE", "INACTIVE"):
        return None
    # By its code's prefix, which every deploy changes: the same code may come back after another.
    return f"{actual.code_dir}:{version}"


REBALANCE_JOB = "rebalance_declared"
"""The job that rebalances a declared topology."""
DEPLOY_TAG = {"storm/deploy": "declared"}
"""Tag of our jobs that deploy: their runs materialize nothing when no version changed. Other runs
always do.
"""


class DeployConfig(dg.Config):
    """Config of a materialization of the asset."""

    only_submit: bool = catalog_field("deploy.only_submit", default=False)
    deploy_code: bool = catalog_field("deploy.deploy_code", default=False)


class AskConfig(dg.Config):
    """Config: the topology, and the options of the request."""

    name: str | None = catalog_field("ask.name", default=None)
    wait_secs: int | None = catalog_field("ask.wait_secs", default=None, ge=0)


def topology_definitions(topology: DeclaredTopology, *, own_jobs: bool) -> dg.Definitions:
    """All of them; ``own_jobs`` are `submit_NAME`, `deploy_NAME` and `kill_NAME`."""
    try:
        checks = _checks(topology)
    except dg.DagsterInvalidDefinitionError as error:
        if "." not in topology.name:
            raise
        raise InvalidRequest(
            f"topology {topology.name!r}: Dagster {dg.__version__} accepts no dot in the key of an asset with checks: "
            "choose a name without one, or use Dagster 1.13.4 or newer"
        ) from error
    return dg.Definitions(
        assets=[_asset(topology), *topology.specs[1:]],
        asset_checks=[checks],
        jobs=_jobs(topology) if own_jobs else [],
        schedules=_schedules(topology),
    )


def _asset(topology: DeclaredTopology) -> dg.AssetsDefinition:
    name, key = topology.name, topology.key

    @dg.multi_asset(name=f"deploy_{topology.identifier}_op", specs=[topology.specs[0]])
    def deploy(
        context: dg.AssetExecutionContext, config: DeployConfig
    ) -> Iterable[dg.MaterializeResult]:
        # Not as this process loaded it: the version must be that of the files that travel.
        described = describe_declared(topology.declaration)
        run, hand = context.run, not _AUTOMATIC_TAGS & context.run.tags.keys()
        newest, notify = newest_version(context.instance, key), context.log.info
        wants_code = config.deploy_code or (hand and run.job_name == DEPLOY_JOB)
        policy = "hot" if wants_code and topology.policy == "manual" else topology.policy
        done: list[str] = []
        with step_errors(), mark_final_failure(context), topology.connect() as (cluster, blobs):
            with alone(cluster, name, described.code_version, run.run_id, notify) as mine:
                if mine:
                    try:
                        with topology.nimbus.client() as nimbus:
                            reconciler = Reconciler(
                                nimbus,
                                topology.declaration,
                                described,
                                policy,
                                topology.batch,
                                token=f"{run.run_id}-{topology.identifier}"[:200],
                                notify=notify,
                                shares_queue=context.instance.has_run,
                            )
                            done = reconciler.run(
                                read_actual(cluster, blobs, name),
                                only_submit=config.only_submit,
                                may_submit=hand or newest is None,
                            )
                    except LeftToQueue as left:
                        mine, done = False, [str(left)]
            snapshot = topology.snapshot(cluster, blobs, cluster.load_view())
        for line in done or [f"{name}: nothing was changed"]:
            notify(line)
        quiet, actual = DEPLOY_TAG.items() <= run.tags.items(), snapshot.actual
        if not mine or actual is None or (quiet and newest == actual.data_version):
            return
        left = differences(topology.declaration, described, actual)
        yield dg.MaterializeResult(
            asset_key=key,
            metadata={
                **snapshot.metadata,
                **snapshot.details,
                "done": "; ".join(done) or "nothing",
                "drift": "; ".join(f"{part}: {text}" for part, text in left.items()) or "none",
            },
            data_version=dg.DataVersion(actual.data_version),
            tags=actual.version_tags,
        )

    return deploy


def _checks(topology: DeclaredTopology) -> dg.AssetChecksDefinition:
    words = wanted_checks(topology.alerts)
    specs = [
        dg.AssetCheckSpec(name, asset=topology.key, description=text)
        for name, text in words.items()
    ]

    @dg.multi_asset_check(name=f"check_{topology.identifier}_op", specs=specs, can_subset=True)
    def checks(context: dg.AssetCheckExecutionContext) -> Iterable[dg.AssetCheckResult]:
        with step_errors(), topology.connect() as (cluster, blobs):
            snapshot = topology.snapshot(
                cluster, blobs, cluster.load_view(), topology.nimbus.topology
            )
        now = time.time()
        seen = (
            now
            if snapshot.runs
            else newest_observation(context.instance, topology.key).get(LAST_UPDATED)
        )
        found = {**snapshot.check_results, "fresh": fresh(seen, now, topology.freshness)}
        for key in sorted(context.selected_asset_check_keys, key=lambda item: item.name):
            yield outcome_of(found[key.name], topology.key, key.name, dg.AssetCheckResult)

    return checks


def ask_job(
    verb: str,
    job: str,
    description: str,
    topologies: Mapping[str, DeclaredTopology],
    tags: Mapping[str, str],
) -> dg.JobDefinition:
    """A job that asks nimbus to kill or rebalance one of ``topologies``."""

    @dg.op(name=f"{job}_op", out=dg.Out(dg.Nothing), description=description)
    def ask(context: dg.OpExecutionContext, config: AskConfig) -> None:
        name = config.name or (next(iter(topologies)) if len(topologies) == 1 else "")
        with step_errors():
            if name not in topologies:
                raise InvalidRequest(
                    f"name is {name!r}, declared are {', '.join(sorted(topologies))}: name one of them"
                )
            with topologies[name].nimbus.client() as nimbus:
                asked = change_topology(
                    nimbus, name, verb=verb, wait=False, wait_secs=config.wait_secs
                )
        context.add_output_metadata({"topology": name, "run_id": str(asked.run_id or "none")})

    @dg.job(
        name=job,
        executor_def=dg.in_process_executor,
        description=description,
        tags={**tags, **PRIORITY_TAGS},
    )
    def asking() -> None:
        ask()

    return asking


def _jobs(topology: DeclaredTopology) -> list[Any]:
    name, identifier, tags = topology.name, topology.identifier, topology_tags(topology.name)

    ended = f"Ends {name}: silence, a wait, and the end. It stays ended until somebody deploys it by hand."
    found: list[Any] = [ask_job("kill", f"kill_{identifier}", ended, {name: topology}, tags)]
    for verb, config, what in (
        (
            "submit",
            DeployConfig(only_submit=True),
            "Submits {} as declared; leaves it alone when it runs.",
        ),
        (
            "deploy",
            DeployConfig(deploy_code=True),
            "Brings {} to what is declared: submits, deploys, heals.",
        ),
    ):
        job = dg.define_asset_job(
            f"{verb}_{identifier}",
            selection=dg.AssetSelection.assets(topology.key).without_checks(),
            executor_def=dg.in_process_executor,
            description=what.format(name),
            tags={**tags, **DEPLOY_TAG, **PRIORITY_TAGS},
            config=dg.RunConfig(ops={f"deploy_{identifier}_op": config}),
        )
        found.append(job)
    return found


def _schedules(topology: DeclaredTopology) -> list[dg.ScheduleDefinition]:
    name, wanted, tags = topology.name, topology.schedule, topology_tags(topology.name)

    def schedule(
        verb: str, cron: str, what: str, decide: Callable[..., dg.RunRequest | str]
    ) -> dg.ScheduleDefinition:
        @dg.schedule(
            name=f"{verb}_{topology.identifier}_schedule",
            job_name=f"{verb}_declared",
            cron_schedule=cron,
            execution_timezone=wanted.timezone,
            default_status=dg.DefaultScheduleStatus.RUNNING,
            description=what,
        )
        def tick(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
            try:
                with topology.connect(context.instance) as (cluster, blobs):
                    conf = topology.zookeeper.conf()
                    ops = OperationsContext(
                        cluster=cluster, blobs=blobs, conf=conf, planner=plan_placement
                    )
                    answer = decide(context.instance, ops, read_actual(cluster, blobs, name))
            except StormDagsterError as error:
                answer = error.message
            if not isinstance(answer, str) and run_under_way(context.instance, tags=tags):
                answer = f"a run changes {name} already"
            return dg.SkipReason(answer) if isinstance(answer, str) else answer

        return tick

    def deploy(
        instance: dg.DagsterInstance, _: OperationsContext, actual: Actual | None
    ) -> dg.RunRequest | str:
        differ = differences(topology.declaration, topology.described, actual)
        if "target" in differ:
            return f"{name} cannot be deployed: {differ['target']}"
        if "running" in differ and newest_version(instance, topology.key) is not None:
            return f"{name} was ended: it stays so until somebody deploys it by hand"
        # A run would load the newer files, and leave the same difference from those that are loaded
        # here.
        newer = topology.files.changed()
        left_alone = ("code", "conf") if topology.policy == "manual" or newer else ()
        if all(part.partition(".")[0] in left_alone for part in differ):
            return (
                f"{name} has newer code on disk: reload definitions"
                if newer
                else f"{name} is as declared"
            )
        return dg.RunRequest(asset_selection=[topology.key], tags=tags)

    def rebalance(
        _: dg.DagsterInstance, ops: OperationsContext, actual: Actual | None
    ) -> dg.RunRequest | str:
        if actual is None or actual.status not in ("ACTIVE", "INACTIVE"):
            return f"{name} does not run" if actual is None else f"{name} is {actual.status}"
        if not plan_rebalance(ops, actual.topology_id, dry_run=True).moved:
            return f"{name} is balanced, no plan would change it"
        return dg.RunRequest(
            run_config={"ops": {f"{REBALANCE_JOB}_op": {"config": {"name": name}}}}, tags=tags
        )

    found = (
        (
            "deploy",
            wanted.deploy,
            f"Brings {name} to what is declared, unless it was ended.",
            deploy,
        ),
        (
            "rebalance",
            wanted.rebalance,
            f"Moves the fewest tasks of {name} that restore balance.",
            rebalance,
        ),
    )
    return [
        schedule(verb, cron, what, decide) for verb, cron, what, decide in found if cron is not None
    ]
