"""Thrift service of one nimbus: authorization, dispatch of calls, and the server."""

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
    UNKNOWN_USER,
    Caller,
    Operation,
    authorize,
    is_admin,
)
from storm_dagster.http.authentication import groups_of
from storm_dagster.model.errors import NotAuthenticated, StormDagsterError, error_text
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.lifecycle import LifecycleRequests
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.requests.submitting import Submissions
from storm_dagster.nimbus.thrift.frames import MalformedFrame, check_message
from storm_dagster.nimbus.thrift.handler import NimbusHandler
from storm_dagster.nimbus.thrift.idl import (
    decoder,
    encode_failure,
    encode_reply,
    load_idl,
    set_declared,
)
from storm_dagster.nimbus.thrift.methods import (
    METHODS,
    Method,
    RefusedMethod,
    operation_of_method,
)
from storm_dagster.nimbus.thrift.pending import PendingSubmissions
from storm_dagster.nimbus.thrift.server import ServerLimits, ThriftPeer, ThriftServer
from storm_dagster.nimbus.thrift.structures import changes_a_topology
from storm_dagster.security.peers import owners_only
from storm_dagster.security.settings import Security

_log = logging.getLogger(__name__)
_audit = logging.getLogger("storm_dagster.audit")
_ONEWAY = 4
"""Type of a message whose client expects no reply."""
_LARGE_VALUES = 20_000
"""Number of values above which a message counts as large."""
_MAX_LARGE = 4
"""Limit of large messages that are decoded and served at the same time.

Decoded messages take a hundred times their bytes.
"""
_SUBMISSIONS = ("submitTopology", "submitTopologyWithOpts")


def operation_of(method: str, arguments: Sequence[object] = ()) -> Operation:
    """Operation that the caller must be allowed.

    Unknown methods are for administrators. Conf keys turn a submission into a change of the
    topology that runs under its name.
    """
    if method in _SUBMISSIONS and len(arguments) > 2:
        _, _, json_conf, *_ = arguments
        if changes_a_topology(json_conf):
            return "topology"
    return operation_of_method(method)


