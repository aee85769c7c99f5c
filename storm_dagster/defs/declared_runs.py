"""What a declared topology does in Dagster: its asset, jobs, checks, the sensor that watches it, its schedules."""

# No `from __future__ import annotations`: Dagster reads the annotations of the decorated functions.
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg
from pydantic import Field

from storm_dagster.client import NimbusClient
from storm_dagster.defs.component_attributes import ScheduleAttributes, TopologyAlerts
from storm_dagster.defs.declared import Actual, Declaration, Described, differences
from storm_dagster.defs.declared_checks import Verdict, verdicts, wanted_checks
from storm_dagster.defs.declared_deploy import DeployPolicy, bring_about, read_actual
from storm_dagster.defs.declared_metadata import component_numbers, topology_metadata
from storm_dagster.defs.declared_requests import deploy_request, mark_final_failure
from storm_dagster.defs.failures import step_errors
from storm_dagster.defs.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.keys import topology_tags
from storm_dagster.defs.observation_sensors import digest, read_cursor
from storm_dagster.model.errors import NotAlive, StormDagsterError

__all__ = ["DeclaredTopology", "topology_definitions"]

_SEEN_EVERY_SECS = 300.0
_OBSERVED_EVERY_SECS = 60.0
# Dagster's tags by which a materialization says of which code and data it is.
_CODE_VERSION_TAG = "dagster/code_version"
_DATA_VERSION_TAG = "dagster/data_version"


class DeployConfig(dg.Config):
    """What materializing the asset does."""

    only_submit: bool = Field(
        default=False,
        description="Submit the topology when it does not run, and leave it alone when it does.",
    )
    deploy_code: bool = Field(
        default=False,
        description="Deploy changed code even though the deploy policy is manual: a hot deploy.",
    )


class KillDeclaredConfig(dg.Config):
    """How the topology ends."""

    wait_secs: int = Field(default=30, ge=0, description="Seconds between the spouts' silence and the end.")


@dataclass(frozen=True)
class DeclaredTopology:
    """Everything that the definitions of one declared topology are made from."""

    declaration: Declaration
    described: Described
    identifier: str
    specs: Sequence[dg.AssetSpec]
    """The topology's, then those of its components."""
    components: Mapping[str, dg.AssetKey]
    policy: DeployPolicy
    batch: Mapping[str, Any]
    alerts: TopologyAlerts
    schedule: ScheduleAttributes
    zookeeper: ZooKeeperResource
    blobstore: BlobStoreResource
    nimbus: Callable[..., NimbusClient]

    @property
    def key(self) -> dg.AssetKey:
        """The topology's."""
        return self.specs[0].key

    @property
    def name(self) -> str:
        """The topology's."""
        return self.declaration.name

    def actual(self) -> Actual | None:
        """What runs; :class:`Unavailable` when the cluster is out of reach."""
        return read_actual(self.zookeeper, self.blobstore, self.name)

    def show(self, patience: float = 10.0) -> dict[str, Any] | None:
        """`show` of the topology, ``None`` when it does not run."""
        with self.nimbus(patience) as nimbus:
            try:
                return nimbus.get(f"/v1/topologies/{self.name}")
            except NotAlive:
                return None


def topology_definitions(topology: DeclaredTopology) -> dg.Definitions:
    """All of them."""
    jobs = _jobs(topology)
    return dg.Definitions(
        assets=[_asset(topology), *topology.specs[1:]],
        asset_checks=[_checks(topology)],
        jobs=jobs,
        sensors=[_watch(topology)],
        schedules=_schedules(topology),
    )


def _asset(topology: DeclaredTopology) -> dg.AssetsDefinition:
    key = topology.key

    @dg.multi_asset(name=f"deploy_{topology.identifier}_op", specs=[topology.specs[0]])
    def deploy(context: dg.AssetExecutionContext, config: DeployConfig) -> dg.MaterializeResult:
        policy = "hot" if config.deploy_code and topology.policy == "manual" else topology.policy
        with step_errors(), mark_final_failure(context), topology.nimbus() as nimbus:
            done = bring_about(
                nimbus,
                topology.declaration,
                topology.described,
                topology.actual(),
                policy=policy,
                batch=topology.batch,
                token=f"{context.run.run_id}-{topology.identifier}"[:200],
                say=context.log.info,
                only_submit=config.only_submit,
            )
            for line in done or [f"{topology.name} runs already: nothing was changed"]:
                context.log.info(line)
            document, actual = topology.show(), topology.actual()
        left = differences(topology.declaration, topology.described, actual)
        return dg.MaterializeResult(
            asset_key=key,
            metadata={
                **topology_metadata(topology.name, document),
                "done": "; ".join(done) or "nothing",
                "drift": "; ".join(f"{part}: {text}" for part, text in left.items()) or "none",
                "running_code_version": (actual.code_version if actual else None) or "none",
            },
        )

    return deploy


