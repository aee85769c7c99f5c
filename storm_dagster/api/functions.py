"""Components as functions: ``@spout`` and ``@bolt`` make a component class of a function.

    @spout(outputs=["line"])
    def lines(context: TopologyContext) -> Iterator[str]:
        yield from open("access.log")

    @bolt(outputs=["word", "times"])
    def words(line: str) -> Iterator[tuple[str, int]]:
        yield from Counter(line.split()).items()

    class WordCount(Topology):
        lines = lines.spec()
        words = words.spec(inputs=[lines], par=2)

What is yielded is emitted: a tuple has a value for each field, anything else is the value of the
only field, an :class:`Emit` names another stream, and ``None`` is nothing. A function that is no
generator may return one of these.
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
    """Values for a stream other than the default one: ``yield Emit("late", word, 3)``."""

    __slots__ = ("stream", "values")

    def __init__(self, stream: str, *values: Any) -> None:
        self.stream: str = stream
        self.values: tuple[Any, ...] = values


class _Function:
    """Mixin of component classes that run a function."""

    function: ClassVar[Callable[..., Any]]
    """The function itself, for tests."""
    _supplied: ClassVar[tuple[str, ...]] = ()
    """Parameters that get something of the task."""
    _fields: ClassVar[tuple[str, ...]] = ()
    """Parameters that get fields of a tuple: all others without a default."""
    _hints: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, **args: Any) -> None:
        self._args = args

    @classmethod
    def component_config(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """Check that the function has these arguments; :class:`InvalidTopology` names one that it
        lacks.
        """
        known = [
            parameter.name
            for parameter in inspect.signature(cls.function).parameters.values()
            if parameter.default is not parameter.empty
        ]
        if unknown := sorted(args.keys() - set(known)):
            raise InvalidTopology(
                f"{cls.__module__}.{cls.__qualname__} has no argument {unknown[0]!r} with a default, which a spec may "
                f"give: {', '.join(known) or 'it has none'}"
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
        """Check that each input, (component, stream), has the fields of the parameters, with their
        types.

        Raises :class:`InvalidTopology` that names function, field and type.
        """
        for (component, stream), spec in inputs.items():
            kinds = dict(zip(spec.fields, spec.types or ("any",) * len(spec.fields), strict=True))
            for field in cls._fields:
                source = f"stream {stream!r} of {component!r}"
                if field not in kinds:
                    raise InvalidTopology(
                        f"{owner}: {cls.__name__}() has the parameter {field!r}, but {source} has the fields: "
                        f"{', '.join(spec.fields) or 'none'}; rename it, or give it a default if it is no field"
                    )
                wanted, found = _type_name(cls._hints.get(field)), kinds[field]
                if (
                    "any" not in (wanted, found)
                    and wanted != found
                    and (wanted, found) != ("float", "int")
                ):
                    raise InvalidTopology(
                        f"{owner}: parameter {field!r} of {cls.__name__}() is {wanted}, but in {source} it is {found}"
                    )

    def process(self, tup: Tuple) -> Any:
        """Call the function with the fields of the tuple, and emit what it gives."""
        for item in _given(self.function(**self._arguments(tup))):
            self._send(item)

    def _arguments(self, tup: Tuple) -> dict[str, Any]:
        values, known = self.named(tup), {"tup": tup, "context": self.context}
        fields = {field: values[field] for field in self._fields}
        return {**self._args, **fields, **{name: known[name] for name in self._supplied}}

    def _send(self, item: Any) -> None:
        if item is not None:
            values, stream = _values(item)
            self.emit(values, stream)


class _AsyncFunctionBolt(FunctionBolt):
    async def process(self, tup: Tuple) -> Any:
        made = self.function(**self._arguments(tup))
        if inspect.isasyncgen(made):
            async for item in made:
                self._send(item)
        else:
            for item in _given(await made):
                self._send(item)


class FunctionSpout(_Function, ReliableSpout):
    """A spout that emits what a generator yields; made by :func:`spout`.

    A tuple that fails is emitted again from memory, at most ``max_fails`` times. The generator
    starts from its beginning when it has raised, and when its task starts again: one that shall go
    on keeps its position in ``context.state``, or is a :class:`Spout`.
    """

    _supplied = ("context",)
    reliable: ClassVar[bool] = True
    """Whether tuples are tracked, and emitted again when they fail."""
    _items: Iterator[Any] | None = None
    _sent = 0

    def next_tuple(self) -> None:
        """Emit the next thing that the generator yields."""
        if self._items is None:
            given = dict.fromkeys(self._supplied, self.context)
            self._items = iter(self.function(**self._args, **given))
        try:
            item = next(self._items, None)
        except BaseException:
            # A generator that has raised yields nothing any more.
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
    """Make a bolt class of a function: ``@bolt`` for one without outputs, else
    ``@bolt(outputs=[...])``.

    Parameters without a default are fields of the input, which are checked by name and type when
    the topology is built; ``tup`` is the whole tuple, ``context`` the :class:`TopologyContext`.
    Those with a default are arguments, ``spec(args={...})``. The function may be a generator,
    ``async``, or both. ``outputs``, ``par``, ``config`` and ``blocking`` are as in a :class:`Bolt`;
    names alone get the types of the function's annotation.

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
    """Make a spout class of a generator: each tuple that it yields is emitted; ``yield None`` when
    there is none now.

    Its parameter ``context``, if it has one, is the :class:`TopologyContext`; those with a default
    are arguments, ``spec(args={...})``. With ``reliable`` a failed tuple is emitted again
    (:class:`FunctionSpout`).

    Raises :class:`InvalidTopology` for a function that is no generator, or has other parameters.
    """

    def make(function: Callable[..., Any]) -> type[FunctionSpout]:
        name = f"@spout {function.__qualname__}"
        if not inspect.isgeneratorfunction(function):
            raise InvalidTopology(f"{name} is not a generator function: let it yield its tuples")
        settings = {"par": par, "config": config, "blocking": blocking, "reliable": reliable}
        made = _component(FunctionSpout, function, outputs, **settings)
        if made._fields:
            raise InvalidTopology(
                f"{name}: parameter {made._fields[0]!r} has no default: a spout has no input, its arguments have defaults"
            )
        return made

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
                f"{function.__qualname__} has the parameter {parameter}: name each field, values are passed by name"
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
        "outputs": _typed(outputs, hints.get("return")),
        "_supplied": tuple(supplied),
        "_fields": tuple(fields),
        "_hints": hints,
    }
    return type(function.__name__, (base,), {**body, **settings})


