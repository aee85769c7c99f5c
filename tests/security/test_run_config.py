"""Run config as an attacker writes it: resources that lead elsewhere, and targets that run what is
not the project's.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from storm_dagster.defs.build import build_storm_defs, build_storm_resources
from storm_dagster.defs.resources.handles import ZooKeeperResource
from storm_dagster.defs.resources.processes import NimbusResource, upload_of
from storm_dagster.model.errors import InvalidRequest, InvalidTopology
from storm_dagster.packaging.target import check_inside, target_roots

KEYS = tuple(build_storm_resources())
FIELDS: dict[str, Any] = {
    "home": "/tmp/evil",
    "conf_dir": "/tmp/evil",
    "overrides": {"nimbus.seeds": ["attacker:80"], "nimbus.inimbus.class": "os:system"},
    "asset_keys": {"a": "b"},
    "spawn": True,
}
KILL = {"kill_topology_op": {"config": {"name": "wc"}}}


@pytest.fixture(scope="module")
def defs() -> dg.Definitions:
    return build_storm_defs(home="/srv/storm")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("key", ["storm_zookeeper", "storm_blobstore", "storm_spark"])
def test_run_config_sets_no_field_of_a_resource(defs: dg.Definitions, key: str, field: str) -> None:
    config = {"ops": KILL, "resources": {key: {"config": {field: FIELDS[field]}}}}
    with pytest.raises(
        dg.DagsterInvalidConfigError, match=f'"{field}" at path root:resources:{key}:config'
    ):
        dg.validate_run_config(defs.resolve_job_def("kill_topology"), config)


def test_resources_take_no_config_at_all(defs: dg.Definitions) -> None:
    assert len(KEYS) == 6
    for resource in build_storm_resources(home="/srv/storm", blob_dir="/srv/blobs").values():
        definition = resource.get_resource_definition()
        assert definition is resource.get_resource_definition()
        assert definition.config_schema.config_type.fields == {}
        assert "build_storm_defs()" in (definition.description or "")


def test_a_resource_is_as_it_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "/srv/there")
    built = ZooKeeperResource(home=dg.EnvVar("PLACE"), overrides={"nimbus.seeds": ["here:7621"]})
    with dg.build_resources({"storm_zookeeper": built}) as found:
        assert found.storm_zookeeper.home == "/srv/there"
        assert found.storm_zookeeper.overrides == {"nimbus.seeds": ["here:7621"]}
    with pytest.raises(
        InvalidRequest, match=r"configure_at_launch: Run config .* give them to build_storm_defs"
    ):
        ZooKeeperResource.configure_at_launch()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    (folder / "jobs").mkdir(parents=True)
    for file in ("wc.py", "jobs/__init__.py", "jobs/wc.py"):
        (folder / file).write_text("raise SystemExit('imported')\n")
    (folder / "venv" / "site-packages").mkdir(parents=True)
    (folder / "venv" / "site-packages" / "other.py").touch()
    (folder / "home").mkdir()
    (folder / "home" / "uploaded.py").touch()
    (tmp_path / "evil.py").touch()
    (folder / "link.py").symlink_to(tmp_path / "evil.py")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return folder


def test_targets_of_the_project_are_found_without_being_imported(project: Path) -> None:
    for target in ("wc.py", str(project / "wc.py"), "wc:Name", "jobs.wc:Name", "jobs/wc.py:Name"):
        check_inside(target, target_roots({}), project / "home")


REFUSED = (
    *(
        "../evil.py",
        "link.py:Evil",
        "jobs/../../evil.py",
        "home/uploaded.py",
        "venv/site-packages/other.py",
    ),
    *(
        "subprocess:getoutput",
        "os:abort",
        "sys:exit",
        "pip:main",
        "antigravity",
        "storm_dagster.cli.app:main",
        "nowhere",
    ),
)


@pytest.mark.parametrize("target", REFUSED)
def test_other_targets_are_refused(project: Path, target: str) -> None:
    with pytest.raises(InvalidRequest, match=r"dagster\.target\.roots"):
        check_inside(target, [project], project / "home")


def test_no_root_is_too_wide_by_default(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert target_roots({})[0] == project
    for folder in (Path("/"), Path("/tmp"), Path.home()):
        monkeypatch.chdir(folder)
        assert folder not in target_roots({})
    assert target_roots({"dagster.target.roots": ["/srv/jobs"]}) == [Path("/srv/jobs")]
    assert target_roots({"dagster.target.roots": []}) == []


@pytest.mark.parametrize(
    ("target", "conf", "named"),
    [
        ("/etc/passwd.py", {}, "passwd.py"),
        ("../evil.py", {}, "evil.py is not in a folder of targets"),
        ("wc.py", {"topology.python": "/bin/bash"}, "topology.python"),
        ("wc.py", {"topology.environment": {"BASH_ENV": "$(id)"}}, "topology.environment"),
    ],
)
def test_a_form_runs_nothing_else(
    project: Path, target: str, conf: dict[str, Any], named: str
) -> None:
    nimbus = NimbusResource(home=str(project / "home"), patience_secs=0.0)
    with pytest.raises(InvalidRequest, match=named):
        upload_of(logging.getLogger(__name__), nimbus, None, target, conf)


_STARTS = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "pty.spawn",
)
_heard: list[tuple[str, tuple[Any, ...]]] | None = None
_hooked = False


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if _heard is not None and (event in _STARTS or event in ("import", "exec", "open")):
        _heard.append((event, args))


@pytest.fixture
def heard() -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    """What this process imports, runs, opens and starts; nobody can take such a hook away again."""
    global _heard, _hooked
    if not _hooked:
        _hooked = True
        sys.addaudithook(_hear)
    _heard = []
    yield _heard
    _heard = None


def _described(project: Path, target: str) -> None:
    upload_of(
        logging.getLogger(__name__),
        NimbusResource(home=str(project / "home"), patience_secs=0.0),
        None,
        target,
        {},
    )


@pytest.mark.parametrize("target", REFUSED)
def test_of_a_refused_target_nothing_is_imported_opened_or_started(
    project: Path, heard: list[tuple[str, tuple[Any, ...]]], target: str
) -> None:
    with pytest.raises(InvalidRequest, match=r"dagster\.target\.roots"):
        _described(project, target)
    told = list(heard)
    assert [each for each in told if each[0] in _STARTS] == []
    modules = {Path(target.partition(":")[0]).stem, *target.partition(":")[0].split(".")} - {
        "storm_dagster"
    }
    assert [
        args[0] for event, args in told if event == "import" and {*args[0].split(".")} & modules
    ] == []
    for event, args in told:
        where = str(args[0].co_filename if event == "exec" else args[0])
        assert event not in ("exec", "open") or not (
            where.startswith(str(project.parent)) and ".py" in where
        ), told


def test_a_target_of_the_project_is_run_by_a_child_alone(
    project: Path, heard: list[tuple[str, tuple[Any, ...]]]
) -> None:
    with pytest.raises(InvalidTopology, match="ended the interpreter with exit code 'imported'"):
        _described(project, "wc.py")
    told = list(heard)
    ((_, (_, command, *_)),) = [each for each in told if each[0] == "subprocess.Popen"]
    assert command[1:3] == ["-m", "storm_dagster.packaging.describe"]
    assert "wc" not in {args[0] for event, args in told if event == "import"}
    assert not any(
        event == "exec" and str(args[0].co_filename).startswith(str(project))
        for event, args in told
    )
