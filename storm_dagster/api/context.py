"""Context of a running task: its identity and its topology."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from storm_dagster.api.state import TaskState
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.names import topology_name_of
from storm_dagster.model.topology import DEFAULT_STREAM, InputSpec, TopologySpec
from storm_dagster.security.spark_remote import ClusterSpark


def _grouping(grouping: Any) -> dict[str, Any]:
    return {"type": grouping.type.upper(), "fields": list(grouping.fields)}


_CONTEXT_VALUES: "dict[str, Callable[[TopologyContext], Any]]" = {
    "task->component": lambda context: {str(task): name for task, name in context._tasks.items()},
    "taskid": lambda context: context.task_id,
    "componentid": lambda context: context.component,
    "stream->target->grouping": lambda context: context._targets(),
    "streams": lambda context: context.streams,
    "stream->outputfields": lambda context: {
        stream: context.output_fields(stream) for stream in context.streams
    },
    "source->stream->grouping": lambda context: context._sources(
        lambda item: _grouping(item.grouping)
    ),
    "source->stream->fields": lambda context: context._sources(
        lambda item: context.source_fields(item.component, item.stream)
    ),
}
"""Values of the context by the keys of the multilang protocol."""


class TopologyContext:
    """Identity of a task, and the shape of its topology. Read-only for components."""

    def __init__(
        self,
        *,
        topology_id: str,
        spec: TopologySpec,
        tasks: Mapping[int, str],
        task_id: int,
        component: str,
        conf: Mapping[str, Any],
        host: str = "127.0.0.1",
        port: int = 0,
        node: str = "",
        archive: Path | None = None,
        state_dir: Path | None = None,
        owns: Callable[[], bool] | None = None,
        now_ms: Callable[[], int] | None = None,
        assignment_version: int = 0,
        open_state: "Callable[[TopologyContext], TaskState] | None" = None,
        open_positions: "Callable[[TopologyContext], Any] | None" = None,
        cluster_spark: ClusterSpark | None = None,
    ) -> None:
        self.topology_id = topology_id
        self.spec = spec
        self.task_id = task_id
        self.component = component
        self.conf = conf
        self.host = host
        self.port = port
        self.node = node
        self.archive = archive
        """The unpacked archive of the topology, or ``None`` in a test harness."""
        self._tasks = tasks
        """Task id -> component id, of the whole topology."""
        self._state_dir = state_dir
        self._state: TaskState | None = None
        self._on_close: list[Callable[[], None]] = []
        """Called by :meth:`close`, to close the files that the worker opened beside the state."""
        self._open_state = open_state
        self._open_positions = open_positions
        """Opens the store of a source's positions (of a :class:`SourceSpout`)."""
        self._cluster_spark = cluster_spark or ClusterSpark()
        """Spark Connect servers that get the cluster's token, and those that may be sent to."""
        self._owns = owns
        """True while this process owns the task; ``None``: it always does."""
        self._now_ms = now_ms
        self.assignment_version = assignment_version
        """Version of the assignment by which the task was opened."""
        self.batch_id = ""
        """Digest of the rows that the function of a :class:`SparkBolt` is called with, in order.

        Equal rows have an equal id, in every task and at every call.
        """

    def now_ms(self) -> int:
        """Milliseconds since 1970, by the worker's monotonic clock.

        Windows are cut by this clock. The test harness may simulate it.
        """
        return self._now_ms() if self._now_ms is not None else int(time.time() * 1000)

    @property
    def topology_name(self) -> str:
        """Name of the topology, the same across its deployments."""
        return self.spec.name or topology_name_of(self.topology_id)

    @property
    def task_to_component(self) -> dict[int, str]:
        """Task id -> component id, of the whole topology."""
        return dict(self._tasks)

    @property
    def task_index(self) -> int:
        """Index of this task in its component, from 0."""
        return self.component_tasks(self.component).index(self.task_id)

    def component_tasks(self, component: str) -> list[int]:
        """Task ids of a component, ascending."""
        return sorted(task for task, name in self._tasks.items() if name == component)

    @property
    def streams(self) -> list[str]:
        """Output streams of this task's component."""
        part = self.spec.component(self.component)
        if part is None:
            return []
        return [name for name in part.outputs if not name.startswith("__")]

    def output_fields(self, stream: str = DEFAULT_STREAM) -> list[str]:
        """Fields of one of this component's streams."""
        return self.source_fields(self.component, stream)

    def source_fields(self, component: str, stream: str = DEFAULT_STREAM) -> list[str]:
        """Fields of a stream of any component.

        Raises :class:`InvalidRequest` when the component has no such stream.
        """
        part = self.spec.component(component)
        declared = part.outputs.get(stream) if part else None
        if declared is None:
            raise InvalidRequest(f"component {component!r} has no stream {stream!r}")
        return list(declared.fields)

    @property
    def state(self) -> TaskState:
        """The task's durable key-value store, opened at first use."""
        if self._state is None:
            if self._open_state is None:
                raise InvalidRequest("this task has no state folder: set topology.state.dir")
            self._state = self._open_state(self)
        return self._state

    def restrict(self, owns: Callable[[], bool]) -> None:
        """Allow writes of the state only while ``owns()`` is true.

        The worker calls it before the state is opened.
        """
        self._owns = owns

    def may_write(self) -> bool:
        """True if this process still owns the task."""
        return self._owns is None or self._owns()

    def close(self) -> None:
        """Close the state, if it was opened, and the dead letters."""
        for action in self._on_close:
            action()
        if self._state is not None:
            self._state.close()
            self._state = None

    # streamparse passes components a map; _CONTEXT_VALUES has its keys.
    def __getitem__(self, key: str) -> Any:
        return _CONTEXT_VALUES[key](self)

    def _targets(self) -> dict[str, dict[str, Any]]:
        """Own stream -> reading component -> grouping."""
        targets: dict[str, dict[str, Any]] = {stream: {} for stream in self.streams}
        for name, _, reader in self.spec.components():
            for item in reader.inputs:
                if item.component == self.component and item.stream in targets:
                    targets[item.stream][name] = _grouping(item.grouping)
        return targets

    def _sources(self, value_of: Callable[[InputSpec], Any]) -> dict[str, dict[str, Any]]:
        """Source component -> stream -> ``value_of(input)``."""
        part = self.spec.component(self.component)
        sources: dict[str, dict[str, Any]] = {}
        for item in part.inputs if part else ():
            if not item.component.startswith("__"):
                sources.setdefault(item.component, {})[item.stream] = value_of(item)
        return sources

    def keys(self) -> tuple[str, ...]:
        """Keys of the map, which is the context of the multilang protocol."""
        return tuple(_CONTEXT_VALUES)

    def __iter__(self) -> Iterator[str]:
        return iter(_CONTEXT_VALUES)

    def __contains__(self, key: object) -> bool:
        return key in _CONTEXT_VALUES

    def get(self, key: str, default: Any = None) -> Any:
        """As ``context[key]``, or ``default``."""
        return _CONTEXT_VALUES[key](self) if key in _CONTEXT_VALUES else default
