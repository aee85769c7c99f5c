"""Messages between workers, and requests to a worker.

A worker binds one ROUTER socket at its slot's address. Peers send it :class:`Frame` (MessagePack);
clients send :class:`Request` (JSON, starting with ``{``) and get one JSON document back. Both are
decoded by these types only; other messages are dropped and counted.
"""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from storm_dagster.model.values import decode_received

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""A larger message is refused by the socket before it is read; a tuple that needs one fails."""
MAX_FRAME_CONTAINERS = 1_000_000
"""Bound of lists, maps and extensions in one frame: an empty one is one byte on the wire and up to
a hundred in memory.
"""
MAX_REQUEST_BYTES = 1024 * 1024
"""A larger request to a worker is dropped."""

Bundle = tuple[int | list[int], int, list[list[Any]]]
"""(root, edge, values of one or more tuples). Tuples of a bundle share one edge of one tree. Root
0: untracked. A list as root holds (root, edge) pairs, flat, for tuples anchored to several trees.
"""

Group = tuple[int, int, str, list[Bundle]]
"""(receiving task, sending task, stream, bundles)."""


class TaskReport(msgspec.Struct, omit_defaults=True):
    """State and statistics of one task."""

    status: Literal["starting", "running"]
    component: str = ""
    uptime_secs: int = 0
    stats: dict[str, int | float] = {}
    """All time: emitted, transferred, executed, acked, failed, execute_ms, process_ms,
    complete_ms.
    """
    windows: dict[str, dict[str, int | float]] = {}
    """``"600"``, ``"10800"``, ``"86400"``, ``":all-time"`` -> the same metrics over that many
    seconds.
    """
    streams: dict[str, dict[str, int]] = {}
    """``emitted``, ``transferred`` and further counts: by stream; ``executed``: by
    ``component:stream`` of the input. Readers ignore the counts that they do not know.
    """
    window_streams: dict[str, dict[str, dict[str, int]]] = {}
    """Window -> the same by stream. A window that the task is younger than is left out: all of it
    counts.
    """
    errors: int = 0
    """Errors since the task was opened, throttled ones included."""
    metrics: dict[str, Any] = {}
    latencies: dict[str, dict[str, dict[str, dict[int, int]]]] = {}
    """Window -> :data:`~storm_dagster.model.latency.Latencies` of the sampled tuples. Windows are
    left out as above; ``process`` is left out while it is the same as ``execute``.
    """
    waiting: int = 0
    """Tuples in the task's queue."""
    busy_ns: int = 0
    """Time that the sampled tuples took to execute, of all time; ``timed`` is their number."""
    timed: int = 0
    held_ms: int = 0
    """Time in which back pressure held the task back, of all time."""


class WorkerReport(msgspec.Struct, omit_defaults=True):
    """A worker's beat to its topology master."""

    node: str
    host: str
    port: int
    pid: int
    count: int
    uptime_secs: int
    version: int
    """Version of the assignment that it applies."""
    status: str
    tasks: dict[str, TaskReport]
    system: dict[str, int | float] = {}
    """Of the worker itself (``__system``): frames dropped, queue lengths, its own clock, CPU time,
    memory.
    """
    started_for: str = ""
    """Code and requested restarts for which its process was started; empty: not known."""


class Frame(msgspec.Struct, array_like=True):
    """One message between two workers, of one pass of the sender's loop."""

    token: str
    """Start token of the sender."""
    groups: list[Group] = []
    acks: list[tuple[int, list[int]]] = []
    """(acker task, root, value, root, value, ...)."""
    inits: list[tuple[int, list[int]]] = []
    """(acker task, root, value, spout task, ...)."""
    fails: list[tuple[int, list[int]]] = []
    """(acker task, roots)."""
    acked: list[tuple[int, list[int]]] = []
    """(spout task, roots whose trees are complete)."""
    failed: list[tuple[int, list[int]]] = []
    """(spout task, roots that failed); task 0: any spout."""
    pressure: bool | None = None
    """True if the sender requests that spouts wait, False that they resume."""
    report: WorkerReport | None = None
    loads: list[tuple[int, float]] | None = None
    """(task of the sender, seconds of work that wait for it, at most 1), for load-aware
    shuffling.
    """
    full: list[str] | None = None
    """With ``pressure``: the full components.

    ``None``, from an earlier release: all spouts wait.
    """
    to: str = ""
    """Start token of the receiver, if the sender knows it: the worker that replaces that one
    refuses tracked tuples.
    """
    touched: list[tuple[int, str, list[int]]] = []
    """(acker task, start token of a third worker, roots whose trees have parts in that worker)."""
    lost: list[tuple[int, list[int]]] = []
    """(spout task, roots whose trees had parts in a worker that is gone)."""
    reasons: list[tuple[int, int, str, str]] = []
    """(root of ``fails`` or ``failed``, task that failed it, its component, why)."""
    losses: list[tuple[int, list[int]]] = []
    """(acker task, roots that a task or worker which stops has parts of); an earlier release lets
    them time out.
    """
    away: list[str] | None = None
    """With ``pressure``: those of ``full`` that wait for an external system.

    An earlier release lets the tuples that wait for them time out.
    """


LevelName = Literal["ALL", "TRACE", "DEBUG", "INFO", "WARN", "ERROR", "FATAL", "OFF"]
"""Storm's names; their numbers are in :mod:`storm_dagster.model.log_levels`."""


