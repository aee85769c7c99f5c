"""Supervisor processes with stand-ins for their workers: nimbus is records and a blob server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from storm_dagster.host.processes import start_ticks
from storm_dagster.model.records import Assignment, SupervisorInfo, WorkerSlot
from storm_dagster.testing.waiting import patience
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.operations.storm_client import as_storm
from storm_rigs.servers.blob_server import BlobServer
from storm_rigs.stage.child import start_child

_PROGRAM = """
import json, logging, signal, sys, threading
from pathlib import Path
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.supervisor.daemon import run
home, conf, name, ports = sys.argv[1:]
logging.basicConfig(level="INFO", format="%(asctime)s %(name)s %(message)s")
stop, hurry = threading.Event(), threading.Event()
def on_signal(*_):
    (hurry if stop.is_set() else stop).set()
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, on_signal)
cluster_conf = load_cluster_conf(None, json.loads(conf))
sys.exit(run(cluster_conf, Path(home), name, stop, json.loads(ports), hurry))
"""


@dataclass
class SupervisorRig:
    """A HOME, a cluster, a blob server, and supervisors that end with the test."""

    home: Path
    conf: dict[str, Any]
    cluster: StormClusterState
    blobs: BlobServer
    python: str
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def stop(self) -> None:
        """End the supervisors and the workers, real or standing in, that they have started."""
        for process in self.started:
            process.kill()
            process.wait(timeout=patience(60))
        # A supervisor's end is not its workers' end. They are found by the path of their file: one
        # that was started a moment ago has written nothing yet.
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if any(f"{self.home}/" in argument for argument in process.cmdline()):
                    process.kill()

    def supervisor(
        self,
        name: str = "s1",
        ports: tuple[int, ...] = (6900, 6901),
        prefix: Sequence[str] = (),
        **conf: Any,
    ) -> subprocess.Popen[bytes]:
        """Start (again) a supervisor; ``conf``: keys with "__" for ".".

        ``prefix`` is a command line in front of its own.
        """
        merged = {**self.conf, **{key.replace("__", "."): value for key, value in conf.items()}}
        argv = [*prefix, sys.executable, "-c", _PROGRAM, str(self.home)]
        argv += [json.dumps(merged), name, json.dumps(ports)]
        process = start_child(argv, self.home / f"supervisor-{name}.log")
        self.started.append(process)
        return process

    def code(self, code_dir: str, behaviour: str = "", **conf: Any) -> None:
        """Put the blobs of a code whose workers stand in as ``behaviour`` says."""
        self.blobs.put_code(
            code_dir,
            {
                "topology.python": self.python,
                "topology.environment": {"STAND_IN": behaviour, "WORD": "storm"},
                **conf,
            },
        )

    def assign(
        self,
        topology_id: str,
        *ports: int,
        code: str | None = None,
        tasks: str = "1-2",
        node: str = "s1",
        restarts: int = 0,
    ) -> None:
        """Publish an assignment of the node's ports."""
        as_storm(self.cluster).set_assignment(
            topology_id,
            Assignment(
                topology_id=topology_id,
                code_dir=code or topology_id,
                node_host={node: "127.0.0.1"},
                workers=tuple(
                    WorkerSlot(node=node, host="127.0.0.1", port=port, tasks=tasks)
                    for port in ports
                ),
                task_start_secs={},
                timestamp_ms=1,
                # Without it new code is for each worker's next start.
                type="UpdateTopology" if code else "Assign",
                restarts=restarts,
            ),
        )

    def starts(self, topology_id: str | None = None) -> list[dict[str, Any]]:
        """What each stand-in has noted at its start, of all topologies or of one."""
        try:
            text = (self.home / "starts").read_text()
        except FileNotFoundError:
            return []
        # A line that is being written may be seen without its end.
        complete = text.rpartition("\n")[0]
        starts = [json.loads(line) for line in complete.splitlines()]
        return [start for start in starts if topology_id in (None, start["topology_id"])]

    def running(self) -> dict[int, int]:
        """Port -> pid of the stand-ins that live and beat."""
        alive = {}
        for start in self.starts():
            if alive_now(start["pid"]) and os.path.exists(start["heartbeat_path"]):
                alive[start["port"]] = start["pid"]
        return alive

    def info(self, name: str = "s1") -> SupervisorInfo | None:
        """Its record."""
        return as_storm(self.cluster).supervisor_info(name)

    def log(self, name: str = "s1") -> str:
        """Its output."""
        return (self.home / f"supervisor-{name}.log").read_text()


def alive_now(pid: int) -> bool:
    """True if a process of that id lives."""
    return start_ticks(pid) is not None
