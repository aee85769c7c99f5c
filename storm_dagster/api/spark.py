"""Spark components: a spout over any Structured Streaming source, a bolt over micro-batches as DataFrames.

Both run the user's functions against the cluster's Spark (``topology.spark.remote``, ``spark.remote`` or
``spark.master``); no Spark runs inside a worker. Where Spark places the stages inside such a component is
Spark's decision: our assignment pins the task that drives it, nothing below.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storm_dagster.api.bolt import Bolt
from storm_dagster.api.spark_bridge import BatchEndpoint, make_deliver, rows_of
from storm_dagster.api.spark_session import (
    drop_worker_session,
    is_session_loss,
    resolve_function,
    worker_session,
)
from storm_dagster.api.spout import Spout
from storm_dagster.api.tuples import Tuple
from storm_dagster.model.errors import InvalidTopology, StormDagsterError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["SparkBolt", "SparkSpout"]

_log = logging.getLogger(__name__)


class SparkSpout(Spout):
    """Emits the rows of a streaming DataFrame; its checkpoint advances only after they are acked.

    ``source`` names a function ``"module:function"`` that is called with the Spark session (and ``args``)
    and returns a streaming DataFrame; its columns of the names of ``outputs`` become the tuple's values.
    ``checkpoint`` is a folder or URL that the Spark server can reach and that outlives the worker.

    Rows of one micro-batch are kept until the last of them is acked; a failed row is emitted again from
    memory, and after a crash of the worker Spark repeats the batch from the checkpoint: at least once.
    One task owns the query; with more tasks than one the others stay idle, because Structured Streaming
    admits one query for each checkpoint.

    Raises :class:`InvalidTopology` when the function is missing or returns something else.
    """

    blocking = True

    def __init__(
        self,
        source: str,
        checkpoint: str,
        args: Mapping[str, Any] | None = None,
        columns: Sequence[str] = (),
        trigger: str = "1 second",
        chunk_rows: int = 5_000,
    ) -> None:
        super().__init__()
        self.source = source
        self.checkpoint = checkpoint
        self.source_args = dict(args or {})
        self.columns = tuple(columns)
        self.trigger = trigger
        self.chunk_rows = chunk_rows
        self._endpoint: BatchEndpoint | None = None
        self._query: Any = None
        self._retry_at = 0.0
        self._pause = 1.0

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Look the function up, and listen for batches; the query itself starts with the first tuple asked for."""
        self._conf = conf
        self._archive = _archive_of(context)
        self._owner = context.task_id == min(context.component_tasks(context.component))
        if not self.columns:
            self.columns = tuple(context.output_fields())
        self._function = resolve_function(self.source)
        if self._owner:
            self._endpoint = BatchEndpoint(context.host, chunk_rows=self.chunk_rows)

    def next_tuple(self) -> None:
        """Emit the next row, or see to the query when there is none."""
        endpoint = self._endpoint
        if endpoint is None:
            return
        row = endpoint.take()
        if row is not None:
            row_id, values = row
            self.emit(values, tup_id=row_id)
            return
        self._keep_query()

    def ack(self, tup_id: str) -> None:
        """The row's tree is complete."""
        if self._endpoint is not None:
            self._endpoint.ack(tup_id)

    def fail(self, tup_id: str) -> None:
        """The row is emitted again."""
        if self._endpoint is not None:
            self._endpoint.fail(tup_id)

    def close(self) -> None:
        """Stop the query; an open batch is repeated by its next run."""
        if self._endpoint is not None:
            self._endpoint.close()
        if self._query is not None:
            try:
                self._query.stop()
            except Exception as error:
                _log.info("the query of %s did not stop cleanly: %s", self.source, error)

    def _keep_query(self) -> None:
        """Start the query when there is none, and again, with back-off, when it ended."""
        now = time.monotonic()
        if now < self._retry_at:
            return
        self._retry_at = now + 1.0
        try:
            if self._query is not None:
                if self._query.isActive:
                    self._pause = 1.0
                    return
                ended = self._query.exception()
                self._query = None
                if ended is not None:
                    raise ended
            self._query = self._start_query()
        except StormDagsterError:
            self._back_off(now)
            raise
        except Exception as error:
            self._query = None
            if is_session_loss(error):
                drop_worker_session(self._conf)
            self._back_off(now)
            self.raise_exception(error)

    def _back_off(self, now: float) -> None:
        self._retry_at = now + self._pause
        self._pause = min(self._pause * 2, 60.0)

    def _start_query(self) -> Any:
        endpoint = self._endpoint
        assert endpoint is not None
        session = worker_session(self._conf, self._archive)
        frame = self._function(session, **self.source_args)
        if not getattr(frame, "isStreaming", False):
            raise InvalidTopology(
                f"{self.source} must return a streaming DataFrame (spark.readStream...), got {frame!r:.80}"
            )
        missing = [name for name in self.columns if name not in frame.columns]
        if missing:
            raise InvalidTopology(
                f"{self.source} returns columns {list(frame.columns)}, the spout declares {list(self.columns)}: "
                f"add {missing} to the DataFrame or remove them from outputs"
            )
        deliver = make_deliver(endpoint.host, endpoint.port, endpoint.secret, self.columns, self.chunk_rows)
        return (
            frame.writeStream.option("checkpointLocation", self.checkpoint)
            .trigger(processingTime=self.trigger)
            .foreachBatch(deliver)
            .start()
        )


