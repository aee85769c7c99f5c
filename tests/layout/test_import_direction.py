"""Imports point one way, and the package stays light: what workers and readers of the tree rely
on.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "storm_dagster"

# Each package, and the packages of ours that it imports besides itself: no more may be imported,
# and no less is listed.
EDGES: dict[str, set[str]] = {
    "model": set(),
    "host": {"model"},
    "security": {"model", "host"},
    "__main__": {"cli"},
    # Of Spark only the link, which loads nothing but what is below.
    "api": {"model", "host", "security", "spark"},
    "core": {"model"},
    "blobstore": {"model", "host"},
    "zk": {"model", "host", "security", "core"},
    "http": {"model", "host", "security", "core"},
    # A name that a dagster.yaml may have.
    "launcher": set(),
    # It knows nothing of clusters; what it loads for runs are names.
    "code_server": {"host", "security"},
    "web": {"model", "security", "http"},
    "spark": {"model", "host", "security", "core"},
    "packaging": {"model", "host", "api"},
    # Stands on what any author of a topology has.
    "connectors": {"model", "host", "api"},
    "client": {"model", "host", "security", "blobstore", "packaging"},
    "operations": {
        *("model", "host", "security", "core", "zk", "blobstore", "spark", "packaging"),
    },
    "nimbus": {"model", "host", "security", "core", "zk", "blobstore", "http", "operations"},
    "supervisor": {
        *("model", "host", "security", "core", "zk", "http", "operations", "packaging"),
    },
    # Of the client only the calls of the leader, when a task has events for Dagster.
    "worker": {"model", "host", "security", "core", "zk", "operations", "api", "client"},
    "defs": {
        *("model", "host", "security", "core", "zk", "blobstore", "spark", "operations"),
        *("client", "packaging"),
    },
    "testing": {"model", "host", "core", "client", "api", "worker"},
    # A worker's engine without a cluster.
    "local": {"model", "host", "security", "core", "api", "packaging", "worker"},
    "cli": {
        *("model", "host", "security", "core", "zk", "spark", "operations"),
        *("client", "packaging", "nimbus", "supervisor", "code_server", "web", "local"),
    },
}
# Third-party packages and the only packages of ours that may import them.
CONFINED: dict[str, set[str]] = {
    "kazoo": {"zk"},
    "dagster": {"defs", "launcher", "code_server", "web"},
    "dagster_webserver": {"web"},
    "dagster_pyspark": {"defs"},
    "pyspark": {"spark", "api", "defs", "cli"},
    "zmq": {"worker", "operations"},
    "cryptography": {"security"},
    "confluent_kafka": {"connectors"},
    "psycopg": {"connectors"},
}


# Modules of the standard library and the only files of ours that may import them.
CONFINED_TO_FILES: dict[str, set[str]] = {
    # Hosts share the folder of state, where SQLite works for one host only: it reads what earlier
    # releases have left. The cache of ZooKeeper is on a host's own disk.
    "sqlite3": {"worker/state/former.py", "zk/cached_state.py", "zk/disk_cache.py"},
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


def ours(path: Path) -> set[tuple[str, ...]]:
    """Parts of the names of our modules that a file imports, without ``storm_dagster``."""
    return {
        tuple(name.split(".")[1:]) for name in imports_of(path) if name.startswith("storm_dagster.")
    }


def test_packages_import_what_the_table_says_and_nothing_else() -> None:
    found: dict[str, set[str]] = {}
    for path in FILES:
        part = part_of(path)
        found.setdefault(part, set()).update(parts[0] for parts in ours(path) if parts[0] != part)
    assert found == EDGES


def test_packages_import_one_way() -> None:
    assert tuple(TopologicalSorter(EDGES).static_order())


def module_name(path: Path) -> str:
    """Dotted name of a module of ours."""
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


def test_files_import_one_way() -> None:
    """Imports inside functions and for type checkers count, too: files of a circle know each
    other.
    """
    modules = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    edges: dict[str, set[str]] = {}
    for module, path in modules.items():
        edges[module] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.module not in modules:
                continue
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                edges[module].add(submodule if submodule in modules else node.module)
        edges[module].discard(module)
    assert tuple(TopologicalSorter(edges).static_order())


@pytest.mark.parametrize(
    "package", sorted(path.name for path in PACKAGE.iterdir() if path.is_dir())
)
def test_folders_of_a_package_import_one_way(package: str) -> None:
    """Modules beside the folders are what the folders share, or what puts them together."""
    edges: dict[str, set[str]] = {}
    for path in (PACKAGE / package).glob("*/**/*.py"):
        folder = path.relative_to(PACKAGE / package).parts[0]
        others = {parts[1] for parts in ours(path) if len(parts) > 2 and parts[0] == package}
        edges.setdefault(folder, set()).update(others - {folder})
    assert tuple(TopologicalSorter(edges).static_order()) or not edges


def test_a_file_does_not_carry_its_folder_in_its_name() -> None:
    carrying = [
        str(path.relative_to(PACKAGE))
        for path in FILES
        if path.parent != PACKAGE
        and {path.parent.name, path.parent.name.removesuffix("s")} & {path.stem.split("_")[0]}
    ]
    assert not carrying


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_third_party_packages_stay_where_they_are_wrapped(path: Path) -> None:
    part = part_of(path)
    for top in {name.split(".")[0] for name in imports_of(path)} & CONFINED.keys():
        assert part in CONFINED[top], (
            f"{top} may be imported only in {sorted(CONFINED[top])}, not in {part}"
        )


@pytest.mark.parametrize("module", CONFINED_TO_FILES)
def test_some_modules_are_imported_by_the_files_that_need_them(module: str) -> None:
    users = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if module in {name.split(".")[0] for name in imports_of(path)}
    }
    assert users == CONFINED_TO_FILES[module]


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


def test_model_holds_values_only() -> None:
    acting = {
        *("os", "socket", "subprocess", "threading", "signal", "ctypes", "fcntl", "shutil"),
        *("time", "tempfile", "ssl", "multiprocessing", "asyncio", "psutil", "secrets"),
    }
    for path in (PACKAGE / "model").rglob("*.py"):
        used = {name.partition(".")[0] for name in imports_of(path)} & acting
        assert not used, f"{path.name} opens, starts, locks or kills something: {used}"


def test_importing_the_package_loads_nothing_heavy() -> None:
    program = (
        "import sys, storm_dagster, storm_dagster.worker, storm_dagster.api;"
        "print([m for m in ('pyspark','pandas','dagster','numpy','pyarrow') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.strip() == "[]"


def test_the_calls_of_the_leader_load_no_other_client_code() -> None:
    program = (
        "import sys, storm_dagster.client.leader;"
        "print([m for m in sys.modules if m.startswith(('storm_dagster.', 'dagster', 'pyspark')) and"
        " m.split('.')[1:2] not in (['model'], ['host'], ['client'])])"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.strip() == "[]"


def test_the_leader_is_searched_in_one_place() -> None:
    searching = [
        str(path.relative_to(PACKAGE))
        for path in FILES
        if part_of(path) != "nimbus"
        and '.get("leader") is True' in path.read_text(encoding="utf-8")
    ]
    assert searching == ["client/leader.py"]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("set_retry_policies(", "spark/link.py"),
        ("release_session()", "spark/link.py"),
        ("authorization=Bearer", "security/spark_remote.py"),
    ],
)
def test_the_link_to_spark_is_in_one_place(text: str, place: str) -> None:
    places = [
        str(path.relative_to(PACKAGE)) for path in FILES if text in path.read_text(encoding="utf-8")
    ]
    # A query session of another topology is ended by the process that was started to do so.
    assert set(places) - {"spark/query_sessions.py"} == {place}


def test_every_session_on_spark_connect_has_a_channel_that_checks_its_server() -> None:
    """A session that pyspark opens by a URL alone sends to whoever listens there."""
    arguments: set[str] = set()
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert ".remote(" not in text, path
        arguments |= set(re.findall(r"(?:channelBuilder\(|connection=)(\w+)", text))
    assert arguments == {"open_channel"}


def test_no_module_is_longer_than_550_lines() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert not {str(path): length for path, length in lengths.items() if length > 550}
