"""Documents of the cluster in Storm's REST, with Storm's keys."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

Uptime = Annotated[
    str,
    Field(pattern="^([0-9]+d [0-9]+h [0-9]+m |[0-9]+h [0-9]+m |[0-9]+m )?[0-9]+s$"),
]
NotAvailable = Literal["N/A"]


class StormDocument(BaseModel, extra="forbid"):
    """A document of Storm's REST, which has Storm's keys and no others."""


class ClusterSummary(StormDocument):
    """Numbers of the whole cluster."""

    stormVersion: str
    supervisors: int
    topologies: int
    slotsTotal: int
    slotsUsed: int
    slotsFree: int
    executorsTotal: int
    tasksTotal: int
    schedulerDisplayResource: bool
    totalMem: float
    totalCpu: float
    availMem: float
    availCpu: float
    memAssignedPercentUtil: float
    cpuAssignedPercentUtil: float


class SupervisorRow(StormDocument):
    """A supervisor with its slots and resources."""

    id: str
    host: str
    logLink: str
    version: str
    uptime: Uptime
    uptimeSeconds: int
    slotsTotal: int
    slotsUsed: int
    slotsFree: int
    totalMem: float
    totalCpu: float
    usedMem: float
    usedCpu: float
    availMem: float
    availCpu: float
    blacklisted: bool


class WorkerRow(StormDocument):
    """A worker of a topology."""

    supervisorId: str
    host: str
    topologyId: str
    topologyName: str
    workerLogLink: str
    uptime: Uptime
    port: int
    executorsTotal: int
    uptimeSeconds: int
    assignedMemOnHeap: float
    assignedMemOffHeap: float
    assignedCpu: float
    componentNumTasks: dict[str, int]


class SupervisorSummary(StormDocument):
    """All supervisors."""

    schedulerDisplayResource: bool
    supervisors: list[SupervisorRow]


class SupervisorPage(SupervisorSummary):
    """Supervisors of an id or a host, with their workers."""

    workers: list[WorkerRow]


class NimbusRow(StormDocument):
    """A nimbus."""

    host: str
    version: str
    nimbusUpTime: str
    nimbusUpTimeSeconds: str
    nimbusLogLink: str
    port: int
    status: Literal["Leader", "Not a Leader", "Offline"]


class NimbusSummary(StormDocument):
    """All nimbuses."""

    nimbuses: list[NimbusRow]


class HistorySummary(StormDocument):
    """Ids of running topologies."""

    topo_history: list[str] = Field(alias="topo-history")


class TopologyRow(StormDocument):
    """A topology in a list."""

    id: str
    encodedId: str
    name: str
    owner: str
    status: str
    stormVersion: str
    uptime: Uptime
    uptimeSeconds: int
    tasksTotal: int
    workersTotal: int
    executorsTotal: int
    replicationCount: int
    schedulerInfo: str | None
    requestedMemOnHeap: float
    requestedMemOffHeap: float
    requestedCpu: float
    requestedTotalMem: float
    assignedMemOnHeap: float
    assignedMemOffHeap: float
    assignedTotalMem: float
    assignedCpu: float


class TopologyList(StormDocument, title="TopologySummary"):
    """All topologies."""

    schedulerDisplayResource: bool
    topologies: list[TopologyRow]


class OwnerRow(StormDocument):
    """Resources of the topologies of an owner."""

    owner: str
    totalTopologies: int
    totalExecutors: int
    totalWorkers: int
    totalTasks: int
    totalMemoryUsage: float
    totalCpuUsage: float
    totalReqOnHeapMem: float
    totalReqOffHeapMem: float
    totalReqMem: float
    totalReqCpu: float
    totalAssignedOnHeapMem: float
    totalAssignedOffHeapMem: float
    memoryGuarantee: NotAvailable
    cpuGuarantee: NotAvailable
    isolatedNodes: NotAvailable
    memoryGuaranteeRemaining: NotAvailable
    cpuGuaranteeRemaining: NotAvailable


class OwnerSummary(StormDocument):
    """Resources by owner."""

    schedulerDisplayResource: bool
    owners: list[OwnerRow]


class HostPort(StormDocument):
    """The slot of a worker."""

    host: str
    port: int


class TopologyWorkers(StormDocument):
    """Slots of a topology's workers, and the port and scheme of their logs."""

    logviewerPort: int
    logviewerScheme: Literal["http", "https"]
    hostPortList: list[HostPort]
