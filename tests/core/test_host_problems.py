"""Problems of hosts: which disks and clocks are named."""

from __future__ import annotations

import pytest

from storm_dagster.core.host_problems import (
    CLOCK_SECS,
    FULL_MB,
    NEARLY_FULL_MB,
    Severity,
    disk_severity,
    nimbus_problems,
    supervisor_problems,
)
from storm_dagster.model.records import SupervisorInfo


def supervisor(**figures: float | int | None) -> dict[str, SupervisorInfo]:
    info = SupervisorInfo(host="h1", ports=(1,), started=0, count=1, version="t")
    return {"s1": info.model_copy(update=figures)}


def test_a_supervisor_that_measures_nothing_has_no_problem() -> None:
    assert list(supervisor_problems(supervisor())) == []


@pytest.mark.parametrize(
    ("free_mb", "severity", "word"),
    [(FULL_MB - 1, "broken", "is full"), (NEARLY_FULL_MB - 1, "warning", "is nearly full")],
)
def test_a_full_disk_is_named_with_its_host(free_mb: int, severity: str, word: str) -> None:
    (problem,) = supervisor_problems(supervisor(disk_free_mb=free_mb, disk_mb=100_000))
    assert problem.severity == severity
    assert "supervisor s1 on h1" in problem.text and word in problem.text
    assert "h1" in problem.remedy
    assert not list(supervisor_problems(supervisor(disk_free_mb=NEARLY_FULL_MB)))


@pytest.mark.parametrize(
    ("free_mb", "severity"),
    [
        (0, "broken"),
        (FULL_MB - 1, "broken"),
        (FULL_MB, "warning"),
        (NEARLY_FULL_MB - 1, "warning"),
        (NEARLY_FULL_MB, None),
        (None, None),
    ],
)
def test_a_disk_is_full_below_512_and_nearly_full_below_3072_mib(
    free_mb: int | None, severity: Severity | None
) -> None:
    assert (FULL_MB, NEARLY_FULL_MB) == (512, 3072)
    assert disk_severity(free_mb) == severity


@pytest.mark.parametrize(("ahead_secs", "side"), [(600.0, "ahead of"), (-600.0, "behind")])
def test_a_clock_that_differs_is_named_with_its_side(ahead_secs: float, side: str) -> None:
    (problem,) = supervisor_problems(supervisor(clock_ahead_secs=ahead_secs))
    assert f"10 min {side} the leader's" in problem.text
    assert not list(supervisor_problems(supervisor(clock_ahead_secs=CLOCK_SECS)))


def test_disks_and_clocks_of_nimbuses_are_named() -> None:
    rows = [
        {"address": "n1:6627", "host": "n1", "disk_free_mb": 1, "clock_ahead_secs": 0.0},
        {"address": "n2:6627", "host": "n2", "disk_free_mb": 9999, "clock_ahead_secs": -60.0},
        {"address": "n3:6627", "host": "n3"},
    ]
    problems = list(nimbus_problems(rows))
    assert [problem.subject for problem in problems] == ["nimbus n1:6627", "nimbus n2:6627"]
