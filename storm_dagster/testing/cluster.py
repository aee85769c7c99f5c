"""Local cluster of real daemons for tests, started by ``storm-dagster dev``.

with LocalCluster(tmp_path) as cluster:
    cluster.cli("submit", "topology.py", "--name", "wc")
    cluster.show("wc")["workers"]
"""

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from storm_dagster.client.command import CommandResult, run_cli
from storm_dagster.client.http import NimbusClient
from storm_dagster.host.endpoints import ClusterFile, cluster_conf
from storm_dagster.host.processes import RunFile
from storm_dagster.model.conf import CONF_KEYS, ClusterConf
from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.testing.waiting import eventually, patience_factor
from storm_dagster.testing.waiting import patience as multiplied

__all__ = ["CommandResult", "LocalCluster", "run_cli"]

_LIMITS = (
    "storm.zookeeper.session.timeout",
    "nimbus.task.timeout.secs",
    "nimbus.task.launch.secs",
    "nimbus.supervisor.timeout.secs",
    "supervisor.worker.start.timeout.secs",
    "supervisor.worker.timeout.secs",
    "dagster.graphql.timeout.secs",
    "dagster.launch.timeout.secs",
)
"""Conf keys of limits that a slow machine exceeds although no process failed."""


def multiplied_conf(conf: Mapping[str, Any]) -> dict[str, Any]:
    """Multiply the limits in a cluster's conf by ``STORM_TEST_PATIENCE``.

    Those that ``conf`` does not contain have their defaults. No limit exceeds the maximum of its
    key.
    """
    result = dict(conf)
    if patience_factor() == 1:
        return result
    for key in _LIMITS:
        declared = CONF_KEYS[key]
        limit = multiplied(conf.get(key, declared.default))
        if declared.maximum is not None:
            limit = min(limit, declared.maximum)
        result[key] = limit
    return result


class LocalCluster:
    """A cluster with free ports in ``home``.

    It is a context manager, which stops all its processes at the end.
    """

    def __init__(
        self,
        home: Path,
        *,
        supervisors: int = 2,
        slots: int = 4,
        nimbuses: int = 1,
        zookeepers: int = 1,
        spark_workers: int = 0,
        warm_runs: bool = True,
        conf: Mapping[str, Any] | None = None,
        options: Sequence[str] = (),
        timeout: float = 240.0,
    ) -> None:
        """Configure the cluster, without a start.

        ``timeout`` limits the start, in seconds. ``warm_runs=False`` is ``dev --no-warm-runs``.
        ``options`` are other options of ``dev``, such as ``("--dagster-url", URL)``.
        ``STORM_TEST_PATIENCE`` multiplies all limits: this one, those of the methods, and those in
        the conf of the cluster (:func:`multiplied_conf`).
        """
        self._warm_runs = warm_runs
        self.home: Path = home.absolute()
        self._timeout = timeout
        # Option of `storm-dagster dev` -> number.
        self._size = {
            "supervisors": supervisors,
            "slots": slots,
            "nimbuses": nimbuses,
            "zookeepers": zookeepers,
            "spark-workers": spark_workers,
        }
        self._conf = dict(conf or {})
        self._options = tuple(options)

    def start(self) -> "LocalCluster":
        """Start the cluster and wait until it is ready.

        Raises a typed error if that fails.
        """
        command = ["dev", "--detach", "--json", "--ports", "auto", "--home", str(self.home)]
        for name, number in self._size.items():
            command += [f"--{name}", str(number)]
        if not self._warm_runs:
            command.append("--no-warm-runs")
        command += self._options
        limit = multiplied(self._timeout)
        command += ["--timeout", str(limit)]
        for key, value in multiplied_conf(self._conf).items():
            command += ["-c", f"{key}={json.dumps(value)}"]
        run_cli(*command, timeout=limit + multiplied(90)).check()
        # Tests and measurements begin with a warm cluster.
        eventually(self._warm, self._timeout, "a warm Spark server", interval=0.2)
        return self

    def _warm(self) -> bool:
        """True once the Spark server is warm, or if there is none."""
        spark = self.endpoints.spark
        return spark is None or not (spark.starting or self.processes("spark-warm-up"))

    def stop(self) -> None:
        """Stop all its processes."""
        run_cli("stop", "--json", "--home", str(self.home), timeout=multiplied(120)).check()

    def __enter__(self) -> "LocalCluster":
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- endpoints ---------------------------------------------------------------------------------
    @property
    def endpoints(self) -> ClusterFile:
        """Current ``HOME/cluster.json``.

        Raises :class:`Unavailable` if the cluster does not run.
        """
        cluster_file = ClusterFile.read(self.home)
        if cluster_file is None:
            raise Unavailable(f"no cluster runs in {self.home}: start() it")
        return cluster_file

    @property
    def conf(self) -> ClusterConf:
        """Conf of its clients."""
        return cluster_conf(self.home)

    def nimbus(self, patience: float = 30.0) -> NimbusClient:
        """A client of its HTTP service; the caller closes it.

        ``patience``: seconds for which a call waits for a leader.
        """
        return NimbusClient.of_cluster(self.conf, self.home, patience=multiplied(patience))

    # -- requests ----------------------------------------------------------------------------------
    def cli(
        self,
        verb: str,
        *args: str,
        cwd: Path | None = None,
        check: bool = True,
        timeout: float = 330.0,
    ) -> Any:
        """Run a verb and return its JSON document, or raise its typed error.

        Without ``check`` it returns a :class:`CommandResult`, also after an error. ``cwd`` is the
        working folder of the command.
        """
        # `--json` before the arguments: those after a `--` belong to the target.
        arguments = (verb, "--json", *args)
        result = run_cli(*arguments, home=self.home, cwd=cwd, timeout=multiplied(timeout))
        return result.check().document if check else result

    def show(self, name: str) -> dict[str, Any]:
        """``show NAME --json``, without starting a process."""
        with self.nimbus() as nimbus:
            return nimbus.get(f"/v1/topologies/{name}")

    def topologies(self) -> list[dict[str, Any]]:
        """The rows of ``list --json``."""
        with self.nimbus() as nimbus:
            return nimbus.get("/v1/topologies")["topologies"]

    def wait_running(self, name: str, timeout: float = 60.0) -> dict[str, Any]:
        """The topology's document once all its tasks run.

        Raises ``AssertionError`` after ``timeout`` seconds.
        """

        def running() -> dict[str, Any] | None:
            document = self.show(name)
            tasks = document["tasks"]
            if tasks and all(task["status"] == "running" for task in tasks):
                return document
            return None

        document = eventually(
            running,
            timeout,
            f"all tasks of {name} running",
            ignore=(StormDagsterError,),
            interval=0.1,
        )
        assert document is not None
        return document

    # -- faults ------------------------------------------------------------------------------------
    def processes(self, role: str | None = None) -> list[RunFile]:
        """The live processes that its run files name, all or those of a role."""
        alive = [record for record in RunFile.read_all(self.home) if record.alive()]
        return [record for record in alive if role is None or record.role == role]

    def kill(self, role: str, id: str | None = None, number: int = signal.SIGKILL) -> RunFile:
        """Signal the first live process of that role and id, by default with ``kill -9``.

        ``number`` is that of the signal. Returns the record of the process; raises
        :class:`Unavailable` if there is none.
        """
        for record in self.processes(role):
            if id is None or record.id == id:
                os.kill(record.pid, number)
                return record
        raise Unavailable(f"no live {role} {id or ''} in {self.home}")
