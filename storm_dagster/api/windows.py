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
"""Fields of the stream of late tuples: values of the tuple (a list), and its source."""

_PREFIX = "topology.bolts."


def _count_or_ms(title: str, count: int | None, secs: float | None) -> tuple[str, int]:
    """Return (unit in conf keys, number); errors begin with ``title``."""
    if (count is None) == (secs is None):
        raise InvalidTopology(f"{title} is a number of tuples or a time: give one of the two")
    if count is not None:
        unit = "count"
        number = count
    else:
        unit = "duration.ms"
        number = round((secs or 0) * 1000)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InvalidTopology(
            f"{title} must be at least one tuple or one millisecond, got {count or secs!r}"
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

        Windows are evaluated after ``every`` tuples or ``every_secs`` seconds; without an interval
        after every tuple.
        """
        unit, length = _count_or_ms("the length of a sliding window", count, secs)
        if every is None and every_secs is None:
            every = 1
        slide_unit, slide = _count_or_ms("the interval of a sliding window", every, every_secs)
        return Window(
            {
                f"{_PREFIX}window.length.{unit}": length,
                f"{_PREFIX}window.sliding.interval.{slide_unit}": slide,
            }
        )

    @staticmethod
    def session(*, gap_secs: float, key: str | None = None) -> Window:
        """Tuples without a gap of ``gap_secs``; with ``key`` (a field), per value of it."""
        _, gap = _count_or_ms("the gap between sessions", None, gap_secs)
        return Window({f"{_PREFIX}window.session.gap.ms": gap}, key)


@dataclass
class TupleWindow:
    """Argument of ``process_window``; it iterates over the tuples by time."""

    tuples: list[Tuple]
    new: list[Tuple] = field(default_factory=list)
    """Tuples that were not in a window before."""
    expired: list[Tuple] = field(default_factory=list)
    """Tuples of the previous window that are not in this one."""
    start_ms: int | None = None
    """Exclusive; of a session the time of its first tuple.

    ``None`` for a window of a number of tuples.
    """
    end_ms: int | None = None
    """Inclusive; of a session the time at which it ended. Milliseconds since 1970."""
    key: Any = None
    """The key of a session."""

    def __iter__(self) -> Iterator[Tuple]:
        return iter(self.tuples)

    def __len__(self) -> int:
        return len(self.tuples)


class WindowedBolt(GatheringBolt):
    """Bolt that gathers tuples into windows and processes each window that is due.

    ``process_window`` is called for it. A tuple is acked when a checkpoint holds it (see
    :class:`StatefulBolt`), not when its windows close; ``ack`` and ``fail`` of the tuples of a
    window have no effect. The checkpoint that ends a window holds the tuples that it emits. The
    task sends them after that, until their trees are complete: at least once, with the same
    contents.

    A window that raises is retried, after pauses of up to a minute, and the windows after it wait;
    with ``window_tries`` it is dropped after so many tries.

    By default a tuple's time is that of its arrival. With ``timestamp_field`` (milliseconds
    since 1970) windows follow the data: they are evaluated when the watermark, the least of the
    newest stamps of all sending tasks minus ``lag_secs``, has passed their end. A task that is
    silent for ``idle_secs`` does not count. Later tuples are late: they are emitted on
    ``late_stream``, or else logged and dropped.
    """

    window: ClassVar[Window | None] = None
    timestamp_field: ClassVar[str | None] = None
    lag_secs: ClassVar[float] = 0
    watermark_secs: ClassVar[float | None] = None
    """Pause between two watermarks; 1 s by default."""
    idle_secs: ClassVar[float | None] = None
    """Silence after which the watermark does not wait for a sending task; 10 s by default."""
    late_stream: ClassVar[str | None] = None
    window_tries: ClassVar[int | None] = None
    message_id: ClassVar[str | Sequence[str] | None] = None
    """Fields whose values make the id of a tuple on its stream.

    A replayed tuple is then not held twice. Needs inputs grouped by fields, or one task.
    """

    auto_ack: ClassVar[bool] = True
    auto_anchor: ClassVar[bool] = True
    auto_fail: ClassVar[bool] = True

    _driver: Any = None
    """Set by the worker."""

    @classmethod
    def component_config(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """The window in conf keys, which a spec's ``config`` may override."""
        config: dict[str, Any] = {}
        if cls.window is not None:
            config.update(cls.window.conf)
        if cls.timestamp_field is not None:
            config[f"{_PREFIX}tuple.timestamp.field.name"] = cls.timestamp_field
            config[f"{_PREFIX}tuple.timestamp.max.lag.ms"] = round(cls.lag_secs * 1000)
        if cls.watermark_secs is not None:
            config[f"{_PREFIX}watermark.event.interval.ms"] = round(cls.watermark_secs * 1000)
        if cls.idle_secs is not None:
            config[f"{_PREFIX}watermark.idle.timeout.ms"] = round(cls.idle_secs * 1000)
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
        """As :meth:`Component.spec`; ``window`` replaces the class's own.

        The late stream is declared, too.
        """
        if window is not None:
            window_conf: dict[str, Any] = {}
            for key in cls.component_config({}):
                if key.startswith(f"{_PREFIX}window."):
                    # A null takes the key of the class's window back.
                    window_conf[key] = None
            window_conf.update(window.conf)
            window_conf.update(config or {})
            if window.key is not None:
                window_conf[f"{_PREFIX}window.session.key"] = window.key
            config = window_conf
        elif cls.window is not None and cls.window.key is not None:
            config = {f"{_PREFIX}window.session.key": cls.window.key, **(config or {})}
        spec = super().spec(name, inputs, par, config, outputs, args)
        spec.config = {key: value for key, value in spec.config.items() if value is not None}
        late = spec.config.get(f"{_PREFIX}late.tuple.stream")
        if late is not None:
            spec.outputs = [*_streams(spec.outputs or ()), Stream(LATE_FIELDS, name=late)]
        return spec

    def emit(
        self,
        tup: Any,
        stream: str | None = None,
        anchors: Any = None,
        direct_task: int | None = None,
        need_task_ids: bool = False,
    ) -> list[int] | None:
        """As :meth:`Bolt.emit`.

        In ``process_window`` the tuple is sent after the checkpoint, and ``anchors`` are ignored,
        except that ``[]`` sends it untracked at once.
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


def _streams(outputs: Any) -> list[Stream]:
    """The declared outputs as streams."""
    if all(isinstance(output, Stream) for output in outputs):
        return list(outputs)
    return [Stream(outputs)]
