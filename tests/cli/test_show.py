"""What ``show`` prints of the load of components."""

from __future__ import annotations

from typing import Any

import pytest

from storm_dagster.cli.read_commands import _print_findings, _print_history, _print_loads


def part(**of: Any) -> dict[str, Any]:
    return {"waiting": 0, "capacity": 0.0, "lag": None, "latency": {}, **of}


def test_a_line_for_each_kind_of_latency(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"sampled": 9, "p50_ms": 1.25, "p95_ms": 20.0, "p99_ms": 31.5}
    document = {
        "components": {
            "count": part(waiting=7, capacity=0.75, latency={"execute": found, "process": found}),
            "idle": part(lag=12, lag_by_partition={"orders[0]": [12, 3.5], "orders[1]": [0, None]}),
            "__acker": part(),
        },
        "back_pressure": 1,
        "workers": [{}, {}],
    }
    _print_loads(document)
    printed = capsys.readouterr().out
    rows = [
        [cell.strip() for cell in line.split("│")] for line in printed.splitlines() if "│" in line
    ]
    rows, lags = rows[:-2], rows[-2:]
    assert lags == [["idle", "orders[0]", "12", "3.50"], ["idle", "orders[1]", "0", "-"]]
    assert rows[-3:] == [
        ["count", "7", "0.75", "-", "execute", "1.25", "20", "31.50"],
        ["count", "7", "0.75", "-", "process", "1.25", "20", "31.50"],
        ["idle", "0", "0", "12", rows[-1][4], "-", "-", "-"],
    ]
    assert "back pressure: 1 of 2 workers" in printed and "__acker" not in printed


def test_a_finding_is_a_line_with_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    finding = {
        "severity": "warning",
        "text": "count is the bottleneck.",
        "remedy": "make it faster\x1b[31m",
    }
    _print_findings({"findings": [finding]})
    assert (
        capsys.readouterr().out
        == "warning: count is the bottleneck. What to do: make it faster?[31m.\n"
    )
    _print_findings({})
    assert capsys.readouterr().out == ""


def test_changes_are_rows_with_time_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    changes = [
        {"at_secs": 1_700_000_060, "action": "rebalanced", "why": "4 workers", "moved": 3},
        {"at_secs": 1_700_000_000, "action": "upgrade rolled back", "why": "h:1: no", "moved": 0},
    ]
    _print_history({"history": changes})
    printed = capsys.readouterr().out
    rows = [
        [cell.strip() for cell in line.split("│")] for line in printed.splitlines() if "│" in line
    ]
    assert rows == [
        ["2023-11-14T22:14:20+00:00", "rebalanced", "4 workers, 3 tasks moved"],
        ["2023-11-14T22:13:20+00:00", "upgrade rolled back", "h:1: no"],
    ]
    _print_history({})
    assert capsys.readouterr().out == ""


def test_an_older_nimbus_gives_none(capsys: pytest.CaptureFixture[str]) -> None:
    _print_loads({"components": {"count": {"type": "bolt", "stats": {}}}, "workers": []})
    assert capsys.readouterr().out == ""
