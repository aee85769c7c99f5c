"""A spout over any Structured Streaming source.

It runs the user's function on the cluster's Spark (``topology.spark.remote``, ``spark.remote`` or
``spark.master``); no Spark runs inside a worker. The assignment places only the task that drives
Spark; Spark places its own stages.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from storm_dagster.api.outages import OutageReports
from storm_dagster.api.spark import session as spark_session
from storm_dagster.api.spark.bridge import BatchEndpoint, make_deliver
from storm_dagster.api.spark.errors import ErrorsOnce, is_taken, query_error, retry_slow_start
from storm_dagster.api.spark.functions import check_function, class_conf, resolve_function
from storm_dagster.api.spark.fused import make_chain
from storm_dagster.api.spark.progress import CheckpointOwner, metrics_of, new_reports
from storm_dagster.api.spouts import Spout
from storm_dagster.host.waiting import Backoff
from storm_dagster.model.errors import Conflict, InvalidTopology, StormDagsterError, error_text
from storm_dagster.model.fusion import CHAIN_KEY, FUSED_COUNTS

_log = logging.getLogger(__name__)

_ANNOUNCE_SECS = 1.0
"""Interval at which the other tasks send their address to the owner of the query."""
_FORGET_SECS = 60.0
"""Time without an announcement after which a task gets no rows."""
_POLL_SECS = 1.0
"""Interval at which the owner polls Spark for the state of the query."""
_CHECK_SECS = 30.0
"""Interval at which the owner of a running query verifies its ownership."""
_MAX_PAUSE_SECS = 60.0
"""Maximum pause before a restart of the query.

