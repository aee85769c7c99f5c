"""Queries of Kafka's brokers, one after the other, each in a thread.

The thread that reads records never waits for a broker.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

from storm_dagster.host.futures import in_thread

COMMIT = "commit"
"""Name of the query that is made before all others that wait."""


class Query(NamedTuple):
    """A query of the brokers."""

    name: str
    call: Callable[[], Any]
    """It waits, so it runs in a thread."""
    on_result: Callable[[Any], None]
    """Handler of the result, which runs in the thread that calls :meth:`KafkaQueries.serve`."""


class KafkaQueries:
    """Queue of the queries of one task; all methods are called in one thread."""

    def __init__(self) -> None:
        self.waiting: deque[Query] = deque()
        """Queries that are not made yet, in order."""
        self._running: tuple[Query, Future[Any]] | None = None

    def add(self, name: str, call: Callable[[], Any], on_result: Callable[[Any], None]) -> None:
        """Add a query, a commit before all others.

        A query with the name of one that waits or runs is dropped.
        """
        if self._running is not None and self._running[0].name == name:
            return
        if any(query.name == name for query in self.waiting):
            return
        query = Query(name, call, on_result)
        if name == COMMIT:
            self.waiting.appendleft(query)
        else:
            self.waiting.append(query)

    def serve(self, on_error: Callable[[Exception], None]) -> None:
        """Handle the result of a finished query, and start the next one.

        ``on_error`` gets an error of the query, or of its handler.
        """
        if self._running is not None and self._running[1].done():
            query, result = self._running
            self._running = None
            try:
                query.on_result(result.result())
            except Exception as error:
                on_error(error)
        if self._running is None and self.waiting:
            query = self.waiting.popleft()
            self._running = (query, in_thread(f"kafka-{query.name}", query.call))

    def wait(self) -> None:
        """Wait for the query that runs."""
        if self._running is not None:
            _, result = self._running
            wait([result])
