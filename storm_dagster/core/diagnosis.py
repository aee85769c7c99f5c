"""Diagnosis of a running topology: from its snapshot to findings, each with its remedy. Pure.

A finding names one thing to change. A bolt that waits for a slower one downstream is not named: it
is held back.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Literal, NamedTuple

from storm_dagster.core.snapshot.topology import ComponentSnapshot, TopologySnapshot
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
_STARTING_SECS = 30
"""A topology younger than this has no findings: its figures have only begun."""
_ERRORS_SECS = 600
"""An error that is older than this is not the newest one."""
_TABLE = load_table(__name__, "findings")


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


def diagnose(topology: TopologySnapshot) -> list[Finding]:
    """The findings, the most important first; empty for a topology that keeps up and loses
    nothing, that is not active, or that is just starting.
    """
    if topology.status != "ACTIVE" or topology.uptime_secs < _STARTING_SECS:
        return []
    if not topology.reported:
        where = f" on {topology.master.address}" if topology.master else ""
        return [_finding("silent-master", where=where, name=topology.name)]
    if not topology.measured:
        return []  # Of a worker of the first release, which measures no rates.
    return _findings_of_rates(topology)


def _findings_of_rates(topology: TopologySnapshot) -> list[Finding]:
    slow = list(_slow_components(topology))
    findings = [
        *slow,
        *_lag(topology, [finding.component for finding in slow]),
        *_failures(topology),
        *_workers(topology),
        *_slow_hosts(topology),
    ]
    if not topology.ackers and any(part.kind == "spout" for part in _parts(topology)):
        findings.append(_finding("no-ackers"))
    return sorted(findings, key=lambda finding: finding.severity == "note")


def _parts(topology: TopologySnapshot) -> list[ComponentSnapshot]:
    """The components of users."""
    return [part for part in topology.components.values() if not part.is_system]


class _TaskLoad(NamedTuple):
    """A task that is placed and measured."""

    task: int
    worker: str
    """``host:port``; the tasks of a worker take turns."""
    rate: float
    busy: float


def _loads(part: ComponentSnapshot) -> list[_TaskLoad]:
    return [
        _TaskLoad(task.id, task.worker.address, task.rate or 0.0, task.busy)
        for task in part.tasks
        if task.worker is not None and task.busy is not None
    ]


def _waiting(part: ComponentSnapshot) -> float:
    return part.flow.waiting or 0


def busy_of(part: ComponentSnapshot) -> float:
    """Share of time that its busiest task spends in ``execute``."""
    return max((load.busy for load in _loads(part)), default=0.0)


def backlog_secs(part: ComponentSnapshot) -> float:
    """Time that its tasks need for what waits for them now."""
    loads = _loads(part)
    rate = sum(load.rate for load in loads)
    if not rate:
        # Nothing was executed lately, and more waits than what has just arrived.
        return _STUCK_SECS if _waiting(part) >= _STUCK_TUPLES else 0.0
    return _waiting(part) * sum(load.busy for load in loads) / rate / len(loads)


def upstream_of(component: str, components: Mapping[str, ComponentSnapshot]) -> set[str]:
    """Everything that a component reads, directly or not."""
    return reachable(component, {name: part.sources for name, part in components.items()})


def _slow_components(topology: TopologySnapshot) -> Iterator[Finding]:
    parts = {part.id: part for part in _parts(topology)}
    bolts = [part for part in parts.values() if part.kind == "bolt" and _loads(part)]
    shares: dict[str, dict[str, float]] = {}
    for part in parts.values():
        for load in _loads(part):
            by_component = shares.setdefault(load.worker, {})
            by_component[part.id] = by_component.get(part.id, 0.0) + load.busy
    behind = {part.id for part in bolts if backlog_secs(part) >= _BACKLOG_SECS}
    busy = {part.id for part in bolts if busy_of(part) >= _BUSY}
    slow = {_culprit(parts[name], shares) for name in behind | busy}
    above = {name: upstream_of(name, parts) for name in slow}
    worst_first = sorted(
        (parts[name] for name in slow),
        key=lambda part: (-backlog_secs(part), -busy_of(part), part.id),
    )
    for part in worst_first:
        # Who feeds a bolt that is behind waits for it. In a cycle each is upstream of the other:
        # the worst is named.
        others = (behind & slow) - {part.id}
        if any(
            part.id in above[other] and not _worse(part, parts[other], above) for other in others
        ):
            continue
        yield _slow_component(part, topology, shares)


def _culprit(part: ComponentSnapshot, shares: Mapping[str, Mapping[str, float]]) -> str:
    """The component itself if it is busy, else the one that takes most of the time of its
    workers.
    """
    if busy_of(part) >= _BUSY:
        return part.id
    there: dict[str, float] = {}
    for worker in {load.worker for load in _loads(part)}:
        for name, share in shares[worker].items():
            there[name] = there.get(name, 0.0) + share
    return max(there, key=lambda name: (there[name], name == part.id))


def _slow_component(
    part: ComponentSnapshot, topology: TopologySnapshot, shares: Mapping[str, Mapping[str, float]]
) -> Finding:
    held = max(
        (spout.flow.held or 0.0 for spout in _parts(topology) if spout.kind == "spout"), default=0.0
    )
    loads = _loads(part)
    busiest = max(loads, key=lambda load: (load.busy, load.rate))
    worker_load = min(1.0, sum(shares[busiest.worker].values()))
    busy = busy_of(part)
    text = f"its busiest task is in execute {percent(min(1.0, busy))} of the time"
    if busy < _BUSY <= worker_load:
        text += f" in a worker that is busy {percent(worker_load)}"
    text += f", {compact(_waiting(part))} tuples wait" if _waiting(part) else ""
    text += f", and spouts are held back {percent(held)} of the time" if held >= 0.05 else ""
    rates = [load.rate for load in loads]
    if len(rates) > 1 and busiest.rate > _SKEW * max(median(rates), 0.1 * busiest.rate):
        share = percent(busiest.rate / sum(rates))
        return _finding("skew", part.id, task=busiest.task, share=share, tasks=len(rates), how=text)
    command = f"storm-dagster rebalance {topology.name}"
    if busy < _BUSY:
        remedy = f"the topology more workers: `{command} -n {len(topology.workers) + 1}`"
    else:
        more = max(part.parallelism + 1, round(part.parallelism * 1.5))
        remedy = f"it more executors: `{command} -e {part.id}={more}`"
    return _finding("bottleneck", part.id, how=text, what=remedy)


def _worse(
    part: ComponentSnapshot, rival: ComponentSnapshot, above: Mapping[str, set[str]]
) -> bool:
    """True if two are upstream of each other and ``part`` is further behind."""
    if rival.id not in above[part.id]:
        return False
    return (backlog_secs(part), part.id) > (backlog_secs(rival), rival.id)


def _lag(topology: TopologySnapshot, slow: Collection[str]) -> Iterator[Finding]:
    for part in _parts(topology):
        lag = part.flow.lag
        growth = part.flow.lag_rate
        if not lag or growth is None:
            continue
        if growth > max(0.5, lag / 3600):
            remedy = "raise topology.max.spout.pending, or read with more tasks"
            if slow:
                remedy = f"{', '.join(slow)} holds it up: see there"
            yield _finding("lag", part.id, lag=compact(lag), rate=compact(growth), remedy=remedy)
        elif growth < 0 and lag / -growth > 60:
            left = duration(lag / -growth)
            yield _finding(
                "lag-shrinks", part.id, lag=compact(lag), rate=compact(-growth), left=left
            )


def _failures(topology: TopologySnapshot) -> Iterator[Finding]:
    for part in _parts(topology):
        if part.kind != "spout":
            continue
        failed = part.flow.failed or 0.0
        done = (part.flow.acked or 0.0) + failed
        share = failed / done if done else 0.0
        p99_ms = part.flow.p99_ms
        if p99_ms is not None and p99_ms > topology.timeout_secs * 1000 * _NEAR_TIMEOUT:
            failing = f", and {percent(share)} fail" if share else ""
            secs = {"secs": p99_ms / 1000, "timeout": topology.timeout_secs}
            yield _finding("timing-out", part.id, failing=failing, **secs)
        elif share >= _FAILING:
            numbers = {"share": percent(share), "rate": compact(failed)}
            yield _finding(
                "failing", part.id, newest=_newest_error(topology), name=topology.name, **numbers
            )


def _newest_error(topology: TopologySnapshot) -> str:
    for component, error in topology.errors:
        if topology.now_secs - error.time < _ERRORS_SECS:
            return f" Newest error: {component}: {last_line(error.error)}"
    return ""


def last_line(text: str) -> str:
    """The last line of an error, which names it in a Python traceback, cut at 200 characters."""
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else ""


def _workers(topology: TopologySnapshot) -> Iterator[Finding]:
    for worker in topology.workers:
        where = worker.address
        silent_secs = worker.silent_secs or 0.0
        if silent_secs > max(10.0, 4 * topology.report_secs):
            yield _finding("blocked", worker=where, port=worker.port, silence=duration(silent_secs))
        if worker.restarts is not None and worker.restarts >= _RESTARTS:
            yield _finding("restarts", worker=where, restarts=worker.restarts, name=topology.name)


def _slow_hosts(topology: TopologySnapshot) -> Iterator[Finding]:
    """A host whose tasks take longer for a tuple than tasks of the same components on other hosts,
    all of them.
    """
    ratios: dict[str, list[float]] = {}
    for part in _parts(topology):
        costs: dict[str, list[float]] = {}
        for load in _loads(part):
            if part.kind == "bolt" and load.rate >= 1 and load.busy >= 0.05:
                host = load.worker.rpartition(":")[0]
                costs.setdefault(host, []).append(load.busy / load.rate)
        for host, own_costs in costs.items():
            others: list[float] = []
            for other, other_costs in costs.items():
                others += other_costs if other != host else []
            if others:
                ratios.setdefault(host, []).append(median(own_costs) / median(others))
    for host, host_ratios in sorted(ratios.items()):
        if min(host_ratios) >= _SLOWER:
            yield _finding("slow-host", host=host, ratio=median(host_ratios))
