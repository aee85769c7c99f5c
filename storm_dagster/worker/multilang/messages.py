"""Messages in the output of a multilang program, and what else it prints there.

A message is JSON, a newline, ``end``, a newline. Standard output is the pipe of the protocol, but
programs print to it: lines that are not messages are separated from messages, so that neither is
lost. Pure, except :func:`read_output`, which reads the pipe.
"""

import json
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

from storm_dagster.model.json_values import InvalidJson, decode_json

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message of a program."""
_MAX_CANDIDATES = 20
"""Places in the lines before an ``end`` at which a message is looked for."""
_MAX_SHOWN = 500
"""Characters of a line that are logged."""


class StrayLine(NamedTuple):
    """Line of the output that is not a message, such as that of a ``print``."""

    text: str


class BrokenMessage(NamedTuple):
    """Message that is not valid JSON."""

    document: dict[str, Any] | None
    """The message, if it can be read nevertheless (with NaN, or with bytes that are not UTF-8): it
    names the tuples that it belongs to.
    """
    reason: str


def read_output(stream: IO[bytes]) -> Iterator[Any]:
    """Yield messages, :class:`StrayLine` and :class:`BrokenMessage` of a program's output.

    A line that cannot be a part of a message is yielded at once. Raises ``EOFError`` at the end of
    the output, ``ValueError`` for a message of more than :data:`MAX_MESSAGE_BYTES`.
    """
    lines: list[bytes] = []
    size = 0
    while True:
        line = stream.readline(MAX_MESSAGE_BYTES)
        if not line:
            raise EOFError("Pipe to subprocess seems to be broken")
        if line.rstrip(b"\r\n") == b"end":
            yield from parse_frame(lines)
            lines = []
            size = 0
        elif not lines and not _may_begin_message(line):
            yield _stray(line)
        else:
            lines.append(line)
            size += len(line)
            if size >= MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of more than {MAX_MESSAGE_BYTES} bytes")


class _Candidate(NamedTuple):
    """Text in a frame that may be its message."""

    first: int
    """Index of its first line."""
    after: int
    """Index of the line after its last one."""
    prefix: bytes
    """Part of its first line before it."""
    text: bytes


def parse_frame(lines: Sequence[bytes]) -> list[Any]:
    """Return the messages and other lines before an ``end``, in their order.

    The message is all lines, or some of the last ones, or the end of the last one, if a program
    printed text without a newline before it; or one line, if another thread of the program printed
    lines between the message and its ``end``.
    """
    candidates = list(_candidates(lines))
    for candidates_of_form in (candidates, list(_lines_alone(lines))):
        found = _message_of(candidates_of_form)
        if found is not None:
            candidate, message = found
            before = _strays(lines[: candidate.first], candidate.prefix)
            return [*before, message, *_strays(lines[candidate.after :], b"")]
    strays = _strays(lines, b"")
    if not candidates:
        return strays
    return [*strays, BrokenMessage(None, "it is not valid JSON (see the worker's log)")]


def _message_of(candidates: Sequence[_Candidate]) -> tuple[_Candidate, Any] | None:
    """The first candidate that is a message, or else nearly one, and the message."""
    for candidate in candidates:
        try:
            message = decode_json(candidate.text)
        except InvalidJson:
            continue
        if isinstance(message, dict | list):
            return candidate, message
    for candidate in candidates:
        document = _decode_anyhow(candidate.text)
        if document is not None:
            return candidate, BrokenMessage(document, _reason_of(candidate.text))
    return None


def _may_begin_message(line: bytes) -> bool:
    """True if a message may begin in the line."""
    return line.lstrip()[:1] in (b"{", b"[") or b'{"' in line


def _candidates(lines: Sequence[bytes]) -> Iterator[_Candidate]:
    """Yield the texts that may be the message, the likeliest first."""
    starts = [number for number, line in enumerate(lines) if _may_begin_message(line)]
    if not starts:
        return
    end = len(lines)
    # All lines: a message that is printed over several lines.
    for number in (starts[0], *reversed(starts[-_MAX_CANDIDATES:])):
        yield _Candidate(number, end, b"", b"".join(lines[number:]))
    last = lines[starts[-1]]
    rest = b"".join(lines[starts[-1] + 1 :])
    position = last.find(b'{"', 1)
    for _ in range(_MAX_CANDIDATES):
        if position < 0:
            break
        yield _Candidate(starts[-1], end, last[:position], last[position:] + rest)
        position = last.find(b'{"', position + 1)


def _lines_alone(lines: Sequence[bytes]) -> Iterator[_Candidate]:
    """Yield the single lines that may be the message: others were printed before its end."""
    for number, line in enumerate(lines):
        if b'"command"' in line or b'"pid"' in line:
            yield _Candidate(number, number + 1, b"", line)


def _decode_anyhow(text: bytes) -> dict[str, Any] | None:
    """Decode text that is nearly JSON by Python's own decoder; ``None`` for other text."""
    try:
        document = json.loads(text.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _reason_of(text: bytes) -> str:
    """The reason why a text is not JSON."""
    try:
        decode_json(text)
    except InvalidJson as error:
        return f"its JSON is not valid: {error}"
    return "it is not a command"


def _strays(lines: Sequence[bytes], prefix: bytes) -> list[Any]:
    strays = [_stray(line) for line in lines if line.strip()]
    if prefix.strip():
        strays.append(_stray(prefix))
    return strays


def _stray(line: bytes) -> StrayLine:
    text = line[: 4 * _MAX_SHOWN].decode("utf-8", "replace").rstrip()
    return StrayLine(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} ...")
