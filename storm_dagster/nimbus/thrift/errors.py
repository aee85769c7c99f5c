"""Our errors as Storm's exceptions: the one that the method declares where one fits, else a
TApplicationException whose message begins with the name of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thriftpy2.thrift import TApplicationException

from storm_dagster.model.errors import (
    AlreadyAlive,
    Conflict,
    InvalidRequest,
    InvalidTopology,
    KeyNotFound,
    Misconfigured,
    NotAlive,
    NotAuthenticated,
    NotAuthorized,
    StormDagsterError,
)


class KeyExists(Conflict):
    """A blob of that key exists already."""


class RefusedCall(InvalidRequest):
    """The caller may not do that, whoever it is."""


# First match wins. An exception that the method does not declare is passed over.
_FITTING: tuple[tuple[type[StormDagsterError], str], ...] = (
    (AlreadyAlive, "AlreadyAliveException"),
    (NotAlive, "NotAliveException"),
    (KeyNotFound, "KeyNotFoundException"),
    (KeyExists, "KeyAlreadyExistsException"),
    (NotAuthenticated, "AuthorizationException"),
    (NotAuthorized, "AuthorizationException"),
    (RefusedCall, "AuthorizationException"),
    (InvalidTopology, "InvalidTopologyException"),
    (InvalidRequest, "InvalidTopologyException"),
)


def declared_exceptions(result: Any) -> dict[str, tuple[str, Any]]:
    """Exception name -> (field, class) of what a method declares, by its result structure."""
    return {
        spec[2].__name__: (spec[1], spec[2])
        for spec in result.thrift_spec.values()
        if spec[1] != "success" and len(spec) == 4
    }


def set_declared(result: Any, error: StormDagsterError, declared: Mapping[str, tuple[str, Any]]) -> bool:
    """Put the fitting declared exception into ``result``; whether there is one."""
    for ours, theirs in _FITTING if not isinstance(error, Misconfigured) else ():
        if isinstance(error, ours) and theirs in declared:
            field, cls = declared[theirs]
            setattr(result, field, cls(msg=error.message))
            return True
    return False


def failure_text(error: StormDagsterError) -> tuple[int, str]:
    """(type, message) of the TApplicationException for an error that the method does not declare."""
    return TApplicationException.INTERNAL_ERROR, f"{type(error).__name__}: {error.message}"
