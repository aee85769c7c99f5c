"""Bolts that write their tuples to another system: databases, files, brokers."""

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
    """The values of ``record_id`` as text.

    A repeated row has the same id, and different records have different ids.
    """


_Entry = tuple[Row, list[Tuple]]
"""A row, its tuple, and repetitions of this tuple that came while it waited."""


class Sink(Protocol):
    """System that a :class:`SinkBolt` writes to.

    Each task has its own copy and its own thread: methods may block.
    """

    assets: Sequence[str] = ()
    """Keys of the Dagster assets that it writes.

    They are downstream of the bolt in the lineage of a declared topology.
    """

    def open(self, conf: Mapping[str, Any], owner: str) -> int | None:
        """Connect, and return the newest token that ``owner`` has written.

        It is 0 if there is none, and ``None`` if it is unknown. ``conf`` is the component's, over
        the topology's. ``owner`` names the task, and is empty if rows may be written twice. From
        here on, an earlier connection of the owner must not write rows.
        """

    def write(self, rows: Sequence[Row], token: int) -> None:
        """Make all rows durable, with the token, or raise.

        Raises :class:`Retry` if no row is written and the same call is to be repeated, and
        :class:`Rejected` if some rows can never be written: the call is repeated without them.
        After any other error the sink is closed and reopened: the result of :meth:`open` decides
        if the rows are written.
        """

    def close(self) -> None:
        """Disconnect, also after an error, without waiting."""


class Retry(Exception):
    """The sink takes no rows now; the write is repeated ``after`` seconds.

    Spouts are held back until then.
    """

    def __init__(self, after: float, why: str = "it is busy") -> None:
        super().__init__(why)
        self.after: float = after


class Rejected(Exception):
    """The sink refuses rows that would always fail: index in the batch -> reason."""

    def __init__(self, rows: Mapping[int, str]) -> None:
        reasons = list(rows.values()) or [""]
        super().__init__(f"{len(rows)} rows are refused: {reasons[0]}")
        self.rows: dict[int, str] = dict(rows)


