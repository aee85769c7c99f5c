"""Lines that install the package work today: no package index has it, a clone or a wheel does."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from storm_dagster.host.requirements import (
    extra_requirements,
    install_command,
    requirements_of,
)

ROOT = Path(__file__).parents[2]
FROM_AN_INDEX = re.compile(r"pip install\s+(?:-\S+\s+)*[\"']?storm[-_]dagster(?!-[\d.])")
"""``pip install storm-dagster``, with options or an extra; ``./storm-dagster`` is a folder."""
SUFFIXES = (".py", ".md", ".yaml", ".toml", ".sh")


def sources() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git repository: nothing says which files belong to it")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name.endswith(SUFFIXES)]
    return [path for path in paths if path.is_file() and path != Path(__file__)]


def test_no_text_installs_the_package_from_an_index() -> None:
    assert [
        str(path.relative_to(ROOT))
        for path in sources()
        if path.name != "RELEASING.md" and FROM_AN_INDEX.search(path.read_text(encoding="utf-8"))
    ] == []


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("pip install storm-dagster", True),
        ('pip install --no-deps "storm-dagster[kafka]"', True),
        ("pip install ./storm-dagster", False),
        ('pip install "./storm-dagster[kafka]"', False),
        ("pip install build/dist-check/storm_dagster-0.1.0-py3-none-any.whl", False),
    ],
)
def test_a_line_for_an_index_is_found(line: str, refused: bool) -> None:
    assert (FROM_AN_INDEX.search(line) is not None) is refused


def stated(extra: str) -> list[str]:
    """Requirements of an extra in ``pyproject.toml``."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (listed,) = re.findall(rf"^{extra} = \[(.*)\]$", text, flags=re.M)
    return re.findall(r'"([^"]+)"', listed)


@pytest.mark.parametrize("extra", ["kafka", "postgres", "s3"])
def test_an_extra_is_installed_by_its_requirements(extra: str) -> None:
    def parts(requirement: str) -> set[str]:
        return set(re.split(r",|(?=[<>])", requirement)) - {""}

    found = [parts(requirement) for requirement in extra_requirements(extra)]
    assert found == [parts(requirement) for requirement in stated(extra)]
    page = "sources.md" if extra == "kafka" else "sinks.md"
    assert f'pip install "{stated(extra)[0]}"' in (ROOT / "docs" / page).read_text("utf-8")


def test_a_missing_package_is_installed_by_the_requirement_that_we_state() -> None:
    dagster, other = requirements_of(["Dagster", "grpcio"])
    assert dagster.startswith("dagster<2") and other == "grpcio"
    assert install_command([dagster]).endswith(f"-m pip install '{dagster}'")
