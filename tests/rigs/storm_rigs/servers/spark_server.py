"""An embedded Spark Connect server as a child process of a test."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from storm_dagster.model.errors import Unavailable
from storm_dagster.spark.server import spark_connect_command, spark_environment
from storm_dagster.testing.waiting import patience


def wait_until_ready(
    port: int,
    process: subprocess.Popen[bytes],
    *,
    host: str = "127.0.0.1",
    timeout_secs: float = 120.0,
) -> None:
    """Return when the server listens; :class:`Unavailable` when it ends before, or after the
    timeout.
    """
    deadline = time.monotonic() + patience(timeout_secs)
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
        f"the Spark server does not listen on {host}:{port} after {patience(timeout_secs):g} s: look at its log"
    )


class SparkServer:
    """An embedded server as a child process, with the Python workers that it starts."""

    def __init__(
        self,
        port: int,
        folder: Path,
        *,
        memory: str = "1g",
        log_path: Path | None = None,
        page: int | None = None,
    ) -> None:
        self.port = port
        self.remote: str = f"sc://127.0.0.1:{port}"
        self._folder = folder
        # What a test puts there its Python processes can import, such as a sitecustomize module.
        self.python_path: Path = folder / "python"
        self._memory = memory
        # With its status page on a port of its own, its jobs can be counted.
        self._page = page
        self._log_path = log_path or folder / "spark.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The child; it was started before."""
        assert self._process is not None
        return self._process

    def start(self, timeout_secs: float = 120.0) -> SparkServer:
        """Start it, unless it runs, and wait until it listens."""
        if self._process is not None and self._process.poll() is None:
            return self
        self.python_path.mkdir(parents=True, exist_ok=True)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        conf = {"spark.ui.enabled": "true", "spark.ui.port": str(self._page)} if self._page else {}
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                spark_connect_command(self.port, self._folder, memory=self._memory, conf=conf),
                env=spark_environment(
                    self._folder, {**os.environ, "PYTHONPATH": str(self.python_path)}
                ),
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

    def jobs(self) -> int:
        """Jobs that the server has run; it has a status page."""

        def read(path: str) -> Any:
            url = f"http://127.0.0.1:{self._page}/api/v1/applications{path}"
            with urllib.request.urlopen(url, timeout=60) as answer:
                return json.load(answer)

        # The newest first; the page forgets old ones.
        newest = next(iter(read(f"/{read('')[0]['id']}/jobs")), None)
        return 0 if newest is None else newest["jobId"] + 1

    def stop(self, patience_secs: float = 10.0) -> None:
        """End it: TERM, then KILL after some seconds."""
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
