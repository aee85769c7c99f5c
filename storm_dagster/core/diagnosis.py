"""Diagnosis of a running topology. Pure.

It turns the snapshot of a topology into findings, each with its remedy. A finding names one thing
to change. A bolt that waits for a slower one downstream is not named: it is held back.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Literal, NamedTuple, TypeAlias

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
    "failed-upgrade",
]
_BUSY = 0.8
"""Share of time in execute from which a task is busy."""
_BACKLOG_SECS = 0.5
"""Seconds of work in the queues of a component from which it is behind."""
_STUCK_TUPLES = 16
"""Tuples that wait for a component without a rate, from which it is stuck."""
_STUCK_SECS = 10.0
"""Backlog of a component that is stuck."""
_SKEW = 3.0
"""Rate of the busiest task by the median of its component, above which it has a skew."""
_SLOWER = 2.0
"""Time for a tuple by that on other hosts, from which a host is slow."""
_FAILING = 0.01
"""Share of tuple trees that fail, from which it is a finding."""
_NEAR_TIMEOUT = 0.8
"""Share of the message timeout above which a p99 latency is a finding."""
_RESTARTS = 2
"""Restarts of a worker in the last ten minutes from which they are a finding."""
_STARTING_SECS = 30
"""A topology younger than this has no findings: its metrics have only begun."""
_ERRORS_SECS = 600
"""An error that is older than this is not the newest one."""
_BLOCKED_SECS = 10.0
"""Silence of a worker up to which it is no finding, however often it reports."""
_HELD_BACK = 0.05
"""Share of time that back pressure stops a spout, from which it is named."""
_LAG_GROWTH = 0.5
"""Records per second by which a lag may grow without a finding."""
_SHRINKING_SECS = 60.0
"""Time to the end of a shrinking lag from which it is a note."""
_FAILED_UPGRADE_SECS = 86_400
"""Age from which a failed upgrade is a note."""
_TABLE = load_table(__name__, "findings")
"""Name of a row -> its texts, and its kind and severity if they are not the default."""


@dataclass(frozen=True)
class Finding:
    """A problem or a note about a topology, with its remedy."""

    kind: FindingKind
    severity: Literal["warning", "note"]
    component: str
    """Empty for a finding about the whole topology."""
    text: str
    remedy: str

    def to_document(self) -> dict[str, str]:
        """The keys of ``findings`` in ``show --json``."""
        return asdict(self)


def _finding(row_name: str, component: str = "", **values: object) -> Finding:
    """The finding of a row of the table, with the values for the fields of its texts."""
    row = _TABLE[row_name]
    return Finding(
        kind=row.get("kind", row_name),
        severity=row.get("severity", "warning"),
        component=component,
        text=row["text"].format(component=component, **values),
        remedy=row["remedy"].format(component=component, **values),
    )


def diagnose(topology: TopologySnapshot) -> list[Finding]:
    """The findings, the most important first: warnings, then notes.

    Empty for a topology that keeps up and loses no tuple, and whose newest upgrade did not fail,
    and for one that is not active. One that is just starting is not measured.
    """
    if topology.status != "ACTIVE":
        return []
    findings = [*_findings_of_metrics(topology), *_upgrades(topology)]
    return sorted(findings, key=lambda finding: finding.severity == "note")


def _upgrades(topology: TopologySnapshot) -> Iterator[Finding]:
    """The newest upgrade, if a failure rolled it back."""
    failed = topology.failed_upgrade
    if failed is None:
        return
    # Without a time it was ended by a leader of an earlier release.
    when = ""
    row_name = "failed-upgrade"
    if failed.ended_secs:
        age_secs = max(0, topology.now_secs - failed.ended_secs)
        when = f" {duration(age_secs)} ago"
        if age_secs > _FAILED_UPGRADE_SECS:
            row_name = "failed-upgrade-of-earlier"
    log = f"; the log of {failed.worker} is {failed.log}" if failed.log else ""
    yield _finding(row_name, code=failed.code, when=when, reason=failed.reason.rstrip("."), log=log)


def _findings_of_metrics(topology: TopologySnapshot) -> list[Finding]:
    """The findings from the reports of the topology master."""
    if topology.uptime_secs < _STARTING_SECS:
        return []
    if not topology.reported:
        address = f" on {topology.master.address}" if topology.master else ""
        return [_finding("silent-master", where=address, name=topology.name)]
    if not topology.measured:
        return []  # Workers of the first release measure no rates.
    return _findings_of_rates(topology)


def _findings_of_rates(topology: TopologySnapshot) -> list[Finding]:
    """The findings of a topology whose rates are measured."""
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
    return findings


def _parts(topology: TopologySnapshot) -> list[ComponentSnapshot]:
    """The components of users."""
    return [part for part in topology.components.values() if not part.is_system]


class _TaskLoad(NamedTuple):
    """A task that is placed and measured."""

    task: int
    worker: str
    """Address ``host:port`` of its worker, whose tasks take turns."""
    rate: float
    """Tuples per second that it executes; 0 if the rate is unknown."""
    busy: float
    """Share of time in ``execute``."""


def _loads(part: ComponentSnapshot) -> list[_TaskLoad]:
    """Loads of the tasks of a component that are placed and measured."""
    return [
        _TaskLoad(task.id, task.worker.address, task.rate or 0.0, task.busy)
        for task in part.tasks
        if task.worker is not None and task.busy is not None
    ]


def _waiting(part: ComponentSnapshot) -> float:
    """Tuples in the queues of its tasks; 0 if they are not measured."""
    return part.flow.waiting or 0


def busy_of(part: ComponentSnapshot) -> float:
    """Share of time that its busiest task spends in ``execute``; 0 if none is measured."""
    return max((load.busy for load in _loads(part)), default=0.0)


def backlog_secs(part: ComponentSnapshot) -> float:
    """Seconds that its tasks need for the tuples that wait for them now.

    Without a rate it is a fixed time if many wait, else 0.
    """
    loads = _loads(part)
    rate = sum(load.rate for load in loads)
    if not rate:
        # No tuple was executed lately, and more wait than have just arrived.
        return _STUCK_SECS if _waiting(part) >= _STUCK_TUPLES else 0.0
    secs_per_tuple = sum(load.busy for load in loads) / rate
    return _waiting(part) * secs_per_tuple / len(loads)


def upstream_of(component: str, components: Mapping[str, ComponentSnapshot]) -> set[str]:
    """The components whose tuples a component reads, directly or not."""
    return reachable(component, {name: part.sources for name, part in components.items()})


_WorkerShares: TypeAlias = "Mapping[str, Mapping[str, float]]"
"""Worker -> component -> share of time that its tasks in the worker spend in ``execute``."""


def _slow_components(topology: TopologySnapshot) -> Iterator[Finding]:
    """Findings about the bolts that limit the topology, the worst first.

    Of a bolt that is behind, the component that takes the time of its workers is named. One that
    only waits for a slow component downstream is left out.
    """
    parts = {part.id: part for part in _parts(topology)}
    shares = _worker_shares(parts.values())
    bolts = [part for part in parts.values() if part.kind == "bolt" and _loads(part)]
    behind = {part.id for part in bolts if backlog_secs(part) >= _BACKLOG_SECS}
    busy = {part.id for part in bolts if busy_of(part) >= _BUSY}
    slow = {_culprit(parts[name], shares) for name in behind | busy}
    # Slow component -> those whose tuples it reads, directly or not.
    upstream = {name: upstream_of(name, parts) for name in slow}
    worst_first = sorted(
        (parts[name] for name in slow),
        key=lambda part: (-backlog_secs(part), -busy_of(part), part.id),
    )
    for part in worst_first:
        rivals = [parts[name] for name in behind & slow if name != part.id]
        if not any(_waits_for(part, rival, upstream) for rival in rivals):
            yield _slow_component(part, topology, shares)


def _worker_shares(parts: Iterable[ComponentSnapshot]) -> _WorkerShares:
    """Shares of time by worker and component, of all measured tasks."""
    shares: dict[str, dict[str, float]] = {}
    for part in parts:
        for load in _loads(part):
            by_component = shares.setdefault(load.worker, {})
            by_component[part.id] = by_component.get(part.id, 0.0) + load.busy
    return shares


def _culprit(part: ComponentSnapshot, shares: _WorkerShares) -> str:
    """The component to change for one that is behind.

    It is the component itself if it is busy, else the one that takes most of the time of its
    workers.
    """
    if busy_of(part) >= _BUSY:
        return part.id
    totals: dict[str, float] = {}
    for worker in {load.worker for load in _loads(part)}:
        for name, share in shares[worker].items():
            totals[name] = totals.get(name, 0.0) + share
    # Of equal ones the component itself.
    return max(totals, key=lambda name: (totals[name], name == part.id))


def _waits_for(
    part: ComponentSnapshot, rival: ComponentSnapshot, upstream: Mapping[str, set[str]]
) -> bool:
    """True if ``part`` feeds ``rival``, which is behind and holds it back.

    ``upstream`` has the sets of :func:`upstream_of` of both. In a cycle each is upstream of the
    other: then the one that is less behind waits.
    """
    if part.id not in upstream[rival.id]:
        return False
    if rival.id not in upstream[part.id]:
        return True
    return (backlog_secs(part), part.id) <= (backlog_secs(rival), rival.id)


def _slow_component(
    part: ComponentSnapshot, topology: TopologySnapshot, shares: _WorkerShares
) -> Finding:
    """A skew if one task does far more than the others, else a bottleneck."""
    loads = _loads(part)
    rates = [load.rate for load in loads]
    busiest = max(loads, key=lambda load: (load.busy, load.rate))
    worker_load = min(1.0, sum(shares[busiest.worker].values()))
    symptoms = _symptoms(part, topology, worker_load)
    # If most tasks are idle, the median is near 0: a tenth of the busiest one's rate counts then.
    if len(rates) > 1 and busiest.rate > _SKEW * max(median(rates), 0.1 * busiest.rate):
        return _finding(
            "skew",
            part.id,
            task=busiest.task,
            share=percent(busiest.rate / sum(rates)),
            tasks=len(rates),
            how=symptoms,
        )
    return _finding("bottleneck", part.id, how=symptoms, what=_more_resources(part, topology))


def _symptoms(part: ComponentSnapshot, topology: TopologySnapshot, worker_load: float) -> str:
    """Description of a slow component.

    ``worker_load`` is the load of the worker of its busiest task, from 0 to 1.
    """
    busy = busy_of(part)
    text = f"its busiest task is in execute {percent(min(1.0, busy))} of the time"
    if busy < _BUSY <= worker_load:
        text += f" in a worker that is busy {percent(worker_load)}"
    waiting = _waiting(part)
    if waiting:
        text += f", {compact(waiting)} tuples wait"
    spouts = [spout for spout in _parts(topology) if spout.kind == "spout"]
    held = max((spout.flow.held or 0.0 for spout in spouts), default=0.0)
    if held >= _HELD_BACK:
        text += f", and spouts are held back {percent(held)} of the time"
    return text


def _more_resources(part: ComponentSnapshot, topology: TopologySnapshot) -> str:
    """The rebalance that gives a bottleneck more workers or executors."""
    command = f"storm-dagster rebalance {topology.name}"
    # More executors do not help tasks that wait for the time of their worker.
    if busy_of(part) < _BUSY:
        return f"the topology more workers: `{command} -n {len(topology.workers) + 1}`"
    executors = max(part.parallelism + 1, round(part.parallelism * 1.5))
    return f"it more executors: `{command} -e {part.id}={executors}`"


def _lag(topology: TopologySnapshot, slow: Collection[str]) -> Iterator[Finding]:
    """Findings about lags that grow, and notes about lags that shrink for more than a minute.

    ``slow`` are the components with a finding: they are the cause of a growing lag.
    """
    for part in _parts(topology):
        lag = part.flow.lag
        growth = part.flow.lag_rate
        if not lag or growth is None:
            continue
        # A large lag must grow enough to double within an hour.
        if growth > max(_LAG_GROWTH, lag / 3600):
            remedy = "raise topology.max.spout.pending, or read with more tasks"
            if slow:
                remedy = f"{', '.join(slow)} holds it up: see there"
            yield _finding("lag", part.id, lag=compact(lag), rate=compact(growth), remedy=remedy)
        elif growth < 0 and lag / -growth > _SHRINKING_SECS:
            yield _finding(
                "lag-shrinks",
                part.id,
                lag=compact(lag),
                rate=compact(-growth),
                left=duration(lag / -growth),
            )


def _failures(topology: TopologySnapshot) -> Iterator[Finding]:
    """Findings about spouts whose tuple trees fail, or complete shortly before their timeout."""
    for part in _parts(topology):
        if part.kind != "spout":
            continue
        failed = part.flow.failed or 0.0
        ended = (part.flow.acked or 0.0) + failed
        share = failed / ended if ended else 0.0
        p99_ms = part.flow.p99_ms
        if p99_ms is not None and p99_ms > topology.timeout_secs * 1000 * _NEAR_TIMEOUT:
            yield _finding(
                "timing-out",
                part.id,
                failing=f", and {percent(share)} fail" if share else "",
                secs=p99_ms / 1000,
                timeout=topology.timeout_secs,
            )
        elif share >= _FAILING:
            yield _finding(
                "failing",
                part.id,
                share=percent(share),
                rate=compact(failed),
                newest=_newest_error(topology),
                name=topology.name,
            )


def _newest_error(topology: TopologySnapshot) -> str:
    """Sentence with the newest error, after a space; empty without one of the last ten minutes."""
    for component, error in topology.errors:
        if topology.now_secs - error.time < _ERRORS_SECS:
            return f" Newest error: {component}: {last_line(error.error)}"
    return ""


def last_line(text: str) -> str:
    """The last line of an error, cut at 200 characters.

    In a Python traceback this line names the error.
    """
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else ""


def _workers(topology: TopologySnapshot) -> Iterator[Finding]:
    """Findings about workers that are silent, or were restarted repeatedly."""
    for worker in topology.workers:
        silent_secs = worker.silent_secs or 0.0
        # Four reports are missing.
        if silent_secs > max(_BLOCKED_SECS, 4 * topology.report_secs):
            yield _finding(
                "blocked",
                worker=worker.address,
                port=worker.port,
                silence=duration(silent_secs),
            )
        if worker.restarts is not None and worker.restarts >= _RESTARTS:
            yield _finding(
                "restarts",
                worker=worker.address,
                restarts=worker.restarts,
                name=topology.name,
            )


def _slow_hosts(topology: TopologySnapshot) -> Iterator[Finding]:
    """Findings about hosts whose tasks take longer for a tuple.

    They are compared with the tasks of the same components on the other hosts. A host is slow if
    it is so for all its components.
    """
    ratios: dict[str, list[float]] = {}
    for part in _parts(topology):
        costs = _costs_by_host(part)
        for host, own_costs in costs.items():
            costs_elsewhere: list[float] = []
            for rival_host, rival_costs in costs.items():
                if rival_host != host:
                    costs_elsewhere += rival_costs
            if costs_elsewhere:
                ratio = median(own_costs) / median(costs_elsewhere)
                ratios.setdefault(host, []).append(ratio)
    for host, host_ratios in sorted(ratios.items()):
        if min(host_ratios) >= _SLOWER:
            yield _finding("slow-host", host=host, ratio=median(host_ratios))


def _costs_by_host(part: ComponentSnapshot) -> dict[str, list[float]]:
    """Host -> seconds for a tuple, of each task that has enough work; of bolts only."""
    costs: dict[str, list[float]] = {}
    if part.kind != "bolt":
        return costs
    for load in _loads(part):
        # With few tuples or little work the time for a tuple says nothing about the host.
        if load.rate >= 1 and load.busy >= 0.05:
            host = load.worker.rpartition(":")[0]
            costs.setdefault(host, []).append(load.busy / load.rate)
    return costs
