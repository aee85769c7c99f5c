"""The structures of ``storm.thrift``, loaded once, and how they travel; our errors as its
exceptions.
"""

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import thriftpy2
from thriftpy2.thrift import TApplicationException

import storm_dagster
from storm_dagster.model import errors

try:
    # The compiled ones, which thriftpy2 has for CPython: ten times as fast on a page of 10,000
    # tasks.
    from thriftpy2.protocol.cybin.cybin import TCyBinaryProtocol as _Protocol
    from thriftpy2.transport.memory import TCyMemoryBuffer as _Buffer
except ImportError:
    from thriftpy2.protocol.binary import TBinaryProtocol as _Protocol
    from thriftpy2.transport.memory import TMemoryBuffer as _Buffer

STORM_VERSION = f"2.6.0+storm.dagster.{storm_dagster.__version__}"
"""The version of a nimbus in summaries: clients compare it with versions of Storm to choose what
they may call.
"""

_REPLY, _EXCEPTION = 2, 3
_MOST_DEPTH = 64


@functools.cache
def load_idl() -> ModuleType:
    """The classes of the file; ``.Nimbus`` is the service."""
    return thriftpy2.load(
        Path(__file__).with_name("storm.thrift"),
        module_name="storm_dagster.nimbus.thrift.storm_thrift",
    )


def decoder(raw: bytes) -> Any:
    """A protocol that reads ``raw``; text that is no UTF-8 is an error, old clients' messages are
    read as well.
    """
    return _Protocol(
        _Buffer(raw),
        strict_read=False,
        decode_response=True,
        strict_decode=True,
        max_depth=_MOST_DEPTH,
    )


def encode_message(name: str, kind: int, seqid: int, payload: Any) -> bytes:
    """A message with its payload."""
    buffer = _Buffer()
    protocol = _Protocol(buffer, strict_write=True, max_depth=_MOST_DEPTH)
    protocol.write_message_begin(name, kind, seqid)
    payload.write(protocol)
    protocol.write_message_end()
    return bytes(buffer.getvalue())


def encode_reply(name: str, seqid: int, result: Any) -> bytes:
    """The answer to a call."""
    return encode_message(name, _REPLY, seqid, result)


def encode_failure(name: str, seqid: int, kind: int, text: str) -> bytes:
    """A TApplicationException as an answer."""
    return encode_message(name, _EXCEPTION, seqid, TApplicationException(kind, text))


class KeyExists(errors.Conflict):
    """A blob of that key exists already."""


class RefusedCall(errors.InvalidRequest):
    """The caller may not do that, whoever it is."""


# First match wins. An exception that the method does not declare is passed over.
_FITTING: tuple[
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
    """Put the fitting exception into ``result``, the result structure of a method; whether it
    declares one.

    Without one the error is a TApplicationException whose message begins with the name of ours.
    """
    declared = {
        spec[2].__name__: spec
        for spec in result.thrift_spec.values()
        if spec[1] != "success" and len(spec) == 4
    }
    for ours, theirs in _FITTING if not isinstance(error, errors.Misconfigured) else ():
        if isinstance(error, ours) and theirs in declared:
            _, field, cls, *_ = declared[theirs]
            setattr(result, field, cls(msg=error.message))
            return True
    return False
