"""Installer of ``make``: pip's configuration is passed on to uv; where it cannot be, pip
installs.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_tool", ROOT / "tools" / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_pip_itself_lists_is_read(installer: ModuleType) -> None:
    environment = {
        "PATH": "/usr/bin:/bin",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": "https://user:it's=so@mirror.example/simple",
        "PIP_FIND_LINKS": "/a /b",
    }
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        env=environment, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    options = installer.pip_options(listed)
    assert options["index-url"] == environment["PIP_INDEX_URL"]
    assert installer.uv_variables(options, {}) == {
        "UV_DEFAULT_INDEX": environment["PIP_INDEX_URL"],
        "UV_FIND_LINKS": "/a,/b",
        "UV_SYSTEM_CERTS": "true",
    }


def test_the_environment_wins_over_a_command_s_section_and_that_over_all(
    installer: ModuleType,
) -> None:
    listing = ":env:.index-url='e'\nglobal.index-url='g'\nglobal.timeout='3'\ninstall.timeout='4'\nlist.format='x'\n"
    assert installer.pip_options(listing) == {"index-url": "e", "timeout": "4"}


def test_what_uv_is_told_already_stays(installer: ModuleType) -> None:
    options = {
        "index-url": "https://pip.example/simple",
        "extra-index-url": "https://a\nhttps://b",
        "cert": "/c.pem",
    }
    told = installer.uv_variables(
        options, {"UV_INDEX_URL": "https://uv.example", "SSL_CERT_FILE": "/mine.pem"}
    )
    assert told == {
        "UV_INDEX": "https://a https://b",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_SYSTEM_CERTS": "true",
    }


@pytest.mark.parametrize("option", ["require-hashes", "target", "no-binary", "something-new"])
def test_an_option_that_uv_cannot_be_told_is_left_to_pip(
    installer: ModuleType, option: str
) -> None:
    assert installer.uv_variables({"index-url": "https://x", option: "y"}, {}) is None


@pytest.mark.parametrize(
    ("said", "new_enough"),
    [("uv 0.9.1", True), ("uv 1.0.0 (abc)", True), ("uv 0.8.22", False), ("?", False)],
)
def test_an_old_uv_on_path_is_not_used(
    installer: ModuleType, tmp_path: Path, said: str, new_enough: bool
) -> None:
    uv = tmp_path / "uv"
    uv.write_text(f"#!/bin/sh\necho '{said}'\n")
    uv.chmod(0o755)
    assert installer.recent_uv(str(uv)) == (str(uv) if new_enough else None)
    assert (
        installer.recent_uv(str(tmp_path / "nothing")) is None and installer.recent_uv(None) is None
    )


def test_where_uv_fails_pip_installs_the_same(installer: ModuleType, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    class Environment(installer.Environment):  # type: ignore[misc, name-defined]
        def __init__(self, folder: Path) -> None:
            self.python = "true"

        def make(self) -> None: ...

        def install_with_uv(self, what: list[str], base: bool) -> bool:
            asked.append(what)
            return False

        def install_with_pip(self, what: list[str]) -> bool:
            asked.append(what)
            return len(asked) < 4

    installer.install(tmp_path, ["test"], Environment)
    assert asked == [["--editable", ".", "--group", "test"]] * 2
    with pytest.raises(installer.CannotInstall, match="neither uv nor pip"):
        installer.install(tmp_path, [], Environment)


def test_pins_are_resolved_together_with_the_groups(installer: ModuleType, tmp_path: Path) -> None:
    """Two installations would leave packages that need another release of a pinned one."""
    asked: list[list[str]] = []

    class Environment(installer.Environment):  # type: ignore[misc, name-defined]
        def make(self) -> None: ...

        def install_with_uv(self, what: list[str], base: bool) -> bool:
            asked.append(what)
            return True

    installer.install(tmp_path, ["test"], Environment, pins=["--upgrade", "dagster==1.12"])
    assert asked == [["--editable", ".", "--group", "test", "--upgrade", "dagster==1.12"]]


def test_a_target_installs_its_own_groups_only() -> None:
    """Commands that ``make -n`` prints in a clone without an environment."""
    wanted = {"demo": set(), "check": {"check", "test", "docs"}, "test": {"test", "docs"}}
    for target, expected in wanted.items():
        planned = subprocess.run(
            ["make", "-n", target, "VENV=nowhere/venv"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        asked = re.findall(r"install\.py nowhere/venv(.*)", planned)
        assert {group for line in asked for group in line.split()} == expected, target
        assert asked[0].split() == [], "what all need is compiled first, alone"
