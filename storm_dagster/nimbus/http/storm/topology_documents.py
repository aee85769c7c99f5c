"""Documents of a topology in Storm's REST, with the keys that its users rely on."""

from typing import Annotated, Any

from pydantic import Field

from storm_dagster.core.snapshot.windows import Kind
from storm_dagster.http.documents import absent_field
from storm_dagster.nimbus.http.storm.cluster_documents import (
    StormDocument,
    TopologyRow,
    Uptime,
    WorkerRow,
)

Decimals = Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]{3}$")]
Percentiles = dict[str, dict[str, float]]
"""Stream or component -> percentile -> milliseconds."""


class SpoutWindow(StormDocument):
    windowPretty: str
    window: str
    emitted: int
    transferred: int
    acked: int
    failed: int
    completeLatency: Decimals
    latencyPercentiles: Percentiles = absent_field()


class BoltWindow(StormDocument):
    windowPretty: str
    window: str
    emitted: int
    transferred: int
    acked: int
    failed: int
    executed: int
    executeLatency: Decimals
    processLatency: Decimals
    capacity: Decimals
    latencyPercentiles: Percentiles


class SpoutRow(StormDocument):
    spoutId: str
    encodedSpoutId: str
    completeLatency: Decimals
    executors: int
    tasks: int
    emitted: int
    transferred: int
    acked: int
    failed: int
    latencyPercentiles: Percentiles
    lastError: str
    errorHost: str
    errorWorkerLogLink: str
    errorTime: int | None
    requestedMemOnHeap: float
    requestedMemOffHeap: float
    requestedCpu: float
    errorPort: int | None
    errorLapsedSecs: int | None


class BoltRow(StormDocument):
    boltId: str
    encodedBoltId: str
    executed: int
    executeLatency: Decimals
    processLatency: Decimals
    capacity: Decimals
    executors: int
    tasks: int
    emitted: int
    transferred: int
    acked: int
    failed: int
    latencyPercentiles: Percentiles
    lastError: str
    errorHost: str
    errorWorkerLogLink: str
    errorTime: int | None
    requestedMemOnHeap: float
    requestedMemOffHeap: float
    requestedCpu: float
    errorPort: int | None
    errorLapsedSecs: int | None


class TopologyPage(TopologyRow):
    window: str
    windowHint: str
    msgTimeout: int
    samplingPct: float
    user: str | None
    schedulerDisplayResource: bool
    debug: bool
    configuration: dict[str, Any]
    visualizationTable: list[Any]
    topologyStats: list[SpoutWindow]
    workers: list[WorkerRow]
    spouts: list[SpoutRow]
    bolts: list[BoltRow]


class ExecutorRow(StormDocument):
    id: str
    encodedId: str
    host: str
    workerLogLink: str
    uptime: Uptime
    uptimeSeconds: int
    port: int
    emitted: int
    transferred: int
    acked: int
    failed: int
    executed: int = absent_field()
    completeLatency: Decimals = absent_field()
    executeLatency: Decimals = absent_field()
    processLatency: Decimals = absent_field()
    capacity: Decimals = absent_field()


class OutputRow(StormDocument):
    stream: str
    emitted: int
    transferred: int
    acked: int = absent_field()
    failed: int = absent_field()
    completeLatency: Decimals = absent_field()
    latencyPercentiles: Percentiles = absent_field()


class InputRow(StormDocument):
    component: str
    encodedComponentId: str
    stream: str
    executed: int
    acked: int
    failed: int
    executeLatency: Decimals
    processLatency: Decimals
    latencyPercentiles: Percentiles


class ErrorRow(StormDocument):
    errorHost: str
    errorWorkerLogLink: str
    error: str
    time: int
    errorPort: int
    errorLapsedSecs: int
    errorCount: int


class ComponentPage(StormDocument):
    id: str
    encodedId: str
    name: str
    topologyId: str
    encodedTopologyId: str
    topologyStatus: str
    window: str
    windowHint: str
    eventLogLink: str
    user: str | None
    componentType: Kind
    executors: int
    tasks: int
    requestedMemOnHeap: float
    requestedMemOffHeap: float
    requestedCpu: float
    samplingPct: float
    schedulerDisplayResource: bool
    debug: bool
    profilingAndDebuggingCapable: bool
    profileActionEnabled: bool
    profilerActive: list[Any]
    componentErrors: list[ErrorRow]
    outputStats: list[OutputRow]
    executorStats: list[ExecutorRow]
    spoutSummary: list[SpoutWindow] = absent_field()
    boltStats: list[BoltWindow] = absent_field()
    inputStats: list[InputRow] = absent_field()


class ComponentError(ErrorRow):
    component: str


class TopologyErrors(StormDocument):
    topologyErrors: list[ComponentError]


class StreamValue(StormDocument):
    stream_id: str
    component_id: str = absent_field()
    value: Any


class ReportedMetrics(StormDocument):
    component_id: str
    task: str
    metrics: Any


class SpoutMetrics(StormDocument):
    id: str
    emitted: list[StreamValue]
    transferred: list[StreamValue]
    acked: list[StreamValue]
    failed: list[StreamValue]
    complete_ms_avg: list[StreamValue]


class BoltMetrics(StormDocument):
    id: str
    emitted: list[StreamValue]
    transferred: list[StreamValue]
    acked: list[StreamValue]
    failed: list[StreamValue]
    executed: list[StreamValue]
    executed_ms_avg: list[StreamValue]
    process_ms_avg: list[StreamValue]


class TopologyMetrics(StormDocument):
    window: str
    windowHint: str
    reported: list[ReportedMetrics]
    spouts: list[SpoutMetrics]
    bolts: list[BoltMetrics]


class LagResult(StormDocument):
    totalLag: float
    tasks: dict[str, float]
    partitions: dict[str, list[float | None]]


class SpoutLag(StormDocument):
    spoutId: str
    spoutType: str
    spoutLagResult: LagResult


class VisualStats(StormDocument):
    host: str = Field(alias=":host")
    port: int = Field(alias=":port")
    uptime_secs: int = Field(alias=":uptime_secs")
    transferred: dict[str, dict[str, int]] = Field(alias=":transferred")


class VisualInput(StormDocument):
    component: str = Field(alias=":component")
    stream: str = Field(alias=":stream")
    sani_stream: str = Field(alias=":sani-stream")
    grouping: str = Field(alias=":grouping")


class VisualNode(StormDocument):
    type: Kind = Field(alias=":type")
    capacity: float = Field(alias=":capacity")
    latency: float = Field(alias=":latency")
    link: str = Field(alias=":link")
    transferred: dict[str, int] = Field(alias=":transferred")
    stats: list[VisualStats] = Field(alias=":stats")
    inputs: list[VisualInput] = Field(alias=":inputs")


class VisualStream(StormDocument):
    stream: str = Field(alias=":stream")
    sani_stream: str = Field(alias=":sani-stream")
    checked: bool = Field(alias=":checked")


class VisualTable(StormDocument):
    visualizationTable: list[list[VisualStream]]