class LevelChange(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A change of one logger's level.

    See :mod:`storm_dagster.model.log_levels`.
    """

    level: LevelName | None = None
    """``None`` undoes an earlier change."""
    secs: int = 0
    """Duration; 0: until it is removed."""
    reset: LevelName | None = None
    """The level afterwards; ``None``: the earlier one."""


class StateQuery(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Query of the keyed state of one task."""

    task: int
    keys: list[Any] = []
    """Keys whose values are returned, if they have any; empty: a page of all keys."""
    offset: int = 0
    limit: int = 100


class DeadLetterQuery(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Query of the dead letters of one spout's task, after that number."""

    task: int
    after: int = 0
    limit: int = 100
    replay: bool = False
    """True if the spout emits them a second time."""
    delete_older_secs: float | None = None
    """Delete the letters whose last failure is at least as long ago; ``None``: no letter."""


class HistoryQuery(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Query of the topology master's rings, of one component or of all."""

    component: str = ""
    day: bool = False
    """The ring of a day instead of that of an hour."""


Query = Literal["stats", "stacks", "ping", "log_levels", "state", "dead_letters", "history"]


class RequestToken(msgspec.Struct):
    """The part of a :class:`Request` that is decoded first."""

    token: str


class Request(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A request to a worker.

    ``token`` is the start token of the worker, which its ZooKeeper node has.
    """

    op: Query
    token: str
    levels: dict[str, LevelChange] = {}
    """With ``log_levels``: changes by logger; the response has all changed levels."""
    state: StateQuery | None = None
    """With ``state``."""
    letters: DeadLetterQuery | None = None
    """With ``dead_letters``."""
    history: HistoryQuery | None = None
    """With ``history``."""


encode_frame: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
"""The bytes of a :class:`Frame`; ``TypeError`` for values that cannot travel."""

_CONTAINERS = bytes(
    (*range(0x80, 0xA0), *range(0xC7, 0xCA), *range(0xD4, 0xD9), *range(0xDC, 0xE0))
)
"""First bytes of lists, maps and extensions."""
_FIXED = {
    0xCA: 4,
    0xCB: 8,
    0xCC: 1,
    0xCD: 2,
    0xCE: 4,
    0xCF: 8,
    0xD0: 1,
    0xD1: 2,
    0xD2: 4,
    0xD3: 8,
} | {0xD4 + power: 1 + (1 << power) for power in range(5)}
"""First byte -> bytes after it."""
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4} | {
    0xDC: 2,
    0xDD: 4,
    0xDE: 2,
    0xDF: 4,
}
"""First byte -> bytes of the length or count after it."""


def sender_token(raw: bytes) -> str:
    """Start token of a frame's sender, without reading the rest of the frame.

    Empty if the bytes are not a frame.
    """
    try:
        lead = raw[0]
        at = 1 if 0x90 <= lead <= 0x9F else {0xDC: 3, 0xDD: 5}[lead]
        size = raw[at]
        if size == 0xD9:
            at += 1
            size = raw[at]
        elif 0xA0 <= size <= 0xBF:
            size &= 31
        else:
            return ""
        return raw[at + 1 : at + 1 + size].decode()
    except (LookupError, ValueError):
        return ""


def can_travel(raw: bytes) -> bool:
    """True if a frame is within the limits of bytes and containers.

    Only a large frame is parsed.
    """
    size = len(raw)
    if size <= MAX_FRAME_CONTAINERS:
        return True
    if size > MAX_FRAME_BYTES:
        return False
    if size - len(raw.translate(None, _CONTAINERS)) <= MAX_FRAME_CONTAINERS:
        return True
    # Text and bytes may also hold these bytes: only parsing counts the containers.
    at = 0
    open_values = 1  # Number of values that must follow to complete all open containers.
    containers = 0
    while open_values and at < size and containers <= MAX_FRAME_CONTAINERS:
        lead = raw[at]
        at += 1
        open_values -= 1
        containers += lead in _CONTAINERS
        # A map has twice as many values as entries: keys and values.
        if 0x80 <= lead <= 0x9F:
            open_values += (lead & 15) << (lead < 0x90)
        elif 0xA0 <= lead <= 0xBF:
            at += lead & 31
        elif width := _SIZED.get(lead):
            number = int.from_bytes(raw[at : at + width], "big")
            at += width
            if lead >= 0xDC:
                open_values += number << (lead >= 0xDE)
            else:
                # An extension has one more byte, its type.
                at += number + (0xC7 <= lead <= 0xC9)
        else:
            at += _FIXED.get(lead, 0)
    return containers <= MAX_FRAME_CONTAINERS


decode_frame: Callable[[bytes | memoryview], Frame] = msgspec.msgpack.Decoder(
    Frame, ext_hook=decode_received
).decode
"""The frame of some bytes; ``msgspec.DecodeError`` (or its ``ValidationError``) for other bytes."""

encode_request: Callable[[Request], bytes] = msgspec.json.Encoder().encode
"""A request as it travels."""

decode_request_token: Callable[[bytes], RequestToken] = msgspec.json.Decoder(RequestToken).decode
"""The token of the request of some bytes, without the other fields."""

decode_request: Callable[[bytes], Request] = msgspec.json.Decoder(Request).decode
"""The request of some bytes; ``msgspec.DecodeError`` for other bytes."""
