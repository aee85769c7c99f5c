"""Components as functions, through ``@spout`` and ``@bolt``.

Each makes a component class of a function::

    @spout(outputs=["line"])
    def lines(context: TopologyContext) -> Iterator[str]:
        yield from open("access.log")

    @bolt(outputs=["word", "times"])
    def words(line: str) -> Iterator[tuple[str, int]]:
        yield from Counter(line.split()).items()

    class WordCount(Topology):
        lines = lines.spec()
        words = words.spec(inputs=[lines], par=2)

Yielded values are emitted: a tuple has a value for each field, an :class:`Emit` names another
stream, ``None`` is not emitted, and any other value is that of the only field. A function that is
not a generator may return one such value.
"""

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, overload

from storm_dagster.api.bolts import Bolt
from storm_dagster.api.error_pauses import MAX_PAUSE_SECS, ErrorPauses
from storm_dagster.api.outages import SystemUnavailable
from storm_dagster.api.specs import Outputs, Stream
from storm_dagster.api.spouts import ReliableSpout, Spout
from storm_dagster.api.tuples import Tuple
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.topology import FIELD_TYPES, StreamSpec

# Annotations of generators and the like, whose first argument is the type of a yielded value.
_ITERABLES = (
    Iterator,
    collections.abc.Iterable,
    collections.abc.Generator,
    collections.abc.AsyncIterator,
    collections.abc.AsyncGenerator,
    collections.abc.AsyncIterable,
)


class Emit:
    """Values for a named stream: ``yield Emit("late", word, 3)``."""

    __slots__ = ("stream", "values")

    def __init__(self, stream: str, *values: Any) -> None:
        self.stream: str = stream
        self.values: tuple[Any, ...] = values


