"""Bolt that keeps the last tuples of some streams, for the display of a local run.

It reads only the streams that are shown. A direct stream has no further readers, so it is not
shown.
"""

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from storm_dagster.api.bolts import Bolt
from storm_dagster.api.specs import Grouping
from storm_dagster.api.tuples import Tuple
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.fusion import is_spark_component
from storm_dagster.model.topology import ComponentObject, ComponentSpec, InputSpec, TopologySpec

TAIL = "run.tail"
"""Component id of the bolt."""
MAX_TUPLES = 5
"""Number of tuples kept for each shown component."""


class TailBolt(Bolt):
    """Bolt that keeps the last tuples of each shown component.

    ``shown``: rows (component, stream, components that are shown by this stream).
    """

    def __init__(self, shown: Sequence[Any]) -> None:
        self._shown_by = {(source, stream): names for source, stream, names in shown}
        self.last: dict[str, deque[Tuple]] = {}
        """Shown component -> its last tuples, oldest first."""
        for _, _, names in shown:
            for name in names:
                self.last[name] = deque(maxlen=MAX_TUPLES)

    def process(self, tup: Tuple) -> None:
        """Keep the tuple."""
        for name in self._shown_by[tup.component, tup.stream]:
            self.last[name].append(tup)


def sinks(spec: TopologySpec) -> list[str]:
    """Return the bolts whose output no other bolt reads, in declared order.

    Those that Spark runs are left out: to show their rows would take all of them out of Spark.
    """
    sources: set[str] = set()
    for part in spec.bolts.values():
        sources.update(item.component for item in part.inputs)
    return [
        name
        for name, part in spec.bolts.items()
        if name not in sources and not is_spark_component(part)
    ]


def shown_streams(
    spec: TopologySpec, components: Collection[str]
) -> dict[tuple[str, str], list[str]]:
    """Return (component, stream) -> the components whose tuples are shown by that stream.

    A component is shown by what it emits; without output streams, by what it reads. Raises
    :class:`InvalidRequest` for a component that does not exist.
    """
    streams: dict[tuple[str, str], list[str]] = {}
    for name in components:
        part = spec.component(name)
        if part is None:
            names = ", ".join([*spec.spouts, *spec.bolts])
            raise InvalidRequest(f"--show {name!r} is no component of the topology: use {names}")
        sources = [(name, stream) for stream in part.outputs]
        if not sources:
            sources = [(item.component, item.stream) for item in part.inputs]
        for source, stream in sources:
            sender = spec.component(source)
            if sender is not None and not sender.outputs[stream].direct:
                streams.setdefault((source, stream), []).append(name)
    return streams


def with_tail(spec: TopologySpec, components: Collection[str]) -> TopologySpec:
    """Return the topology with a :class:`TailBolt` that shows these components.

    It is unchanged if none of their streams can be read.
    """
    streams = shown_streams(spec, components)
    if not streams:
        return spec
    inputs: list[InputSpec] = []
    shown: list[list[Any]] = []
    for (source, stream), names in streams.items():
        inputs.append(InputSpec(component=source, stream=stream, grouping=Grouping.GLOBAL))
        shown.append([source, stream, names])
    code = ComponentObject(python=f"{__name__}:TailBolt", args={"shown": shown})
    tail = ComponentSpec(object=code, inputs=tuple(inputs))
    return spec.model_copy(update={"bolts": {**spec.bolts, TAIL: tail}})
