"""A bolt over micro-batches of tuples as DataFrames, on the cluster's Spark."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from storm_dagster.api.bolt import Bolt
from storm_dagster.api.spark_bridge import rows_of
from storm_dagster.api.spark_session import (
    ErrorsOnce,
    archive_of,
    drop_worker_session,
    is_session_loss,
    resolve_function,
    worker_session,
)
from storm_dagster.api.tuples import Tuple
from storm_dagster.model.errors import InvalidRequest, InvalidTopology

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["SparkBolt"]

_MOST_PAUSE_SECS = 2.0


class SparkBolt(Bolt):
    """Bolt that runs a function on micro-batches of tuples as DataFrames, on the cluster's Spark.

    ``function`` names ``"module:function"``, called as ``function(frame, **args)`` with a DataFrame whose
    columns are ``schema`` (Spark DDL, such as ``"word string, n long"``; without it, the fields of the
    input's stream with types that Arrow infers). It returns ``None``, or a DataFrame with a column for each
    of the bolt's ``outputs``; its rows are emitted, anchored to the whole batch.

    A batch is cut at ``batch_tuples`` tuples, at ``batch_bytes`` bytes of strings and bytes in them (each other
    value counts as eight), or after ``batch_secs`` seconds, whichever is first. Its tuples are acked when the function
    has returned and its rows are emitted; if it raises, or returns something else, all fail and are replayed, after a
    pause that grows from 0.1 to 2 s. The same error is reported once, until a batch succeeds. The metrics ``batches``, ``failed_batches``, ``batch_tuples`` and ``batch_ms`` are of the newest batch.
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
        self._pause = 0.1
        self._session: Any = None
        self._done = self._failed = 0
        self._errors = ErrorsOnce(self)

    @classmethod
    def component_config(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """Conf of a tick every ``batch_secs``, so that the last tuples of a quiet stream are processed."""
        return {"topology.tick.tuple.freq.secs": float(args.get("batch_secs", 1.0))}

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Resolve the function; the first batch creates the session."""
        self._conf = conf
        self._archive = archive_of(context)
        self._context = context
        self._where = f"component {context.component!r}, task {context.task_id}"
        try:
            self._fields = list(context.output_fields())
        except InvalidRequest:
            self._fields = []
        self._function = resolve_function(self.function)

    def process(self, tup: Tuple) -> None:
        """Add the tuple to the batch, and run the batch when it is full or old enough."""
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append(tup)
        if self.batch_bytes is not None:
            self._bytes += sum(len(v) if isinstance(v, str | bytes) else 8 for v in tup.values)
        if (
            len(self._waiting) >= self.batch_tuples
            or (self.batch_bytes is not None and self._bytes >= self.batch_bytes)
            or time.monotonic() - self._since >= self.batch_secs
        ):
            self._run_batch()

    def process_tick(self, tup: Tuple) -> None:
        """Run a batch that has waited long enough (the spec sets a tick of ``batch_secs``)."""
        if self._waiting and time.monotonic() - self._since >= self.batch_secs * 0.9:
            self._run_batch()

    def _run_batch(self) -> None:
        batch, self._waiting, self._bytes = self._waiting, [], 0
        began = time.monotonic()
        try:
            session = self._session = worker_session(self._conf, self._archive)
            frame = session.createDataFrame(self._table(batch), self._types(session))
            rows = self._rows(self._function(frame, **self.function_args))
            # One joint anchor: each row belongs to all tuples of the batch.
            anchors = [self._bound().joint(batch)] if rows else []
            for values in rows:
                self.emit(values, anchors=anchors)
        except Exception as error:
            if is_session_loss(error):
                drop_worker_session(self._conf, self._session)
            for tup in batch:
                self.fail(tup)
            self._failed += 1
            self.report_metric("failed_batches", self._failed)
            self._errors.report(error)
            time.sleep(self._pause)
            self._pause = min(self._pause * 2, _MOST_PAUSE_SECS)
            return
        self._bound().ack_all(batch)
        self._errors.clear()
        self._pause = 0.1
        self._done += 1
        self.report_metric("batches", self._done)
        self.report_metric("batch_tuples", len(batch))
        self.report_metric("batch_ms", round((time.monotonic() - began) * 1000, 1))

    def _rows(self, result: Any) -> list[list[Any]]:
        """The rows to emit; :class:`InvalidTopology` unless the function returned what the outputs declare."""
        if result is None:
            return []
        if not hasattr(result, "toArrow"):
            raise InvalidTopology(
                f"{self._where}: {self.function} returns {type(result).__name__}: return a DataFrame, or None"
            )
        if not self._fields:
            raise InvalidTopology(
                f"{self._where}: {self.function} returns a DataFrame, but the bolt declares no outputs: declare "
                f"outputs={list(result.columns)}, or return None"
            )
        missing = [name for name in self._fields if name not in result.columns]
        if missing:
            raise InvalidTopology(
                f"{self._where}: {self.function} returns columns {list(result.columns)}, the bolt declares "
                f"{self._fields}: add {missing} to the DataFrame, or change outputs"
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

    def _table(self, batch: list[Tuple]) -> pa.Table:
        import pyarrow

        columns = self._columns
        if columns is None:
            columns = list(self._context.source_fields(batch[0].component, batch[0].stream))
        try:
            values = list(zip(*(tup.values for tup in batch), strict=True))
        except ValueError:
            values = []
        if len(values) != len(columns):
            raise InvalidTopology(
                f"{self._where}: {self.function} takes {len(columns)} columns ({', '.join(columns)}), its tuples have "
                f"{len(batch[0].values)} values: name as many in schema"
            )
        arrays = []
        for name, column in zip(columns, values, strict=True):
            try:
                arrays.append(pyarrow.array(column))
            except (pyarrow.ArrowException, TypeError, OverflowError) as error:
                raise InvalidTopology(
                    f"{self._where}: the values of column {name!r} have different types ({error}): emit values of one "
                    "type, or None"
                ) from None
        return pyarrow.Table.from_arrays(arrays, names=columns)


def columns_of(schema: str) -> list[str]:
    """Column names of a Spark DDL schema; commas within ``<...>`` and ``(...)`` belong to types."""
    parts, depth = [""], 0
    for letter in schema:
        depth += (letter in "<(") - (letter in ">)")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.split()[0].rstrip(":").strip("`") for part in parts if part.strip()]
