"""Transfer of micro-batches from the Spark server to workers, with acks.

Over Spark Connect ``foreachBatch`` runs beside the server, not in the worker. So the function
shipped there connects to an endpoint of the worker and authenticates by the endpoint's secret (HMAC
challenge of ``multiprocessing.connection``; only raw bytes are sent and read, without pickle). It
streams the batch as Arrow IPC, and returns when the worker has acked every row. Only then does
Spark commit the batch to its checkpoint: at least once, end to end.
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any

from storm_dagster.model.errors import Unavailable, error_text

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger(__name__)

# Messages beside the chunks; ``make_deliver`` repeats them, because it is shipped by value.
_WAIT = b"wait"
"""Keepalive of a worker that is not ready yet."""
_DONE = b"done"
"""All rows of the connection are acked."""
_MORE = b"more"
"""The rows of the last chunk are emitted: the worker takes another one."""
_END = b""
"""Sent to the worker after the last chunk."""
_KEEPALIVE_SECS = 2.0
"""Interval at which a worker that is not ready yet sends a keepalive."""
_CHUNK_BYTES = 32 * 1024 * 1024
"""Size above which a chunk of several rows is divided."""
_MAX_CHUNK_BYTES = 60 * 1024 * 1024
"""A row becomes a tuple, which has to fit into a frame between workers (``MAX_FRAME_BYTES``)."""
_MAX_UNKNOWN = 16
"""Maximum number of unauthenticated connections; one more drops the oldest."""
_PROOF_SECS = 10.0
"""Time within which a connection must authenticate."""


def make_deliver(
    host: str,
    port: int,
    secret: bytes,
    columns: tuple[str, ...],
    chunk_rows: int,
    chunk_bytes: int = _CHUNK_BYTES,
    tables: Callable[[Any, int], list[tuple[str, Any]]] | None = None,
) -> Callable[[Any, int], None]:
    """Create the ``foreachBatch`` function for the endpoint of the query's owner.

    That endpoint names the endpoints of the other tasks. Chunks of rows go to any endpoint that is
    ready, and the function returns when each has acked all its rows. A chunk above ``chunk_bytes``
    is divided. ``tables`` makes the (stream, Arrow table) pairs of a batch from its frame and id;
    without it, the table has the batch's ``columns``, on the default stream. If the function
    raises, Spark repeats the batch.

    The function is nested on purpose: Spark ships a nested function by value, so that the server
    needs only pyarrow, and not this package.
    """
    max_bytes = max(chunk_bytes, _MAX_CHUNK_BYTES)

    def deliver(frame: Any, batch_id: int) -> None:
        """Send the rows of a micro-batch to the workers; return when all are acked.

        Raises if a worker gives the batch up, is silent for a minute or cannot be reached.
        """
        import json as json_
        import logging as logging_
        import os as os_
        import socket as socket_
        import time as time_
        from multiprocessing import AuthenticationError as WrongSecret
        from multiprocessing.connection import Client

        import pyarrow as arrow

        connections: list[Any] = []
        hello = json_.dumps({"batch": int(batch_id)}).encode()

        def join(address: tuple[str, int], tries: int = 20) -> list[Any]:
            """Connect to an endpoint, and return the addresses of the others that it names."""
            before = list(connections)
            try:
                connection = Client(address, authkey=secret)
                connections.append(connection)
                with socket_.socket(fileno=os_.dup(connection.fileno())) as link:
                    # A message goes out as its length and its bytes: the second would wait 40 ms
                    # for the first.
                    link.setsockopt(socket_.IPPROTO_TCP, socket_.TCP_NODELAY, 1)
                connection.send_bytes(hello)
                if not connection.poll(60):
                    raise TimeoutError(
                        "the worker of this SparkSpout does not answer; the batch will be repeated"
                    )
                return json_.loads(connection.recv_bytes(65536))
            except (EOFError, ConnectionResetError, BrokenPipeError):
                # Clients that connect all the time replaced it before it had authenticated.
                connections[:] = before
                if tries == 1:
                    raise
            time_.sleep(0.05)
            return join(address, tries - 1)

        def join_others(addresses: list[Any]) -> None:
            """Connect to the endpoints of the other tasks that can be reached."""
            for address in addresses:
                other_host, other_port = address
                try:
                    join((str(other_host), int(other_port)))
                except (OSError, EOFError, WrongSecret) as error:
                    # It moved, or does not know this run yet: the other endpoints get the rows.
                    logging_.getLogger("storm_dagster.spark").info(
                        "%s takes no rows: %s", address, error
                    )

        def chunks_of(stream_tables: list[tuple[str, Any]], connection_count: int) -> list[Any]:
            """The rows of the tables as a stack of chunks: the first rows are on top.

            A chunk has at most ``chunk_rows`` rows, and fewer if each connection is to get some.
            """
            stack: list[Any] = []
            for stream, table in reversed(stream_tables):
                rows_per_connection = -(-table.num_rows // connection_count)
                size = max(1, min(chunk_rows, rows_per_connection))
                table = table.replace_schema_metadata({"stream": stream})
                chunks = [table.slice(start, size) for start in range(0, table.num_rows, size)]
                stack += reversed(chunks)
            return stack

        def bytes_of(part: Any) -> bytes:
            """The Arrow stream of a chunk; ``ValueError`` if it is too large for a worker."""
            part = part.combine_chunks()
            sink = arrow.BufferOutputStream()
            with arrow.ipc.new_stream(sink, part.schema) as writer:
                writer.write_table(part)
            data = sink.getvalue()
            if data.size > max_bytes:
                raise ValueError(
                    f"a row of micro-batch {batch_id} has {data.size:,} bytes, "
                    f"a worker takes {max_bytes:,}: "
                    "filter it or cut its columns in the source function"
                )
            return data.to_pybytes()

        try:
            other_addresses = join((host, port))
            if tables:
                batch_tables = tables(frame, batch_id)
            else:
                batch_tables = [("default", frame.select(*columns).toArrow())]
            if any(table.num_rows for _, table in batch_tables):
                join_others(other_addresses)
            waiting = chunks_of(batch_tables, len(connections))
            ready = list(connections)
            busy: list[Any] = []
            while waiting or busy:
                while waiting and ready:
                    part = waiting.pop()
                    if part.nbytes > chunk_bytes and part.num_rows > 1:
                        middle = part.num_rows // 2
                        waiting.append(part.slice(middle))
                        waiting.append(part.slice(0, middle))
                        continue
                    data = bytes_of(part)
                    connection = ready.pop(0)
                    connection.send_bytes(data)
                    busy.append(connection)
                # A worker answers "more" when it has emitted its rows: back pressure reaches Spark.
                for connection in _await_answer(busy, b"more"):
                    busy.remove(connection)
                    ready.append(connection)
            for connection in connections:
                # _END
                connection.send_bytes(b"")
            busy = list(connections)
            while busy:
                for connection in _await_answer(busy, b"done"):
                    busy.remove(connection)
        finally:
            for connection in connections:
                connection.close()

    def _await_answer(busy: list[Any], expected: bytes) -> list[Any]:
        """Wait for the ``expected`` answer, and return the connections that sent it.

        Other connections may send keepalives.
        """
        import time as time_
        from multiprocessing.connection import wait

        last_answer = dict.fromkeys(busy, time_.monotonic())
        while True:
            ready_now: list[Any] = wait(busy, 5)
            answers = [(connection, connection.recv_bytes(16)) for connection in ready_now]
            now = time_.monotonic()
            expected_from: list[Any] = []
            for connection, answer in answers:
                if answer not in (expected, b"wait"):
                    raise RuntimeError(
                        "a worker of this SparkSpout gave the batch up; it will be repeated"
                    )
                last_answer[connection] = now
                if answer == expected:
                    expected_from.append(connection)
            # A live worker sends a keepalive every two seconds.
            if now - min(last_answer.values()) > 60:
                raise TimeoutError(
                    "a worker of this SparkSpout has been silent for 60 s; "
                    "the batch will be repeated"
                )
            if expected_from:
                return expected_from

    return deliver


class _OpenBatch:
    """A micro-batch until the ack of its last row.

    The endpoint's condition guards it.
    """

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.rows: deque[tuple[str, str, list[Any]]] = deque()
        """(row id, stream, values) of the rows to emit."""
        self.pending: dict[str, tuple[str, list[Any]]] = {}
        """Row id -> (stream, values), from the emit to the ack."""
        self.count = 0
        """Number of its rows so far, from which their ids are made."""
        self.ended = False
        """True if its last chunk has arrived."""
        self.cancelled = False

    def is_emitted(self) -> bool:
        """True if no row waits for its emit: the endpoint takes another chunk."""
        return not self.rows

    def is_complete(self) -> bool:
        """True if all of its rows are acked."""
        return self.ended and not self.rows and not self.pending


class BatchEndpoint:
    """Listener for micro-batches, which keeps their rows until they are acked.

    The spout calls ``take``, ``ack`` and ``fail``; the other methods run in threads of the
    endpoint. Rows are in memory until their batch is complete: at most one batch and one chunk.
    """

    def __init__(self, host: str) -> None:
        self.secret: bytes = secrets.token_bytes(32)
        """Secret of the query's owner, in the function that it ships.

        The other tasks replace their secret with that of the owner.
        """
        self.others: Callable[[], list[tuple[str, int]]] = list
        """Addresses of the endpoints that share a batch with this one."""
        try:
            self._listener = Listener((host, 0), family="AF_INET", backlog=128)
        except OSError as error:
            raise Unavailable(
                f"cannot listen on {host} for Spark's batches ({error}): check the worker's host"
            ) from None
        self.host: str = self._listener.address[0]
        self.port: int = int(self._listener.address[1])
        self._condition = threading.Condition()
        """Guards the open batch and unknown connections; notified when a thread may continue."""
        self._batch: _OpenBatch | None = None
        self._unknown: dict[Connection, bool] = {}
        """Connections that have not authenticated, the oldest first; the values are true."""
        self._serial = 0
        """Number of the last batch, so that an ack of an earlier one finds no row."""
        self._closed = False
        self.batches_done: int = 0
        """Number of batches whose rows were all acked."""
        self._thread = threading.Thread(
            target=self._accept, name=f"spark-batches-{self.port}", daemon=True
        )
        self._thread.start()

    def take(self) -> tuple[str, str, list[Any]] | None:
        """The next row to emit as (id, stream, values), or ``None``."""
        with self._condition:
            batch = self._batch
            if batch is None or not batch.rows:
                return None
            row_id, stream, values = batch.rows.popleft()
            batch.pending[row_id] = (stream, values)
            if not batch.rows:
                self._condition.notify_all()
            return row_id, stream, values

    def ack(self, row_id: str) -> None:
        """Ack a row. Rows of a canceled batch are ignored."""
        with self._condition:
            if self._batch is None:
                return
            row = self._batch.pending.pop(row_id, None)
            if row is not None and self._batch.is_complete():
                self._condition.notify_all()

    def fail(self, row_id: str) -> None:
        """Queue a failed row for a replay. Rows of a canceled batch are ignored."""
        with self._condition:
            if self._batch is None:
                return
            row = self._batch.pending.pop(row_id, None)
            if row is not None:
                self._batch.rows.append((row_id, *row))

    def close(self) -> None:
        """Cancel the open batch and stop listening.

        Spark repeats the batch from the checkpoint.
        """
        with self._condition:
            self._closed = True
            if self._batch is not None:
                self._batch.cancelled = True
            self._condition.notify_all()
        # A connection wakes accept(); closing the listening socket does not.
        with contextlib.suppress(OSError):
            socket.create_connection((self.host, self.port), timeout=2).close()
        self._listener.close()
        self._thread.join(timeout=5)

    def _accept(self) -> None:
        """Accept connections until the close, each with its own thread."""
        while not self._closed:
            try:
                connection = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    _log.warning("the Spark endpoint could not accept a connection: %s", error)
                    time.sleep(0.05)
                continue
            if self._closed:
                connection.close()
                return
            with self._condition:
                self._unknown[connection] = True
                oldest = next(iter(self._unknown))
            if len(self._unknown) > _MAX_UNKNOWN:
                self._shut_down(oldest)
            threading.Thread(
                target=self._serve, args=(connection,), name="spark-batch", daemon=True
            ).start()

    def _shut_down(self, connection: Connection) -> None:
        """End a connection that has not authenticated; its thread then closes it."""
        with self._condition, contextlib.suppress(OSError):
            if self._unknown.pop(connection, False):
                with socket.socket(fileno=os.dup(connection.fileno())) as link:
                    link.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: Connection) -> None:
        """Authenticate a connection, and take the chunks of its batch; in a thread of its own.

        Answers a chunk when its rows are emitted, and the end when all rows are acked. An error of
        the connection is logged, and drops the batch: Spark repeats it.
        """
        batch: _OpenBatch | None = None
        proof_timer = threading.Timer(_PROOF_SECS, self._shut_down, (connection,))
        proof_timer.daemon = True
        proof_timer.start()
        try:
            # In its own thread, so that an unauthenticated silent client blocks no other.
            deliver_challenge(connection, self.secret)
            answer_challenge(connection, self.secret)
            hello = json.loads(connection.recv_bytes(1024))
            proof_timer.cancel()
            with self._condition:
                self._unknown.pop(connection, None)
            connection.send_bytes(json.dumps(self.others()).encode())
            batch = self._open()
            while True:
                raw = connection.recv_bytes(_MAX_CHUNK_BYTES)
                if raw == _END:
                    break
                self._add_rows(batch, raw)
                self._wait(connection, batch, batch.is_emitted)
                connection.send_bytes(_MORE)
            with self._condition:
                batch.ended = True
            self._wait(connection, batch, batch.is_complete)
            connection.send_bytes(_DONE)
            self.batches_done += 1
            _log.info("micro-batch %s of Spark is acked: %d rows", hello.get("batch"), batch.count)
        except (OSError, EOFError, ValueError, AuthenticationError, _BatchCanceled) as error:
            _log.warning(
                "a connection of Spark ended before its batch was acked: %s",
                error_text(error),
            )
        finally:
            proof_timer.cancel()
            with self._condition:
                # Before the close: after it the descriptor may be that of another connection.
                self._unknown.pop(connection, None)
                if batch is not None and self._batch is batch:
                    self._batch = None
            connection.close()

    def _open(self) -> _OpenBatch:
        """Open a batch, which replaces one that is still open.

        The run of the query that sent the earlier one is over: Spark runs one at a time.
        """
        with self._condition:
            if self._batch is not None:
                self._batch.cancelled = True
                self._condition.notify_all()
            self._serial += 1
            self._batch = _OpenBatch(self._serial)
            return self._batch

    def _add_rows(self, batch: _OpenBatch, raw: bytes) -> None:
        """Add the rows of a chunk, an Arrow stream whose metadata name the stream of tuples."""
        import pyarrow

        with pyarrow.ipc.open_stream(raw) as reader:
            stream = reader.schema.metadata[b"stream"].decode()
            rows = rows_of(reader.read_all())
        with self._condition:
            for values in rows:
                batch.rows.append((f"{batch.serial}:{batch.count}", stream, values))
                batch.count += 1

    def _wait(
        self, connection: Connection, batch: _OpenBatch, condition: Callable[[], bool]
    ) -> None:
        """Wait until ``condition()``, with a keepalive every two seconds.

        Raises :class:`_BatchCanceled` if the batch is canceled or the endpoint closed.
        """

        def has_ended() -> bool:
            return condition() or batch.cancelled or self._closed

        while True:
            with self._condition:
                ended = self._condition.wait_for(has_ended, timeout=_KEEPALIVE_SECS)
                if batch.cancelled or self._closed:
                    raise _BatchCanceled("the spout closed, or a newer run of its query began")
            if ended:
                return
            connection.send_bytes(_WAIT)


class _BatchCanceled(Exception):
    """The batch was canceled and will not be acked by this endpoint."""


def rows_of(table: "pa.Table") -> list[list[Any]]:
    """Rows of a table as lists of Python values, in column order."""
    columns = [column.to_pylist() for column in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]
