"""Bolts that write their tuples to another system: databases, files, brokers."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from storm_dagster.api.bolts import StatefulBolt
from storm_dagster.api.callbacks import check_methods
from storm_dagster.api.error_origins import is_of_system, one_line, without_traceback
from storm_dagster.api.error_pauses import ErrorPauses
from storm_dagster.api.outages import REPORT_MS
from storm_dagster.api.specs import Outputs, Stream
from storm_dagster.api.target_retries import TargetRetries
from storm_dagster.api.tuples import Tuple
from storm_dagster.connectors.row_values import row_values
from storm_dagster.connectors.table_reports import TableReports
from storm_dagster.model.errors import InvalidRequest, InvalidTopology, MissingPart, Unavailable
from storm_dagster.model.identities import former_identity_text, identity_text


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a batch."""

    values: Mapping[str, Any]
    """Value of each field."""
    id: str | None = None
    """The values of ``record_id`` as text.

    A replayed row has the same id, no other record has it.
    """
    former_id: str | None = None
    """The id that earlier releases gave the row; ``None`` if it is the same."""


_Entry = tuple[Row, list[Tuple]]
"""A row and its tuples: the first one, and copies that arrived while the row waited."""


class Sink(Protocol):
    """Connection of a :class:`SinkBolt` to another system.

    Each task has its own copy and its own thread: methods may block.
    """

    assets: Sequence[str] = ()
    """Keys of the Dagster assets that it writes.

    They are downstream of the bolt in the lineage of a declared topology. A sink may also have
    ``asset_metadata``: a map of asset to metadata, such as ``dagster/table_name`` and
    ``dagster/uri``. ``{conf.key}`` in a value is filled in from the conf, and ``{conf.key=text}``
    has a default.
    """

    def open(self, conf: Mapping[str, Any], owner: str) -> int | None:
        """Connect, and return the newest token that ``owner`` has written.

        0 if it has written none; ``None`` if it is not known. ``conf`` is the topology's conf,
        overridden by the component's. ``owner`` names the task, and is empty if rows may be written
        twice. From now on, earlier connections of the owner must not write anything.
        """

    def write(self, rows: Sequence[Row], token: int) -> None:
        """Make all rows durable, with the token, or raise.

        Raise :class:`Retry` if none is written and the same call must be repeated,
        :class:`Rejected` if some can never be written: the call is repeated without them. After any
        other error the sink is closed and reopened: the result of :meth:`open` then tells if the
        rows are written.
        """

    def close(self) -> None:
        """Disconnect, also after an error, without waiting."""


class Retry(Exception):
    """The sink accepts no rows now.

    Spouts are held back, and the write is repeated ``after`` seconds.
    """

    def __init__(self, after: float, why: str = "it is busy") -> None:
        super().__init__(why)
        # Raises here for no number, so that the error has the author's line.
        self.after: float = max(0.0, float(after))


class Rejected(Exception):
    """The sink refuses rows, which would fail every time.

    ``rows`` is index in the batch -> reason.
    """

    def __init__(self, rows: Mapping[int, str]) -> None:
        reasons = list(rows.values())
        first_reason = reasons[0] if reasons else ""
        super().__init__(f"{len(rows)} rows are refused: {first_reason}")
        self.rows: dict[int, str] = {index: str(reason) for index, reason in rows.items()}


def write_or_reject(
    rows: Sequence[Row],
    write: Callable[[Sequence[Row]], Any],
    is_of_row: Callable[[Exception], bool],
) -> None:
    """Write rows in one call, or all but the rows at fault.

    If the call raises, the halves of its rows are written in their order, then their halves. Raises
    :class:`Rejected` for the rows that raise alone. ``write`` adds rows to those written before,
    all of them or none. ``is_of_row`` is true for an error that a row may cause.
    """
    refused: dict[int, str] = {}
    # A stack of (index of the first row, rows): the part with the first rows is on top.
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
                parts.append((first + middle, part[middle:]))
                parts.append((first, part[:middle]))
            else:
                refused[first] = f"{type(error).__name__}: {error}"
    if refused:
        raise Rejected(refused)


_OWN_TEXT_TYPES = frozenset((str, int))
"""Types whose ids are as earlier releases wrote them."""


def _join_id(texts: Sequence[str]) -> str:
    """The id of a record, from the texts of its fields; no two lists of texts have the same.

    The first field, often a partition or a path, is unchanged.
    """
    first, *others = texts
    escaped = [text.replace("%", "%25").replace("/", "%2F") for text in others]
    return "/".join([first, *escaped])


