"""Components as functions: ``@spout`` and ``@bolt`` make a class of a function.

    @spout(outputs=["line"])
    def lines(context: TopologyContext) -> Iterator[str]:
        yield from open("access.log")

    @bolt(outputs=["word", "times"])
    def words(line: str) -> Iterator[tuple[str, int]]:
        yield from Counter(line.split()).items()

    class WordCount(Topology):
        lines = lines.spec()
        words = words.spec(inputs=[lines], par=2)

Yielded items are emitted: a tuple has a value for each field, an :class:`Emit` names another
stream, ``None`` is ignored, and any other item is the value of the only field. A function that is
not a generator may return one of these.
"""

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, overload

from storm_dagster.api.bolts import Bolt
from storm_dagster.api.specs import Outputs
from storm_dagster.api.spouts import ReliableSpout, Spout
from storm_dagster.api.tuples import Tuple
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.topology import FIELD_TYPES, StreamSpec

_SERIES = (
    Iterator,
    collections.abc.Iterable,
    collections.abc.Generator,
    collections.abc.AsyncIterator,
    collections.abc.AsyncGenerator,
    collections.abc.AsyncIterable,
)


class Emit:
    """Values for another stream than the default one: ``yield Emit("late", word, 3)``."""

    __slots__ = ("stream", "values")

    def __init__(self, stream: str, *values: Any) -> None:
        self.stream: str = stream
        self.values: tuple[Any, ...] = values


