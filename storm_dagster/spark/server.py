"""The embedded Spark Connect server: pyspark's own jars, bound to loopback, warmed when it starts.

Found without importing pyspark, so that the daemon that only watches it stays small.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storm_dagster.model.conf import ClusterConf, Conf
from storm_dagster.model.errors import Unavailable

__all__ = [
    "SparkServer",
    "run",
    "settings_of",
    "spark_connect_command",
    "spark_environment",
    "spark_home",
    "wait_until_ready",
]

_log = logging.getLogger(__name__)

_OURS = ("spark.remote", "spark.master", "spark.connect.port", "spark.driver.memory")
_GUARDED = (
    "spark.connect.grpc.binding.",
    "spark.connect.authenticate.",
    "spark.driver.host",
    "spark.driver.bindAddress",
)
_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"


def spark_home() -> Path:
    """Folder of the installed pyspark, with its ``jars`` and ``bin``; :class:`Unavailable` when there is none."""
    spec = importlib.util.find_spec("pyspark")
    for location in (spec.submodule_search_locations if spec else None) or ():
        if (Path(location) / "bin" / "spark-submit").is_file():
            return Path(location)
    raise Unavailable("pyspark is not installed with its jars: run pip install 'pyspark[connect]>=4.1,<5'")


def spark_connect_command(
    port: int,
    *,
    memory: str = "1g",
    host: str = "127.0.0.1",
    master: str = "local[*]",
    local_dir: Path | None = None,
    conf: Mapping[str, str] | None = None,
) -> list[str]:
    """The command line that runs a Spark Connect server on ``host:port`` in the foreground.

    ``memory`` is the driver's heap (Java notation), ``local_dir`` takes shuffle files and the warehouse.
    Start it with :func:`spark_environment`, so that its Python workers can import this package. Raises
    :class:`Unavailable` when pyspark or Java is missing.
    """
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        raise Unavailable("Spark needs Java 17 or newer and none was found: install it, or set JAVA_HOME")
    cores = os.cpu_count() or 2
    settings = {
        "spark.connect.grpc.binding.address": host,
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.host": host,
        "spark.driver.bindAddress": host,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "WARN",
        "spark.pyspark.python": sys.executable,
        "spark.python.daemon.module": "storm_dagster.spark.python_daemon",
        # Few rows in many small jobs: the default of 200 partitions would be all overhead.
        "spark.sql.shuffle.partitions": str(max(2, 2 * cores)),
        # A pinned session that idles over night is still there in the morning.
        "spark.connect.session.manager.defaultSessionTimeout": "24h",
        # Each session keeps its last plans, with the rows of local tables in them: sixteen micro-batches of 20,000
        # tuples are 40 MB, and what a killed worker's session keeps stays for those 24 hours.
        "spark.connect.session.planCache.maxSize": "3",
        "spark.sql.catalogImplementation": "in-memory",
    }
    if local_dir is not None:
        settings["spark.local.dir"] = str(local_dir)
        settings["spark.sql.warehouse.dir"] = str(local_dir / "warehouse")
    settings.update(conf or {})
    command = [str(spark_home() / "bin" / "spark-submit"), "--master", master, "--driver-memory", memory]
    command += ["--name", "storm-dagster", "--class", _CLASS]
    for key, value in settings.items():
        command += ["--conf", f"{key}={value}"]
    return [*command, "spark-internal"]


def settings_of(conf: Mapping[str, Any]) -> dict[str, str]:
    """The ``spark.*`` keys of a cluster's conf that are the embedded server's, such as ``spark.jars.packages``.

    Not where it listens and whom it believes: that is checked elsewhere.
    """
    found: dict[str, str] = {}
    for key, value in conf.items():
        if not key.startswith("spark.") or key in _OURS or key.startswith(_GUARDED) or value is None:
            continue
        found[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return found


def spark_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for :func:`spark_connect_command`: this interpreter, and this package importable.

    Spark's function shipping names functions of this package by module, so its Python workers import it.
    """
    environment = dict(os.environ if base is None else base)
    root = str(Path(__file__).resolve().parents[2])
    present = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part and part != root]
    environment.update(
        SPARK_HOME=str(spark_home()),
        SPARK_LOCAL_IP="127.0.0.1",
        PYSPARK_PYTHON=sys.executable,
        PYTHONPATH=os.pathsep.join([root, *present]),
    )
    # A remote named for clients would make the server look for another server.
    for name in ("SPARK_REMOTE", "SPARK_LOCAL_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "PYSPARK_DRIVER_PYTHON"):
        environment.pop(name, None)
    return environment


def wait_until_ready(
    port: int, process: subprocess.Popen[bytes], *, host: str = "127.0.0.1", timeout_secs: float = 120.0
) -> None:
    """Returns when the server listens; :class:`Unavailable` when it ends before, or after the timeout."""
    deadline = time.monotonic() + timeout_secs
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Unavailable(
                f"the Spark server ended with code {process.returncode} while it started: look at its log"
            )
        with socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex((host, port)) == 0:
                return
        time.sleep(0.1)
    raise Unavailable(
        f"the Spark server does not listen on {host}:{port} after {timeout_secs:g} s: look at its log"
    )


class SparkServer:
    """An embedded server as a child process, with the Python workers that it starts."""

    def __init__(self, port: int, folder: Path, *, memory: str = "1g", log_path: Path | None = None) -> None:
        self.port = port
        self.remote: str = f"sc://127.0.0.1:{port}"
        self._folder = folder
        self._memory = memory
        self._log_path = log_path or folder / "spark.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The child; it was started before."""
        assert self._process is not None
        return self._process

    def start(self, timeout_secs: float = 120.0) -> SparkServer:
        """Starts it and waits until it listens."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                spark_connect_command(self.port, memory=self._memory, local_dir=self._folder),
                env=spark_environment(),
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until_ready(self.port, self.process, timeout_secs=timeout_secs)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self, patience_secs: float = 10.0) -> None:
        """Ends it: TERM, then KILL after some seconds."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(patience_secs)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def __enter__(self) -> SparkServer:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def run(conf: ClusterConf | Conf, home: Path, stop: threading.Event, port: int) -> int:
    """Keeps a warmed server on ``port`` until ``stop`` is set; restarts one that dies, ever more slowly.

    Returns 0. Raises :class:`Unavailable` when not even the first start succeeds.
    """
    server = SparkServer(
        port,
        home / "spark",
        memory=conf.get("spark.driver.memory") or "1g",
        log_path=home / "logs" / "spark.log",
    )
    pause = 1.0
    try:
        server.start()
        _warm(server)
        while not stop.wait(0.5):
            if server.process.poll() is None:
                continue
            _log.warning(
                "the Spark server ended with code %s, restarting in %g s", server.process.returncode, pause
            )
            if stop.wait(pause):
                break
            pause = min(60.0, pause * 2)
            try:
                server.start()
                _warm(server)
            except Unavailable as error:
                _log.error("%s", error.message)
    finally:
        server.stop()
    return 0


def _warm(server: SparkServer) -> None:
    """Warms the server up beside the loop, which goes on watching whether the server lives."""

    def warm() -> None:
        from storm_dagster.spark.warm_up import warm_up

        try:
            warm_up(server.remote)
        except Unavailable as error:
            # A server that is slow at first still serves.
            _log.warning("warming the Spark server up: %s", error.message)

    threading.Thread(target=warm, name="storm-spark-warm-up", daemon=True).start()