class _Function:
    """Mixin of component classes that run a function."""

    function: ClassVar[Callable[..., Any]]
    """The function itself, for tests."""
    _supplied: ClassVar[tuple[str, ...]] = ()
    """Parameters that get the tuple or the context of the task."""
    _fields: ClassVar[tuple[str, ...]] = ()
    """Parameters that get fields of a tuple: all other parameters without a default."""
    _hints: ClassVar[Mapping[str, Any]] = {}
    """Annotations of the function by parameter."""

    def __init__(self, **args: Any) -> None:
        self._args = args

    @classmethod
    def component_config(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """Check that the function has these arguments.

        Raises :class:`InvalidTopology`, which names an argument that the function lacks.
        """
        parameters = inspect.signature(cls.function).parameters.values()
        optional = [item.name for item in parameters if item.default is not item.empty]
        unknown = sorted(args.keys() - set(optional))
        if unknown:
            raise InvalidTopology(
                f"{cls.__module__}.{cls.__qualname__} has no argument {unknown[0]!r} "
                "with a default, which a spec may "
                f"give: {', '.join(optional) or 'it has none'}"
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

        ``inputs`` maps (component, stream) to its spec. Raises :class:`InvalidTopology`, which
        names function, field and type.
        """
        for (component, stream), spec in inputs.items():
            source = f"stream {stream!r} of {component!r}"
            types = dict(zip(spec.fields, spec.types or ("any",) * len(spec.fields), strict=True))
            for field in cls._fields:
                if field not in types:
                    raise InvalidTopology(
                        f"{owner}: {cls.__name__}() has the parameter {field!r}, "
                        f"but {source} has the fields: {', '.join(spec.fields) or 'none'}; "
                        "rename it, or give it a default if it is not a field"
                    )
                parameter_type = _type_name(cls._hints.get(field))
                field_type = types[field]
                if not _accepts(parameter_type, field_type):
                    raise InvalidTopology(
                        f"{owner}: parameter {field!r} of {cls.__name__}() is {parameter_type}, "
                        f"but in {source} it is {field_type}"
                    )

    def process(self, tup: Tuple) -> Any:
        """Call the function with the fields of the tuple, and emit its results."""
        for item in _results(self.function(**self._arguments(tup))):
            self._send(item)

    def _arguments(self, tup: Tuple) -> dict[str, Any]:
        """The arguments of the function for this tuple, by name."""
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
            for item in _results(await result):
                self._send(item)


class FunctionSpout(_Function, ReliableSpout):
    """A spout that emits the tuples of a generator; made by :func:`spout`.

    A failed tuple is replayed from memory, at most ``max_fails`` times. After an error of the
    generator, and after a restart of its task, the generator starts from its beginning. To continue
    where it was, keep the position in ``context.state``, or write a :class:`Spout`. While it fails
    again and again without a tuple more than before, the pauses grow from 1 to 60 s: it would emit
    its first tuples many times a second.
    """

    _supplied = ("context",)
    reliable: ClassVar[bool] = True
    """True if tuples are tracked, and replayed when they fail."""
    _items: Iterator[Any] | None = None
    """The running generator; ``None`` before the first call and after an error."""
    _last_id = 0
    """Tuple id of the last tuple that was taken from it."""

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self._restarts = ErrorPauses()
        """Pauses before the generator starts again."""
        self._started_at = 0.0
        """Time of its start, in seconds."""
        self._first_id = 0
        """Tuple id before its first tuple."""
        self._most_tuples = 0
        """Largest number of tuples before an error so far."""

    def next_tuple(self) -> None:
        """Emit the next tuple of the generator."""
        if self._items is None:
            now = self.context.now_ms() / 1000
            if now < self._restarts.until:
                return
            self._started_at = now
            self._first_id = self._last_id
            supplied = dict.fromkeys(self._supplied, self.context)
            self._items = iter(self.function(**self._args, **supplied))
        try:
            item = next(self._items, None)
        except SystemUnavailable:
            # The worker makes the pause.
            self._items = None
            raise
        except BaseException:
            # A generator ends when it raises: the next call needs another one.
            self._items = None
            self._pause_restart()
            raise
        if item is None:
            # The generator has no tuple now, or has ended.
            return
        self._last_id += 1
        values, stream = _values(item)
        if self.reliable:
            self.emit(values, tup_id=self._last_id, stream=stream)
        else:
            Spout.emit(self, values, stream=stream)

    def _pause_restart(self) -> None:
        """Count an error of the generator, which causes a pause unless it came further."""
        now = self.context.now_ms() / 1000
        tuples = self._last_id - self._first_id
        if tuples > self._most_tuples or now - self._started_at >= MAX_PAUSE_SECS:
            self._restarts.on_success()
        self._most_tuples = max(self._most_tuples, tuples)
        self._restarts.on_error(now)


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

    Use ``@bolt`` for a function without outputs, else ``@bolt(outputs=[...])``.

    Parameters without a default are fields of the input, which are checked by name and type when
    the topology is built; ``tup`` is the whole tuple, ``context`` the :class:`TopologyContext`.
    Parameters with a default are arguments, ``spec(args={...})``. The function may be a generator,
    ``async``, or both. ``outputs``, ``par``, ``config`` and ``blocking`` are as in a :class:`Bolt`;
    outputs without types get those of the function's annotation.

    Raises :class:`InvalidTopology` for a function with other kinds of parameters.
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
    """Make a spout class of a generator, which yields its tuples.

    ``yield None`` when no tuple is available now. A parameter ``context`` is the
    :class:`TopologyContext`; parameters with a default are arguments, ``spec(args={...})``. With
    ``reliable`` a failed tuple is replayed (:class:`FunctionSpout`).

    Raises :class:`InvalidTopology` for a function that is not a generator, or has other parameters.
    """

    def make(function: Callable[..., Any]) -> type[FunctionSpout]:
        name = f"@spout {function.__qualname__}"
        if not inspect.isgeneratorfunction(function):
            raise InvalidTopology(f"{name} is not a generator function: let it yield its tuples")
        component = _component(
            FunctionSpout,
            function,
            outputs,
            par=par,
            config=config,
            blocking=blocking,
            reliable=reliable,
        )
        if component._fields:
            raise InvalidTopology(
                f"{name}: parameter {component._fields[0]!r} has no default: "
                "a spout has no input, its arguments have defaults"
            )
        return component

    return make if function is None else make(function)


def _component(
    base: type[Any], function: Callable[..., Any], outputs: Outputs, **settings: Any
) -> Any:
    """Make a subclass of ``base`` that runs ``function``; it has ``settings``.

    :class:`InvalidTopology` for a function with ``*args``, ``**kwargs`` or positional parameters.
    """
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):
        hints = {}  # Its annotations name types that only a type checker imports.
    fields: list[str] = []
    supplied: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InvalidTopology(
                f"{function.__qualname__} has the parameter {parameter}: "
                "name each field, values are passed by name"
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
        **settings,
    }
    return type(function.__name__, (base,), body)


def _type_name(hint: Any) -> str:
    """Name of the field type of an annotation; ``"any"`` if it is not one."""
    hint_class = typing.get_origin(hint) or hint
    if isinstance(hint_class, type) and hint_class.__name__ in FIELD_TYPES:
        return hint_class.__name__
    return "any"


def _accepts(parameter_type: str, field_type: str) -> bool:
    """True if a parameter of this type may get a field of that type."""
    if "any" in (parameter_type, field_type) or parameter_type == field_type:
        return True
    return parameter_type == "float" and field_type == "int"


def _add_types(outputs: Outputs, hint: Any) -> Outputs:
    """Add types to output names, from the annotation of the function's result.

    ``outputs`` are returned unchanged if they are not plain names, or if the annotation does not
    have one type for each name.
    """
    if outputs is None or isinstance(outputs, str | Mapping | Stream):
        return outputs
    names = list(outputs)
    if not names or not all(isinstance(name, str) for name in names):
        return outputs
    if typing.get_origin(hint) in _ITERABLES and typing.get_args(hint):
        hint = typing.get_args(hint)[0]
    hints = typing.get_args(hint) if typing.get_origin(hint) is tuple else (hint,)
    if len(hints) != len(names):
        return outputs
    type_names = [_type_name(item) for item in hints]
    if set(type_names) == {"any"}:
        return outputs
    return dict(zip(names, type_names, strict=True))


def _results(result: Any) -> Any:
    """The results of a function, one after the other: of a generator all that it yields."""
    return result if isinstance(result, types.GeneratorType) else (result,)


def _values(item: Any) -> tuple[Any, str | None]:
    """Values and stream of a yielded item."""
    if isinstance(item, Emit):
        return list(item.values), item.stream
    if isinstance(item, tuple):
        return list(item), None
    return [item], None
