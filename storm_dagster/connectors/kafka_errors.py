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
_NOT_READY = (
    "LEADER_NOT_AVAILABLE",
    "NOT_LEADER_FOR_PARTITION",
    "FENCED_LEADER_EPOCH",
    "UNKNOWN_LEADER_EPOCH",
    "OFFSET_NOT_AVAILABLE",
    "BROKER_NOT_AVAILABLE",
    "REPLICA_NOT_AVAILABLE",
    "NETWORK_EXCEPTION",
    "COORDINATOR_LOAD_IN_PROGRESS",
    "COORDINATOR_NOT_AVAILABLE",
    "NOT_COORDINATOR",
    "_WAIT_CACHE",
)
"""Names of errors of brokers that start or end, or elect a leader: a later retry succeeds."""

_FORGOTTEN = ("_UNKNOWN_PARTITION", "_UNKNOWN_TOPIC")
"""Names of errors of a client that no broker has described its topics to for minutes."""


def readable_error(error: Any, kafka: Any, brokers: str, *, is_outage: bool = False) -> Exception:
    """The error to report for an error of the library.

    It is :class:`Unavailable` if no broker responds, or brokers are not ready yet, else a
    ``RuntimeError``. An error of another origin is returned unchanged. ``kafka`` is the module of
    the library, ``brokers`` are the addresses to name. ``is_outage``: brokers did not respond
    before, so that the client may have forgotten its topics.
    """
    inner = error.args[0] if isinstance(error, kafka.KafkaException) else error
    if not isinstance(inner, kafka.KafkaError):
        return error
    is_forgotten = is_outage and inner.name() in _FORGOTTEN
    if is_forgotten or inner.name() in _UNREACHABLE:
        return Unavailable(f"Kafka at {brokers} does not answer: {inner.str()}; it is retried")
    if is_not_ready(inner):
        return Unavailable(
            f"Kafka at {brokers} is not ready: {inner.name()}, {inner.str()}; it is retried"
        )
    # The name comes first, because the spout distinguishes errors by the beginning of their text.
    readable = RuntimeError(f"{inner.name()} of Kafka at {brokers}: {inner.str()}")
    # So it is an error of the client library, and not of the source's code.
    readable.__cause__ = kafka.KafkaException(inner)
    return readable


def is_not_ready(error: Any) -> bool:
    """True if a ``KafkaError`` ends by itself, as after the restart of a broker."""
    return error.name() in _NOT_READY
