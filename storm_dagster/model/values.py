"""Values of tuples and of keyed state: allowed types, copies and bytes.

A value comes out of :func:`decode_value` with the type that it had. MessagePack has text, numbers,
bytes, lists, maps of plain keys, booleans and ``None``; every other type is an extension, whose
code is a contract with stored state.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from storm_dagster.model.errors import InvalidRequest

REGISTER_KEY = "topology.serialization.register"
"""Conf key of the classes that values may have."""
ATOMIC: frozenset[type] = frozenset((str, int, float, bool, bytes, type(None)))
"""Immutable types of MessagePack: their values are neither copied nor converted."""

_MAX_DEPTH = 64
"""Levels of containers in one value, so that a cycle ends with an error."""
# Values of these types are not copied.
_IMMUTABLE = ATOMIC | {date, timedelta, Decimal, UUID}
_MICROSECOND = timedelta(microseconds=1)
_MIN_INTEGER = -(1 << 63)
_MAX_INTEGER = (1 << 64) - 1
"""Bounds of MessagePack's integers."""
_encode = msgspec.msgpack.Encoder().encode


class _Form(NamedTuple):
    """Extension of one type: its code, and the parts of a value."""

    code: int
    """Type of MessagePack's extension; a code is never used for another type."""
    take: Callable[[Any], Iterable[Any]]
    """Returns the parts of a value."""
    make: Callable[[list[Any]], Any]
    """Creates the value of its parts."""


def _offset(value: datetime | time) -> int | None:
    offset = value.utcoffset()
    if offset is None and value.tzinfo is not None:
        raise TypeError(
            "a time in a zone without a fixed offset, which cannot travel: use a datetime"
        )
    return None if offset is None else offset // _MICROSECOND


def _zone(offset: int | None) -> timezone | None:
    return None if offset is None else timezone(timedelta(microseconds=offset))


def _clock(value: datetime | time) -> tuple[Any, ...]:
    return (value.hour, value.minute, value.second, value.microsecond, value.fold, _offset(value))


def _make_map(parts: list[Any]) -> dict[Any, Any]:
    items = iter(parts)
    return dict(zip(items, items, strict=True))


def _take_dataclass(value: Any) -> list[Any]:
    parts: list[Any] = [_name_of(type(value))]
    for field in fields(value):
        parts += (field.name, getattr(value, field.name))
    return parts


def _make_dataclass(parts: list[Any]) -> Any:
    """The object of (name of its class, field, value, field, value, ...).

    Stored fields that the class no longer has are dropped. :class:`InvalidRequest` for a field
    without a stored value and a default.
    """
    kind = _class_of(parts[0])
    stored_fields = _make_map(parts[1:])
    # As in `copy`, no code of the class runs. A field that the stored value lacks has its default.
    value = object.__new__(kind)
    for field in fields(kind):
        if field.name in stored_fields:
            part = stored_fields[field.name]
        elif field.default_factory is not MISSING:
            part = field.default_factory()
        elif field.default is not MISSING:
            part = field.default
        else:
            raise InvalidRequest(
                f"a stored {parts[0]} has no field {field.name!r}: give the field a default"
            )
        object.__setattr__(value, field.name, part)
    return value


def _make_enum(parts: list[Any]) -> Any:
    kind = _class_of(parts[0])
    return kind(parts[1]) if issubclass(kind, Flag) else kind[parts[1]]


def _take_enum(value: Any) -> tuple[str, Any]:
    return _name_of(type(value)), value.value if isinstance(value, Flag) else value.name


def _take_map(value: dict[Any, Any]) -> list[Any]:
    parts: list[Any] = []
    for item in value.items():
        parts += item
    return parts


