"""Calls in other threads, with a future of their outcome."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")


def fulfill(future: Future[T], action: Callable[[], T]) -> None:
    """Give the future the result of ``action``, or its exception."""
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)


def in_thread(name: str, action: Callable[[], T]) -> Future[T]:
    """Run ``action`` in a thread, and return the future of its outcome.

    ``name`` is the name of the thread. The exit of the process does not wait for the thread.
    """
    future: Future[T] = Future()
    threading.Thread(
        target=copy_context().run, args=(fulfill, future, action), name=name, daemon=True
    ).start()
    return future
