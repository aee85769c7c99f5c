"""Each claim of the page on security names tests, and these exist."""

from __future__ import annotations

import re
from pathlib import Path

from storm_dagster.model import paths
from storm_dagster.security.zookeeper_access import CREATE, DELETE, READ, WRITE, worker_permissions

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


def test_the_table_of_nodes_is_what_workers_may_do() -> None:
    table = _PAGE.partition("| node (below the root) |")[2].partition("\n\n")[0].splitlines()[2:]
    rights = {"read": READ, "write": WRITE, "create": CREATE, "delete": DELETE}
    shown: dict[str, int] = {}
    for line in table:
        nodes, may = line.strip("| ").split(" | ")
        for node in re.findall(r"`([^`]+)`", nodes):
            shown["/" + node.replace("ID", "a-1-1")] = sum(
                bit for word, bit in rights.items() if word in may
            )
    depths = ("", "/x", "/x/y", "/x/y/z")
    for first in (
        value for name, value in vars(paths).items() if name.isupper() and isinstance(value, str)
    ):
        for node in (first, f"{first}/a-1-1", f"{first}/a-1-1/log_levels", f"{first}/a-1-1/state"):
            # Parts of a record belong to it, and so do the nodes below those that workers fill.
            union = 0
            for below in depths if shown.get(node, 0) & CREATE else ("",):
                union |= worker_permissions(node + below)[1]
            inside = any(node.startswith(f"{top}/") for top, may in shown.items() if may & CREATE)
            if not inside and not node.startswith(f"{paths.ASSIGNMENTS}/a-1-1/"):
                assert union == shown.get(node, 0), node
    assert len(shown) == 11
