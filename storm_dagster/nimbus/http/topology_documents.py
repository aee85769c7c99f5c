"""Documents of our own routes. Clients rely on their keys.

Newer versions may add keys, except to the documents that forbid others, and to those in them that
do not ignore others.
"""

from typing import Literal

from pydantic import BaseModel

from storm_dagster.core.diagnosis import FindingKind
from storm_dagster.core.snapshot.windows import Kind
from storm_dagster.http.documents import Natural, absent_field
from storm_dagster.model.records import TopologyStatus


class HealthDocument(BaseModel):
    """Health of one nimbus."""

    leader: bool
    leader_http: str | None
    epoch: int | None
    id: str
    address: str
    version: str
    missing: int | None
    status: Literal["ok", "degraded", "no leader", "no connection to ZooKeeper"]
    cluster_id: str | None
    uptime_secs: int
    disk_free_mb: Natural | None
    disk_mb: Natural | None


class SubmittedDocument(BaseModel):
    """Run that submits."""

    run_id: str | None
    token: str


class RunDocument(BaseModel):
    """A run of Dagster.

    ``outcome`` and ``moved`` are null before the run has done its work. ``warnings`` are about the
    submitted conf.
    """

    status: str
    outcome: str | None = None
    moved: Natural | None = None
    summary: str = ""
    warnings: list[str] = []


class ListRow(BaseModel, extra="ignore"):
    """One topology in a list."""

    id: str
    name: str
    status: TopologyStatus
    uptime_secs: Natural
    workers: Natural
    not_running: Natural
    degraded: bool
    executors: Natural
    tasks: Natural


class ListDocument(BaseModel, extra="forbid"):
    """All topologies."""

    topologies: list[ListRow]
    healing_pause: str = absent_field()
    """Sentence about a pause of healing; absent without one."""


class ShowWorker(BaseModel):
    """A worker of a topology."""

    node: str
    host: str
    port: int
    pid: int | None
    tasks: list[int]
    uptime_secs: Natural
    version: str | None


class ShowTask(BaseModel):
    """A task of a topology; without a slot while it waits for one."""

    component: str
    uptime_secs: Natural
    stats: dict[str, float]
    id: int
    status: Literal["starting", "running", "dead", "unassigned"]
    node: str | None
    host: str | None
    port: int | None


class ShowComponent(BaseModel):
    """A component with its statistics of all time.

    ``latency`` and ``stream_latency`` are those of the last ten minutes.
    """

    type: Kind
    executors: int
    tasks: list[int]
    stats: dict[str, float]
    waiting: Natural
    capacity: float
    lag: float | None
    latency: dict[str, dict[str, float]]
    stream_latency: dict[str, dict[str, dict[str, float]]]
    streams: dict[str, dict[str, int]]
    lag_by_partition: dict[str, list[float | None]]


class ShowError(BaseModel):
    """An error that a task reported ``count`` times.

    ``time`` is the one of the last report, in epoch seconds.
    """

    component: str
    task: int
    host: str
    port: int
    time: int
    error: str
    count: int


class OperationRow(BaseModel, extra="ignore"):
    """A submission or change that is accepted and has not ended.

    ``step`` is its current step; ``run_id`` is null while its Dagster run is not known.
    """

    verb: Literal["submit", "update", "rebalance", "restart", "gray-upgrade"]
    topology: str
    topology_id: str
    step: str
    started_secs: Natural
    age_secs: Natural | None
    run_id: str | None
    user: str | None


class OperationsDocument(BaseModel, extra="ignore"):
    """Operations under way, oldest first."""

    operations: list[OperationRow]


class ShowFinding(BaseModel):
    """A problem of a topology, and its remedy.

    ``component`` is empty for a problem of the whole topology.
    """

    component: str
    text: str
    remedy: str
    kind: FindingKind
    severity: Literal["warning", "note"]


class EventLogDocument(BaseModel, extra="forbid"):
    """Numbers of events for Dagster that wait and that were dropped.

    The oldest waits since ``since`` (epoch seconds). If the topology is ``declared``, the code
    location of its ``owner`` pulls them.
    """

    waiting: Natural
    since: int | None
    bytes: Natural
    dropped: Natural
    owner: str | None
    declared: bool


class ChangeRow(BaseModel):
    """A change of a topology.

    ``moved`` is a number of tasks, ``outage_secs`` the silence before a healing, ``run`` the id of
    a Dagster run; it is empty if nimbus made the change.
    """

    at_secs: Natural
    action: str
    why: str
    moved: Natural
    outage_secs: Natural
    run: str


class FailedUpgradeDocument(BaseModel):
    """The newest gray upgrade, which a failure rolled back.

    ``worker`` (``host:port``), ``log`` (URL) and ``ended_secs`` are empty or 0 if they are not
    known.
    """

    code: str
    reason: str
    worker: str
    log: str
    ended_secs: Natural


