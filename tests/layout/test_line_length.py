"""Lines have 100 columns at most. In tests a literal may be longer."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COLUMNS = 100
PRAGMA = re.compile(r"#\s*(type:|noqa|pyright:|fmt:)")
"""A comment for a tool, which has to stand on its line."""


def sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split()]


def is_verbatim(line: str, indent: int) -> bool:
    """True for a row of a docstring's literal block or table, which is not wrapped."""
    text = line.strip()
    deeper = len(line) - len(line.lstrip()) > indent
    return deeper or "  " in text or set(text) == {"="}


def excused_rows(text: str, *, literals: bool) -> set[int]:
    """Rows of verbatim parts of docstrings, and rows with a comment for a tool.

    With ``literals`` also rows of all strings but docstrings.
    """
    rows: set[int] = set()
    first_of_line = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        is_string = kind == "STRING" or kind.startswith("FSTRING")
        is_docstring = is_string and first_of_line
        is_literal = literals and is_string and not is_docstring
        if is_literal or (kind == "COMMENT" and PRAGMA.match(token.string)):
            rows.update(range(token.start[0], token.end[0] + 1))
        elif is_docstring:
            lines = token.string.splitlines()
            rows.update(
                row
                for row, line in enumerate(lines, token.start[0])
                if is_verbatim(line, token.start[1])
            )
        if kind in ("NEWLINE", "INDENT", "DEDENT"):
            first_of_line = True
        elif kind not in ("NL", "COMMENT"):
            first_of_line = False
    return rows


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    long_rows = {row for row, line in enumerate(lines, 1) if len(line) > COLUMNS}
    if long_rows:
        in_package = path.is_relative_to(ROOT / "storm_dagster")
        long_rows -= excused_rows(text, literals=not in_package)
    assert not long_rows
