"""A declared topology: lineage, code versions, drift, mistakes in YAML, and a fresh project made
with `dg`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from packaging.version import Version
from pydantic import ValidationError

from storm_dagster.defs.declared.checks import TopologyAlerts, check_results
from storm_dagster.defs.declared.declaration import (
    Declaration,
    RunningTopology,
    TargetDescription,
    differences,
)
from storm_dagster.defs.declared.deploy import read_actual
from storm_dagster.defs.declared.topology import workers_markdown
from storm_dagster.defs.resources.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.model.errors import Conflict, InvalidRequest
from storm_dagster.testing.waiting import patience
from storm_rigs.dagster.dagster_results import text_of_cause
from storm_rigs.stage.dagster_world import DagsterWorld

pytestmark = pytest.mark.dagster

CODE = """
from storm_dagster.api import Bolt, Grouping, Spout, Topology

class Lines(Spout):
    outputs = ["line"]

class Split(Bolt):
    outputs = ["word"]

class Count(Bolt):
    outputs = ["word", "count"]

class Shop(Topology):
    lines = Lines.spec()
    split = Split.spec(inputs={lines: Grouping.SHUFFLE}, par=2)
    count = Count.spec(inputs={split: Grouping.fields("word"), lines: Grouping.ALL})
"""


class Project:
    """A folder that `dg` takes for a project, with topologies declared in it."""

    def __init__(self, root: Path, package: str) -> None:
        self.root, self.package = root, package
        self.defs = root / package / "defs"
        self.defs.mkdir(parents=True)
        (root / "pyproject.toml").write_text(
            f'[project]\nname = "{package}"\nversion = "0"\n\n[tool.dg]\ndirectory_type = "project"\n\n'
            f'[tool.dg.project]\nroot_module = "{package}"\n',
            encoding="utf-8",
        )
        for folder in (self.defs.parent, self.defs):
            (folder / "__init__.py").write_text("", encoding="utf-8")
        (self.defs.parent / "definitions.py").write_text(
            "from pathlib import Path\nfrom dagster import definitions, load_from_defs_folder\n\n\n"
            "@definitions\ndef defs():\n    return load_from_defs_folder(path_within_project=Path(__file__).parent)\n",
            encoding="utf-8",
        )

    def declare(self, folder: str = "shop", code: str = CODE, **attributes: Any) -> Path:
        place = self.defs / folder
        place.mkdir(exist_ok=True)
        (place / "shop_code.py").write_text(code, encoding="utf-8")
        declared = {"name": "shop", "target": "shop_code.py:Shop", **attributes}
        (place / "defs.yaml").write_text(
            yaml.safe_dump(
                {"type": "storm_dagster.StormTopologyComponent", "attributes": declared}
            ),
            encoding="utf-8",
        )
        return place

    def load(self) -> dg.Definitions:
        return dg.load_from_defs_folder(path_within_project=self.root)

    def specs(self) -> dict[str, dg.AssetSpec]:
        return {spec.key.to_user_string(): spec for spec in self.load().resolve_all_asset_specs()}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    package = f"shop_{tmp_path.name}".replace("-", "_")
    monkeypatch.syspath_prepend(str(tmp_path))
    return Project(tmp_path, package)


def test_spouts_and_bolts_stand_in_the_lineage(project: Project) -> None:
    project.declare(parallelism={"count": 3}, owners=["team:shop"], group="shop")
    specs = project.specs()
    upstream = {
        key: {dep.asset_key.to_user_string() for dep in spec.deps} for key, spec in specs.items()
    }
    assert upstream == {
        "topologies/shop": set(),
        "topologies/shop/lines": {"topologies/shop"},
        "topologies/shop/split": {"topologies/shop/lines"},
        "topologies/shop/count": {"topologies/shop/split", "topologies/shop/lines"},
    }
    assert all((spec.group_name, spec.owners) == ("shop", ["team:shop"]) for spec in specs.values())
    groupings = {
        row.data["grouping"] for row in specs["topologies/shop/count"].metadata["inputs"].records
    }
    assert groupings == {"fields on word", "all"}
    assert specs["topologies/shop/count"].metadata["executors"] == 3


CONNECTED = """
from storm_dagster.api import Bolt, Grouping, Topology
from storm_dagster.connectors import FileSource, KafkaSource, PostgresSink, SinkBolt, SourceSpout

class Orders(SourceSpout):
    source = KafkaSource(["orders", "returns"])
    outputs = ["order"]

