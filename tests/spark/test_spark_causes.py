"""What an error of Spark says: its innermost cause, and whether Spark was away."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest

from storm_dagster.api.spark.causes import chain_of, innermost, reads_like_outage


class PythonException(Exception):
    """Named as the error with which pyspark tells what a function raised on Spark."""


class SparkConnectGrpcException(Exception):
    """Named as pyspark's error of a call that did not reach the server."""


def told_by_spark(raised: BaseException) -> PythonException:
    """The error as pyspark raises it for a function that raised on Spark."""
    trace = "".join(traceback.format_exception(raised))
    return PythonException(
        "\n  An exception was thrown from the Python worker. Please see the stack trace below.\n"
        f"{trace}\n\nJVM stacktrace:\norg.apache.spark.api.python.PythonException\n\tat x.Y(Z.java)"
    )


def raised_by(function: Callable[[], Any]) -> BaseException:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("it must raise")


def raise_chain() -> None:
    try:
        int("x")
    except ValueError as error:
        raise RuntimeError("cannot parse the row") from error


def raising(error: Exception) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (raising(ValueError("negative value -1")), "ValueError: negative value -1"),
        (raising(ValueError()), "ValueError"),
        (raising(ValueError("first\n  second\nthird")), "ValueError: first"),
        (raising(ValueError("\nafter an empty line")), "ValueError: after an empty line"),
        (raising(ValueError('see\n  File "x.csv", line 3')), "ValueError: see"),
        (raise_chain, "RuntimeError: cannot parse the row"),
    ],
)
def test_a_row_is_rejected_with_what_its_function_raised(
    function: Callable[[], Any], cause: str
) -> None:
    error = told_by_spark(raised_by(function))
    assert innermost(error) == f"PythonException: {cause}"
    assert not reads_like_outage(error)


def test_a_group_of_errors_is_told_by_its_own_message() -> None:
    # As Python 3.11 and later write it.
    error = PythonException(
        "\n  An exception was thrown from the Python worker. Please see the stack trace below.\n"
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "rows.py", line 7, in check\n'
        "  |     raise ExceptionGroup('several rows', errors)\n"
        "  | ExceptionGroup: several rows (2 sub-exceptions)\n"
        "  +-+---------------- 1 ----------------\n"
        "    | ValueError: a\n"
    )
    assert innermost(error) == "PythonException: ExceptionGroup: several rows (2 sub-exceptions)"


def test_a_long_message_is_cut() -> None:
    error = told_by_spark(raised_by(raising(ValueError("x" * 5000))))
    assert len(innermost(error)) < 600


def test_the_cause_within_a_job_that_was_aborted_is_found() -> None:
    trace = "".join(traceback.format_exception(raised_by(raising(KeyError("day")))))
    text = (
        "Job aborted due to stage failure: Task 0 failed 4 times, most recent failure: "
        "org.apache.spark.api.python.PythonException: "
        f"{trace}"
    )
    assert innermost(Exception(text)) == "Exception: KeyError: 'day'"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (PythonException(), "PythonException"),
        (PythonException("\n \n"), "PythonException"),
        (Exception("\n[DIVIDE_BY_ZERO] Division by zero.\nat x"), "[DIVIDE_BY_ZERO] Division"),
        (
            PythonException(
                "\n  An exception was thrown from the Python worker.\n"
                "Traceback (most recent call last):\n"
                '  File "x.py", line 3, in f'
            ),
            "Traceback (most recent call last):",
        ),
    ],
)
def test_an_error_without_a_traceback_never_ends_in_nothing(error: Exception, cause: str) -> None:
    text = innermost(error)
    assert cause in text and not text.endswith(": ")


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(111, "Connection refused"),
        ConnectionResetError(104, "Connection reset by peer"),
        SparkConnectGrpcException(
            "<_MultiThreadedRendezvous of RPC that terminated with:\n"
            '\tstatus = StatusCode.UNAVAILABLE\n\tdetails = "Socket closed"'
        ),
        SparkConnectGrpcException("failed to connect to all addresses; last error: UNKNOWN"),
        SparkConnectGrpcException("[RETRIES_EXCEEDED] The maximum number of retries is exceeded."),
        SparkConnectGrpcException("[INVALID_HANDLE.SESSION_NOT_FOUND] Session not found."),
        SparkConnectGrpcException("[INVALID_HANDLE.SESSION_CHANGED] The server has restarted."),
        SparkConnectGrpcException("[INVALID_HANDLE.OPERATION_NOT_FOUND] Operation not found."),
        AssertionError("incorrect server side session identifier for request"),
        RuntimeError("Cannot call methods on a stopped SparkContext."),
        RuntimeError("Job 3 cancelled because SparkContext was shut down"),
    ],
)
def test_a_server_or_session_that_is_gone_reads_like_an_outage(error: Exception) -> None:
    assert reads_like_outage(error)
    hidden = RuntimeError("cannot store the batch")
    hidden.__cause__ = error
    assert reads_like_outage(hidden), "also as the cause of another error"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("negative value -1"),
        Exception("[CAST_INVALID_INPUT] The value 'x' of the type STRING cannot be cast to INT"),
        Exception("[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column cannot be resolved"),
        told_by_spark(raised_by(raising(ConnectionRefusedError(111, "Connection refused")))),
        told_by_spark(raised_by(raising(OSError("UNAVAILABLE")))),
    ],
)
def test_an_error_of_a_row_does_not_read_like_an_outage(error: Exception) -> None:
    assert not reads_like_outage(error)


class EqualError(Exception):
    """An error whose class calls all of its errors equal."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EqualError)

    __hash__ = Exception.__hash__


@pytest.mark.parametrize("kind", [ValueError, EqualError])
def test_a_chain_has_each_cause_and_context_of_an_error_once(kind: type[Exception]) -> None:
    error, cause, context = kind("a"), kind("b"), kind("c")
    error.__cause__ = cause
    error.__context__ = kind("not the cause")
    cause.__context__ = context
    assert [id(entry) for entry in chain_of(error)] == [id(error), id(cause), id(context)]
    # Python itself prints such a circle.
    context.__context__ = error
    assert [id(entry) for entry in chain_of(cause)] == [id(cause), id(context), id(error)]
    assert chain_of(ValueError("alone"))[1:] == []
