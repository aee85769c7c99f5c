"""Results of operations, for metadata, logs and the command line.

All are plain frozen values.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from storm_dagster.blobstore.store import BlobMeta
from storm_dagster.model.placement import PlacementResult, TopologyPlacement
from storm_dagster.model.records import Assignment, TaskTable, TopologyStatus
from storm_dagster.model.topology import TopologySpec

_MAX_TEXT = 500
"""Characters of a value of a conf in a log or a table."""


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
    """Id of the topology that the publication replaces."""


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
class UpdateChange:
    """A value of a running topology that an update replaces by another one."""

    key: str
    """Conf key; ``parallelism.COMPONENT`` for the number of executors of a component."""
    old: Any
    """``None`` without a value; a secret is masked, here and in ``new``."""
    new: Any

    @property
    def old_text(self) -> str:
        """The old value as a text of at most 500 characters; ``null`` without one."""
        return _short_text(self.old)

    @property
    def new_text(self) -> str:
        """The new value, as :attr:`old_text`."""
        return _short_text(self.new)

    def describe(self) -> str:
        """The change in words, for logs: ``topology.workers: 2 -> 4``."""
        return f"{self.key}: {self.old_text} -> {self.new_text}"


def _short_text(value: Any) -> str:
    """A string itself, another value as JSON; a long text is cut."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(text) <= _MAX_TEXT:
        return text
    return text[: _MAX_TEXT - 3] + "..."


@dataclass(frozen=True)
class TasksResult(TopologyResult):
    """Stage 3: task ids are fixed."""

    table: TaskTable
    executors: Mapping[str, int]
    """Component -> executors, system components included."""
    workers: int
    tasks: int
    changes: tuple[UpdateChange, ...] = ()
    """Of an update: its changes, sorted by key; empty for a repetition after the publication."""


@dataclass(frozen=True)
class AssignmentResult(TopologyResult):
    """Stage 4: every task has a slot."""

    placement: TopologyPlacement
    """Placement of the topology, a part of ``result``."""
    planner: str
    """``pyspark`` or ``python``."""
    session_secs: float
    """Seconds until the planner had its Spark session."""
    assign_secs: float
    """Seconds of planning."""
    supervisors: int
    """Supervisors that could get work."""
    result: PlacementResult
    in_force: Assignment | None = None
    """The assignment of a topology that is published already."""


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
    """Number of views on which the publication was tried."""
    replanned: int = 0
    """Number of recomputed placements, because the cluster had changed.

    Above 0 the staged placement was replaced.
    """
    already: bool = False
    """True if the topology was published before, so that this call wrote no record."""
    replaced: str | None = None
    """Id of the topology that this call replaced."""


@dataclass(frozen=True)
class ActivateResult(TopologyResult):
    """Stage 6: the topology has the requested status."""

    status: TopologyStatus
    changed: bool
    version: int
    """Data version of the base."""


@dataclass(frozen=True)
class CancelledSubmission(TopologyResult):
    """A submission that a kill cancelled before it was published."""

    token: str
    step: str
    """Stage that had not ended, one of ``STAGES``."""
    started_secs: int
    """Epoch seconds of its acceptance; 0: an earlier release wrote the record."""
    run_id: str = ""
    """Its Dagster run; empty if its record and its staging name none."""
    handle: str = ""
    """Its upload; empty if its record and its staging name none."""


@dataclass(frozen=True)
class LifecycleResult(TopologyResult):
    """Result of an activate, deactivate, kill, remove or restart."""

    status: TopologyStatus | None
    """``None``: the topology does not exist."""
    changed: bool
    delay_secs: int | None = None
    """Of a kill: seconds until the removal."""
    cancelled: tuple[CancelledSubmission, ...] = ()
    """Of a kill: the submissions that it cancelled, if no topology was published yet."""
    previous: TopologyStatus | None = None
    """Status before."""
    drain_secs: float | None = None
    """For a replacement: seconds until the former topology had no tuple under way."""
    swap_secs: float | None = None
    """For a replacement: seconds of the swap.

    They run from the end of the former topology's drain until the new topology was active and the
    remains of the former one were swept.
    """
    warnings: tuple[str, ...] = ()
    """For a replacement: warnings about the submitted conf."""
    changes: tuple[UpdateChange, ...] = ()
    """For a replacement: values that it changed, sorted by key.

    Empty for a repetition after the publication.
    """


@dataclass(frozen=True)
class ReassignResult(TopologyResult):
    """Result of a reassignment for the causes of one topology."""

    status: str
    """``assigned``, ``unchanged``, ``failed``, ``void``, ``paused`` or ``gone``.

    ``void``: overtaken by a newer placement. ``paused``: operators have paused healing.
    """
    causes: tuple[str, ...]
    """Keys of the causes."""
    moved: int = 0
    """Number of moved tasks."""
    planner: str | None = None
    """``pyspark``, or ``python`` if Spark was unreachable."""
    why_planner: str | None = None
    """Reason why the local planner planned; ``None`` if PySpark did."""
    error: str | None = None
    """Of ``failed``: the reason."""
    assignment: Assignment | None = None
    """The assignment afterwards; ``None`` unless ``assigned`` or ``unchanged``."""
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
    """Requested number of workers."""
    executors: Mapping[str, int]
    """Component -> requested number of executors."""
    moved: int = 0
    """Number of tasks that the plan moves."""
    delay_secs: int = 0
    """Seconds between the request and the moves."""
    planner: str | None = None
    placement: TopologyPlacement | None = None
    """The plan; ``None`` if another process finished the rebalance."""
    assignment: Assignment | None = None
    """The assignment at the end of the call: the former one until the rebalance is finished."""
    version: int | None = None
    """Data version of ``assignment``."""
    tasks_added: tuple[int, ...] = ()
    """Ids of the tasks that the plan adds."""
    tasks_removed: tuple[int, ...] = ()
    """Ids of the tasks that the plan removes."""
    components: Mapping[int, str] = field(default_factory=dict)
    """Component of each task before and after."""
    assign_secs: float = 0.0
    """Seconds of planning."""
    reason: str = ""
    """Reason why a scheduled rebalance has no effect, if the topology is not steady."""
    limits: str = ""
    """Limits of the slots that the topology may use, in words; empty without one."""
    resized: bool = False
    """True if no task moves, but workers get other memory or CPU by the conf."""
    warnings: tuple[str, ...] = ()
    """Parts of the request that are kept without an effect."""

    @property
    def all_warnings(self) -> tuple[str, ...]:
        """Parts of the request and of the topology's conf that have no effect."""
        if self.placement is None:
            return self.warnings
        return (*self.warnings, *self.placement.warnings)


@dataclass(frozen=True)
class CleanResult:
    """Garbage that the cleaner removed, or that it has chosen for removal."""

    nodes: tuple[str, ...] = ()
    """Paths in ZooKeeper, without those of tokens."""
    blobs: tuple[str, ...] = ()
    """Blob keys."""
    tokens: tuple[str, ...] = ()
    """Expired client tokens."""
    waiting: int = 0
    """Number of nodes and blobs that are not old enough yet."""
    problems: tuple[str, ...] = field(default=())
    """Paths and blob keys that could not be removed, each with its error."""
