"""Types of the invariants: snapshot of a cluster, rule and violation. Pure."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

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
    """Content of the nodes below ``/gray_upgrade/<id>``."""

    under_way: bool
    """True if there is an upgrade."""
    upgrading: frozenset[str] = frozenset()
    """Addresses ``host:port`` of the workers that are being upgraded."""
    upgraded: frozenset[str] = frozenset()
    """Addresses ``host:port`` of the workers that run the new code."""
    code: str | None = None
    """SHA-256 of the new archive, first 16 hex digits."""


@dataclass(frozen=True)
class ClusterSnapshot:
    """Snapshot of a cluster; a part that was not read is ``None``."""

    view: ClusterView
    """Records of ZooKeeper, which are always read."""
    tokens: Mapping[str, TokenRecord] | None = None
    """Client token of a submission -> its record."""
    blobs: Mapping[str, str] | None = None
    """Blob key -> SHA-256, of the stored blobs of topologies."""
    copies: Mapping[str, int] | None = None
    """Blob key -> nimbuses that hold the newest content."""
    wanted_copies: Mapping[str, int] = field(default_factory=dict)
    """Topology id -> number of nimbuses that should hold its blobs, limited by those that exist."""
    unschedulable: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Topology id -> tasks without a slot for which a reason is recorded."""
    rebalance_requests: frozenset[str] = frozenset()
    """Ids of topologies with a stored rebalance request."""
    gray: Mapping[str, GrayNodes] | None = None
    """Topology id -> nodes of its gray upgrade; a topology without any has no entry."""
    processes: tuple[WorkerPid, ...] | None = None
    """Worker processes of the inspected machines."""
    former: "ClusterSnapshot | None" = None
    """Earlier snapshot by the same observer."""


@dataclass(frozen=True)
class Violation:
    """A thing that breaks a rule of an invariant, with the reason and a remedy."""

    invariant: str
    """``I1`` to ``I8``."""
    rule: str
    """Name of the rule, and of its asset check."""
    thing: str
    """The thing in words: ``topology wc-1-1700000000``."""
    reason: str
    remedy: str

    @property
    def sentence(self) -> str:
        """Thing and reason."""
        return f"{self.thing}: {self.reason}"

    def to_document(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)


Problems: TypeAlias = Iterator[tuple[str, str]]
"""(thing, reason) pairs, one for each problem that a rule finds."""


@dataclass(frozen=True)
class Rule:
    """One rule of an invariant."""

    invariant: str
    name: str
    words: str
    """The rule in one sentence."""
    remedy: str
    find: Callable[[ClusterSnapshot], Problems]
    """Function that yields the things that break the rule."""
    by_view: bool = False
    """True if a view alone decides it."""
    heals: bool = False
    """True if the cluster may break it until it has healed: a warning, not an error."""

    def check(self, snapshot: ClusterSnapshot) -> list[Violation]:
        """Violations of the rule."""
        return [
            Violation(self.invariant, self.name, thing, reason, self.remedy)
            for thing, reason in self.find(snapshot)
        ]


def rule_of(
    invariant: str, *, remedy: str, name: str = "", by_view: bool = False, heals: bool = False
) -> Callable[[Callable[[ClusterSnapshot], Problems]], Rule]:
    """Make a :class:`Rule` of the decorated function, which finds the problems.

    The docstring of the function is the rule in words. Without a ``name`` the rule has the name of
    the function.
    """

    def make_rule(find: Callable[[ClusterSnapshot], Problems]) -> Rule:
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
    """The topologies that are not killed."""
    return (topology for topology in view.topologies.values() if topology.base.status != "KILLED")


def title(topology: TopologyView) -> str:
    """The topology as the thing of a violation."""
    return f"topology {topology.id}"


@dataclass(frozen=True)
class PendingViolations:
    """The violations of the last snapshot, with their ages."""

    ages: Mapping[Violation, tuple[float, int]] = field(default_factory=dict)
    """Violation -> (boot clock of its first snapshot, number of snapshots in a row)."""


def confirm_violations(
    pending: PendingViolations,
    violations: list[Violation],
    *,
    boot_now: float,
    stable_secs: float,
) -> tuple[list[Violation], PendingViolations]:
    """Return the confirmed ones of ``violations``, and the argument of the next call.

    A violation is confirmed once it was found in at least two snapshots in a row, over at least
    ``stable_secs``. A violation of ``no_idle_writes`` is an event, not a state: it is confirmed at
    once.
    """
    ages: dict[Violation, tuple[float, int]] = {}
    for violation in violations:
        since, snapshots = pending.ages.get(violation, (boot_now, 0))
        ages[violation] = (since, snapshots + 1)
    confirmed: list[Violation] = []
    for violation, (since, snapshots) in ages.items():
        lasts = snapshots > 1 and boot_now - since >= stable_secs
        if lasts or violation.rule == "no_idle_writes":
            confirmed.append(violation)
    return confirmed, PendingViolations(ages)
