"""References that a reader of the repository can follow: reasons and links, never numbers of other
papers.
"""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DECISIONS = "docs/decisions.md"
SUFFIXES = (".py", ".md", ".yaml", ".yml", ".toml", ".sh")
NAMES = ("Dockerfile", "Makefile")

# A letter and a number that stand for something on a list. I1 to I8 are the invariants, which
# docs/decisions.md and `storm-dagster doctor` name so; S3 is a store.
ID = r"(?!S3\b)[A-HJ-Z]\d{1,2}\b"
IDS = rf"{ID}(?:(?:, | and | to |-)(?:I\d\b|{ID}))*"
PATTERNS = {
    "a section of a design": r"\b[Dd]esign(?:'s)?,?(?: decisions?| sections?)? \d",
    "a numbered section": r"^(?!.*\bRFC\b).*\b[Ss]ections? \d",
    "a hazard": rf"\b[Hh]azards? (?:{ID}|\d)|\blist of hazards\b",
    "a seed": r"\b[Ss]eeds? 0\d\d\b",
    "a case": r"\b[Cc]ases? [A-Z](?:\d|(?=[,;.:)]|$))",
    "a paper that is not here": r"\b(?:j?storm(?:-cases)?|design|dataplane|hazards)\.md\b|\bj?storm-cases\b",
    "a chapter about Storm": r"\bJ?Storm(?:'s)? (?:[a-z](?:\.\d)?(?=[,;)])|[A-Z]\d)",
    "ids in brackets": rf"\((?:(?:I\d|S3), )?{IDS}\)|[;:] {IDS}\)|\s\([4-9]\.\d{{1,2}}\)",
    "an id in front": rf"^[a-zA-Z]*\"\"\"\s*{IDS}[:.,]|^#\s*(?:{IDS})(?:[:, ]|$)|^\s*\| {IDS} ",
}
"""What is refused, by what it looks like; in words for people, so not in code."""
TEST_NAME = re.compile(
    r"def (test_(?!s3_|v\d)[a-z]\d{1,2}(?:_\w*)?|test_\w*_(?:design|hazard|seed|case)_\d\w*)\("
)


def prose_of(name: str, text: str) -> Iterator[tuple[int, str]]:
    """(line number, line) of what is for people: all of a document, comments and strings of
    code.
    """
    if not name.endswith(".py"):
        yield from enumerate(text.splitlines(), 1)
        return
    words = {
        tokenize.COMMENT,
        tokenize.STRING,
        getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING),
    }
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in words:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def references_in(name: str, text: str) -> list[str]:
    """Everything in a file that points to where nobody can look, as ``file:line: what: the
    line``.
    """
    found = [
        f"{name}:{number}: {what}: {line.strip()}"
        for number, line in prose_of(name, text)
        for what, pattern in PATTERNS.items()
        if re.search(pattern, line)
    ]
    if name.startswith("tests/"):
        found += [
            f"{name}:{text.count(chr(10), 0, match.start()) + 1}: a test's name: {match[1]}"
            for match in TEST_NAME.finditer(text)
        ]
    return found


def unknown_links_in(name: str, text: str, anchors: frozenset[str]) -> list[str]:
    """Links to decisions that there are not."""
    return [
        f"{name}: {DECISIONS}#{anchor}"
        for anchor in re.findall(r"decisions\.md#([\w-]+)", text)
        if anchor not in anchors
    ]


