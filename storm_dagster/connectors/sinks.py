"""Bolts that write what they receive to a system outside: databases, files, brokers."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from storm_dagster.api.bolts import StatefulBolt
from storm_dagster.api.specs import Outputs, Stream
from storm_dagster.api.target_retries import REPORT_MS, TargetRetries
from storm_dagster.api.tuples import Tuple
from storm_dagster.model.errors import InvalidRequest, InvalidTopology, MissingPart, Unavailable


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a batch."""

    values: Mapping[str, Any]
    """Value of each field."""
    id: str | None = None
    """The values of ``record_id`` as text: the same when the row comes again, and that of no other
    record.
    """


_Entry = tuple[Row, list[Tuple]]
"""A row and its tuple, and copies of this that came while it waited."""


class Sink(Protocol):
    """What a :class:`SinkBolt` writes to. Each task has its own copy and its own thread: methods
    may block.
    """

    assets: Sequence[str] = ()
    """Keys of the Dagster assets that it writes: downstream of the bolt in the lineage of a
    declared topology.
    """

    def open(self, conf: Mapping[str, Any], owner: str) -> int | None:
        """Connect, and return the newest token that ``owner`` has written, 0 if none; ``None`` if
        that is not known.

        ``conf`` is the component's, over the topology's. ``owner`` names the task, and is empty if
        rows may be written twice. Nothing that an earlier connection of the owner began may be
        written from now on.
        """

    def write(self, rows: Sequence[Row], token: int) -> None:
        """Make all rows durable, with the token, or raise.

        :class:`Retry` if none is written and the same call shall come again, :class:`Rejected` if
        some can never be written: the call comes again without them. After any other error the sink
        is closed, and opened again: what its :meth:`open` returns says whether the rows are
        written.
        """

    def close(self) -> None:
        """Disconnect, also after an error; it waits for nothing."""


class Retry(Exception):
    """The sink takes nothing now: spouts are held back, and the write comes again ``after``
    seconds.
    """

    def __init__(self, after: float, why: str = "it is busy") -> None:
        super().__init__(why)
        self.after: float = after


class Rejected(Exception):
    """The sink refuses rows, which would fail every time: index in the batch -> why."""

    def __init__(self, rows: Mapping[int, str]) -> None:
        super().__init__(f"{len(rows)} rows are refused: {next(iter(rows.values()), '')}")
        self.rows: dict[int, str] = dict(rows)


def write_or_reject(
    rows: Sequence[Row],
    write: Callable[[Sequence[Row]], Any],
    is_of_row: Callable[[Exception], bool],
) -> None:
    """Write rows in one call, or if that raises find the rows at fault by halves, and raise
    :class:`Rejected` for them.

    ``write`` adds rows to those written before, all of them or none. ``is_of_row``: whether an
    error may be a row's.
    """
    refused: dict[int, str] = {}
    parts = [(0, rows)]
    while parts:
        first, part = parts.pop()
        try:
            write(part)
        except Exception as error:
            if not is_of_row(error):
                raise
            middle = len(part) // 2
            if middle:
                parts += [(first + middle, part[middle:]), (first, part[:middle])]
            else:
                refused[first] = f"{type(error).__name__}: {error}"
    if refused:
        raise Rejected(refused)


