"""A spout over any Structured Streaming source.

It runs the user's function on the cluster's Spark (``topology.spark.remote``, ``spark.remote`` or
``spark.master``); no Spark runs inside a worker. The assignment places only the task that controls
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
"""Interval at which the other tasks send their address to the owner of the query."""
_FORGET_SECS = 60.0
"""Time after which a task without an announcement gets no rows."""
_POLL_SECS = 1.0
"""Interval at which the owner polls the query."""
_CHECK_SECS = 30.0
"""Interval at which the owner of a running query verifies its ownership."""
_MAX_PAUSE_SECS = 60.0
"""Longest pause before the query restarts; also the pause after a lost checkpoint."""


class SparkSpout(Spout):
    """Spout of the rows of a streaming DataFrame.

    The query's checkpoint advances only after the rows are acked. ``source`` names a function
    ``"module:function"`` that is called with the Spark session (and ``args``) and returns a
    streaming DataFrame; its columns with the names of ``outputs`` become the tuple's values.
    ``checkpoint`` is a folder or URL that the Spark server can reach and that outlives the worker.

    Rows of one micro-batch are kept until the last of them is acked. A failed row is re-emitted
    from memory, and after a crash Spark repeats the batch from the checkpoint: at least once. The
    task with the lowest id owns the query, and the checkpoint belongs to this component. The rows
    of a micro-batch go to all its tasks, as Arrow chunks of at most ``chunk_rows`` rows. Raises
    :class:`InvalidTopology` if the function is missing or returns another type.
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
        self._emits = True
        """True if rows of the query become tuples."""
        self._query: Any = None
        self._halting = False
        self._session: Any = None
        self._version = ""
        """Version of the Spark that ran the query last."""
        self._retry_at = 0.0
        self._check_at = 0.0
        self._pauses = Backoff(1.0, _MAX_PAUSE_SECS)
        self._announce_at = 0.0
        self._peers: dict[int, tuple[str, int, float]] = {}
        """Other task -> (host, port, time of its announcement)."""
        self._errors = spark_session.ErrorsOnce(self)
        self._batches = 0
        self._newest: dict[str, int] = {}
        """Run of the query -> its newest batch."""

    @classmethod
    def _check_arguments(cls, owner: str, args: Mapping[str, Any], par: int, outputs: Any) -> None:
        """Check the arguments when the topology is built.

        Raises :class:`InvalidTopology`, whose text begins with ``owner``: kind and id of the
        component.
        """
        for name in cls._function_args:
            if args.get(name) is not None:
                spark_session.check_function(args[name], owner)
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
        self._servers = spark_session.cluster_servers_of(context)
        self._owner_task = min(context.component_tasks(context.component))
        self._owner = context.task_id == self._owner_task
        self._title = f"component {context.component!r}, task {context.task_id}: {self.source}"
        self._checkpoint_owner = CheckpointOwner(self.checkpoint, context)
        self._query_name = f"{context.topology_name}/{context.component}"
        self._code = ""
        """Id of the topology's code, if its tasks share a session."""
        if self._shares_session and spark_session.spark_target(conf)[0] == "remote":
            # The folder of the code has the name of its version.
            self._code = self._archive.parent.name if self._archive else context.topology_id
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
        row = endpoint.take() if endpoint is not None else None
        if endpoint is None or row is None:
            if self._owner:
                self._keep_query()
            return
        row_id, stream, values = row
        if stream == FUSED_COUNTS:
            self._bound().count_batch(**json.loads(values[0]))
            endpoint.ack(row_id)
            return
        try:
            self.emit(values, stream=stream, tup_id=row_id)
        except Exception:
            # Otherwise its batch would never be acked.
            endpoint.fail(row_id)
            raise

    def ack(self, tup_id: str) -> None:
        """Ack the row."""
        self._endpoint.ack(tup_id)

    def fail(self, tup_id: str) -> None:
        """Re-emit the row."""
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

        It is an address, or the owner's secret. The links between workers are encrypted if the
        cluster is secured.
        """
        endpoint = self._endpoint
        if endpoint is None:
            return
        if self._owner:
            host, port = values
            self._peers[task] = (str(host), int(port), time.monotonic())
            self._bound().send_to_peer(task, [endpoint.secret])
        elif task == self._owner_task:
            endpoint.secret = bytes(values[0])

    def _peer_addresses(self) -> list[tuple[str, int]]:
        """Addresses of the other tasks' endpoints; called by a thread of the endpoint."""
        oldest = time.monotonic() - _FORGET_SECS
        addresses: list[tuple[str, int]] = []
        for _, (host, port, announced_at) in sorted(self._peers.copy().items()):
            if announced_at > oldest:
                addresses.append((host, port))
        return addresses

    def close(self) -> None:
        """Stop the query; an open batch is repeated by its next run."""
        if self._endpoint is not None:
            self._endpoint.close()
        self._stop_query()

    def _stop_query(self) -> bool:
        """Stop the query; return True if there was one and it ended."""
        query = self._query
        self._query = None
        if query is None:
            return False
        try:
            # In a shared session another task may have taken the query over.
            if self._code:
                self._checkpoint_owner.check(self._session)
            query.stop()
        except Exception as error:
            _log.info("the query of %s was not stopped: %s", self.source, error)
            return False
        return True

    def _keep_query(self) -> None:
        """Start the query, report its progress, and restart it with back-off."""
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
                failure = self._query.exception()
                self._query = None
                if failure is None or spark_session.is_taken(failure):
                    # Spark stops the older of two runs of one checkpoint.
                    self._checkpoint_owner.check(self._session)
                if failure is not None:
                    raise self._query_error(failure)
            self._query = self._start_query()
            self._newest.setdefault(getattr(self._query, "runId", ""), -1)
            self._check_at = now + _CHECK_SECS
        except Exception as error:
            pause = self._pauses.next_pause()
            if isinstance(error, Conflict):
                # Another task owns the checkpoint.
                self._stop_query()
                pause = _MAX_PAUSE_SECS
            self._query = None
            self._retry_at = now + pause
            is_own_error = isinstance(error, StormDagsterError)
            if not is_own_error and spark_session.is_session_loss(error, self._session):
                spark_session.drop_worker_session(self._conf, self._session, self._code)
            self._errors.report(self._query_error(error))

    def _report_progress(self) -> None:
        """Report the batches that have ended, and count them as a success."""
        for report, ended in new_reports(self._query, self._newest):
            self._batches += ended
            metrics = metrics_of(report)
            for name, value in {**metrics, "batches": self._batches}.items():
                # Between two batches, Spark reports one that has not begun.
                if ended or not name.startswith("batch_"):
                    self.report_metric(name, value)
            if ended:
                self._pauses.reset()
                self._errors.clear()
                if not self._emits:
                    rows = int(metrics["batch_rows"])
                    nanos = int(metrics["batch_ms"] * 1e6)
                    self._bound().count_batch(rows, nanos)

    def _query_error(self, error: Exception) -> StormDagsterError:
        return spark_session.query_error(
            error, self._title, self.checkpoint, self._version, self._session
        )

    def _start_query(self) -> Any:
        """Start the query, or continue one that runs; ``None`` if it must not run."""
        session = spark_session.worker_session(self._conf, self._archive, self._code, self._servers)
        self._session = session
        # Read now, since a lost session no longer answers.
        self._version = session.version
        running = [query for query in session.streams.active if query.name == self._query_name]
        if running and not self._emits and not self._halting:
            self._checkpoint_owner.take(session)
            query = running[0]
            _log.info("%s goes on: run %s", self._title, query.runId)
            if query.runId not in self._newest:
                # Batches that ended before are in the statistics of the task that started it.
                new_reports(query, self._newest)
            return query
        # The function is checked before the checkpoint is written.
        writer = None if self._halting else self._writer(self._frame(session))
        if running or writer is not None:
            self._checkpoint_owner.take(session)
        for query in running:
            # Its rows go to a task that has ended, or its topology is inactive.
            query.stop()
        if writer is None:
            self._halting = False
            return None
        writer = writer.queryName(self._query_name).option("checkpointLocation", self.checkpoint)
        writer = writer.trigger(processingTime=self.trigger)
        return spark_session.retry_if_slow(lambda: self._run(writer))

    def _frame(self, session: Any) -> Any:
        frame = self._function(session, **self.source_args)
        # Over Connect, Spark resolves the source only for a request.
        if not getattr(frame, "isStreaming", False):
            raise InvalidTopology(
                f"{self._title} must return a streaming DataFrame (spark.readStream), got "
                f"{frame!r:.80}"
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
                f"{self._title} returns columns {list(frame.columns)}, the spout declares "
                f"{list(self.columns)}: add {missing} to the DataFrame or remove them from outputs"
            )
        tables = None
        chain = self._conf.get(CHAIN_KEY)
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

        Empty for a classic session, which calls them in this process.
        """
        kind, _ = spark_session.spark_target(self._conf)
        if kind == "remote" and self._archive is not None and self._archive.is_file():
            return self._archive.read_bytes()
        return b""