class Files(SourceSpout):
    source = FileSource("s3://shop/in/*.jsonl")
    outputs = ["order"]

class Table(SinkBolt):
    sink = PostgresSink("public.orders")

class Delay(Bolt):
    assets = ["kafka/orders"]

class Report(SinkBolt):
    sink = PostgresSink("reports")
    assets = ["lake/reports"]

class Shop(Topology):
    orders = Orders.spec()
    files = Files.spec()
    table = Table.spec(inputs=[orders, files])
    delay = Delay.spec(inputs=[orders])
    report = Report.spec(inputs=[orders])
"""


def test_what_sources_read_is_upstream_and_what_sinks_write_is_downstream(project: Project) -> None:
    project.declare(code=CONNECTED)
    specs = project.specs()
    upstream = {
        key: {dep.asset_key.to_user_string() for dep in spec.deps} for key, spec in specs.items()
    }
    assert upstream == {
        "kafka/orders": set(),
        "kafka/returns": set(),
        "files/s3/shop/in": set(),
        "topologies/shop": set(),
        "topologies/shop/orders": {"topologies/shop", "kafka/orders", "kafka/returns"},
        "topologies/shop/files": {"topologies/shop", "files/s3/shop/in"},
        "topologies/shop/table": {"topologies/shop/orders", "topologies/shop/files"},
        "topologies/shop/table/postgres/public.orders": {"topologies/shop/table"},
        # What a bolt reports on is defined elsewhere.
        "topologies/shop/delay": {"topologies/shop/orders"},
        "topologies/shop/report": {"topologies/shop/orders"},
        "topologies/shop/report/postgres/reports": {"topologies/shop/report"},
    }
    assert specs["topologies/shop/table/postgres/public.orders"].kinds == {"storm", "postgres"}


def test_the_code_version_follows_code_and_conf_and_nothing_else(project: Project) -> None:
    def version() -> str | None:
        return project.specs()["topologies/shop"].code_version

    project.declare()
    first = version()
    assert first == version()
    project.declare(workers=3, parallelism={"count": 2}, deploy="hot")
    assert version() == first
    project.declare(conf={"topology.max.spout.pending": 7})
    assert version() not in (None, first)
    project.declare(code=CODE + "\n# changed\n")
    assert version() not in (None, first)


@pytest.mark.parametrize(("declared", "own"), [(3, 3), (100, 0)])
def test_topologies_share_two_sensors_and_many_share_their_jobs(
    project: Project, declared: int, own: int
) -> None:
    for number in range(declared):
        project.declare(f"t{number}", name=f"t{number}", target="missing.py")
    defs = project.load()
    dg.Definitions.validate_loadable(defs)
    assert [sensor.name for sensor in defs.sensors or []] == [
        "declared_topologies_sensor",
        "topology_events_sensor",
    ]
    jobs = {job.name for job in defs.jobs or []}
    shared = {"deploy_declared", "kill_declared", "rebalance_declared"}
    assert shared <= jobs
    assert len(jobs - shared) == 3 * own
    selected = defs.resolve_job_def("deploy_declared").asset_layer.selected_asset_keys
    assert len(selected) == declared


def test_names_that_look_alike_as_identifiers_stay_apart(project: Project) -> None:
    for folder, name in (("one", "a-b"), ("three", "a_b")):
        project.declare(folder, name=name, target="missing.py")
    dg.Definitions.validate_loadable(project.load())


def test_a_dotted_name_stays_distinct_or_names_the_release_that_accepts_it(
    project: Project,
) -> None:
    for folder, name in (("one", "a-b"), ("two", "a.b")):
        project.declare(folder, name=name, target="missing.py")
    try:
        dg.Definitions.validate_loadable(project.load())
    except Exception as error:
        assert Version(dg.__version__) < Version("1.13.4"), error
        said = text_of_cause(error, InvalidRequest)
        assert "'a.b'" in said and "1.13.4" in said


def test_assets_show_inputs_outputs_and_their_code(project: Project) -> None:
    # Templates of the first releases of 1.12 know no ``dg``.
    word = (
        "dg.AutomationCondition"
        if "dg" in dg.ResolutionContext.default().scope
        else "automation_condition"
    )
    place = project.declare(
        deps=["lake/prices"], kinds=["kafka"], automation_condition=f"{{{{ {word}.eager() }}}}"
    )
    former = place / "former" / "shop_code.py"
    former.parent.mkdir()
    former.write_text("class Count: ...\n")
    specs = project.specs()
    shop, count = specs["topologies/shop"], specs["topologies/shop/count"]
    assert {dep.asset_key.to_user_string() for dep in shop.deps} == {"lake/prices"}
    assert shop.kinds == {"kafka"}
    assert shop.automation_condition == dg.AutomationCondition.eager()
    assert count.automation_condition is None
    assert [column.name for column in count.metadata["dagster/column_schema"].columns] == [
        "word",
        "count",
    ]
    references = count.metadata["dagster/code_references"].code_references
    line = CODE.splitlines().index("class Count(Bolt):") + 1
    assert (str(place / "shop_code.py"), line) in {
        (reference.file_path, reference.line_number) for reference in references
    }


def test_rows_of_workers_link_to_their_logs() -> None:
    worker = {
        "node": "s1",
        "host": "one",
        "port": 6700,
        "pid": 7,
        "tasks": [1, 2, 3],
        "version": "abc",
    }
    text = workers_markdown({"id": "wc-1-1", "workers": [worker]}, {"s1": "http://one:8000"}).value
    assert "[one:6700](http://one:8000/api/v1/log?file=wc-1-1%2F6700%2Fworker.log)" in str(text)
    assert "1-3" in str(text)
    assert "](" not in str(
        workers_markdown({"id": "wc-1-1", "workers": [worker]}, {"s1": None}).value
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import no_such_package_of_ours\n" + CODE, "no_such_package_of_ours"),
        ("raise RuntimeError('not today')\n", "not today"),
        ("x = 1\n", "has no attribute 'Shop'"),
    ],
)
def test_a_target_that_fails_is_declared_and_says_why(
    project: Project, code: str, words: str
) -> None:
    project.declare(code=code)
    (spec,) = project.specs().values()
    assert words in (spec.description or "")
    assert words in str(spec.metadata["missing"])
    dg.Definitions.validate_loadable(project.load())


def test_two_of_one_name_are_an_error_that_names_both(project: Project) -> None:
    one, two = project.declare("one"), project.declare("two")
    with pytest.raises(Exception) as caught:
        project.load()
    said = text_of_cause(caught.value, Conflict)
    assert "declared twice" in said
    assert str(one) in said and str(two) in said


@pytest.mark.parametrize(
    ("attributes", "word"),
    [
        ({"worker": 2}, "worker"),
        ({"alerts": {"latency": 1}}, "latency"),
        ({"deploy": "blue-green"}, "blue-green"),
        ({"workers": 0}, "workers"),
        ({"conf": {"topology.workers": 2}, "workers": 2}, "leave one of them out"),
    ],
)
def test_unknown_and_wrong_fields_are_errors(project: Project, attributes: dict, word: str) -> None:
    project.declare(**attributes)
    with pytest.raises(Exception) as caught:
        project.load()
    assert word in text_of_cause(caught.value, ValidationError, InvalidRequest)


def test_schedules_and_limits_only_when_asked_for(project: Project) -> None:
    project.declare()
    plain = project.load()
    assert not list(plain.schedules or [])
    project.declare(
        schedule={"deploy": "*/10 * * * *", "rebalance": "0 3 * * *"}, alerts={"complete_ms": 500}
    )
    full = project.load()
    assert {item.name for item in full.schedules or []} == {
        "deploy_shop_schedule",
        "rebalance_shop_schedule",
    }
    checks = {key.name for check in full.asset_checks or [] for key in check.check_keys}
    assert checks == {
        "all_tasks_run",
        "as_declared",
        "fresh",
        "reports",
        "latency_within_limit",
    }
    dg.Definitions.validate_loadable(full)


def test_drift_is_found_in_every_part() -> None:
    declared = Declaration("shop", "shop.py", workers=3, parallelism={"count": 4})
    described = TargetDescription(code_version="new")
    same = RunningTopology("shop-1-1", "ACTIVE", 3, {"count": 4}, "new")
    assert differences(declared, described, same) == {}
    assert set(differences(declared, described, None)) == {"running"}
    other = RunningTopology("shop-1-1", "INACTIVE", 2, {"count": 1}, "old")
    assert set(differences(declared, described, other)) == {
        "code",
        "workers",
        "parallelism.count",
        "status",
    }
    foreign = RunningTopology("shop-1-1", "ACTIVE", 3, {"count": 4}, None)
    assert "not deployed from here" in differences(declared, described, foreign)["code"]


def test_nothing_runs_once_it_was_killed_though_its_workers_still_do() -> None:
    document = {"id": "shop-1-1", "status": "KILLED", "tasks": [{"id": 1, "status": "running"}]}
    killed = RunningTopology("shop-1-1", "KILLED", 1, {}, "v")
    found = check_results(
        Declaration("shop", "x"),
        TargetDescription(code_version="v"),
        killed,
        document,
        TopologyAlerts(errors=1),
    )
    assert not any(verdict.passed for verdict in found.values())


def test_limits_are_judged_by_what_spouts_did() -> None:
    document = {
        "id": "shop-1-1",
        "status": "ACTIVE",
        "tasks": [{"id": 1, "status": "running"}],
        "components": {
            "lines": {"type": "spout", "stats": {"acked": 90, "failed": 10, "complete_ms": 20.0}},
            "count": {"type": "bolt", "stats": {"acked": 5, "failed": 5}},
        },
        "errors": [{}],
    }
    running = RunningTopology("shop-1-1", "ACTIVE", 1, {}, "v")
    alerts = TopologyAlerts(complete_ms=19, failed_ratio=0.1, errors=0)
    found = check_results(
        Declaration("shop", "x"), TargetDescription(code_version="v"), running, document, alerts
    )
    assert {name: verdict.passed for name, verdict in found.items()} == {
        "all_tasks_run": True,
        "as_declared": True,
        "latency_within_limit": False,
        "failures_within_limit": True,
        "errors_within_limit": False,
    }


def test_code_whose_upgrade_was_rolled_back_is_named_with_the_reason() -> None:
    document = {
        "tasks": [{"id": 1, "status": "running"}],
        "id": "shop-1-1",
        "failed_upgrade": {
            "reason": "h:1: count[7]: ValueError: no file (shop.py, line 3)",
            "log": "http://h:8000/log",
        },
    }

    def check(running_code: str) -> dg.AssetCheckResult:
        running = RunningTopology("shop-1-1", "ACTIVE", 1, {}, running_code)
        described = TargetDescription(code_version="v")
        declaration = Declaration("shop", "x")
        return check_results(declaration, described, running, document, TopologyAlerts())[
            "as_declared"
        ]

    failed = check("former")
    assert not failed.passed and failed.severity == dg.AssetCheckSeverity.ERROR
    quoted = "h:1: count[7]: ValueError: no file (shop.py, line 3) (log: http://h:8000/log)"
    assert f"upgrade: rolled back: {quoted}" in str(failed.description)
    # The former code was declared again.
    assert check("v").passed


@pytest.mark.zookeeper
def test_the_actual_state_is_read_from_zookeeper_and_blobs(world: DagsterWorld) -> None:
    zookeeper = ZooKeeperResource(home=str(world.home))
    blobstore = BlobStoreResource(home=str(world.home), local_dir=str(world.home / "blobs"))
    with zookeeper.cluster() as cluster, blobstore.blobs(cluster) as blobs:
        assert read_actual(cluster, blobs, "wc") is None
        assert world.submit(
            "wc", conf={"topology.workers": 2, "declared.code.version": "abc"}
        ).success
        actual = read_actual(cluster, blobs, "wc")
    assert actual is not None
    assert (actual.workers, actual.executors["count"], actual.code_version) == (2, 2, "abc")
    wanted = Declaration("wc", "wc.py", workers=3, parallelism={"count": 2})
    assert set(differences(wanted, TargetDescription(code_version="abc"), actual)) == {"workers"}


@pytest.mark.long
def test_a_fresh_project_is_scaffolded_and_checked_with_dg(project: Project) -> None:
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(project.root),
        "DAGSTER_DISABLE_TELEMETRY": "yes",
    }

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("dg")), *arguments],
            cwd=project.root,
            env=env,
            capture_output=True,
            text=True,
            timeout=patience(170),
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("scaffold", "defs", "storm_dagster.StormTopologyComponent", "wc")
    made = project.defs / "wc"
    assert {path.name for path in made.iterdir()} == {"defs.yaml", "wc_topology.py"}
    # The dg of the first releases of 1.12 has no such option: it uses the environment that it runs
    # in.
    own = [option for option in ["--use-active-venv"] if option in run("check", "defs", "--help")]
    assert "successfully" in run("check", "defs", *own)
    assert "storm_dagster.StormTopologyComponent" in run("list", "components")
    specs = project.specs()
    assert specs.keys() == {f"topologies/wc{part}" for part in ("", "/lines", "/split", "/count")}
    assert "missing" not in specs["topologies/wc"].metadata
