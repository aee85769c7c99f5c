"""Supported Dagster releases: the range of pyproject.toml, and only public names of `dagster` are
used.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import dagster as dg

import storm_dagster
from storm_dagster.defs import build_storm_defs
from storm_dagster.testing.waiting import patience

PACKAGE = Path(storm_dagster.__file__).parent
GUARDED = (PACKAGE / "code_server" / "server.py", PACKAGE / "web" / "service.py")
"""What may take names that are not public: runs start the stock way where they are missing, the
guarded UI does not start.
"""
SOURCES = sorted(
    path for path in PACKAGE.rglob("*.py") if "dagster" in path.read_text(encoding="utf-8")
)


def names_of(tree: ast.Module) -> set[str]:
    """Attributes of ``dg`` and names imported from ``dagster``."""
    found = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "dg"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "dagster":
            found |= {alias.name for alias in node.names}
    return found


def test_every_name_that_is_used_is_there() -> None:
    used = {
        name for path in SOURCES for name in names_of(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert len(used) > 50, "the names are not found any more"
    assert not [name for name in sorted(used) if not hasattr(dg, name)], (
        f"not in Dagster {dg.__version__}"
    )


def test_private_modules_of_dagster_are_taken_in_two_places() -> None:
    for path in SOURCES:
        modules: list[str] = []
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                modules.append(node.module or "")
            elif isinstance(node, ast.Import):
                modules += [alias.name for alias in node.names]
        private = [name for name in modules if re.match(r"dagster\w*\._", name)]
        assert path in GUARDED or not private, path


def test_another_release_than_ours_is_refused_with_the_one_to_install() -> None:
    """As ``pip install --no-deps`` beside an older Dagster leaves it."""
    program = (
        "import importlib.metadata as metadata; real = metadata.version\n"
        "metadata.version = lambda name: '1.9.13' if name == 'dagster' else real(name)\n"
        "import storm_dagster.defs"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(120)
    )
    said = done.stderr.strip().splitlines()[-1]
    assert (
        done.returncode == 1
        and "MissingPart: storm_dagster.defs needs dagster<2,>=1.12, and 1.9.13 is" in said
    )
    assert f"{sys.executable} -m pip install 'dagster<2,>=1.12'" in said


def test_every_run_of_ours_has_its_place_in_a_queue() -> None:
    """docs/shared-instance.md: 100 where a user waits, 1000 for healing, nothing for upkeep."""
    jobs = build_storm_defs(resource_prefix="").resolve_all_job_defs()
    places = {
        job.name: job.tags.get("dagster/priority") for job in jobs if not job.name.startswith("__")
    }
    upkeep = {"clean_inbox", "prune_history"}
    assert places.pop("reassign_topologies") == "1000"
    assert {name for name, place in places.items() if place is None} == upkeep
    assert {place for name, place in places.items() if name not in upkeep} == {"100"}


def test_the_requirements_are_ranges_below_the_next_major_release() -> None:
    """So that the package installs beside any Dagster project; which pairs belong together
    Dagster's own pins say.
    """
    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    found = dict(re.findall(r'"(dagster[a-z-]*)([^"a-z_]*)"', text))
    assert {"dagster", "dagster-pyspark", "dagster-webserver", "dagster-postgres"} <= found.keys()
    for name, bounds in found.items():
        assert re.fullmatch(r">=[0-9.]+,<[12]", bounds), (name, bounds)
