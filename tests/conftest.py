"""Fixtures that several areas share: one real ZooKeeper server for the whole run, a fresh root for
each test.

``tests/plugins`` holds what concerns the run as a whole: the cluster and the Spark server that
modules share, their order, the guard against processes that are left behind, the signals that end
them, and the root logger.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from kazoo.client import KazooClient

from storm_dagster.testing.waiting import patience
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.root import create_root_node
from storm_dagster.zk.session import ZkSession
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.servers.embedded_zookeeper import EmbeddedZooKeeper
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.conf import fresh_root, zookeeper_conf

pytest_plugins = [
    "busy_machine",
    "work_order",
    "shared_cluster",
    "shared_spark",
    "leftover_processes",
    "interrupts",
    "root_logger",
]

# A JVM of a test lives for minutes: what its optimizing compiler and a second thread of its
# collector would do costs more than it brings.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# `make test` draws the same examples each time, so that it passes or fails for the code alone;
# `make fuzz` searches at random, keeps what failed in .hypothesis, and prints how to repeat it.
# Neither measures time: the machine is busy.
UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("suite", derandomize=True, database=None, max_examples=50, **UNTIMED)
settings.register_profile(
    "fuzz", max_examples=int(os.environ.get("FUZZ_EXAMPLES", "1000")), print_blob=True, **UNTIMED
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


@pytest.fixture(scope="session")
def zookeeper_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``host:port`` of a real ZooKeeper server that lives as long as the test run."""
    folder = tmp_path_factory.mktemp("zookeeper")
    # Without fsync: the state need not outlive the machine.
    with EmbeddedZooKeeper(folder, durable=False) as server:
        yield server.address


@pytest.fixture
def zk_root() -> str:
    """A root path that no other test uses; it does not exist yet."""
    return fresh_root()


@pytest.fixture
def zk_connect(zookeeper_server: str, zk_root: str) -> Iterator[Callable[..., ZkSession]]:
    """Opens sessions below the test's root, closed after it.

    ``session_timeout_ms`` is ``patience(20_000)`` unless given.
    """
    opened: list[ZkSession] = []

    def connect(**options: object) -> ZkSession:
        settings = {"root": zk_root, "session_timeout_ms": patience(20_000), **options}
        session = ZkSession(zookeeper_server, **settings)
        opened.append(session)
        return session

    yield connect
    for session in reversed(opened):
        session.close()


@pytest.fixture
def zk_session(zk_connect: Callable[..., ZkSession]) -> ZkSession:
    """A session below the test's root, whose bare node exists."""
    session = zk_connect()
    create_root_node(session)
    return session


@pytest.fixture
def zk_state(zk_session: ZkSession) -> ZooKeeperClusterState:
    """The storage layer below a bare root."""
    return ZooKeeperClusterState(zk_session)


@pytest.fixture
def zk_conf(zookeeper_server: str, zk_root: str) -> dict[str, object]:
    """The conf keys that lead to the test's root."""
    return zookeeper_conf(zookeeper_server, zk_root)


@pytest.fixture
def stage(tmp_path: Path, zk_conf: dict[str, object]) -> Iterator[Stage]:
    """The builder of the test's cluster, which lies in ``tmp_path``."""
    with Stage(tmp_path, zk_conf) as stage:
        yield stage


@pytest.fixture(scope="module")
def module_stage(
    zookeeper_server: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    """The builder of a cluster for all tests of a module."""
    with Stage(tmp_path_factory.mktemp("stage"), zookeeper_conf(zookeeper_server)) as stage:
        yield stage


@pytest.fixture
def zk_cluster(stage: Stage) -> StormClusterState:
    """The cluster state of a new cluster: root, first-level nodes and cluster id exist."""
    return stage.cluster


@pytest.fixture
def zk_expire(zookeeper_server: str) -> Callable[[ZkSession], None]:
    """Ends a session behind its owner's back: another client takes it over and closes it."""

    def expire(session: ZkSession) -> None:
        identity = session._client.client_id
        assert identity is not None, "the session is not connected"
        other = KazooClient(hosts=zookeeper_server, timeout=patience(4), client_id=identity)
        other.start()
        other.stop()
        other.close()

    return expire


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB; only root may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() or subprocess.call(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder]):
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.check_call(["umount", "-l", folder])
