"""The Thrift service of one nimbus: who may call, what answers a call, and the server, wired."""

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from thriftpy2.thrift import TApplicationException

from storm_dagster.core.authorization import (
    LIMITED_USER,
    REQUEST_USER,
    Caller,
    Operation,
    authorize,
    is_admin,
)
from storm_dagster.http.authentication import groups_of
from storm_dagster.model.errors import NotAuthenticated, StormDagsterError
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.lifecycle import LifecycleRequests
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.requests.submitting import Submissions
from storm_dagster.nimbus.thrift.frames import MalformedFrame, check_message
from storm_dagster.nimbus.thrift.handler import NimbusHandler
from storm_dagster.nimbus.thrift.idl import (
    METHODS,
    decoder,
    encode_failure,
    encode_reply,
    load_idl,
    set_declared,
)
from storm_dagster.nimbus.thrift.pending import PendingSubmissions
from storm_dagster.nimbus.thrift.server import ServerLimits, ThriftPeer, ThriftServer
from storm_dagster.nimbus.thrift.structures import changes_a_topology
from storm_dagster.security.peers import owners_only
from storm_dagster.security.settings import Security

_log = logging.getLogger(__name__)
_audit = logging.getLogger("storm_dagster.audit")
_ONEWAY = 4
_LARGE_VALUES = 20_000
_MOST_LARGE = 4
"""Messages of so many values that are decoded together: decoded they take a hundred times their
bytes.
"""
_SUBMISSIONS = ("submitTopology", "submitTopologyWithOpts")


def operation_of(method: str, arguments: Sequence[object] = ()) -> Operation:
    """The operation of a call; unknown methods are for administrators.

    Conf keys turn a submission into a change of the topology that runs under its name.
    """
    if method in _SUBMISSIONS and len(arguments) > 2 and changes_a_topology(arguments[2]):
        return "topology"
    return METHODS.get(method, {}).get("for", "admin")


@dataclass(frozen=True)
class Access:
    """Authorization of each call on the Thrift port of a secured cluster.

    Nothing is configured by default: the port is on loopback, and everybody who reaches it may
    call. Thrift's calls have no place for a secret, so that with ``storm.secret`` alone every call
    is refused; with TLS the client's certificate names its user.
    """

    security: Security
    conf: Mapping[str, Any]
    topology_conf: Callable[[str], Mapping[str, Any] | None]
    groups: Callable[[str], frozenset[str]]

    def check(self, peer: ThriftPeer, method: str, arguments: Sequence[object]) -> None:
        """Return when the peer may call.

        Raises :class:`NotAuthenticated` and :class:`NotAuthorized`, which the audit log keeps.
        """
        LIMITED_USER.set(None)
        REQUEST_USER.set(peer.user or "")
        if not self.security.configured:
            return
        try:
            self._check(peer, method, arguments)
        except StormDagsterError as error:
            _audit.warning("refused %s of %s: %s", method, peer.user or peer.host, error.message)
            raise

    def _check(self, peer: ThriftPeer, method: str, arguments: Sequence[object]) -> None:
        if peer.user is None:
            raise NotAuthenticated(
                "this cluster asks who you are, and Thrift's calls carry no secret: set storm.tls.* and show a client "
                "certificate, or use storm-dagster's command line or REST"
            )
        caller = Caller(peer.user, host=peer.host, groups=self.groups(peer.user))
        if is_admin(caller, self.conf):
            return
        LIMITED_USER.set(caller.name)
        operation = operation_of(method, arguments)
        first = arguments[0] if arguments else None
        named = operation == "topology" and isinstance(first, str)
        authorize(caller, operation, self.conf, self.topology_conf(str(first)) if named else None)


class Dispatcher:
    """Calls the methods of ``handler`` by the names of the service; safe for many threads.

    A handler's method takes the call's arguments in their order. ``check(peer, method, arguments)``
    raises for who may not call.
    """

    def __init__(
        self,
        handler: object,
        check: Callable[[ThriftPeer, str, Sequence[object]], None] = lambda *_: None,
    ) -> None:
        self._handler = handler
        self._check = check
        self._service = load_idl().Nimbus
        self._large = threading.BoundedSemaphore(_MOST_LARGE)

    def answer(self, frame: bytes, peer: ThriftPeer) -> bytes | None:
        """The answer to a call, an error among them; ``None`` when the client expects none.

        :class:`MalformedFrame` for what is no call: the connection cannot be trusted any further.
        """
        with self._large if check_message(frame) > _LARGE_VALUES else nullcontext():
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
        args, result = (
            getattr(self._service, f"{name}_args")(),
            getattr(self._service, f"{name}_result")(),
        )
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
                _audit.info(
                    "user %r at %s: %s %r: done",
                    peer.user or "anyone",
                    peer.host,
                    name,
                    about[:200],
                )
            if hasattr(result, "success"):
                result.success = value
            return encode_reply(name, seqid, result)
        except StormDagsterError as error:
            if set_declared(result, error):
                return encode_reply(name, seqid, result)
            text = f"{error.kind}: {error.message}"
            return encode_failure(name, seqid, TApplicationException.INTERNAL_ERROR, text)
        except Exception:
            # The caller learns that it failed, the log what: a traceback may name paths of this
            # host.
            _log.exception("%s failed", name)
            text = f"{name} failed inside nimbus: see its log"
            return encode_failure(name, seqid, TApplicationException.INTERNAL_ERROR, text)


class ThriftService:
    """Storm's Nimbus service on an open socket."""

    def __init__(
        self,
        nimbus: Nimbus,
        reader: ClusterReader,
        submissions: Submissions,
        lifecycle: LifecycleRequests,
        listener: socket.socket,
    ) -> None:
        pending = PendingSubmissions(nimbus, submissions)
        self._handler = NimbusHandler(nimbus, reader, pending, lifecycle)
        limits = ServerLimits(
            frame_bytes=nimbus.conf["nimbus.thrift.max_buffer_size"],
            threads=nimbus.conf["nimbus.thrift.threads"],
        )
        security = Security.of(nimbus.conf)
        dispatcher = Dispatcher(
            self._handler, Access(security, nimbus.conf.values, reader.conf, groups_of).check
        )
        tls = security.server_context() if security.tls else None
        self._server = ThriftServer(
            dispatcher.answer, listener, limits, tls=tls, own_user_only=owners_only(security)
        )

    def start(self) -> None:
        """Begin to serve; :class:`Unavailable` when that does not happen in time."""
        self._server.start()

    def stop(self) -> None:
        """End within a few seconds."""
        self._server.stop()
        self._handler.downloads.close()
