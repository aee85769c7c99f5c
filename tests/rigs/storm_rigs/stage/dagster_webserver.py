"""Dagster's webserver and ours, as processes on an instance folder."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from storm_rigs.servers.ports import free_port
from storm_rigs.stage.child import await_child, start_child, stop_child

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
    """A webserver on the instance of ``home``, with its settings and the definitions of a cluster
    that stand in for ours. No daemon runs: what is queued stays so, and what is launched is forked
    by a code server as that of ``dev``, since a process of its own would take seconds.
    """
    socket = home / "code.sock"
    code = [sys.executable, "-m", "storm_dagster", "daemon", "code", "--home", str(home)]
    code += ["--module", "storm_rigs.stage.standin_definitions", "--socket", str(socket)]
    env = {"DAGSTER_HOME": str(home), "DAGSTER_DISABLE_TELEMETRY": "1"}
    rigs = str(Path(__file__).parents[2])
    path = os.pathsep.join([rigs, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    code_log = home / "code.log"
    code_server = start_child(code, code_log, env={**env, "PYTHONPATH": path}, own_session=True)
    try:
        await_child(code_server, code_log, socket.exists, 90, "the code server")
        workspace = home / "workspace.yaml"
        location = {"socket": str(socket), "location_name": "storm"}
        workspace.write_text(json.dumps({"load_from": [{"grpc_server": location}]}))
        port = free_port()
        argv = [str(Path(sys.executable).with_name("dagster-webserver")), "-w", str(workspace)]
        argv += ["-h", "127.0.0.1", "-p", str(port)]
        with _served(argv, home / "webserver.log", env, port, 90) as (url, pid):
            yield DagsterServer(f"{url}/graphql", pid)
    finally:
        stop_child(code_server)


@contextmanager
def dagster_web(home: Path, conf: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """``storm-dagster daemon web`` without any code location: its URL and its pid."""
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    (home / "workspace.yaml").write_text("load_from: []\n")
    port = free_port()
    argv = [sys.executable, "-m", "storm_dagster", "daemon", "web", "--home", str(home)]
    argv += ["--port", str(port), "--workspace", str(home / "workspace.yaml")]
    for key, value in conf.items():
        argv += ["-c", f"{key}={json.dumps(value)}"]
    with _served(argv, home / "out", {"DAGSTER_HOME": str(home)}, port, 120) as server:
        yield server


@contextmanager
def _served(
    argv: list[str], log: Path, env: Mapping[str, str], port: int, patience: float
) -> Iterator[tuple[str, int]]:
    """The URL and the pid of a webserver, once it serves or asks for a proof."""
    url = f"http://127.0.0.1:{port}"

    def serves() -> bool:
        response = httpx.get(f"{url}/server_info", timeout=2, trust_env=False)
        return response.status_code in (200, 401)

    process = start_child(argv, log, env=env, own_session=True)
    try:
        await_child(process, log, serves, patience, "the webserver", ignore=(httpx.HTTPError,))
        yield url, process.pid
    finally:
        stop_child(process)
