"""Releases of Dagster on which warm runs are used."""

from __future__ import annotations

import dagster as dg
import pytest

from storm_dagster.model.dagster_names import dagster_version, warm_runs_tested


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("1.12.99", False),
        ("1.13.0", True),
        ("1.13.27", True),
        ("1.14.0", False),
        ("2.0", False),
        ("none", False),
    ],
)
def test_only_releases_that_were_tested_run_warm(version: str, tested: bool) -> None:
    assert warm_runs_tested(version) is tested


def test_the_installed_release_is_known_without_importing_it() -> None:
    assert dagster_version() == dg.__version__