class SinkBolt(StatefulBolt):
    """A bolt that gathers rows, writes them to its ``sink``, and acks them then: a subclass sets
    attributes.

    A batch is written when it has ``batch_rows`` rows or ``batch_bytes`` bytes (strings and bytes;
    any other value counts as eight), or is ``batch_secs`` old. While the sink cannot be reached,
    the task takes no tuples, so that spouts are held back; the batch is tried again every 0.5 to 10
    s, and the error is reported once a minute.

    Rows that the sink refuses are emitted one by one on the stream ``rejected``, with the reason,
    and acked; if nothing reads the stream, they fail, and become dead letters.

    With ``exactly_once`` each row is written once, if the sink keeps tokens: a checkpoint of the
    batch's token and ids, the write, the acks. It needs a ``record_id``, and inputs grouped by
    fields unless the bolt has one task; state is kept in ``topology.state.dir``. Otherwise a row is
    written at least once, and no state is needed.
    """

    blocking = True
    auto_ack = False
    outputs: ClassVar[Outputs] = [Stream(["row", "reason"], "rejected")]
    sink: ClassVar[Sink]
    """What is written to; each task has its own copy."""
    record_id: ClassVar[str | Sequence[str] | None] = None
    """Fields whose values make the id of a record on its stream."""
    exactly_once: ClassVar[bool] = False
    """Whether no row is written twice."""
    batch_rows: ClassVar[int] = 1000
    batch_bytes: ClassVar[int] = 4 << 20
    batch_secs: ClassVar[float] = 1.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.exactly_once and not cls.record_id:
            raise InvalidTopology(
                f"{cls.__name__} is exactly_once without ids: set record_id to the fields of one"
            )
        cls.message_id = cls.record_id if cls.exactly_once else None

    @classmethod
    def component_config(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """Conf of the tick that writes the rows of a quiet stream, and what is written."""
        assets = list(getattr(getattr(cls, "sink", None), "assets", ()))
        return {
            "topology.tick.tuple.freq.secs": cls.batch_secs / 2,
            "topology.component.assets": assets,
        }

    @classmethod
    def check_inputs(cls, owner: str, inputs: Mapping[tuple[str, str], Any]) -> None:
        """Check that there is a sink, and that each input has the fields of ``record_id``; else
        :class:`InvalidTopology`.
        """
        if not hasattr(cls, "sink"):
            raise InvalidTopology(
                f"{owner}: {cls.__name__} has no sink: set sink = ... in its class"
            )
        for (component, stream), spec in inputs.items():
            if missing := [name for name in cls._id_fields() if name not in spec.fields]:
                has = f"{stream!r} of {component!r} has: {', '.join(spec.fields)}"
                raise InvalidTopology(f"{owner}: record_id is {missing[0]!r}, but {has}")

    @classmethod
    def _id_fields(cls) -> list[str]:
        return [cls.record_id] if isinstance(cls.record_id, str) else list(cls.record_id or ())

    def row_of(self, tup: Tuple) -> Mapping[str, Any] | None:
        """The values to write: by default those of the tuple, by field. ``None``: nothing. If it
        raises, the tuple fails.
        """
        return self.named(tup)

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Begin without a connection: the first tuple or tick makes it."""
        self._is_read = bool(context["stream->target->grouping"].get("rejected"))
        self._sink: Sink | None = None
        self._entries: list[_Entry] = []
        self._known: dict[Any, _Entry] = {}
        self._size = self._since = self._token = self._room_at = 0
        self._retries = TargetRetries(self)
        self._writing: list[_Entry] = []
        """The batch that is being written; nothing is gathered meanwhile."""
        self._begun = False
        """Whether its token and ids are in a checkpoint."""
        self._refused = 0
        self._is_full = True

    def process(self, tup: Tuple) -> None:
        """Add the tuple to the batch, and write a full one."""
        name = self._sink_batches.id_of(tup) if self.exactly_once else None
        if name is not None and name in self._known:
            self._known[name][1].append(tup)
            return
        values = self.row_of(tup)
        if values is None:
            self.ack(tup)
            return
        named = self.named(tup) if self.record_id else {}
        parts = [str(named[each]) for each in self._id_fields()]
        # No two records have the same text. The first field, often a partition or a path, stays as
        # it is.
        parts[1:] = [one.replace("%", "%25").replace("/", "%2F") for one in parts[1:]]
        self._size += sum(
            len(one) if isinstance(one, str | bytes) else 8 for one in values.values()
        )
        if not self._entries:
            self._since = self.context.now_ms()
        self._entries.append((Row(values, "/".join(parts) if parts else None), [tup]))
        if name is not None:
            self._known[name] = self._entries[-1]
        if len(self._entries) >= self.batch_rows or self._size >= self.batch_bytes:
            self._write_batch()

    def process_again(self, tup: Tuple) -> None:
        """Ack a tuple whose row is written."""
        self.ack(tup)

    def process_tick(self, tup: Tuple) -> None:
        """Write a batch that is old enough, and what could not be written before."""
        if self._is_full:
            self._make_room()
        elif self._entries and self.context.now_ms() - self._since >= self.batch_secs * 900:
            self._write_batch()

    def close(self) -> None:
        """Close the sink; what is gathered is replayed."""
        sink, self._sink = self._sink, None
        if sink is not None:
            # A connection that failed may fail once more.
            with suppress(Exception):
                sink.close()

    # -- writing -----------------------------------------------------------------------------------

    def _write_batch(self) -> None:
        if not self._is_full:
            self._writing, self._entries = self._entries, []
            self._known.clear()
            self._size, self._is_full = 0, True
            self._make_room()

    def _make_room(self) -> None:
        """Open the sink and write the batch, if that is due; what fails is tried again later."""
        if not self._retries.is_due():
            return
        try:
            done = (self._sink is not None or self._open()) and self._write()
        except Retry as wait:
            self._retries.wait(round(wait.after * 1000))
            if self.context.now_ms() - self._since > REPORT_MS:
                self._report(wait)
        except Exception as error:
            self.close()
            self._retries.wait()
            self._report(error)
        else:
            self._retries.end()
            self._is_full = not done

    def _open(self) -> bool:
        """Connect, and decide which batches of the time before are written. ``False``: the task
        restarts.
        """
        batches = self._sink_batches
        me = batches.owner if self.exactly_once else ""
        undecided = batches.undecided() if self.exactly_once else {}
        written = False
        # Earlier owners of this task's keys first; then itself, whose sink stays open.
        for owner in [*sorted(undecided.keys() - {me}), me]:
            self.close()
            self._sink = copy.copy(self.sink)
            try:
                newest = self._sink.open(self.conf, owner)
            except Retry:
                self.close()
                raise
            if newest is None and owner:
                raise InvalidRequest(
                    f"{type(self.sink).__name__} does not know what it has written, as exactly_once needs it: set "
                    f"{type(self).__name__}.exactly_once = False, or return its newest token from open()"
                )
            self._token = newest or 0
            written = owner in undecided and self._token >= undecided[owner]
            if owner in undecided and not batches.decide(owner, written):
                return False
        if self._begun and written:
            self._finish()
        self._begun = False
        return True

    def _write(self) -> bool:
        assert self._sink is not None
        while entries := self._writing:
            tups = [copies[0] for _, copies in entries]
            if (
                self.exactly_once
                and not self._begun
                and not self._sink_batches.begin(self._token + 1, tups)
            ):
                return False
            self._begun = True
            try:
                self._sink.write([row for row, _ in entries], self._token + 1)
            except Rejected as refused:
                # Without ids of what is not written: a repeated tuple shall be rejected again.
                self._writing = [
                    entry for at, entry in enumerate(entries) if at not in refused.rows
                ]
                self._begun = False
                if len(self._writing) == len(entries):
                    raise InvalidRequest(
                        f"{type(self.sink).__name__} rejects rows that are not there"
                    ) from refused
                for at, why in sorted(refused.rows.items()):
                    self._reject(entries[at][1], why)
            else:
                self._token += 1
                self._finish()
        return True

    def _finish(self) -> None:
        """Ack what is written."""
        self._bound().ack_all([tup for _, tups in self._writing for tup in tups])
        self._writing, self._begun = [], False
        if self.exactly_once:
            self._sink_batches.save()

    def _reject(self, tups: list[Tuple], why: str) -> None:
        if self._is_read:
            self.emit([self.named(tups[0]), why], stream="rejected", anchors=tups)
        for tup in tups:
            if not self._is_read:
                self.fail(tup, reason=why)
            elif self.exactly_once:
                self._sink_batches.ack_unapplied(tup)
            else:
                self.ack(tup)
        self._refused += 1
        self.report_metric("rows_rejected", self._refused)
        self._report(
            InvalidRequest(f"{self._refused} rows are rejected so far, this one: {why:.500}")
        )

    def _report(self, error: Exception) -> None:
        """Report an error, those of a type once a minute."""
        kind = type(error).__name__
        if self._retries.may_report(kind):
            if not isinstance(error, InvalidRequest | MissingPart):
                waits = f"{len(self._writing)} rows wait for the sink, which is tried again"
                error = Unavailable(f"{waits}: {kind}: {error}")
            self.raise_exception(error)
