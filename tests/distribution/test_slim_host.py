"""A host for supervisors and workers alone: installed from a short list, and told what it lacks for
the rest.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import httpx
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from storm_dagster.host.processes import RunFile
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.servers.ports import free_ports
from storm_rigs.stage.daemons import Daemons

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
LISTED = ROOT / "docker" / "requirements-worker.txt"
SLIM = Path(__file__).with_name("slim_host.py")


def requirements(lines: list[str]) -> dict[str, Requirement]:
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(each.name): each for each in found}


def slim(program: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run it where only the listed distributions can be imported."""
    return subprocess.run(
        [sys.executable, str(SLIM), str(LISTED), textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, **env},
    )


def test_the_list_asks_for_the_versions_that_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = requirements(project["dependencies"])
    for name, listed in requirements(LISTED.read_text(encoding="utf-8").splitlines()).items():
        assert listed.specifier == declared[name].specifier, name


def test_the_worker_image_is_installed_from_the_list() -> None:
    stages = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8").split("\nFROM ")
    (stage,) = [text for text in stages if "AS worker" in text.splitlines()[0]]
    assert stage.startswith("python AS worker") and "-r /wheels/requirements-worker.lock" in stage
    assert "--no-deps /code/*.whl" in stage
    assert "jre" not in stage, "no JVM runs on such a host"
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))[
        "services"
    ]
    for name, service in services.items():
        assert service["image"].startswith("storm-dagster-worker:") == name.startswith(
            "supervisor"
        ), name


def test_supervisors_and_workers_load_with_the_listed_distributions_alone() -> None:
    done = slim(
        """
        import importlib, pkgutil
        import structlog, storm_dagster.cli.daemon_verbs, storm_dagster.supervisor, storm_dagster.worker
        import storm_dagster.host.processes
        for package in (storm_dagster.supervisor, storm_dagster.worker):
            for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
                if not module.name.endswith("__main__"):
                    importlib.import_module(module.name)
        assert list(storm_dagster.host.processes.processes())
        """
    )
    assert done.returncode == 0, done.stderr[-4000:]
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    listed = set(requirements(LISTED.read_text(encoding="utf-8").splitlines()))
    assert listed <= loaded, "what nothing loads need not be listed"


@pytest.mark.parametrize(
    ("verb", "kind", "part"),
    [
        (["daemon", "nimbus"], "MissingPart", "fsspec>="),
        (["daemon", "code", "--port", "4000"], "MissingPart", "dagster"),
        (["dev"], "MissingPart", "dagster"),
        (["daemon", "spark"], "Unavailable", "pyspark[connect]>="),
        (["daemon", "zookeeper"], "Unavailable", "pyspark[connect]>="),
    ],
    ids=lambda each: each[-1] if isinstance(each, list) else "",
)
def test_a_verb_names_the_part_that_it_lacks(
    verb: list[str], kind: str, part: str, tmp_path: Path
) -> None:
    done = slim(
        "from storm_dagster.cli import main; main()",
        *verb,
        "--home",
        str(tmp_path / "home"),
        DAGSTER_HOME=str(tmp_path),
    )
    last = done.stderr.strip().splitlines()[-1]
    assert (done.returncode, last.split(":")[0]) == (4, kind), done.stderr[-2000:]
    assert "pip install" in last and part in last


