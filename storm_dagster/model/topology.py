"""Topology: components, streams, inputs, groupings, parallelism.

This form travels as JSON: a client describes its topology by it, nimbus stores it as the blob
``<id>-stormcode.ser``, and workers build the components from it. It names code
(``"module:QualName"``), and never contains it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.groupings import GROUPINGS, GroupingSpec

DEFAULT_STREAM = "default"


class _Frozen(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")


class ComponentObject(_Frozen):
    """Implementation of a component: a Python class or a shell command.

    The class is given by its name, with arguments of JSON.
    """

    python: str | None = None
    """``"module:QualName"`` of a Spout or Bolt class (or factory); built as ``cls(**args)``."""
    args: dict[str, Any] = {}
    shell: tuple[str, ...] | None = None
    """Command line of a multilang component; its working directory is the archive's
    ``resources/``.
    """

    @model_validator(mode="after")
    def _exactly_one(self) -> "ComponentObject":
        if (self.python is None) == (self.shell is None):
            raise ValueError("a component object names either 'python' or 'shell'")
        if self.shell is not None and not self.shell:
            raise ValueError("a shell component needs a command")
        return self


FIELD_TYPES = ("str", "int", "float", "bool", "bytes", "list", "dict", "datetime", "any")
"""Types that a field may declare. ``float`` also takes integers; only ``any`` takes ``None``."""


class StreamSpec(_Frozen):
    """Fields of one output stream.

    ``direct`` streams are sent to one chosen task.
    """

    fields: tuple[str, ...] = ()
    direct: bool = False
    types: tuple[str, ...] = ()
    """One of :data:`FIELD_TYPES` for each field; empty: values are not checked."""


class InputSpec(_Frozen):
    """One subscription: the stream of a component, and the grouping."""

    component: str
    stream: str = DEFAULT_STREAM
    grouping: GroupingSpec


class ComponentSpec(_Frozen):
    """One spout or bolt."""

    object: "ComponentObject"
    parallelism: int = 1
    """Number of executors, and of tasks, unless the conf's ``topology.tasks`` is higher."""
    conf: dict[str, Any] = {}
    """Component conf: overrides topology conf for this component."""
    inputs: tuple[InputSpec, ...] = ()
    outputs: dict[str, StreamSpec] = {}


class TopologySpec(_Frozen):
    """A topology. The order of spouts and bolts is the declared order.

    It decides task ids.
    """

    name: str = ""
    spouts: dict[str, ComponentSpec] = Field(default_factory=dict)
    bolts: dict[str, ComponentSpec] = Field(default_factory=dict)
    conf: dict[str, Any] = {}
    """Conf that the author gave the topology itself; a submission's conf overrides it."""

    def components(self) -> Iterator[tuple[str, Literal["spout", "bolt"], ComponentSpec]]:
        """Every component as (id, type, spec): bolts, then spouts.

        Both are in declared order.
        """
        for component_id, spec in self.bolts.items():
            yield component_id, "bolt", spec
        for component_id, spec in self.spouts.items():
            yield component_id, "spout", spec

    def component(self, component_id: str) -> ComponentSpec | None:
        """The component of that id, or ``None``."""
        return self.bolts.get(component_id) or self.spouts.get(component_id)

    def to_json(self) -> bytes:
        """The blob form; :func:`decode_topology` reads it back."""
        return self.model_dump_json(exclude_defaults=True).encode()


def decode_topology(raw: bytes | str) -> TopologySpec:
    """Decode a topology from JSON.

    :class:`InvalidTopology` names the first error.
    """
    try:
        return TopologySpec.model_validate_json(raw)
    except (ValidationError, UnicodeDecodeError, RecursionError) as error:
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "topology"
            text = f"{field}: {first['msg']}"
        else:
            text = str(error)
        raise InvalidTopology(f"the topology document is not valid: {text}") from None


def _hint(wrong_name: str, names: Iterable[str], plural: str) -> str:
    """Hint at the nearest name, else at all of them.

    ``plural`` is the noun for them.
    """
    from difflib import get_close_matches

    sorted_names = sorted(names)
    nearest = get_close_matches(wrong_name, sorted_names, n=1, cutoff=0.5)
    if nearest:
        return f"did you mean {nearest[0]!r}?"
    if not sorted_names:
        return f"it has no {plural}"
    return f"{plural} are {', '.join(sorted_names[:20])}"


def check_inputs(spec: TopologySpec, bolt_id: str) -> dict[tuple[str, str], StreamSpec]:
    """(component, stream) -> the stream, for each input of a bolt.

    :class:`InvalidTopology` unless each stream exists, is read once, and has the fields that it is
    grouped by.
    """
    streams: dict[tuple[str, str], StreamSpec] = {}
    for item in spec.bolts[bolt_id].inputs:
        source = spec.component(item.component)
        if source is None:
            hint = _hint(item.component, [*spec.bolts, *spec.spouts], "components")
            raise InvalidTopology(
                f"bolt {bolt_id!r} subscribes to component {item.component!r}, which does not"
                f" exist: {hint}"
            )
        subscription = (
            f"bolt {bolt_id!r} subscribes to stream {item.stream!r} of {item.component!r}"
        )
        stream = source.outputs.get(item.stream)
        if stream is None:
            raise InvalidTopology(
                f"{subscription}, which does not declare it:"
                f" {_hint(item.stream, source.outputs, 'streams')}"
            )
        if (item.component, item.stream) in streams:
            raise InvalidTopology(
                f"{subscription} twice, so that it would get every tuple twice: keep one grouping"
            )
        streams[item.component, item.stream] = stream
        if GROUPINGS[item.grouping.type].needs != "fields":
            continue
        for name in item.grouping.fields:
            if name not in stream.fields:
                raise InvalidTopology(
                    f"{subscription} with {item.grouping.type} grouping by field {name!r}, which"
                    f" the stream does not declare: {_hint(name, stream.fields, 'fields')}"
                )
    return streams


def reachable(start: str, edges: Mapping[str, Collection[str]]) -> set[str]:
    """Components that are one or more edges away from ``start``."""
    reached: set[str] = set()
    unvisited = [start]
    while unvisited:
        component = unvisited.pop()
        new = set(edges.get(component, ())) - reached
        reached |= new
        unvisited += new
    return reached
