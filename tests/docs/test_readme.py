"""The README's own words: its topology is one, its commands exist, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from storm_dagster.cli.app import VERBS, cli
from storm_dagster.packaging.target import describe_target

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def test_the_first_topology_is_a_topology(tmp_path: Path) -> None:
    code = re.search(r"```python\n(# hello\.py.*?)```", README, flags=re.S)
    assert code is not None
    (tmp_path / "hello.py").write_text(code[1])
    topology = describe_target(str(tmp_path / "hello.py")).topology
    assert list(topology.spouts) == ["words"] and list(topology.bolts) == ["count"]
    assert topology.bolts["count"].inputs[0].grouping.fields == ("word",)


COMMANDS = [
    line[2:].split("#")[0].strip()
    for line in README.splitlines()
    if line.startswith("$ storm-dagster ")
]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_readme_is_accepted(line: str) -> None:
    _, verb, *arguments = shlex.split(line)
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    command.make_context(verb, list(arguments))


def test_every_verb_stands_in_the_readme() -> None:
    assert [verb for verb in VERBS if f"`{verb}`" not in README] == []


def test_the_range_of_dagster_is_that_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (required,) = re.findall(r'^  "(dagster[<>=][^"]+)"', text, flags=re.M)
    assert f"`{required}`" in README


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"make ([a-z]+)", README)):
        if target not in ("demo", "test", "install", "check", "bench"):
            continue
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    generated = (ROOT / "docs" / "reference_pages.py").read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("reference/"):
            # Made when the site is built.
            assert f'"{Path(link).stem}": ' in generated, link
        else:
            assert (page.parent / link).exists(), link