@pytest.mark.parametrize(
    ("program", "part"),
    [
        ("import storm_dagster.defs", "dagster"),
        ("import storm_dagster; storm_dagster.build_storm_defs", "dagster"),
        (
            "import storm_dagster.worker.dataplane.routes as r; r.resolve('storm_dagster.spark.assignment.groups:X')",
            "pyarrow",
        ),
        (
            "import storm_dagster.api.spark.session as s; s._connect(('local', 'local[1]'), {}, '', None)",
            "pyspark",
        ),
    ],
    ids=["definitions", "public name", "class of a component", "spark component"],
)
def test_code_names_the_part_that_it_lacks(program: str, part: str) -> None:
    done = slim(
        f"""
        from storm_dagster.model.errors import StormDagsterError
        try:
            {program}
        except StormDagsterError as error:
            assert isinstance(error, ImportError)
            print(error.message)
        """
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = done.stdout.splitlines()[0]
    assert f"needs {part}" in said and f"pip install '{part}" in said


def test_a_worker_whose_interpreter_lacks_a_part_says_so_in_one_line(tmp_path: Path) -> None:
    few = tmp_path / "few.txt"
    few.write_text("PyYAML\npydantic\nmsgspec\npyzmq\n")
    done = subprocess.run(
        [
            sys.executable,
            str(SLIM),
            str(few),
            "import runpy; runpy.run_module('storm_dagster.worker')",
            "x",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    (said,) = done.stderr.strip().splitlines()
    assert said.startswith("MissingPart: a worker needs kazoo")


TOPOLOGY = """
from storm_dagster.api import Bolt, Grouping, Spout, Topology

class Numbers(Spout):
    outputs = ["number"]
    last = 0

    def next_tuple(self):
        self.last += 1
        self.emit([self.last], tup_id=self.last)

class Sink(Bolt):
    def process(self, tup):
        if tup.values[0] == 1:
            self.logger.warning("the first number arrived")

class Slim(Topology):
    config = {"topology.workers": 2, "topology.max.spout.pending": 10}
    numbers = Numbers.spec()
    sink = Sink.spec(inputs={numbers: Grouping.SHUFFLE}, par=2)
"""


@pytest.mark.long
@pytest.mark.zookeeper
@pytest.mark.timeout(900)
def test_a_slim_host_runs_the_tasks_of_a_topology(
    tmp_path: Path, zookeeper_server: str, zk_root: str
) -> None:
    """Installs from the package index (or pip's cache of it)."""
    measured = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "install_size.py"),
            "--only",
            "worker",
            "--json",
            "--into",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert measured.returncode == 0, measured.stderr[-4000:]
    (row,) = json.loads(measured.stdout)
    assert row["mb"] <= 80
    here, ports = tmp_path / "host", free_ports(3)
    log = tmp_path / "supervisor.out"
    (tmp_path / "slim.py").write_text(TOPOLOGY)
    root = {"storm.zookeeper.root": zk_root}
    with Daemons(
        tmp_path / "cluster", [zookeeper_server], nimbuses=1, supervisors=0, conf=root
    ) as daemons:
        conf = {
            **root,
            "storm.zookeeper.servers": [zookeeper_server],
            "nimbus.seeds": daemons.conf["nimbus.seeds"],
            "supervisor.http.port": ports[0],
            "supervisor.slots.ports": ports[1:],
        }
        pairs = [
            part for key, value in conf.items() for part in ("-c", f"{key}={json.dumps(value)}")
        ]
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        with log.open("wb") as output:
            supervisor = subprocess.Popen(
                [
                    str(tmp_path / "worker" / "bin" / "storm-dagster"),
                    "daemon",
                    "supervisor",
                    "--home",
                    str(here),
                    "--id",
                    "slim",
                    *pairs,
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=clean,
                cwd=tmp_path,
            )
        try:
            with daemons.cluster() as cluster:
                eventually(lambda: "slim" in cluster.load_view().supervisors, 120, "the supervisor")
                running = daemons.wait_running(
                    daemons.submit(str(tmp_path / "slim.py"), "slim"), 300
                )
                assert {node for node, _ in running} == {"slim"} and len(running) == 2
                for pid, _ in running.values():
                    assert Path(f"/proc/{pid}/exe").exists()
                    assert (
                        f"{tmp_path}/worker/".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
                    )
                logs = list(here.rglob("worker.log"))
                eventually(
                    lambda: any("the first number arrived" in each.read_text() for each in logs),
                    60,
                    "a tuple",
                )
                url = cluster.load_view().supervisors["slim"].http
            # Its HTTP service works without what speeds uvicorn up elsewhere.
            assert httpx.get(f"{url}/healthz", trust_env=False, timeout=30).status_code == 200
        finally:
            supervisor.terminate()
            supervisor.wait(patience(60))
            for record in RunFile.read_all(here):
                record.signal(signal.SIGKILL)
    assert "Traceback" not in log.read_text()


def test_a_topology_runs_without_a_cluster_on_a_slim_host() -> None:
    topology = f"{ROOT / 'tests' / 'local' / 'topologies.py'}:Sums"
    done = slim("from storm_dagster.cli import main; main()", "run", topology, "--until-idle", "1")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "200 tuples of spouts, 0 failed, 0 errors" in done.stdout
