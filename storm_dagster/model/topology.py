"""Topology: components, streams, inputs, groupings, parallelism.

This is the form that travels: a client describes its topology as this JSON, nimbus stores it as the
blob ``<id>-stormcode.ser``, workers build the components from it. It names code
(``"module:QualName"``) and never contains any.
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
    """Implementation of a component: a Python class by name with JSON arguments, or a shell command
    (multilang).
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
"""Types that a field may declare; ``float`` takes integers too, every type but ``any`` refuses
``None``.
"""


class StreamSpec(_Frozen):
    """Fields of one output stream; ``direct`` streams are sent to one chosen task."""

    fields: tuple[str, ...] = ()
    direct: bool = False
    types: tuple[str, ...] = ()
    """One of :data:`FIELD_TYPES` for each field, or nothing at all: then values are not checked."""


class InputSpec(_Frozen):
    """One subscription: the stream of a component, and the grouping."""

    component: str
    stream: str = DEFAULT_STREAM
    grouping: GroupingSpec


class ComponentSpec(_Frozen):
    """One spout or bolt."""

    object: "ComponentObject"
    parallelism: int = 1
    """Executors wanted. Tasks are as many, unless the conf's ``topology.tasks`` asks for more."""
    conf: dict[str, Any] = {}
    """Component conf: overrides topology conf for this component."""
    inputs: tuple[InputSpec, ...] = ()
    outputs: dict[str, StreamSpec] = {}


class TopologySpec(_Frozen):
    """A topology. The order of spouts and bolts is the declared order; it decides task ids."""

    name: str = ""
    spouts: dict[str, ComponentSpec] = Field(default_factory=dict)
    bolts: dict[str, ComponentSpec] = Field(default_factory=dict)
    conf: dict[str, Any] = {}
    """Conf that the author gave the topology itself; a submission's conf overrides it."""

    def components(self) -> Iterator[tuple[str, Literal["spout", "bolt"], ComponentSpec]]:
        """Every component as (id, type, spec): bolts in declared order, then spouts."""
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
    """The topology in ``raw`` JSON; :class:`InvalidTopology` names the first thing that is
    wrong.
    """
    try:
        return TopologySpec.model_validate_json(raw)
    except (ValidationError, UnicodeDecodeError, RecursionError) as error:
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            text = f"{'.'.join(str(part) for part in first['loc']) or 'topology'}: {first['msg']}"
        else:
            text = str(error)
        raise InvalidTopology(f"the topology document is not valid: {text}") from None


def _hint(wrong: str, known: Iterable[str], what: str) -> str:
    from difflib import get_close_matches

    names = sorted(known)
    if near := get_close_matches(wrong, names, n=1, cutoff=0.5):
        return f"did you mean {near[0]!r}?"
    return f"{what} are {', '.join(names[:20])}" if names else f"it has no {what}"


def check_inputs(spec: TopologySpec, bolt_id: str) -> dict[tuple[str, str], StreamSpec]:
    """(component, stream) -> the stream, of each input of a bolt.

    Raises :class:`InvalidTopology` unless they exist, each is read once, and has the fields that it
    is grouped by.
    """
    found: dict[tuple[str, str], StreamSpec] = {}
    for given in spec.bolts[bolt_id].inputs:
        source = spec.component(given.component)
        if source is None:
            raise InvalidTopology(
                f"bolt {bolt_id!r} subscribes to component {given.component!r}, which does not exist: "
                f"{_hint(given.component, [*spec.bolts, *spec.spouts], 'components')}"
            )
        reads = f"bolt {bolt_id!r} subscribes to stream {given.stream!r} of {given.component!r}"
        stream = source.outputs.get(given.stream)
        if stream is None:
            raise InvalidTopology(
                f"{reads}, which does not declare it: {_hint(given.stream, source.outputs, 'streams')}"
            )
        if (given.component, given.stream) in found:
            raise InvalidTopology(
                f"{reads} twice, so that it would get every tuple twice: keep one grouping"
            )
        found[given.component, given.stream] = stream
        for name in (
            given.grouping.fields if GROUPINGS[given.grouping.type].needs == "fields" else ()
        ):
            if name not in stream.fields:
                raise InvalidTopology(
                    f"{reads} with {given.grouping.type} grouping by field {name!r}, which the stream does not declare: "
                    f"{_hint(name, stream.fields, 'fields')}"
                )
    return found


def reachable(start: str, edges: Mapping[str, Collection[str]]) -> set[str]:
    """Components that are one edge or more away from ``start``."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = set(edges.get(waiting.pop(), ())) - found
        found |= new
        waiting += new
    return found
