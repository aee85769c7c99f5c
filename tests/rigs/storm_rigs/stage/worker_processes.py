"""Worker processes of one topology: nimbus and its supervisors are records, written by hand.

The rig plays the supervisor (files, processes) and nimbus (the records in ZooKeeper).
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storm_dagster.api import TopologyBuilder
from storm_dagster.host.worker_spec import WorkerSpec
from storm_dagster.model import paths
from storm_dagster.model.records import (
    Assignment,
    ComponentTasks,
    StormBase,
    TaskBeats,
    TaskTable,
    WorkerSlot,
    decode_record,
    encode_record,
)
from storm_dagster.model.topology import TopologySpec
from storm_dagster.testing.waiting import patience
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.stage.child import start_child


def task_table(spec: TopologySpec, tasks: Mapping[str, str]) -> TaskTable:
    """The table of component -> task ranges; what is no spout of ``spec`` is a bolt."""
    return TaskTable(
        components={
            name: ComponentTasks(type="spout" if name in spec.spouts else "bolt", tasks=ranges)
            for name, ranges in tasks.items()
        }
    )


class WorkerRig:
    """One topology on slots ``(node, port)`` that a test assigns.

    ``tasks``: component -> task ranges, ``__acker`` and ``__topology_master`` included. ``code``:
    the module ``rig_code``, or file -> text. Its components find ``folder`` in ``RIG_FOLDER``.
    """

    def __init__(
        self,
        folder: Path,
        cluster: StormClusterState,
        zk_conf: Mapping[str, Any],
        topology: TopologyBuilder | TopologySpec,
        tasks: Mapping[str, str],
        *,
        code: str | Mapping[str, str],
        conf: Mapping[str, Any] | None = None,
        name: str = "wc",
        launched: int = 1700000000,
    ) -> None:
        spec = topology.build() if isinstance(topology, TopologyBuilder) else topology
        topology_id = f"{name}-1-{launched}"
        self.folder = folder
        self.name = name
        self.launched = launched
        self.cluster = cluster
        self.spec = spec
        self.table = task_table(spec, tasks)
        """The tasks as they were written last."""
        self.topology_id = topology_id
        self.zk_conf = dict(zk_conf)
        self.hosts: dict[str, str] = {}
        """Node -> its address on loopback, by default 127.0.0.1."""
        self.homes: dict[str, Path] = {}
        """Node -> HOME of its workers, by default the rig's folder."""
        self.disk: Path | None = None
        """HOME of all workers with their heartbeats and logs; standard error stays outside."""
        self.processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self.code_dir = folder / "stormdist" / topology_id
        (self.code_dir / "code" / "resources").mkdir(parents=True)
        files = {"rig_code.py": code} if isinstance(code, str) else code
        for path, text in files.items():
            target = self.code_dir / "code" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        (self.code_dir / "stormconf.ser").write_text(json.dumps(dict(conf or {})), encoding="utf-8")
        (self.code_dir / "stormcode.ser").write_bytes(spec.to_json())
        self.set_tasks(tasks)
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

    def set_tasks(self, tasks: Mapping[str, str]) -> None:
        """Write the table of component -> task ranges."""
        self.table = task_table(self.spec, tasks)
        self._put(paths.tasks(self.topology_id), encode_record(self.table))

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
            home=str(self.disk or self.homes.get(node, self.folder)),
            conf=self.zk_conf,
            code_dir=str(self.code_dir),
            heartbeat_path=str((self.disk or folder) / "heartbeat.json"),
            log_path=str((self.disk or self.folder) / self.log_path(node, port).name),
        )
        spec.write(folder / "spec.json")
        code_path = [str(self.code_dir / "code"), os.environ.get("PYTHONPATH", "")]
        process = start_child(
            [sys.executable, "-m", "storm_dagster.worker", str(folder / "spec.json")],
            self.log_path(node, port),
            env={"RIG_FOLDER": str(self.folder), "PYTHONPATH": os.pathsep.join(code_path)},
            cwd=folder,
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
        """True if every slot of the assignment has a live worker all of whose tasks run."""
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
                process.wait(patience(10))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
