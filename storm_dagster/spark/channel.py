"""Channels to Spark Connect servers, on which nothing is sent before the server is known.

Spark Connect's server has no TLS of its own. On loopback, the user of the process at the other end
is asked before each call: gRPC connects again by itself, and another user may listen at the port by
then. This module imports gRPC and pyspark: it is for functions that open a session.
"""

import contextlib
import socket
from collections.abc import Callable
from typing import Any

import grpc
from pyspark.sql.connect.client import DefaultChannelBuilder

from storm_dagster.model.conf import mask_text
from storm_dagster.model.errors import StormDagsterError, Unavailable, error_text
from storm_dagster.model.names import url_host
from storm_dagster.security.own_connections import connections_to
from storm_dagster.security.peers import is_loopback
from storm_dagster.security.server_identity import TrustedServers, UntrustedServer
from storm_dagster.security.spark_remote import check_spark_server

_CONNECT_SECS = 5.0
"""Longest try to reach a server of which no connection is open yet."""


class CheckedChannelBuilder(DefaultChannelBuilder):
    """Builder of a channel that checks its server before each call.

    A channel with TLS (``;use_ssl=true``) is not checked: the server proves who it is by its
    certificate.
    """

    def __init__(self, url: str, trusted: TrustedServers) -> None:
        """``url`` has the token, if the server gets one; it is in the heads of the calls."""
        super().__init__(url)
        host, _, port = self.endpoint.rpartition(":")
        self._server = _PlaintextServer(host.strip("[]"), int(port), trusted)

    def toChannel(self) -> grpc.Channel:
        """The channel, which connects at its first call."""
        has_tls = self.use_ssl or (self.token is not None and self.host != "localhost")
        if has_tls:
            return super().toChannel()
        # A proxy of the environment would be the server at the other end.
        self.setChannelOption("grpc.enable_http_proxy", 0)
        if self._server.is_on_loopback():
            return self._secure_channel(self.endpoint, self._checked_credentials())
        self.add_interceptor(_CheckBeforeCall(self._server.check))
        return self._insecure_channel(self.endpoint)

    def _checked_credentials(self) -> grpc.ChannelCredentials:
        """Credentials that ask for the server's user when a call has got its connection.

        gRPC asks a plug-in for heads after it has chosen the connection of a call, which is on
        loopback, and before it sends any byte of the call. A call whose connection is lost is
        given another one, for which it asks again.
        """
        check = grpc.metadata_call_credentials(_CheckOfConnections(self._server), "storm-owner")
        credentials = [check]
        if self.token is not None:
            credentials.append(grpc.access_token_call_credentials(self.token))
        return grpc.composite_channel_credentials(grpc.local_channel_credentials(), *credentials)


class _PlaintextServer:
    """Address of a server that is called without TLS, and who may hold it."""

    def __init__(self, host: str, port: int, trusted: TrustedServers) -> None:
        self._host = host
        self._port = port
        self._trusted = trusted
        self._name = mask_text(f"Spark at sc://{url_host(host)}:{port}")
        """Subject of errors."""

    def is_on_loopback(self) -> bool:
        """True if the host has addresses, and all of them are loopback."""
        try:
            addresses = self._addresses()
        except OSError:
            return False
        return bool(addresses) and all(is_loopback(address) for address in addresses)

    def check_loopback(self) -> None:
        """Check all connections of this process to the port on loopback.

        Which of them gRPC uses is not known. Those of other users are ended, so that gRPC connects
        again. Raises :class:`UntrustedServer` if one was, or if there is none.
        """
        refusal: UntrustedServer | None = None
        checked = 0
        with connections_to(self._port) as links:
            for link in links:
                with contextlib.suppress(OSError):
                    if not is_loopback(link.getpeername()[0]):
                        continue
                checked += 1
                try:
                    check_spark_server(link, self._host, self._port, self._trusted)
                except UntrustedServer as error:
                    refusal = error
                    with contextlib.suppress(OSError):
                        link.shutdown(socket.SHUT_RDWR)
        if refusal is not None:
            raise refusal
        if checked == 0:
            raise UntrustedServer(
                f"{self._name} is sent nothing, because the connection to it was lost: try again"
            )

    def check(self) -> None:
        """Check the connections of this process to the server, or one more without any.

        :class:`UntrustedServer` if one is not trusted, :class:`Unavailable` if none is made.
        """
        try:
            addresses = self._addresses()
            with connections_to(self._port) as links:
                open_links = [link for link in links if _peer_address(link) in addresses]
                for link in open_links:
                    check_spark_server(link, self._host, self._port, self._trusted)
            if not open_links:
                address = (self._host, self._port)
                with socket.create_connection(address, _CONNECT_SECS) as link:
                    check_spark_server(link, self._host, self._port, self._trusted)
        except OSError as error:
            raise Unavailable(
                f"{self._name} is out of reach ({error_text(error)}): start it, or correct "
                "spark.remote"
            ) from None

    def _addresses(self) -> set[str]:
        """Addresses of the host. ``OSError`` if its name is not known."""
        infos = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        return {str(info[4][0]) for info in infos}


def _peer_address(link: socket.socket) -> str:
    """Address at the other end, an IPv4 one without its form in IPv6; empty if the link broke."""
    try:
        return str(link.getpeername()[0]).removeprefix("::ffff:")
    except OSError:
        return ""


class _CheckOfConnections(grpc.AuthMetadataPlugin):
    """Plug-in that adds no head to a call, and refuses it unless the server is trusted."""

    def __init__(self, server: _PlaintextServer) -> None:
        self._server = server

    def __call__(
        self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback
    ) -> None:
        """Check the connections; gRPC calls it in a thread of its own."""
        refusal: Exception | None = None
        try:
            self._server.check_loopback()
        except StormDagsterError as error:
            refusal = error
        except Exception as error:
            # Whatever goes wrong here: without a check nothing is sent.
            refusal = UntrustedServer(f"Spark is sent nothing, because the check failed: {error!r}")
        callback((), refusal)


class _CheckBeforeCall(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Interceptor that calls a check before each call; its error is that of the call."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        """Check, then call."""
        self._check()
        return continuation(client_call_details, request)

    def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        """Check, then call."""
        self._check()
        return continuation(client_call_details, request)

    def intercept_stream_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request_iterator: Any
    ) -> Any:
        """Check, then call."""
        self._check()
        return continuation(client_call_details, request_iterator)

    def intercept_stream_stream(
        self, continuation: Callable[..., Any], client_call_details: Any, request_iterator: Any
    ) -> Any:
        """Check, then call."""
        self._check()
        return continuation(client_call_details, request_iterator)
