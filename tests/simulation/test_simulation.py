"""The general program of a few seeds, in a process of its own: no invariant breaks, and a seed
repeats exactly.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]


def _simulate(*arguments: str) -> str:
    """The output of ``python -m storm_simulation``, which replaces names of modules and therefore
    runs alone.
    """
    folders = [_TESTS.parent, _TESTS / "rigs", _TESTS / "simulation"]
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
    }
    done = subprocess.run(
        [sys.executable, "-m", "storm_simulation", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.timeout(900)
def test_no_invariant_breaks_and_the_same_seed_gives_the_same_run() -> None:
    first = _simulate("--seeds", "2", "--secs", "30")
    assert "0 broken" in first
    again = _simulate("--first", "2", "--seeds", "1", "--secs", "30")
    digests = dict(re.findall(r"seed (\d+): (\w+)", first))
    assert dict(re.findall(r"seed (\d+): (\w+)", again)) == {"2": digests["2"]}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "mutant, first",
    [
        ("checks are left out", 1),
        pytest.param("who resigns deletes whoever leads", 6, marks=pytest.mark.long),
    ],
)
def test_a_planted_bug_is_caught(mutant: str, first: int) -> None:
    """From a seed on that sees it soon: the whole search is ``make simulate ARGS=--mutants``."""
    assert "0 missed" in _simulate(
        "--mutants", mutant, "--first", str(first), "--seeds", "15", "--secs", "60"
    )


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_every_planted_bug_is_caught_within_twenty_seeds() -> None:
    assert "0 missed" in _simulate("--mutants", "--seeds", "20", "--secs", "120")
