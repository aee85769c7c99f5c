"""TopologyInfo and the page structures, from the reports of the topology masters."""

import json
import time
from collections.abc import Iterable
from typing import Any

from storm_dagster.core.snapshot.cluster import supervisors_of
from storm_dagster.core.snapshot.tasks import ExecutorSnapshot
from storm_dagster.core.snapshot.topology import ComponentSnapshot, TopologySnapshot
from storm_dagster.core.snapshot.windows import (
    WINDOWS,
    Kind,
    Totals,
    WindowStats,
    check_window,
    split_input,
)
from storm_dagster.model.errors import NotAlive, Unavailable
from storm_dagster.model.records import TaskError
from storm_dagster.model.view import TopologyView
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.thrift.idl import load_idl
from storm_dagster.nimbus.thrift.summaries import Summaries, i32, worker_summary
from storm_dagster.operations.submit.open_tokens import StartingTopology

_NO_ERRORS = 1
_ONE_ERROR = 2
"""Values of Storm's NumErrorsChoice; any other means all errors."""
_COUNTS = ("emitted", "transferred", "acked", "failed")
_OUTPUT_COUNTS = ("emitted", "transferred")
_ACK_COUNTS = ("acked", "failed")
"""Counts of a component, of a bolt's output streams, and of its input streams."""
_LATENCIES = {
    "spout": {"complete_latency_ms": "complete_ms"},
    # A tuple is processed when its call returns.
    "bolt": {"execute_latency_ms": "execute_ms", "process_latency_ms": "execute_ms"},
}
"""Kind of component -> field of its aggregate statistics -> attribute of the totals."""
_AVERAGES = {
    "spout": {"complete_ms_avg": "complete_ms"},
    "bolt": {"execute_ms_avg": "execute_ms", "process_ms_avg": "execute_ms"},
}
"""The same for the statistics of an executor."""


