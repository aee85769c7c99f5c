"""Windowed bolts, which process many tuples at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from storm_dagster.api.batching import GatheringBolt
from storm_dagster.api.specs import Inputs, Outputs, Spec, Stream
from storm_dagster.api.tuples import Tuple
from storm_dagster.model.errors import InvalidTopology

LATE_FIELDS = ("late_tuple", "component", "stream")
"""Fields of the stream of late tuples: the values of the tuple (a list), and its sender."""

_PREFIX = "topology.bolts."
"""Prefix of Storm's conf keys of windows."""


def _count_or_ms(subject: str, count: int | None, secs: float | None) -> tuple[str, int]:
    """Unit, the last part of a conf key, and number of a length.

    ``subject`` names the length in errors. :class:`InvalidTopology` unless exactly one of the two
    is given, and is at least one tuple or one millisecond.
    """
    if (count is None) == (secs is None):
        raise InvalidTopology(f"{subject} is a number of tuples or a time: give one of the two")
    if count is not None:
        unit = "count"
        number = count
    else:
        unit = "duration.ms"
        number = round((secs or 0) * 1000)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InvalidTopology(
            f"{subject} must be at least one tuple or one millisecond, got {count or secs!r}"
        )
    return unit, number


@dataclass(frozen=True)
class Window:
    """Definition of windows.

    Create it by :meth:`tumbling`, :meth:`sliding` or :meth:`session`. A window in time ends at a
    multiple of its interval (since 1970) and contains timestamps after ``end - length`` and not
    after ``end``.
    """

    conf: Mapping[str, Any]
    """Equivalent conf keys (Storm's)."""
    key: str | None = None
    """Field of a session's key; ``None``: all tuples are in the same sessions."""

    @staticmethod
    def tumbling(*, count: int | None = None, secs: float | None = None) -> Window:
        """Consecutive windows: every tuple is in exactly one."""
        unit, length = _count_or_ms("the length of a tumbling window", count, secs)
        return Window(
            {
                f"{_PREFIX}window.length.{unit}": length,
                f"{_PREFIX}window.sliding.interval.{unit}": length,
            }
        )

    @staticmethod
    def sliding(
        *,
        count: int | None = None,
        secs: float | None = None,
        every: int | None = None,
        every_secs: float | None = None,
    ) -> Window:
        """The last ``count`` tuples or ``secs`` seconds.

        They are evaluated after ``every`` tuples or ``every_secs`` seconds; without an interval at
        every tuple.
        """
        unit, length = _count_or_ms("the length of a sliding window", count, secs)
        conf = {f"{_PREFIX}window.length.{unit}": length}
        if every is None and every_secs is None:
            every = 1
        unit, slide = _count_or_ms("the interval of a sliding window", every, every_secs)
        return Window({**conf, f"{_PREFIX}window.sliding.interval.{unit}": slide})

    @staticmethod
    def session(*, gap_secs: float, key: str | None = None) -> Window:
        """Tuples without a gap of ``gap_secs``; with ``key``, per value of that field."""
        _, gap = _count_or_ms("the gap between sessions", None, gap_secs)
        return Window({f"{_PREFIX}window.session.gap.ms": gap}, key)


@dataclass
class TupleWindow:
    """Argument of ``process_window``: its tuples, in order of their time."""

    tuples: list[Tuple]
    new: list[Tuple] = field(default_factory=list)
    """Tuples that were in no window before."""
    expired: list[Tuple] = field(default_factory=list)
    """Tuples of the previous window that are not in this one."""
    start_ms: int | None = None
    """Exclusive start (of a session: the time of its first tuple).

    ``None`` for a window of a number of tuples.
    """
    end_ms: int | None = None
    """Inclusive end (of a session: the time it counts as ended); milliseconds since 1970."""
    key: Any = None
    """The key of a session."""

    def __iter__(self) -> Iterator[Tuple]:
        return iter(self.tuples)

    def __len__(self) -> int:
        return len(self.tuples)


def _as_streams(outputs: Any) -> list[Stream]:
    """Outputs as streams: field names are those of the default stream."""
    outputs = outputs or ()
    if isinstance(outputs, Stream):
        return [outputs]
    if all(isinstance(item, Stream) for item in outputs):
        return list(outputs)
    return [Stream(outputs)]


