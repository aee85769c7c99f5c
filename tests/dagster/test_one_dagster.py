"""One Dagster for a team and its cluster: ``dev`` starts none of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from storm_dagster.host.endpoints import DevFile
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.servers.postgres import PostgresServer
from storm_rigs.stage.stock_dagster import StockDagster

pytestmark = [pytest.mark.dagster, pytest.mark.cluster, pytest.mark.spark]

WORD_COUNT = Path(__file__).parents[2] / "examples" / "wordcount.py"
DEFINITIONS = """
import dagster as dg
from storm_dagster import build_storm_defs


@dg.asset
def report() -> None: ...


defs = dg.Definitions.merge(dg.Definitions(assets=[report]), build_storm_defs(home={home!r}))
"""
LAUNCHER = """
from pathlib import Path

from dagster import DefaultRunLauncher


class TeamLauncher(DefaultRunLauncher):
    def launch_run(self, context):
        with Path(__file__).with_name("launched").open("a") as file:
            file.write(context.dagster_run.job_name + "\\n")
        super().launch_run(context)

    @classmethod
    def from_config_value(cls, inst_data, config_value):
        return cls(inst_data=inst_data, **config_value)
"""
WORKSPACE = """
load_from:
  - python_file: {relative_path: batch.py, location_name: batch}
"""


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[StockDagster, Path]]:
    """A team's Dagster on PostgreSQL with a launcher of its own, and the HOME of its cluster.

    It does not run yet.
    """
    root = tmp_path / "team"
    root.mkdir()
    home = tmp_path / "home"
    (root / "team_defs.py").write_text(DEFINITIONS.format(home=str(home)))
    (root / "team_launcher.py").write_text(LAUNCHER)
    server = PostgresServer()
    try:
        server.create()
        server.start()
        for key, value in server.environment.items():
            monkeypatch.setenv(key, value)
        monkeypatch.syspath_prepend(root)
        database = {"username": server.user, "password": {"env": "DAGSTER_POSTGRES_PASSWORD"}}
        database |= {"hostname": "127.0.0.1", "db_name": "dagster", "port": server.port}
        database["scheme"] = "postgresql+psycopg2"
        settings = {
            "storage": {"postgres": {"postgres_db": database}},
            "run_launcher": {"module": "team_launcher", "class": "TeamLauncher"},
            "sensors": {"use_threads": True, "num_workers": 4},
        }
        environment = {"PYTHONPATH": str(root), **server.environment}
        dagster = StockDagster(
            root, "team_defs", tmp_path / "instance", yaml.safe_dump(settings), environment
        )
        yield dagster, home
    finally:
        server.stop()
        shutil.rmtree(server.folder, ignore_errors=True)


def cluster_of(home: Path, *options: str, url: str = "") -> LocalCluster:
    conf = {"dagster.location": "team_defs"} if options else {}
    if url:
        conf["dagster.graphql.url"] = url
    return LocalCluster(home, supervisors=1, options=options, conf=conf, timeout=400)


def run_jobs(dagster: StockDagster) -> list[str]:
    """Jobs that the team's launcher has launched, in their order."""
    path = dagster.root / "launched"
    return path.read_text().split() if path.exists() else []


def dagster_roles(cluster: LocalCluster) -> set[str]:
    return {record.role for record in cluster.processes() if record.role.startswith("dagster-")}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_cluster_lives_in_the_dagster_of_a_team(team: tuple[StockDagster, Path]) -> None:
    dagster, home = team
    target = (str(WORD_COUNT), "--conf", "wordcount.lines.per.second=20")

    # Dagster starts after the cluster: the first submission waits for it.
    with cluster_of(home, "--no-dagster", url=dagster.url) as cluster:
        assert dagster_roles(cluster) == set()
        assert not (home / "dagster" / "workspace.yaml").exists()
        status = cluster.cli("status")
        assert (
            status["dagster"]["state"] == "broken"
            and "start its webserver" in status["dagster"]["found"]
        )
        command = [sys.executable, "-m", "storm_dagster", "submit", "--json", *target]
        submission = subprocess.Popen(
            [*command, "--name", "first", "--home", str(home), "--timeout", str(patience(300))],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        with dagster:
            output, errors = submission.communicate(timeout=patience(360))
            assert submission.returncode == 0, (output, errors)
            assert json.loads(output)["status"] == "ACTIVE"
            assert run_jobs(dagster) == ["submit_topology"]
            eventually(lambda: cluster.cli("status")["healer"], 120, "an armed sensor", interval=1)
            assert cluster.cli("status")["dagster"]["state"] == "ok"
            findings = cluster.cli("doctor", check=False).document["findings"]
            assert {row["state"] for row in findings if row["check"] == "Dagster"} == {"ok"}
            slots = cluster.endpoints.supervisors[0].ports
            cluster.stop()
            assert dagster.shown()["jobs"]["submit_topology"], (
                "stop leaves the team's Dagster alone"
            )
            run_with_url(dagster, home, slots)
    run_with_own_dagster(home, slots, target)
    assert DevFile.read(home).own_dagster


def run_with_url(dagster: StockDagster, home: Path, slots: tuple[int, ...]) -> None:
    """The same HOME started again, with the address of a Dagster that runs."""
    with cluster_of(home, "--dagster-url", dagster.url.removesuffix("/graphql")) as cluster:
        assert dagster_roles(cluster) == set()
        assert cluster.endpoints.supervisors[0].ports == slots
        assert not cluster.endpoints.dagster.own  # pyright: ignore[reportOptionalMemberAccess]
        cluster.wait_running("first", 120)
        cluster.cli("rebalance", "first", "-w", "0")
        assert "rebalance_topology" in run_jobs(dagster)


def run_with_own_dagster(home: Path, slots: tuple[int, ...], target: tuple[str, ...]) -> None:
    """The same HOME with a Dagster of ``dev``, which serves the user's locations, too."""
    folder = home.parent / "batch"
    folder.mkdir()
    (folder / "batch.py").write_text("import dagster as dg\n\n@dg.asset\ndef sums(): ...\n")
    workspace = folder / "workspace.yaml"
    workspace.write_text(WORKSPACE)
    own = LocalCluster(home, supervisors=1, options=("--workspace", str(workspace)), timeout=400)
    with own as cluster:
        assert dagster_roles(cluster) == {"dagster-code", "dagster-daemon", "dagster-webserver"}
        assert cluster.endpoints.supervisors[0].ports == slots
        cluster.wait_running("first", 120)
        eventually(
            lambda: cluster.cli("submit", *target, "--name", "second", "--token", "second"),
            180, "a submission", ignore=(StormDagsterError,),
        )  # fmt: skip
        assert workspace.read_text() == WORKSPACE
        assert locations_of(cluster) == {"storm", "batch"}


def locations_of(cluster: LocalCluster) -> set[str]:
    """Code locations that dev's own Dagster serves."""
    from contextlib import closing

    from storm_dagster.nimbus.dagster.transport import DagsterAccess, DagsterTransport
    from storm_dagster.security.settings import Security

    access = DagsterAccess.of(cluster.conf)
    transport = DagsterTransport(
        lambda: access, timeout=patience(30), security=Security.of(cluster.conf)
    )
    with closing(transport):
        entries = transport.graphql("LocationJobs", {})["locationEntries"]
    return {entry["name"] for entry in entries}
