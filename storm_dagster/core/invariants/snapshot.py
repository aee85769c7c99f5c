"""Snapshot of a cluster, rules, and violations of rules. Pure."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from storm_dagster.model.operation_record import TokenRecord
from storm_dagster.model.slot import Slot
from storm_dagster.model.view import ClusterView, TopologyView


@dataclass(frozen=True)
class WorkerPid:
    """One worker process that runs on an inspected machine."""

    topology_id: str
    node: str
    """Supervisor id."""
    port: int
    pid: int

    @property
    def slot(self) -> Slot:
        """The slot that it runs in."""
        return Slot(self.node, self.port)


@dataclass(frozen=True)
class GrayNodes:
    """Nodes below ``/gray_upgrade/<id>``: whether there is an upgrade, and its workers
    (``host:port``).
    """

    going_on: bool
    upgrading: frozenset[str] = frozenset()
    upgraded: frozenset[str] = frozenset()
    code: str | None = None
    """SHA-256 of the new archive, first 16 hex digits."""


@dataclass(frozen=True)
class ClusterSnapshot:
    """Snapshot of a cluster. ``None`` stands for what was not read."""

    view: ClusterView
    tokens: Mapping[str, TokenRecord] | None = None
    blobs: Mapping[str, str] | None = None
    """Blob key -> SHA-256, of the blobs of topologies that are stored."""
    copies: Mapping[str, int] | None = None
    """Blob key -> nimbuses that hold the newest content."""
    wanted_copies: Mapping[str, int] = field(default_factory=dict)
    """Topology id -> number of nimbuses that should hold its blobs, limited by those that exist."""
    unschedulable: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Topology id -> tasks without a slot for which a reason is recorded."""
    rebalance_requests: frozenset[str] = frozenset()
    """Ids of topologies with a stored rebalance request."""
    gray: Mapping[str, GrayNodes] | None = None
    processes: tuple[WorkerPid, ...] | None = None
    former: "ClusterSnapshot | None" = None
    """Earlier snapshot by the same observer."""


@dataclass(frozen=True)
class Violation:
    """Something that breaks an invariant."""

    invariant: str
    """``I1`` to ``I8``."""
    rule: str
    """Name of the rule; asset checks bear it."""
    thing: str
    """``topology wc-1-1700000000``."""
    reason: str
    remedy: str

    @property
    def sentence(self) -> str:
        """Thing and reason."""
        return f"{self.thing}: {self.reason}"

    def to_document(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)


Found = Iterator[tuple[str, str]]
"""(thing, reason) pairs."""


@dataclass(frozen=True)
class Rule:
    """One rule of an invariant."""

    invariant: str
    name: str
    words: str
    """The rule in one sentence."""
    remedy: str
    find: "Callable[[ClusterSnapshot], Found]"
    by_view: bool = False
    """Whether a view alone decides it."""
    heals: bool = False
    """Whether the cluster may break it for as long as it takes to heal: a warning, no error."""

    def check(self, snapshot: "ClusterSnapshot") -> list[Violation]:
        """Violations of the rule."""
        return [
            Violation(self.invariant, self.name, *found, self.remedy)
            for found in self.find(snapshot)
        ]


def rule_of(
    invariant: str, *, remedy: str, name: str = "", by_view: bool = False, heals: bool = False
) -> Callable[[Callable[[ClusterSnapshot], Found]], Rule]:
    """Decorator that makes a :class:`Rule` of the function that finds what breaks it.

    The docstring of the function is the rule in words. The rule has the function's name if no
    ``name`` is given.
    """

    def make_rule(find: Callable[[ClusterSnapshot], Found]) -> Rule:
        return Rule(
            invariant=invariant,
            name=name or find.__name__,
            words=find.__doc__ or "",
            remedy=remedy,
            find=find,
            by_view=by_view,
            heals=heals,
        )

    return make_rule


def visible(view: ClusterView) -> Iterator[TopologyView]:
    return (topology for topology in view.topologies.values() if topology.base.status != "KILLED")


def title(topology: TopologyView) -> str:
    return f"topology {topology.id}"


@dataclass(frozen=True)
class PendingViolations:
    """Violations and their age: violation -> (boot clock, number of snapshots)."""

    seen: Mapping[Violation, tuple[float, int]] = field(default_factory=dict)


def confirm_violations(
    pending: PendingViolations, found: list[Violation], *, boot_now: float, stable_secs: float
) -> tuple[list[Violation], PendingViolations]:
    """Violations of ``found`` that are confirmed, and the argument of the next call.

    A violation is confirmed once it was found in at least two snapshots in a row, over at least
    ``stable_secs``. A violation of ``no_idle_writes`` is an event, not a state: it is confirmed at
    once.
    """
    seen = {}
    for violation in found:
        since, looks = pending.seen.get(violation, (boot_now, 0))
        seen[violation] = (since, looks + 1)
    counted = [
        violation
        for violation, (since, looks) in seen.items()
        if (looks > 1 and boot_now - since >= stable_secs) or violation.rule == "no_idle_writes"
    ]
    return counted, PendingViolations(seen)
