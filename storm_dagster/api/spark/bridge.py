"""Transfer of Structured Streaming micro-batches from the Spark server to workers, with acks.

Over Spark Connect ``foreachBatch`` runs beside the server, not in the worker. So the function
shipped there connects to an endpoint of the worker, authenticates by the endpoint's secret (HMAC
challenge of ``multiprocessing.connection``; only raw bytes are sent and read, nothing is
unpickled), streams the batch as Arrow IPC, and returns when the worker has acked every row. Only
then does Spark commit the batch to its checkpoint: at least once, end to end.
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

from storm_dagster.model.errors import Unavailable

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger(__name__)

_WAIT, _DONE, _MORE, _END = b"wait", b"done", b"more", b""
_KEEPALIVE_SECS = 2.0
_CHUNK_BYTES = 32 * 1024 * 1024
_MOST_CHUNK_BYTES = 60 * 1024 * 1024
"""A row becomes a tuple, which has to fit into a frame between workers (``MAX_FRAME_BYTES``)."""
_MOST_UNKNOWN = 16
"""Connections that have not proved that they know the secret; one more drops the oldest."""
_PROOF_SECS = 10.0


def make_deliver(
    host: str,
    port: int,
    secret: bytes,
    columns: tuple[str, ...],
    chunk_rows: int,
    chunk_bytes: int = _CHUNK_BYTES,
    tables: Callable[[Any, int], list[tuple[str, Any]]] | None = None,
) -> Callable[[Any, int], None]:
    """Create the ``foreachBatch`` function for the endpoint of the task that owns the query.

    That endpoint names those of the other tasks; chunks of rows go to any that is ready, and the
    function returns when all have acked all their rows. A chunk above ``chunk_bytes`` is divided.
    ``tables`` makes the Arrow tables of a batch and names their streams; else it is its
    ``columns``, on the default stream.

    It is nested on purpose: Spark ships a nested function by value, so that the server needs only
    pyarrow, and not this package.
    """
    most_bytes = max(chunk_bytes, _MOST_CHUNK_BYTES)

    def deliver(frame: Any, batch_id: int) -> None:
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
                # Others that connect all the time took its place before it was known.
                connections[:] = before
                if tries == 1:
                    raise
            time_.sleep(0.05)
            return join(address, tries - 1)

        try:
            others = join((host, port))
            found = (
                tables(frame, batch_id)
                if tables
                else [("default", frame.select(*columns).toArrow())]
            )
            for other in others if any(table.num_rows for _, table in found) else ():
                try:
                    join((str(other[0]), int(other[1])))
                except (OSError, EOFError, WrongSecret) as error:
                    # It moved, or does not know this run yet: the others get the rows.
                    logging_.getLogger("storm_dagster.spark").info(
                        "%s takes no rows: %s", other, error
                    )
            waiting = []
            for stream, table in found[::-1]:
                size = max(1, min(chunk_rows, -(-table.num_rows // len(connections))))
                table = table.replace_schema_metadata({"stream": stream})
                waiting += [table.slice(at, size) for at in range(0, table.num_rows, size)][::-1]
            ready, busy = list(connections), []
            while waiting or busy:
                while waiting and ready:
                    part = waiting.pop()
                    if part.nbytes > chunk_bytes and part.num_rows > 1:
                        waiting += [
                            part.slice(part.num_rows // 2),
                            part.slice(0, part.num_rows // 2),
                        ]
                        continue
                    part = part.combine_chunks()
                    sink = arrow.BufferOutputStream()
                    with arrow.ipc.new_stream(sink, part.schema) as writer:
                        writer.write_table(part)
                    data = sink.getvalue()
                    if data.size > most_bytes:
                        raise ValueError(
                            f"a row of micro-batch {batch_id} has {data.size:,} bytes, a worker takes {most_bytes:,}: "
                            "filter it or cut its columns in the source function"
                        )
                    connection = ready.pop(0)
                    connection.send_bytes(data.to_pybytes())
                    busy.append(connection)
                # A worker asks for more when it has emitted its rows: back pressure reaches Spark.
                for connection in _await_answer(busy, b"more"):
                    busy.remove(connection)
                    ready.append(connection)
            for connection in connections:
                connection.send_bytes(b"")
            busy = list(connections)
            while busy:
                for connection in _await_answer(busy, b"done"):
                    busy.remove(connection)
        finally:
            for connection in connections:
                connection.close()

    def _await_answer(busy: list[Any], wanted: bytes) -> list[Any]:
        """Wait for ``wanted``, and return the connections that sent it; others may send
        keepalives.
        """
        import time as time_
        from multiprocessing.connection import wait

        last_answer = dict.fromkeys(busy, time_.monotonic())
        while True:
            ready_now: list[Any] = wait(busy, 5)
            answers = [(connection, connection.recv_bytes(16)) for connection in ready_now]
            if any(answer not in (wanted, b"wait") for _, answer in answers):
                raise RuntimeError(
                    "a worker of this SparkSpout gave the batch up; it will be repeated"
                )
            now = time_.monotonic()
            last_answer.update((connection, now) for connection, _ in answers)
            # A live worker sends a keepalive every two seconds.
            if now - min(last_answer.values()) > 60:
                raise TimeoutError(
                    "a worker of this SparkSpout has been silent for 60 s; the batch will be repeated"
                )
            found = [connection for connection, answer in answers if answer == wanted]
            if found:
                return found

    return deliver


class _OpenBatch:
    """A micro-batch until the ack of its last row. Guarded by the endpoint's condition."""

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.rows: deque[tuple[str, str, list[Any]]] = deque()
        self.pending: dict[str, tuple[str, list[Any]]] = {}
        self.count = 0
        self.ended = False
        self.cancelled = False

    @property
    def complete(self) -> bool:
        return self.ended and not self.rows and not self.pending


