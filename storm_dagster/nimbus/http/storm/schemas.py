"""Documents of Storm's REST: the keys that its users rely on, by their types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

from storm_dagster.http.schemas import document
from storm_dagster.nimbus.requests.bodies import Body

_Decimals = Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]{3}$")]
_Uptime = Annotated[str, Field(pattern=r"^([0-9]+d [0-9]+h [0-9]+m |[0-9]+h [0-9]+m |[0-9]+m )?[0-9]+s$")]
_Number = int | Annotated[str, Field(pattern="^[0-9]{1,9}$"), AfterValidator(int)] | None
_Kind = Literal["spout", "bolt"]
_NullableInt = int | None
_NullableText = str | None
_Map = dict[str, Any]
_Percentiles = dict[str, dict[str, float]]
_OURS = {_Percentiles: "latencyPercentiles"}
"""What Storm does not have."""

# Keys that several documents share.
_COUNTS = "emitted transferred acked failed"
_LATENCIES = "executeLatency processLatency capacity"
_ASKED = "requestedMemOnHeap requestedMemOffHeap requestedCpu"
_HEAD = {
    str: "id encodedId name owner status stormVersion",
    _Uptime: "uptime",
    int: "uptimeSeconds tasksTotal workersTotal executorsTotal replicationCount",
    _NullableText: "schedulerInfo",
    float: f"{_ASKED} requestedTotalMem assignedMemOnHeap assignedMemOffHeap assignedTotalMem assignedCpu",
}
_ERROR = {str: "errorHost errorWorkerLogLink error", int: "time errorPort errorLapsedSecs errorCount"}
_ROW_INTS = f"executors tasks {_COUNTS}"
_ROW_ERROR = {_NullableInt: "errorPort errorTime errorLapsedSecs", float: _ASKED}
_ROW_TEXTS = "lastError errorHost errorWorkerLogLink"

ClusterSummary = document(
    "ClusterSummary",
    {
        str: "stormVersion",
        int: "supervisors topologies slotsTotal slotsUsed slotsFree executorsTotal tasksTotal",
        bool: "schedulerDisplayResource",
        float: "totalMem totalCpu availMem availCpu memAssignedPercentUtil cpuAssignedPercentUtil",
    },
)
_Supervisors = list[
    document(
        "SupervisorRow",
        {
            str: "id host logLink version",
            _Uptime: "uptime",
            int: "uptimeSeconds slotsTotal slotsUsed slotsFree",
            float: "totalMem totalCpu usedMem usedCpu availMem availCpu",
            bool: "blacklisted",
        },
    )
]
_Workers = list[
    document(
        "WorkerRow",
        {
            str: "supervisorId host topologyId topologyName workerLogLink",
            _Uptime: "uptime",
            int: "port executorsTotal uptimeSeconds",
            float: "assignedMemOnHeap assignedMemOffHeap assignedCpu",
            dict[str, int]: "componentNumTasks",
        },
    )
]
SupervisorSummary = document("SupervisorSummary", {_Supervisors: "supervisors", bool: "schedulerDisplayResource"})
SupervisorPage = document(
    "SupervisorPage", {_Supervisors: "supervisors", _Workers: "workers", bool: "schedulerDisplayResource"}
)
_Nimbus = document(
    "NimbusRow",
    {
        str: "host version nimbusUpTime nimbusUpTimeSeconds nimbusLogLink",
        int: "port",
        Literal["Leader", "Not a Leader", "Offline"]: "status",
    },
)
NimbusSummary = document("NimbusSummary", {list[_Nimbus]: "nimbuses"})
HistorySummary = document("HistorySummary", {list[str]: "topo-history"})
TopologySummary = document(
    "TopologySummary",
    {list[document("TopologyRow", _HEAD)]: "topologies", bool: "schedulerDisplayResource"},
)
_Owner = document(
    "OwnerRow",
    {
        str: "owner",
        int: "totalTopologies totalExecutors totalWorkers totalTasks",
        float: "totalMemoryUsage totalCpuUsage totalReqOnHeapMem totalReqOffHeapMem totalReqMem totalReqCpu "
        "totalAssignedOnHeapMem totalAssignedOffHeapMem",
        Literal["N/A"]: "memoryGuarantee cpuGuarantee isolatedNodes memoryGuaranteeRemaining cpuGuaranteeRemaining",
    },
)
OwnerSummary = document("OwnerSummary", {list[_Owner]: "owners", bool: "schedulerDisplayResource"})
_SpoutWindows = list[
    document(
        "SpoutWindow",
        {str: "windowPretty window", int: _COUNTS, _Decimals: "completeLatency", **_OURS},
        optional="latencyPercentiles",
    )
]
_BoltWindows = list[
    document("BoltWindow", {str: "windowPretty window", int: f"{_COUNTS} executed", _Decimals: _LATENCIES, **_OURS})
]
_Spout = document(
    "SpoutRow",
    {
        str: f"spoutId encodedSpoutId {_ROW_TEXTS}",
        int: _ROW_INTS,
        _Decimals: "completeLatency",
        **_OURS,
        **_ROW_ERROR,
    },
)
_Bolt = document(
    "BoltRow",
    {
        str: f"boltId encodedBoltId {_ROW_TEXTS}",
        int: f"{_ROW_INTS} executed",
        _Decimals: _LATENCIES,
        **_OURS,
        **_ROW_ERROR,
    },
)
TopologyPage = document(
    "TopologyPage",
    {
        **_HEAD,
        str: f"{_HEAD[str]} window windowHint",
        int: f"{_HEAD[int]} msgTimeout",
        float: f"{_HEAD[float]} samplingPct",
        _NullableText: "schedulerInfo user",
        bool: "schedulerDisplayResource debug",
        _SpoutWindows: "topologyStats",
        _Workers: "workers",
        list[_Spout]: "spouts",
        list[_Bolt]: "bolts",
        _Map: "configuration",
        list[Any]: "visualizationTable",
    },
)
TopologyWorkers = document(
    "TopologyWorkers",
    {
        list[document("HostPort", {str: "host", int: "port"})]: "hostPortList",
        int: "logviewerPort",
        Literal["http", "https"]: "logviewerScheme",
    },
)
_Executor = document(
    "ExecutorRow",
    {
        str: "id encodedId host workerLogLink",
        _Uptime: "uptime",
        int: f"uptimeSeconds port {_COUNTS} executed",
        _Decimals: f"completeLatency {_LATENCIES}",
    },
    optional=f"completeLatency executed {_LATENCIES}",
)
_Output = document(
    "OutputRow",
    {str: "stream", int: _COUNTS, _Decimals: "completeLatency", **_OURS},
    optional="completeLatency acked failed latencyPercentiles",
)
_Input = document(
    "InputRow",
    {
        str: "component encodedComponentId stream",
        int: "executed acked failed",
        _Decimals: "executeLatency processLatency",
        **_OURS,
    },
)
ComponentPage = document(
    "ComponentPage",
    {
        str: "id encodedId name topologyId encodedTopologyId topologyStatus window windowHint eventLogLink",
        _NullableText: "user",
        _Kind: "componentType",
        int: "executors tasks",
        float: f"{_ASKED} samplingPct",
        bool: "schedulerDisplayResource debug profilingAndDebuggingCapable profileActionEnabled",
        list[Any]: "profilerActive",
        list[document("ErrorRow", _ERROR)]: "componentErrors",
        list[_Output]: "outputStats",
        list[_Executor]: "executorStats",
        _SpoutWindows: "spoutSummary",
        _BoltWindows: "boltStats",
        list[_Input]: "inputStats",
    },
    optional="spoutSummary boltStats inputStats",
)
_ComponentError = document("ComponentError", {**_ERROR, str: f"{_ERROR[str]} component"})
TopologyErrors = document("TopologyErrors", {list[_ComponentError]: "topologyErrors"})
_Values = list[document("StreamValue", {str: "stream_id component_id", Any: "value"}, optional="component_id")]
_Reported = document("ReportedMetrics", {str: "component_id task", Any: "metrics"})
_SpoutMetrics = document("SpoutMetrics", {str: "id", _Values: f"{_COUNTS} complete_ms_avg"})
_BoltMetrics = document("BoltMetrics", {str: "id", _Values: f"{_COUNTS} executed executed_ms_avg process_ms_avg"})
TopologyMetrics = document(
    "TopologyMetrics",
    {
        str: "window windowHint",
        list[_Reported]: "reported",
        list[_SpoutMetrics]: "spouts",
        list[_BoltMetrics]: "bolts",
    },
)
_LagResult = document("LagResult", {float: "totalLag", dict[str, float]: "tasks"})
SpoutLag = document("SpoutLag", {str: "spoutId spoutType", _LagResult: "spoutLagResult"})
_VisualStats = document(
    "VisualStats",
    {str: ":host", int: ":port :uptime_secs", dict[str, dict[str, int]]: ":transferred"},
)
_VisualInput = document("VisualInput", {str: ":component :stream :sani-stream :grouping"})
VisualNode = document(
    "VisualNode",
    {
        _Kind: ":type",
        float: ":capacity :latency",
        dict[str, int]: ":transferred",
        list[_VisualStats]: ":stats",
        str: ":link",
        list[_VisualInput]: ":inputs",
    },
)
_VisualStream = document("VisualStream", {str: ":stream :sani-stream", bool: ":checked"})
VisualTable = document("VisualTable", {list[list[_VisualStream]]: "visualizationTable"})
TopologyOperation = document("TopologyOperation", {str: "topologyOperation topologyId", Literal["success"]: "status"})
StacksPage = document("StacksPage", {Literal["ok"]: "status", str: "id dumplink", dict[str, list[str]]: "stacks"})
DisabledAction = document("DisabledAction", {str: "status message"})
LogLevelsPage = document("LogLevelsPage", {_Map: "namedLoggerLevels"})


class RebalanceOptions(Body):
    """Options of a rebalance."""

    numWorkers: _Number = None
    executors: dict[str, _Number] | None = None


class RebalanceRequest(Body):
    """Body of a rebalance, as Storm's UI sends it."""

    rebalanceOptions: RebalanceOptions | None = None
    callback: Any = None


class LoggerLevel(Body):
    """Level of a logger, for ``timeout`` seconds; without a target level the logger has that of the conf again."""

    target_level: Any = None
    reset_level: Any = None
    timeout: int | None = None
    timeout_epoch: Any = None


class LogLevelsRequest(BaseModel):
    """Body of a change of log levels, as Storm's UI sends it."""

    namedLoggerLevels: dict[str, LoggerLevel]