@cache
def files() -> dict[str, str]:
    """Path -> text of every tracked file of words, but this one."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git repository: nothing says which files belong to it")
    own = Path(__file__).relative_to(ROOT).as_posix()
    names = [
        name
        for name in listed.stdout.split("\0")
        if name.endswith(SUFFIXES) or Path(name).name in NAMES
    ]
    paths = [ROOT / name for name in names if name != own]
    return {
        path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
        for path in paths
        if path.is_file()
    }


def decisions() -> list[str]:
    return re.findall(r"^\(([\w-]+)\)=$", (ROOT / DECISIONS).read_text("utf-8"), flags=re.MULTILINE)


def test_nothing_refers_to_papers_that_are_not_here() -> None:
    assert [line for name, text in files().items() for line in references_in(name, text)] == []


def test_links_to_decisions_resolve() -> None:
    anchors = frozenset(decisions())
    assert len(anchors) == len(decisions()), "each name stands for one decision"
    assert [
        line for name, text in files().items() for line in unknown_links_in(name, text, anchors)
    ] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", '"""The order of workers (design 8.4)."""\n'),
        ("a.py", "#: Design decision 8.13 fixes it.\n"),
        ("a.py", "x = 1  # the turnstile of design section 4\n"),
        ("a.py", '"""Leadership\n\nas an epoch (design 4, hazard K1).\n"""\n'),
        ("a.py", '"""Paths (hazards S8, S9)."""\n'),
        ("a.py", 'HELP = "the key of seed 004"\n'),
        ("a.py", '"""The nimbus (seeds 002 and 003)."""\n'),
        ("a.py", '"""Start times (cases A16 to A18)."""\n'),
        ("a.py", '"""What a topology may do (cases M)."""\n'),
        ("a.py", '"""Storm\'s multilang protocol (storm.md i)."""\n'),
        ("a.py", '"""Tests (jstorm-cases S)."""\n'),
        ("a.py", '"""Health scripts (Storm h.2, JStorm K3)."""\n'),
        ("a.py", '"""Wishes that are dropped (JStorm f)."""\n'),
        ("a.py", '"""One full timeout (F4, A13)."""\n'),
        ("a.py", '"""For every request (S7, S14-S16)."""\n'),
        ("a.py", '"""Garbage goes (I3, F9, F10)."""\n'),
        ("a.py", '"""It is degraded (never deleted for that: F9)."""\n'),
        ("a.py", '"""A blob key (JStorm B8)."""\n'),
        ("a.py", '"""Restarted in place (8.7)."""\n'),
        ("a.py", 'def f():\n    """J1, K1: the server stands still."""\n'),
        ("a.py", 'def f():\n    """A5."""\n'),
        ("a.py", "row = (10, 4)  # S15\n"),
        ("docs/a.md", "The attacks of section 2.6 of the project's list.\n"),
        ("docs/a.md", "| S12, S23 huge frames | dropped early |\n"),
        ("deploy.yaml", "port: 1  # hazard S20\n"),
        ("docker/Dockerfile", "# see design.md\n"),
        ("tests/test_a.py", "def test_k6_compare_and_set() -> None: ...\n"),
        ("tests/test_a.py", "class TestIt:\n    def test_m7(self) -> None: ...\n"),
        ("tests/test_a.py", "def test_it_wins_as_design_8_4_decides() -> None: ...\n"),
    ],
)
def test_a_planted_reference_is_found(name: str, text: str) -> None:
    assert references_in(name, text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "a.py",
            '"""A store behind a URL (S3, GCS, HDFS); I1 to I8 hold (``docs/decisions.md#invariants``)."""\n',
        ),
        ("a.py", "found = place(A2, [(A1, A2)])\ntime.sleep(8.5)\n"),
        ("a.py", '"""The design of 2024 is the one, in case A dies; RFC 9110, section 15."""\n'),
        ("docs/a.md", "await asyncio.sleep(5.1)\n| I1 | Each task has one slot. |\n"),
        (
            "docs/a.md",
            "See [Live in Dagster](dagster.md), [Spark](spark.md); Storm issue STORM-1976.\n",
        ),
        ("tests/test_a.py", "def test_s3_is_a_store() -> None: ...\n"),
    ],
)
def test_what_readers_can_follow_is_left_alone(name: str, text: str) -> None:
    assert references_in(name, text) == []


def test_a_link_to_a_decision_that_is_not_there_is_found() -> None:
    anchors = frozenset(decisions())
    assert unknown_links_in("a.py", '"""See docs/decisions.md#nothing-of-the-kind."""', anchors)
    assert not unknown_links_in("a.py", '"""See docs/decisions.md#fenced-writes."""', anchors)