@dataclass(frozen=True)
class Access:
    """Authorization of each call on the Thrift port of a secured cluster.

    By default no security is configured: the port is on loopback, and every client that reaches it
    may call. Thrift's calls have no place for a secret, so that with ``storm.secret`` alone every
    call is refused; with TLS the client's certificate names its user.
    """

    security: Security
    conf: Mapping[str, Any]
    """Conf of the cluster, which names the administrators."""
    topology_conf: Callable[[str], Mapping[str, Any] | None]
    """Name or id of a topology -> its conf; ``None`` if it cannot be read."""
    groups: Callable[[str], frozenset[str]]
    """User -> its groups."""

    def check(self, peer: ThriftPeer, method: str, arguments: Sequence[object]) -> None:
        """Return if the peer may call the method.

        Else raise :class:`NotAuthenticated` or :class:`NotAuthorized`, which the audit log keeps.
        The user of the call is set for this thread: ``REQUEST_USER``, and ``LIMITED_USER`` unless
        it is an administrator.
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
        """Check the peer in a secured cluster.

        An operation ``topology`` is authorized by the conf of the topology that the first argument
        names; without its conf only administrators may execute it.
        """
        if peer.user is None:
            raise NotAuthenticated(
                "this cluster requires authentication, and Thrift's calls carry no secret: set "
                "storm.tls.* and show a client certificate, or use storm-dagster's command line or "
                "REST"
            )
        caller = Caller(peer.user, host=peer.host, groups=self.groups(peer.user))
        if is_admin(caller, self.conf):
            return
        LIMITED_USER.set(caller.name)
        operation = operation_of(method, arguments)
        first = arguments[0] if arguments else None
        topology_conf = None
        if operation == "topology" and isinstance(first, str):
            topology_conf = self.topology_conf(first)
        authorize(caller, operation, self.conf, topology_conf)


class Dispatcher:
    """Call the functions of a handler by the names of the service.

    ``check(peer, method, arguments)`` raises for a peer that must not call the method. Safe for
    many threads.
    """

    def __init__(
        self,
        handler: NimbusHandler,
        check: Callable[[ThriftPeer, str, Sequence[object]], None] = lambda *_: None,
    ) -> None:
        self._handler = handler
        self._check = check
        self._service = load_idl().Nimbus
        self._large = threading.BoundedSemaphore(_MAX_LARGE)
        """Held while a large message is served."""

    def answer(self, frame: bytes, peer: ThriftPeer) -> bytes | None:
        """Return the response to a call, which may be an error.

        ``None`` if the client expects none. :class:`MalformedFrame` if the frame is not a call: the
        connection can no longer be trusted.
        """
        with self._large if check_message(frame) > _LARGE_VALUES else nullcontext():
            protocol = decoder(frame)
            try:
                name, kind, seqid = protocol.read_message_begin()
            except Exception as error:
                raise MalformedFrame(f"the method name: {error_text(error)}") from None
            response = self._answer(name, seqid, protocol, peer)
        return None if kind == _ONEWAY else response

    def _answer(self, name: str, seqid: int, protocol: Any, peer: ThriftPeer) -> bytes:
        """Call the method whose arguments ``protocol`` reads, and encode its reply.

        Every error becomes a reply: an exception that the method declares, or else a
        TApplicationException.
        """
        method = METHODS.get(name)
        if method is None:
            text = f"nimbus has no method {name!r:.140}: it serves Storm's Nimbus service"
            return encode_failure(name, seqid, TApplicationException.UNKNOWN_METHOD, text)
        if isinstance(method, RefusedMethod):
            text = f"{name} is not served: {method.reason}"
            return encode_failure(name, seqid, TApplicationException.UNKNOWN_METHOD, text)
        args = getattr(self._service, f"{name}_args")()
        result = getattr(self._service, f"{name}_result")()
        try:
            args.read(protocol)
        except Exception as error:
            text = f"the arguments of {name} cannot be read: {error_text(error)}"
            return encode_failure(name, seqid, TApplicationException.PROTOCOL_ERROR, text)
        try:
            value = self._call(name, method, args, peer)
            if hasattr(result, "success"):
                result.success = value
            return encode_reply(name, seqid, result)
        except StormDagsterError as error:
            if set_declared(result, error):
                return encode_reply(name, seqid, result)
            text = f"{error.kind}: {error.message}"
            return encode_failure(name, seqid, TApplicationException.INTERNAL_ERROR, text)
        except Exception:
            # A traceback may name paths of this host: only the log has it.
            _log.exception("%s failed", name)
            text = f"{name} failed inside nimbus: see its log"
            return encode_failure(name, seqid, TApplicationException.INTERNAL_ERROR, text)

    def _call(self, name: str, method: Method, args: Any, peer: ThriftPeer) -> Any:
        """Call the method if the peer may, and write the line of the audit log."""
        # Number of a field -> (type, name, ...): the numbers are in the order of the arguments.
        arguments = [getattr(args, field) for _, (_, field, *_) in sorted(args.thrift_spec.items())]
        self._check(peer, name, arguments)
        value = method.call(self._handler, arguments)
        if method.changes:
            first = arguments[0] if arguments else None
            subject = first if isinstance(first, str) else ""
            user = peer.user or UNKNOWN_USER
            _audit.info("user %r at %s: %s %r: done", user, peer.host, name, subject[:200])
        return value


class ThriftService:
    """Storm's Nimbus service on a listening socket."""

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
            self._handler,
            Access(security, nimbus.conf.values, reader.authorization_conf, groups_of).check,
        )
        tls = security.server_context() if security.tls else None
        self._server = ThriftServer(
            dispatcher.answer, listener, limits, tls=tls, own_user_only=owners_only(security)
        )

    def start(self) -> None:
        """Begin to serve; :class:`Unavailable` if the server does not start in time."""
        self._server.start()

    def stop(self) -> None:
        """Stop the server within a few seconds."""
        self._server.stop()
        self._handler.downloads.close()
