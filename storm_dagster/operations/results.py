"""Results of operations, for metadata, logs and the command line.

All are plain frozen values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from storm_dagster.blobstore.store import BlobMeta
from storm_dagster.model.placement import PlacementResult, TopologyPlacement
from storm_dagster.model.records import Assignment, TaskTable, TopologyStatus
from storm_dagster.model.topology import TopologySpec


@dataclass(frozen=True)
class TopologyResult:
    """Base of the results about one topology."""

    topology_id: str
    name: str


@dataclass(frozen=True)
class ConfResult(TopologyResult):
    """Stage 1: the topology is valid, normalized and staged under an id."""

    token: str
    epoch: int
    conf: Mapping[str, Any]
    """The normalized topology conf."""
    topology: TopologySpec
    """The normalized topology, without system components."""
    warnings: tuple[str, ...] = ()
    published: bool = False
    """An earlier run of this submission has published it already."""
    replaces: str | None = None


@dataclass(frozen=True)
class CodeResult(TopologyResult):
    """Stage 2: archive, conf and topology are stored.

    They are stored under the topology's id, or under that of a later version of its code.
    """

    blobs: tuple[BlobMeta, ...]
    copies: Mapping[str, int]
    """Blob key -> nimbuses that hold it."""
    wanted_copies: int

    @property
    def degraded(self) -> bool:
        """True if a blob is on fewer nimbuses than configured, which the caller allowed."""
        return min(self.copies.values()) < self.wanted_copies

    @property
    def hashes(self) -> dict[str, str]:
        """Blob key -> SHA-256."""
        return {meta.key: meta.sha256 for meta in self.blobs}


@dataclass(frozen=True)
class TasksResult(TopologyResult):
    """Stage 3: task ids are fixed."""

    table: TaskTable
    executors: Mapping[str, int]
    """Component -> executors, system components included."""
    workers: int
    tasks: int


@dataclass(frozen=True)
class AssignmentResult(TopologyResult):
    """Stage 4: every task has a slot."""

    placement: TopologyPlacement
    planner: str
    session_secs: float
    assign_secs: float
    supervisors: int
    """Supervisors that could get work."""
    result: PlacementResult


@dataclass(frozen=True)
class PublishResult(TopologyResult):
    """Stage 5: the topology is stored in ZooKeeper."""

    status: TopologyStatus
    assignment: Assignment
    placement: TopologyPlacement
    planner: str
    versions: Mapping[str, int]
    """ZooKeeper path -> data version after the transaction."""
    attempts: int = 1
    replanned: int = 0
    """Number of recomputed placements, because the cluster had changed.

    Above 0 the staged placement was replaced.
    """
    already: bool = False
    """True if the topology was published before, so that this call wrote no record."""
    replaced: str | None = None


@dataclass(frozen=True)
class ActivateResult(TopologyResult):
    """Stage 6: the topology has the requested status."""

    status: TopologyStatus
    changed: bool
    version: int
    """Data version of the base."""


@dataclass(frozen=True)
class LifecycleResult(TopologyResult):
    """Result of an activate, deactivate, kill, remove or restart."""

    status: TopologyStatus | None
    """``None``: the topology no longer exists."""
    changed: bool
    delay_secs: int | None = None
    previous: TopologyStatus | None = None
    drain_secs: float | None = None
    """For a replacement: seconds until the former topology had no tuple under way."""
    swap_secs: float | None = None
    """For a replacement: seconds of the swap.

    They run from the end of the former topology's drain until the new topology was active and the
    remains of the former one were swept.
    """


@dataclass(frozen=True)
class ReassignResult(TopologyResult):
    """Result of a reassignment for the causes of one topology."""

    status: str
    """``assigned``, ``unchanged``, ``failed``, ``void`` or ``gone``.

    ``void``: overtaken by a newer placement.
    """
    causes: tuple[str, ...]
    """Keys of the causes."""
    moved: int = 0
    planner: str | None = None
    """``pyspark``, or ``python`` if Spark was unreachable."""
    why_planner: str | None = None
    error: str | None = None
    assignment: Assignment | None = None
    placement: TopologyPlacement | None = None
    version: int | None = None
    """Data version of the assignment."""
    assign_secs: float = 0.0
    """Seconds of planning."""


@dataclass(frozen=True)
class RebalanceResult(TopologyResult):
    """Result of a rebalance, or with ``dry_run`` of its plan."""

    status: TopologyStatus
    outcome: str
    """``assigned``, ``unchanged``, ``waiting`` or ``planned``.

    ``waiting``: for its delay; ``planned``: a dry run.
    """
    workers: int
    executors: Mapping[str, int]
    moved: int = 0
    delay_secs: int = 0
    planner: str | None = None
    placement: TopologyPlacement | None = None
    assignment: Assignment | None = None
    version: int | None = None
    tasks_added: tuple[int, ...] = ()
    tasks_removed: tuple[int, ...] = ()
    components: Mapping[int, str] = field(default_factory=dict)
    """Component of each task before and after."""
    assign_secs: float = 0.0
    """Seconds of planning."""


@dataclass(frozen=True)
class CleanResult:
    """Garbage that the cleaner removed."""

    nodes: tuple[str, ...] = ()
    blobs: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    waiting: int = 0
    """Garbage that is not old enough yet."""
    problems: tuple[str, ...] = field(default=())
