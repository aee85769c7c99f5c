"""Requests of a Kafka source to the brokers, without waiting for their responses."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

from storm_dagster.host.futures import in_thread


class _Request(NamedTuple):
    name: str
    call: Callable[[], Any]
    """Makes the request, and waits for its response: it runs in a thread."""
    on_response: Callable[[Any], None]
    """Handles the result of ``call``, in the thread that calls :meth:`BrokerRequests.process`."""


class BrokerRequests:
    """Queue of requests, which are made one after the other, each in its own thread.

    ``on_error`` is called with the error of a request or of its handler.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._queue: deque[_Request] = deque()
        """Requests that are not made yet."""
        self._pending: tuple[_Request, Future[Any]] | None = None
        """Request under way, and the future of its response."""

    def add(self, name: str, call: Callable[[], Any], on_response: Callable[[Any], None]) -> None:
        """Queue a request; a commit is made before the others.

        Has no effect if a request of that name is queued or under way. :meth:`process` makes it.
        """
        if self._pending is not None and self._pending[0].name == name:
            return
        if name in self.queued_names():
            return
        request = _Request(name, call, on_response)
        if name == "commit":
            self._queue.appendleft(request)
        else:
            self._queue.append(request)

    def queued_names(self) -> list[str]:
        """Names of the requests that are not made yet."""
        return [request.name for request in self._queue]

    def process(self) -> None:
        """Handle the response that has arrived, and make the next request."""
        if self._pending is not None:
            request, response = self._pending
            if response.done():
                self._pending = None
                try:
                    request.on_response(response.result())
                except Exception as error:
                    self._on_error(error)
        if self._pending is None and self._queue:
            request = self._queue.popleft()
            self._pending = (request, in_thread(f"kafka-{request.name}", request.call))

    def clear(self) -> None:
        """Drop the requests that are not made yet."""
        self._queue.clear()

    def wait_for_response(self) -> None:
        """Wait for the response of the request under way, without handling it."""
        if self._pending is not None:
            _, response = self._pending
            wait([response])
