"""Value types of both planners: the topologies to place, and their placements."""

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

Event = Literal["new", "monitor", "rebalance"]


class _Value(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")


class SupervisorSlots(_Value):
    """One live supervisor that is not blacklisted."""

    id: str
    host: str
    ports: tuple[int, ...]
    """All of its ports."""
    used: tuple[int, ...] = ()
    """Ports that no topology may be given now: held outside this batch, or withheld this round."""
    rack: str | None = None
    cpu: int = 0
    memory_mb: int = 0


class UserWorker(_Value):
    """One entry of ``use.userdefine.assignment``: a user-defined worker."""

    host: str | None = None
    port: int | None = None
    memory_bytes: int | None = None
    cpu: int | None = None
    components: dict[str, int] = {}
    """Component -> how many of its tasks (lowest remaining ids first)."""


class PlacedWorker(_Value):
    """A slot and its tasks."""

    node: str
    host: str
    port: int
    tasks: tuple[int, ...]
    memory_bytes: int = 0
    cpu: int = 0
    kept: bool = False
    """The slot was used by the topology before this event."""


class TopologyToPlace(_Value):
    """Planner's input for one topology."""

    name: str
    topology_id: str = ""
    priority: int = 29
    strategy: str = "balanced"
    event: Event = "new"
    reassign: bool = False
    workers: int = 1
    """``topology.workers``."""
    tasks: dict[int, str] = {}
    """Task id -> component id, ``__acker`` and ``__topology_master`` included."""
    executors: tuple[tuple[int, ...], ...] = ()
    """Groups of task ids that stay together; empty: one executor for each task."""
    inputs: dict[str, tuple[str, ...]] = {}
    """Component -> components that it subscribes to (user components only)."""
    parallelism: dict[str, int] = {}
    """Component -> executors, ``__acker`` included, ``__topology_master`` not."""
    differ_node: tuple[str, ...] = ()
    """Components with ``task.on.differ.node``."""
    single_master: bool | None = None
    """``topology.master.single.worker``; ``None`` when unset."""
    user_workers: tuple[UserWorker, ...] = ()
    use_old: bool = False
    """``use.old.assignment``."""
    isolation: tuple[str, ...] = ()
    """``isolation.scheduler.machines``: hosts."""
    reserve: int = 0
    """``jstorm.reserve.workers``."""
    memory_bytes: int = 2 * 1024**3
    """``worker.memory.size``."""
    master_memory_bytes: int | None = None
    """``topology.master.worker.memory.size``."""
    cpu: int = 1
    """``worker.cpu.slot.num``."""
    old: tuple[PlacedWorker, ...] = ()
    """The present assignment; with event ``new`` the backup kept under the name."""
    dead: tuple[int, ...] = ()
    unstopped: tuple[int, ...] = ()
    conf: dict[str, Any] = Field(default_factory=dict)
    """The merged conf, for strategies that need more."""


class PlacementBatch(_Value):
    """One event: the cluster, and the topologies to place, in any order (planners sort by priority,
    name).
    """

    supervisors: tuple[SupervisorSlots, ...]
    topologies: tuple[TopologyToPlace, ...]


class TopologyPlacement(_Value):
    """Placement of one topology, or the reason why there is none."""

    name: str
    status: Literal["assigned", "unchanged", "failed"]
    error_type: str | None = None
    error: str | None = None
    workers: tuple[PlacedWorker, ...] = ()
    unassigned: dict[int, str] = {}
    """Task id -> why it has no slot."""
    moved: int = 0
    """Tasks of ``old`` whose (node, port) differs now."""
    reasons: dict[int, str] = {}
    """Task id -> the choice that put it where it is, in words (for ``explain``)."""
    worker_reasons: dict[str, str] = {}
    """``"node:port"`` -> why that slot; in the order in which workers of equal merit were
    preferred.
    """
    warnings: tuple[str, ...] = ()
    """Requests of the conf that were not followed, and why."""


class PlacementResult(_Value):
    """Placements in the order in which topologies were served, and the planner that computed
    them.
    """

    placements: tuple[TopologyPlacement, ...]
    planner: Literal["pyspark", "python"]
    session_secs: float = 0.0
    assign_secs: float = 0.0

    def placement(self, name: str) -> TopologyPlacement:
        """Placement of one topology; ``KeyError`` when it was not in the batch."""
        return {placement.name: placement for placement in self.placements}[name]