_ENUM = _Form(14, _take_enum, _make_enum)
_DATACLASS = _Form(15, _take_dataclass, _make_dataclass)
_MAP = _Form(11, _take_map, _make_map)
_FORMS: dict[type, _Form] = {
    tuple: _Form(1, list, tuple),
    set: _Form(2, list, set),
    frozenset: _Form(3, list, frozenset),
    bytearray: _Form(4, lambda value: (bytes(value),), lambda parts: bytearray(parts[0])),
    datetime: _Form(
        5,
        lambda value: (value.year, value.month, value.day, *_clock(value)),
        lambda parts: datetime(*parts[:7], fold=parts[7], tzinfo=_zone(parts[8])),
    ),
    date: _Form(6, lambda value: (value.year, value.month, value.day), lambda parts: date(*parts)),
    time: _Form(7, _clock, lambda parts: time(*parts[:4], fold=parts[4], tzinfo=_zone(parts[5]))),
    timedelta: _Form(
        8,
        lambda value: (value.days, value.seconds, value.microseconds),
        lambda parts: timedelta(*parts),
    ),
    Decimal: _Form(9, lambda value: (str(value),), lambda parts: Decimal(parts[0])),
    UUID: _Form(10, lambda value: (value.bytes,), lambda parts: UUID(bytes=parts[0])),
    # MessagePack has no integers of more than 64 bits, and no text with lone surrogates.
    int: _Form(12, lambda value: (hex(value),), lambda parts: int(parts[0], 16)),
    str: _Form(
        13,
        lambda value: (value.encode("utf-8", "surrogatepass"),),
        lambda parts: parts[0].decode("utf-8", "surrogatepass"),
    ),
}
# Code of an extension -> its form.
_BY_CODE = {form.code: form for form in (*_FORMS.values(), _MAP, _ENUM, _DATACLASS)}

_registered: tuple[str, ...] = ()
"""Names of the classes that are allowed."""
_load: Callable[[str, str], Any] | None = None
"""Loads one of them; ``None`` before :func:`register_classes`."""
_classes: dict[str, type] | None = None
"""The loaded classes by name; ``None`` before the first use."""


def register_classes(names: Iterable[str], load: Callable[[str, str], Any]) -> None:
    """Allow these dataclasses and Enums (``module:QualName``) in values.

    ``load`` is called with the conf key and the name when a class is first needed.
    """
    global _registered, _load, _classes
    _registered = tuple(names)
    _load = load
    _classes = None


def _load_classes() -> dict[str, type]:
    """The registered classes by name, loaded at the first call.

    :class:`InvalidRequest` for one that is neither a dataclass nor an Enum.
    """
    global _classes
    if _load is None:
        return {}
    if _classes is None:
        classes = {name: _load(REGISTER_KEY, name) for name in _registered}
        for name, kind in classes.items():
            if not isinstance(kind, type) or not (is_dataclass(kind) or issubclass(kind, Enum)):
                raise InvalidRequest(
                    f"{REGISTER_KEY} {name!r} is neither a dataclass nor an Enum: remove it"
                )
        _classes = classes
    return _classes


def _class_of(name: str) -> Any:
    """The registered class of that name; :class:`InvalidRequest` for any other."""
    try:
        return _load_classes()[name]
    except KeyError:
        raise InvalidRequest(
            f"a value of the class {name} cannot be read: name it in {REGISTER_KEY}"
        ) from None


def _name_of(kind: type) -> str:
    """The name of a registered class; ``TypeError`` with a remedy for any other."""
    for name, registered_kind in _load_classes().items():
        if registered_kind is kind:
            return name
    name = f"{kind.__module__}:{kind.__qualname__}"
    remedy = f"name {name!r} in {REGISTER_KEY}, or convert it"
    if not is_dataclass(kind) and not issubclass(kind, Enum):
        if hasattr(kind, "tolist"):
            remedy = "convert it with .tolist()"
        else:
            remedy = (
                "emit text, numbers, bytes, lists, maps, sets, tuples, dates, times, UUIDs, or a"
                " registered dataclass"
            )
    raise TypeError(
        f"of type {name.removeprefix('builtins:')}, which cannot travel to another worker or be"
        f" stored: {remedy}"
    )


def _form_of(kind: type) -> _Form:
    """The extension of a type; ``TypeError`` for a type that is not allowed."""
    form = _FORMS.get(kind)
    if form is None:
        # Raises for a class that is not registered.
        _name_of(kind)
        form = _ENUM if issubclass(kind, Enum) else _DATACLASS
    return form


