"""The ``dev`` process, which starts, watches and ends a local cluster."""

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from storm_dagster.cli.daemon_folders import check_room
from storm_dagster.cli.dev import readiness
from storm_dagster.cli.dev.daemon import Daemon, DaemonSpec, spawn
from storm_dagster.cli.dev.ending import end_cluster, refuse_live_home
from storm_dagster.cli.dev.plan import (
    HOST,
    PLACED,
    ClusterPlan,
    daemon_environment,
    prepare_dagster_home,
)
from storm_dagster.cli.dev.sockets import code_socket
from storm_dagster.client.waiting import Progress
from storm_dagster.host import endpoints
from storm_dagster.host.endpoints import DevFile, zookeeper_tls_conf
from storm_dagster.host.files import lock_file, make_home_private
from storm_dagster.host.machine_size import whole_cpus
from storm_dagster.host.processes import RunFile
from storm_dagster.host.requirements import require_linux
from storm_dagster.model.errors import Conflict, StormDagsterError, Unavailable
from storm_dagster.security.home_key import begin_start
from storm_dagster.security.settings import Security, zookeeper_payload, zookeeper_tls
from storm_dagster.security.spark_remote import renew_spark_token

log = logging.getLogger(__name__)
_MAX_DEATHS = 4
_ENOUGH_CORES = 4
"""With fewer cores, Spark starts when Dagster's code server serves: it would slow the other starts.

Measured on two cores: if it starts at once, the cluster is ready 3 s later; if it starts when the
cluster is ready, the first submission takes 1 s more.
"""
_CLASS_DATA_SECS = 900.0
"""Longest time for making class data; it has the lowest priority, and takes 44 s if idle."""


class _Stopped(Exception):
    """The cluster was stopped while it was being started."""


