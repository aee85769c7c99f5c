"""What verbs with new code print of the conf that it changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from storm_dagster.cli.change_verbs import _print_change
from storm_dagster.cli.options import Invocation
from storm_dagster.client import Change
from storm_dagster.model.run_result import RunResult

DONE = Change(
    name="wc",
    id="wc-2-1700000000",
    status="ACTIVE",
    run_id=None,
    seconds=1.25,
    conf={
        "topology.workers": {"old": 2, "new": 3},
        "shop.hosts": {"old": ["a"], "new": None},
        "shop.word": {"old": None, "new": "x\x1b[31m"},
    },
)
CHANGED = """topology.workers: 2 -> 3
shop.hosts: ["a"] -> null
shop.word: null -> "x\\u001b[31m"
"""


@pytest.mark.parametrize(
    ("planned", "last"),
    [
        ({}, "wc-2-1700000000 is ACTIVE, 1.2 s\n"),
        ({"dry_run": True, "would": "update"}, "would update wc-2-1700000000 (ACTIVE)\n"),
    ],
)
def test_each_changed_key_is_a_line_with_both_values(
    planned: dict[str, object], last: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _print_change(Invocation(home=tmp_path), replace(DONE, planned=planned))
    assert capsys.readouterr().out == CHANGED + last


def test_the_outcome_and_each_warning_have_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = "nothing to move: 2 workers on 2 hosts are even"
    result = RunResult("unchanged", 0, text, ("topology.old ignored: it has no effect",))
    change = replace(DONE, conf=None, result=result)
    _print_change(Invocation(home=tmp_path), change)
    printed = capsys.readouterr()
    assert printed.out == f"wc-2-1700000000 is ACTIVE, 1.2 s\n  {text}\n"
    assert printed.err == "warning: topology.old ignored: it has no effect\n"
    document = change.to_document()
    assert (document["outcome"], document["moved"]) == ("unchanged", 0)
    assert document["warnings"] == list(result.warnings)


def test_conf_that_stays_prints_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _print_change(Invocation(home=tmp_path), replace(DONE, conf=None))
    assert capsys.readouterr().out == "wc-2-1700000000 is ACTIVE, 1.2 s\n"