class BatchEndpoint:
    """Listener for micro-batches, which keeps their rows until they are acked.

    The spout calls ``take``, ``ack`` and ``fail``; the rest runs in threads of the endpoint. Rows
    are in memory until their batch is complete: at most one batch and one chunk.
    """

    def __init__(self, host: str) -> None:
        self.secret: bytes = secrets.token_bytes(32)
        """Secret of the query's owner, in the function that it ships; the other tasks get the
        owner's.
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
        self._batch: _OpenBatch | None = None
        self._unknown: dict[Connection, bool] = {}
        self._serial = 0
        self._closed = False
        self.batches_done: int = 0
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
            if (
                self._batch is not None
                and self._batch.pending.pop(row_id, None) is not None
                and self._batch.complete
            ):
                self._condition.notify_all()

    def fail(self, row_id: str) -> None:
        """Queue a failed row again."""
        with self._condition:
            if (
                self._batch is not None
                and (row := self._batch.pending.pop(row_id, None)) is not None
            ):
                self._batch.rows.append((row_id, *row))

    def close(self) -> None:
        """Cancel the open batch (Spark repeats it from the checkpoint) and stop listening."""
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
            if len(self._unknown) > _MOST_UNKNOWN:
                self._hang_up(oldest)
            threading.Thread(
                target=self._serve, args=(connection,), name="spark-batch", daemon=True
            ).start()

    def _hang_up(self, connection: Connection) -> None:
        """End a connection that has proved nothing yet; its thread is waiting for it."""
        with self._condition, contextlib.suppress(OSError):
            if self._unknown.pop(connection, False):
                with socket.socket(fileno=os.dup(connection.fileno())) as link:
                    link.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: Connection) -> None:
        batch: _OpenBatch | None = None
        patience = threading.Timer(_PROOF_SECS, self._hang_up, (connection,))
        patience.daemon = True
        patience.start()
        try:
            # In its own thread, so that an unauthenticated silent client blocks nothing.
            deliver_challenge(connection, self.secret)
            answer_challenge(connection, self.secret)
            hello = json.loads(connection.recv_bytes(1024))
            patience.cancel()
            with self._condition:
                self._unknown.pop(connection, None)
            connection.send_bytes(json.dumps(self.others()).encode())
            batch = self._open()
            while True:
                raw = connection.recv_bytes(_MOST_CHUNK_BYTES)
                if raw == _END:
                    break
                self._add_rows(batch, raw)
                self._wait(connection, batch, lambda open_batch=batch: not open_batch.rows)
                connection.send_bytes(_MORE)
            with self._condition:
                batch.ended = True
            self._wait(connection, batch, lambda open_batch=batch: open_batch.complete)
            connection.send_bytes(_DONE)
            self.batches_done += 1
            _log.info("micro-batch %s of Spark is acked: %d rows", hello.get("batch"), batch.count)
        except (OSError, EOFError, ValueError, AuthenticationError, _BatchCanceled) as error:
            _log.warning(
                "a connection of Spark ended before its batch was acked: %s",
                error or type(error).__name__,
            )
        finally:
            patience.cancel()
            with self._condition:
                # Nobody hangs up a number that is another connection's by then.
                self._unknown.pop(connection, None)
                if batch is not None and self._batch is batch:
                    self._batch = None
            connection.close()

    def _open(self) -> _OpenBatch:
        """Open a batch; it replaces one that is still open, whose query run is over (Spark runs one
        at a time).
        """
        with self._condition:
            if self._batch is not None:
                self._batch.cancelled = True
                self._condition.notify_all()
            self._serial += 1
            self._batch = _OpenBatch(self._serial)
            return self._batch

    def _add_rows(self, batch: _OpenBatch, raw: bytes) -> None:
        import pyarrow

        with pyarrow.ipc.open_stream(raw) as reader:
            stream = reader.schema.metadata[b"stream"].decode()
            rows = rows_of(reader.read_all())
        with self._condition:
            for values in rows:
                batch.rows.append((f"{batch.serial}:{batch.count}", stream, values))
                batch.count += 1

    def _wait(self, connection: Connection, batch: _OpenBatch, done: Callable[[], bool]) -> None:
        """Wait until ``done()``, with a keepalive every two seconds."""
        while True:
            with self._condition:
                finished = self._condition.wait_for(
                    lambda: done() or batch.cancelled or self._closed, timeout=_KEEPALIVE_SECS
                )
                if batch.cancelled or self._closed:
                    raise _BatchCanceled("the spout closed, or a newer run of its query began")
            if finished:
                return
            connection.send_bytes(_WAIT)


class _BatchCanceled(Exception):
    """The batch was canceled and will not be acked by this endpoint."""


def rows_of(table: "pa.Table") -> list[list[Any]]:
    """Rows of a table as lists of Python values, in column order."""
    columns = [column.to_pylist() for column in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]
