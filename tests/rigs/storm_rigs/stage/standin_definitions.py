"""Definitions of a cluster that stand in for ours, for a webserver of tests.

Its jobs have the names and the configuration of ours and do nothing. Beside them are the real
definitions of a cluster called ``prod``, whose ZooKeeper nothing runs.
"""

# Dagster reads annotations as classes: this module does not postpone them.
from itertools import pairwise

import dagster as dg

from storm_dagster import build_storm_defs

PARTITIONS = dg.DynamicPartitionsDefinition(name="storm_topologies")
STAGES = (
    "topology_conf",
    "topology_code",
    "task_info",
    "assignment",
    "published_assignment",
    "active_topology",
)


class SubmitConfig(dg.Config):
    handle: str | None = None
    token: str | None = None
    inactive: bool = False
    allow_degraded: bool = False


class NameConfig(dg.Config):
    name: str


class KillConfig(NameConfig):
    wait_secs: int | None = None


class UpdateConfig(NameConfig):
    handle: str | None = None
    token: str | None = None


@dg.asset(key=["storm", STAGES[0]], partitions_def=PARTITIONS)
def first_stage(context: dg.AssetExecutionContext, config: SubmitConfig) -> dg.MaterializeResult:
    """Fails as its handle says."""
    if config.handle == "typed-failure":
        message = "topology needs 4 slots, 3 are free"
        raise dg.Failure(
            description="too few slots",
            metadata={"error_type": "Unavailable", "message": message},
        )
    if config.handle == "plain-failure":
        raise ValueError("something broke")
    metadata = {"token": config.token or "", "name": context.partition_key}
    return dg.MaterializeResult(metadata=metadata)


def _later_stage(name: str, before: str) -> dg.AssetsDefinition:
    @dg.asset(key=["storm", name], partitions_def=PARTITIONS, deps=[dg.AssetKey(["storm", before])])
    def later() -> dg.MaterializeResult:
        return dg.MaterializeResult()

    return later


@dg.op
def kill_topology_op(config: KillConfig) -> None:
    """Does nothing."""


@dg.op
def restart_topology_op(config: NameConfig) -> None:
    """Does nothing."""


@dg.op
def update_topology_op(config: UpdateConfig) -> None:
    """Does nothing."""


@dg.job(executor_def=dg.in_process_executor)
def update_topology() -> None:
    """One op."""
    update_topology_op()


@dg.job(executor_def=dg.in_process_executor)
def kill_topology() -> None:
    """One op."""
    kill_topology_op()


@dg.job(executor_def=dg.in_process_executor)
def restart_topology() -> None:
    """One op."""
    restart_topology_op()


_assets = [
    first_stage,
    *(_later_stage(name, before) for before, name in pairwise(STAGES)),
]
_submit = dg.define_asset_job(
    "submit_topology",
    dg.AssetSelection.assets(*_assets),
    partitions_def=PARTITIONS,
    executor_def=dg.in_process_executor,
)
_prod = {"storm.zookeeper.servers": ["127.0.0.1:9"], "storm.zookeeper.connection.timeout": 200}
defs = dg.Definitions.merge(
    dg.Definitions(
        assets=_assets, jobs=[_submit, kill_topology, update_topology, restart_topology]
    ),
    build_storm_defs(
        cluster="prod", overrides=_prod, default_status=dg.DefaultSensorStatus.STOPPED
    ),
)
