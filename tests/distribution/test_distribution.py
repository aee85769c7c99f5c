"""Published artifacts: the source distribution builds the wheel, the wheel is complete, and it
works where it is installed.
"""

from __future__ import annotations

import email
import importlib.util
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import storm_dagster

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "storm_dagster"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of sdist and wheel; the wheel is built from the sdist, with the build backend
    installed here.
    """
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True, text=True, timeout=170, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Iterator[zipfile.ZipFile]:
    (found,) = built.glob("*.whl")
    with zipfile.ZipFile(found) as archive:
        yield archive


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the wheel; what it depends on is seen through a
    path file.
    """
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (found,) = built.glob("*.whl")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(folder), "install", "--quiet", "--no-deps",
         "--no-index", str(found)],
        check=True, timeout=120,
    )  # fmt: skip
    # A path file adds the folder without reading the path files in it: our editable install stays
    # out.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def run(python: Path, *args: str, cwd: Path) -> str:
    done = subprocess.run(
        [str(python), *args], capture_output=True, text=True, timeout=150, cwd=cwd
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_every_file_of_the_package_is_in_the_wheel_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"storm_dagster/py.typed", "storm_dagster/model/conf_keys.yaml"} <= wanted
    names = {
        name for name in wheel.namelist() if ".dist-info/" not in name and not name.endswith("/")
    }
    assert names == wanted


def test_the_metadata_says_what_an_installer_asks(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["Name"] == "storm-dagster"
    assert metadata["Version"] == storm_dagster.__version__
    assert metadata["Requires-Python"] in (">=3.10,<3.15", "<3.15,>=3.10")
    assert metadata["License-Expression"] == "Apache-2.0"
    requires = metadata.get_all("Requires-Dist") or []
    (dagster,) = [each for each in map(Requirement, requires) if each.name == "dagster"]
    assert "1.13.27" in dagster.specifier and "2.0" not in dagster.specifier, (
        "other releases fit beside ours"
    )
    assert not [line for line in requires if "pytest" in line or "ruff" in line]
    assert (metadata.get_payload() or "").startswith("# storm_dagster")
    entry_points = wheel.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert "storm-dagster = storm_dagster.cli:main" in entry_points
    assert "[dagster_dg_cli.registry_modules]" in entry_points


def test_the_source_distribution_holds_what_a_packager_needs(built: Path) -> None:
    (found,) = built.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "tests/conftest.py"} <= names
    assert not [
        name for name in names if name.startswith((".venv", ".storm-dagster", "build/", "dist/"))
    ]


def test_the_version_and_public_addresses_stand_in_one_place() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    project = (
        (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.scripts]")[0]
    )
    assert "version" in project.partition("dynamic = [")[2].partition("]")[0]
    assert "\nversion" not in project and "://" not in project
    releasing = (ROOT / "RELEASING.md").read_text(encoding="utf-8")
    addresses = (ROOT / "release" / "addresses.toml").read_text(encoding="utf-8")
    for section in re.findall(r"^\[(\w+)\]", addresses, flags=re.M):
        assert f"`{section}." in releasing
    assert "release/addresses.toml" in listed


def test_links_of_the_readme_become_absolute_where_addresses_are_given() -> None:
    spec = importlib.util.spec_from_file_location(
        "release_metadata", ROOT / "release" / "metadata.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files, pictures = "https://example.org/files/", "https://example.org/raw/"
    made = module.absolute_links(text, files=files, pictures=pictures)
    relative = [
        link
        for link in re.findall(r"\]\(([^)]+)\)", made)
        if not link.startswith(("https://", "#"))
    ]
    assert relative == []
    assert (
        f"]({files}docs/security.md)" in made
        and "![" in made
        and f"]({pictures}docs/images/" in made
    )
    assert module.absolute_links(text, files="", pictures="") == text


def test_the_installed_package_is_the_wheel(python: Path, tmp_path: Path) -> None:
    origin = run(python, "-c", "import storm_dagster; print(storm_dagster.__file__)", cwd=tmp_path)
    assert str(python.parents[1]) in origin


def test_the_command_answers(python: Path, tmp_path: Path) -> None:
    script = python.parent / "storm-dagster"
    out = run(python, str(script), "--version", cwd=tmp_path)
    assert storm_dagster.__version__ in out


def test_a_topology_is_described_without_the_repository(python: Path, tmp_path: Path) -> None:
    (tmp_path / "wordcount.py").write_text((ROOT / "examples" / "wordcount.py").read_text())
    code = (
        "from storm_dagster.packaging.target import describe_target\n"
        "print(sorted(describe_target('wordcount.py').topology.bolts))"
    )
    assert "['count', 'split']" in run(python, "-c", code, cwd=tmp_path)


def test_definitions_load_from_the_wheel(python: Path, tmp_path: Path) -> None:
    code = (
        "from storm_dagster.defs import build_storm_defs\n"
        "print(build_storm_defs().get_repository_def().has_job('submit_topology'))"
    )
    assert "True" in run(python, "-c", code, cwd=tmp_path)


def test_dg_lists_the_component(python: Path, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.dg]\ndirectory_type = "project"\n\n[tool.dg.project]\nroot_module = "mine"\n'
    )
    (tmp_path / "mine" / "defs").mkdir(parents=True)
    (tmp_path / "mine" / "__init__.py").touch()
    (tmp_path / "mine" / "definitions.py").touch()
    out = run(
        python, "-c", "import sys; sys.argv = ['dg', 'list', 'components', '--json']\n"
        "from dagster_dg_cli.cli import main; main()", cwd=tmp_path,
    )  # fmt: skip
    assert "storm_dagster.StormTopologyComponent" in out