def _checks(topology: DeclaredTopology) -> dg.AssetChecksDefinition:
    specs = [
        dg.AssetCheckSpec(name, asset=topology.key, description=text)
        for name, text in wanted_checks(topology.alerts).items()
    ]

    @dg.multi_asset_check(name=f"check_{topology.identifier}_op", specs=specs, can_subset=True)
    def checks(context: dg.AssetCheckExecutionContext) -> Iterable[dg.AssetCheckResult]:
        with step_errors():
            actual, document = topology.actual(), topology.show()
        found = verdicts(topology.declaration, topology.described, actual, document, topology.alerts)
        for key in sorted(context.selected_asset_check_keys, key=lambda item: item.name):
            verdict = found[key.name]
            yield dg.AssetCheckResult(
                passed=verdict.passed,
                asset_key=topology.key,
                check_name=key.name,
                severity=verdict.severity,
                description=verdict.words,
                metadata=dict(verdict.metadata),
            )

    return checks


def _jobs(topology: DeclaredTopology) -> list[Any]:
    name, identifier = topology.name, topology.identifier
    selection = dg.AssetSelection.assets(topology.key).without_checks()
    tags = topology_tags(name)

    def asset_job(verb: str, description: str, config: DeployConfig) -> Any:
        return dg.define_asset_job(
            f"{verb}_{identifier}",
            selection=selection,
            executor_def=dg.in_process_executor,
            description=description,
            tags=tags,
            config=dg.RunConfig(ops={f"deploy_{identifier}_op": config}),
        )

    @dg.op(name=f"kill_{identifier}_op", out=dg.Out(dg.Nothing), description=f"Ends {name}.")
    def kill(context: dg.OpExecutionContext, config: KillDeclaredConfig) -> None:
        with step_errors(), topology.nimbus() as nimbus:
            answer = nimbus.post(f"/v1/topologies/{name}/kill", {"wait_secs": config.wait_secs}, repeat=False)
        context.add_output_metadata({"run_id": str(answer.get("run_id") or "none")})

    @dg.job(
        name=f"kill_{identifier}",
        executor_def=dg.in_process_executor,
        description=f"Ends {name}: silence, a wait, and the end. It stays ended until somebody submits it.",
        tags=tags,
    )
    def kill_job() -> None:
        kill()

    return [
        asset_job(
            "submit",
            f"Submits {name} as declared; leaves it alone when it runs.",
            DeployConfig(only_submit=True),
        ),
        asset_job(
            "deploy",
            f"Brings {name} to what is declared: submits it, deploys changed code, heals drift.",
            DeployConfig(deploy_code=True),
        ),
        kill_job,
    ]


def _schedules(topology: DeclaredTopology) -> list[dg.ScheduleDefinition]:
    from storm_dagster.defs.rebalance_schedule import ask_for_rebalance

    found: list[dg.ScheduleDefinition] = []
    wanted = topology.schedule
    if wanted.deploy is not None:
        found.append(
            dg.ScheduleDefinition(
                name=f"deploy_{topology.identifier}_schedule",
                job_name=f"deploy_{topology.identifier}",
                run_config=_deploy_config(topology),
                cron_schedule=wanted.deploy,
                execution_timezone=wanted.timezone,
                default_status=dg.DefaultScheduleStatus.RUNNING,
                description=f"Brings {topology.name} to what is declared.",
            )
        )
    if wanted.rebalance is not None:
        identifier = topology.identifier

        @dg.op(name=f"rebalance_{identifier}_op", out=dg.Out(dg.Nothing))
        def rebalance(context: dg.OpExecutionContext) -> None:
            with step_errors(), topology.nimbus() as nimbus:
                answer = nimbus.post(f"/v1/topologies/{topology.name}/rebalance", {}, repeat=False)
            context.add_output_metadata({"run_id": str(answer.get("run_id") or "none")})

        @dg.job(
            name=f"rebalance_{identifier}",
            executor_def=dg.in_process_executor,
            description=ask_for_rebalance.description,
            tags=topology_tags(topology.name),
        )
        def rebalance_job() -> None:
            rebalance()

        found.append(
            dg.ScheduleDefinition(
                name=f"rebalance_{identifier}_schedule",
                job=rebalance_job,
                cron_schedule=wanted.rebalance,
                execution_timezone=wanted.timezone,
                default_status=dg.DefaultScheduleStatus.RUNNING,
                description=f"Moves the fewest tasks of {topology.name} that restore balance.",
            )
        )
    return found