def copy_value(value: Any, depth: int = 0) -> Any:
    """Copy ``value`` so that the copy shares no mutable object with it.

    ``TypeError`` with a remedy for a type that is not allowed. A ``datetime`` or ``time`` in a zone
    gets the fixed offset that the zone has at that time, as it does when it travels.
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if depth > _MAX_DEPTH:
        raise TypeError(f"nested more than {_MAX_DEPTH} deep: flatten it, or send it as text")
    depth += 1
    if kind is dict:
        if ATOMIC.issuperset(map(type, value)) and ATOMIC.issuperset(map(type, value.values())):
            return value.copy()
        return {copy_value(key, depth): copy_value(part, depth) for key, part in value.items()}
    if kind is list:
        return (
            value.copy()
            if ATOMIC.issuperset(map(type, value))
            else [copy_value(part, depth) for part in value]
        )
    if (plain := getattr(kind, "travels_as", None)) in (int, list):
        return copy_value(plain(value), depth)
    form = _form_of(kind)
    return (
        value
        if form is _ENUM
        else form.make([copy_value(part, depth) for part in form.take(value)])
    )


def _pack(value: Any, odd: bool = False) -> Any:
    """Convert ``value`` to types of MessagePack.

    With ``odd``, all text, and the integers that MessagePack does not have, become extensions.
    """
    kind = type(value)
    if kind in ATOMIC:
        if (
            odd
            and kind in _FORMS
            and (type(value) is str or not _MIN_INTEGER <= value <= _MAX_INTEGER)
        ):
            return _extension(_FORMS[kind], value, odd)
        return value
    if kind is list:
        return (
            value
            if not odd and ATOMIC.issuperset(map(type, value))
            else [_pack(part, odd) for part in value]
        )
    if kind is dict:
        keys = [_pack(key, odd) for key in value]
        if ATOMIC.issuperset(map(type, keys)):
            return dict(zip(keys, [_pack(part, odd) for part in value.values()], strict=True))
        return _extension(_MAP, value, odd)
    return _extension(_form_of(kind), value, odd)


def _extension(form: _Form, value: Any, odd: bool) -> msgspec.msgpack.Ext:
    """The value as an extension, whose bytes are a list of its parts."""
    return msgspec.msgpack.Ext(form.code, _encode([_pack(part, odd) for part in form.take(value)]))


def encode_own(value: Any) -> bytes:
    """Bytes of a copy that :func:`copy_value` made."""
    try:
        return _encode(_pack(value))
    except (OverflowError, UnicodeEncodeError):
        # A long integer or a lone surrogate is rare: only then each text and integer is checked.
        return _encode(_pack(value, odd=True))


def encode_value(value: Any) -> bytes:
    """Bytes of an allowed value; ``TypeError`` with a remedy for any other."""
    return encode_own(copy_value(value))


def decode_extension(code: int, data: memoryview) -> Any:
    """The value of an extension.

    :class:`InvalidRequest` if its bytes are not a value, or its class is not registered.
    """
    try:
        return _BY_CODE[code].make(_decode_list(data))
    except InvalidRequest:
        raise
    except Exception as error:
        raise InvalidRequest(
            f"a value of extension {code} cannot be read ({type(error).__name__}: {error})"
        ) from None


decode_value: Callable[[bytes | memoryview], Any] = msgspec.msgpack.Decoder(
    ext_hook=decode_extension
).decode
"""The value in some bytes of :func:`encode_value`."""
_decode_list = msgspec.msgpack.Decoder(list[Any], ext_hook=decode_extension).decode


class UnreadableValue:
    """Placeholder of a value that cannot be read.

    Its use raises the reason.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __getattr__(self, name: str) -> Any:
        raise InvalidRequest(self.reason)

    def __repr__(self) -> str:
        return f"<{self.reason}>"


def decode_received(code: int, data: memoryview) -> Any:
    """:func:`decode_extension` for frames of other workers.

    One unreadable value does not harm the other values of a frame.
    """
    try:
        return decode_extension(code, data)
    except InvalidRequest as error:
        return UnreadableValue(error.message)


def own_values(
    values: Sequence[Any], fields: Sequence[str], stream: str, component: str, task: int
) -> list[Any]:
    """Copies of a tuple's values (:func:`copy_value`).

    ``InvalidRequest`` names the field of a value that is not allowed.
    """
    copies: list[Any] = []
    for value in values:
        try:
            copies.append(copy_value(value))
        except TypeError as error:
            index = len(copies)
            field = fields[index] if index < len(fields) else f"number {index}"
            raise InvalidRequest(
                f"component {component!r}, task {task}: field {field!r} of stream {stream!r} is"
                f" {error}"
            ) from None
    return copies
