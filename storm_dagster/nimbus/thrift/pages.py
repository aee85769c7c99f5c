"""TopologyInfo and the page-info structures, filled from what the topology masters report."""

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

_NO_ERRORS, _ONE_ERROR = 1, 2
_COUNTS = ("emitted", "transferred", "acked", "failed")
_LATENCIES = {
    "spout": {"complete_latency_ms": "complete_ms"},
    # A tuple is processed when its call returns.
    "bolt": {"execute_latency_ms": "execute_ms", "process_latency_ms": "execute_ms"},
}
"""Field of the aggregate statistics -> the mean that it is, by kind of component."""
_AVERAGES = {
    "spout": {"complete_ms_avg": "complete_ms"},
    "bolt": {"execute_ms_avg": "execute_ms", "process_ms_avg": "execute_ms"},
}
"""The same of the statistics of an executor."""


class Pages:
    """Answers with statistics. Every method raises :class:`NotAlive` for a topology that does not
    exist.
    """

    def __init__(self, reader: ClusterReader, summaries: Summaries) -> None:
        self._reader = reader
        self._summaries = summaries

    def topology_info(self, topology: TopologyView, options: Any = None) -> Any:
        """A TopologyInfo, with all errors of each component (the default), one or none."""
        idl = load_idl()
        snapshot = self._reader.snapshot(topology.id)
        choice = options.num_err_choice if options is not None else None
        return idl.TopologyInfo(
            **_head(idl.TopologyInfo, self._summaries.topology(topology)),
            executors=[
                _executor(one)
                for part in snapshot.components.values()
                for one in part.executors
                if one.node is not None
            ],
            errors={
                component_id: _errors(part.errors, choice)
                for component_id, part in snapshot.components.items()
            },
            component_debug={},
        )

    def topology_page(
        self, topology: TopologyView, window: str | None, include_sys: bool | None
    ) -> Any:
        """A TopologyPageInfo; the statistics of components are those of ``window``, the totals of
        every window.
        """
        idl = load_idl()
        snapshot = self._reader.snapshot(topology.id)
        window, include_sys = check_window(window), bool(include_sys)
        now = int(time.time())

        def shown(kind: Kind) -> dict[str, Any]:
            return {
                part.id: _component(part, window, include_sys)
                for part in snapshot.components_of(kind, include_sys)
            }

        return idl.TopologyPageInfo(
            **_head(idl.TopologyPageInfo, self._summaries.topology(topology)),
            topology_conf=self._shown_conf(topology),
            id_to_spout_agg_stats=shown("spout"),
            id_to_bolt_agg_stats=shown("bolt"),
            topology_stats=_topology_stats(snapshot, include_sys),
            workers=[
                worker_summary(one, now_secs=now, include_sys=include_sys)
                for one in snapshot.workers
            ],
        )

    def component_page(
        self,
        topology: TopologyView,
        component_id: str | None,
        window: str | None,
        include_sys: bool | None,
    ) -> Any:
        """A ComponentPageInfo; :class:`NotAlive` names the components when there is no such one."""
        idl = load_idl()
        snapshot = self._reader.snapshot(topology.id)
        part = snapshot.components.get(component_id or "")
        if part is None:
            raise NotAlive(
                f"topology {snapshot.name!r} has no component {component_id!r:.200}: it has {', '.join(sorted(snapshot.components))}"
            )
        window, include_sys = check_window(window), bool(include_sys)
        sums = part.windows[window].filter_system(include_sys)
        bolt = part.kind == "bolt"
        return idl.ComponentPageInfo(
            component_id=part.id,
            component_type=idl.ComponentType.BOLT if bolt else idl.ComponentType.SPOUT,
            topology_id=snapshot.id,
            topology_name=snapshot.name,
            num_executors=len(part.executors),
            num_tasks=len(part.tasks),
            window_to_stats={
                name: _aggregate(part, part.windows[name].totals(include_sys=include_sys))
                for name in WINDOWS
            },
            gsid_to_input_stats=_inputs(sums) if bolt else None,
            sid_to_output_stats=_outputs(part, sums),
            exec_stats=[
                idl.ExecutorAggregateStats(
                    exec_summary=_executor(one, stats=False),
                    stats=_aggregate(
                        part,
                        one.windows[window].totals(include_sys=include_sys),
                        capacity=one.capacity,
                    ),
                )
                for one in part.executors
                if one.node is not None
            ],
            errors=_errors(part.errors),
            topology_status=snapshot.status,
            resources_map={},
        )

    def supervisor_page(
        self, supervisor_id: str | None, host: str | None, include_sys: bool | None
    ) -> Any:
        """A SupervisorPageInfo of one supervisor, or of all on a host; :class:`NotAlive` when there
        is none.
        """
        now = int(time.time())
        every = supervisors_of(self._reader.view(), now_secs=now, workers=True)
        chosen = [
            one
            for one in every
            if one.id == supervisor_id or (not supervisor_id and one.info.host == host)
        ]
        if not chosen:
            wanted = (
                f"supervisor {supervisor_id!r:.200}"
                if supervisor_id
                else f"supervisor on {host!r:.200}"
            )
            alive = ", ".join(one.id for one in every) or "none"
            raise NotAlive(f"no {wanted} is alive (alive: {alive})")
        return load_idl().SupervisorPageInfo(
            supervisor_summaries=[self._summaries.supervisor(one) for one in chosen],
            worker_summaries=[
                worker_summary(worker, now_secs=now, include_sys=bool(include_sys))
                for one in chosen
                for worker in one.workers
            ],
        )

    def conf_text(self, topology: TopologyView) -> str:
        """The normalized conf with the cluster's below it, as JSON
        (:meth:`ClusterReader.shown_conf`).
        """
        return json.dumps(self._reader.shown_conf(topology.id), default=str)

    def _shown_conf(self, topology: TopologyView) -> str:
        try:
            return self.conf_text(topology)
        except Unavailable:
            return "{}"  # This nimbus lacks the code; the rest of the page is known.


