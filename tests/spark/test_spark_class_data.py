"""The embedded Spark server maps class data that a server of another folder has written."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from storm_dagster.cli.dev.class_data import make_spark_class_data, spark_class_data
from storm_dagster.cli.dev.ports import free_ports
from storm_dagster.cli.dev.readiness import listens
from storm_dagster.spark.server import spark_connect_command, spark_environment
from storm_dagster.testing.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.timeout(400)]


def test_a_server_in_another_folder_maps_the_class_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert make_spark_class_data() and not make_spark_class_data()
    archive = spark_class_data().path
    assert archive is not None
    (port,) = free_ports(1)
    folder = tmp_path / "another"
    environment = {**spark_environment(folder), "SPARK_CONNECT_AUTHENTICATE_TOKEN": "a" * 64}
    command = spark_connect_command(port, folder)
    with subprocess.Popen(command, env=environment, start_new_session=True) as server:
        try:
            eventually(lambda: listens(port), 120, "the server listens")
            mapped = Path(f"/proc/{server.pid}/maps").read_text(encoding="utf-8")
            assert str(archive) in mapped, "the JVM refused the archive: see -Xlog:cds"
        finally:
            server.terminate()
    assert os.listdir(archive.with_suffix(".home")) != []
