"""Real worker processes without nimbus and supervisors: assignments are written by hand.

For tests and benchmarks of the data plane. The rig plays the supervisor (files, processes) and
nimbus (the records in ZooKeeper) for one topology.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from storm_dagster.host.worker_spec import WorkerSpec
from storm_dagster.model import paths
from storm_dagster.model.records import (
    Assignment,
    StormBase,
    TaskBeats,
    TaskTable,
    WorkerSlot,
    decode_record,
    encode_record,
)
from storm_dagster.model.topology import TopologySpec
from storm_dagster.zk.storm_cluster_state import StormClusterState

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 5
# Below the ports that the kernel gives to connections, and those of `dev --ports auto`; each worker
# of pytest has its own.
_ports = itertools.cycle(
    [10_000 + 2_000 * _WORKER + (os.getpid() + number) % 2_000 for number in range(2_000)]
)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at this moment. No two calls return the same."""
    for port in _ports:
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return port
    raise AssertionError("unreachable")


class WorkerRig:
    """One topology on hand-made slots ``(node, port)``."""

    def __init__(
        self,
        folder: Path,
        cluster: StormClusterState,
        zk_conf: Mapping[str, Any],
        spec: TopologySpec,
        table: TaskTable,
        *,
        topology_id: str = "wc-1-1700000000",
        conf: Mapping[str, Any] | None = None,
        code: Mapping[str, str] | None = None,
        name: str = "wc",
        launched: int = 1700000000,
    ) -> None:
        self.folder = folder
        self.name = name
        self.launched = launched
        self.cluster = cluster
        self.spec = spec
        self.table = table
        self.topology_id = topology_id
        self.zk_conf = dict(zk_conf)
        self.hosts: dict[str, str] = {}
        """Node -> its address on loopback, by default 127.0.0.1."""
        self.homes: dict[str, Path] = {}
        """Node -> HOME of its workers, by default the rig's folder."""
        self.processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self.code_dir = folder / "stormdist" / topology_id
        (self.code_dir / "code" / "resources").mkdir(parents=True)
        for name, text in (code or {}).items():
            target = self.code_dir / "code" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        (self.code_dir / "stormconf.ser").write_text(json.dumps(dict(conf or {})), encoding="utf-8")
        (self.code_dir / "stormcode.ser").write_bytes(spec.to_json())
        self._put(paths.tasks(topology_id), encode_record(table))
        self._put(
            paths.taskbeats(topology_id),
            encode_record(TaskBeats(topology_id=topology_id, topology_master=1)),
        )
        self._put(paths.task_errors(topology_id), b"")
        self._put(paths.metrics(topology_id), b"")

    def _put(self, path: str, data: bytes) -> None:
        state = self.cluster.state
        if state.exists(path):
            state.set_data(path, data)
        else:
            state.create_node(path, data)

    def assign(self, slots: Mapping[tuple[str, int], str], status: str = "ACTIVE") -> None:
        """Publish: slot -> task ranges. The topology's record is written along with it."""
        assignment = Assignment(
            topology_id=self.topology_id,
            code_dir=self.topology_id,
            node_host={node: self.hosts.get(node, "127.0.0.1") for node, _ in slots},
            workers=tuple(
                WorkerSlot(
                    node=node, host=self.hosts.get(node, "127.0.0.1"), port=port, tasks=tasks
                )
                for (node, port), tasks in slots.items()
            ),
            task_start_secs={},
            timestamp_ms=int(time.time() * 1000),
        )
        self._put(paths.assignment(self.topology_id), encode_record(assignment))
        self.set_status(status)

    def set_status(self, status: str) -> None:
        """Write the topology's record."""
        base = StormBase.model_validate(
            {
                "name": self.name,
                "launch_time_secs": self.launched,
                "status": status,
                "workers": 2,
                "executors": {},
                "token": "t",
            }
        )
        self._put(paths.topology(self.topology_id), encode_record(base))

    def start(self, node: str, port: int) -> subprocess.Popen[bytes]:
        """Start (again) the worker of a slot, as a supervisor does."""
        worker_id = secrets.token_hex(4)
        folder = self.folder / "workers" / worker_id
        folder.mkdir(parents=True)
        spec = WorkerSpec(
            worker_id=worker_id,
            token=secrets.token_hex(16),
            topology_id=self.topology_id,
            node=node,
            host=self.hosts.get(node, "127.0.0.1"),
            port=port,
            home=str(self.homes.get(node, self.folder)),
            conf=self.zk_conf,
            code_dir=str(self.code_dir),
            heartbeat_path=str(folder / "heartbeat.json"),
            log_path=str(self.log_path(node, port)),
        )
        spec.write(folder / "spec.json")
        python_path = os.pathsep.join(
            [str(self.code_dir / "code"), os.environ.get("PYTHONPATH", "")]
        )
        with self.log_path(node, port).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "storm_dagster.worker", str(folder / "spec.json")],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": python_path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.processes[(node, port)] = process
        return process

    def log_path(self, node: str, port: int) -> Path:
        """The log of a slot's workers."""
        return self.folder / f"worker-{node}-{port}.log"

    def log(self, node: str, port: int) -> str:
        """Log lines of the workers of a slot."""
        return self.log_path(node, port).read_text(encoding="utf-8")

    def live(self) -> dict[tuple[str, int], Any]:
        """Live workers by slot."""
        return {**self.cluster.live_workers(self.topology_id)}

    def running(self) -> bool:
        """Whether every slot of the assignment has a live worker all of whose tasks run."""
        found = self.cluster.read_assignment(self.topology_id)
        if found is None:
            return False
        live = self.live()
        return all(
            worker.slot in live
            and live[worker.slot].status == "running"
            and live[worker.slot].tasks == worker.tasks
            for worker in found[0].workers
        )

    def beats(self) -> TaskBeats:
        """The liveness record."""
        raw = self.cluster.state.get_data(paths.taskbeats(self.topology_id))
        return decode_record(TaskBeats, raw or b"")

    def stop(self) -> None:
        """End every worker that was started."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
