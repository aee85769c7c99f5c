"""JSON of users' values: the rule for all places that read it, or write it for programs and people.

JSON is UTF-8 text, also with a byte order mark. Whole numbers of up to 4300 digits are exact, other
numbers are the nearest float. NaN, infinities, numbers beyond the largest float, and half of a
surrogate pair have no form: they are refused by name, when read and when written. Targets that
return an equal value get :func:`storm_dagster.model.json_text.json_text`, by the same rule.
"""

import json
from collections.abc import Callable
from math import isfinite
from typing import Any, NoReturn

import msgspec

from storm_dagster.model.json_text import NoJsonForm, check_characters, check_finite

_decode = msgspec.json.Decoder().decode
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class InvalidJson(ValueError):
    """Text that is not JSON; the message names the reason."""


def decode_json(text: bytes | str) -> Any:
    """The value of a JSON text, with or without a byte order mark.

    Raises :class:`InvalidJson` for any other text.
    """
    try:
        return _decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        # A byte order mark is rare, so it is looked for only here.
        unmarked = _without_mark(text)
        if unmarked is None:
            _refuse(text)
    try:
        return _decode(unmarked)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        _refuse(unmarked)


def _without_mark(text: bytes | str) -> bytes | str | None:
    """The text after its byte order mark; ``None`` without one."""
    if isinstance(text, str):
        return text[1:] if text.startswith("\ufeff") else None
    return text[3:] if text.startswith(_BYTE_ORDER_MARK) else None


def _refuse(text: bytes | str) -> NoReturn:
    """Raise :class:`InvalidJson` with the reason why a text is not JSON.

    The decoder's own errors do not name it: half of a surrogate pair is "truncated" for it.
    """
    raise InvalidJson(_reason(text)) from None


def _reason(text: bytes | str) -> str:
    """The reason why a text is not JSON."""
    try:
        if not isinstance(text, str):
            text = text.decode()
        if not text.strip():
            return "it is empty"
        value = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_parse_float,
            parse_int=_parse_whole_number,
        )
        _check_part(value)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        return f"byte {error.start} (0x{byte:02x}) is not UTF-8"
    except RecursionError:
        return "it is nested too deep"
    except json.JSONDecodeError as error:
        return f"{error.msg} at character {error.pos}"
    except ValueError as error:
        return str(error)
    return "it is not JSON"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON: write null or text")


def _parse_float(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"the number {text[:40]} is beyond the largest float")
    return value


def _parse_whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"a whole number has {len(text)} digits, more than 4300") from None


def encode_converted(value: Any, convert: Callable[[Any], Any]) -> bytes:
    """JSON of a value, with other forms for types that JSON lacks.

    Bytes become base64, tuples and sets lists, times text of ISO 8601, and keys of maps text;
    ``convert`` is called with a part of any further type. Raises :class:`NoJsonForm` for NaN,
    infinities and half of a surrogate pair.
    """
    try:
        raw = msgspec.json.encode(value, enc_hook=convert)
    except UnicodeEncodeError:
        check_parts(value, convert)
        raise
    if b"null" in raw:
        # The encoder writes null for NaN, too.
        check_parts(value, convert)
    return raw


def check_parts(value: Any, convert: Callable[[Any], Any]) -> None:
    """Raise :class:`NoJsonForm` if :func:`encode_converted` must refuse a part."""
    _check_part(msgspec.to_builtins(value, enc_hook=convert))


def _check_part(part: Any) -> None:
    if isinstance(part, str):
        check_characters(part)
    elif isinstance(part, float):
        check_finite(part)
    elif isinstance(part, list | tuple | set | frozenset):
        for index, member in enumerate(part):
            _check_member(member, f"[{index}]")
    elif isinstance(part, dict):
        for key, member in part.items():
            _check_part(key)
            _check_member(member, f".{key}")


def _check_member(member: Any, step: str) -> None:
    try:
        _check_part(member)
    except NoJsonForm as error:
        error.path = f"{step}{error.path}"
        raise


def shown_json(value: Any, show: Callable[[Any], str]) -> bytes:
    """JSON of a value for people, as :func:`encode_converted`, without an exception to its rule.

    Parts that it refuses are text: ``NaN`` is ``"nan"``, half of a surrogate pair ``"\\udc80"``.
    ``show`` is called with a part of a type without a form.
    """
    try:
        return encode_converted(value, show)
    except NoJsonForm:
        return msgspec.json.encode(_shown_part(msgspec.to_builtins(value, enc_hook=show)))


def _shown_part(part: Any) -> Any:
    """A part of a value, with text in place of what JSON lacks."""
    if isinstance(part, str):
        return part.encode("utf-8", "backslashreplace").decode()
    if isinstance(part, float):
        return part if isfinite(part) else str(part)
    if isinstance(part, list | tuple | set | frozenset):
        return [_shown_part(member) for member in part]
    if isinstance(part, dict):
        return {_shown_part(key): _shown_part(member) for key, member in part.items()}
    return part


NON_FINITE: dict[str, float] = {
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}
"""Numbers that JSON lacks, by their texts in metrics, which are those of Protocol Buffers."""


def metric_number(value: float) -> float | str:
    """A number for a metric; the text of :data:`NON_FINITE` if JSON lacks it."""
    if isfinite(value):
        return value
    if value != value:
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