class Pages:
    """Structures with statistics.

    Every method raises :class:`NotAlive` for a topology that does not exist.
    """

    def __init__(self, reader: ClusterReader, summaries: Summaries) -> None:
        self._reader = reader
        self._summaries = summaries

    def topology_info(self, topology: TopologyView, options: Any = None) -> Any:
        """Return a TopologyInfo.

        It has all errors of each component (the default), the newest one, or none.
        """
        idl = load_idl()
        snapshot = self._reader.snapshot(topology.id)
        choice = options.num_err_choice if options is not None else None
        return idl.TopologyInfo(
            **_head(idl.TopologyInfo, self._summaries.topology(topology)),
            executors=_placed_executors(snapshot),
            errors={
                component_id: _errors(component.errors, choice)
                for component_id, component in snapshot.components.items()
            },
            component_debug={},
        )

    def topology_page(
        self, topology: TopologyView, window: str | None, include_sys: bool | None
    ) -> Any:
        """Return a TopologyPageInfo.

        The statistics of components are those of ``window``; totals have every window.
        """
        idl = load_idl()
        snapshot = self._reader.snapshot(topology.id)
        window = check_window(window)
        include_sys = bool(include_sys)
        now_secs = int(time.time())
        return idl.TopologyPageInfo(
            **_head(idl.TopologyPageInfo, self._summaries.topology(topology)),
            topology_conf=self._conf_text_or_empty(topology),
            id_to_spout_agg_stats=_components(snapshot, "spout", window, include_sys),
            id_to_bolt_agg_stats=_components(snapshot, "bolt", window, include_sys),
            topology_stats=_topology_stats(snapshot, include_sys),
            workers=[
                worker_summary(worker, now_secs=now_secs, include_sys=include_sys)
                for worker in snapshot.workers
            ],
        )

    def starting_info(self, topology: StartingTopology, options: Any = None) -> Any:
        """Return a TopologyInfo of a topology that is being submitted, without executors."""
        idl = load_idl()
        return idl.TopologyInfo(
            **_head(idl.TopologyInfo, self._summaries.starting(topology)),
            executors=[],
            errors={},
            component_debug={},
        )

    def starting_page(
        self, topology: StartingTopology, window: str | None, include_sys: bool | None
    ) -> Any:
        """Return a TopologyPageInfo of a topology that is being submitted.

        It has no components, and its statistics are 0.
        """
        idl = load_idl()
        check_window(window)
        zero = dict.fromkeys(WINDOWS, 0)
        return idl.TopologyPageInfo(
            **_head(idl.TopologyPageInfo, self._summaries.starting(topology)),
            topology_conf="{}",
            id_to_spout_agg_stats={},
            id_to_bolt_agg_stats={},
            topology_stats=idl.TopologyStats(
                window_to_emitted=zero,
                window_to_transferred=zero,
                window_to_acked=zero,
                window_to_failed=zero,
                window_to_complete_latencies_ms=dict.fromkeys(WINDOWS, 0.0),
            ),
            workers=[],
        )

    def component_page(
        self,
        topology: TopologyView,
        component_id: str | None,
        window: str | None,
        include_sys: bool | None,
    ) -> Any:
        """Return a ComponentPageInfo.

        :class:`NotAlive` names the components if the topology has no component of that id.
        """
        idl = load_idl()
        snapshot = self._reader.snapshot(topology.id)
        component = snapshot.components.get(component_id or "")
        if component is None:
            raise NotAlive(
                f"topology {snapshot.name!r} has no component {component_id!r:.200}: "
                f"it has {', '.join(sorted(snapshot.components))}"
            )
        window = check_window(window)
        include_sys = bool(include_sys)
        window_stats = component.windows[window].filter_system(include_sys)
        stats_by_window: dict[str, Any] = {}
        for name in WINDOWS:
            totals = component.windows[name].totals(include_sys=include_sys)
            stats_by_window[name] = _aggregate(component, totals)
        executor_stats: list[Any] = []
        for executor in component.executors:
            if executor.node is None:  # Not placed: its summary would need a host and a port.
                continue
            totals = executor.windows[window].totals(include_sys=include_sys)
            stats = idl.ExecutorAggregateStats(
                exec_summary=_executor(executor, stats=False),
                stats=_aggregate(component, totals, capacity=executor.capacity),
            )
            executor_stats.append(stats)
        return idl.ComponentPageInfo(
            component_id=component.id,
            component_type=_component_type(component.kind),
            topology_id=snapshot.id,
            topology_name=snapshot.name,
            num_executors=len(component.executors),
            num_tasks=len(component.tasks),
            window_to_stats=stats_by_window,
            gsid_to_input_stats=_inputs(window_stats) if component.kind == "bolt" else None,
            sid_to_output_stats=_outputs(component, window_stats),
            exec_stats=executor_stats,
            errors=_errors(component.errors),
            topology_status=snapshot.status,
            resources_map={},
        )

    def supervisor_page(
        self, supervisor_id: str | None, host: str | None, include_sys: bool | None
    ) -> Any:
        """Return a SupervisorPageInfo of one supervisor, or of all on a host.

        With an id the host is ignored. :class:`NotAlive` if there is none.
        """
        now_secs = int(time.time())
        live_supervisors = supervisors_of(self._reader.view(), now_secs=now_secs, workers=True)
        supervisors = [
            supervisor
            for supervisor in live_supervisors
            if supervisor.id == supervisor_id
            or (not supervisor_id and supervisor.info.host == host)
        ]
        if not supervisors:
            if supervisor_id:
                title = f"supervisor {supervisor_id!r:.200}"
            else:
                title = f"supervisor on {host!r:.200}"
            alive = ", ".join(supervisor.id for supervisor in live_supervisors) or "none"
            raise NotAlive(f"no {title} is alive (alive: {alive})")
        worker_summaries: list[Any] = []
        for supervisor in supervisors:
            for worker in supervisor.workers:
                summary = worker_summary(worker, now_secs=now_secs, include_sys=bool(include_sys))
                worker_summaries.append(summary)
        return load_idl().SupervisorPageInfo(
            supervisor_summaries=[
                self._summaries.supervisor(supervisor) for supervisor in supervisors
            ],
            worker_summaries=worker_summaries,
        )

    def conf_text(self, topology: TopologyView) -> str:
        """Return the normalized conf over the cluster's conf, as JSON.

        See :meth:`ClusterReader.shown_conf`.
        """
        return json.dumps(self._reader.shown_conf(topology.id), default=str)

    def _conf_text_or_empty(self, topology: TopologyView) -> str:
        try:
            return self.conf_text(topology)
        except Unavailable:
            # This nimbus lacks the code; the page has its other fields.
            return "{}"


