"""Specs of components, as parts of a topology, and their output streams."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

from storm_dagster.model import topology
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.groupings import Grouping as Grouping
from storm_dagster.model.groupings import GroupingSpec
from storm_dagster.model.names import check_stream_id, code_name

Outputs = Sequence[Any] | Mapping[str, Any] | None
"""Field names, a map from field names to types (of one default stream), or streams."""


class Stream:
    """One output stream: its fields and name.

    On a ``direct`` stream the emitter chooses the receiving task.
    """

    __slots__ = ("direct", "fields", "name", "types")

    def __init__(
        self,
        fields: Iterable[str] | Mapping[str, Any] = (),
        name: str = topology.DEFAULT_STREAM,
        direct: bool = False,
    ) -> None:
        """Declare a stream.

        ``fields`` are names, or a map from names to types (``str``, ``int``, ``float``, ``bool``,
        ``bytes``, ``list``, ``dict``, ``datetime``, ``object`` for any value). Values of typed
        streams are checked when they are emitted.
        """
        if isinstance(fields, str):
            raise InvalidTopology(
                f"stream {name!r}: fields must be a list of names, got the string {fields!r}"
            )
        self.fields: tuple[str, ...] = tuple(fields)
        self.types: tuple[str, ...] | tuple[()] = ()
        if isinstance(fields, Mapping):
            self.types = tuple(_type_name(field_type, name) for field_type in fields.values())
        self.name: str = name
        self.direct: bool = bool(direct)
        wrong = [field for field in self.fields if not isinstance(field, str) or not field]
        if wrong:
            raise InvalidTopology(f"stream {name!r}: field {wrong[0]!r} must be a non-empty string")
        if len(set(self.fields)) != len(self.fields):
            raise InvalidTopology(
                f"stream {name!r} declares a field twice: {', '.join(self.fields)}"
            )
        check_stream_id(name)

    def __repr__(self) -> str:
        return f"Stream(fields={list(self.fields)!r}, name={self.name!r}, direct={self.direct!r})"


def stream_specs(outputs: Iterable[Any] | None, owner: str) -> dict[str, topology.StreamSpec]:
    """Specs of the ``outputs`` of a component, by stream name.

    ``outputs`` are field names, a map from them to types, or :class:`Stream` objects; none of them
    gives no stream. ``owner`` names the component in errors. :class:`InvalidTopology` for a mixture
    and for a stream that is declared twice.
    """
    if outputs is None:
        return {}
    if isinstance(outputs, str):
        raise InvalidTopology(
            f"{owner}: outputs must be a list of names or streams, got the string {outputs!r}: "
            f"write outputs = [{outputs!r}]"
        )
    if isinstance(outputs, Stream):
        outputs = [outputs]
    if not isinstance(outputs, Iterable):
        raise InvalidTopology(
            f"{owner}: outputs must be a list of names or streams, got {outputs!r:.60}: write "
            "outputs = ['FIELD']"
        )
    items: list[Any] = [Stream(outputs)] if isinstance(outputs, Mapping) else list(outputs)
    streams = [item for item in items if isinstance(item, Stream)]
    if items and not streams:
        streams = [Stream(fields=items)]
    elif len(streams) != len(items):
        raise InvalidTopology(f"{owner}: outputs mix field names and streams: use one of the two")
    specs: dict[str, topology.StreamSpec] = {}
    for stream in streams:
        if stream.name in specs:
            raise InvalidTopology(
                f"{owner} declares stream {stream.name!r} twice: give each its own name"
            )
        specs[stream.name] = topology.StreamSpec(
            fields=stream.fields, direct=stream.direct, types=stream.types
        )
    return specs


def _type_name(field_type: Any, stream: str) -> str:
    """The name of a field type, as topologies are stored with."""
    if field_type in (object, Any):
        return "any"
    name = getattr(field_type, "__name__", str(field_type))
    if name not in topology.FIELD_TYPES:
        raise InvalidTopology(
            f"stream {stream!r}: {field_type!r:.60} is not a field type, "
            f"use one of {', '.join(topology.FIELD_TYPES)}"
        )
    return name


@dataclass(frozen=True, slots=True)
class StreamOf:
    """One stream of a component: ``spec["stream"]``.

    ``component`` is a spec, or the id of a component.
    """

    component: Any
    stream: str


@dataclass(frozen=True, slots=True)
class GlobalStreamId:
    """One stream of a component by its id, as in streamparse.

    Also for a component that is declared later: in a cycle there is no spec of it yet.
    """

    componentId: str
    streamId: str = topology.DEFAULT_STREAM


def _as_stream(source: Any) -> Any:
    """A :class:`StreamOf` for an object with the attributes of Storm's GlobalStreamId."""
    component = getattr(source, "componentId", None)
    if component is None:
        return source
    return StreamOf(component, getattr(source, "streamId", None) or topology.DEFAULT_STREAM)


Inputs = Union[None, "Spec", StreamOf, str, Iterable[Any], Mapping[Any, Any]]
"""Inputs of a component: specs, streams of specs or component ids.

A single one, a list (shuffled), or a map from them to groupings.
"""