class _Function:
    """Mixin of component classes that run a function."""

    function: ClassVar[Callable[..., Any]]
    """The function itself, for tests."""
    _supplied: ClassVar[tuple[str, ...]] = ()
    """Parameters that get the tuple or the context."""
    _fields: ClassVar[tuple[str, ...]] = ()
    """Parameters that get fields of a tuple: all other ones without a default."""
    _hints: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, **args: Any) -> None:
        self._args = args

    @classmethod
    def component_config(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """Check that the function has these arguments.

        Raises :class:`InvalidTopology` that names an argument that it lacks.
        """
        parameters = inspect.signature(cls.function).parameters.values()
        arguments = [
            parameter.name for parameter in parameters if parameter.default is not parameter.empty
        ]
        for name in sorted(args):
            if name not in arguments:
                raise InvalidTopology(
                    f"{cls.__module__}.{cls.__qualname__} has no argument {name!r} with a default, "
                    f"which a spec may give: {', '.join(arguments) or 'it has none'}"
                )
        return {}


class FunctionBolt(_Function, Bolt):
    """A bolt whose tuples a function processes; made by :func:`bolt`.

    Emitted tuples are anchored to the tuple in process, which is acked when the function has
    returned, and failed when it raises. Of ``async`` functions up to ``async_window`` are in flight
    at once.
    """

    _supplied = ("tup", "context")

    @classmethod
    def check_inputs(cls, owner: str, inputs: Mapping[tuple[str, str], StreamSpec]) -> None:
        """Check that each input has the fields of the parameters, with their types.

        ``inputs`` are by (component, stream). Raises :class:`InvalidTopology` that names function,
        field and type.
        """
        for (component, stream), spec in inputs.items():
            types_of = dict.fromkeys(spec.fields, "any")
            if spec.types:
                types_of = dict(zip(spec.fields, spec.types, strict=True))
            source = f"stream {stream!r} of {component!r}"
            for field in cls._fields:
                if field not in types_of:
                    raise InvalidTopology(
                        f"{owner}: {cls.__name__}() has the parameter {field!r}, but {source} has "
                        f"the fields: {', '.join(spec.fields) or 'none'}; rename it, or give it a "
                        "default if it is no field"
                    )
                hint = _type_name(cls._hints.get(field))
                if not _accepts(hint, types_of[field]):
                    raise InvalidTopology(
                        f"{owner}: parameter {field!r} of {cls.__name__}() is {hint}, but in "
                        f"{source} it is {types_of[field]}"
                    )

    def process(self, tup: Tuple) -> Any:
        """Call the function with the fields of the tuple, and emit its results."""
        for item in _items(self.function(**self._arguments(tup))):
            self._send(item)

    def _arguments(self, tup: Tuple) -> dict[str, Any]:
        arguments = dict(self._args)
        values = self.named(tup)
        for field in self._fields:
            arguments[field] = values[field]
        if "tup" in self._supplied:
            arguments["tup"] = tup
        if "context" in self._supplied:
            arguments["context"] = self.context
        return arguments

    def _send(self, item: Any) -> None:
        if item is not None:
            values, stream = _values(item)
            self.emit(values, stream)


class _AsyncFunctionBolt(FunctionBolt):
    async def process(self, tup: Tuple) -> Any:
        result = self.function(**self._arguments(tup))
        if inspect.isasyncgen(result):
            async for item in result:
                self._send(item)
        else:
            for item in _items(await result):
                self._send(item)


class FunctionSpout(_Function, ReliableSpout):
    """A spout that emits the items of a generator; made by :func:`spout`.

    A tuple that fails is re-emitted from memory, at most ``max_fails`` times. The generator starts
    from its beginning when it has raised, and when its task restarts. To continue, keep its
    position in ``context.state``, or write a :class:`Spout`.
    """

    _supplied = ("context",)
    reliable: ClassVar[bool] = True
    """True if tuples are tracked, and re-emitted when they fail."""
    _items: Iterator[Any] | None = None
    _sent = 0

    def next_tuple(self) -> None:
        """Emit the next item of the generator."""
        if self._items is None:
            arguments = dict(self._args)
            if "context" in self._supplied:
                arguments["context"] = self.context
            self._items = iter(self.function(**arguments))
        try:
            item = next(self._items, None)
        except BaseException:
            # A generator that has raised is exhausted.
            self._items = None
            raise
        if item is None:
            return
        self._sent += 1
        values, stream = _values(item)
        if self.reliable:
            self.emit(values, tup_id=self._sent, stream=stream)
        else:
            Spout.emit(self, values, stream=stream)


@overload
def bolt(function: Callable[..., Any], /) -> type[FunctionBolt]: ...
@overload
def bolt(
    *,
    outputs: Outputs = None,
    par: int = 1,
    config: Mapping[str, Any] | None = None,
    blocking: bool = False,
) -> Callable[[Callable[..., Any]], type[FunctionBolt]]: ...
def bolt(
    function: Callable[..., Any] | None = None,
    /,
    *,
    outputs: Outputs = None,
    par: int = 1,
    config: Mapping[str, Any] | None = None,
    blocking: bool = False,
) -> Any:
    """Make a bolt class of a function.

    Use ``@bolt`` for a function without outputs, else ``@bolt(outputs=[...])``. Parameters without
    a default are fields of the input, which are checked by name and type when the topology is
    built; ``tup`` is the whole tuple, ``context`` the :class:`TopologyContext`. Parameters with a
    default are arguments, ``spec(args={...})``. The function may be a generator, ``async``, or
    both. ``outputs``, ``par``, ``config`` and ``blocking`` are as in a :class:`Bolt`; names without
    types get those of the function's annotation.

    Raises :class:`InvalidTopology` for a function that cannot be called so.
    """

    def make(function: Callable[..., Any]) -> type[FunctionBolt]:
        is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        base = _AsyncFunctionBolt if is_async else FunctionBolt
        return _component(base, function, outputs, par=par, config=config, blocking=blocking)

    return make if function is None else make(function)


@overload
def spout(function: Callable[..., Any], /) -> type[FunctionSpout]: ...
@overload
def spout(
    *,
    outputs: Outputs = None,
    par: int = 1,
    config: Mapping[str, Any] | None = None,
    blocking: bool = False,
    reliable: bool = True,
) -> Callable[[Callable[..., Any]], type[FunctionSpout]]: ...
def spout(
    function: Callable[..., Any] | None = None,
    /,
    *,
    outputs: Outputs = None,
    par: int = 1,
    config: Mapping[str, Any] | None = None,
    blocking: bool = False,
    reliable: bool = True,
) -> Any:
    """Make a spout class of a generator, whose tuples are emitted.

    The generator yields ``None`` while there is no tuple. Its parameter ``context``, if it has one,
    is the :class:`TopologyContext`; parameters with a default are arguments, ``spec(args={...})``.
    With ``reliable`` a failed tuple is re-emitted (:class:`FunctionSpout`).

    Raises :class:`InvalidTopology` for a function that is not a generator, or that has other
    parameters.
    """

    def make(function: Callable[..., Any]) -> type[FunctionSpout]:
        name = f"@spout {function.__qualname__}"
        if not inspect.isgeneratorfunction(function):
            raise InvalidTopology(f"{name} is not a generator function: let it yield its tuples")
        settings = {"par": par, "config": config, "blocking": blocking, "reliable": reliable}
        component = _component(FunctionSpout, function, outputs, **settings)
        if component._fields:
            raise InvalidTopology(
                f"{name}: parameter {component._fields[0]!r} has no default: a spout has no input, "
                "its arguments have defaults"
            )
        return component

    return make if function is None else make(function)


def _component(
    base: type[Any], function: Callable[..., Any], outputs: Outputs, **settings: Any
) -> Any:
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):
        hints = {}  # It names types that only a type checker imports.
    fields: list[str] = []
    supplied: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InvalidTopology(
                f"{function.__qualname__} has the parameter {parameter}: name each field, values "
                "are passed by name"
            )
        if parameter.name in base._supplied:
            supplied.append(parameter.name)
        elif parameter.default is parameter.empty:
            fields.append(parameter.name)
    body = {
        "__doc__": function.__doc__,
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
        "function": staticmethod(function),
        "outputs": _add_types(outputs, hints.get("return")),
        "_supplied": tuple(supplied),
        "_fields": tuple(fields),
        "_hints": hints,
    }
    return type(function.__name__, (base,), {**body, **settings})


