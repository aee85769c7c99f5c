"""Each claim of the page on security names tests, and these exist."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs/security.md").read_text(encoding="utf-8")


def test_the_named_tests_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+(?:\.py)?)(?:::(\w+))?`", _PAGE)
    assert len(named) > 50
    for path, name in named:
        assert (_ROOT / path).exists(), path
        if name:
            text = (_ROOT / path).read_text(encoding="utf-8")
            assert re.search(rf"def {name}\(", text), f"{path}::{name}"


def test_each_claim_names_a_test() -> None:
    proven = False
    claims = 0
    for line in _PAGE.splitlines():
        if not line.startswith("|"):
            proven = False
        elif re.search(r"\| tests \|$", line):
            proven = True
        elif proven and not line.startswith("|---"):
            claims += 1
            assert "`tests/" in line.rpartition(" | ")[2], line
    assert claims > 35
