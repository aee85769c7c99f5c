"""Errors of the Kafka client library in the words of an operator."""

from typing import Any

from storm_dagster.model.errors import Unavailable

_UNREACHABLE = (
    "_ALL_BROKERS_DOWN",
    "_TRANSPORT",
    "_TIMED_OUT",
    "_RESOLVE",
    "_WAIT_COORD",
    "REQUEST_TIMED_OUT",
)
"""Names of errors that mean that no broker responds."""


def readable_error(error: Any, kafka: Any, brokers: str) -> Exception:
    """The error to report for an error of the library.

    It is :class:`Unavailable` if no broker responds, else a ``RuntimeError``. An error of another
    origin is returned unchanged. ``kafka`` is the module of the library, ``brokers`` are the
    addresses to name.
    """
    inner = error.args[0] if isinstance(error, kafka.KafkaException) else error
    if not isinstance(inner, kafka.KafkaError):
        return error
    if inner.name() in _UNREACHABLE:
        return Unavailable(f"Kafka at {brokers} does not answer: {inner.str()}; it is retried")
    # The name comes first, because the spout distinguishes errors by the beginning of their text.
    readable = RuntimeError(f"{inner.name()} of Kafka at {brokers}: {inner.str()}")
    # So it is an error of the client library, and not of the source's code.
    readable.__cause__ = kafka.KafkaException(inner)
    return readable
