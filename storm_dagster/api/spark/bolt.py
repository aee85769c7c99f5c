"""A bolt over micro-batches of tuples as DataFrames, on the cluster's Spark."""

import hashlib
import inspect
import logging
import time
from collections.abc import Mapping, Set
from datetime import datetime, timezone
from itertools import chain
from typing import TYPE_CHECKING, Any

from storm_dagster.api.bolts import Bolt
from storm_dagster.api.spark import session as spark_session
from storm_dagster.api.spark.bridge import rows_of
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
_MAX_ALONE = 3
"""Rows that are tried alone; if all of them raise, the function is at fault."""
_MAX_LOSSES = 5
"""Times that Spark is lost while it runs one batch, before the batch fails as the cause."""


class SparkBolt(Bolt):
    """Bolt that runs a function on micro-batches of tuples as DataFrames.

    It runs on the cluster's Spark. ``function`` names ``"module:function"``, called as
    ``function(frame, **args)`` with a DataFrame whose columns are ``schema`` (Spark DDL; without
    it, the fields of the input's stream with types that Arrow infers). It returns ``None``, or a
    DataFrame with a column for each of the bolt's ``outputs``; its rows are emitted, anchored to
    the whole batch.

    A batch is cut at ``batch_tuples`` tuples, at ``batch_bytes`` bytes of strings and bytes in them
    (each other value counts as eight), or after ``batch_secs`` seconds. Its tuples are acked when
    the function has returned and its rows are emitted. If it raises, it is called with the halves
    of the batch, and so on: a tuple whose row raises alone fails, and the others are acked. All
    fail if the result is not of that form, or the first three rows tried alone raise.

    While Spark is unreachable, the task keeps the batch and takes no tuples: spouts are held back,
    no message timeout runs, and the error is reported once a minute. The batch is processed when
    Spark responds.

    A function with a parameter ``context`` gets the task's, with the batch's ``batch_id``.
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
        self._struct: Any = None
        self._waiting: list[Tuple] = []
        self._bytes = 0
        self._since = 0.0
        self._pauses = Backoff(0.1, _MAX_PAUSE_SECS)
        self._session: Any = None
        self._processed = 0
        """Number of batches of which all rows were processed."""
        self._failed = 0
        """Number of batches of which a row failed."""
        self._bad = 0
        """Number of rows that failed alone."""
        self._errors = spark_session.ErrorsOnce(self)
        self._retries = TargetRetries(self)
        self._losses = 0
        """Number of times that Spark was lost while it ran the kept batch."""

    @classmethod
    def component_config(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """Conf of a tick every ``batch_secs``.

        It lets the last tuples of a quiet stream be processed.
        """
        return {"topology.tick.tuple.freq.secs": float(args.get("batch_secs", 1.0))}

    @classmethod
    def _check_arguments(cls, owner: str, args: Mapping[str, Any], par: int, outputs: Any) -> None:
        spark_session.check_function(args.get("function"), owner)

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Resolve the function; the first batch creates the session."""
        self._conf = conf
        self._archive = spark_session.archive_of(context)
        self._servers = spark_session.cluster_servers_of(context)
        self._context = context
        self._where = f"component {context.component!r}, task {context.task_id}"
        try:
            self._fields = list(context.output_fields())
        except InvalidRequest:
            self._fields = []
        self._function = spark_session.resolve_function(self.function)
        self._takes_context = "context" in [*inspect.signature(self._function).parameters][1:]
        # The tuples of a batch would time out while it is divided further.
        self._max_secs = float(conf.get("topology.message.timeout.secs") or 30) / 2

    def process(self, tup: Tuple) -> None:
        """Add the tuple to the batch, and run the batch when it is full or old enough."""
        if tup.stream.startswith(FUSED):
            text = f"{self._where}: a tuple is not for {self.function}: {OTHER_WAY}"
            self._fail([tup], Unavailable(text))
            return
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append(tup)
        full = len(self._waiting) >= self.batch_tuples
        if self.batch_bytes is not None:
            for value in tup.values:
                self._bytes += len(value) if isinstance(value, str | bytes) else 8
            full = full or self._bytes >= self.batch_bytes
        if self._is_full:
            # The task ends, and its tuples fail.
            return
        if full or time.monotonic() - self._since >= self.batch_secs:
            self._run_batch()

    def process_tick(self, tup: Tuple) -> None:
        """Run a batch that has waited long enough.

        The spec sets a tick of ``batch_secs``.
        """
        if self._is_full:
            self._make_room()
        elif self._waiting and time.monotonic() - self._since >= self.batch_secs * 0.9:
            self._run_batch()

    def _make_room(self) -> None:
        """Process the kept batch, if Spark responds."""
        if not self._retries.is_due():
            return
        try:
            spark_session.worker_session(self._conf, self._archive, cluster_servers=self._servers)
        except Unavailable as error:
            self._await_spark(self._waiting, error)
            return
        _log.info(
            "%s: Spark answers again, and gets the %d tuples that waited",
            self._where,
            len(self._waiting),
        )
        self._run_batch()

    def _await_spark(self, tuples: list[Tuple], error: Unavailable) -> None:
        """Keep these tuples and take no others until Spark responds.

        The error is reported once a minute.
        """
        self._waiting = tuples
        self._retries.wait()
        if self._retries.may_report("Spark"):
            began = datetime.fromtimestamp(self._retries.since_ms // 1000, timezone.utc)
            waiting = f"{len(tuples)} tuples wait since {began:%Y-%m-%d %H:%M:%S} UTC"
            state = f"{self._where}: {waiting}, and no others are taken until Spark answers"
            self.raise_exception(Unavailable(f"{state}: {error.message}"))

    def _run_batch(self) -> None:
        """Run the batch, and then the halves of each part that raises.

        This ends when the rows that raise alone are known. If the first rows tried alone all raise,
        the function is at fault and not a row: the batch fails as a whole.
        """
        # The batch stays in ``_waiting``: if the function ends the process, its tuples fail when
        # the task restarts.
        batch = self._waiting
        began = time.monotonic()
        parts: list[list[Tuple]] = [batch]
        bad: list[tuple[Tuple, Exception]] = []
        acked = 0
        first_error: Exception | None = None
        acked_ids: set[int] = set()
        while parts and (acked or len(bad) < _MAX_ALONE):
            part = parts.pop()
            try:
                session = spark_session.worker_session(
                    self._conf, self._archive, cluster_servers=self._servers
                )
                self._session = session
            except Unavailable as error:
                self._await_spark(_without(batch, acked_ids), error)
                return
            except Exception as error:
                # The conf names no Spark, or pyspark is not installed.
                first_error = error
                parts.append(part)
                break
            try:
                self._run_part(part, session)
            except Exception as error:
                if self._lost_spark(error, probe=first_error is None):
                    spark_session.drop_worker_session(self._conf, session)
                    error = spark_session.outage(self._conf, error)
                    self._losses += 1
                    if self._losses < _MAX_LOSSES:
                        self._await_spark(_without(batch, acked_ids), error)
                        return
                first_error = first_error or error
                if self._emitted or isinstance(error, Unavailable | _WrongResult):
                    parts.append(part)
                    break
                if len(part) == 1:
                    bad.append((part[0], error))
                    if not acked and parts:
                        # The next row alone is the last of the batch: neighbors are often bad
                        # together.
                        last_part = parts.pop(0)
                        if len(last_part) > 1:
                            parts.insert(0, last_part[:-1])
                        parts.append(last_part[-1:])
                    continue
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
                if time.monotonic() - began > self._max_secs:
                    break
            else:
                self._bound().ack_all(part)
                acked += len(part)
                acked_ids.update(map(id, part))
        self._waiting = []
        self._bytes = 0
        self._losses = 0
        self._retries.end()
        self._is_full = False
        if not acked and len(batch) > 1:
            parts = [batch]
            bad = []
        for tup, error in bad:
            self._fail([tup], self._bad_row(tup, error))
        if first_error is None:
            self._errors.clear()
        elif parts or not bad:
            untried = list(chain.from_iterable(reversed(parts)))
            self._fail(untried, first_error)
        if parts or bad:
            self._failed += 1
            self._bad += len(bad)
            self.report_metric("failed_batches", self._failed)
            self.report_metric("bad_rows", self._bad)
        if parts or not acked:
            time.sleep(self._pauses.next_pause())
            return
        self._pauses.reset()
        self._processed += 1
        self.report_metric("batches", self._processed)
        self.report_metric("batch_tuples", acked)
        self.report_metric("batch_ms", round((time.monotonic() - began) * 1000, 1))

    def _lost_spark(self, error: Exception, probe: bool) -> bool:
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
        return not spark_session.answers(self._session)

    def _run_part(self, part: list[Tuple], session: Any) -> None:
        self._emitted = 0
        table = self._table(part)
        args = self.function_args
        if self._takes_context:
            values = repr([tup.values for tup in part]).encode(errors="surrogatepass")
            self._context.batch_id = hashlib.blake2b(values, digest_size=16).hexdigest()
            args = {"context": self._context, **args}
        frame = session.createDataFrame(table, self._types(session))
        rows = self._rows(self._function(frame, **args))
        # One joint anchor: each row belongs to all tuples of the part.
        anchors = [self._bound().joint(part)] if rows else []
        for values in rows:
            self.emit(values, anchors=anchors)
            self._emitted += 1

    def _fail(self, tups: list[Tuple], reason: Exception) -> None:
        """Fail tuples for one reason."""
        # The first line of an error of Spark explains the least.
        cause = reason if isinstance(reason, StormDagsterError) else spark_session.innermost(reason)
        for tup in tups:
            self.fail(tup, cause)
        self._errors.report(reason)

    def _bad_row(self, tup: Tuple, error: Exception) -> InvalidRequest:
        row = dict(zip(self._column_names(tup), tup.values, strict=False))
        cause = spark_session.innermost(error)
        return InvalidRequest(
            f"{self._where}: {self.function} fails with the row {row!r:.300} alone, whose tuple "
            f"fails ({cause})"
        )

    def _rows(self, result: Any) -> list[list[Any]]:
        """The rows to emit.

        Raises :class:`InvalidTopology` unless the result has the declared outputs.
        """
        if result is None:
            return []
        if not hasattr(result, "toArrow"):
            raise _WrongResult(
                f"{self._where}: {self.function} returns {type(result).__name__}: return a "
                "DataFrame, or None"
            )
        if not self._fields:
            raise _WrongResult(
                f"{self._where}: {self.function} returns a DataFrame, but the bolt declares no "
                f"outputs: declare outputs={list(result.columns)}, or return None"
            )
        missing = [name for name in self._fields if name not in result.columns]
        if missing:
            raise _WrongResult(
                f"{self._where}: {self.function} returns columns {list(result.columns)}, the bolt "
                f"declares {self._fields}: add {missing} to the DataFrame, or change outputs"
            )
        if result.columns != self._fields:
            result = result.select(*self._fields)
        # Over Connect, each frame requests its columns once, with the batch in the request.
        return rows_of(result.toArrow())

    def _types(self, session: Any) -> Any:
        # The server parses the schema once, not with each batch.
        if self.schema and self._struct is None:
            self._struct = session.createDataFrame([], self.schema).schema
        return self._struct

    def _column_names(self, tup: Tuple) -> list[str]:
        return self._columns or list(self._context.source_fields(tup.component, tup.stream))

    def _table(self, batch: list[Tuple]) -> "pa.Table":
        import pyarrow

        by_stream = {(tup.component, tup.stream): tup for tup in batch}
        columns_of_streams = [self._column_names(tup) for tup in by_stream.values()]
        columns = columns_of_streams[0]
        if any(names != columns for names in columns_of_streams):
            fields = " and ".join(map(str, columns_of_streams))
            raise _WrongResult(
                f"{self._where}: {self.function} reads the fields {fields}: name its columns in "
                "schema"
            )
        try:
            values = list(zip(*(tup.values for tup in batch), strict=True))
        except ValueError:
            values = []
        if len(values) != len(columns):
            raise InvalidTopology(
                f"{self._where}: {self.function} takes {len(columns)} columns "
                f"({', '.join(columns)}), its tuples have {len(batch[0].values)} values: name as "
                "many in schema"
            )
        arrays = []
        for name, column in zip(columns, values, strict=True):
            try:
                arrays.append(pyarrow.array(column))
            except (pyarrow.ArrowException, TypeError, OverflowError) as error:
                raise InvalidTopology(
                    f"{self._where}: the values of column {name!r} have different types ({error}): "
                    "emit values of one type, or None"
                ) from None
        return pyarrow.Table.from_arrays(arrays, names=columns)


def _without(batch: list[Tuple], acked_ids: Set[int]) -> list[Tuple]:
    """The tuples of a batch that are not acked.

    They keep their order, so that a batch without acked tuples keeps its ``batch_id``.
    """
    return [tup for tup in batch if id(tup) not in acked_ids]


class _WrongResult(InvalidTopology):
    """Error of the function's result or input that does not depend on the rows."""


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
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.split()[0].rstrip(":").strip("`") for part in parts if part.strip()]
