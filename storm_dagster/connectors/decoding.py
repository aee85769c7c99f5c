"""Values of a tuple, from the value of a source's record. All functions are pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.json_text import type_name
from storm_dagster.model.json_values import decode_json

_BYTES = (bytes, bytearray, memoryview)
OnNull = Literal["emit", "skip", "dead_letter"]
"""Handling of a record whose decoded value is ``None``."""


def check_on_null(spout: str, on_null: str) -> None:
    """Raise :class:`InvalidTopology` if a spout of that name has another ``on_null``."""
    if on_null not in get_args(OnNull):
        raise InvalidTopology(
            f'on_null of {spout} is {on_null!r}: make it "emit", "skip" or "dead_letter"'
        )


class WrongShape(ValueError):
    """Decoded value that is not a tuple of the spout's fields."""


def decoder_of(decode: str | Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The conversion of a record's value, by the ``decode`` of a spout.

    A source may return decoded values, such as the maps of a CSV file: only bytes, and for JSON
    text, are converted.
    """
    return _DECODERS[decode] if isinstance(decode, str) else decode


def _decode_as_json(raw: Any) -> Any:
    if type(raw) is bytes or type(raw) is str:
        return decode_json(raw)
    if isinstance(raw, _BYTES):
        return decode_json(bytes(raw))
    return raw


def _decode_as_text(raw: Any) -> Any:
    return bytes(raw).decode() if isinstance(raw, _BYTES) else raw


def _keep(raw: Any) -> Any:
    return raw


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "json": _decode_as_json,
    "text": _decode_as_text,
    "none": _keep,
}


def tuple_of(decoded: Any, fields: Sequence[str], on_null: OnNull) -> Sequence[Any] | None:
    """Values of the tuple of a decoded value; ``None`` skips the record.

    With one field it is the value itself, with several its entries of these names. Raises
    :class:`WrongShape` if it does not have them.
    """
    if decoded is None and on_null != "emit":
        if on_null == "skip":
            return None
        raise WrongShape("its value is null, and on_null of the spout is dead_letter")
    if len(fields) == 1:
        return [decoded]
    # The check of an abstract class costs more than all else here.
    if type(decoded) is dict or isinstance(decoded, Mapping):
        try:
            return [decoded[name] for name in fields]
        except KeyError:
            raise _missing_field(decoded, fields) from None
    if isinstance(decoded, list | tuple) and len(decoded) == len(fields):
        return decoded
    raise _wrong_shape(decoded, fields)


def _missing_field(decoded: Mapping[Any, Any], fields: Sequence[str]) -> WrongShape:
    missing = [repr(name) for name in fields if name not in decoded]
    names = ", ".join(map(ascii, decoded))
    return WrongShape(
        f"its map has no {', '.join(missing)}, only: {names[:200] or 'nothing'}: "
        "override values() of the spout to emit such records"
    )


def _wrong_shape(decoded: Any, fields: Sequence[str]) -> WrongShape:
    expected = f"a map or a list of the {len(fields)} fields {', '.join(map(repr, fields))}"
    if decoded is None:
        return WrongShape(
            f'its value is null, and not {expected}: set on_null of the spout to "skip" to drop '
            "such records"
        )
    actual = f"of type {type_name(decoded)}"
    if isinstance(decoded, list | tuple):
        actual = f"a {type_name(decoded)} of {len(decoded)} values"
    return WrongShape(
        f"its value is {actual}, and not {expected}: "
        "override values() of the spout to emit such records"
    )
