"""Supported Dagster releases: the range of pyproject.toml, and only public names of `dagster` are used."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import dagster as dg
import pytest

import storm_dagster

PACKAGE = Path(storm_dagster.__file__).parent
GUARDED = PACKAGE / "launcher" / "compatibility.py"
"""The one place that may take what is not public: it falls back where that is missing."""
SOURCES = sorted(path for folder in ("defs", "launcher") for path in (PACKAGE / folder).rglob("*.py"))


def names_of(tree: ast.Module) -> set[str]:
    """Attributes of ``dg`` and names imported from ``dagster``."""
    found = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dg"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "dagster":
            found |= {alias.name for alias in node.names}
    return found


def test_every_name_that_is_used_is_there() -> None:
    used = {name for path in SOURCES for name in names_of(ast.parse(path.read_text(encoding="utf-8")))}
    assert len(used) > 50, "the names are not found any more"
    assert not [name for name in sorted(used) if not hasattr(dg, name)], f"not in Dagster {dg.__version__}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_private_modules_of_dagster_are_taken_in_one_place(path: Path) -> None:
    modules: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    private = [name for name in modules if re.match(r"dagster\w*\._", name)]
    assert path == GUARDED or not private


def test_the_requirements_are_ranges_below_the_next_major_release() -> None:
    """So that the package installs beside any Dagster project; which pairs belong together Dagster's own pins say."""
    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    found = dict(re.findall(r'"(dagster[a-z-]*)([^"a-z_]*)"', text))
    assert {"dagster", "dagster-pyspark", "dagster-webserver", "dagster-postgres"} <= found.keys()
    for name, bounds in found.items():
        assert re.fullmatch(r">=[0-9.]+,<[12]", bounds), (name, bounds)
