"""One Spark Connect server for all modules of a process that need no other: a JVM takes seconds and
600 MB.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from storm_rigs.servers.ports import free_port
from storm_rigs.servers.spark_server import SparkServer


@pytest.fixture(scope="session")
def spark_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkServer]:
    """The server process."""
    with SparkServer(free_port(), tmp_path_factory.mktemp("spark"), page=free_port()) as server:
        yield server


@pytest.fixture(scope="session")
def spark_remote(spark_server: SparkServer) -> str:
    """Its Spark Connect URL."""
    return spark_server.remote
