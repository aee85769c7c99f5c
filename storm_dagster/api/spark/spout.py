"""Spark components: a spout over any Structured Streaming source, a bolt over micro-batches as
DataFrames.

Both run the user's functions on the cluster's Spark (``topology.spark.remote``, ``spark.remote`` or
``spark.master``); no Spark runs inside a worker. The assignment places only the task that drives
Spark; Spark places its own stages.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from storm_dagster.api.spark import session as spark_session
from storm_dagster.api.spark.bridge import BatchEndpoint, make_deliver
from storm_dagster.api.spark.fused import make_chain
from storm_dagster.api.spark.progress import CheckpointOwner, metrics_of, new_reports
from storm_dagster.api.spouts import Spout
from storm_dagster.host.waiting import Backoff
from storm_dagster.model.errors import Conflict, InvalidTopology, StormDagsterError
from storm_dagster.model.fusion import CHAIN_KEY, FUSED_COUNTS

_log = logging.getLogger(__name__)

_ANNOUNCE_SECS = 1.0
"""How often the other tasks send their address to the owner of the query."""
_FORGET_SECS = 60.0
"""A task without an announcement for that long gets no rows."""
_POLL_SECS = 1.0
"""How often the owner asks Spark about the query."""
_CHECK_SECS = 30.0
"""How often the owner of a query that goes on makes sure that it still is."""
_MOST_PAUSE_SECS = 60.0
"""Longest pause before the query starts again, and the pause of a task that has lost its
checkpoint.
"""


class SparkSpout(Spout):
    """Spout of the rows of a streaming DataFrame, whose checkpoint advances only after they are
    acked.

    ``source`` names a function ``"module:function"`` that is called with the Spark session (and
    ``args``) and returns a streaming DataFrame; its columns of the names of ``outputs`` become the
    tuple's values. ``checkpoint`` is a folder or URL that the Spark server can reach and that
    outlives the worker.

    Rows of one micro-batch are kept until the last of them is acked; a failed row is emitted again
    from memory, and after a crash Spark repeats the batch from the checkpoint: at least once. The
    task with the lowest id owns the query, and the checkpoint belongs to this component. The rows
    of a micro-batch go to all its tasks, as Arrow chunks of at most ``chunk_rows`` rows. Raises
    :class:`InvalidTopology` when the function is missing or returns something else.
    """

    blocking = True
    _takes_peer_messages: ClassVar[bool] = True
    _owns_checkpoint: ClassVar[bool] = True
    _function_args: ClassVar[tuple[str, ...]] = ("source",)
    """The arguments that name functions."""
    _shares_session: ClassVar[bool] = False
    """Whether the tasks of the topology share a session, in which the query goes on without its
    owner.
    """

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
        self.source_args: dict[str, Any] = dict(args or {})
        self.columns: tuple[str, ...] = tuple(columns)
        self.trigger = trigger
        self.chunk_rows = chunk_rows
        self._endpoint: Any = None
        self._emits = True
        """Whether rows of the query become tuples."""
        self._query: Any = None
        self._halting = False
        self._session: Any = None
        self._version = ""
        """Of the Spark that ran the query last."""
        self._retry_at = 0.0
        self._check_at = 0.0
        self._pauses = Backoff(1.0, _MOST_PAUSE_SECS)
        self._announce_at = 0.0
        self._others: dict[int, tuple[str, int, float]] = {}
        """Other task -> (host, port, time of its announcement)."""
        self._errors = spark_session.ErrorsOnce(self)
        self._batches = 0
        self._newest: dict[str, int] = {}
        """Run of the query -> its newest batch."""

    @classmethod
    def _check_arguments(cls, owner: str, args: Mapping[str, Any], par: int, outputs: Any) -> None:
        """Raise :class:`InvalidTopology` when the topology is built, beginning with the kind and id
        of the component.
        """
        for name in cls._function_args:
            if args.get(name) is not None:
                spark_session.check_function(args[name], owner)
        if not args.get("checkpoint"):
            raise InvalidTopology(
                f"{owner} has no checkpoint: give a folder or URL that the Spark server can write"
            )

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Resolve the function and listen for batches; the first ``next_tuple`` starts the
        query.
        """
        self._conf = conf
        self._archive = spark_session.archive_of(context)
        self._servers = spark_session.cluster_servers_of(context)
        self._owner_task = min(context.component_tasks(context.component))
        self._owner = context.task_id == self._owner_task
        self._what = f"component {context.component!r}, task {context.task_id}: {self.source}"
        self._checkpoint_owner = CheckpointOwner(self.checkpoint, context)
        self._query_name = f"{context.topology_name}/{context.component}"
        # The folder of the code has the name of its version.
        code = self._archive.parent.name if self._archive is not None else context.topology_id
        self._code = (
            code if self._shares_session and spark_session.spark_target(conf)[0] == "remote" else ""
        )
        self._function = spark_session.resolve_function(self.source)
        if not self._emits:
            return
        if not self.columns:
            self.columns = tuple(context.output_fields())
        self._endpoint = BatchEndpoint(context.host)
        if self._owner:
            self._endpoint.others = self._peer_addresses

    def next_tuple(self) -> None:
        """Emit the next row; without one, start or check the query."""
        endpoint = self._endpoint
        if not self._owner:
            self._announce_address()
        if endpoint is not None and (row := endpoint.take()) is not None:
            row_id, stream, values = row
            if stream == FUSED_COUNTS:
                self._bound().count_batch(**json.loads(values[0]))
                endpoint.ack(row_id)
                return
            try:
                self.emit(values, stream=stream, tup_id=row_id)
            except Exception:
                # Otherwise its batch would wait for ever for an ack.
                endpoint.fail(row_id)
                raise
        elif self._owner:
            self._keep_query()

    def ack(self, tup_id: str) -> None:
        """Ack the row."""
        self._endpoint.ack(tup_id)

    def fail(self, tup_id: str) -> None:
        """Emit the row again."""
        self._endpoint.fail(tup_id)

    def _announce_address(self) -> None:
        """Send this task's address to the owner, repeatedly, since a message may be lost."""
        now, endpoint = time.monotonic(), self._endpoint
        if now < self._announce_at or endpoint is None:
            return
        self._announce_at = now + _ANNOUNCE_SECS
        self._bound().send_to_peer(self._owner_task, [endpoint.host, endpoint.port])

    def _on_peer_message(self, task: int, values: Sequence[Any]) -> None:
        """Handle a message of another task of this component: an address, or the owner's secret.

        The links between workers are encrypted if the cluster is secured.
        """
        endpoint = self._endpoint
        if endpoint is None:
            return
        if self._owner:
            host, port = values
            self._others[task] = (str(host), int(port), time.monotonic())
            self._bound().send_to_peer(task, [endpoint.secret])
        elif task == self._owner_task:
            endpoint.secret = bytes(values[0])

    def _peer_addresses(self) -> list[tuple[str, int]]:
        """Addresses of the other tasks' endpoints. Called by a thread of the endpoint."""
        now, known = time.monotonic(), sorted(self._others.copy().items())
        return [
            (host, port) for _, (host, port, heard_at) in known if now - heard_at < _FORGET_SECS
        ]

    def close(self) -> None:
        """Stop the query; an open batch is repeated by its next run."""
        if self._endpoint is not None:
            self._endpoint.close()
        self._stop_query()

    def _stop_query(self) -> bool:
        """Whether it had one, which has ended."""
        query, self._query = self._query, None
        try:
            # In a shared session it is also the query of the task that took it over.
            if query is not None and self._code:
                self._checkpoint_owner.check(self._session)
            return query is not None and query.stop() is None
        except Exception as error:
            _log.info("the query of %s was not stopped: %s", self.source, error)
            return False

    def _keep_query(self) -> None:
        """Start the query, report its progress, and restart it with back-off when it ended."""
        now = time.monotonic()
        if now < self._retry_at:
            return
        self._retry_at = now + _POLL_SECS
        try:
            if self._query is not None:
                active = self._query.isActive
                self._report_progress()
                if active and now >= self._check_at:
                    self._check_at = now + _CHECK_SECS
                    self._checkpoint_owner.check(self._session)
                if active:
                    return
                ended, self._query = self._query.exception(), None
                if ended is None or spark_session.is_taken(ended):
                    # Spark stops the older of two runs of one checkpoint.
                    self._checkpoint_owner.check(self._session)
                if ended is not None:
                    raise self._typed(ended)
            self._query = self._start_query()
            self._newest.setdefault(getattr(self._query, "runId", ""), -1)
            self._check_at = now + _CHECK_SECS
        except Exception as error:
            lost = isinstance(error, Conflict)
            if lost:
                self._stop_query()
            self._query = None
            if not isinstance(error, StormDagsterError) and spark_session.is_session_loss(
                error, self._session
            ):
                spark_session.drop_worker_session(self._conf, self._session, self._code)
            pause = self._pauses.next_pause()
            self._retry_at = now + (_MOST_PAUSE_SECS if lost else pause)
            self._errors.report(self._typed(error))

    def _report_progress(self) -> None:
        """Report the batches that have ended, and count them as a success."""
        for report, ended in new_reports(self._query, self._newest):
            self._batches += ended
            metrics = metrics_of(report)
            for name, value in {**metrics, "batches": self._batches}.items():
                # Between two batches its report is of one that has not begun.
                if ended or not name.startswith("batch_"):
                    self.report_metric(name, value)
            if ended:
                self._pauses.reset()
                self._errors.clear()
                if not self._emits:
                    self._bound().count_batch(
                        int(metrics["batch_rows"]), int(metrics["batch_ms"] * 1e6)
                    )

    def _typed(self, error: Exception) -> StormDagsterError:
        return spark_session.query_error(
            error, self._what, self.checkpoint, self._version, self._session
        )

    def _start_query(self) -> Any:
        session = self._session = spark_session.worker_session(
            self._conf, self._archive, self._code, self._servers
        )
        # Asked now: a session that is lost answers no more.
        self._version = session.version
        running = [query for query in session.streams.active if query.name == self._query_name]
        if running and not self._emits and not self._halting:
            self._checkpoint_owner.take(session)
            _log.info("%s goes on: run %s", self._what, running[0].runId)
            if running[0].runId not in self._newest:
                # What ended before is in the statistics of the task that started it.
                new_reports(running[0], self._newest)
            return running[0]
        writer = None if self._halting else self._writer(self._frame(session))
        # Nothing is written before the query is known to be one.
        if running or writer is not None:
            self._checkpoint_owner.take(session)
        for query in running:
            # Its rows go to a task that is gone, or its topology is inactive.
            query.stop()
        if writer is None:
            self._halting = False
            return None
        writer = writer.queryName(self._query_name).option("checkpointLocation", self.checkpoint)
        return spark_session.again_if_slow(
            lambda: self._run(writer.trigger(processingTime=self.trigger))
        )

    def _frame(self, session: Any) -> Any:
        frame = self._function(session, **self.source_args)
        # Over Connect Spark resolves the source only for a request.
        if not getattr(frame, "isStreaming", False):
            raise InvalidTopology(
                f"{self._what} must return a streaming DataFrame (spark.readStream), got {frame!r:.80}"
            )
        return frame

    def _run(self, writer: Any) -> Any:
        return writer.start()

    def _writer(self, frame: Any) -> Any:
        """The ``DataStreamWriter`` with the sink: here, the tasks of this component."""
        endpoint = self._endpoint
        missing = [name for name in self.columns if name not in frame.columns]
        if missing:
            raise InvalidTopology(
                f"{self._what} returns columns {list(frame.columns)}, the spout declares {list(self.columns)}: "
                f"add {missing} to the DataFrame or remove them from outputs"
            )
        chain = self._conf.get(CHAIN_KEY)
        tables = chain and make_chain(
            {**chain, "columns": self.columns}, self._archive_to_ship(), FUSED_COUNTS
        )
        to = endpoint.host, endpoint.port, endpoint.secret
        return frame.writeStream.foreachBatch(
            make_deliver(*to, self.columns, self.chunk_rows, tables=tables)
        )

    def _archive_to_ship(self) -> bytes:
        """The topology's archive for functions of batches; empty for a classic session, which calls
        them in this process.
        """
        archive = self._archive if spark_session.spark_target(self._conf)[0] == "remote" else None
        return archive.read_bytes() if archive is not None and archive.is_file() else b""