Also the pause of a task that has lost its checkpoint.
"""
_MAX_AWAY_SECS = 10.0
"""Maximum pause between two attempts to reach a Spark that is away."""


class SparkSpout(Spout):
    """Spout of the rows of a streaming DataFrame.

    Its checkpoint advances only after the rows are acked. ``source`` names a function
    ``"module:function"`` that is called with the Spark session (and ``args``) and returns a
    streaming DataFrame; its columns of the names of ``outputs`` become the tuple's values.
    ``checkpoint`` is a folder or URL that the Spark server can reach and that outlives the worker.

    Rows of one micro-batch are kept until the last of them is acked; a failed row is replayed from
    memory, and after a crash Spark repeats the batch from the checkpoint: at least once. The task
    with the lowest id owns the query, and the checkpoint belongs to this component. The rows of a
    micro-batch go to all its tasks, as Arrow chunks of at most ``chunk_rows`` rows. Raises
    :class:`InvalidTopology` when the function is missing or does not return a streaming DataFrame.
    """

    blocking = True
    _takes_peer_messages: ClassVar[bool] = True
    _owns_checkpoint: ClassVar[bool] = True
    _function_args: ClassVar[tuple[str, ...]] = ("source",)
    """The arguments that name functions."""
    _shares_session: ClassVar[bool] = False
    """True if the tasks of the topology share a session.

    The query then continues without its owner.
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
        """Listener for the rows; ``None`` if the query has a sink."""
        self._emits = True
        """True if rows of the query become tuples."""
        self._query: Any = None
        """Handle of the running query; ``None`` if it does not run, or that is not known."""
        self._halting = False
        """True while an inactive topology has a query that may still run, and is to be stopped."""
        self._session: Any = None
        self._version = ""
        """Version of the Spark that ran the query last."""
        self._retry_at = 0.0
        """Time of the next poll or start of the query (monotonic clock)."""
        self._check_at = 0.0
        """Time of the next check that this task owns the checkpoint."""
        self._pauses = Backoff(1.0, _MAX_PAUSE_SECS)
        self._announce_at = 0.0
        """Time of the next announcement of this task's address."""
        self._others: dict[int, tuple[str, int, float]] = {}
        """Other task -> (host, port, time of its announcement)."""
        self._errors = ErrorsOnce(self)
        self._outage = OutageReports(self, lambda: self.context.now_ms())
        """Reports on a Spark that is away."""
        self._away_pauses = Backoff(1.0, _MAX_AWAY_SECS)
        self._batches = 0
        """Number of batches that have ended, as the metric ``batches``."""
        self._newest: dict[str, int] = {}
        """Run of the query -> its newest batch."""

    @classmethod
    def _spec_conf(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """As a component, with the mark of a class that is not of this library."""
        return {**super()._spec_conf(args), **class_conf(cls)}

    @classmethod
    def _check_arguments(cls, owner: str, args: Mapping[str, Any], par: int, outputs: Any) -> None:
        """Check the arguments when the topology is built.

        Raises :class:`InvalidTopology`, whose text begins with the kind and id of the component.
        """
        for name in cls._function_args:
            if args.get(name) is not None:
                check_function(args[name], owner)
        if not args.get("checkpoint"):
            raise InvalidTopology(
                f"{owner} has no checkpoint: give a folder or URL that the Spark server can write"
            )

    def initialize(self, conf: Mapping[str, Any], context: Any) -> None:
        """Resolve the function and listen for batches.

        The first ``next_tuple`` starts the query.
        """
        self._conf = conf
        self._archive = spark_session.archive_of(context)
        self._cluster_spark = spark_session.cluster_spark_of(context)
        self._owner_task = min(context.component_tasks(context.component))
        # True if this task owns the query.
        self._owner = context.task_id == self._owner_task
        self._subject = f"component {context.component!r}, task {context.task_id}: {self.source}"
        self._checkpoint_owner = CheckpointOwner(self.checkpoint, context)
        self._query_name = f"{context.topology_name}/{context.component}"
        # Version of the topology's code: it names a session that outlives the worker.
        self._code = ""
        if self._shares_session and spark_session.spark_target(conf)[0] == "remote":
            # The folder of the code has the name of its version.
            if self._archive is not None:
                self._code = self._archive.parent.name
            else:
                self._code = context.topology_id
        self._function = resolve_function(self.source)
        if not self._emits:
            return
        if not self.columns:
            self.columns = tuple(context.output_fields())
        self._endpoint = BatchEndpoint(context.host)
        if self._owner:
            self._endpoint.others = self._peer_addresses

    def next_tuple(self) -> None:
        """Emit the next row; without one, start or check the query."""
        if not self._owner:
            self._announce_address()
        row = self._take_row()
        if row is None:
            if self._owner:
                self._keep_query()
            return
        row_id, stream, values = row
        if stream == FUSED_COUNTS:
            self._bound().count_batch(**json.loads(values[0]))
            self._endpoint.ack(row_id)
            return
        try:
            self.emit(values, stream=stream, tup_id=row_id)
        except Exception:
            # Otherwise its batch would never complete.
            self._endpoint.fail(row_id)
            raise

    def _take_row(self) -> Any:
        """The next (id, stream, values) of the endpoint; ``None`` without a row or an endpoint."""
        return None if self._endpoint is None else self._endpoint.take()

    def ack(self, tup_id: str) -> None:
        """Ack the row."""
        self._endpoint.ack(tup_id)

    def fail(self, tup_id: str) -> None:
        """Replay the row."""
        self._endpoint.fail(tup_id)

    def _announce_address(self) -> None:
        """Send this task's address to the owner, repeatedly, since a message may be lost."""
        now = time.monotonic()
        endpoint = self._endpoint
        if now < self._announce_at or endpoint is None:
            return
        self._announce_at = now + _ANNOUNCE_SECS
        self._bound().send_to_peer(self._owner_task, [endpoint.host, endpoint.port])

    def _on_peer_message(self, task: int, values: Sequence[Any]) -> None:
        """Handle a message of another task of this component.

        The owner gets addresses, the other tasks get the owner's secret. The links between workers
        are encrypted if the cluster is secured.
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
        now = time.monotonic()
        addresses: list[tuple[str, int]] = []
        for _, (host, port, announced_at) in sorted(self._others.copy().items()):
            if now - announced_at < _FORGET_SECS:
                addresses.append((host, port))
        return addresses

    def close(self) -> None:
        """Stop the query; an open batch is repeated by its next run."""
        if self._endpoint is not None:
            self._endpoint.close()
        self._stop_query()

    def _stop_query(self) -> bool:
        """Stop the query, if there is one. True if it has ended."""
        query = self._query
        self._query = None
        if query is None:
            return False
        try:
            if self._code:
                # In a shared session it is also the query of the task that took it over.
                self._checkpoint_owner.check(self._session)
            query.stop()
        except Exception as error:
            _log.info("the query of %s was not stopped: %s", self.source, error_text(error))
            return False
        return True

    def _keep_query(self) -> None:
        """Start the query, report its progress, and restart it when it has ended.

        No effect before the next poll is due. Errors are reported, and restarts wait longer after
        each.
        """
        now = time.monotonic()
        if now < self._retry_at:
            return
        self._retry_at = now + _POLL_SECS
        try:
            if self._query is not None and self._check_query(now):
                return
            self._query = self._start_query()
            # Without a query (it was to halt) the entry has no effect.
            self._newest.setdefault(getattr(self._query, "runId", ""), -1)
            self._check_at = now + _CHECK_SECS
        except Exception as error:
            self._on_query_error(error, now)
        else:
            self._away_pauses.reset()
            self._outage.end()

    def _on_query_error(self, error: Exception, now: float) -> None:
        """Report an error of the query, and set the time of its restart."""
        is_owner_lost = isinstance(error, Conflict)
        if is_owner_lost:
            self._stop_query()
        self._query = None
        is_away = isinstance(error, spark_session.SparkAway)
        if not isinstance(error, StormDagsterError) and spark_session.is_session_loss(
            error, self._session
        ):
            is_away = True
            spark_session.drop_worker_session(self._conf, self._session, self._code)
        if is_away:
            # No failure of the query: it continues as soon as Spark answers.
            self._retry_at = now + self._away_pauses.next_pause()
            reported = self._query_error(error)
            self._outage.report_waiting("Spark", "Spark", reported.message, lambda since: reported)
            return
        pause = self._pauses.next_pause()
        self._retry_at = now + (_MAX_PAUSE_SECS if is_owner_lost else pause)
        self._errors.report(self._query_error(error))

    def _check_query(self, now: float) -> bool:
        """Report the progress of the query. True if it runs.

        False if it ended without an error. Raises the error of the query, or :class:`Conflict` if
        another task owns its checkpoint.
        """
        is_active = self._query.isActive
        self._report_progress()
        if is_active:
            if now >= self._check_at:
                self._check_at = now + _CHECK_SECS
                self._checkpoint_owner.check(self._session)
            return True
        error = self._query.exception()
        self._query = None
        if error is None or is_taken(error):
            # Spark stops the older of two runs of one checkpoint.
            self._checkpoint_owner.check(self._session)
        if error is not None:
            raise self._query_error(error)
        return False

    def _report_progress(self) -> None:
        """Report the batches that have ended, and count them as a success."""
        for report, has_ended in new_reports(self._query, self._newest):
            if has_ended:
                self._batches += 1
            metrics = metrics_of(report)
            for name, value in {**metrics, "batches": self._batches}.items():
                # Between two batches the report is of a batch that has not begun.
                if has_ended or not name.startswith("batch_"):
                    self.report_metric(name, value)
            if has_ended:
                self._pauses.reset()
                self._errors.clear()
                if not self._emits:
                    nanos = int(metrics["batch_ms"] * 1e6)
                    self._bound().count_batch(int(metrics["batch_rows"]), nanos)

    def _query_error(self, error: Exception) -> StormDagsterError:
        return query_error(error, self._subject, self.checkpoint, self._version, self._session)

    def _start_query(self) -> Any:
        """Start the query, or continue one that runs. ``None`` if it is to halt."""
        session = spark_session.worker_session(
            self._conf, self._archive, self._code, self._cluster_spark
        )
        if session is not self._session:
            self._session = session
            spark_session.report_keys(self, self._subject, session)
        # Read now: a lost session cannot return its version.
        self._version = session.version
        running = [query for query in session.streams.active if query.name == self._query_name]
        if running and not self._emits and not self._halting:
            query = running[0]
            self._checkpoint_owner.take(session)
            _log.info("%s continues: run %s", self._subject, query.runId)
            if query.runId not in self._newest:
                # Earlier batches are in the statistics of the task that started the query.
                new_reports(query, self._newest)
            return query
        writer = None if self._halting else self._writer(self._frame(session))
        # The owner's record is written only if the function returned a streaming query.
        if running or writer is not None:
            self._checkpoint_owner.take(session)
        for query in running:
            # Its rows go to a task that is gone, or its topology is inactive.
            query.stop()
        if writer is None:
            self._halting = False
            return None
        writer = writer.queryName(self._query_name).option("checkpointLocation", self.checkpoint)
        return retry_slow_start(lambda: self._run(writer.trigger(processingTime=self.trigger)))

    def _frame(self, session: Any) -> Any:
        """The DataFrame of the user's function.

        Raises :class:`InvalidTopology` if it is not a streaming DataFrame.
        """
        frame = self._function(session, **self.source_args)
        # Over Connect Spark resolves the source only for a request.
        if not getattr(frame, "isStreaming", False):
            raise InvalidTopology(
                f"{self._subject} must return a streaming DataFrame (spark.readStream), "
                f"got {frame!r:.80}"
            )
        return frame

    def _run(self, writer: Any) -> Any:
        return writer.start()

    def _writer(self, frame: Any) -> Any:
        """The ``DataStreamWriter`` with the sink: here, the tasks of this component.

        Raises :class:`InvalidTopology` if the frame lacks a column.
        """
        endpoint = self._endpoint
        missing = [name for name in self.columns if name not in frame.columns]
        if missing:
            raise InvalidTopology(
                f"{self._subject} returns columns {list(frame.columns)}, "
                f"the spout declares {list(self.columns)}: "
                f"add {missing} to the DataFrame or remove them from outputs"
            )
        chain = self._conf.get(CHAIN_KEY)
        tables = None
        if chain:
            chain = {**chain, "columns": self.columns}
            tables = make_chain(chain, self._archive_to_ship(), FUSED_COUNTS)
        deliver = make_deliver(
            endpoint.host,
            endpoint.port,
            endpoint.secret,
            self.columns,
            self.chunk_rows,
            tables=tables,
        )
        return frame.writeStream.foreachBatch(deliver)

    def _archive_to_ship(self) -> bytes:
        """The topology's archive for functions of batches.

        It is empty for a classic session, which calls them in this process.
        """
        if spark_session.spark_target(self._conf)[0] != "remote":
            return b""
        if self._archive is None or not self._archive.is_file():
            return b""
        return self._archive.read_bytes()
