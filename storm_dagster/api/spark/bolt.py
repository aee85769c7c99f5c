"""A bolt over micro-batches of tuples as DataFrames, on the cluster's Spark."""

import hashlib
import inspect
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from storm_dagster.api.bolts import Bolt
from storm_dagster.api.spark import session as spark_session
from storm_dagster.api.spark.bridge import rows_of
from storm_dagster.api.spark.causes import innermost
from storm_dagster.api.spark.columns import arrow_types, column_array
from storm_dagster.api.spark.errors import ErrorsOnce
from storm_dagster.api.spark.functions import check_function, class_conf, resolve_function
from storm_dagster.api.target_retries import TargetRetries
from storm_dagster.api.tuples import Tuple
from storm_dagster.host.waiting import Backoff
from storm_dagster.model.errors import (
    InvalidRequest,
    InvalidTopology,
    StormDagsterError,
    Unavailable,
)
from storm_dagster.model.fusion import FUSED, OTHER_WAY

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger(__name__)
_MAX_PAUSE_SECS = 2.0
"""Maximum pause of the task after a batch that failed as a whole."""
_MAX_SINGLE_ROWS = 3
"""Number of rows that are tried alone. If all of them raise, the function is at fault."""
_MAX_LOSSES = 5
"""Number of times that Spark is lost while it runs one batch, before the batch fails."""


