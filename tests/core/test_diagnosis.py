"""Findings from measurements: what is named, what is not, and that a healthy topology has none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storm_dagster.core.diagnosis import (
    ComponentMeasure,
    Finding,
    TaskMeasure,
    TopologyMeasure,
    WorkerMeasure,
    diagnose,
    newest_errors,
    upstream_of,
)
from storm_dagster.model.amounts import compact, duration, latency, percent


def bolt(
    name: str, *sources: str, busy: float = 0.2, rate: float = 100.0, tasks: int = 2, **of: Any
) -> ComponentMeasure:
    each = tuple(
        TaskMeasure(number, f"h{number % 2}:{name}", rate, busy) for number in range(1, tasks + 1)
    )
    return ComponentMeasure(name, "bolt", tasks, frozenset(sources), **{"tasks": each, **of})


def spout(name: str = "lines", **of: Any) -> ComponentMeasure:
    return ComponentMeasure(
        name, "spout", 1, **{"acked": 100.0, "tasks": (TaskMeasure(9, "h1:9", 100.0, 0.0),), **of}
    )


def found(*parts: ComponentMeasure, **of: Any) -> list[Finding]:
    return diagnose(
        TopologyMeasure(
            "shop", **{"answered": True, "components": {one.id: one for one in parts}, **of}
        )
    )


def kinds(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(one.kind, one.component) for one in findings]


def test_a_topology_that_keeps_up_has_no_findings() -> None:
    parts = (
        spout(lag=5.0, lag_rate=0.1),
        bolt("parse", "lines", waiting=20),
        bolt("count", "parse", busy=0.7),
    )
    assert (
        found(*parts, workers=(WorkerMeasure("h1", 6700, 4.0, 1),), errors={"count": "KeyError: 1"})
        == []
    )


def test_the_bottleneck_is_named_and_its_upstream_is_not() -> None:
    parts = (
        spout(held=0.38, lag=18_000, lag_rate=310.0),
        bolt("parse", "lines", busy=0.9, waiting=900),
        bolt("enrich", "parse", busy=0.97, rate=20, waiting=2140),
        bolt("alerts", "enrich", busy=0.1),
    )
    findings = found(*parts)
    assert kinds(findings) == [("bottleneck", "enrich"), ("lag", "lines")]
    assert (
        "97 %" in findings[0].text
        and "2.14k tuples wait" in findings[0].text
        and "38 %" in findings[0].text
    )
    assert "rebalance shop -e enrich=3" in findings[0].remedy
    assert "grows by 310/s" in findings[1].text and "enrich holds it up" in findings[1].remedy


def test_a_busy_bolt_whose_reader_keeps_up_is_the_bottleneck_itself() -> None:
    parts = (
        spout(),
        bolt("parse", "lines", busy=0.95, waiting=5000),
        bolt("enrich", "parse", busy=0.5, waiting=3),
    )
    assert kinds(found(*parts)) == [("bottleneck", "parse")]


def test_two_branches_have_a_bottleneck_each() -> None:
    parts = (
        spout(),
        bolt("left", "lines", busy=0.95, waiting=500),
        bolt("right", "lines", busy=0.9, waiting=400),
    )
    assert kinds(found(*parts)) == [("bottleneck", "left"), ("bottleneck", "right")]


def test_in_a_cycle_the_one_that_is_further_behind_is_named() -> None:
    parts = (
        spout(),
        bolt("a", "lines", "b", busy=0.9, waiting=900),
        bolt("b", "a", busy=0.9, waiting=300),
    )
    assert kinds(found(*parts)) == [("bottleneck", "a")]


def test_a_bolt_that_waits_for_another_one_of_its_worker_is_not_named() -> None:
    """Tasks of a worker take turns: here one sleeps, and what comes after it there waits."""

    def both(name: str, source: str, busy: float, waiting: int) -> ComponentMeasure:
        tasks = (TaskMeasure(1, "h1:6700", 13.0, busy), TaskMeasure(2, "h1:6701", 13.0, busy))
        return ComponentMeasure(name, "bolt", 2, frozenset({source}), waiting=waiting, tasks=tasks)

    parts = (spout(held=0.5), both("enrich", "lines", 0.68, 99), both("score", "enrich", 0.3, 175))
    (finding,) = found(*parts, workers=(WorkerMeasure("h1", 6700), WorkerMeasure("h1", 6701)))
    assert (finding.kind, finding.component) == ("bottleneck", "enrich")
    assert (
        "68 % of the time in a worker that is busy 98 %" in finding.text
        and "-n 3`" in finding.remedy
    )


def test_a_bolt_that_executes_nothing_while_tuples_wait_is_named() -> None:
    assert kinds(found(spout(), bolt("stuck", "lines", rate=0.0, busy=0.0, waiting=50))) == [
        ("bottleneck", "stuck")
    ]
    assert found(spout(), bolt("begins", "lines", rate=0.0, busy=0.0, waiting=3)) == []


def test_one_dominating_key_is_told_from_a_slow_bolt() -> None:
    tasks = tuple(TaskMeasure(number, f"h1:{number}", 20.0, 0.05) for number in range(1, 4))
    skewed = ComponentMeasure(
        "count",
        "bolt",
        4,
        frozenset({"lines"}),
        waiting=900,
        tasks=(*tasks, TaskMeasure(4, "h2:4", 400.0, 0.99)),
    )
    (finding,) = found(spout(), skewed)
    assert (finding.kind, finding.component) == ("skew", "count")
    assert (
        "Task 4" in finding.text
        and "87 %" in finding.text
        and "executors do not help" in finding.remedy
    )


@pytest.mark.parametrize(
    ("lag", "rate", "severity"),
    [
        (100, 0.2, None),
        (100, 5.0, "warning"),
        (18_000, -40.0, "note"),
        (100, -40.0, None),
        (0, 9.0, None),
    ],
)
def test_a_lag_is_reported_while_it_grows_and_while_it_takes_long_to_clear(
    lag: float, rate: float, severity: str | None
) -> None:
    findings = found(spout(lag=float(lag), lag_rate=rate))
    assert [one.severity for one in findings] == ([severity] if severity else [])
    if severity == "note":
        assert "cleared in 8 min" in findings[0].remedy


def test_failing_trees_and_those_near_the_timeout() -> None:
    failing = found(
        spout(acked=96.0, failed=4.0),
        errors=newest_errors([("count", "Traceback\nKeyError: 'price'")]),
    )
    assert kinds(failing) == [("failing", "lines")]
    assert "4 %" in failing[0].text and "count: KeyError: 'price'" in failing[0].text
    late = found(spout(failed=1.0, p99_ms=27_000.0), timeout_secs=30.0)
    assert kinds(late) == [("timing-out", "lines")] and "27 s (p99) of the 30 s" in late[0].text
    assert found(spout(acked=1000.0, failed=1.0)) == []


def test_workers_that_restart_or_do_not_report() -> None:
    blocked, restarted = (
        WorkerMeasure("h1", 6700, silent_secs=14.0),
        WorkerMeasure("h2", 6701, restarts=3),
    )
    findings = found(spout(), workers=(blocked, restarted))
    assert kinds(findings) == [("blocked", ""), ("restarts", "")]
    assert (
        "h1:6700" in findings[0].text
        and "workerPort=6700" in findings[0].remedy
        and "3 times" in findings[1].text
    )
    assert found(spout(), workers=(blocked,), report_secs=5.0) == []


def test_a_host_on_which_everything_is_slower() -> None:
    def part(name: str, factor: float) -> ComponentMeasure:
        tasks = (
            TaskMeasure(1, f"h1:{name}", 50.0, 0.1),
            TaskMeasure(2, f"h2:{name}", 50.0, 0.1),
            TaskMeasure(3, f"h3:{name}", 50.0, 0.1 * factor),
        )
        return ComponentMeasure(name, "bolt", 3, frozenset({"lines"}), tasks=tasks)

    (finding,) = found(spout(), part("parse", 3.0), part("count", 4.0))
    assert finding.kind == "slow-host" and "On h3" in finding.text and "3.5 times" in finding.text
    assert found(spout(), part("parse", 3.0), part("count", 1.0)) == [], (
        "it is the component, not the host"
    )


def test_no_ackers_is_a_note_and_a_silent_master_is_all_that_is_known() -> None:
    assert [(one.kind, one.severity) for one in found(spout(), ackers=0)] == [("no-ackers", "note")]
    silent = found(
        spout(), bolt("b", "lines", busy=1.0), answered=False, master=WorkerMeasure("h1", 6700)
    )
    assert kinds(silent) == [("silent-master", "")] and "h1:6700" in silent[0].text


SHARES = st.floats(0, 1)
RATES = st.floats(0, 1e5)


@st.composite
def topologies(draw: st.DrawFn) -> TopologyMeasure:
    names = [f"b{number}" for number in range(draw(st.integers(1, 6)))]
    parts: dict[str, ComponentMeasure] = {"lines": spout(held=draw(SHARES), failed=draw(RATES))}
    for name in names:
        tasks = tuple(
            TaskMeasure(
                number, draw(st.sampled_from(["h1:1", "h2:1", "h2:2"])), draw(RATES), draw(SHARES)
            )
            for number in range(draw(st.integers(0, 3)))
        )
        sources = draw(st.frozensets(st.sampled_from([*names, "lines"])))
        waiting = draw(st.integers(0, 10**6))
        parts[name] = ComponentMeasure(name, "bolt", 1, sources, tasks=tasks, waiting=waiting)
    return TopologyMeasure("t", answered=True, components=parts, ackers=draw(st.integers(0, 1)))


@settings()
@given(topology=topologies())
def test_whatever_is_measured_something_is_named_and_never_what_waits_for_it(
    topology: TopologyMeasure,
) -> None:
    findings = diagnose(topology)
    named = [one.component for one in findings if one.kind in ("bottleneck", "skew")]
    slow = [
        one.id
        for one in topology.components.values()
        if one.kind == "bolt" and one.tasks and (one.busy >= 0.8 or one.backlog_secs >= 0.5)
    ]
    assert bool(named) == bool(slow), "a slow bolt is named, or one that it waits for"
    for one in set(named) - set(slow):
        workers = {task.worker for task in topology.components[one].tasks}
        assert any(
            task.worker in workers for name in slow for task in topology.components[name].tasks
        )
    for one in named:
        for other in named:
            if other != one and topology.components[other].backlog_secs >= 0.5:
                mutual = other in upstream_of(one, topology.components)
                assert mutual or one not in upstream_of(other, topology.components)
    assert all(one.text and one.remedy and len(one.text) < 1000 for one in findings)
    severities = [one.severity for one in findings]
    assert severities == sorted(severities, reverse=True), "warnings come first"


def test_amounts_are_short() -> None:
    assert [compact(n) for n in (None, 0, 0.25, 12, 999.9, 2140, 18_200, 3.2e6, 5e9)] == [
        *("-", "0", "0.25", "12", "1k", "2.14k", "18.2k", "3.2M", "5G")
    ]
    assert [latency(n) for n in (None, 0.25, 640, 4970)] == ["-", "0.25 ms", "640 ms", "4.97 s"]
    assert [percent(n) for n in (0, 0.004, 0.38, 1)] == ["0 %", "0.4 %", "38 %", "100 %"]
    assert [duration(n) for n in (41, 450, 8000, 200_000)] == ["41 s", "8 min", "2 h", "2 d"]
