"""Findings from measurements: what is named, what is not, and that a healthy topology has none."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storm_dagster.core.diagnosis import Finding, backlog_secs, busy_of, diagnose, upstream_of
from storm_dagster.core.snapshot.tasks import TaskSnapshot
from storm_dagster.core.snapshot.topology import ComponentSnapshot, Flow, TopologySnapshot
from storm_dagster.core.snapshot.upgrades import FailedUpgrade
from storm_dagster.core.snapshot.workers import WorkerSnapshot
from storm_dagster.model.amounts import compact, duration, latency, percent
from storm_dagster.model.names import ACKER, TOPOLOGY_MASTER
from storm_dagster.model.records import TaskError, WorkerSlot

NOW_SECS = 10_000
LATER_SECS = 3 * 86_400


class Load(NamedTuple):
    """What the topology master measured of a task."""

    task: int
    worker: str
    """``host:port``, or a host and a name that stands for a port of its own."""
    rate: float
    busy: float


def slot(worker: str) -> WorkerSlot:
    host, _, port = worker.partition(":")
    number = int(port) if port.isdecimal() else 1024 + zlib.crc32(port.encode()) % 60_000
    return WorkerSlot(node=host, host=host, port=number, tasks="")


def component(
    name: str,
    kind: Literal["spout", "bolt"],
    parallelism: int,
    sources: Iterable[str] = (),
    *,
    tasks: Iterable[Load] = (),
    **flow: float,
) -> ComponentSnapshot:
    return ComponentSnapshot(
        id=name,
        kind=kind,
        tasks=tuple(
            TaskSnapshot(
                load.task,
                name,
                kind,
                slot(load.worker),
                "running",
                {"rate": load.rate, "busy": load.busy},
            )
            for load in tasks
        ),
        executors=(),
        parallelism=parallelism,
        flow=Flow(**flow),
        inputs={f"{source}:default": 1.0 for source in sources},
    )


def bolt(
    name: str, *sources: str, busy: float = 0.2, rate: float = 100.0, tasks: int = 2, **of: Any
) -> ComponentSnapshot:
    loads = [Load(number, f"h{number % 2}:{name}", rate, busy) for number in range(1, tasks + 1)]
    return component(name, "bolt", tasks, sources, tasks=loads, **of)


def spout(name: str = "lines", **of: Any) -> ComponentSnapshot:
    loads = [Load(9, "h1:9", 100.0, 0.0)]
    return component(name, "spout", 1, **{"acked": 100.0, "tasks": loads, **of})


def worker(host: str, port: int, silent_secs: float = 0.0, restarts: int = 0) -> WorkerSnapshot:
    return WorkerSnapshot(
        topology_id="shop-1-1",
        topology_name="shop",
        node=host,
        host=host,
        port=port,
        pid=1,
        uptime_secs=100,
        executors=0,
        components={},
        memory_mb=0.0,
        cpu=0.0,
        reported=True,
        silent_secs=silent_secs,
        restarts=restarts,
    )


def system(name: str, tasks: int, at: str = "h1:6700") -> ComponentSnapshot:
    loads = [Load(100 + number, at, 0.0, 0.0) for number in range(tasks)]
    return component(name, "bolt", tasks, tasks=loads)


def topology_of(parts: Iterable[ComponentSnapshot], ackers: int = 1, **of: Any) -> TopologySnapshot:
    every = (*parts, system(ACKER, ackers), system(TOPOLOGY_MASTER, 1))
    values: dict[str, Any] = {
        "id": "shop-1-1",
        "name": "shop",
        "status": "ACTIVE",
        "now_secs": NOW_SECS,
        "uptime_secs": 1000,
        "components": {part.id: part for part in every},
        "tasks": {},
        "workers": (),
        "reported": True,
        "measured": True,
    }
    return TopologySnapshot(**{**values, **of})


def error(component: str, text: str, age_secs: int = 10) -> tuple[str, TaskError]:
    return component, TaskError(task=1, host="h1", port=1, time=NOW_SECS - age_secs, error=text)


def found(*parts: ComponentSnapshot, **of: Any) -> list[Finding]:
    return diagnose(topology_of(parts, **of))


def kinds(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(one.kind, one.component) for one in findings]


def failed_upgrade(age_secs: int | None) -> FailedUpgrade:
    return FailedUpgrade(
        code="shop-1-1.2",
        reason="h1:6700: count[7]: ValueError: no file (shop.py, line 12)",
        worker="h1:6700",
        log="http://h1:8000/log",
        ended_secs=0 if age_secs is None else LATER_SECS - age_secs,
    )


@pytest.mark.parametrize(
    ("age_secs", "severity", "when"),
    [(30, "warning", " 30 s ago"), (2 * 86_400, "note", " 2 d ago"), (None, "warning", "")],
)
def test_an_upgrade_that_was_rolled_back_is_quoted_with_its_log(
    age_secs: int | None, severity: str, when: str
) -> None:
    (finding,) = found(spout(), failed_upgrade=failed_upgrade(age_secs), now_secs=LATER_SECS)
    assert (finding.kind, finding.severity) == ("failed-upgrade", severity)
    assert finding.text == (
        f"The upgrade to shop-1-1.2 was rolled back{when}: "
        "h1:6700: count[7]: ValueError: no file (shop.py, line 12)."
    )
    assert finding.remedy.endswith("the log of h1:6700 is http://h1:8000/log")
    # Also while the figures of a topology that was just started are not known.
    young = found(spout(), failed_upgrade=failed_upgrade(age_secs), reported=False, uptime_secs=1)
    assert kinds(young) == [("failed-upgrade", "")]


def test_a_topology_that_keeps_up_has_no_findings() -> None:
    parts = (
        spout(lag=5.0, lag_rate=0.1),
        bolt("parse", "lines", waiting=20),
        bolt("count", "parse", busy=0.7),
    )
    assert (
        found(
            *parts, workers=(worker("h1", 6700, 4.0, 1),), errors=(error("count", "KeyError: 1"),)
        )
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


def test_the_slowest_bolt_of_a_worker_is_named_not_its_waiters() -> None:
    """Tasks of a worker take turns: here one sleeps, and what comes after it there waits."""

    def both(name: str, source: str, busy: float, waiting: int) -> ComponentSnapshot:
        tasks = (Load(1, "h1:6700", 13.0, busy), Load(2, "h1:6701", 13.0, busy))
        return component(name, "bolt", 2, frozenset({source}), waiting=waiting, tasks=tasks)

    parts = (spout(held=0.5), both("enrich", "lines", 0.68, 99), both("score", "enrich", 0.3, 175))
    (finding,) = found(*parts, workers=(worker("h1", 6700), worker("h1", 6701)))
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
    tasks = tuple(Load(number, f"h1:{number}", 20.0, 0.05) for number in range(1, 4))
    skewed = component(
        "count",
        "bolt",
        4,
        frozenset({"lines"}),
        waiting=900,
        tasks=(*tasks, Load(4, "h2:4", 400.0, 0.99)),
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
def test_a_lag_is_reported_while_it_grows_or_clears_slowly(
    lag: float, rate: float, severity: str | None
) -> None:
    findings = found(spout(lag=float(lag), lag_rate=rate))
    assert [one.severity for one in findings] == ([severity] if severity else [])
    if severity == "note":
        assert "cleared in 8 min" in findings[0].remedy


def test_failing_trees_and_those_near_the_timeout() -> None:
    failing = found(
        spout(acked=96.0, failed=4.0),
        errors=(
            error("split", "an hour ago", age_secs=3600),
            error("count", "Traceback\nKeyError: 'price'"),
        ),
    )
    assert kinds(failing) == [("failing", "lines")]
    assert "4 %" in failing[0].text and "count: KeyError: 'price'" in failing[0].text
    late = found(spout(failed=1.0, p99_ms=27_000.0), timeout_secs=30.0)
    assert kinds(late) == [("timing-out", "lines")] and "27 s (p99) of the 30 s" in late[0].text
    assert found(spout(acked=1000.0, failed=1.0)) == []


def test_workers_that_restart_or_do_not_report() -> None:
    blocked, restarted = (
        worker("h1", 6700, silent_secs=14.0),
        worker("h2", 6701, restarts=3),
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
    def part(name: str, factor: float) -> ComponentSnapshot:
        tasks = (
            Load(1, f"h1:{name}", 50.0, 0.1),
            Load(2, f"h2:{name}", 50.0, 0.1),
            Load(3, f"h3:{name}", 50.0, 0.1 * factor),
        )
        return component(name, "bolt", 3, frozenset({"lines"}), tasks=tasks)

    (finding,) = found(spout(), part("parse", 3.0), part("count", 4.0))
    assert finding.kind == "slow-host" and "On h3" in finding.text and "3.5 times" in finding.text
    assert found(spout(), part("parse", 3.0), part("count", 1.0)) == [], (
        "it is the component, not the host"
    )


def test_no_ackers_is_a_note_and_a_silent_master_hides_the_rest() -> None:
    assert [(one.kind, one.severity) for one in found(spout(), ackers=0)] == [("no-ackers", "note")]
    silent = found(spout(), bolt("b", "lines", busy=1.0), reported=False)
    assert kinds(silent) == [("silent-master", "")] and "h1:6700" in silent[0].text


SHARES = st.floats(0, 1)
RATES = st.floats(0, 1e5)


@st.composite
def topologies(draw: st.DrawFn) -> TopologySnapshot:
    names = [f"b{number}" for number in range(draw(st.integers(1, 6)))]
    parts: dict[str, ComponentSnapshot] = {"lines": spout(held=draw(SHARES), failed=draw(RATES))}
    for name in names:
        tasks = tuple(
            Load(number, draw(st.sampled_from(["h1:1", "h2:1", "h2:2"])), draw(RATES), draw(SHARES))
            for number in range(draw(st.integers(0, 3)))
        )
        sources = draw(st.frozensets(st.sampled_from([*names, "lines"])))
        waiting = draw(st.integers(0, 10**6))
        parts[name] = component(name, "bolt", 1, sources, tasks=tasks, waiting=waiting)
    return topology_of(parts.values(), ackers=draw(st.integers(0, 1)))


@settings()
@given(topology=topologies())
def test_whatever_is_measured_something_is_named_and_never_what_waits_for_it(
    topology: TopologySnapshot,
) -> None:
    findings = diagnose(topology)
    named = [one.component for one in findings if one.kind in ("bottleneck", "skew")]
    slow = [
        one.id
        for one in topology.components.values()
        if one.kind == "bolt"
        and one.tasks
        and not one.is_system
        and (busy_of(one) >= 0.8 or backlog_secs(one) >= 0.5)
    ]
    assert bool(named) == bool(slow), "a slow bolt is named, or one that it waits for"
    for one in set(named) - set(slow):
        workers = {task.worker.address for task in topology.components[one].tasks if task.worker}
        assert any(
            task.worker is not None and task.worker.address in workers
            for name in slow
            for task in topology.components[name].tasks
        )
    for one in named:
        for other in named:
            if other != one and backlog_secs(topology.components[other]) >= 0.5:
                mutual = other in upstream_of(one, topology.components)
                assert mutual or one not in upstream_of(other, topology.components)
    assert all(one.text and one.remedy and len(one.text) < 1000 for one in findings)
    severities = [one.severity for one in findings]
    assert severities == sorted(severities, reverse=True), "warnings come first"


def test_only_an_active_topology_that_is_measured_has_findings() -> None:
    slow = topology_of((spout(), bolt("parse", "lines", busy=0.9)))
    assert diagnose(slow)
    assert diagnose(replace(slow, status="INACTIVE")) == []
    assert diagnose(replace(slow, uptime_secs=5)) == [], "its figures have only begun"
    assert diagnose(replace(slow, measured=False)) == [], "a worker of the first release"


def test_amounts_are_short() -> None:
    assert [compact(n) for n in (None, 0, 0.25, 12, 999.9, 2140, 18_200, 3.2e6, 5e9)] == [
        *("-", "0", "0.25", "12", "1k", "2.14k", "18.2k", "3.2M", "5G")
    ]
    assert [latency(n) for n in (None, 0.25, 640, 4970)] == ["-", "0.25 ms", "640 ms", "4.97 s"]
    assert [percent(n) for n in (0, 0.004, 0.38, 1)] == ["0 %", "0.4 %", "38 %", "100 %"]
    assert [duration(n) for n in (41, 450, 8000, 200_000)] == ["41 s", "8 min", "2 h", "2 d"]