class SinkBolt(StatefulBolt):
    """Bolt that writes rows to its ``sink``, and then acks their tuples.

    A subclass sets the attributes. A batch is written when it has ``batch_rows`` rows or
    ``batch_bytes`` bytes (strings and bytes; any other value counts as eight), or is ``batch_secs``
    old. While the sink cannot be reached, the task takes no tuples, so that spouts are held back;
    the batch is retried every 0.5 to 10 s, and the error is reported once a minute. After an error
    of the sink's own code (``TypeError``, ``KeyError`` and the like) it is retried every 1 to 60 s:
    it is an error of the component, with file and line, and no outage.

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
    """The sink that is written to; each task has its own copy."""
    record_id: ClassVar[str | Sequence[str] | None] = None
    """Fields whose values are the id of a record on its stream."""
    exactly_once: ClassVar[bool] = False
    """True if no row is written twice."""
    batch_rows: ClassVar[int] = 1000
    batch_bytes: ClassVar[int] = 4 << 20
    batch_secs: ClassVar[float] = 1.0
    timestamp_field: ClassVar[str | None] = None
    """Field of the inputs with the event time in milliseconds, for the reports to Dagster.

    Its value may also be a ``datetime``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.exactly_once and not cls.record_id:
            raise InvalidTopology(
                f"{cls.__name__} is exactly_once without ids: set record_id to the fields of one"
            )
        cls.message_id = cls.record_id if cls.exactly_once else None

    @classmethod
    def component_config(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """Conf of the written assets, and of a tick for quiet streams.

        The tick writes the rows that wait for a full batch.
        """
        sink = getattr(cls, "sink", None)
        return {
            "topology.tick.tuple.freq.secs": cls.batch_secs / 2,
            "topology.component.assets": list(getattr(sink, "assets", ())),
            "topology.component.asset.metadata": {
                asset: dict(metadata)
                for asset, metadata in getattr(sink, "asset_metadata", {}).items()
            },
        }

    @classmethod
    def check_inputs(cls, owner: str, inputs: Mapping[tuple[str, str], Any]) -> None:
        """Check that the class has a sink, and each input the fields that attributes name.

        Raises :class:`InvalidTopology` if not.
        """
        if not hasattr(cls, "sink"):
            raise InvalidTopology(
                f"{owner}: {cls.__name__} has no sink: set sink = ... in its class"
            )
        check_methods(cls.sink, ("open", "write", "close"))
        needed = [("record_id", name) for name in cls._id_fields()]
        if cls.timestamp_field is not None:
            needed.append(("timestamp_field", cls.timestamp_field))
        for (component, stream), spec in inputs.items():
            for attribute, name in needed:
                if name not in spec.fields:
                    raise InvalidTopology(
                        f"{owner}: {attribute} is {name!r}, but {stream!r} of {component!r} has: "
                        f"{', '.join(spec.fields)}"
                    )

    @classmethod
    def _id_fields(cls) -> list[str]:
        return [cls.record_id] if isinstance(cls.record_id, str) else list(cls.record_id or ())

    def row_of(self, tup: Tuple) -> Mapping[str, Any] | None:
        """The values to write: by default those of the tuple, by field.

        ``None`` for no row. If it raises, the tuple fails.
        """
        return self.named(tup)

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Begin without a connection: the first tuple or tick connects."""
        self._rejected_is_read = bool(context["stream->target->grouping"].get("rejected"))
        self._sink: Sink | None = None
        """The open sink; ``None`` before the first connection and after an error."""
        self._entries: list[_Entry] = []
        """The batch that is gathered."""
        self._entry_of_id: dict[Any, _Entry] = {}
        """Tuple id -> its entry in that batch; used with ``exactly_once`` only."""
        self._size = 0
        """Bytes of that batch, as the class counts them."""
        self._since = 0
        """Time of the first row of the last batch, in milliseconds of the context's clock."""
        self._token = 0
        """Token of the last batch that the sink has written."""
        self._room_at = 0
        self._retries = TargetRetries(self)
        self._mistakes = ErrorPauses(tolerated=0)
        """Pauses after errors of the sink's own code."""
        self._writing: list[_Entry] = []
        """The batch that is being written; no other is gathered at that time."""
        self._has_begun = False
        """True if a write of that batch has begun.

        With ``exactly_once`` its token and ids are then in a checkpoint.
        """
        self._rejected_count = 0
        """Number of rejected rows since the task began, as the metric ``rows_rejected``."""
        self._table_reports = TableReports(self)
        # The worker passes no tuple before _make_room() has connected.
        self._is_full = True

    def process(self, tup: Tuple) -> None:
        """Add the tuple to the batch, and write a full one.

        A copy of a tuple in the batch adds no row, and is acked or fails with it.
        """
        tuple_id = self._sink_batches.id_of(tup) if self.exactly_once else None
        if tuple_id is not None and tuple_id in self._entry_of_id:
            _, copies = self._entry_of_id[tuple_id]
            copies.append(tup)
            return
        values = row_values(self.row_of, tup, type(self).__name__)
        if values is None:
            self.ack(tup)
            return
        entry = (Row(values, *self._record_ids_of(tup)), [tup])
        for value in values.values():
            self._size += len(value) if isinstance(value, str | bytes) else 8
        if not self._entries:
            self._since = self.context.now_ms()
        self._entries.append(entry)
        if tuple_id is not None:
            self._entry_of_id[tuple_id] = entry
        if len(self._entries) >= self.batch_rows or self._size >= self.batch_bytes:
            self._write_batch()

    def _record_ids_of(self, tup: Tuple) -> tuple[str | None, str | None]:
        """The id of the tuple's record as text, and its former id if that is another one."""
        if not self.record_id:
            return None, None
        named = self.named(tup)
        if isinstance(self.record_id, str):
            values = [named[self.record_id]]
        else:
            values = [named[name] for name in self.record_id]
        texts = [identity_text(value) for value in values]
        if _OWN_TEXT_TYPES.issuperset(map(type, values)):
            return _join_id(texts), None
        former_texts = [former_identity_text(value) for value in values]
        if not any(former_texts):
            return _join_id(texts), None
        former = [old or text for old, text in zip(former_texts, texts, strict=True)]
        return _join_id(texts), _join_id(former)

    def process_again(self, tup: Tuple) -> None:
        """Ack a tuple whose row is written."""
        self.ack(tup)

    def process_tick(self, tup: Tuple) -> None:
        """Write a batch that is old enough, or retry one that could not be written."""
        if self._is_full:
            self._make_room()
        # 90 %: a tick that is a little early must not wait for the next one.
        elif self._entries and self.context.now_ms() - self._since >= self.batch_secs * 900:
            self._write_batch()
        self._table_reports.report_if_due()

    def close(self) -> None:
        """Close the sink; tuples of unwritten rows are replayed."""
        sink = self._sink
        self._sink = None
        if sink is not None:
            # A connection that failed may fail once more.
            with suppress(Exception):
                sink.close()

    # -- writing -----------------------------------------------------------------------------------

    def _write_batch(self) -> None:
        """Write the gathered batch, unless another one is being written."""
        if self._is_full:
            return
        self._writing = self._entries
        self._entries = []
        self._entry_of_id.clear()
        self._size = 0
        self._is_full = True
        self._make_room()

    def _make_room(self) -> None:
        """Open the sink and write the batch, if that is due; failures are retried later.

        The task takes tuples after a success, and none if it must restart.
        """
        if not self._retries.is_due():
            return
        try:
            is_open = self._sink is not None or self._open()
            is_written = is_open and self._write()
        except Retry as retry:
            self._retries.wait(round(retry.after * 1000))
            # A short pause is not an error: only a batch that is a minute old is reported.
            if self.context.now_ms() - self._since > REPORT_MS:
                self._report_away(retry)
        except Exception as error:
            self.close()
            if is_of_system(error):
                self._retries.wait()
                self._report_away(error)
            else:
                self._await_repair(error)
        else:
            self._mistakes.on_success()
            self._retries.end()
            self._is_full = not is_written

    def _open(self) -> bool:
        """Connect, and decide which earlier batches are written.

        False if the task must restart.
        """
        undecided = self._sink_batches.undecided() if self.exactly_once else {}
        return self._decide_former_batches(undecided) and self._open_own(undecided)

    def _owner_name(self) -> str:
        """Name of this task for its sink; empty without ``exactly_once``."""
        return self._sink_batches.owner if self.exactly_once else ""

    def _decide_former_batches(self, undecided: Mapping[str, int]) -> bool:
        """Decide which batches of earlier owners of this task's keys are written.

        ``undecided``: owner -> token of its batch. False if the task must restart.
        """
        for owner in sorted(undecided.keys() - {self._owner_name()}):
            newest = self._connect_sink(owner)
            if not self._sink_batches.decide(owner, newest >= undecided[owner]):
                return False
        return True

    def _open_own(self, undecided: Mapping[str, int]) -> bool:
        """Connect as this task, and decide if its batch is written. The sink stays open.

        ``undecided``: as in :meth:`_decide_former_batches`. False if the task must restart.
        """
        owner = self._owner_name()
        self._token = self._connect_sink(owner)
        if owner in undecided:
            is_written = self._token >= undecided[owner]
            if not self._sink_batches.decide(owner, is_written):
                return False
            # The reply was lost, but the rows are written; otherwise the batch gets a new token.
            if self._has_begun and is_written:
                self._finish()
        self._has_begun = False
        return True

    def _connect_sink(self, owner: str) -> int:
        """Connect as an owner, and return its newest token, or 0 for none.

        :class:`InvalidRequest` if the sink does not know what an owner has written.
        """
        self.close()
        self._sink = copy.copy(self.sink)
        try:
            newest = self._sink.open(self.conf, owner)
        except Retry:
            self.close()
            raise
        if newest is None and owner:
            raise InvalidRequest(
                f"{type(self.sink).__name__} does not know what it has written, "
                f"as exactly_once needs it: set {type(self).__name__}.exactly_once = False, "
                "or return its newest token from open()"
            )
        return newest or 0

    def _write(self) -> bool:
        """Write the batch, and write it again without the rows that the sink refuses.

        False if the task must restart. Raises what the sink raises, except :class:`Rejected`.
        """
        assert self._sink is not None
        while self._writing:
            entries = self._writing
            if self.exactly_once and not self._has_begun:
                tups = [copies[0] for _, copies in entries]
                if not self._sink_batches.begin(self._token + 1, tups):
                    return False
            self._has_begun = True
            try:
                self._sink.write([row for row, _ in entries], self._token + 1)
            except Rejected as rejected:
                self._remove_rejected(rejected)
            else:
                self._token += 1
                self._finish()
        return True

    def _remove_rejected(self, rejected: Rejected) -> None:
        """Remove the rejected rows from the batch, and emit or fail their tuples.

        Raises :class:`InvalidRequest` if none of their indexes is in the batch: the write would be
        repeated permanently.
        """
        entries = self._writing
        self._writing = [entry for index, entry in enumerate(entries) if index not in rejected.rows]
        # The next write begins with a checkpoint without the ids of these rows, so that a replayed
        # tuple is rejected, too.
        self._has_begun = False
        if len(self._writing) == len(entries):
            raise InvalidRequest(
                f"{type(self.sink).__name__} rejects rows that are not there"
            ) from rejected
        for index, reason in sorted(rejected.rows.items()):
            _, tups = entries[index]
            self._reject(tups, reason)

    def _finish(self) -> None:
        """Ack the tuples of the written batch, and with ``exactly_once`` save that."""
        written: list[Tuple] = []
        for _, tups in self._writing:
            written += tups
        self._bound().ack_all(written)
        self._table_reports.count(len(self._writing), self._event_times())
        self._writing = []
        self._has_begun = False
        if self.exactly_once:
            self._sink_batches.save()

    def _event_times(self) -> list[Any]:
        """Event times of the rows of the written batch; empty without a field for them."""
        if self.timestamp_field is None:
            return []
        return [self.named(tups[0]).get(self.timestamp_field) for _, tups in self._writing]

    def _reject(self, tups: list[Tuple], reason: str) -> None:
        """Emit a rejected row, if its stream is read, and ack its tuples; else fail them.

        ``tups`` are the row's tuple and its copies. The row is counted and reported.
        """
        if self._rejected_is_read:
            self.emit([self.named(tups[0]), reason], stream="rejected", anchors=tups)
        for tup in tups:
            if not self._rejected_is_read:
                self.fail(tup, reason=reason)
            elif self.exactly_once:
                self._sink_batches.ack_unapplied(tup)
            else:
                self.ack(tup)
        self._rejected_count += 1
        self.report_metric("rows_rejected", self._rejected_count)
        if self._retries.reports.may_report("rejected"):
            self.raise_exception(
                InvalidRequest(
                    f"{self._rejected_count} rows are rejected so far, this one: {reason:.500}"
                )
            )

    def _await_repair(self, error: Exception) -> None:
        """Report an error of the sink's own code, and keep the batch for the next call.

        It is no outage of a system: the pauses grow from 1 s to 60 s.
        """
        now_ms = self.context.now_ms()
        self._mistakes.on_error(now_ms / 1000)
        self._retries.end()
        self._retries.wait(round(self._mistakes.until * 1000) - now_ms)
        if self._retries.reports.may_report(type(error).__name__):
            self.raise_exception(error)

    def _report_away(self, error: Exception) -> None:
        """Show what is waited for, and report it once for each type of error.

        The errors that a change of the topology can repair keep their type; all others are reported
        as :class:`Unavailable` with the number of rows that wait.
        """
        kind = type(error).__name__
        cause = one_line(error)

        def as_report(since: str) -> Exception:
            if isinstance(error, InvalidRequest | MissingPart):
                return without_traceback(error)
            waiting = f"{len(self._writing)} rows wait for the sink, which is retried"
            return Unavailable(f"{waiting} since {since}: {cause}")

        system = f"the sink {type(self.sink).__name__}"
        self._retries.reports.report_waiting(system, kind, cause, as_report)
