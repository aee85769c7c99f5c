"""Schedules of a declared topology: deploy and rebalance."""

from collections.abc import Callable

import dagster as dg

from storm_dagster.defs.declared.declaration import RunningTopology, differences
from storm_dagster.defs.declared.deploy import read_actual
from storm_dagster.defs.declared.owner import ownership_problem
from storm_dagster.defs.declared.topology import DeclaredTopology, newest_version
from storm_dagster.defs.keys import run_under_way, topology_tags
from storm_dagster.defs.scheduled_runs import assignment_tags, earlier_request
from storm_dagster.model.dagster_names import SCHEDULED_TAG
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.scheduled_rebalance import scheduled_gain

DEPLOY_JOB = "deploy_declared"
"""The job that deploys the selected declared topologies."""
REBALANCE_JOB = "rebalance_declared"
"""The job that rebalances a declared topology."""

_Decision = Callable[
    [DeclaredTopology, dg.DagsterInstance, OperationsContext, RunningTopology | None],
    dg.RunRequest | str,
]
"""The run of a tick, or the reason without one."""


def topology_schedules(topology: DeclaredTopology) -> list[dg.ScheduleDefinition]:
    """The configured schedules of the topology."""
    name = topology.name
    settings = topology.schedule
    schedules: list[dg.ScheduleDefinition] = []
    if settings.deploy is not None:
        description = f"Applies the declaration of {name}, unless it was ended."
        schedules.append(
            _schedule(topology, "deploy", DEPLOY_JOB, settings.deploy, description, _decide_deploy)
        )
    if settings.rebalance is not None:
        description = f"Moves the fewest tasks of {name} that restore balance."
        schedules.append(
            _schedule(
                topology,
                "rebalance",
                REBALANCE_JOB,
                settings.rebalance,
                description,
                _decide_rebalance,
            )
        )
    return schedules


def _schedule(
    topology: DeclaredTopology,
    verb: str,
    job: str,
    cron: str,
    description: str,
    decide: _Decision,
) -> dg.ScheduleDefinition:
    """A schedule whose ticks ``decide``.

    No tick has a run while another run changes the topology.
    """
    name = topology.name

    @dg.schedule(
        name=f"{verb}_{topology.identifier}_schedule",
        job_name=job,
        cron_schedule=cron,
        execution_timezone=topology.schedule.timezone,
        default_status=topology.schedule_status,
        description=description,
    )
    def tick(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        try:
            with topology.connect(context.instance) as (cluster, blobs):
                ops = topology.operations(cluster, blobs)
                actual = read_actual(cluster, blobs, name)
                decision = decide(topology, context.instance, ops, actual)
        except StormDagsterError as error:
            return dg.SkipReason(error.message)
        if isinstance(decision, str):
            return dg.SkipReason(decision)
        if run_under_way(context.instance, tags=topology_tags(name)):
            return dg.SkipReason(f"a run changes {name} already")
        return decision

    return tick


def _decide_deploy(
    topology: DeclaredTopology,
    instance: dg.DagsterInstance,
    _: OperationsContext,
    actual: RunningTopology | None,
) -> dg.RunRequest | str:
    """Deploy the differences; code only if the policy and the files allow it."""
    name = topology.name
    differ = differences(topology.declaration, topology.described, actual)
    if "target" in differ:
        return f"{name} cannot be deployed: {differ['target']}"
    if "owner" in differ:
        return f"{name} is {differ['owner']}"
    if "running" in differ and newest_version(instance, topology.key) is not None:
        return f"{name} was ended: it stays so until a user deploys it by hand"
    # A run would load the newer files, and the difference from the loaded ones would stay.
    is_newer = topology.files.changed()
    ignored = ("code", "conf") if topology.policy == "manual" or is_newer else ()
    if any(part.partition(".")[0] not in ignored for part in differ):
        return dg.RunRequest(asset_selection=[topology.key], tags=topology.run_tags)
    if is_newer:
        return f"{name} has newer code on disk: reload definitions"
    return f"{name} is as declared"


def _decide_rebalance(
    topology: DeclaredTopology,
    instance: dg.DagsterInstance,
    ops: OperationsContext,
    actual: RunningTopology | None,
) -> dg.RunRequest | str:
    """Rebalance, if the topology is steady and gains enough."""
    name = topology.name
    view = ops.cluster.load_view()
    running = None if actual is None else view.topologies.get(actual.topology_id)
    if actual is None or running is None:
        return f"{name} does not run"
    problem = ownership_problem(name, topology.declaration.owner, actual.owner)
    if problem is not None:
        return f"{name} is {problem}"
    gain = scheduled_gain(ops, view, running)
    if not gain.moved:
        return f"{name}: {gain.reason}"
    earlier = earlier_request(instance, running)
    if earlier:
        return f"{name}: {gain.reason}; {earlier}"
    ops_config = {f"{REBALANCE_JOB}_op": {"config": {"name": name}}}
    run_tags = {**topology.run_tags, **assignment_tags(running), SCHEDULED_TAG: "true"}
    return dg.RunRequest(run_config={"ops": ops_config}, tags=run_tags)
