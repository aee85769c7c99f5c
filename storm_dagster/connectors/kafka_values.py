"""Keys and headers of Kafka's messages, made of values of rows."""

from collections.abc import Mapping
from typing import Any

from storm_dagster.model.json_text import type_name

Headers = list[tuple[str, bytes | None]]
"""Headers of a message: names may be repeated."""


def encode_key(field: str, value: Any) -> bytes | None:
    """Encode the value of a field as the key of a message.

    Bytes are unchanged, text is UTF-8, a whole number is its decimal text, ``None`` is a message
    without a key. Raises ``ValueError`` for any other value, whose text would depend on the version
    of Python or of a library.
    """
    return _encode_scalar(value, f"the key {field!r}", "key")


def encode_headers(field: str, value: Any) -> Headers:
    """Encode the value of a field as the headers of a message.

    It is a list of (name, value) pairs, which may repeat a name, or a map from names to values;
    ``None`` is no header. Names are text, values as keys in :func:`encode_key`. Raises
    ``ValueError`` for any other value.
    """
    if value is None:
        return []
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple):
        raise ValueError(
            f"the headers {field!r} are of type {type_name(value)}: make them a list of "
            "(name, value) pairs, or a map, in row_of"
        )
    return [_encode_header(field, pair) for pair in pairs]


def _encode_header(field: str, pair: Any) -> tuple[str, bytes | None]:
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
        raise ValueError(
            f"a header in {field!r} is of type {type_name(pair)}: make it a pair of a name, "
            "which is text, and a value"
        )
    name, value = pair
    # Only for its error: librdkafka would end the text at the half of a pair.
    _encode_scalar(name, f"the name of a header in {field!r}", "headers")
    if "\0" in name:
        raise ValueError(f"the name of a header in {field!r} has a NUL character: remove it")
    return str(name), _encode_scalar(value, f"the header {name!r} in {field!r}", "headers")


def _encode_scalar(value: Any, subject: str, setting: str) -> bytes | None:
    """The bytes of a key or header.

    For errors, ``subject`` names the value, and ``setting`` the argument of the sink.
    """
    if value is None:
        return None
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            reason = f"{subject} has half of a surrogate pair at position {error.start}"
            raise ValueError(f"{reason}, and is not UTF-8: remove it in row_of") from None
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            # Not the name of a member of an enumeration.
            return int.__repr__(value).encode()
        except ValueError as error:
            raise ValueError(f"{subject} cannot be written: {error}") from None
    part = setting.removesuffix("s")
    raise ValueError(
        f"{subject} is of type {type_name(value)}, and a {part} is bytes, text, "
        f"a whole number or None: make it one of these in row_of, or set {setting} of the "
        "KafkaSink to another field"
    )