def _watch(topology: DeclaredTopology) -> dg.SensorDefinition:
    @dg.sensor(
        name=f"watch_{topology.identifier}",
        job_name=f"deploy_{topology.identifier}",
        minimum_interval_seconds=30,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Observes {topology.name} and its components, evaluates its checks, and deploys changed code when "
        "the deploy policy is hot or gray.",
    )
    def watch(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        cursor, now = read_cursor(context.cursor), time.time()
        try:
            actual, document = topology.actual(), topology.show(patience=2.0)
        except StormDagsterError as error:
            return dg.SkipReason(error.message)
        found = verdicts(topology.declaration, topology.described, actual, document, topology.alerts)
        events: list[Any] = []
        state = {"seen": cursor.get("seen"), "observed": cursor.get("observed"), "at": cursor.get("at")}
        figures = digest([topology_metadata(topology.name, document, plain=True), sorted(found.items())])
        if figures != state["observed"] and _passed(state["at"], now, _OBSERVED_EVERY_SECS):
            events += _observations(topology, document, found)
            state |= {"observed": figures, "at": now}
        runs = found["all_tasks_run"].passed and actual is not None
        if runs and actual is not None and _passed(state["seen"], now, _SEEN_EVERY_SECS):
            events.append(_seen_running(topology, actual))
            state["seen"] = now
        request = None
        if topology.policy != "manual":
            request = deploy_request(
                context.instance,
                job=f"deploy_{topology.identifier}",
                run_config=_deploy_config(topology),
                declaration=topology.declaration,
                described=topology.described,
                actual=actual,
                document=document,
                now=now,
            )
        return dg.SensorResult(
            asset_events=events,
            run_requests=[request] if request else [],
            skip_reason=None if request else dg.SkipReason(found["all_tasks_run"].words),
            cursor=json.dumps(state),
        )

    return watch


def _deploy_config(topology: DeclaredTopology) -> dict[str, Any]:
    """What nobody launched by hand follows the deploy policy."""
    return {"ops": {f"deploy_{topology.identifier}_op": {"config": {"deploy_code": False}}}}


def _passed(before: Any, now: float, secs: float) -> bool:
    return not isinstance(before, int | float) or not 0 <= now - before < secs


def _seen_running(topology: DeclaredTopology, actual: Actual) -> dg.AssetMaterialization:
    """Keeps the asset fresh, under the version of the code that runs: a changed one shows as such."""
    version = actual.code_version or "unknown"
    return dg.AssetMaterialization(
        asset_key=topology.key,
        description=f"all tasks of {actual.topology_id} run",
        metadata={"topology_id": actual.topology_id, "running_code_version": version},
        tags={_CODE_VERSION_TAG: version, _DATA_VERSION_TAG: f"{actual.topology_id}.{version}"},
    )


def _observations(
    topology: DeclaredTopology, document: Mapping[str, Any] | None, found: Mapping[str, Verdict]
) -> list[Any]:
    events: list[Any] = [
        dg.AssetObservation(
            asset_key=topology.key,
            description=found["all_tasks_run"].words,
            metadata=topology_metadata(topology.name, document),
        )
    ]
    for component, numbers in component_numbers(document).items():
        if component in topology.components:
            events.append(dg.AssetObservation(asset_key=topology.components[component], metadata=numbers))
    for name, verdict in found.items():
        events.append(
            dg.AssetCheckEvaluation(
                asset_key=topology.key,
                check_name=name,
                passed=verdict.passed,
                severity=verdict.severity,
                description=verdict.words,
                metadata=dict(verdict.metadata),
            )
        )
    return events