def _head(kind: Any, summary: Any) -> dict[str, Any]:
    """Fields of a TopologySummary that the structure ``kind`` has as well."""
    names = {field_name for _, field_name, *_ in kind.thrift_spec.values()}
    return {name: value for name, value in vars(summary).items() if name in names}


def _component_type(kind: Kind) -> Any:
    component_type = load_idl().ComponentType
    return component_type.BOLT if kind == "bolt" else component_type.SPOUT


def _errors(errors: tuple[TaskError, ...], choice: int | None = None) -> list[Any]:
    """ErrorInfos of the errors, newest first; ``choice`` is a NumErrorsChoice."""
    if choice == _NO_ERRORS:
        return []
    if choice == _ONE_ERROR:
        errors = errors[:1]
    return [_error(error) for error in errors]


def _error(error: TaskError) -> Any:
    return load_idl().ErrorInfo(
        error=error.error,
        error_time_secs=i32(error.time),
        host=error.host,
        port=i32(error.port),
        count=error.count,
    )


def _placed_executors(snapshot: TopologySnapshot) -> list[Any]:
    summaries: list[Any] = []
    for component in snapshot.components.values():
        placed = [executor for executor in component.executors if executor.node is not None]
        summaries += map(_executor, placed)
    return summaries


def _executor(executor: ExecutorSnapshot, *, stats: bool = True) -> Any:
    idl = load_idl()
    return idl.ExecutorSummary(
        executor_info=idl.ExecutorInfo(task_start=executor.first, task_end=executor.last),
        component_id=executor.component,
        host=executor.host,
        port=executor.port,
        uptime_secs=i32(executor.uptime_secs),
        stats=_executor_stats(executor) if stats and executor.reported else None,
    )


def _executor_stats(executor: ExecutorSnapshot) -> Any:
    """Statistics of an executor: outputs by stream, acks of a bolt by input.

    ``attributes`` maps the fields of the structure to attributes of the snapshot.
    """
    idl = load_idl()
    attributes = {name: name for name in _ACK_COUNTS} | _AVERAGES[executor.kind]
    if executor.kind == "bolt":
        attributes["executed"] = "executed"
        stats = {
            field: _by_window_and_input(executor, attribute)
            for field, attribute in attributes.items()
        }
        specific = idl.ExecutorSpecificStats(bolt=idl.BoltStats(**stats))
    else:
        stats = {
            field: _by_window_and_stream(executor, attribute)
            for field, attribute in attributes.items()
        }
        specific = idl.ExecutorSpecificStats(spout=idl.SpoutStats(**stats))
    return idl.ExecutorStats(
        emitted=_by_window_and_stream(executor, "emitted"),
        transferred=_by_window_and_stream(executor, "transferred"),
        specific=specific,
        rate=1.0,
    )


def _by_window_and_stream(executor: ExecutorSnapshot, attribute: str) -> dict[str, dict[str, Any]]:
    """Window -> output stream -> value."""
    return {window: dict(getattr(stats, attribute)) for window, stats in executor.windows.items()}


def _by_window_and_input(executor: ExecutorSnapshot, attribute: str) -> dict[str, dict[Any, Any]]:
    """Window -> GlobalStreamId of an input -> value."""
    values: dict[str, dict[Any, Any]] = {}
    for window, stats in executor.windows.items():
        by_input = getattr(stats, attribute)
        values[window] = {_stream_id(key): value for key, value in by_input.items()}
    return values


