"""One real Spark Connect server for all tests of this folder: a JVM takes seconds and 600 MB."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from storm_rigs.spark_server import SparkServer


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def spark_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkServer]:
    """The server process."""
    with SparkServer(free_port(), tmp_path_factory.mktemp("spark")) as server:
        yield server


@pytest.fixture(scope="session")
def spark_remote(spark_server: SparkServer) -> str:
    """Its Spark Connect URL."""
    return spark_server.remote