class Spec:
    """A spout or bolt with its inputs, parallelism and conf.

    ``Component.spec(...)`` creates it. Everything is checked when the topology is built, so that
    errors can name the component.
    """

    def __init__(
        self,
        *,
        kind: str,
        code: Any = None,
        args: Mapping[str, Any] | None = None,
        shell: Sequence[str] | None = None,
        name: str | None = None,
        inputs: Inputs = None,
        par: int = 1,
        config: Mapping[str, Any] | None = None,
        outputs: Outputs = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.par = par
        self.config: dict[str, Any] = dict(config or {})
        self.inputs = inputs
        self.outputs = outputs
        self._code = code
        """The class, or ``"module:Class"``; ``None`` for a program."""
        self._args = dict(args or {})
        self._shell = tuple(shell) if shell is not None else None
        """Command line of a multilang program; ``None`` for a class."""

    def __getitem__(self, stream: str) -> StreamOf:
        return StreamOf(self, stream)

    def __repr__(self) -> str:
        return f"<{self.kind} spec {self.name or self._code or self._shell!r}>"

    def streams(self) -> dict[str, topology.StreamSpec]:
        """The declared output streams by name."""
        return stream_specs(self.outputs, f"{self.kind} {self.name!r}")

    def to_component(self, names: Mapping[int, str]) -> topology.ComponentSpec:
        """The serializable form.

        ``names`` maps ``id()`` of each spec of the topology to its component id. Raises
        :class:`InvalidTopology` that names the component and its problem.
        """
        owner = f"{self.kind} {self.name!r}"
        if isinstance(self.par, bool) or not isinstance(self.par, int) or self.par < 1:
            raise InvalidTopology(
                f"{owner}: par must be an integer of at least 1, got {self.par!r}"
            )
        return topology.ComponentSpec(
            object=self._object(owner),
            parallelism=self.par,
            conf=_json_map(self.config, f"{owner}: config"),
            inputs=tuple(self._inputs(owner, names)),
            outputs=self.streams(),
        )

    def _object(self, owner: str) -> topology.ComponentObject:
        """The name of the class with its arguments, checked, or the program."""
        if self._shell is not None:
            return topology.ComponentObject(shell=self._shell)
        args = _json_map(self._args, f"{owner}: args")
        if hasattr(self._code, "_check_arguments"):
            self._code._check_arguments(owner, args, self.par, self.outputs)
        return topology.ComponentObject(
            python=code_name(self._code, f"the class of {owner}"), args=args
        )

    def _inputs(self, owner: str, names: Mapping[int, str]) -> Iterable[topology.InputSpec]:
        """The inputs, with component ids in place of specs (``names``: as in ``to_component``)."""
        pairs = self._source_groupings()
        if self.kind == "spout" and pairs:
            raise InvalidTopology(f"{owner} has inputs: spouts have none, make it a Bolt")
        for source, grouping in pairs:
            stream = topology.DEFAULT_STREAM
            source = _as_stream(source)
            if isinstance(source, StreamOf):
                stream = source.stream
                source = source.component
            if isinstance(source, Spec):
                component = names.get(id(source))
                if component is None:
                    raise InvalidTopology(
                        f"{owner} reads from {source!r}, which is not part of this topology"
                    )
            elif isinstance(source, str):
                component = source
            else:
                raise InvalidTopology(
                    f"{owner}: input {source!r:.60} is not a spec, stream or component id: write "
                    "the spec, spec['STREAM'], 'COMPONENT', or GlobalStreamId('COMPONENT', "
                    "'STREAM') for one that is declared later; with a grouping, inputs are a map, "
                    "{spec: Grouping.fields('FIELD')}"
                )
            if not isinstance(grouping, GroupingSpec):
                raise _wrong_grouping(f"{owner}: the grouping of input {component!r}", grouping)
            yield topology.InputSpec(component=component, stream=stream, grouping=grouping)

    def _source_groupings(self) -> list[tuple[Any, Any]]:
        """(source, grouping) of each input; sources without a grouping are shuffled."""
        inputs = self.inputs
        if inputs is None:
            return []
        if isinstance(inputs, Mapping):
            return list(inputs.items())
        if isinstance(inputs, Spec | StreamOf | str) or hasattr(inputs, "componentId"):
            return [(inputs, Grouping.SHUFFLE)]
        if isinstance(inputs, type) or not isinstance(inputs, Iterable):
            # Refused by its name.
            return [(inputs, Grouping.SHUFFLE)]
        return [(source, Grouping.SHUFFLE) for source in inputs]


def _wrong_grouping(subject: str, grouping: Any) -> InvalidTopology:
    """The error of an object that is not a grouping, with the line to write."""
    actual = f"must be a Grouping, got {grouping!r:.60}"
    if grouping is Grouping:
        actual = "is the class Grouping itself"
    elif callable(grouping):
        actual = f"is the method {getattr(grouping, '__qualname__', grouping)} without its call"
    return InvalidTopology(
        f"{subject} {actual}: write Grouping.SHUFFLE, or Grouping.fields('FIELD') for equal values "
        "at one task"
    )


def _json_map(value: Mapping[str, Any], subject: str) -> dict[str, Any]:
    """A copy of the map as JSON restores it; ``subject`` names the map in errors.

    :class:`InvalidTopology` for keys that are not strings, and values that JSON cannot hold.
    """
    if not all(isinstance(key, str) for key in value):
        raise InvalidTopology(f"{subject}: keys must be strings, got {list(value)!r:.80}")
    try:
        loaded = json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidTopology(f"{subject} must hold JSON values only: {error}") from None
    return loaded
