"""Our errors as Storm's exceptions: the one that the method declares where one fits, else a
TApplicationException whose message begins with the name of ours."""

from __future__ import annotations

from typing import Any

from storm_dagster.model.errors import (
    AlreadyAlive,
    Conflict,
    InvalidRequest,
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
_FITTING: tuple[tuple[type[StormDagsterError] | tuple[type[StormDagsterError], ...], str], ...] = (
    (AlreadyAlive, "AlreadyAliveException"),
    (NotAlive, "NotAliveException"),
    (KeyNotFound, "KeyNotFoundException"),
    (KeyExists, "KeyAlreadyExistsException"),
    ((NotAuthenticated, NotAuthorized, RefusedCall), "AuthorizationException"),
    (InvalidRequest, "InvalidTopologyException"),
)


def set_declared(result: Any, error: StormDagsterError) -> bool:
    """Put the fitting exception into ``result``, the result structure of a method; whether it declares one."""
    declared = {
        spec[2].__name__: spec for spec in result.thrift_spec.values() if spec[1] != "success" and len(spec) == 4
    }
    for ours, theirs in _FITTING if not isinstance(error, Misconfigured) else ():
        if isinstance(error, ours) and theirs in declared:
            _, field, cls, *_ = declared[theirs]
            setattr(result, field, cls(msg=error.message))
            return True
    return False
