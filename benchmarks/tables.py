"""Rows of metric, reference and our value: printed as they are measured, and written between a
document's markers.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

Row = tuple[str, str, str]
"""Metric, reference (others' value or the aim), our value."""

HEADER = "| metric | reference | ours |\n|---|---|---|"


def line(row: Row) -> str:
    """The row in Markdown."""
    return f"| {' | '.join(row)} |"


def write_table(path: Path, name: str, table: str) -> None:
    """Replaces what stands between the markers ``name`` of a document; exits when they are not
    there.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
    if not pattern.search(text):
        sys.exit(f"{path} has no lines {begin} and {end}: put the two where the table belongs")
    path.write_text(pattern.sub(lambda _: f"{begin}\n{table}\n{end}", text), encoding="utf-8")


def run(name: str, description: str | None, rows: Callable[[bool], Iterable[Row]]) -> None:
    """The command line of one benchmark: ``rows`` is asked with whether fewer samples will do."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--markdown", type=Path, help="the document whose table is replaced")
    options = parser.parse_args()
    lines = [HEADER]
    print(HEADER, flush=True)
    for row in rows(options.quick):
        lines.append(line(row))
        print(lines[-1], flush=True)
    if options.markdown:
        write_table(options.markdown, name, "\n".join(lines))
