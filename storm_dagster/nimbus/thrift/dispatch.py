"""One frame in, one frame out."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from thriftpy2.thrift import TApplicationException

from storm_dagster.model.errors import StormDagsterError
from storm_dagster.nimbus.thrift.access import ThriftPeer
from storm_dagster.nimbus.thrift.errors import set_declared
from storm_dagster.nimbus.thrift.frames import MalformedFrame, check_message
from storm_dagster.nimbus.thrift.idl import METHODS, decoder, encode_failure, encode_reply, load_idl

_log = logging.getLogger(__name__)
_audit = logging.getLogger("storm_dagster.audit")
_ONEWAY = 4
_LARGE_VALUES = 20_000
_MOST_LARGE = 4
"""Messages of so many values that are decoded together: decoded they take a hundred times their bytes."""


class Dispatcher:
    """Calls the methods of ``handler`` by the names of the service; safe for many threads.

    A handler's method takes the call's arguments in their order. ``check(peer, method, arguments)`` raises for who may
    not call.
    """

    def __init__(
        self,
        handler: object,
        check: Callable[[ThriftPeer, str, Sequence[object]], None] = lambda peer, method, arguments: None,
    ) -> None:
        self._handler = handler
        self._check = check
        self._service = load_idl().Nimbus
        self._large = threading.BoundedSemaphore(_MOST_LARGE)

    def answer(self, frame: bytes, peer: ThriftPeer) -> bytes | None:
        """The answer to a call, an error among them; ``None`` when the client expects none.

        :class:`MalformedFrame` for what is no call: the connection cannot be trusted any further.
        """
        if check_message(frame) <= _LARGE_VALUES:
            return self._decode(frame, peer)
        with self._large:
            return self._decode(frame, peer)

    def _decode(self, frame: bytes, peer: ThriftPeer) -> bytes | None:
        protocol = decoder(frame)
        try:
            name, kind, seqid = protocol.read_message_begin()
        except Exception as error:
            raise MalformedFrame(f"the method name: {error}") from None
        answer = self._answer(name, seqid, protocol, peer)
        return None if kind == _ONEWAY else answer

    def _answer(self, name: str, seqid: int, protocol: Any, peer: ThriftPeer) -> bytes:
        row = METHODS.get(name)
        if row is None or "refused" in row:
            text = f"nimbus has no method {name!r:.140}: it serves Storm's Nimbus service"
            text = text if row is None else f"{name} is not served: {row['refused']}"
            return encode_failure(name, seqid, TApplicationException.UNKNOWN_METHOD, text)
        args, result = getattr(self._service, f"{name}_args")(), getattr(self._service, f"{name}_result")()
        try:
            args.read(protocol)
        except Exception as error:
            text = f"the arguments of {name} cannot be read: {error}"
            return encode_failure(name, seqid, TApplicationException.PROTOCOL_ERROR, text)
        try:
            given = [getattr(args, spec[1]) for _, spec in sorted(args.thrift_spec.items())]
            self._check(peer, name, given)
            value = getattr(self._handler, name)(*given)
            if "changes" in row:
                about = given[0] if given and isinstance(given[0], str) else ""
                _audit.info("user %r at %s: %s %r: done", peer.user or "anyone", peer.host, name, about[:200])
            if hasattr(result, "success"):
                result.success = value
            return encode_reply(name, seqid, result)
        except StormDagsterError as error:
            if set_declared(result, error):
                return encode_reply(name, seqid, result)
            text = f"{type(error).__name__}: {error.message}"
            return encode_failure(name, seqid, TApplicationException.INTERNAL_ERROR, text)
        except Exception:
            # The caller learns that it failed, the log what: a traceback may name paths of this host.
            _log.exception("%s failed", name)
            text = f"{name} failed inside nimbus: see its log"
            return encode_failure(name, seqid, TApplicationException.INTERNAL_ERROR, text)
