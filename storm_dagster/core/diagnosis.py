"""Diagnosis of a running topology: from measurements to findings, each with its remedy. Pure.

A finding names one thing to change. A bolt that waits for a slower one downstream is not named: it
is held back.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Literal

from storm_dagster.model.amounts import compact, duration, percent
from storm_dagster.model.tables import load_table
from storm_dagster.model.topology import reachable

FindingKind = Literal[
    "silent-master",
    "bottleneck",
    "skew",
    "lag",
    "failing",
    "timing-out",
    "blocked",
    "restarts",
    "slow-host",
    "no-ackers",
]
_BUSY = 0.8
"""Share of time in execute from which a task is busy."""
_BACKLOG_SECS = 0.5
"""Seconds of work in the queues of a component from which it is behind."""
_STUCK_TUPLES, _STUCK_SECS = 16, 10.0
_SKEW = 3.0
_SLOWER = 2.0
_FAILING = 0.01
_NEAR_TIMEOUT = 0.8
_RESTARTS = 2
_TABLE = load_table(__name__, "findings")


@dataclass(frozen=True)
class TaskMeasure:
    """One task: tuples per second, and share of time in execute."""

    task: int
    worker: str
    """``host:port``; the tasks of a worker take turns."""
    rate: float
    busy: float


@dataclass(frozen=True)
class ComponentMeasure:
    """One spout or bolt; rates per second, shares of time, latencies in milliseconds."""

    id: str
    kind: Literal["spout", "bolt"]
    executors: int = 1
    sources: frozenset[str] = frozenset()
    """Components that it reads."""
    acked: float = 0.0
    failed: float = 0.0
    p99_ms: float | None = None
    """Of whole trees, for a spout."""
    waiting: float = 0
    """Tuples in the queues of its tasks."""
    held: float = 0.0
    lag: float | None = None
    lag_rate: float | None = None
    """By how much the lag grows per second; negative while it shrinks."""
    tasks: tuple[TaskMeasure, ...] = ()

    @property
    def busy(self) -> float:
        """Of its busiest task."""
        return max((one.busy for one in self.tasks), default=0.0)

    @property
    def backlog_secs(self) -> float:
        """Time that its tasks need for what waits for them now."""
        rate = sum(one.rate for one in self.tasks)
        if not rate:
            # Nothing was executed lately, and more waits than what has just arrived.
            return _STUCK_SECS if self.waiting >= _STUCK_TUPLES else 0.0
        return self.waiting * sum(one.busy for one in self.tasks) / rate / len(self.tasks)


@dataclass(frozen=True)
class WorkerMeasure:
    """One worker of the topology."""

    host: str
    port: int
    silent_secs: float = 0.0
    """Since its last report to the topology master."""
    restarts: int = 0
    """In the last ten minutes."""


@dataclass(frozen=True)
class TopologyMeasure:
    """A topology at one moment."""

    name: str
    answered: bool
    """Whether its topology master did; without it nothing else is known."""
    master: WorkerMeasure | None = None
    """The worker that runs the topology master."""
    ackers: int = 1
    timeout_secs: float = 30.0
    report_secs: float = 3.0
    components: Mapping[str, ComponentMeasure] = field(default_factory=dict)
    workers: tuple[WorkerMeasure, ...] = ()
    errors: Mapping[str, str] = field(default_factory=dict)
    """Component -> the first line of its newest error."""


@dataclass(frozen=True)
class Finding:
    """Something to know about a topology, and what to do."""

    kind: FindingKind
    severity: Literal["warning", "note"]
    component: str
    """Empty for one of the whole topology."""
    text: str
    remedy: str

    def to_document(self) -> dict[str, str]:
        """The keys of ``findings`` in ``show --json``."""
        return asdict(self)


def _finding(which: str, component: str = "", **given: object) -> Finding:
    row = _TABLE[which]
    text, remedy = (row[part].format(component=component, **given) for part in ("text", "remedy"))
    return Finding(row.get("kind", which), row.get("severity", "warning"), component, text, remedy)


def diagnose(topology: TopologyMeasure) -> list[Finding]:
    """The findings, the most important first; empty for a topology that keeps up and loses
    nothing.
    """
    if not topology.answered:
        where = f" on {topology.master.host}:{topology.master.port}" if topology.master else ""
        return [_finding("silent-master", where=where, name=topology.name)]
    slow = list(_slow_components(topology))
    found = [
        *slow,
        *_lag(topology, [one.component for one in slow]),
        *_failures(topology),
        *_workers(topology),
        *_slow_hosts(topology),
    ]
    if not topology.ackers and any(one.kind == "spout" for one in topology.components.values()):
        found.append(_finding("no-ackers"))
    return sorted(found, key=lambda one: one.severity == "note")


def upstream_of(component: str, components: Mapping[str, ComponentMeasure]) -> set[str]:
    """Everything that a component reads, directly or not."""
    return reachable(component, {name: part.sources for name, part in components.items()})


def _slow_components(topology: TopologyMeasure) -> Iterator[Finding]:
    parts = topology.components
    bolts = [one for one in parts.values() if one.kind == "bolt" and one.tasks]
    shares: dict[str, dict[str, float]] = {}
    for part in parts.values():
        for one in part.tasks:
            mine = shares.setdefault(one.worker, {})
            mine[part.id] = mine.get(part.id, 0.0) + one.busy
    behind = {one.id for one in bolts if one.backlog_secs >= _BACKLOG_SECS}
    slow = {_culprit(one, shares) for one in bolts if one.id in behind or one.busy >= _BUSY}
    above = {name: upstream_of(name, parts) for name in slow}
    for part in sorted(
        (parts[name] for name in slow), key=lambda one: (-one.backlog_secs, -one.busy, one.id)
    ):
        # Who feeds a bolt that is behind waits for it. In a cycle each is upstream of the other:
        # the worst is named.
        others = (behind & slow) - {part.id}
        if any(
            part.id in above[other] and not _worse(part, topology, other, above) for other in others
        ):
            continue
        yield _slow_component(part, topology, shares)


def _culprit(part: ComponentMeasure, shares: Mapping[str, Mapping[str, float]]) -> str:
    """The component itself if it is busy, else the one that takes most of the time of its
    workers.
    """
    if part.busy >= _BUSY:
        return part.id
    there: dict[str, float] = {}
    for worker in {one.worker for one in part.tasks}:
        for name, share in shares[worker].items():
            there[name] = there.get(name, 0.0) + share
    return max(there, key=lambda name: (there[name], name == part.id))


def _slow_component(
    part: ComponentMeasure, topology: TopologyMeasure, shares: Mapping[str, Mapping[str, float]]
) -> Finding:
    held = max(
        (one.held for one in topology.components.values() if one.kind == "spout"), default=0.0
    )
    busiest = max(part.tasks, key=lambda one: (one.busy, one.rate))
    load = min(1.0, sum(shares[busiest.worker].values()))
    text = f"its busiest task is in execute {percent(min(1.0, part.busy))} of the time"
    if part.busy < _BUSY <= load:
        text += f" in a worker that is busy {percent(load)}"
    text += f", {compact(part.waiting)} tuples wait" if part.waiting else ""
    text += f", and spouts are held back {percent(held)} of the time" if held >= 0.05 else ""
    rates = [one.rate for one in part.tasks]
    if len(rates) > 1 and busiest.rate > _SKEW * max(median(rates), 0.1 * busiest.rate):
        share = percent(busiest.rate / sum(rates))
        return _finding("skew", part.id, task=busiest.task, share=share, tasks=len(rates), how=text)
    command = f"storm-dagster rebalance {topology.name}"
    if part.busy < _BUSY:
        what = f"the topology more workers: `{command} -n {len(topology.workers) + 1}`"
    else:
        more = max(part.executors + 1, round(part.executors * 1.5))
        what = f"it more executors: `{command} -e {part.id}={more}`"
    return _finding("bottleneck", part.id, how=text, what=what)


def _worse(
    part: ComponentMeasure, topology: TopologyMeasure, other: str, above: Mapping[str, set[str]]
) -> bool:
    """Whether two are upstream of each other and ``part`` is further behind."""
    rival = topology.components[other]
    return other in above[part.id] and (part.backlog_secs, part.id) > (rival.backlog_secs, rival.id)


def _lag(topology: TopologyMeasure, slow: Collection[str]) -> Iterator[Finding]:
    for part in topology.components.values():
        if not part.lag or part.lag_rate is None:
            continue
        if part.lag_rate > max(0.5, part.lag / 3600):
            remedy = "raise topology.max.spout.pending, or read with more tasks"
            if slow:
                remedy = f"{', '.join(slow)} holds it up: see there"
            yield _finding(
                "lag", part.id, lag=compact(part.lag), rate=compact(part.lag_rate), remedy=remedy
            )
        elif part.lag_rate < 0 and part.lag / -part.lag_rate > 60:
            left = duration(part.lag / -part.lag_rate)
            yield _finding(
                "lag-shrinks",
                part.id,
                lag=compact(part.lag),
                rate=compact(-part.lag_rate),
                left=left,
            )


def _failures(topology: TopologyMeasure) -> Iterator[Finding]:
    for part in topology.components.values():
        if part.kind != "spout":
            continue
        done = part.acked + part.failed
        share = part.failed / done if done else 0.0
        if part.p99_ms is not None and part.p99_ms > topology.timeout_secs * 1000 * _NEAR_TIMEOUT:
            failing = f", and {percent(share)} fail" if share else ""
            secs = {"secs": part.p99_ms / 1000, "timeout": topology.timeout_secs}
            yield _finding("timing-out", part.id, failing=failing, **secs)
        elif share >= _FAILING:
            newest = next(
                (f" Newest error: {name}: {text}" for name, text in topology.errors.items()), ""
            )
            numbers = {"share": percent(share), "rate": compact(part.failed)}
            yield _finding("failing", part.id, newest=newest, name=topology.name, **numbers)


def _workers(topology: TopologyMeasure) -> Iterator[Finding]:
    for worker in topology.workers:
        where = f"{worker.host}:{worker.port}"
        if worker.silent_secs > max(10.0, 4 * topology.report_secs):
            yield _finding(
                "blocked", worker=where, port=worker.port, silence=duration(worker.silent_secs)
            )
        if worker.restarts >= _RESTARTS:
            yield _finding("restarts", worker=where, restarts=worker.restarts, name=topology.name)


def _slow_hosts(topology: TopologyMeasure) -> Iterator[Finding]:
    """A host whose tasks take longer for a tuple than tasks of the same components on other hosts,
    all of them.
    """
    ratios: dict[str, list[float]] = {}
    for part in topology.components.values():
        costs: dict[str, list[float]] = {}
        for one in part.tasks:
            if part.kind == "bolt" and one.rate >= 1 and one.busy >= 0.05:
                costs.setdefault(one.worker.rpartition(":")[0], []).append(one.busy / one.rate)
        for host, mine in costs.items():
            others = [cost for other, found in costs.items() if other != host for cost in found]
            if others:
                ratios.setdefault(host, []).append(median(mine) / median(others))
    for host, found in sorted(ratios.items()):
        if min(found) >= _SLOWER:
            yield _finding("slow-host", host=host, ratio=median(found))


def newest_errors(errors: Collection[tuple[str, str]]) -> dict[str, str]:
    """Component -> last line of its newest error; ``errors`` are (component, text), newest
    first.
    """
    found: dict[str, str] = {}
    for component, text in errors:
        found.setdefault(component, (text.strip().splitlines() or [""])[-1][:200])
    return found