class ShowDocument(BaseModel):
    """One topology with its tasks, workers, statistics and errors.

    ``back_pressure`` is the number of workers that hold its spouts back. ``events`` is null if no
    event for Dagster was ever taken.
    """

    id: str
    name: str
    status: TopologyStatus
    uptime_secs: Natural
    back_pressure: Natural
    problems: list[str]
    findings: list[ShowFinding]
    operations: list[OperationRow]
    workers: list[ShowWorker]
    tasks: list[ShowTask]
    components: dict[str, ShowComponent]
    errors: list[ShowError]
    history: list[ChangeRow]
    failed_upgrade: FailedUpgradeDocument | None
    events: EventLogDocument | None
    healing_pause: str = absent_field()


class StateEntry(BaseModel, extra="ignore"):
    """A key of a task's state."""

    task: int


class StateDocument(BaseModel, extra="forbid"):
    """A page of keyed state; ``next`` begins the page after it."""

    id: str
    component: str
    next: str | None
    entries: list[StateEntry]


class DeadLetter(BaseModel, extra="ignore"):
    """A tuple that failed too often.

    ``raw`` is null if it cannot be emitted again. Times are in milliseconds since 1970.
    """

    number: int
    task: int
    stream: str
    error: str
    component: str
    failed_task: int
    tries: int
    first_ms: int
    last_ms: int
    raw: str | None
    replayed_ms: int = absent_field()
    spout: str


class DeadLettersDocument(BaseModel, extra="forbid"):
    """A page of dead letters; ``next`` begins the page after it."""

    id: str
    next: str | None
    letters: list[DeadLetter]


class ChangedDocument(BaseModel):
    """Response to a change; ``run_id`` is null if the leader executed it itself.

    ``outcome``, ``moved`` (tasks) and ``summary`` are those of a change that the leader executed;
    else they are in the document of the run.
    ``cancelled`` describes the submissions that a kill cancelled; ``status`` is then CANCELLED.
    """

    run_id: str | None
    id: str
    name: str
    status: str
    cancelled: str | None = None
    outcome: str | None = None
    moved: Natural | None = None
    summary: str = ""
    warnings: list[str] = []


class BlacklistDocument(BaseModel, extra="forbid"):
    """Hosts that get no new work."""

    hosts: list[str]


class ClusterNimbus(BaseModel):
    """A nimbus."""

    host: str
    leader: bool
    missing: int | None
    port: int | None
    uptime_secs: int | None
    version: str | None
    http: str | None


class ClusterSupervisor(BaseModel):
    """A supervisor; ``used`` are the ports of its slots that are assigned.

    A supervisor that is ``draining`` gets no new work, and ends when its tasks have moved. ``cpu``
    is in percent points of one core. Each source is a conf key, ``the machine``, or a limit of its
    process; empty if a supervisor of an earlier release does not state it.
    """

    id: str
    host: str
    ports: list[int]
    used: list[int]
    uptime_secs: Natural
    version: str
    blacklisted: bool
    withdrawn: str | None
    """Reason why it offers fewer slots than it has; null if it offers all."""
    draining: bool
    http: str | None
    cpu: Natural
    cpu_source: str
    memory_mb: Natural
    memory_source: str


class HealingPauseDocument(BaseModel, extra="forbid"):
    """Pause of healing by operators."""

    since_ms: int
    until_ms: int
    user: str | None
    text: str
    waiting: list[str]
    """Causes that wait for its end, 20 at most."""
    waiting_causes: Natural
    """Number of all causes that wait."""


class HealingDocument(BaseModel, extra="forbid"):
    """Healer, and the pause by operators."""

    by: Literal["sensor", "leader"]
    """Dagster's sensor, or the leader because no sensor is armed."""
    pause: HealingPauseDocument | None


class ClusterDocument(BaseModel):
    """Nimbuses and supervisors.

    ``corrupt`` has the reason by the path of each damaged record, ``events`` the event log of each
    name of a topology that has one.
    """

    cluster_id: str
    healer: bool
    healing: HealingDocument
    corrupt: dict[str, str]
    events: dict[str, EventLogDocument]
    nimbuses: list[ClusterNimbus]
    supervisors: list[ClusterSupervisor]


class ProblemRow(BaseModel, extra="ignore"):
    """A problem of the cluster, a host or a topology, and its remedy."""

    severity: Literal["broken", "warning"]
    subject: str
    text: str
    remedy: str


class ProblemsDocument(BaseModel):
    """A page of problems; ``next`` begins the page after it.

    ``more`` is the number of topologies on later pages whose tasks do not run, ``skipped`` a
    sentence for each thing that was left out.
    """

    now_secs: float
    supervisors: Natural
    topologies: Natural
    healer: bool
    alarm: str | None
    corrupt: dict[str, str]
    events: dict[str, EventLogDocument]
    problems: list[ProblemRow]
    next: str | None
    more: Natural
    skipped: list[str]
