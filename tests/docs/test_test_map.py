"""``tests/README.md`` names every test file, and ``tests/rigs/README.md`` every rig."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
RIGS = TESTS / "rigs" / "storm_rigs"


def test_the_map_names_every_test_file() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", (TESTS / "README.md").read_text(encoding="utf-8")))
    files = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    assert sorted(files - named) == [], "add them to the row of their behavior"
    assert [name for name in sorted(named) if not (TESTS / name).is_file()] == []


def test_the_index_names_every_rig() -> None:
    text = (RIGS.parent / "README.md").read_text(encoding="utf-8")
    named: set[str] = set()
    for part in text.split("\n## ")[1:]:
        folder, _, rows = part.partition("\n")
        named |= {f"{folder}/{name}" for name in re.findall(r"^\| `([\w/]+\.py)`", rows, re.M)}
    modules = {
        path.relative_to(RIGS).as_posix()
        for path in RIGS.rglob("*.py")
        if path.name != "__init__.py"
    }
    assert sorted(modules ^ named) == [], "each rig has one row, in the part of its folder"