class SparkBolt(Bolt):
    """Gathers tuples into micro-batches and runs a function on each as a DataFrame, on the cluster's Spark.

    ``function`` names ``"module:function"``, called as ``function(frame, **args)`` with a DataFrame whose
    columns are ``schema`` (Spark DDL, such as ``"word string, n long"``; without it, the fields of the
    input's stream with types that Arrow infers). It returns ``None``, or a DataFrame whose rows are
    emitted, anchored to the whole batch.

    A batch is cut at ``batch_tuples`` tuples or after ``batch_secs`` seconds. Its tuples are acked when the
    function has returned and its rows are emitted; when it raises, all of them fail and are replayed.
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
    ) -> None:
        super().__init__()
        self.function = function
        self.function_args = dict(args or {})
        self.schema = schema
        self.batch_tuples = batch_tuples
        self.batch_secs = batch_secs
        self._waiting: deque[Tuple] = deque()
        self._since = 0.0

    @classmethod
    def component_config(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """A tick as often as a batch may wait, so that a quiet stream's last tuples are not kept."""
        return {"topology.tick.tuple.freq.secs": float(args.get("batch_secs", 1.0))}

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Look the function up; the session is made with the first batch."""
        self._conf = conf
        self._archive = _archive_of(context)
        self._context = context
        self._function = resolve_function(self.function)

    def process(self, tup: Tuple) -> None:
        """Add the tuple to the batch, and run the batch when it is full or old enough."""
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append(tup)
        if len(self._waiting) >= self.batch_tuples or time.monotonic() - self._since >= self.batch_secs:
            self._run_batch()

    def process_tick(self, tup: Tuple) -> None:
        """Run a batch that has waited long enough (the spec sets a tick of ``batch_secs``)."""
        if self._waiting and time.monotonic() - self._since >= self.batch_secs * 0.9:
            self._run_batch()

    def _run_batch(self) -> None:
        batch = list(self._waiting)
        self._waiting.clear()
        try:
            session = worker_session(self._conf, self._archive)
            table = self._table(batch)
            frame = (
                session.createDataFrame(table, self.schema) if self.schema else session.createDataFrame(table)
            )
            result = self._function(frame, **self.function_args)
            rows = rows_of(result.toArrow()) if result is not None else []
        except Exception as error:
            if is_session_loss(error):
                drop_worker_session(self._conf)
            for tup in batch:
                self.fail(tup)
            self.raise_exception(error)
            return
        for values in rows:
            self.emit(values, anchors=batch)
        for tup in batch:
            self.ack(tup)

    def _table(self, batch: list[Tuple]) -> pa.Table:
        import pyarrow

        columns = [part.split()[0].strip("`") for part in self.schema.split(",")] if self.schema else None
        if columns is None:
            columns = list(self._context.source_fields(batch[0].component, batch[0].stream))
        values = list(zip(*(tup.values for tup in batch), strict=True))
        if len(values) != len(columns):
            raise InvalidTopology(
                f"{self.function} expects {len(columns)} columns ({', '.join(columns)}), its tuples have {len(values)} values"
            )
        return pyarrow.table(dict(zip(columns, values, strict=True)))


def _archive_of(context: Any) -> Path | None:
    """The topology's packed archive on this host (it lies beside the unpacked one), or ``None`` in a harness."""
    unpacked = getattr(context, "archive", None)
    return Path(unpacked).parent / "stormjar.jar" if unpacked else None