def _type_name(hint: Any) -> str:
    kind = typing.get_origin(hint) or hint
    name = getattr(kind, "__name__", "any") if isinstance(kind, type) else "any"
    return name if name in FIELD_TYPES else "any"


def _typed(outputs: Outputs, hint: Any) -> Outputs:
    """Names with the types of what the function gives, where its annotation has one for each."""
    names = [] if outputs is None or isinstance(outputs, str | Mapping) else list(outputs)
    if not names or not all(isinstance(name, str) for name in names):
        return outputs
    if typing.get_origin(hint) in _SERIES and typing.get_args(hint):
        hint = typing.get_args(hint)[0]
    kinds = typing.get_args(hint) if typing.get_origin(hint) is tuple else (hint,)
    if len(kinds) != len(names):
        return outputs
    known = [_type_name(kind) for kind in kinds]
    return outputs if set(known) == {"any"} else dict(zip(names, known, strict=True))


def _given(result: Any) -> Any:
    """What a function gave, one after the other."""
    return result if isinstance(result, types.GeneratorType) else (result,)


def _values(item: Any) -> tuple[Any, str | None]:
    """Values and stream of what was yielded."""
    if isinstance(item, Emit):
        return list(item.values), item.stream
    return (list(item) if isinstance(item, tuple) else [item]), None
