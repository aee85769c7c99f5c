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
"""Fields of the stream of late tuples: the values of the tuple (a list), and where it came from."""

_PREFIX = "topology.bolts."


def _count_or_ms(what: str, count: int | None, secs: float | None) -> tuple[str, int]:
    if (count is None) == (secs is None):
        raise InvalidTopology(f"{what} is a number of tuples or a time: give one of the two")
    given = count if count is not None else round((secs or 0) * 1000)
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise InvalidTopology(
            f"{what} must be at least one tuple or one millisecond, got {count or secs!r}"
        )
    return ("count" if count is not None else "duration.ms"), given


@dataclass(frozen=True)
class Window:
    """Definition of windows; create it by :meth:`tumbling`, :meth:`sliding` or :meth:`session`.

    A window in time ends at a multiple of its interval (since 1970) and contains timestamps after
    ``end - length`` and not after ``end``.
    """

    conf: Mapping[str, Any]
    """Equivalent conf keys (Storm's)."""
    key: str | None = None

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
        """The last ``count`` tuples or ``secs`` seconds, evaluated after ``every`` tuples or
        ``every_secs`` seconds; without an interval with every tuple.
        """
        unit, length = _count_or_ms("the length of a sliding window", count, secs)
        conf = {f"{_PREFIX}window.length.{unit}": length}
        if every is None and every_secs is None:
            every = 1
        unit, slide = _count_or_ms("the interval of a sliding window", every, every_secs)
        return Window({**conf, f"{_PREFIX}window.sliding.interval.{unit}": slide})

    @staticmethod
    def session(*, gap_secs: float, key: str | None = None) -> Window:
        """Tuples without a gap of ``gap_secs``; with ``key`` (a field), per value of it."""
        _, gap = _count_or_ms("the gap between sessions", None, gap_secs)
        return Window({f"{_PREFIX}window.session.gap.ms": gap}, key)


@dataclass
class TupleWindow:
    """Argument of ``process_window``. Iterates over the tuples in order of their time."""

    tuples: list[Tuple]
    new: list[Tuple] = field(default_factory=list)
    """Tuples that were in no window before."""
    expired: list[Tuple] = field(default_factory=list)
    """Tuples of the previous window that are not in this one."""
    start_ms: int | None = None
    """Exclusive (of a session: the time of its first tuple); ``None`` for a window of a number of
    tuples.
    """
    end_ms: int | None = None
    """Inclusive (of a session: when it counts as ended); milliseconds since 1970."""
    key: Any = None
    """The key of a session."""

    def __iter__(self) -> Iterator[Tuple]:
        return iter(self.tuples)

    def __len__(self) -> int:
        return len(self.tuples)


class WindowedBolt(GatheringBolt):
    """Gathers tuples into windows and calls ``process_window`` for each one that is due.

    A tuple is acked when a checkpoint holds it (see :class:`StatefulBolt`), not when its windows
    close; ``ack`` and ``fail`` of the tuples of a window do nothing. What a window emits is in the
    checkpoint that ends the window. It is sent after that, by the task itself, until its tree is
    complete: at least once, with the same contents.

    A window that raises is tried again, after pauses of up to a minute, and the windows after it
    wait; with ``window_tries`` it is dropped after so many tries.

    By default a tuple's time is that of its arrival. With ``timestamp_field`` (milliseconds
    since 1970) windows follow the data: they are evaluated when the watermark, the least of the
    newest stamps of all sending tasks less ``lag_secs``, has passed their end. A task that is
    silent for ``idle_secs`` does not count. Later tuples are late: emitted on ``late_stream``,
    or else logged and dropped.
    """

    window: ClassVar[Window | None] = None
    timestamp_field: ClassVar[str | None] = None
    lag_secs: ClassVar[float] = 0
    watermark_secs: ClassVar[float | None] = None
    """Pause between two watermarks; 1 s by default."""
    idle_secs: ClassVar[float | None] = None
    """Silence of a sending task after which the watermark does not wait for it; 10 s by default."""
    late_stream: ClassVar[str | None] = None
    window_tries: ClassVar[int | None] = None
    message_id: ClassVar[str | Sequence[str] | None] = None
    """Fields whose values make the id of a tuple on its stream, so that a replayed tuple is not
    held twice. Needs inputs grouped by fields, or one task.
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
        config.update(
            {_PREFIX + key: round(secs * 1000) for key, secs in times.items() if secs is not None}
        )
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
        """As :meth:`Component.spec`; ``window`` lies over the class's own. The late stream is
        declared.
        """
        if window is not None:
            lengths = [
                key for key in cls.component_config({}) if key.startswith(f"{_PREFIX}window.")
            ]
            config = {**dict.fromkeys(lengths), **window.conf, **(config or {})}
            if window.key is not None:
                config[f"{_PREFIX}window.session.key"] = window.key
        elif cls.window is not None and cls.window.key is not None:
            config = {f"{_PREFIX}window.session.key": cls.window.key, **(config or {})}
        made = super().spec(name, inputs, par, config, outputs, args)
        made.config = {key: value for key, value in made.config.items() if value is not None}
        late = made.config.get(f"{_PREFIX}late.tuple.stream")
        if late is not None:
            given: Any = made.outputs or ()
            streams = (
                list(given) if all(isinstance(item, Stream) for item in given) else [Stream(given)]
            )
            made.outputs = [*streams, Stream(LATE_FIELDS, name=late)]
        return made

    def emit(
        self,
        tup: Any,
        stream: str | None = None,
        anchors: Any = None,
        direct_task: int | None = None,
        need_task_ids: bool = False,
    ) -> list[int] | None:
        """As :meth:`Bolt.emit`. In ``process_window`` the tuple is sent after the checkpoint, and
        ``anchors`` mean nothing, except that ``[]`` sends it untracked at once.
        """
        if self._driver is None:
            return super().emit(tup, stream, anchors, direct_task, need_task_ids)
        return self._driver.emit(tup, stream, anchors, direct_task, need_task_ids)

    def process(self, tup: Tuple) -> None:
        """Put the tuple into its windows."""
        self._driver.add(tup)

    def process_window(self, window: TupleWindow) -> None:
        """Handle one window."""
        raise TypeError(f"{type(self).__name__} does not define process_window(self, window)")
