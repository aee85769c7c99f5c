"""Values of both planners: topologies to place, and placements."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from storm_dagster.model.ranges import encode_ranges
from storm_dagster.model.records import Record, SupervisorInfo, WorkerSlot
from storm_dagster.model.slot import Slot

Event = Literal["new", "monitor", "rebalance"]
"""Reason to place a topology.

``new``: it was submitted. ``monitor``: tasks are dead. ``rebalance``: its parallelism or spread is
to change.
"""


class _Value(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")


class SupervisorSlots(_Value):
    """One live supervisor that is not blacklisted."""

    id: str
    info: SupervisorInfo
    """Its record, with all of its ports."""
    used: tuple[int, ...] = ()
    """Ports that no topology may be given now: held outside this batch, or withheld this round."""

    @property
    def unused(self) -> set[int]:
        """Ports that topologies of this batch may be given, or hold."""
        return {*self.info.ports} - {*self.used}


class UserWorker(_Value):
    """One entry of ``use.userdefine.assignment``: a user-defined worker."""

    host: str | None = None
    port: int | None = None
    memory_bytes: int | None = None
    cpu: int | None = None
    components: dict[str, int] = {}
    """Component -> number of its tasks (lowest remaining ids first)."""


class TopologyToPlace(_Value):
    """Planner's input for one topology."""

    name: str
    topology_id: str = ""
    priority: int = 29
    strategy: str = "balanced"
    event: Event = "new"
    reassign: bool = False
    """True if a rebalance gives all tasks new places."""
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
    old: tuple[WorkerSlot, ...] = ()
    """The current assignment; with event ``new`` the backup under the name."""
    dead: tuple[int, ...] = ()
    """Tasks that are dead."""
    unstopped: tuple[int, ...] = ()
    """Tasks of workers that still beat although their supervisor is gone."""
    conf: dict[str, Any] = Field(default_factory=dict)
    """The merged conf, for strategies that need more."""


class PlacementBatch(_Value):
    """One event: the cluster, and the topologies to place.

    They may have any order: planners sort them by priority and name.
    """

    supervisors: tuple[SupervisorSlots, ...]
    topologies: tuple[TopologyToPlace, ...]


class TopologyPlacement(Record):
    """Placement of one topology, or the reason why there is none."""

    v: Literal[1] = Field(default=1, exclude=True)
    name: str
    status: Literal["assigned", "unchanged", "failed"]
    error_type: str | None = None
    error: str | None = None
    workers: tuple[WorkerSlot, ...] = ()
    """In the order of their slots, as the assignment gets them."""
    kept: tuple[str, ...] = ()
    """``node:port`` of those workers whose slot the topology used before this event."""
    unassigned: dict[int, str] = {}
    """Task id -> why it has no slot."""
    moved: int = 0
    """Tasks of ``old`` whose slot differs now."""
    reasons: dict[int, str] = {}
    """Task id -> the choice that put it where it is, in words (for ``explain``)."""
    worker_reasons: dict[str, str] = {}
    """``"node:port"`` -> why that slot; in the order in which workers of equal merit were
    preferred.
    """
    warnings: tuple[str, ...] = ()
    """Requests of the conf that were not followed, and why."""

    def worker_documents(self) -> list[dict[str, Any]]:
        """Each worker as JSON values for people.

        It has the list of its task ids, and ``kept``, which is true if the topology used its slot
        before.
        """
        documents: list[dict[str, Any]] = []
        kept_slots = set(self.kept)
        for worker in self.workers:
            document = worker.model_dump(mode="json")
            document["tasks"] = list(worker.ids)
            document["kept"] = worker.slot.key in kept_slots
            documents.append(document)
        return documents

    def to_document(self) -> dict[str, Any]:
        """The placement as JSON for people, with :meth:`worker_documents`.

        The blob ``<id>-placement.json`` has it.
        """
        document = self.model_dump(mode="json", exclude={"kept"})
        document["workers"] = self.worker_documents()
        return document

    @staticmethod
    def from_document(document: Mapping[str, Any]) -> "TopologyPlacement":
        """The placement of :meth:`to_document`; other keys are ignored.

        ``KeyError``, ``TypeError`` or ``ValueError`` for other documents.
        """
        workers: list[dict[str, Any]] = []
        kept_slots: list[str] = []
        for worker in document["workers"]:
            fields = {**worker, "tasks": encode_ranges(worker["tasks"])}
            if fields.pop("kept", False):
                kept_slots.append(Slot(worker["node"], worker["port"]).key)
            workers.append(fields)
        values = {key: document[key] for key in TopologyPlacement.model_fields if key in document}
        values["workers"] = workers
        values["kept"] = kept_slots
        return TopologyPlacement.model_validate(values, strict=False)


class PlacementResult(Record):
    """Placements in the order of their computation, and their planner."""

    v: Literal[1] = Field(default=1, exclude=True)
    placements: tuple[TopologyPlacement, ...]
    planner: Literal["pyspark", "python"]
    session_secs: float = 0.0
    """Time until the planner had its Spark session."""
    assign_secs: float = 0.0
    """Time that the planning took."""

    def placement(self, name: str) -> TopologyPlacement:
        """Placement of one topology.

        ``KeyError`` if it was not in the batch.
        """
        for placement in self.placements:
            if placement.name == name:
                return placement
        raise KeyError(name)