class SparkBolt(Bolt):
    """Bolt that runs a function on micro-batches of tuples, as DataFrames.

    The function runs on the cluster's Spark. ``function`` names ``"module:function"``, called as
    ``function(frame, **args)`` with a DataFrame whose columns are ``schema`` (Spark DDL; without
    it, the fields of the input's stream with types that Arrow infers). It returns ``None``, or a
    DataFrame with a column for each of the bolt's ``outputs``; its rows are emitted, anchored to
    the whole batch.

    A batch is cut at ``batch_tuples`` tuples, at ``batch_bytes`` bytes of strings and bytes in them
    (each other value counts as eight), or after ``batch_secs`` seconds. Its tuples are acked when
    the function has returned and its rows are emitted. If it raises, it is called with the halves
    of the batch, then with their halves: a tuple whose row raises alone fails, and the others are
    acked. All tuples fail if the result does not have that form, or if the first three rows that
    are tried alone raise.

    While Spark is unreachable, the task keeps the batch and takes no tuples: spouts are held back,
    no message timeout runs, and the errors show the begin and the end of the outage. The batch is
    processed as soon as Spark answers.

    A function with a parameter ``context`` gets that of the task, with the batch's ``batch_id``.
    """

    blocking = True
    auto_ack = False
    auto_anchor = False
    auto_fail = False

    def __init__(
        self,
        function: str,
        args: Mapping[str, Any] | None = None,
        schema: str | None = None,
        batch_tuples: int = 20_000,
        batch_secs: float = 1.0,
        batch_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self.function = function
        self.function_args: dict[str, Any] = dict(args or {})
        self.schema = schema
        self.batch_tuples = batch_tuples
        self.batch_secs = batch_secs
        self.batch_bytes = batch_bytes
        self._columns = columns_of(schema) if schema else None
        """Names of the columns in ``schema``."""
        self._struct: Any = None
        """``schema`` as Spark has parsed it; ``None`` before the first batch."""
        self._waiting: list[Tuple] = []
        """Tuples of the current batch, also while it runs."""
        self._bytes = 0
        """Size of these tuples; only counted with ``batch_bytes``."""
        self._since = 0.0
        """Time of the batch's first tuple, of the monotonic clock."""
        self._pauses = Backoff(0.1, _MAX_PAUSE_SECS)
        self._session: Any = None
        """Session that the last part of a batch ran in."""
        # Since the task began, as the metrics batches, failed_batches and bad_rows.
        self._batch_count = 0
        self._failed_count = 0
        self._bad_row_count = 0
        self._errors = ErrorsOnce(self)
        self._retries = TargetRetries(self)
        self._losses = 0
        """Number of times that Spark was lost while it ran the current batch."""

    @classmethod
    def component_config(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """Conf of a tick every ``batch_secs``.

        The tick processes the last tuples of a quiet stream.
        """
        return {"topology.tick.tuple.freq.secs": float(args.get("batch_secs", 1.0))}

    @classmethod
    def _spec_conf(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """As a component, with the mark of a class that is not of this library."""
        return {**super()._spec_conf(args), **class_conf(cls)}

    @classmethod
    def _check_arguments(cls, owner: str, args: Mapping[str, Any], par: int, outputs: Any) -> None:
        check_function(args.get("function"), owner)

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Resolve the function; the first batch creates the session."""
        self._conf = conf
        self._archive = spark_session.archive_of(context)
        self._cluster_spark = spark_session.cluster_spark_of(context)
        self._context = context
        self._subject = f"component {context.component!r}, task {context.task_id}"
        try:
            self._fields = list(context.output_fields())
        except InvalidRequest:
            self._fields = []
        self._function = resolve_function(self.function)
        parameters = list(inspect.signature(self._function).parameters)
        # The first one gets the DataFrame, whatever its name.
        self._takes_context = "context" in parameters[1:]
        # The tuples of the batch would time out while it is divided further.
        self._max_secs = float(conf.get("topology.message.timeout.secs") or 30) / 2

    def process(self, tup: Tuple) -> None:
        """Add the tuple to the batch, and run the batch when it is full or old enough.

        A tuple of a spout whose worker fuses the bolt fails at once.
        """
        if tup.stream.startswith(FUSED):
            reason = f"{self._subject}: a tuple is not for {self.function}: {OTHER_WAY}"
            self._fail([tup], Unavailable(reason))
            return
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append(tup)
        if self.batch_bytes is not None:
            for value in tup.values:
                self._bytes += len(value) if isinstance(value, str | bytes) else 8
        if self._is_full:
            # The task ends: its tuples are given back.
            return
        if self._is_batch_complete():
            self._run_batch()

    def _is_batch_complete(self) -> bool:
        """True if the batch has enough tuples or bytes, or has waited long enough."""
        if len(self._waiting) >= self.batch_tuples:
            return True
        if self.batch_bytes is not None and self._bytes >= self.batch_bytes:
            return True
        return time.monotonic() - self._since >= self.batch_secs

    def process_tick(self, tup: Tuple) -> None:
        """Run a batch that has waited long enough.

        The spec sets a tick of ``batch_secs``.
        """
        if self._is_full:
            self._make_room()
        elif self._waiting and time.monotonic() - self._since >= self.batch_secs * 0.9:
            self._run_batch()

    def _make_room(self) -> None:
        """Process the waiting batch, if a retry is due and Spark answers."""
        if not self._retries.is_due():
            return
        try:
            spark_session.worker_session(self._conf, self._archive, cluster=self._cluster_spark)
        except Unavailable as error:
            self._await_spark(self._waiting, error)
            return
        number = len(self._waiting)
        _log.info("%s: Spark answers, and gets the %d tuples that waited", self._subject, number)
        self._run_batch()

    def _await_spark(self, tuples: list[Tuple], error: Unavailable) -> None:
        """Keep these tuples, and accept no others until Spark answers.

        The begin of the outage is reported, and the awaited system is shown.
        """
        self._waiting = tuples
        self._retries.wait()

        def as_report(since: str) -> Exception:
            waiting = f"{len(tuples)} tuples wait since {since}"
            state = f"{self._subject}: {waiting}, and no others are taken until Spark answers"
            return Unavailable(f"{state}: {error.message}")

        self._retries.reports.report_waiting("Spark", "Spark", error.message, as_report)

    def _run_batch(self) -> None:
        """Run the batch, and search the rows that raise alone if it raises.

        The halves of each part that raises are run. If the first rows that are tried alone all
        raise, the function is at fault and not a row: the batch fails as a whole. If Spark is
        lost, the tuples that are not acked wait for it.
        """
        # The batch stays in ``_waiting``: if the function ends the process, its tuples fail when
        # the task restarts.
        run = _BatchRun(self._waiting)
        while run.parts and (run.acked_ids or len(run.bad) < _MAX_SINGLE_ROWS):
            if not self._run_next_part(run):
                break
        if run.outage is None:
            run.outage = self._hidden_outage(run)
        if run.outage is None:
            self._finish_batch(run)
        else:
            self._await_spark(run.unacked(), run.outage)

    def _hidden_outage(self, run: "_BatchRun") -> Unavailable | None:
        """The outage that made parts of the batch fail after its first error; ``None`` without one.

        Spark may be lost while bad rows are searched, and the function may hide that. So it is
        asked once more before tuples fail.
        """
        errors = [error for _, error in run.bad]
        if not errors or isinstance(errors[-1], StormDagsterError):
            return None
        if self._losses + 1 >= _MAX_LOSSES or spark_session.is_responding(self._session):
            return None
        self._losses += 1
        spark_session.drop_worker_session(self._conf, self._session)
        return spark_session.outage_error(self._conf, errors[-1])

    def _run_next_part(self, run: "_BatchRun") -> bool:
        """Run the function with the part on top of the stack, and ack its tuples.

        If it raises, its halves replace it, or a single row is added to ``run.bad``. False if no
        other part is to be run: Spark is lost (``run.outage``), the error is not that of a row, or
        the search takes too long. ``run.parts`` then has the tuples that were not tried alone.
        """
        part = run.parts.pop()
        try:
            session = self._current_session()
        except Unavailable as error:
            run.outage = error
            return False
        except Exception as error:
            # The conf names no Spark, or pyspark is not installed.
            run.first_error = error
            run.parts.append(part)
            return False
        try:
            self._run_part(part, session)
        except Exception as error:
            return self._on_part_error(run, part, error)
        self._bound().ack_all(part)
        run.acked_ids.update(map(id, part))
        return True

    def _current_session(self) -> Any:
        """The session of this process; its keys without effect are reported once.

        Raises as :func:`~storm_dagster.api.spark.session.worker_session`.
        """
        session = spark_session.worker_session(
            self._conf, self._archive, cluster=self._cluster_spark
        )
        if session is not self._session:
            self._session = session
            spark_session.report_keys(self, self._subject, session)
        return session

    def _on_part_error(self, run: "_BatchRun", part: list[Tuple], error: Exception) -> bool:
        """Find the outage or the bad row of a part that raised; see :meth:`_run_next_part`."""
        if self._is_spark_lost(error, probe=run.first_error is None):
            spark_session.drop_worker_session(self._conf, self._session)
            error = spark_session.outage_error(self._conf, error)
            self._losses += 1
            if self._losses < _MAX_LOSSES:
                run.outage = error
                return False
        if run.first_error is None:
            run.first_error = error
        # After an emit the halves would emit its rows once more. The other errors are not those of
        # a row.
        if self._emitted or isinstance(error, Unavailable | _WrongResult):
            run.parts.append(part)
            return False
        if len(part) == 1:
            run.bad.append((part[0], error))
            if not run.acked_ids and run.parts:
                # Neighbors are often bad together: the next single row is another one.
                run.parts = _last_row_next(run.parts)
            return True
        middle = len(part) // 2
        run.parts.append(part[middle:])
        run.parts.append(part[:middle])
        return time.monotonic() - run.began <= self._max_secs

    def _finish_batch(self, run: "_BatchRun") -> None:
        """Fail the tuples that are not acked, report the metrics, and take tuples again."""
        self._waiting = []
        self._bytes = 0
        self._losses = 0
        self._retries.end()
        self._is_full = False
        if not run.acked_ids and len(run.batch) > 1:
            # No row has succeeded: all tuples fail with the first error.
            run.parts = [run.batch]
            run.bad = []
        for tup, error in run.bad:
            self._fail([tup], self._bad_row(tup, error))
        if run.first_error is None:
            self._errors.clear()
        elif run.parts or not run.bad:
            unprocessed: list[Tuple] = []
            for part in reversed(run.parts):
                unprocessed += part
            self._fail(unprocessed, run.first_error)
        if run.parts or run.bad:
            self._failed_count += 1
            self._bad_row_count += len(run.bad)
            self.report_metric("failed_batches", self._failed_count)
            self.report_metric("bad_rows", self._bad_row_count)
        if run.parts or not run.acked_ids:
            time.sleep(self._pauses.next_pause())
            return
        self._pauses.reset()
        self._batch_count += 1
        self.report_metric("batches", self._batch_count)
        self.report_metric("batch_tuples", len(run.acked_ids))
        self.report_metric("batch_ms", round((time.monotonic() - run.began) * 1000, 1))

    def _is_spark_lost(self, error: Exception, probe: bool) -> bool:
        """True if the error of a part comes from an outage of Spark.

        Otherwise the function or a row is at fault. Spark is probed if the error reads like an
        outage, or with ``probe``: a function may hide the error that it caught.
        """
        if isinstance(error, _WrongResult):
            return False
        if spark_session.is_session_loss(error, self._session):
            return True
        if not probe or isinstance(error, StormDagsterError):
            return False
        return not spark_session.is_responding(self._session)

    def _run_part(self, part: list[Tuple], session: Any) -> None:
        """Call the function with these tuples, and emit the rows of its result.

        ``_emitted`` is then the number of emitted rows, also if this raises.
        """
        self._emitted = 0
        types = self._types(session)
        table = self._table(part, types)
        args = self.function_args
        if self._takes_context:
            values = repr([tup.values for tup in part])
            digest = hashlib.blake2b(values.encode(errors="surrogatepass"), digest_size=16)
            self._context.batch_id = digest.hexdigest()
            args = {"context": self._context, **args}
        frame = session.createDataFrame(table, types)
        rows = self._rows(self._function(frame, **args))
        # One joint anchor: each row belongs to all tuples of the part.
        anchors = [self._bound().joint(part)] if rows else []
        for values in rows:
            self.emit(values, anchors=anchors)
            self._emitted += 1

    def _fail(self, tups: list[Tuple], reason: Exception) -> None:
        """Fail tuples for one reason."""
        if isinstance(reason, StormDagsterError):
            cause = reason
        else:
            # The first line of an error of Spark explains little.
            cause = innermost(reason)
        for tup in tups:
            self.fail(tup, cause)
        self._errors.report(reason)

    def _bad_row(self, tup: Tuple, error: Exception) -> InvalidRequest:
        """The reason of a failed tuple whose row raises alone."""
        row = dict(zip(self._column_names(tup), tup.values, strict=False))
        cause = innermost(error)
        reason = InvalidRequest(
            f"{self._subject}: {self.function} fails with the row {row!r:.300} alone, "
            f"whose tuple fails ({cause})"
        )
        # Its report has file and line of the cause.
        reason.__cause__ = error
        return reason

    def _rows(self, result: Any) -> list[list[Any]]:
        """The rows to emit.

        Raises :class:`InvalidTopology` if the result does not have the declared outputs.
        """
        if result is None:
            return []
        if not hasattr(result, "toArrow"):
            raise _WrongResult(
                f"{self._subject}: {self.function} returns {type(result).__name__}: "
                "return a DataFrame, or None"
            )
        if not self._fields:
            raise _WrongResult(
                f"{self._subject}: {self.function} returns a DataFrame, but the bolt declares no "
                f"outputs: declare outputs={list(result.columns)}, or return None"
            )
        missing = [name for name in self._fields if name not in result.columns]
        if missing:
            raise _WrongResult(
                f"{self._subject}: {self.function} returns columns {list(result.columns)}, "
                f"the bolt declares {self._fields}: "
                f"add {missing} to the DataFrame, or change outputs"
            )
        if result.columns != self._fields:
            result = result.select(*self._fields)
        # Over Connect each frame requests its columns once, and sends the batch along.
        return rows_of(result.toArrow())

    def _types(self, session: Any) -> Any:
        # The server parses the schema: once, not with each batch.
        if self.schema and self._struct is None:
            self._struct = session.createDataFrame([], self.schema).schema
        return self._struct

    def _column_names(self, tup: Tuple) -> list[str]:
        return self._columns or list(self._context.source_fields(tup.component, tup.stream))

    def _table(self, batch: list[Tuple], struct: Any) -> "pa.Table":
        """The tuples as an Arrow table.

        ``struct`` is the parsed ``schema``, or ``None``. Raises :class:`InvalidTopology` if their
        number of values is not that of the columns, or if the values of a column have different
        types, and :class:`InvalidRequest` if the schema would change a value.
        """
        import pyarrow

        columns = self._batch_columns(batch)
        try:
            values = list(zip(*(tup.values for tup in batch), strict=True))
        except ValueError:
            # Tuples of different lengths: the error below is raised.
            values = []
        if len(values) != len(columns):
            raise InvalidTopology(
                f"{self._subject}: {self.function} takes {len(columns)} columns "
                f"({', '.join(columns)}), its tuples have {len(batch[0].values)} values: "
                "name as many in schema"
            )
        types = arrow_types(struct, len(columns))
        arrays = []
        for name, column, arrow_type in zip(columns, values, types, strict=True):
            try:
                subject = f"{self._subject}: column {name!r} of {self.function}"
                arrays.append(column_array(subject, column, arrow_type))
            except (pyarrow.ArrowException, TypeError, OverflowError) as error:
                raise InvalidTopology(
                    f"{self._subject}: the values of column {name!r} have different types "
                    f"({error}): emit values of one type, or None"
                ) from None
        return pyarrow.Table.from_arrays(arrays, names=columns)

    def _batch_columns(self, batch: list[Tuple]) -> list[str]:
        """The columns of the batch, which must be the same for all of its streams."""
        tuple_of_stream = {(tup.component, tup.stream): tup for tup in batch}
        columns_of_streams = [self._column_names(tup) for tup in tuple_of_stream.values()]
        columns = columns_of_streams[0]
        if any(other != columns for other in columns_of_streams):
            fields = " and ".join(map(str, columns_of_streams))
            raise _WrongResult(
                f"{self._subject}: {self.function} reads the fields {fields}: "
                "name its columns in schema"
            )
        return columns


class _BatchRun:
    """Progress of a batch: its parts that are not run, and the rows that raise alone."""

    def __init__(self, batch: list[Tuple]) -> None:
        self.batch = batch
        self.began: float = time.monotonic()
        self.parts: list[list[Tuple]] = [batch]
        """Stack of the parts to run: that with the first rows of the batch is the last one."""
        self.bad: list[tuple[Tuple, Exception]] = []
        """(tuple, error) of the rows that raise alone."""
        self.acked_ids: set[int] = set()
        """``id()`` of each acked tuple."""
        self.first_error: Exception | None = None
        """Error of the first part that raised: that of all tuples if the batch fails as a whole."""
        self.outage: Unavailable | None = None
        """The error of a lost Spark, for which the batch waits."""

    def unacked(self) -> list[Tuple]:
        """The tuples that are not acked.

        They keep their order, so that a batch without acked tuples keeps its ``batch_id``.
        """
        return [tup for tup in self.batch if id(tup) not in self.acked_ids]


def _last_row_next(parts: list[list[Tuple]]) -> list[list[Tuple]]:
    """Put the last row of the batch on top of the stack of parts, alone.

    The first part of the stack has the last rows of the batch.
    """
    bottom = parts[0]
    upper = parts[1:]
    if len(bottom) == 1:
        return [*upper, bottom]
    return [bottom[:-1], *upper, bottom[-1:]]


class _WrongResult(InvalidTopology):
    """Error of the function's result, or of its input columns, for any rows."""


def columns_of(schema: str) -> list[str]:
    """Column names of a Spark DDL schema.

    Commas within ``<...>`` and ``(...)`` belong to types.
    """
    parts = [""]
    depth = 0
    for letter in schema:
        if letter in "<(":
            depth += 1
        elif letter in ">)":
            depth -= 1
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.split()[0].rstrip(":").strip("`") for part in parts if part.strip()]
