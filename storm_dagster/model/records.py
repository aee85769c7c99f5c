"""The records in ZooKeeper: frozen, typed, bounded in size.

See ``docs/decisions.md#typed-records``. Every record is UTF-8 JSON with a ``"v"`` schema number.
:func:`encode_record` refuses a record that is too large for a node. :func:`decode_record` raises
:class:`Corrupt` for bytes that are not such a record, so that no decision depends on damaged or
forged state.

Two releases may share a cluster while it is upgraded. A field that this release does not know is
therefore read, ignored and kept: ``record.model_copy(update=...)`` and :func:`encode_record` write
it back unchanged. Change a stored record by ``model_copy``; a record that is built from scratch
loses the fields of a newer release.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic_core import PydanticCustomError, to_json
from typing_extensions import Self

from storm_dagster.model.errors import Corrupt, InvalidTopology
from storm_dagster.model.multimap import multimap
from storm_dagster.model.ranges import check_ranges, decode_ranges, encode_ranges
from storm_dagster.model.slot import Slot

MAX_NODE_BYTES = 512 * 1024
"""No node is larger than this. ZooKeeper drops the whole connection at 1 MiB."""
MAX_UNKNOWN_BYTES = 64 * 1024
"""Largest size of a record's unknown fields, or half of the record if that is more."""

TopologyStatus = Literal["ACTIVE", "INACTIVE", "KILLED", "REBALANCING", "UPGRADING", "ROLLBACK"]
AssignmentType = Literal["Assign", "UpdateTopology", "ScaleTopology"]