class DevCluster:
    """One local cluster, which :meth:`run` runs until the event ``stop``."""

    def __init__(self, plan: ClusterPlan, progress: Progress, stop: threading.Event) -> None:
        """``progress`` is called with each step.

        The command line draws it; a detached ``dev`` sends it to its parent.
        """
        self._plan = plan
        self._home = plan.home
        self._progress = progress
        self._stop = stop
        self._mark = uuid.uuid4().hex
        self._env = daemon_environment(self._home, self._mark)
        self._daemons: dict[str, Daemon] = {}
        self._lock = threading.Lock()
        self._failure: StormDagsterError | None = None
        self._deadline = 0.0
        self._workspace: Path | None = None
        self._tracks: list[threading.Thread] = []
        self._ready = threading.Event()
        self._code_serves = threading.Event()
        """Set when Dagster's code server serves."""
        self._spark_starts = plan.embeds_spark
        """True while placements wait for Spark."""
        self._spark_pid: int | None = None
        """Process of the Spark server that was ready last; ``None`` before the first one was."""
        self.hurry = threading.Event()
        """Set by a second Ctrl-C: processes then get no time to end."""

    @contextmanager
    def _claim(self):
        """Hold ``HOME/dev.lock`` and the run file of this process."""
        require_linux("a local cluster")
        os.umask(0o077)
        make_home_private(self._home)
        check_room(self._home)
        with (self._home / "dev.lock").open("w") as lock:
            try:
                lock_file(lock, wait=False)
            except OSError:
                raise Conflict(
                    f"a cluster is being started or ended in {self._home}: wait, or give another "
                    "--home"
                ) from None
            refuse_live_home(self._home)
            for record in RunFile.read_all(self._home):
                RunFile.path_of(self._home, record.role, record.id).unlink(missing_ok=True)
            record = RunFile.write(self._home, "dev", self._mark)
            try:
                yield
            finally:
                record.remove(self._home)

    # -- the life of the cluster -------------------------------------------------------------------
    def run(self, ready: Callable[[endpoints.ClusterFile], None]) -> None:
        """Run the cluster until ``stop``.

        ``ready`` is called once, when all daemons serve. The error of a start that failed is raised
        after all processes have been ended.
        """
        with self._claim():
            try:
                self._start()
                if not self._stop.is_set():
                    ready(self._write_cluster_file())
                    self._ready.set()
                while not self._stop.wait(0.1):
                    self._watch()
            finally:
                self._end()

    def _start(self) -> None:
        self._deadline = time.monotonic() + self._plan.options.timeout
        if self._plan.options.own_dagster:
            self._workspace = prepare_dagster_home(self._home)
        else:
            # Spark waits on a small machine for a code server, which is not one of this cluster.
            self._code_serves.set()
        begin_start(self._home)
        self._plan.close_ports()
        if self._plan.embeds_spark:
            renew_spark_token(self._plan.conf, self._home)
        ports = self._plan.ports.to_document()
        DevFile(conf=self._plan.given_conf(), ports=ports).write(self._home)
        needed = [self._start_control]
        if self._plan.options.own_dagster:
            needed.append(self._start_dagster)
        self._tracks = [
            threading.Thread(target=self._track, args=(track,), name=track.__name__, daemon=True)
            for track in (*needed, self._start_the_rest)
        ]
        for thread in self._tracks:
            thread.start()
        tracks = self._tracks[: len(needed)]
        while any(thread.is_alive() for thread in tracks) and self._failure is None:
            if self._stop.wait(0.1):
                break
            self._watch()
        if self._failure is not None:
            # The other threads end at this event.
            self._stop.set()
        for thread in tracks:
            thread.join(15)
        if self._failure is not None:
            raise self._failure

    def _track(self, track: Callable[[], None]) -> None:
        try:
            track()
        except _Stopped:
            pass
        except Exception as error:
            if not isinstance(error, StormDagsterError):
                log.exception("starting the cluster failed")
                error = Unavailable(f"the cluster cannot be started: {error!r}")
            if track == self._start_the_rest:
                # The cluster is of use without Spark; a placement names the reason.
                log.error("%s", error.message)
            else:
                self._failure = self._failure or error

    def _start_control(self) -> None:
        """Start ZooKeeper, supervisors and nimbuses.

        Supervisors wait for ZooKeeper. Nimbuses start when it has a root: they would create one.
        """
        plan = self._plan
        from storm_dagster.zk.embedded import server_answers

        tls_conf = zookeeper_tls_conf(plan.zookeeper_tls)
        tls = zookeeper_tls(tls_conf)
        self._progress("zookeeper", "STARTED")
        specs = plan.zookeeper_daemons()
        servers = [self._launch(spec) for spec in specs]
        self._progress("supervisors", "STARTED")
        supervisors = [
            self._launch(plan.supervisor_daemon(index)) for index in range(plan.options.supervisors)
        ]
        self._wait(
            lambda: all(server_answers(HOST, spec.ports["client"], tls=tls) for spec in specs),
            "zookeeper",
            servers,
        )
        self._prepare_root(tls_conf)
        self._progress("zookeeper", "SUCCESS")
        security = Security.of(plan.conf)
        urls = [plan.nimbus_url(index) for index in range(plan.options.nimbuses)]
        leader = self._start_nimbuses(urls, security)
        supervisor_ids = {plan.supervisor_id(index) for index in range(plan.options.supervisors)}

        def have_registered() -> bool:
            url = readiness.leader_url(urls, security) or leader
            return supervisor_ids <= readiness.supervisor_ids(url, security)

        self._wait(have_registered, "supervisors", supervisors)
        self._progress("supervisors", "SUCCESS")

    def _prepare_root(self, tls_conf: Mapping[str, Any]) -> None:
        """Create ZooKeeper's root with the id of the cluster, which HOME stores."""
        plan = self._plan
        id_file = self._home / "cluster_id"
        stored_id = id_file.read_text(encoding="ascii").strip() if id_file.exists() else None
        values = {
            "storm.zookeeper.servers": plan.zookeeper.split(","),
            "storm.zookeeper.root": plan.conf["storm.zookeeper.root"],
            "storm.zookeeper.auth.payload": zookeeper_payload(plan.conf),
            **tls_conf,
        }
        cluster_id = readiness.prepare_root(values, stored_id, uuid.uuid4().hex)
        plan.forget_former_users()
        id_file.write_text(cluster_id + "\n", encoding="ascii")

    def _start_nimbuses(self, urls: Sequence[str], security: Security) -> str:
        """Start the nimbuses, and wait until all of ``urls`` respond; the URL of the leader."""
        plan = self._plan
        self._progress("nimbus", "STARTED")
        nimbuses = [
            self._launch(plan.nimbus_daemon(index)) for index in range(plan.options.nimbuses)
        ]
        self._write_cluster_file()
        leader = self._wait(lambda: readiness.leader_url(urls, security), "nimbus", nimbuses)
        self._wait(
            lambda: all(readiness.get_json(f"{url}/healthz", security) for url in urls),
            "all nimbuses",
            nimbuses,
        )
        self._progress("nimbus", "SUCCESS")
        return str(leader)

    def _start_the_rest(self) -> None:
        """Start Spark, which readiness does not include.

        Placements wait for it.
        """
        if whole_cpus() < _ENOUGH_CORES:
            while not self._code_serves.wait(0.1):
                if self._stop.is_set():
                    raise _Stopped
        self._deadline = time.monotonic() + self._plan.options.timeout
        if self._plan.embeds_spark:
            try:
                self._start_spark()
            finally:
                self._end_wait_for_spark()
            self._make_class_data()

    def _end_wait_for_spark(self) -> None:
        """End the wait of placements for Spark, also if it has not started."""
        if self._spark_starts:
            self._spark_starts = False
            self._write_cluster_file()

    def _start_spark(self) -> None:
        """Start the Connect server, and run the first jobs on it.

        The process of the jobs loads its libraries while the server does.
        """
        plan = self._plan
        self._progress("spark", "STARTED")
        if plan.ports.spark_master:
            # State of an earlier master is outdated. A server that finds no master retries only
            # after 20 s.
            shutil.rmtree(self._home / "spark" / "master", ignore_errors=True)
            master = self._launch(plan.spark_master_daemon())
            self._wait(lambda: readiness.listens(plan.ports.spark_master), "spark master", [master])
            for index in range(plan.options.spark_workers):
                self._launch(plan.spark_worker_daemon(index))
        spark = self._launch(plan.spark_daemon())
        output = self._home / "logs" / "spark-warm-up.out"
        child = spawn(plan.warm_up_command(), output, self._env, mode="wb", cwd=self._home)
        RunFile.write(self._home, "spark-warm-up", "0", pid=child.pid)
        # Placements also wait for the first job: both load the same libraries, and would slow each
        # other.
        self._wait(
            lambda: PLACED in output.read_text("utf-8", "replace") or child.poll() is not None,
            "spark",
            [spark],
        )
        self._end_wait_for_spark()
        self._spark_pid = spark.pid
        self._progress("spark", "SUCCESS")
        self._progress("spark warm-up", "STARTED")
        self._wait(lambda: child.poll() is not None, "spark warm-up", [spark])
        if child.returncode:
            text = output.read_text("utf-8", "replace").strip()[-1500:]
            raise Unavailable(f"the Spark server does not run jobs: {text}")
        RunFile.path_of(self._home, "spark-warm-up", "0").unlink(missing_ok=True)
        self._progress("spark warm-up", "SUCCESS")

    def _make_class_data(self) -> None:
        """Make the class data of later starts in the background, if it does not exist.

        It ends with the cluster: the next one then makes it from the beginning.
        """
        from storm_dagster.cli.dev.class_data import is_class_data_missing

        if not is_class_data_missing():
            return
        output = self._home / "logs" / "class-data.out"
        child = spawn(self._plan.class_data_command(), output, self._env, mode="wb", cwd=self._home)
        RunFile.write(self._home, "class-data", "0", pid=child.pid)
        self._progress("class data", "STARTED")
        deadline = time.monotonic() + _CLASS_DATA_SECS
        while child.poll() is None:
            if self._stop.wait(1.0):
                return
            if time.monotonic() > deadline:
                child.terminate()
        RunFile.path_of(self._home, "class-data", "0").unlink(missing_ok=True)
        if child.returncode:
            log.warning("no class data was made for later starts: see %s", output)
        else:
            self._progress("class data", "SUCCESS")

    def _start_dagster(self) -> None:
        """Start the code server, the webserver and the daemon of Dagster."""
        plan = self._plan
        assert self._workspace is not None
        self._progress("dagster", "STARTED")
        self._create_storage()
        code = self._launch(plan.code_daemon())
        web = self._launch(plan.webserver_daemon(self._workspace))
        self._wait(lambda: readiness.serves(code_socket(self._home)), "dagster code server", [code])
        self._code_serves.set()
        # A webserver that has loaded the location too early reloads it on request; the daemon only
        # after a minute.
        daemon = self._launch(plan.dagster_daemon(self._workspace))
        security = Security.of(plan.conf)
        reason = ""
        failures = 0
        is_warm = False

        def is_loaded() -> bool:
            nonlocal reason, failures, is_warm
            problem = readiness.code_location_error(plan.web_url, security)
            if problem is None:
                return True
            has_failed, reason = problem
            if reason == readiness.NO_DAEMON and not is_warm:
                # The webserver loads its libraries while the daemon starts.
                readiness.warm_up_dagster(plan.web_url, security)
                is_warm = True
            if has_failed:
                failures += 1
            if failures >= _MAX_DEATHS:
                raise Unavailable(
                    f"Dagster cannot load the code location: {reason}\n{code.tail(3000)}"
                )
            return False

        self._wait(is_loaded, "dagster", [code, web, daemon], lambda: reason)
        self._progress("dagster", "SUCCESS")

    def _create_storage(self) -> None:
        """Create Dagster's tables once per HOME.

        If two processes create them at the same time, both fail.
        """
        marker = self._home / "dagster" / "storage.created"
        if marker.exists():
            return
        process = subprocess.run(
            [sys.executable, "-c", "import dagster; dagster.DagsterInstance.get().dispose()"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=self._env,
            cwd=self._home,
            timeout=max(1.0, self._deadline - time.monotonic()),
        )
        if process.returncode:
            text = process.stderr.decode("utf-8", "replace").strip()[-1500:]
            raise Unavailable(
                f"Dagster's storage of {self._home}/dagster/dagster.yaml is not usable: {text}"
            )
        marker.touch()

    # -- daemons -----------------------------------------------------------------------------------
    def _launch(self, spec: DaemonSpec) -> Daemon:
        daemon = Daemon(spec, self._home, self._env)
        with self._lock:
            self._daemons[f"{spec.role}-{spec.id}"] = daemon
            if not self._stop.is_set():
                daemon.start()
        return daemon

    def _wait(
        self,
        condition: Callable[[], Any],
        subject: str,
        needs: list[Daemon],
        detail: Callable[[], str] = lambda: "",
    ) -> Any:
        """Wait for the condition to be true; its value.

        :class:`Unavailable` if one of the needed daemons keeps dying, or the time is up.
        """
        while not self._stop.is_set():
            value = condition()
            if value:
                return value
            for daemon in needs:
                if daemon.deaths >= _MAX_DEATHS:
                    raise Unavailable(
                        f"{daemon.spec.name} does not start; the end of "
                        f"{daemon.output}:\n{daemon.tail()}"
                    )
            if time.monotonic() > self._deadline:
                tails = "\n".join(f"{daemon.spec.name}: {daemon.tail(600)}" for daemon in needs)
                raise Unavailable(
                    f"{subject} was not ready within {self._plan.options.timeout:g} s "
                    f"{detail()}: see "
                    f"{self._home / 'logs'}\n{tails}"
                )
            self._stop.wait(0.1)
        raise _Stopped

    def _watch(self) -> None:
        """Restart daemons that died, and record their new pids."""
        restarted = False
        with self._lock:
            for daemon in self._daemons.values():
                try:
                    restarted |= daemon.watch()
                except OSError:
                    log.exception("%s cannot be started", daemon.spec.name)
        has_changed = self._watch_spark()
        if (restarted or has_changed) and (self._home / "cluster.json").exists():
            self._write_cluster_file()

    def _watch_spark(self) -> bool:
        """Let placements wait while a Spark server that was lost starts again.

        True if that has begun or ended.
        """
        server = self._daemons.get("spark-0")
        if server is None or self._spark_pid is None:
            return False
        if not self._spark_starts and server.pid != self._spark_pid:
            self._spark_starts = True
            self._progress("spark", "STARTED")
            log.warning("Spark starts again: placements wait for it")
            return True
        if not self._spark_starts or server.pid is None:
            return False
        if not readiness.listens(self._plan.ports.spark):
            return False
        self._spark_starts = False
        self._spark_pid = server.pid
        self._progress("spark", "SUCCESS")
        return True

    def _pid(self, name: str) -> int | None:
        daemon = self._daemons.get(name)
        return daemon.pid if daemon is not None else None

    def _write_cluster_file(self) -> endpoints.ClusterFile:
        """Write ``HOME/cluster.json`` with the current pids."""
        plan = self._plan
        spark = None
        if plan.conf.get("spark.master") is None:
            spark = endpoints.SparkEndpoint(
                remote=plan.spark_remote, pid=self._pid("spark-0"), starting=self._spark_starts
            )
        cluster = endpoints.ClusterFile(
            zookeeper=plan.zookeeper,
            zookeeper_tls=plan.zookeeper_tls,
            zookeeper_root=plan.conf["storm.zookeeper.root"],
            zookeeper_pid=self._pid("zookeeper-0"),
            nimbuses=tuple(self._nimbus_endpoint(index) for index in range(len(plan.ports.thrift))),
            supervisors=tuple(
                self._supervisor_endpoint(index) for index in range(len(plan.ports.slots))
            ),
            dagster=self._dagster_endpoint(),
            spark=spark,
        )
        with self._lock:
            cluster.write(self._home)
        return cluster

    def _dagster_endpoint(self) -> endpoints.DagsterEndpoint:
        plan = self._plan
        pids = [self._pid(f"dagster-{part}-0") for part in ("webserver", "daemon", "code")]
        return endpoints.DagsterEndpoint(
            url=plan.web_url,
            home=str(self._home / "dagster") if plan.options.own_dagster else "",
            pids=tuple(pid for pid in pids if pid is not None),
            own=plan.options.own_dagster,
        )

    def _nimbus_endpoint(self, index: int) -> endpoints.NimbusEndpoint:
        return endpoints.NimbusEndpoint(
            thrift=f"{HOST}:{self._plan.ports.thrift[index]}",
            http=self._plan.nimbus_url(index),
            pid=self._pid(f"nimbus-n{index + 1}") or 0,
        )

    def _supervisor_endpoint(self, index: int) -> endpoints.SupervisorEndpoint:
        plan = self._plan
        supervisor_id = plan.supervisor_id(index)
        scheme = Security.of(plan.conf).scheme
        return endpoints.SupervisorEndpoint(
            id=supervisor_id,
            host=plan.conf["storm.local.hostname"],
            ports=plan.ports.slots[index],
            pid=self._pid(f"supervisor-{supervisor_id}") or 0,
            http=f"{scheme}://{HOST}:{plan.ports.supervisor_http[index]}",
        )

    def _end(self) -> None:
        self._progress("ending", "STARTED")
        for thread in self._tracks:
            thread.join(15)

        def reap() -> None:
            for daemon in self._daemons.values():
                daemon.reap()

        survivors = end_cluster(self._home, hurry=self.hurry.is_set, reap=reap)
        socket = code_socket(self._home)
        for path in (self._home / "cluster.json", socket):
            path.unlink(missing_ok=True)
        if self._home not in socket.parents:
            shutil.rmtree(socket.parent, ignore_errors=True)
        self._progress("ending", "SUCCESS")
        if survivors:
            pids = ", ".join(str(process.pid) for process in survivors)
            log.error("these processes could not be ended: %s", pids)
