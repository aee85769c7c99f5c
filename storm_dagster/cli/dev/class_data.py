"""Java class data of a local cluster, made by servers that run only for that purpose.

It halves the start of ZooKeeper and Spark (:mod:`storm_dagster.host.class_data`). It is made where
a machine is prepared: by ``make``, in the images, or in the background of the first ``dev``.
"""

import os
import secrets
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from storm_dagster.cli.dev import readiness
from storm_dagster.cli.dev.ports import free_ports
from storm_dagster.client.waiting import Progress
from storm_dagster.host.children import running_child
from storm_dagster.host.class_data import ClassData
from storm_dagster.host.endpoints import ZooKeeperTls, zookeeper_tls_conf
from storm_dagster.host.java import java_command
from storm_dagster.host.waiting import poll
from storm_dagster.model.errors import Unavailable
from storm_dagster.security.authority import CertificateFolder
from storm_dagster.security.settings import zookeeper_tls
from storm_dagster.security.spark_remote import SPARK_TOKEN
from storm_dagster.zk.embedded import (
    ServerFiles,
    server_answers,
    zookeeper_command,
    zookeeper_jars,
)

_HOST = "127.0.0.1"
_START_SECS = 120.0
_END_SECS = 120.0
"""Longest end of a JVM: it writes the archive."""


def zookeeper_class_data() -> ClassData:
    """Return the archive of the embedded ZooKeeper."""
    return ClassData.of("zookeeper", java_command(), zookeeper_jars())


def spark_class_data() -> ClassData:
    """Return the archive of the embedded Spark server."""
    from storm_dagster.spark.server import spark_jars

    return ClassData.of("spark", java_command(), spark_jars())


def is_class_data_missing() -> bool:
    """True if an archive that could be made does not exist."""
    archives = (zookeeper_class_data(), spark_class_data())
    return any(data.path is not None and not data.exists() for data in archives)


def make_class_data(progress: Progress) -> list[str]:
    """Make the archives that do not exist; return their steps.

    Each takes a start, some use, and the end of its server: together about half a minute on two
    cores. Raises :class:`Unavailable` without Java, pyspark or a cache folder, and
    :class:`Conflict` while another process makes an archive.
    """
    steps: list[str] = []
    for step, make in (
        ("class data of ZooKeeper", make_zookeeper_class_data),
        ("class data of Spark", make_spark_class_data),
    ):
        progress(step, "STARTED")
        if make():
            progress(step, "SUCCESS")
            steps.append(step)
        else:
            progress(step, "SKIPPED")
    return steps


def make_zookeeper_class_data() -> bool:
    """Make the archive of the embedded ZooKeeper; return False if it exists."""
    return _make(zookeeper_class_data(), _train_zookeeper)


def make_spark_class_data() -> bool:
    """Make the archive of the embedded Spark server; return False if it exists."""
    return _make(spark_class_data(), _train_spark)


def _make(data: ClassData, train: Callable[[Path, Sequence[str]], None]) -> bool:
    if data.exists():
        return False
    with (
        tempfile.TemporaryDirectory(prefix="storm-dagster-class-data-") as folder,
        data.creation() as options,
    ):
        train(Path(folder), options)
    return True


def _train_zookeeper(folder: Path, options: Sequence[str]) -> None:
    """Run a server through the first steps of a cluster. It speaks TLS, as that of ``dev`` does."""
    (port,) = free_ports(1)
    certificates = CertificateFolder.of(folder)
    certificates.prepare()
    command = zookeeper_command(folder, port, tls=ServerFiles.of(certificates), class_data=options)
    client = str(certificates.client_file)
    tls = ZooKeeperTls(ca=str(certificates.authority_file), certificate=client, key=client)
    values = {
        "storm.zookeeper.servers": [f"{_HOST}:{port}"],
        "storm.zookeeper.root": "/storm",
        "storm.zookeeper.auth.payload": None,
        **zookeeper_tls_conf(tls),
    }
    context = zookeeper_tls(values)

    def is_ready() -> bool:
        return server_answers(_HOST, port, tls=context)

    with _running(command, os.environ, folder / "out", is_ready):
        readiness.prepare_root(values, None, uuid.uuid4().hex)


def _train_spark(folder: Path, options: Sequence[str]) -> None:
    """Run a server through the first placements. It has a token, as every Spark server of ours."""
    from storm_dagster.spark.planner import ConnectPlanner, FixedSessionIds
    from storm_dagster.spark.server import spark_connect_command, spark_environment
    from storm_dagster.spark.warm_up import WARM_BATCH

    (port,) = free_ports(1)
    token = secrets.token_hex(32)
    command = spark_connect_command(port, folder, class_data=options)
    environment = {**spark_environment(folder), SPARK_TOKEN: token}
    planner = ConnectPlanner(
        f"sc://{_HOST}:{port}",
        FixedSessionIds(str(uuid.uuid4())),
        deadline_secs=_START_SECS,
        token=token,
    )
    with _running(command, environment, folder / "out", lambda: readiness.listens(port)):
        planner(WARM_BATCH)
        planner.close()


@contextmanager
def _running(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: Path,
    is_ready: Callable[[], bool],
) -> Iterator[None]:
    """Run a server inside of the block, which begins when it is ready and waits for its end."""
    with (
        output.open("wb") as stream,
        running_child(command, stream, environment=environment) as server,
    ):
        poll(lambda: is_ready() or server.poll() is not None, timeout=_START_SECS)
        if server.poll() is not None or not is_ready():
            text = output.read_text("utf-8", "replace").strip()[-1000:]
            raise Unavailable(f"a server for class data does not start: {text}")
        yield
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(_END_SECS)
        except subprocess.TimeoutExpired:
            raise Unavailable(
                f"Java has not written class data within {_END_SECS:.0f} s: "
                "try later, when the machine is less busy"
            ) from None