class WindowedBolt(GatheringBolt):
    """Bolt that gathers tuples into windows and processes each window when it is due.

    It calls ``process_window`` for each window. A tuple is acked when a checkpoint contains it (see
    :class:`StatefulBolt`), not when its windows close; ``ack`` and ``fail`` of the tuples of a
    window have no effect. The emitted tuples of a window are in the checkpoint that ends the
    window. The task sends them after that checkpoint, until their trees are complete: at least
    once, with the same contents.

    A window that raises is retried, after pauses of up to a minute, and the windows after it wait;
    with ``window_tries`` it is dropped after so many tries.

    By default a tuple's time is that of its arrival. With ``timestamp_field`` (milliseconds
    since 1970) windows follow the data: they are evaluated when the watermark, the minimum of the
    newest stamps of all sending tasks minus ``lag_secs``, has passed their end. A task that is
    silent for ``idle_secs`` does not count. Tuples that arrive after that are late: emitted on
    ``late_stream``, or else logged and dropped.
    """

    window: ClassVar[Window | None] = None
    timestamp_field: ClassVar[str | None] = None
    """Field with the time of a tuple; ``None``: the time of its arrival."""
    lag_secs: ClassVar[float] = 0
    """Time by which a tuple's stamp may be behind newer ones without being late."""
    watermark_secs: ClassVar[float | None] = None
    """Pause between two watermarks; 1 s by default."""
    idle_secs: ClassVar[float | None] = None
    """Silence of a sending task after which the watermark ignores it; 10 s by default."""
    late_stream: ClassVar[str | None] = None
    window_tries: ClassVar[int | None] = None
    """Tries after which a window that raises is dropped; ``None``: never."""
    message_id: ClassVar[str | Sequence[str] | None] = None
    """Fields whose values are the id of a tuple on its stream.

    A replayed tuple is then not kept twice. The inputs must be grouped by fields, or the bolt must
    have one task.
    """

    auto_ack: ClassVar[bool] = True
    auto_anchor: ClassVar[bool] = True
    auto_fail: ClassVar[bool] = True

    _driver: Any = None
    """Set by the worker."""

    @classmethod
    def component_config(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """The window in conf keys, which a spec's ``config`` may override."""
        config: dict[str, Any] = dict(cls.window.conf) if cls.window is not None else {}
        times = {
            "watermark.event.interval.ms": cls.watermark_secs,
            "watermark.idle.timeout.ms": cls.idle_secs,
        }
        if cls.timestamp_field is not None:
            config[f"{_PREFIX}tuple.timestamp.field.name"] = cls.timestamp_field
            times["tuple.timestamp.max.lag.ms"] = cls.lag_secs
        for key, secs in times.items():
            if secs is not None:
                config[_PREFIX + key] = round(secs * 1000)
        if cls.late_stream is not None:
            config[f"{_PREFIX}late.tuple.stream"] = cls.late_stream
        return config

    @classmethod
    def spec(
        cls,
        name: str | None = None,
        inputs: Inputs = None,
        par: int | None = None,
        config: Mapping[str, Any] | None = None,
        outputs: Outputs = None,
        args: Mapping[str, Any] | None = None,
        window: Window | None = None,
    ) -> Spec:
        """As :meth:`Component.spec`; ``window`` overrides that of the class.

        The stream of late tuples is added to the outputs.
        """
        if window is not None:
            # None removes the class's own keys of a window below, if it is another kind.
            class_keys = [
                key for key in cls.component_config({}) if key.startswith(f"{_PREFIX}window.")
            ]
            config = {**dict.fromkeys(class_keys), **window.conf, **(config or {})}
            if window.key is not None:
                config[f"{_PREFIX}window.session.key"] = window.key
        elif cls.window is not None and cls.window.key is not None:
            config = {f"{_PREFIX}window.session.key": cls.window.key, **(config or {})}
        spec = super().spec(name, inputs, par, config, outputs, args)
        spec.config = {key: value for key, value in spec.config.items() if value is not None}
        late_stream = spec.config.get(f"{_PREFIX}late.tuple.stream")
        if late_stream is not None:
            spec.outputs = [*_as_streams(spec.outputs), Stream(LATE_FIELDS, name=late_stream)]
        return spec

    def emit(
        self,
        tup: Any,
        stream: str | None = None,
        anchors: Any = None,
        direct_task: int | None = None,
        need_task_ids: bool = False,
    ) -> list[int] | None:
        """As :meth:`Bolt.emit`, except in ``process_window``.

        There the tuple is sent after the checkpoint and ``anchors`` are ignored, except that ``[]``
        sends it untracked at once.
        """
        if self._driver is None:
            return super().emit(tup, stream, anchors, direct_task, need_task_ids)
        return self._driver.emit(tup, stream, anchors, direct_task, need_task_ids)

    def process(self, tup: Tuple) -> None:
        """Put the tuple into its windows."""
        self._driver.stage(tup)

    def process_window(self, window: TupleWindow) -> None:
        """Handle one window."""
        raise TypeError(f"{type(self).__name__} does not define process_window(self, window)")