def _head(kind: Any, summary: Any) -> dict[str, Any]:
    """The fields of a TopologySummary that this structure has, too."""
    names = {entry[1] for entry in kind.thrift_spec.values()}
    return {name: value for name, value in vars(summary).items() if name in names}


def _errors(errors: tuple[TaskError, ...], choice: int | None = None) -> list[Any]:
    if choice == _NO_ERRORS:
        return []
    return [_error(one) for one in (errors[:1] if choice == _ONE_ERROR else errors)]


def _error(error: TaskError) -> Any:
    return load_idl().ErrorInfo(
        error=error.error,
        error_time_secs=i32(error.time),
        host=error.host,
        port=i32(error.port),
        count=error.count,
    )


def _executor(one: ExecutorSnapshot, *, stats: bool = True) -> Any:
    idl = load_idl()
    return idl.ExecutorSummary(
        executor_info=idl.ExecutorInfo(task_start=one.first, task_end=one.last),
        component_id=one.component,
        host=one.host,
        port=one.port,
        uptime_secs=i32(one.uptime_secs),
        stats=_executor_stats(one) if stats and one.reported else None,
    )


def _executor_stats(one: ExecutorSnapshot) -> Any:
    idl = load_idl()

    def by_stream(name: str) -> dict[str, dict[str, Any]]:
        return {window: dict(getattr(sums, name)) for window, sums in one.windows.items()}

    def by_input(name: str) -> dict[str, dict[Any, Any]]:
        return {
            window: {_stream_id(key): value for key, value in getattr(sums, name).items()}
            for window, sums in one.windows.items()
        }

    bolt, of = one.kind == "bolt", by_input if one.kind == "bolt" else by_stream
    stats = {name: of(name) for name in (*_COUNTS[2:], *(("executed",) if bolt else ()))}
    stats |= {field: of(name) for field, name in _AVERAGES[one.kind].items()}
    return idl.ExecutorStats(
        emitted=by_stream("emitted"),
        transferred=by_stream("transferred"),
        specific=idl.ExecutorSpecificStats(
            **{one.kind: (idl.BoltStats if bolt else idl.SpoutStats)(**stats)}
        ),
        rate=1.0,
    )


def _stream_id(key: str) -> Any:
    component, stream = split_input(key)
    return load_idl().GlobalStreamId(componentId=component, streamId=stream)


def _component(part: ComponentSnapshot, window: str, include_sys: bool) -> Any:
    stats = _aggregate(
        part,
        part.windows[window].totals(include_sys=include_sys),
        capacity=part.capacity,
        num_executors=len(part.executors),
        num_tasks=len(part.tasks),
    )
    if part.errors:
        stats.last_error = _error(part.errors[0])
    return stats


def _stats(
    kind: Kind, totals: Totals, counts: Iterable[str] = _COUNTS, *, means: bool = True, **more: Any
) -> Any:
    """The ``counts`` of the totals and, with ``means``, the numbers of a spout or a bolt that the
    other kind lacks.

    ``more`` are further fields of the statistics that both kinds have, and ``capacity``.
    """
    idl, bolt = load_idl(), kind == "bolt"
    specific = (
        {field: getattr(totals, name) for field, name in _LATENCIES[kind].items()} if means else {}
    )
    capacity = more.pop("capacity", None)
    if bolt:
        specific |= {"executed": totals.executed if means else None, "capacity": capacity}
    own = (idl.BoltAggregateStats if bolt else idl.SpoutAggregateStats)(**specific)
    return idl.ComponentAggregateStats(
        type=idl.ComponentType.BOLT if bolt else idl.ComponentType.SPOUT,
        common_stats=idl.CommonAggregateStats(
            **{name: getattr(totals, name) for name in counts}, **more
        ),
        specific_stats=idl.SpecificAggregateStats(**{kind: own}),
    )


def _aggregate(part: ComponentSnapshot, totals: Totals, **more: Any) -> Any:
    return _stats(part.kind, totals, resources_map={}, **more)


def _inputs(sums: WindowStats) -> dict[Any, Any]:
    """Input statistics of a bolt by stream."""
    return {_stream_id(key): _stats("bolt", sums.of(key), _COUNTS[2:]) for key in sums.inputs}


def _outputs(part: ComponentSnapshot, sums: WindowStats) -> dict[str, Any]:
    """Output statistics by stream; of a spout also acks and failures."""
    bolt = part.kind == "bolt"
    counts = _COUNTS[:2] if bolt else _COUNTS
    return {
        stream: _stats(part.kind, sums.of(stream), counts, means=not bolt)
        for stream in sums.outputs
    }


def _topology_stats(snapshot: TopologySnapshot, include_sys: bool) -> Any:
    totals = {window: snapshot.totals(window, include_sys=include_sys) for window in WINDOWS}
    latencies = {window: sums.complete_ms for window, sums in totals.items()}
    counts = {
        f"window_to_{name}": {window: getattr(sums, name) for window, sums in totals.items()}
        for name in _COUNTS
    }
    return load_idl().TopologyStats(window_to_complete_latencies_ms=latencies, **counts)
