"""Messages between workers, and requests to a worker.

A worker binds one ROUTER socket at its slot's address. Peers send it :class:`Frame` (MessagePack);
clients send :class:`Request` (JSON, starting with ``{``) and get one JSON document back. Both are decoded
by these types only; anything else is dropped and counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from storm_dagster.model.values import decode_received

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""A larger message is refused by the socket before it is read; a tuple that needs one fails."""

Bundle = tuple[int | list[int], int, list[list[Any]]]
"""(root, edge, values of one or more tuples). Tuples of a bundle share one edge of one tree. Root 0:
untracked. A list as root holds (root, edge) pairs, flat, for tuples anchored to several trees."""

Group = tuple[int, int, str, list[Bundle]]
"""(receiving task, sending task, stream, bundles)."""


class TaskReport(msgspec.Struct, omit_defaults=True):
    """State and statistics of one task."""

    status: Literal["starting", "running"]
    component: str = ""
    uptime_secs: int = 0
    stats: dict[str, int | float] = {}
    """All time: emitted, transferred, executed, acked, failed, execute_ms, process_ms, complete_ms."""
    windows: dict[str, dict[str, int | float]] = {}
    """``"600"``, ``"10800"``, ``"86400"``, ``":all-time"`` -> the same metrics over that many seconds."""
    streams: dict[str, dict[str, int]] = {}
    """``emitted``, ``transferred``: by stream; ``executed``: by ``component:stream`` of the input."""
    window_streams: dict[str, dict[str, dict[str, int]]] = {}
    """Window -> the same by stream. A window that the task is younger than is left out: all of it counts."""
    errors: int = 0
    """Errors since the task was opened, throttled ones included."""
    metrics: dict[str, Any] = {}
    latencies: dict[str, dict[str, dict[str, dict[int, int]]]] = {}
    """Window -> :data:`~storm_dagster.model.latency.Latencies` of the sampled tuples. Windows are left out as above;
    ``process`` is left out while it is the same as ``execute``."""
    waiting: int = 0
    """Tuples in the task's queue."""


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
    """Of the worker itself (``__system``): frames dropped, queue lengths, memory."""


class Frame(msgspec.Struct, array_like=True):
    """One message between two workers of a topology: everything that one pass of the sender's loop has."""

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
    """The sender asks spouts to wait (or to resume)."""
    report: WorkerReport | None = None
    loads: list[tuple[int, float]] | None = None
    """(task of the sender, seconds of work that wait for it, at most 1), for load-aware shuffling."""
    full: list[str] | None = None
    """With ``pressure``: the full components. ``None``, from an older release: all spouts wait."""


LevelName = Literal["ALL", "TRACE", "DEBUG", "INFO", "WARN", "ERROR", "FATAL", "OFF"]
"""Storm's names; their numbers are in :mod:`storm_dagster.model.log_levels`."""


class LevelChange(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A change of one logger's level (:mod:`storm_dagster.model.log_levels`)."""

    level: LevelName | None = None
    """``None`` takes an earlier change back."""
    secs: int = 0
    """Duration; 0: until it is removed."""
    reset: LevelName | None = None
    """The level afterwards, when it is not to be the earlier one."""


class StateQuestion(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Query of the keyed state of one task."""

    task: int
    keys: list[Any] = []
    """The values of these keys, as far as there are any; empty: a page of all of them."""
    offset: int = 0
    limit: int = 100


Question = Literal["stats", "stacks", "ping", "log_levels", "state"]


class Request(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A request to a worker. ``token`` is the worker's own start token, stored in its ZooKeeper node."""

    op: Question
    token: str
    levels: dict[str, LevelChange] = {}
    """With ``log_levels``: changes by logger; the answer holds what is changed then."""
    state: StateQuestion | None = None
    """With ``state``."""


encode_frame: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
"""The bytes of a :class:`Frame`; ``TypeError`` for values that cannot travel."""

decode_frame: Callable[[bytes | memoryview], Frame] = msgspec.msgpack.Decoder(Frame, ext_hook=decode_received).decode
"""The frame in some bytes; ``msgspec.DecodeError`` (or its ``ValidationError``) when there is none."""

encode_request: Callable[[Request], bytes] = msgspec.json.Encoder().encode
"""A request as it travels."""

decode_request: Callable[[bytes], Request] = msgspec.json.Decoder(Request).decode
"""The request in some bytes; ``msgspec.DecodeError`` when there is none."""