def _stream_id(key: str) -> Any:
    component, stream = split_input(key)
    return load_idl().GlobalStreamId(componentId=component, streamId=stream)


def _components(
    snapshot: TopologySnapshot, kind: Kind, window: str, include_sys: bool
) -> dict[str, Any]:
    """Component id -> its statistics in the window, of the components of one kind."""
    stats_by_id: dict[str, Any] = {}
    for component in snapshot.components_of(kind, include_sys):
        stats = _aggregate(
            component,
            component.windows[window].totals(include_sys=include_sys),
            capacity=component.capacity,
            num_executors=len(component.executors),
            num_tasks=len(component.tasks),
        )
        if component.errors:
            stats.last_error = _error(component.errors[0])
        stats_by_id[component.id] = stats
    return stats_by_id


def _aggregate(
    component: ComponentSnapshot,
    totals: Totals,
    *,
    capacity: float | None = None,
    **common_fields: Any,
) -> Any:
    """Statistics of a component or of one of its executors.

    ``common_fields`` are further fields that spouts and bolts both have.
    """
    return _stats(component.kind, totals, capacity=capacity, resources_map={}, **common_fields)


def _stats(
    kind: Kind,
    totals: Totals,
    counts: Iterable[str] = _COUNTS,
    *,
    means: bool = True,
    capacity: float | None = None,
    **common_fields: Any,
) -> Any:
    """Statistics with the ``counts`` of the totals.

    With ``means`` they also have the latencies, and of a bolt the number of executed tuples.
    ``capacity`` is that of a bolt. ``common_fields`` are further fields that spouts and bolts both
    have.
    """
    idl = load_idl()
    fields: dict[str, Any] = {}
    if means:
        for field, attribute in _LATENCIES[kind].items():
            fields[field] = getattr(totals, attribute)
    if kind == "bolt":
        fields["executed"] = totals.executed if means else None
        fields["capacity"] = capacity
        specific = idl.SpecificAggregateStats(bolt=idl.BoltAggregateStats(**fields))
    else:
        specific = idl.SpecificAggregateStats(spout=idl.SpoutAggregateStats(**fields))
    common_fields.update({name: getattr(totals, name) for name in counts})
    return idl.ComponentAggregateStats(
        type=_component_type(kind),
        common_stats=idl.CommonAggregateStats(**common_fields),
        specific_stats=specific,
    )


def _inputs(window_stats: WindowStats) -> dict[Any, Any]:
    """Input statistics of a bolt by stream."""
    return {
        _stream_id(key): _stats("bolt", window_stats.of(key), _ACK_COUNTS)
        for key in window_stats.inputs
    }


def _outputs(component: ComponentSnapshot, window_stats: WindowStats) -> dict[str, Any]:
    """Output statistics by stream; of a spout also acks and failures."""
    stats_by_stream: dict[str, Any] = {}
    for stream in window_stats.outputs:
        totals = window_stats.of(stream)
        if component.kind == "bolt":
            stats = _stats("bolt", totals, _OUTPUT_COUNTS, means=False)
        else:
            stats = _stats("spout", totals)
        stats_by_stream[stream] = stats
    return stats_by_stream


def _topology_stats(snapshot: TopologySnapshot, include_sys: bool) -> Any:
    """TopologyStats: each number by window."""
    totals_by_window = {
        window: snapshot.totals(window, include_sys=include_sys) for window in WINDOWS
    }

    def by_window(attribute: str) -> dict[str, Any]:
        return {window: getattr(totals, attribute) for window, totals in totals_by_window.items()}

    return load_idl().TopologyStats(
        window_to_emitted=by_window("emitted"),
        window_to_transferred=by_window("transferred"),
        window_to_acked=by_window("acked"),
        window_to_failed=by_window("failed"),
        window_to_complete_latencies_ms=by_window("complete_ms"),
    )
