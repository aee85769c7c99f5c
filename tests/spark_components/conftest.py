"""A real Spark Connect server whose jobs can be counted from outside, through its own status page."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.spark.server import spark_connect_command, spark_environment
from storm_rigs.spark_server import wait_until_ready


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """The server process and its addresses."""

    def __init__(self, folder: Path) -> None:
        self.port, self._page = free_port(), free_port()
        self.remote = f"sc://127.0.0.1:{self.port}"
        conf = {"spark.ui.enabled": "true", "spark.ui.port": str(self._page)}
        self.process = subprocess.Popen(
            spark_connect_command(self.port, folder, conf=conf),
            env=spark_environment(),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=(folder / "spark.log").open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        wait_until_ready(self.port, self.process)

    def _get(self, path: str) -> Any:
        url = f"http://127.0.0.1:{self._page}/api/v1/applications{path}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)

    def jobs(self) -> int:
        """Jobs that the server has run."""
        application = self._get("")[0]["id"]
        return len(self._get(f"/{application}/jobs"))

    def stop(self) -> None:
        """End the server and its Python workers."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=30)


@pytest.fixture(scope="session")
def spark_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("spark-components"))
    yield server
    server.stop()


@pytest.fixture
def spark_remote(spark_server: Server) -> str:
    return spark_server.remote
