"""JSON of rows, for messages and files: a reader gets an equal row."""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from math import isfinite
from typing import Any

import msgspec

from storm_dagster.connectors.sinks import Rejected
from storm_dagster.model.json_text import MAX_DEPTH, NoJsonForm, json_text

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder()
_FLAT_TYPES = frozenset((str, int, float, bool, type(None)))
"""Types without parts that JSON has."""


def json_bytes(value: Any) -> bytes:
    """JSON of a value in UTF-8.

    As :func:`json_text`, and also for text with a NUL character. Raises :class:`NoJsonForm`.
    """
    try:
        encoded = _encoder.encode(value)
        if type(value) is dict and _are_flat([value], encoded):
            return encoded
        # msgspec has a form of more types, such as null for NaN and base64 for bytes.
        if _decoder.decode(encoded) == value:
            return encoded
    except Exception:
        # A number of more than 64 bits, or a value without a form, which the next line names.
        pass
    form = _json_form(value, MAX_DEPTH)
    return json.dumps(form, ensure_ascii=False, separators=(",", ":")).encode()


def encode_lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """JSON of rows in UTF-8, a line for each.

    Raises :class:`Rejected` for the rows that JSON cannot hold unchanged.
    """
    if all(type(row) is dict for row in rows):
        encoded = _encode_at_once(rows)
        if encoded is not None:
            return encoded
    lines: list[bytes] = []
    refused: dict[int, str] = {}
    for index, row in enumerate(rows):
        try:
            lines.append(json_bytes(row if type(row) is dict else dict(row)))
        except NoJsonForm as error:
            refused[index] = f"the row, {error}"
    if refused:
        raise Rejected(refused)
    lines.append(b"")
    return b"\n".join(lines)


def _encode_at_once(rows: Sequence[Any]) -> bytes | None:
    """Lines of rows, if a reader gets equal ones; else ``None``.

    It is faster than :func:`json_bytes` for each row, which names the row at fault.
    """
    try:
        encoded = _encoder.encode_lines(rows)
        if _are_flat(rows, encoded) or _decoder.decode_lines(encoded) == list(rows):
            return encoded
    except Exception:
        # As in json_bytes.
        pass
    return None


def _are_flat(rows: Sequence[dict[Any, Any]], encoded: bytes) -> bool:
    """True if msgspec has the form of JSON for each value, by a look at their types.

    ``encoded`` is what msgspec wrote for the rows.
    """
    kinds = set(map(type, chain.from_iterable(map(dict.values, rows))))
    if not _FLAT_TYPES.issuperset(kinds) or not set(map(type, chain.from_iterable(rows))) <= {str}:
        return False
    # msgspec writes null for a float that is not finite. The look at each float costs more than
    # all else here.
    if float not in kinds or b"null" not in encoded:
        return True
    floats = [value for row in rows for value in row.values() if type(value) is float]
    return all(map(isfinite, floats))


def _json_form(value: Any, levels: int) -> Any:
    """The value with lists instead of tuples; :class:`NoJsonForm` if JSON cannot hold it."""
    if isinstance(value, dict | list | tuple) and not levels:
        raise NoJsonForm(f"it is nested deeper than {MAX_DEPTH} levels: make it flatter")
    if isinstance(value, dict):
        form: dict[str, Any] = {}
        for key, member in value.items():
            # Only for its error.
            json_text({_without_nul(key): None})
            form[key] = _part_form(member, levels - 1, f".{key}")
        return form
    if isinstance(value, list | tuple):
        return [_part_form(part, levels - 1, f"[{index}]") for index, part in enumerate(value)]
    json_text(_without_nul(value))
    return value


def _without_nul(value: Any) -> Any:
    """Text without the character that PostgreSQL refuses; any other value as it is."""
    return value.replace("\0", "") if isinstance(value, str) else value


def _part_form(part: Any, levels: int, step: str) -> Any:
    """The form of a part of a value; ``step`` leads to it, for the error."""
    try:
        return _json_form(part, levels)
    except NoJsonForm as error:
        error.path = f"{step}{error.path}"
        raise
