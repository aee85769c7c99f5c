"""Nimbuses and supervisors with real workers, without Dagster and Spark, for tests of high
availability.

with ZooKeeperEnsemble(folder / "zk") as zookeeper:
    daemons = Daemons(folder / "home", zookeeper.addresses)
    topology_id = daemons.submit("topology.py", "numbers")
    daemons.kill("nimbus", daemons.leader())
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from storm_dagster.client.blobs import NimbusBlobClient
from storm_dagster.client.http import NimbusClient
from storm_dagster.client.uploads import upload_target
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.host.processes import RunFile
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.model.records import WorkerNode
from storm_dagster.model.slot import Slot
from storm_dagster.operations.context import OperationsContext, no_observer
from storm_dagster.operations.read.inspection import InspectionResult, inspect_cluster
from storm_dagster.operations.submit.staging import read_record
from storm_dagster.testing.cluster import multiplied_conf
from storm_dagster.testing.waiting import eventually
from storm_dagster.testing.waiting import patience as multiplied
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.operations.acting import submit as submit_stages
from storm_rigs.servers.pid_namespaces import CONTAINER, first_process
from storm_rigs.servers.ports import free_ports
from storm_rigs.stage.child import start_child


class Daemons:
    """``nimbuses`` (n1, n2 ...) and ``supervisors`` (s1, s2 ...) as processes; a context manager
    that ends them all.

    ``zookeeper`` are the servers for all of them, ``links`` others for single daemons, by id
    (through a :class:`~storm_rigs.servers.fault_proxy.FaultProxy`). With ``containers`` each
    supervisor is the first process of a PID namespace, which ends with it.
    """

    def __init__(
        self,
        home: Path,
        zookeeper: Sequence[str],
        *,
        nimbuses: int = 3,
        supervisors: int = 2,
        slots: int = 2,
        conf: Mapping[str, Any] | None = None,
        links: Mapping[str, Sequence[str]] | None = None,
        containers: bool = False,
    ) -> None:
        ports = iter(free_ports(2 * nimbuses + supervisors * (slots + 1)))
        http = {f"n{number + 1}": next(ports) for number in range(nimbuses)}
        self.home: Path = home.absolute()
        self._values = {
            "storm.zookeeper.servers": list(zookeeper),
            "nimbus.seeds": [f"127.0.0.1:{port}" for port in http.values()],
            **multiplied_conf(conf or {}),
        }
        links = links or {}
        self._own: dict[tuple[str, str], dict[str, Any]] = {}
        for id, port in http.items():
            self._own["nimbus", id] = {"nimbus.http.port": port, "nimbus.thrift.port": next(ports)}
        for number in range(supervisors):
            self._own["supervisor", f"s{number + 1}"] = {
                "supervisor.http.port": next(ports),
                "supervisor.slots.ports": [next(ports) for _ in range(slots)],
            }
        for (_, id), values in self._own.items():
            if id in links:
                values["storm.zookeeper.servers"] = list(links[id])
        self.nimbuses: list[str] = sorted(http)
        """Ids."""
        self.supervisors: list[str] = sorted(id for role, id in self._own if role == "supervisor")
        """Ids."""
        self._urls = {id: f"http://127.0.0.1:{port}" for id, port in http.items()}
        self._children: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
        self._containers = containers

    @property
    def conf(self) -> ClusterConf:
        """The conf of its clients."""
        return load_cluster_conf(None, self._values)

    def __enter__(self) -> Daemons:
        try:
            for role, id in self._own:
                self.launch(role, id)
            eventually(
                lambda: all(self.health(id) for id in self.nimbuses) and self.leaders(),
                180, "a leader and its followers",
            )  # fmt: skip
            with self.cluster() as cluster:
                eventually(
                    lambda: set(self.supervisors) <= set(cluster.load_view().supervisors),
                    120, "all supervisors", ignore=(StormDagsterError,),
                )  # fmt: skip
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def launch(self, role: str, id: str) -> None:
        """Start a daemon (again), without waiting."""
        child = self._children.get((role, id))
        if child is not None and child.poll() is None:
            return
        log = self.home / "logs" / f"{role}-{id}.out"
        log.parent.mkdir(parents=True, exist_ok=True)
        pairs = {**self._values, **self._own[role, id]}
        argv = [*CONTAINER] if self._in_container(role) else []
        argv += [sys.executable, "-m", "storm_dagster", "daemon", role]
        argv += ["--home", str(self.home), "--id", id]
        for key, value in pairs.items():
            argv += ["-c", f"{key}={json.dumps(value)}"]
        env = {"STORM_DAGSTER_HOME": str(self.home)}
        self._children[role, id] = start_child(argv, log, env=env)

    def stop(self) -> None:
        """End all of them with their workers. Stopping twice does nothing."""
        children, self._children = self._children, {}
        for child in children.values():
            child.kill()
        for child in children.values():
            child.wait()
        # A supervisor's end is not its workers' end.
        for record in RunFile.read_all(self.home):
            if record.role == "worker" and record.alive():
                os.kill(record.pid, signal.SIGKILL)

    def _in_container(self, role: str) -> bool:
        return self._containers and role == "supervisor"

    def term(self, role: str, id: str) -> None:
        """SIGTERM, as systemd or a container engine sends it; does not wait for the end."""
        child = self._children[role, id]
        os.kill(first_process(child.pid) if self._in_container(role) else child.pid, signal.SIGTERM)

    def wait_ended(self, role: str, id: str, timeout: float = 60.0) -> int:
        """Exit code of a daemon that ends."""
        return self._children[role, id].wait(timeout=multiplied(timeout))

    def log(self, role: str, id: str) -> str:
        """Output of a daemon, of all its processes."""
        return (self.home / "logs" / f"{role}-{id}.out").read_text()

    # -- harming it --------------------------------------------------------------------------------
    def kill(self, role: str, id: str) -> None:
        """``kill -9``; :meth:`launch` starts it again."""
        child = self._children[role, id]
        child.kill()
        child.wait()

    @contextmanager
    def frozen(self, role: str, id: str) -> Iterator[None]:
        """SIGSTOP on entry, SIGCONT on exit."""
        child = self._children[role, id]
        child.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            child.send_signal(signal.SIGCONT)

    def heal(self) -> None:
        """Start what is dead, and wait until all nimbuses serve and one leads."""
        for role, id in self._own:
            self.launch(role, id)
        eventually(
            lambda: all(self.health(id) for id in self.nimbuses) and len(self.leaders()) == 1,
            120, "all nimbuses and one leader",
        )  # fmt: skip

    # -- looking -----------------------------------------------------------------------------------
    def url(self, nimbus: str) -> str:
        """Base URL of a nimbus."""
        return self._urls[nimbus]

    def health(self, nimbus: str) -> dict[str, Any] | None:
        """``/healthz`` of a nimbus; ``None`` when it does not answer."""
        try:
            return httpx.get(f"{self._urls[nimbus]}/healthz", timeout=2.0, trust_env=False).json()
        except (httpx.HTTPError, ValueError):
            return None

    def leaders(self) -> list[str]:
        """Ids of the nimbuses that report themselves as leader."""
        return [id for id in self.nimbuses if (self.health(id) or {}).get("leader")]

    def leader(self, *, other_than: str | None = None) -> str:
        """Id of the leader, once there is one (``other_than`` a former one)."""
        found = eventually(
            lambda: [id for id in self.leaders() if id != other_than], 90, "a leading nimbus"
        )
        return found[0]

    def followers(self) -> list[str]:
        """Ids of the other nimbuses."""
        leading = self.leader()
        return [id for id in self.nimbuses if id != leading]

    def cluster(self) -> StormClusterState:
        """A session of the caller's own; a context manager."""
        return StormClusterState.open(self.conf.values)

    def client(self, patience: float = 60.0) -> NimbusClient:
        """The HTTP client that users have."""
        return NimbusClient(
            lambda: list(self._urls.values()),
            patience=multiplied(patience),
            thing="the cluster under test",
        )

    @contextmanager
    def operations(
        self, *, epoch: int | None = None, checkpoint: Callable[[str], None] | None = None
    ) -> Iterator[OperationsContext]:
        """Operations context of a Dagster run: its own session, blobs through the leader, the local
        planner.
        """
        with ExitStack() as stack:
            cluster = stack.enter_context(self.cluster())

            def leader_url() -> str:
                known = cluster.epoch()
                if known is None:
                    raise Unavailable("nobody has led yet: start a nimbus")
                return known[1].http

            stored = cluster.epoch()
            sent_epoch = stored[0] if epoch is None and stored is not None else epoch
            blobs = stack.enter_context(NimbusBlobClient(leader_url, epoch=sent_epoch))
            yield OperationsContext(
                cluster=cluster,
                blobs=blobs,
                conf=self.conf,
                planner=plan_placement,
                epoch=epoch,
                checkpoint=checkpoint or no_observer,
            )

    def inspect(self, stable_secs: float = 20.0) -> InspectionResult:
        """``doctor --invariants``."""
        with self.operations() as ctx:
            return inspect_cluster(ctx, home=self.home, stable_secs=stable_secs)

    # -- using it ----------------------------------------------------------------------------------
    def submit(
        self,
        target: str,
        name: str,
        *,
        conf: Mapping[str, Any] | None = None,
        patience: float = 180.0,
        checkpoint: Callable[[str], None] | None = None,
    ) -> str:
        """Upload, and run the stages of a submission as its run does; the topology's id.

        Its run continues under the next leader by itself. If a service is away for longer than its
        requests wait, the run ends with ``Unavailable``, and another one is made with the same
        token, as the client makes it. ``checkpoint`` hears every step of the operations
        (:mod:`storm_dagster.operations.steps`).
        """
        token, deadline = uuid.uuid4().hex, time.monotonic() + multiplied(patience)
        with self.client() as nimbus:
            handle = upload_target(nimbus, target, conf=conf, home=self.home).handle
        for number in count(1):
            try:
                with self.operations(checkpoint=checkpoint) as connected:
                    ctx = replace(connected, run=f"{token}-{number}")
                    submit_stages(ctx, name=name, token=token, handle=handle)
                    return read_record(ctx, token).topology_id
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.3)
        raise AssertionError("unreachable")

    def workers(self, cluster: StormClusterState, topology_id: str) -> dict[Slot, WorkerNode]:
        """Slot -> record of the topology's live worker."""
        found = cluster.load_view().topologies.get(topology_id)
        return dict(found.live_workers) if found is not None else {}

    def wait_running(self, topology_id: str, timeout: float = 120.0) -> dict[Slot, tuple[int, str]]:
        """Slot -> (pid, start token) of its workers, once every task of it runs."""
        with self.cluster() as cluster:

            def running() -> dict[Slot, tuple[int, str]] | None:
                topology = cluster.load_view().topologies.get(topology_id)
                if topology is None or topology.assignment is None:
                    return None
                slots = {worker.slot for worker in topology.assignment.workers}
                live = topology.live_workers
                if (
                    not slots
                    or set(live) != slots
                    or any(node.status != "running" for node in live.values())
                ):
                    return None
                return {slot: (node.pid, node.token) for slot, node in live.items()}

            found = eventually(
                running, timeout, f"all workers of {topology_id}", ignore=(StormDagsterError,)
            )
            assert found is not None
            return found
