"""Every command that a reader is told to type is followed by what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from storm_rigs.product.console import (
    SILENT,
    ConsoleCommand,
    console_commands,
    difference,
    normalize,
)

ROOT = Path(__file__).parents[2]
NAMES = ("README.md", "docs/index.md", "docs/tutorial.md", "docs/tour.md")
PAGES = [ROOT / name for name in NAMES]
COMMANDS = [command for page in PAGES for command in console_commands(page)]


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_is_followed_by_what_it_prints(command: ConsoleCommand) -> None:
    if command.program in SILENT:
        assert not any(command.output), "it prints nothing"
    else:
        assert any(line.strip(". ") for line in command.output), (
            "at least one line of it, besides `...`"
        )


def test_all_pages_have_commands() -> None:
    assert {command.page for command in COMMANDS} == {page.name for page in PAGES}


def test_a_block_is_taken_apart(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text\n\n```console\n$ one --long \\\n    way  # why\na\n\n$ two\n...\nb\n```\n```python\n$ no\n```\n"
    )
    one, two = console_commands(page)
    assert (one.line, one.command, one.output) == (4, "one --long way", ("a",))
    assert (two.line, two.command, two.output) == (8, "two", ("...", "b"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("words-1-1764000000 is ACTIVE: all tasks run, 3.2 s", "words-23-1764999999 is ACTIVE: all tasks run, 14 s"),
        ("ended 12 processes, 3.1 s", "ended 9 processes, 10.0 s"),
        ("  zookeeper      2.1 s", "  zookeeper 12.1 s"),
        ("a │ 127.0.0.1:6900 │ 17 │ 1m 5s │ 1, 2, 3", "a │ 127.0.0.1:31234 │ 1234 │ 9s │ 1"),
        ("   1 │ words     │       - │ 12", "  1 │ words │ 9 │ -"),
        ("━━━━━━╇━━━━", "━━╇━━━━━━━━"),
        ("starting a cluster in /home/you/.storm-dagster", "starting a cluster in /tmp/x-1/.storm-dagster"),
    ],
)  # fmt: skip
def test_what_differs_from_run_to_run_is_not_compared(one: str, other: str) -> None:
    assert normalize(one) == normalize(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("words-1-1764000000 is ACTIVE", "words-1-1764000000 is INACTIVE"),
        ("│ words-1-1764000000 │", "│ words-1-1764000000.2 │"),
        ("hello-1-1764000000 is ACTIVE", "words-1-1764000000 is ACTIVE"),
        ('7 │ "storm" │ 12', '7 │ "dagster" │ 12'),
        ("", "━━━"),
    ],
)
def test_what_a_command_says_is_compared(one: str, other: str) -> None:
    assert normalize(one) != normalize(other)


PRINTED = ["begin", "one 1", "two", "one 2", "end"]


@pytest.mark.parametrize(
    "shown",
    [
        PRINTED,
        ["..."],
        ["begin", "...", "end"],
        ["...", "one 7", "...", "one 8", "end"],
        ["begin", "...", "one 3", "two", "...", "end"],
        ["begin", "one 3", "...", "two", "one 1", "end"],
        ["...", "one 3", "end"],
        ["begin", "..."],
    ],
)
def test_output_that_agrees_has_no_difference(shown: list[str]) -> None:
    assert difference(shown, PRINTED) is None


@pytest.mark.parametrize(
    "shown",
    [
        [],
        PRINTED[:-1],
        PRINTED[1:],
        ["begin", "...", "three", "...", "end"],
        ["begin", "...", "two", "...", "one 1", "two", "...", "end"],
        ["one 1", "..."],
        ["...", "one 1"],
        ["begin", "one 1", "two", "one 1", "...", "one 1", "end"],
        [*PRINTED, "more"],
    ],
)
def test_output_that_differs_has_a_difference(shown: list[str]) -> None:
    assert difference(shown, PRINTED) is not None
