"""Structures of ``storm.thrift``, their encoding, and its exceptions."""

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import thriftpy2
from thriftpy2.thrift import TApplicationException

from storm_dagster.model import errors
from storm_dagster.model.version import __version__

try:
    # thriftpy2's compiled classes for CPython are ten times as fast on a page of 10,000 tasks.
    from thriftpy2.protocol.cybin.cybin import TCyBinaryProtocol as _Protocol
    from thriftpy2.transport.memory import TCyMemoryBuffer as _Buffer
except ImportError:
    from thriftpy2.protocol.binary import TBinaryProtocol as _Protocol
    from thriftpy2.transport.memory import TMemoryBuffer as _Buffer

STORM_VERSION = f"2.6.0+storm.dagster.{__version__}"
"""Version of a nimbus in summaries.

Clients compare it with versions of Storm to choose the methods that they call.
"""

_REPLY = 2
_EXCEPTION = 3
"""Types of messages that a server sends."""
_MAX_DEPTH = 64
"""Nesting that the protocol accepts; frames of clients are checked by a lower limit before."""


@functools.cache
def load_idl() -> ModuleType:
    """Load the classes of ``storm.thrift``, once; ``.Nimbus`` is the service."""
    return thriftpy2.load(
        Path(__file__).with_name("storm.thrift"),
        module_name="storm_dagster.nimbus.thrift.storm_thrift",
    )


def decoder(raw: bytes) -> Any:
    """Protocol that reads ``raw``.

    Text that is not UTF-8 is an error. Messages of old clients are read as well.
    """
    return _Protocol(
        _Buffer(raw),
        strict_read=False,
        decode_response=True,
        strict_decode=True,
        max_depth=_MAX_DEPTH,
    )


def encode_message(name: str, kind: int, seqid: int, payload: Any) -> bytes:
    """Encode a message with its payload."""
    buffer = _Buffer()
    protocol = _Protocol(buffer, strict_write=True, max_depth=_MAX_DEPTH)
    protocol.write_message_begin(name, kind, seqid)
    payload.write(protocol)
    protocol.write_message_end()
    return bytes(buffer.getvalue())


def encode_reply(name: str, seqid: int, result: Any) -> bytes:
    """Encode the reply to a call."""
    return encode_message(name, _REPLY, seqid, result)


def encode_failure(name: str, seqid: int, kind: int, text: str) -> bytes:
    """Encode a TApplicationException as the reply to a call."""
    return encode_message(name, _EXCEPTION, seqid, TApplicationException(kind, text))


class KeyExists(errors.Conflict):
    """A blob with that key exists already."""


class RefusedCall(errors.InvalidRequest):
    """No caller may do this, not even an administrator."""


# The first match counts. An exception that the method does not declare is skipped.
_EXCEPTIONS: tuple[
    tuple[type[errors.StormDagsterError] | tuple[type[errors.StormDagsterError], ...], str], ...
] = (
    (errors.AlreadyAlive, "AlreadyAliveException"),
    (errors.NotAlive, "NotAliveException"),
    (errors.KeyNotFound, "KeyNotFoundException"),
    (KeyExists, "KeyAlreadyExistsException"),
    ((errors.NotAuthenticated, errors.NotAuthorized, RefusedCall), "AuthorizationException"),
    (errors.InvalidRequest, "InvalidTopologyException"),
)


def set_declared(result: Any, error: errors.StormDagsterError) -> bool:
    """Put an error into ``result``, the result structure of a method.

    Return False if the method declares no exception for the error: the reply is a
    TApplicationException then, and its message begins with the name of the error's class.
    """
    if isinstance(error, errors.Misconfigured):
        return False
    declared: dict[str, tuple[str, Any]] = {}
    for spec in result.thrift_spec.values():
        # (type, field, class, required); a field of a simple type has no class.
        if len(spec) == 4:
            _, field, exception_class, _ = spec
            if field != "success":
                declared[exception_class.__name__] = (field, exception_class)
    for error_classes, exception_name in _EXCEPTIONS:
        if isinstance(error, error_classes) and exception_name in declared:
            field, exception_class = declared[exception_name]
            setattr(result, field, exception_class(msg=error.message))
            return True
    return False
