"""Documents of Storm's REST: the keys that its users rely on, by their types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

from storm_dagster.http.schemas import document, types_of
from storm_dagster.model.verbs import RequestModel

_Decimals = Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]{3}$")]
_Uptime = Annotated[str, Field(pattern=r"^([0-9]+d [0-9]+h [0-9]+m |[0-9]+h [0-9]+m |[0-9]+m )?[0-9]+s$")]
_Number = int | Annotated[str, Field(pattern="^[0-9]{1,9}$"), AfterValidator(int)] | None
_Kind = Literal["spout", "bolt"]

_TYPES = types_of(
    {
        str: "id encodedId name owner status stormVersion window windowHint windowPretty stream component encodedComponentId host "
        "version error errorHost errorWorkerLogLink lastError logLink workerLogLink nimbusLogLink eventLogLink supervisorId "
        "topologyId encodedTopologyId topologyName topologyStatus topologyOperation spoutId encodedSpoutId spoutType boltId "
        "encodedBoltId nimbusUpTime nimbusUpTimeSeconds component_id stream_id task message dumplink :host :link :component "
        ":stream :sani-stream :grouping",
        _Uptime: "uptime",
        _Decimals: "completeLatency executeLatency processLatency capacity",
        _Kind: "componentType :type",
        int: "uptimeSeconds tasksTotal workersTotal executorsTotal replicationCount supervisors topologies slotsTotal slotsUsed "
        "slotsFree port logviewerPort executors tasks emitted transferred acked failed executed msgTimeout time errorPort "
        "errorTime errorLapsedSecs errorCount totalTopologies totalExecutors totalWorkers totalTasks :port :uptime_secs",
        str | None: "schedulerInfo user",
        float: "requestedMemOnHeap requestedMemOffHeap requestedCpu requestedTotalMem assignedMemOnHeap assignedMemOffHeap "
        "assignedTotalMem assignedCpu totalMem totalCpu usedMem usedCpu availMem availCpu memAssignedPercentUtil "
        "cpuAssignedPercentUtil totalMemoryUsage totalCpuUsage totalReqOnHeapMem totalReqOffHeapMem totalReqMem totalReqCpu "
        "totalAssignedOnHeapMem totalAssignedOffHeapMem samplingPct totalLag :capacity :latency",
        bool: "schedulerDisplayResource blacklisted debug profilingAndDebuggingCapable profileActionEnabled :checked",
        Literal["N/A"]: "memoryGuarantee cpuGuarantee isolatedNodes memoryGuaranteeRemaining cpuGuaranteeRemaining",
        Literal["http", "https"]: "logviewerScheme",
        Any: "metrics value",
        list[Any]: "visualizationTable profilerActive",
        list[str]: "topo-history",
        dict[str, Any]: "configuration namedLoggerLevels",
        dict[str, int]: "componentNumTasks",
        dict[str, dict[str, float]]: "latencyPercentiles",
        dict[str, list[str]]: "stacks",
    }
)
"""Key -> its type in every document that names no other."""

_COUNTS = "emitted transferred acked failed"
_LATENCIES = "executeLatency processLatency capacity"
_ASKED = "requestedMemOnHeap requestedMemOffHeap requestedCpu"
_HEAD = (
    "id encodedId name owner status stormVersion uptime uptimeSeconds tasksTotal workersTotal executorsTotal "
    f"replicationCount schedulerInfo {_ASKED} requestedTotalMem assignedMemOnHeap assignedMemOffHeap assignedTotalMem "
    "assignedCpu"
)
_ERROR = "errorHost errorWorkerLogLink error time errorPort errorLapsedSecs errorCount"
_ROW = f"executors tasks {_COUNTS} latencyPercentiles lastError errorHost errorWorkerLogLink errorTime {_ASKED}"


def _page(name: str, keys: str, *, optional: Any = "", **others: Any) -> Any:
    """The document that has exactly these keys, those of ``others`` with other types than usual."""
    return document(name, keys, _TYPES, others, optional=optional)


ClusterSummary = _page(
    "ClusterSummary",
    "stormVersion supervisors topologies slotsTotal slotsUsed slotsFree executorsTotal tasksTotal schedulerDisplayResource "
    "totalMem totalCpu availMem availCpu memAssignedPercentUtil cpuAssignedPercentUtil",
)
_Supervisors = list[
    _page(
        "SupervisorRow",
        "id host logLink version uptime uptimeSeconds slotsTotal slotsUsed slotsFree totalMem totalCpu usedMem usedCpu "
        "availMem availCpu blacklisted",
    )
]
_Workers = list[
    _page(
        "WorkerRow",
        "supervisorId host topologyId topologyName workerLogLink uptime port executorsTotal uptimeSeconds assignedMemOnHeap "
        "assignedMemOffHeap assignedCpu componentNumTasks",
    )
]
SupervisorSummary = _page("SupervisorSummary", "schedulerDisplayResource", supervisors=_Supervisors)
SupervisorPage = _page("SupervisorPage", "schedulerDisplayResource", supervisors=_Supervisors, workers=_Workers)
_Nimbus = _page(
    "NimbusRow",
    "host version nimbusUpTime nimbusUpTimeSeconds nimbusLogLink port",
    status=Literal["Leader", "Not a Leader", "Offline"],
)
NimbusSummary = _page("NimbusSummary", "", nimbuses=list[_Nimbus])
HistorySummary = _page("HistorySummary", "topo-history")
TopologySummary = _page("TopologySummary", "schedulerDisplayResource", topologies=list[_page("TopologyRow", _HEAD)])
_Owner = _page(
    "OwnerRow",
    "owner totalTopologies totalExecutors totalWorkers totalTasks totalMemoryUsage totalCpuUsage totalReqOnHeapMem "
    "totalReqOffHeapMem totalReqMem totalReqCpu totalAssignedOnHeapMem totalAssignedOffHeapMem memoryGuarantee cpuGuarantee "
    "isolatedNodes memoryGuaranteeRemaining cpuGuaranteeRemaining",
)
OwnerSummary = _page("OwnerSummary", "schedulerDisplayResource", owners=list[_Owner])
_SpoutWindows = list[
    _page(
        "SpoutWindow",
        f"windowPretty window {_COUNTS} completeLatency latencyPercentiles",
        optional="latencyPercentiles",
    )
]
_BoltWindows = list[_page("BoltWindow", f"windowPretty window {_COUNTS} executed {_LATENCIES} latencyPercentiles")]
_NULLABLE = {"errorPort": int | None, "errorTime": int | None, "errorLapsedSecs": int | None}
_Spout = _page("SpoutRow", f"spoutId encodedSpoutId completeLatency {_ROW}", **_NULLABLE)
_Bolt = _page("BoltRow", f"boltId encodedBoltId executed {_LATENCIES} {_ROW}", **_NULLABLE)
TopologyPage = _page(
    "TopologyPage",
    f"{_HEAD} window windowHint msgTimeout samplingPct user schedulerDisplayResource debug configuration visualizationTable",
    topologyStats=_SpoutWindows,
    workers=_Workers,
    spouts=list[_Spout],
    bolts=list[_Bolt],
)
TopologyWorkers = _page(
    "TopologyWorkers", "logviewerPort logviewerScheme", hostPortList=list[_page("HostPort", "host port")]
)
_Executor = _page(
    "ExecutorRow",
    f"id encodedId host workerLogLink uptime uptimeSeconds port {_COUNTS} executed completeLatency {_LATENCIES}",
    optional=f"completeLatency executed {_LATENCIES}",
)
_Output = _page(
    "OutputRow",
    f"stream {_COUNTS} completeLatency latencyPercentiles",
    optional="completeLatency acked failed latencyPercentiles",
)
_Input = _page(
    "InputRow",
    "component encodedComponentId stream executed acked failed executeLatency processLatency latencyPercentiles",
)
ComponentPage = _page(
    "ComponentPage",
    "id encodedId name topologyId encodedTopologyId topologyStatus window windowHint eventLogLink user componentType "
    f"executors tasks {_ASKED} samplingPct schedulerDisplayResource debug profilingAndDebuggingCapable profileActionEnabled "
    "profilerActive",
    componentErrors=list[_page("ErrorRow", _ERROR)],
    outputStats=list[_Output],
    executorStats=list[_Executor],
    spoutSummary=_SpoutWindows,
    boltStats=_BoltWindows,
    inputStats=list[_Input],
    optional="spoutSummary boltStats inputStats",
)
TopologyErrors = _page("TopologyErrors", "", topologyErrors=list[_page("ComponentError", f"{_ERROR} component")])
_Values = list[_page("StreamValue", "stream_id component_id value", optional="component_id")]


def _metrics(name: str, keys: str) -> Any:
    return list[_page(name, "id", **dict.fromkeys(keys.split(), _Values))]


TopologyMetrics = _page(
    "TopologyMetrics",
    "window windowHint",
    reported=list[_page("ReportedMetrics", "component_id task metrics")],
    spouts=_metrics("SpoutMetrics", f"{_COUNTS} complete_ms_avg"),
    bolts=_metrics("BoltMetrics", f"{_COUNTS} executed executed_ms_avg process_ms_avg"),
)
SpoutLag = _page("SpoutLag", "spoutId spoutType", spoutLagResult=_page("LagResult", "totalLag", tasks=dict[str, float]))
_VisualStats = _page("VisualStats", ":host :port :uptime_secs", **{":transferred": dict[str, dict[str, int]]})
VisualNode = _page(
    "VisualNode",
    ":type :capacity :latency :link",
    **{
        ":transferred": dict[str, int],
        ":stats": list[_VisualStats],
        ":inputs": list[_page("VisualInput", ":component :stream :sani-stream :grouping")],
    },
)
_VisualStream = _page("VisualStream", ":stream :sani-stream :checked")
VisualTable = _page("VisualTable", "", visualizationTable=list[list[_VisualStream]])
TopologyOperation = _page("TopologyOperation", "topologyOperation topologyId", status=Literal["success"])
StacksPage = _page("StacksPage", "id dumplink stacks", status=Literal["ok"])
DisabledAction = _page("DisabledAction", "status message")
LogLevelsPage = _page("LogLevelsPage", "namedLoggerLevels")


class RebalanceOptions(RequestModel):
    """Options of a rebalance."""

    numWorkers: _Number = None
    executors: dict[str, _Number] | None = None


class StormRebalance(RequestModel):
    """Body of a rebalance, as Storm's UI sends it."""

    rebalanceOptions: RebalanceOptions | None = None
    callback: Any = None


class LoggerLevel(RequestModel):
    """Level of a logger, for ``timeout`` seconds; without a target level the logger has that of the conf again."""

    target_level: Any = None
    reset_level: Any = None
    timeout: int | None = None
    timeout_epoch: Any = None


class LogLevelsRequest(BaseModel):
    """Body of a change of log levels, as Storm's UI sends it."""

    namedLoggerLevels: dict[str, LoggerLevel]
