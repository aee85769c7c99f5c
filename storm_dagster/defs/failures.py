"""Conversion of the package's typed errors into Dagster failures that keep type and message.

Services read ``error_type`` and ``message`` from the failure's metadata and answer their callers with the
same error (contract of ``GET /v1/runs/{id}``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg

from storm_dagster.model.errors import Conflict, Corrupt, Fenced, InvalidRequest, StormDagsterError

# A retry inside the run cannot change these: the request is wrong, the state forbids it, the epoch is
# over (a re-execution takes the new one), or the bytes are damaged.
_FINAL = (InvalidRequest, Conflict, Fenced, Corrupt)


def is_final(error: StormDagsterError) -> bool:
    """Whether doing the very same again must fail again."""
    return isinstance(error, _FINAL)


def failure_of(error: StormDagsterError) -> dg.Failure:
    """The failure that ends a step because of ``error``."""
    return dg.Failure(
        description=error.message,
        metadata={"error_type": type(error).__name__, "message": error.message},
        allow_retries=not is_final(error),
    )


@contextmanager
def step_errors() -> Iterator[None]:
    """Inside, a :class:`StormDagsterError` becomes a :class:`dagster.Failure`; other exceptions pass."""
    try:
        yield
    except StormDagsterError as error:
        raise failure_of(error) from error
