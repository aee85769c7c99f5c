"""JSON text of a value, which a reader of JSON turns into an equal value."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from json.encoder import encode_basestring
from math import isfinite
from typing import Any

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
    check_characters(value)
    return encode_basestring(value)


def check_characters(value: str) -> None:
    """Raise :class:`NoJsonForm` for text with half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        reason = (
            f"the text {_excerpt(value)} has half of a surrogate pair, which is not a character"
        )
        raise NoJsonForm(f"{reason}: remove or replace it") from None


def _whole_number(value: int) -> str:
    try:
        # Not the name of a member of an enumeration.
        return int.__repr__(value)
    except ValueError:
        reason = f"a whole number of {value.bit_length()} bits has too many digits"
        raise NoJsonForm(f"{reason}: make it text in another base") from None


def _float(value: float) -> str:
    check_finite(value)
    text = float.__repr__(value)
    if "e+" not in text:
        return text
    # PostgreSQL returns 1e+23 without a fraction. A reader takes that for a whole number, and the
    # whole number 10**23 is not equal to the float.
    return f"{Decimal(text):f}.0"


def check_finite(value: float) -> None:
    """Raise :class:`NoJsonForm` for NaN and infinities."""
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
