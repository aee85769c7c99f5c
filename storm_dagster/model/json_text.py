"""JSON of users' values: the rule for all places that read or write it.

JSON is UTF-8 text, also with a byte order mark. Whole numbers of up to 4300 digits are exact, other
numbers are the nearest float. NaN, infinities, numbers beyond the largest float, and half of a
surrogate pair have no form: they are refused by name, when read and when written.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from json.encoder import encode_basestring
from math import isfinite
from typing import Any, NoReturn

import msgspec

MAX_DEPTH = 200
"""Maximum number of levels of maps and lists in one value.

PostgreSQL and most readers of JSON have a limit, too.
"""

# Types with a form in JSON, for errors.
_OWN_TYPES = "text, numbers, booleans, None, lists, and maps whose keys are text"
_REMEDIES: dict[str, str] = {
    "bytes": "decode it to text, or write it to a column of bytes",
    "bytearray": "decode it to text, or write it to a column of bytes",
    "memoryview": "decode it to text, or write it to a column of bytes",
    "datetime": "make it text with isoformat(), or write it to a column of times",
    "date": "make it text with isoformat(), or write it to a column of dates",
    "time": "make it text with isoformat(), or write it to a column of times",
    "timedelta": "make it a number with total_seconds()",
    "Decimal": "make it text with str(), or write it to a column of numbers",
    "UUID": "make it text with str()",
    "set": "make it a list",
    "frozenset": "make it a list",
}
"""Name of a type without a form in JSON -> the remedy."""


_decode = msgspec.json.Decoder().decode
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class InvalidJson(ValueError):
    """Text that is not JSON; the message names the reason."""


class NoJsonForm(ValueError):
    """A value, or a part of it, that JSON cannot hold unchanged.

    The message names the part, such as ``.items[3].price``, the reason and the remedy.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason: str = reason
        self.path: str = ""
        """Place of the part in the value; each level that the error passes adds its step."""

    def __str__(self) -> str:
        return f"at {self.path}: {self.reason}" if self.path else self.reason


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
        _check_characters(part)
    elif isinstance(part, float):
        _check_finite(part)
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


def json_text(value: Any) -> str:
    """JSON text of a value, from which ``json.loads`` makes an equal one.

    Text, whole numbers of any length, finite floats, booleans, ``None``, lists and maps with text
    keys have a form; a tuple is written as a list. Raises :class:`NoJsonForm` for any other value,
    also inside a list or map, and for text with a NUL character or half of a surrogate pair, which
    PostgreSQL refuses.
    """
    return _text_of(value, MAX_DEPTH)


def _text_of(value: Any, levels: int) -> str:
    """JSON text of a value, which may have ``levels`` levels of maps and lists."""
    if value is None:
        return "null"
    if value is True:
        return "true"
    if value is False:
        return "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        return _whole_number(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, dict | list | tuple) and not levels:
        raise NoJsonForm(f"it is nested deeper than {MAX_DEPTH} levels: make it flatter")
    if isinstance(value, dict):
        return _map(value, levels - 1)
    if isinstance(value, list | tuple):
        return _list(value, levels - 1)
    raise _no_form(value)


def _string(value: str) -> str:
    if "\0" in value:
        raise NoJsonForm(f"the text {_excerpt(value)} has a NUL character: remove it")
    _check_characters(value)
    return encode_basestring(value)


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        reason = f"the text {_excerpt(text)} has half of a surrogate pair, which is not a character"
        raise NoJsonForm(f"{reason}: remove or replace it") from None


def _whole_number(value: int) -> str:
    try:
        # Not the name of a member of an enumeration.
        return int.__repr__(value)
    except ValueError:
        reason = f"a whole number of {value.bit_length()} bits has too many digits"
        raise NoJsonForm(f"{reason}: make it text in another base") from None


def _float(value: float) -> str:
    _check_finite(value)
    text = float.__repr__(value)
    if "e+" not in text:
        return text
    # PostgreSQL returns 1e+23 without a fraction. A reader takes that for a whole number, and the
    # whole number 10**23 is not equal to the float.
    return f"{Decimal(text):f}.0"


def _check_finite(value: float) -> None:
    if not isfinite(value):
        raise NoJsonForm(f"{float.__repr__(value)} is not a number of JSON: make it None or text")


def _map(value: Mapping[Any, Any], levels: int) -> str:
    """JSON text of a map; an error inside gets the key in its path."""
    members: list[str] = []
    for key, member in value.items():
        if not isinstance(key, str):
            reason = f"a key of the map is of type {type_name(key)}, and JSON has only text keys"
            raise NoJsonForm(f"{reason}: make the keys text")
        name = _string(key)
        try:
            text = _text_of(member, levels)
        except NoJsonForm as error:
            error.path = f".{key}{error.path}"
            raise
        members.append(f"{name}: {text}")
    return "{" + ", ".join(members) + "}"


def _list(value: Sequence[Any], levels: int) -> str:
    """JSON text of a list; an error inside gets the index in its path."""
    elements: list[str] = []
    for index, element in enumerate(value):
        try:
            elements.append(_text_of(element, levels))
        except NoJsonForm as error:
            error.path = f"[{index}]{error.path}"
            raise
    return "[" + ", ".join(elements) + "]"


def _no_form(value: Any) -> NoJsonForm:
    remedy = _REMEDIES.get(type(value).__name__, f"make it one of {_OWN_TYPES}")
    return NoJsonForm(f"JSON has no form of a value of type {type_name(value)}: {remedy}")


def type_name(value: Any) -> str:
    """Name of the type of a value, with its module unless it is a built-in type."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _excerpt(text: str) -> str:
    """The first characters of a text in ASCII.

    The error itself can then be stored anywhere.
    """
    return ascii(text) if len(text) <= 40 else f"{text[:40]!a}..."
