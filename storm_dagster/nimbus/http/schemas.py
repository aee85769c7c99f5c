"""Documents under ``/v1``. Clients rely on these keys; newer versions may add others."""

from __future__ import annotations

from typing import Literal

from typing_extensions import NotRequired, TypedDict

from storm_dagster.http.schemas import Natural, closed, extensible

_Status = Literal["ACTIVE", "INACTIVE", "KILLED", "REBALANCING", "UPGRADING", "ROLLBACK"]
_Stats = dict[str, float]


class HealthDocument(TypedDict):
    """Health of one nimbus."""

    status: Literal["ok", "degraded", "no leader", "no connection to ZooKeeper"]
    leader: bool
    leader_http: str | None
    epoch: int | None
    id: str
    address: str
    version: str
    cluster_id: str | None
    uptime_secs: int
    missing: int | None


class SubmittedDocument(TypedDict):
    """Run that submits."""

    run_id: str | None
    token: str


class RunDocument(TypedDict):
    """A run of Dagster."""

    status: str


@extensible
class ListRow(TypedDict):
    """One topology in a list."""

    id: str
    name: str
    status: _Status
    uptime_secs: Natural
    workers: Natural
    executors: Natural
    tasks: Natural
    not_running: Natural
    degraded: bool


@closed
class ListDocument(TypedDict):
    """All topologies."""

    topologies: list[ListRow]


class ShowWorker(TypedDict):
    """A worker of a topology."""

    node: str
    host: str
    port: int
    pid: int | None
    tasks: list[int]
    uptime_secs: Natural
    version: str | None


class ShowTask(TypedDict):
    """A task of a topology; without a slot while it waits for one."""

    id: int
    component: str
    node: str | None
    host: str | None
    port: int | None
    status: Literal["starting", "running", "dead", "unassigned"]
    uptime_secs: Natural
    stats: _Stats


class ShowComponent(TypedDict):
    """A component with its statistics of all time; ``latency`` and ``stream_latency`` are of the last ten minutes."""

    type: Literal["spout", "bolt"]
    executors: int
    tasks: list[int]
    stats: _Stats
    waiting: Natural
    capacity: float
    lag: float | None
    latency: dict[str, _Stats]
    stream_latency: dict[str, dict[str, _Stats]]


class ShowError(TypedDict):
    """An error that a task reported ``count`` times; ``time`` of the last one in epoch seconds."""

    component: str
    task: int
    host: str
    port: int
    time: int
    error: str
    count: int


class ShowDocument(TypedDict):
    """One topology with its tasks, workers, statistics and errors; ``back_pressure`` counts the workers that hold
    its spouts back."""

    id: str
    name: str
    status: _Status
    uptime_secs: Natural
    workers: list[ShowWorker]
    tasks: list[ShowTask]
    components: dict[str, ShowComponent]
    back_pressure: Natural
    problems: list[str]
    errors: list[ShowError]


@extensible
class StateEntry(TypedDict):
    """A key of a task's state."""

    task: int


@closed
class StateDocument(TypedDict):
    """A page of keyed state; ``next`` begins the page after it."""

    id: str
    component: str
    entries: list[StateEntry]
    next: str | None


@extensible
class DeadLetter(TypedDict):
    """A tuple that failed too often; ``raw`` is null if it cannot be emitted again. Times in milliseconds since 1970."""

    number: int
    spout: str
    task: int
    stream: str
    error: str
    component: str
    failed_task: int
    tries: int
    first_ms: int
    last_ms: int
    raw: str | None
    replayed_ms: NotRequired[int]


@closed
class DeadLettersDocument(TypedDict):
    """A page of dead letters; ``next`` begins the page after it."""

    id: str
    letters: list[DeadLetter]
    next: str | None


class ChangedDocument(TypedDict):
    """Answer to a change; ``run_id`` is null when the leader does it without Dagster."""

    run_id: str | None
    id: str
    name: str
    status: str


@closed
class BlacklistDocument(TypedDict):
    """Hosts that get no new work."""

    hosts: list[str]


class ClusterNimbus(TypedDict):
    """A nimbus."""

    host: str
    port: int | None
    http: str | None
    leader: bool
    uptime_secs: int | None
    version: str | None
    missing: int | None


class ClusterSupervisor(TypedDict):
    """A supervisor; ``used`` are the ports of its slots that are assigned."""

    id: str
    host: str
    ports: list[int]
    used: list[int]
    uptime_secs: Natural
    version: str
    http: str | None
    blacklisted: bool


class ClusterDocument(TypedDict):
    """Nimbuses and supervisors; ``corrupt`` maps a damaged record's path to the reason."""

    cluster_id: str
    nimbuses: list[ClusterNimbus]
    supervisors: list[ClusterSupervisor]
    healer: bool
    corrupt: dict[str, str]
