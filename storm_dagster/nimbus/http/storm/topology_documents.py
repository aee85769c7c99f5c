"""Documents of a topology in Storm's REST, with Storm's keys."""

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
    """Statistics of a window, of a spout or of a topology."""

    windowPretty: str
    window: str
    emitted: int
    transferred: int
    acked: int
    failed: int
    completeLatency: Decimals
    latencyPercentiles: Percentiles = absent_field()


class BoltWindow(StormDocument):
    """Statistics of a window, of a bolt."""

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
    """A spout of a topology, with its newest error."""

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
    """A bolt of a topology, with its newest error."""

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
    """A topology with its statistics, workers and components."""

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
    """An executor of a component; a spout and a bolt have different latencies."""

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
    """Statistics of an output stream; a spout has more of them than a bolt."""

    stream: str
    emitted: int
    transferred: int
    acked: int = absent_field()
    failed: int = absent_field()
    completeLatency: Decimals = absent_field()
    latencyPercentiles: Percentiles = absent_field()


class InputRow(StormDocument):
    """Statistics of an input stream of a bolt."""

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
    """An error of a task."""

    errorHost: str
    errorWorkerLogLink: str
    error: str
    time: int
    errorPort: int
    errorLapsedSecs: int
    errorCount: int


class ComponentPage(StormDocument):
    """A component with its statistics, executors and errors."""

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
    """An error of a task, with its component."""

    component: str


class TopologyErrors(StormDocument):
    """Newest errors of all components."""

    topologyErrors: list[ComponentError]


class StreamValue(StormDocument):
    """A number of an output stream, or of an input stream with its component."""

    stream_id: str
    component_id: str = absent_field()
    value: Any


class ReportedMetrics(StormDocument):
    """Metrics that a task reports."""

    component_id: str
    task: str
    metrics: Any


class SpoutMetrics(StormDocument):
    """Statistics of a spout by stream."""

    id: str
    emitted: list[StreamValue]
    transferred: list[StreamValue]
    acked: list[StreamValue]
    failed: list[StreamValue]
    complete_ms_avg: list[StreamValue]


class BoltMetrics(StormDocument):
    """Statistics of a bolt by stream."""

    id: str
    emitted: list[StreamValue]
    transferred: list[StreamValue]
    acked: list[StreamValue]
    failed: list[StreamValue]
    executed: list[StreamValue]
    executed_ms_avg: list[StreamValue]
    process_ms_avg: list[StreamValue]


class TopologyMetrics(StormDocument):
    """Statistics of all components by stream, and metrics of tasks."""

    window: str
    windowHint: str
    reported: list[ReportedMetrics]
    spouts: list[SpoutMetrics]
    bolts: list[BoltMetrics]


class LagResult(StormDocument):
    """Lag of a spout, of its tasks and of their partitions."""

    totalLag: float
    tasks: dict[str, float]
    partitions: dict[str, list[float | None]]


class SpoutLag(StormDocument):
    """A spout with its lag."""

    spoutId: str
    spoutType: str
    spoutLagResult: LagResult


class VisualStats(StormDocument):
    """An executor in the graph."""

    host: str = Field(alias=":host")
    port: int = Field(alias=":port")
    uptime_secs: int = Field(alias=":uptime_secs")
    transferred: dict[str, dict[str, int]] = Field(alias=":transferred")


class VisualInput(StormDocument):
    """An input stream in the graph."""

    component: str = Field(alias=":component")
    stream: str = Field(alias=":stream")
    sani_stream: str = Field(alias=":sani-stream")
    grouping: str = Field(alias=":grouping")


class VisualNode(StormDocument):
    """A component in the graph."""

    type: Kind = Field(alias=":type")
    capacity: float = Field(alias=":capacity")
    latency: float = Field(alias=":latency")
    link: str = Field(alias=":link")
    transferred: dict[str, int] = Field(alias=":transferred")
    stats: list[VisualStats] = Field(alias=":stats")
    inputs: list[VisualInput] = Field(alias=":inputs")


class VisualStream(StormDocument):
    """A stream that a page can switch on and off."""

    stream: str = Field(alias=":stream")
    sani_stream: str = Field(alias=":sani-stream")
    checked: bool = Field(alias=":checked")


class VisualTable(StormDocument):
    """Rows of streams that a page can switch on and off."""

    visualizationTable: list[list[VisualStream]]