def write_or_reject(
    rows: Sequence[Row],
    write: Callable[[Sequence[Row]], Any],
    is_of_row: Callable[[Exception], bool],
) -> None:
    """Write rows in one call, or raise :class:`Rejected` for the rows at fault.

    If the call raises, these rows are searched by halves. ``write`` adds rows to those written
    before, all of them or none. ``is_of_row`` is true for an error that a row may have caused.
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
    """A bolt that writes rows to its ``sink`` in batches, and acks them then.

    A subclass sets attributes. A batch is written when it has ``batch_rows`` rows or
    ``batch_bytes`` bytes (strings and bytes; any other value counts as eight), or is ``batch_secs``
    old. While the sink cannot be reached, the task takes no tuples, so that spouts are held back;
    the batch is retried every 0.5 to 10 s, and the error is reported once a minute.

    Rows that the sink refuses are emitted one by one on the stream ``rejected``, with the reason,
    and acked; if no component reads the stream, they fail, and become dead letters.

    With ``exactly_once`` each row is written once, if the sink keeps tokens: a checkpoint of the
    batch's token and ids, the write, the acks. It needs a ``record_id``, and inputs grouped by
    fields unless the bolt has one task; state is kept in ``topology.state.dir``. Otherwise a row is
    written at least once, and no state is needed.
    """

    blocking = True
    auto_ack = False
    outputs: ClassVar[Outputs] = [Stream(["row", "reason"], "rejected")]
    sink: ClassVar[Sink]
    """Target of the rows; each task has its own copy."""
    record_id: ClassVar[str | Sequence[str] | None] = None
    """Fields whose values make the id of a record on its stream."""
    exactly_once: ClassVar[bool] = False
    """True if rows must not be written twice."""
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
        """Conf of the tick that writes the rows of a quiet stream, and of the assets."""
        assets = list(getattr(getattr(cls, "sink", None), "assets", ()))
        return {
            "topology.tick.tuple.freq.secs": cls.batch_secs / 2,
            "topology.component.assets": assets,
        }

    @classmethod
    def check_inputs(cls, owner: str, inputs: Mapping[tuple[str, str], Any]) -> None:
        """Check that there is a sink, and that inputs have the fields of ``record_id``.

        Raises :class:`InvalidTopology`.
        """
        if not hasattr(cls, "sink"):
            raise InvalidTopology(
                f"{owner}: {cls.__name__} has no sink: set sink = ... in its class"
            )
        for (component, stream), spec in inputs.items():
            for field in cls._id_fields():
                if field not in spec.fields:
                    raise InvalidTopology(
                        f"{owner}: record_id is {field!r}, but {stream!r} of {component!r} has: "
                        f"{', '.join(spec.fields)}"
                    )

    @classmethod
    def _id_fields(cls) -> list[str]:
        if isinstance(cls.record_id, str):
            return [cls.record_id]
        return list(cls.record_id or ())

    def row_of(self, tup: Tuple) -> Mapping[str, Any] | None:
        """The values to write, by default those of the tuple, by field.

        With ``None`` no row is written. If this raises, the tuple fails.
        """
        return self.named(tup)

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Start without a connection; the first tuple or tick opens it."""
        self._is_read = bool(context["stream->target->grouping"].get("rejected"))
        """True if a component reads the stream of rejected rows."""
        self._sink: Sink | None = None
        self._entries: list[_Entry] = []
        self._entry_of: dict[Any, _Entry] = {}
        """Id of a tuple -> its entry, with ``exactly_once``."""
        self._size = 0
        self._since = 0
        self._token = 0
        self._room_at = 0
        self._retries = TargetRetries(self)
        self._writing: list[_Entry] = []
        """The batch that is being written; no rows are gathered during this time."""
        self._begun = False
        """True if its token and ids are in a checkpoint."""
        self._refused = 0
        self._is_full = True

    def process(self, tup: Tuple) -> None:
        """Add the tuple to the batch, and write a full one."""
        tuple_id = self._sink_batches.id_of(tup) if self.exactly_once else None
        if tuple_id is not None and tuple_id in self._entry_of:
            _, tuples = self._entry_of[tuple_id]
            tuples.append(tup)
            return
        values = self.row_of(tup)
        if values is None:
            self.ack(tup)
            return
        entry: _Entry = (Row(values, self._row_id(tup)), [tup])
        if not self._entries:
            self._since = self.context.now_ms()
        self._entries.append(entry)
        if tuple_id is not None:
            self._entry_of[tuple_id] = entry
        for value in values.values():
            self._size += len(value) if isinstance(value, str | bytes) else 8
        if len(self._entries) >= self.batch_rows or self._size >= self.batch_bytes:
            self._write_batch()

    def _row_id(self, tup: Tuple) -> str | None:
        """Id of the tuple's row; ``None`` without ``record_id``."""
        fields = self._id_fields()
        if not fields:
            return None
        values = self.named(tup)
        parts = [str(values[field]) for field in fields]
        # Escapes, so that no two records have the same text. The first field, often a partition or
        # a path, is not escaped.
        escaped = [part.replace("%", "%25").replace("/", "%2F") for part in parts[1:]]
        return "/".join([parts[0], *escaped])

    def process_again(self, tup: Tuple) -> None:
        """Ack a tuple whose row is written."""
        self.ack(tup)

    def process_tick(self, tup: Tuple) -> None:
        """Write a batch that is old enough, or one that could not be written before."""
        if self._is_full:
            self._make_room()
        elif self._entries and self.context.now_ms() - self._since >= self.batch_secs * 900:
            self._write_batch()

    def close(self) -> None:
        """Close the sink; the gathered tuples are replayed."""
        sink = self._sink
        self._sink = None
        if sink is not None:
            # A connection that failed may fail once more.
            with suppress(Exception):
                sink.close()

    # -- writing -----------------------------------------------------------------------------------

    def _write_batch(self) -> None:
        if not self._is_full:
            self._writing = self._entries
            self._entries = []
            self._entry_of.clear()
            self._size = 0
            self._is_full = True
            self._make_room()

    def _make_room(self) -> None:
        """Open the sink and write the batch, if that is due; failures are retried."""
        if not self._retries.is_due():
            return
        try:
            written = (self._sink is not None or self._open()) and self._write()
        except Retry as retry:
            self._retries.wait(round(retry.after * 1000))
            if self.context.now_ms() - self._since > REPORT_MS:
                self._report(retry)
        except Exception as error:
            self.close()
            self._retries.wait()
            self._report(error)
        else:
            self._retries.end()
            self._is_full = not written

    def _open(self) -> bool:
        """Connect, and decide which batches of former owners are written.

        Returns ``False`` if the task restarts.
        """
        batches = self._sink_batches
        own_name = ""
        undecided: dict[str, int] = {}
        if self.exactly_once:
            own_name = batches.owner
            undecided = batches.undecided()
        written = False
        # Earlier owners of this task's keys first; then the task, whose sink stays open.
        for owner in [*sorted(undecided.keys() - {own_name}), own_name]:
            self.close()
            self._sink = copy.copy(self.sink)
            try:
                newest = self._sink.open(self.conf, owner)
            except Retry:
                self.close()
                raise
            if newest is None and owner:
                raise InvalidRequest(
                    f"{type(self.sink).__name__} does not know its newest token, which "
                    f"exactly_once needs: set {type(self).__name__}.exactly_once = False, or "
                    "return the token from open()"
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
        """Write the batch, without the rows that the sink rejects.

        Returns ``False`` if the task restarts.
        """
        assert self._sink is not None
        while self._writing:
            entries = self._writing
            if self.exactly_once and not self._begun:
                tups = [tuples[0] for _, tuples in entries]
                if not self._sink_batches.begin(self._token + 1, tups):
                    return False
            self._begun = True
            try:
                self._sink.write([row for row, _ in entries], self._token + 1)
            except Rejected as rejected:
                # The next checkpoint has no ids of these rows, so a repeated tuple is rejected,
                # too.
                self._writing = [
                    entry for index, entry in enumerate(entries) if index not in rejected.rows
                ]
                self._begun = False
                if len(self._writing) == len(entries):
                    raise InvalidRequest(
                        f"{type(self.sink).__name__} rejects rows that are not there"
                    ) from rejected
                for index, reason in sorted(rejected.rows.items()):
                    _, tuples = entries[index]
                    self._reject(tuples, reason)
            else:
                self._token += 1
                self._finish()
        return True

    def _finish(self) -> None:
        """Ack the tuples of the written rows."""
        written: list[Tuple] = []
        for _, tuples in self._writing:
            written += tuples
        self._bound().ack_all(written)
        self._writing = []
        self._begun = False
        if self.exactly_once:
            self._sink_batches.save()

    def _reject(self, tups: list[Tuple], reason: str) -> None:
        if self._is_read:
            self.emit([self.named(tups[0]), reason], stream="rejected", anchors=tups)
        for tup in tups:
            if not self._is_read:
                self.fail(tup, reason=reason)
            elif self.exactly_once:
                self._sink_batches.ack_unapplied(tup)
            else:
                self.ack(tup)
        self._refused += 1
        self.report_metric("rows_rejected", self._refused)
        text = f"{self._refused} rows are rejected, the last one: {reason:.500}"
        self._report(InvalidRequest(text))

    def _report(self, error: Exception) -> None:
        """Report an error, those of a type once a minute."""
        kind = type(error).__name__
        if self._retries.may_report(kind):
            if not isinstance(error, InvalidRequest | MissingPart):
                waits = f"{len(self._writing)} rows wait for the sink, which is tried again"
                error = Unavailable(f"{waits}: {kind}: {error}")
            self.raise_exception(error)
