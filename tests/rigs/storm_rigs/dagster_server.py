"""A Dagster webserver with the definitions of a cluster that stand in for ours, and nothing that
executes runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from storm_dagster.testing.waiting import eventually
from storm_rigs.ports import free_port

_DEFINITIONS = """
import dagster as dg

partitions = dg.DynamicPartitionsDefinition(name="storm_topologies")
STAGES = ["topology_conf", "topology_code", "task_info", "assignment", "published_assignment", "active_topology"]


class SubmitConfig(dg.Config):
    handle: str | None = None
    token: str | None = None
    inactive: bool = False
    allow_degraded: bool = False


def stage(name, before):
    deps = [dg.AssetKey(["storm", before])] if before else []

    if before is None:

        @dg.asset(key=["storm", name], partitions_def=partitions)
        def first(context: dg.AssetExecutionContext, config: SubmitConfig):
            if config.handle == "typed-failure":
                raise dg.Failure(
                    description="too few slots",
                    metadata={"error_type": "Unavailable", "message": "topology needs 4 slots, 3 are free"},
                )
            if config.handle == "plain-failure":
                raise ValueError("something broke")
            return dg.MaterializeResult(metadata={"token": config.token or "", "name": context.partition_key})

        return first

    @dg.asset(key=["storm", name], partitions_def=partitions, deps=deps)
    def later():
        return dg.MaterializeResult()

    return later


assets = [stage(name, STAGES[n - 1] if n else None) for n, name in enumerate(STAGES)]


class NameConfig(dg.Config):
    name: str


class KillConfig(dg.Config):
    name: str
    wait_secs: int | None = None


@dg.op
def kill_topology_op(config: KillConfig):
    pass


@dg.op
def restart_topology_op(config: NameConfig):
    pass


class UpdateConfig(NameConfig):
    handle: str | None = None
    token: str | None = None


@dg.op
def update_topology_op(config: UpdateConfig):
    pass


@dg.job(executor_def=dg.in_process_executor)
def update_topology():
    update_topology_op()


@dg.job(executor_def=dg.in_process_executor)
def kill_topology():
    kill_topology_op()


@dg.job(executor_def=dg.in_process_executor)
def restart_topology():
    restart_topology_op()


defs = dg.Definitions(
    assets=assets,
    jobs=[
        dg.define_asset_job(
            "submit_topology", dg.AssetSelection.assets(*assets), partitions_def=partitions, executor_def=dg.in_process_executor
        ),
        kill_topology,
        update_topology,
        restart_topology,
    ],
)

# Beside them the real definitions of a cluster with a name, whose ZooKeeper nobody runs.
from storm_dagster import build_storm_defs

prod = {"storm.zookeeper.servers": ["127.0.0.1:9"], "storm.zookeeper.connection.timeout": 200}
stopped = dg.DefaultSensorStatus.STOPPED
defs = dg.Definitions.merge(defs, build_storm_defs(cluster="prod", overrides=prod, default_status=stopped))
"""


DAGSTER_YAML = """
telemetry: {enabled: false}
run_coordinator: {module: dagster._core.run_coordinator, class: DefaultRunCoordinator}
"""


@dataclass(frozen=True)
class DagsterServer:
    """A running webserver."""

    url: str
    """GraphQL URL."""
    pid: int


@contextmanager
def serve_dagster(home: Path) -> Iterator[DagsterServer]:
    """A webserver on the instance of ``home``, with the settings that stand there. No daemon
    runs.
    """
    (home / "throwaway_defs.py").write_text(_DEFINITIONS)
    workspace = home / "workspace.yaml"
    workspace.write_text(
        f"load_from:\n  - python_file: {{relative_path: {home}/throwaway_defs.py, location_name: storm}}\n"
    )
    port = free_port()
    log = (home / "webserver.log").open("wb")
    command = [
        str(Path(sys.executable).with_name("dagster-webserver")),
        "-w",
        str(workspace),
        "-h",
        "127.0.0.1",
    ]
    process = subprocess.Popen(
        [*command, "-p", str(port)],
        env={**os.environ, "DAGSTER_HOME": str(home), "DAGSTER_DISABLE_TELEMETRY": "1"},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    base = f"http://127.0.0.1:{port}"

    def up() -> bool:
        assert process.poll() is None, (home / "webserver.log").read_text()[-3000:]
        return httpx.get(f"{base}/server_info", timeout=2, trust_env=False).status_code == 200

    try:
        eventually(up, timeout=90, what="Dagster's webserver", ignore=(httpx.HTTPError,))
        yield DagsterServer(f"{base}/graphql", process.pid)
    finally:
        # The whole group that this fixture started: webserver and its code server.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        log.close()