def _type_name(hint: Any) -> str:
    """The field type of an annotation; ``any`` if it is not one."""
    kind = typing.get_origin(hint) or hint
    if not isinstance(kind, type) or kind.__name__ not in FIELD_TYPES:
        return "any"
    return kind.__name__


def _accepts(hint: str, field_type: str) -> bool:
    """True if a parameter of this type takes values of the field's type."""
    if "any" in (hint, field_type) or hint == field_type:
        return True
    return hint == "float" and field_type == "int"


def _add_types(outputs: Outputs, hint: Any) -> Outputs:
    """Add the types of the return annotation to names, if it has one for each."""
    if outputs is None or isinstance(outputs, str | Mapping):
        return outputs
    names = list(outputs)
    if not names or not all(isinstance(name, str) for name in names):
        return outputs
    if typing.get_origin(hint) in _SERIES and typing.get_args(hint):
        hint = typing.get_args(hint)[0]
    hints = typing.get_args(hint) if typing.get_origin(hint) is tuple else (hint,)
    if len(hints) != len(names):
        return outputs
    type_names = [_type_name(part) for part in hints]
    if set(type_names) == {"any"}:
        return outputs
    return dict(zip(names, type_names, strict=True))


def _items(result: Any) -> Any:
    """The items of a function's result: those of a generator, or the result itself."""
    return result if isinstance(result, types.GeneratorType) else (result,)


def _values(item: Any) -> tuple[Any, str | None]:
    """Values and stream of an item; ``None`` is the default stream."""
    if isinstance(item, Emit):
        return list(item.values), item.stream
    if isinstance(item, tuple):
        return list(item), None
    return [item], None
