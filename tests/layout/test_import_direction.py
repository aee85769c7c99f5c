"""Imports point one way, and the package stays light: what workers and readers of the tree rely on."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "storm_dagster"

# Each package, and the packages of ours that it may import besides itself.
ALLOWED: dict[str, set[str]] = {
    "model": set(),
    "__main__": {"cli"},
    "api": {"model"},
    "core": {"model"},
    "zk": {"model", "core"},
    "blobstore": {"model", "core"},
    "http": {"model", "core"},
    # Dagster's webserver and daemon load it: it knows nothing of clusters.
    "launcher": {"model"},
    "spark": {"model", "core"},
    "packaging": {"model", "api"},
    "operations": {"model", "core", "zk", "blobstore", "spark", "packaging"},
    "nimbus": {"model", "core", "zk", "blobstore", "http", "spark", "operations", "packaging"},
    "supervisor": {"model", "core", "zk", "blobstore", "http", "spark", "operations", "packaging"},
    "worker": {"model", "core", "zk", "blobstore", "spark", "operations", "api"},
    "client": {"model", "core", "packaging", "api", "blobstore"},
    "defs": {"model", "core", "zk", "blobstore", "spark", "operations", "client", "packaging", "nimbus"},
    "testing": {
        "model",
        "core",
        "zk",
        "blobstore",
        "spark",
        "operations",
        "client",
        "packaging",
        "api",
        "worker",
    },
    "cli": {
        *("model", "core", "zk", "blobstore", "spark", "operations", "client", "packaging", "api"),
        *("nimbus", "supervisor", "worker", "testing", "defs", "launcher"),
    },
}
# Third-party packages and the only packages of ours that may import them.
CONFINED: dict[str, set[str]] = {
    "kazoo": {"zk"},
    "dagster": {"defs", "launcher"},
    "dagster_pyspark": {"defs"},
    "pyspark": {"spark", "api", "defs", "cli"},
    "zmq": {"worker", "operations"},
}


def imports_of(path: Path) -> set[str]:
    """Dotted names of every module that a file imports, at whatever depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
    return found


def part_of(path: Path) -> str:
    """The package of ours (or top-level module) that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_stands_below_it(path: Path) -> None:
    part = part_of(path)
    for name in imports_of(path):
        top = name.split(".")[0]
        if top == "storm_dagster" and "." in name:
            other = name.split(".")[1]
            assert other == part or other in ALLOWED[part], f"{part} must not import {other} ({name})"
        elif top in CONFINED:
            assert part in CONFINED[top], (
                f"{top} may be imported only in {sorted(CONFINED[top])}, not in {part}"
            )


def test_core_is_pure() -> None:
    banned = {
        "time",
        "socket",
        "threading",
        "random",
        "subprocess",
        "os",
        "pathlib",
        "asyncio",
        "multiprocessing",
    }
    for path in (PACKAGE / "core").rglob("*.py"):
        assert not imports_of(path) & banned, (
            f"{path.name} reaches for the world: {imports_of(path) & banned}"
        )


def test_importing_the_package_loads_nothing_heavy() -> None:
    program = (
        "import sys, storm_dagster, storm_dagster.worker, storm_dagster.api;"
        "print([m for m in ('pyspark','pandas','dagster','numpy','pyarrow') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.strip() == "[]"


def test_no_module_is_longer_than_five_hundred_lines() -> None:
    long = {str(p): n for p in FILES if (n := len(p.read_text(encoding="utf-8").splitlines())) > 500}
    assert not long