def _canonical_ranges(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError("must be text such as '1-3,7'")
    try:
        check_ranges(value)
    except Corrupt as error:
        raise ValueError(str(error)) from None
    return value


Ranges = Annotated[str, BeforeValidator(_canonical_ranges)]


class _Reading:
    """Validation context of :func:`decode_record` alone."""

    met_unknown = False
    """Set to true by the first field that this release does not know."""


def _known_or_read(value: object, info: ValidationInfo) -> object:
    """Accept an unknown field only while a record is decoded."""
    if not isinstance(info.context, _Reading):
        raise PydanticCustomError("extra_forbidden", "Extra inputs are not permitted")
    info.context.met_unknown = True
    return value


class Record(BaseModel):
    """Base of all records: immutable, without coercion of types.

    It has no unknown fields apart from those that were read.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="allow", strict=True)
    if not TYPE_CHECKING:
        __pydantic_extra__: dict[str, Annotated[Any, BeforeValidator(_known_or_read)]]

    v: Literal[1] = 1

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy the record with those fields changed.

        Fields of a newer release stay. ``TypeError`` for an unknown field.
        """
        unknown = (update or {}).keys() - type(self).model_fields.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {min(unknown)!r}")
        return super().model_copy(update=update, deep=deep)

    def keep_unknown(self, before: Self | None) -> Self:
        """The record in the place of ``before``, with its unknown fields."""
        if before is None or not before.model_extra:
            return self
        return before.model_copy(update=self.__dict__)


class BaseConf(Record):
    """Fields of :class:`StormBase` that repeat the conf of the code that the topology runs.

    Every field has the name and type that it has there. Who changes the code or its conf writes
    them in the same transaction.
    """

    v: Literal[1] = Field(default=1, exclude=True)
    owner: str = ""
    """``topology.submitter.user``; empty in a cluster without authentication."""
    isolation: tuple[str, ...] = ()
    """``isolation.scheduler.machines``: hosts on which other topologies get no new work."""


class GrayUpgrade(Record, populate_by_name=True):
    """State of a gray upgrade: ``/gray_upgrade/<id>/conf``.

    It exists during the upgrade. ``number``, ``component`` and ``workers`` select the workers of
    the next batch.
    """

    number: int = 0
    component: str | None = None
    workers: tuple[str, ...] = ()
    """``host:port``; cleared once the batch is picked."""
    expires: int
    """End of its time (epoch seconds), by the clock of the process that began it: only shown."""
    ttl_secs: int = 86_400
    """Longest duration in seconds, by the clock of the leader; a new leader counts from zero."""
    continue_: bool = Field(default=False, alias="continue")
    """True if a batch is requested and not picked yet."""
    rollback: bool = False
    """True if every worker that was picked returns to the former code."""
    code_dir: str = ""
    """Prefix of the blob keys of the new code. The assignment keeps that of the former code until
    the end.
    """
    token: str = ""
    """Client token of the call that began it."""
    batch_token: str = ""
    """Client token of the call that requested the newest batch, if it is another call."""
    reason: str | None = None
    """Reason for a rollback that was not requested."""
    code: dict[str, str] = {}
    """Blob key -> SHA-256 of the new code, as in the assignment."""
    base_conf: BaseConf | None = None
    """Fields of the base by the new code's conf; ``None`` if a former release began the upgrade."""
    failed_worker: str = ""
    """``host:port`` of the worker whose failure began the rollback; empty without a failure."""
    unapplied_sizes: tuple[str, ...] = ()
    """As in the base, of the new code alone; the base gets it with the code."""
    ended_secs: int = 0
    """Epoch seconds of its end; 0: it is under way, or an older release ended it."""


class StormBase(Record):
    """Status and size of a topology, which exists as long as this record.

    ``status`` is the current status, ``wanted_status`` the one that it has without a change under
    way.
    """

    name: str
    launch_time_secs: int
    status: TopologyStatus
    wanted_status: Literal["ACTIVE", "INACTIVE"] = "ACTIVE"
    previous_status: TopologyStatus | None = None
    delay_secs: int | None = None
    workers: int
    executors: dict[str, int]
    """Executors of each component: the requested parallelism."""
    token: str
    """The client token of the submission that made it."""
    owner: str = ""
    """``topology.submitter.user``; empty in a cluster without authentication."""
    isolation: tuple[str, ...] = ()
    """``isolation.scheduler.machines``: hosts on which other topologies get no new work."""
    last_upgrade: GrayUpgrade | None = None
    """The gray upgrade that ended last: a repeated call returns its outcome."""
    submitted_keys: dict[str, tuple[str, ...]] = {}
    """Prefix of a code -> conf keys of its submission; code of an older release is missing."""
    unapplied_sizes: tuple[str, ...] = ()
    """Numbers that a gray upgrade changed in the code alone: ``topology.workers``, components."""


class ComponentTasks(Record):
    """The tasks of one component."""

    v: Literal[1] = Field(default=1, exclude=True)
    type: Literal["bolt", "spout"]
    tasks: Ranges

    @property
    def ids(self) -> tuple[int, ...]:
        """Task ids, ascending."""
        return decode_ranges(self.tasks)


class TaskTable(Record):
    """Task ids of each component of a topology, system components included."""

    components: dict[str, ComponentTasks]

    def component_of(self) -> dict[int, str]:
        """Task id -> component id."""
        components: dict[int, str] = {}
        for name, part in self.components.items():
            components.update(dict.fromkeys(part.ids, name))
        return components


class WorkerBeat(Record):
    """Heartbeat of one worker, as the topology master writes it."""

    v: Literal[1] = Field(default=1, exclude=True)
    count: int
    """Heartbeats received from that worker's current process."""
    silent_ms: Annotated[int, Field(ge=-(2**63), lt=2**63)]
    """Milliseconds since the last one, by the topology master's monotonic clock."""
    uptime_secs: Annotated[int, Field(ge=-(2**63), lt=2**63)]


class TaskBeats(Record):
    """Liveness of a topology's workers and tasks."""

    topology_id: str
    topology_master: int
    """Task id of the topology master."""
    workers: dict[str, WorkerBeat] = {}
    """``"node:port"`` -> its counter, which rises while the worker lives."""
    dead: Ranges = ""
    """Tasks that the topology master judges dead (hung or never reported)."""
    version: int = -1
    """Version of the assignment that it judged; -1: none yet, or a topology master of release
    0.1.0.
    """
    summary: Annotated[dict[str, float], Field(max_length=100)] = {}
    """Statistics for a list of topologies: ``rate`` and ``failed`` per second, ``p95_ms``,
    ``capacity``, ``lag``, and ``lag_rate`` (its growth per second).
    """
    trend: Annotated[str, Field(max_length=1000)] = ""
    """Rates of the last hour for the same list, two minutes a character, oldest first: ``0`` to
    ``f`` (the highest), ``.`` where none is known.
    """


class SupervisorInfo(Record):
    """Ephemeral heartbeat of one supervisor."""

    host: str
    ports: tuple[int, ...]
    """All slots of the supervisor, used and free."""
    started: int
    """Start, in epoch seconds of the supervisor's own clock (shown, never compared)."""
    count: int
    """Number of completed loops that were due."""
    version: str
    http: str | None = None
    """``http://host:port`` of the supervisor's log service, if it has one."""
    cpu: int = 0
    """Percent points of one core that the host offers; 0: not stated."""
    memory_mb: int = 0
    """Memory that the host offers, in MiB; 0: not stated."""
    rack: str | None = None
    restarting: tuple[int, ...] = ()
    """Ports whose worker crashed and is being restarted in place."""
    place: str = ""
    """Boot and folder in which it runs, where a lock admits one at a time; empty: not stated."""
    withdrawn: str = ""
    """Reason why it offers fewer slots than it has, such as a full disk; empty if it offers all."""
    clock_ahead_secs: float | None = None
    """Its wall clock less the leader's, a minute ago, as the next two; ``None``: not measured."""
    disk_free_mb: int | None = None
    """Free room on the disk of its HOME, in MiB; ``disk_mb``: the size of that disk."""
    disk_mb: int | None = None
    cpu_source: str = ""
    """Origin of ``cpu``: a conf key, the machine, or a limit of its process; empty: not stated."""
    memory_source: str = ""
    """Origin of ``memory_mb``, as of ``cpu``."""
    present_secs: int = -1
    """Seconds since it registered with its present session, by its boot clock; -1: not stated.

    It is as old as the heartbeat. A scheduled rebalance counts a host only after
    ``nimbus.rebalance.quiet.secs``.
    """
    draining: bool = False
    """True if it is ending and its tasks are to be moved: it gets no new work."""


class TaskError(Record):
    """One error of one task."""

    task: int
    host: str
    port: int
    time: Annotated[int, Field(ge=0, lt=253_402_300_800)]
    """Epoch seconds of the last one, before the year 10000."""
    error: str
    count: int = 1
    """Number of its occurrences."""
    group: str = ""
    """Type and place; errors of a component with it are one record. Empty: each is a record."""


class GrayWorker(Record):
    """One worker below ``upgrading_workers`` or ``upgraded_workers``.

    The node is named ``host:port``; the worker's supervisor writes it.
    """

    boot_id: str = ""
    """Boot of the host under which ``started`` counts."""
    started: float = 0
    """Boot clock of the host, seconds, at which its first process with the new code was started."""
    failed: str | None = None
    """Failure of that process, if it is a reason to roll the upgrade back."""


class WorkerSlot(Record):
    """One worker of an assignment: a slot and the tasks that run in it."""

    v: Literal[1] = Field(default=1, exclude=True)
    node: str
    """Supervisor id."""
    host: str
    port: int
    tasks: Ranges
    memory_bytes: int = 0
    cpu: int = 0

    @classmethod
    def of_tasks(
        cls, slot: Slot, host: str, ids: Iterable[int], *, memory_bytes: int, cpu: int
    ) -> Self:
        """The worker of that slot with these tasks, in any order."""
        # Unchecked: the check of the ranges of a large topology takes longer than all other work,
        # and these ranges have just been encoded.
        return cls.model_construct(
            node=slot.node,
            host=host,
            port=slot.port,
            tasks=encode_ranges(ids),
            memory_bytes=memory_bytes,
            cpu=cpu,
        )

    @property
    def ids(self) -> tuple[int, ...]:
        """Task ids, ascending."""
        return decode_ranges(self.tasks)

    @property
    def slot(self) -> Slot:
        """Its slot."""
        return Slot(self.node, self.port)

    @property
    def address(self) -> str:
        """``host:port``, also the worker's name below ``/gray_upgrade``."""
        return f"{self.host}:{self.port}"


HEALING = "healed"
"""Action of a reassignment in :class:`AssignmentChange`."""


class AssignmentChange(Record):
    """One change of an assignment, for people: action, reason and run."""

    v: Literal[1] = Field(default=1, exclude=True)
    at_secs: int
    """Epoch seconds."""
    action: str
    """``submitted``, ``healed``, ``rebalanced``, ``restarted`` ..."""
    why: str = ""
    """Reason in words; at most 300 characters."""
    moved: int = 0
    """Tasks that changed their slot."""
    outage_secs: int = 0
    """Of a healing: longest time for which a healed task had been silent, seconds."""
    run: str = ""
    """Id of the Dagster run; empty if nimbus made the change."""


class Assignment(Record):
    """Assignment of one topology's tasks to slots."""

    topology_id: str
    code_dir: str
    """Prefix of the blob keys of the code that these workers run."""
    node_host: dict[str, str]
    """Supervisor id -> host, of the supervisors used."""
    workers: tuple[WorkerSlot, ...]
    task_start_secs: dict[Ranges, int]
    """Task ranges -> epoch seconds at which those tasks were placed where they are."""
    timestamp_ms: int
    type: AssignmentType = "Assign"
    code: dict[str, str] = {}
    """Blob key -> SHA-256 of that code: supervisors run no other content. Empty: an older release
    wrote the record.
    """
    restarts: int = 0
    """Number of requested restarts: a worker process that was started for a lower number is
    replaced in its slot.
    """
    history: tuple[AssignmentChange, ...] = ()
    """The newest changes, newest first."""

    def task_slots(self) -> dict[int, Slot]:
        """Task id -> slot."""
        slots: dict[int, Slot] = {}
        for worker in self.workers:
            slots.update(dict.fromkeys(worker.ids, worker.slot))
        return slots

    def start_secs(self) -> dict[int, int]:
        """Task id -> epoch seconds."""
        start_secs: dict[int, int] = {}
        for ranges, secs in self.task_start_secs.items():
            start_secs.update(dict.fromkeys(decode_ranges(ranges), secs))
        return start_secs

    @staticmethod
    def pack_start_secs(start_secs: Mapping[int, int]) -> dict[str, int]:
        """The ``task_start_secs`` field for a map task id -> epoch seconds."""
        by_secs = multimap((secs, task) for task, secs in start_secs.items())
        return {encode_ranges(tasks): secs for secs, tasks in sorted(by_secs.items())}


class WorkerNode(Record):
    """A live worker process, as an ephemeral node of the worker's session.

    It is written at the start and when it changes.
    """

    pid: int
    token: str
    """Start token: frames and requests of this process carry it."""
    version: int
    """Data version of the assignment node that the worker applies."""
    tasks: Ranges
    """Tasks that the process has opened, or is opening now."""
    started_ms: Annotated[int, Field(ge=0, lt=253_402_300_800_000)]
    """Epoch milliseconds of its own clock (shown, never compared), before the year 10000."""
    status: Literal["starting", "running", "paused"]
    code: str = ""
    """SHA-256 of the archive that it runs (first 16 hex digits)."""
    dead: Ranges = ""
    """In the topology master's worker: tasks that its newest report judges dead, so that readers
    see them at once.
    """


class EpochRecord(Record):
    """Holder of the leadership epoch. The node's data version is the epoch."""

    leader: str
    """``host:port`` of the leading nimbus's Thrift address."""
    http: str
    """Base URL of its HTTP service."""


class Blacklist(Record):
    """Hosts that get no new work; ``/blacklist`` is empty without any."""

    hosts: tuple[str, ...] = ()


class StateHome(Record):
    """``/topology/<id>/state``: place and openings of the state of tasks."""

    marker: str
    """Random id of a file in ``topology.state.dir``; a host without it has other storage. Empty
    before there is one.
    """
    openings: dict[str, tuple[int, ...]] = {}
    """``component/index`` of a stateful task, or the id of a task with ``context.state`` ->
    (division, opening).
    """
    local: tuple[str, ...] = ()
    """Hosts that keep state locally while other hosts run workers, too."""


RecordT = TypeVar("RecordT", bound=Record)


def encode_record(record: Record, *, limit: int | None = MAX_NODE_BYTES) -> bytes:
    """The record as bytes for a node.

    :class:`InvalidTopology` beyond ``limit`` bytes.
    """
    raw = record.model_dump_json(by_alias=True).encode()
    if limit is not None and len(raw) > limit:
        raise InvalidTopology(
            f"{type(record).__name__} takes {len(raw)} bytes, a ZooKeeper node may hold {limit}: "
            "use fewer components, workers or tasks"
        )
    return raw


def decode_record(cls: type[RecordT], raw: bytes, path: str = "") -> RecordT:
    """Decode a record.

    :class:`Corrupt`, which names ``path``, for other bytes. Fields that this release does not know
    are kept up to :data:`MAX_UNKNOWN_BYTES` in all, nested ones included. Beyond that the record is
    ``Corrupt``: if some were dropped, the next write would lose them.
    """
    reading = _Reading()
    place = path or "the record"
    try:
        record = cls.model_validate_json(raw, strict=True, context=reading)
    except (ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise _corrupt(cls, place, error) from None
    if reading.met_unknown:
        size = _unknown_bytes(record)
        max_size = max(MAX_UNKNOWN_BYTES, len(raw) // 2)
        if size > max_size:
            raise Corrupt(
                f"{place} has {size} bytes in fields that this release does not know, {max_size} "
                f"are allowed: it is not a {cls.__name__} of a release that may run beside this "
                "one; look at the node before removing it"
            )
    return record


def _corrupt(cls: type[Record], place: str, error: Exception) -> Corrupt:
    """The error for bytes that are not a record of that class."""
    reasons: list[Any] = error.errors() if isinstance(error, ValidationError) else []
    for reason in reasons:
        version = reason["input"]
        is_number = isinstance(version, int) and not isinstance(version, bool)
        if reason["loc"] == ("v",) and is_number:
            return Corrupt(
                f"{place} is a {cls.__name__} of version {version}, this release reads version 1: a"
                " newer release wrote it; run that release here too, and leave the node as it is"
            )
    message = str(error)
    if reasons:
        message = reasons[0]["msg"]
        field = ".".join(str(part) for part in reasons[0]["loc"])
        if field:
            message = f"{field}: {message}"
    return Corrupt(
        f"{place} is not a valid {cls.__name__} ({message}): it was damaged or written by something"
        " else; look at the node before removing it"
    )


def _unknown_bytes(value: object) -> int:
    """Size of the unknown fields in a record and the records in it."""
    if isinstance(value, Record):
        own_size = len(to_json(value.model_extra)) if value.model_extra else 0
        return own_size + _unknown_bytes(value.__dict__)
    if isinstance(value, Mapping):
        return sum(_unknown_bytes(item) for item in value.values())
    if isinstance(value, tuple):
        return sum(_unknown_bytes(item) for item in value)
    return 0
