"""HTTP transport that knows whom it sends to.

Each new connection in clear is checked (:mod:`storm_dagster.security.server_identity`) after it is
made and before a byte is sent; one that is kept alive was checked when it was made. Over TLS the
certificate is checked instead. It costs one request to the kernel for each connection.
"""

import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpcore
import httpx

from storm_dagster.model.errors import UntrustedServer
from storm_dagster.security.server_identity import TrustedServers

# As httpx sets them by default.
_LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=5.0)
_FAILURES = (
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.ProxyError,
    httpcore.TimeoutException,
    httpcore.UnsupportedProtocol,
)


class UntrustedConnection(httpx.ConnectError, UntrustedServer):
    """A connection to a server that is not known to be of the cluster, and was sent nothing.

    A caller that handles ``ConnectError`` handles it as well.
    """


class _CheckedBackend(httpcore.NetworkBackend):
    """Network of a connection pool, whose connections in clear go to trusted servers alone."""

    def __init__(self, servers: TrustedServers, *, signed: bool) -> None:
        self._servers = servers
        self._signed = signed
        self._backend = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect, and check who answers.

        Raises :class:`UntrustedConnection`, after which the connection is closed.
        """
        stream = self._backend.connect_tcp(host, port, timeout, local_address, socket_options)
        try:
            self._servers.check_socket(
                stream.get_extra_info("socket"),
                server=f"http://{host}:{port}",
                name=host,
                signed=self._signed,
            )
        except UntrustedServer as error:
            stream.close()
            raise UntrustedConnection(error.message) from None
        except BaseException:
            stream.close()
            raise
        return stream

    def sleep(self, seconds: float) -> None:
        """Wait, between the attempts of a pool."""
        self._backend.sleep(seconds)


@contextmanager
def _httpx_errors() -> Iterator[None]:
    """Raise a failure of the connection pool as the error of the same name of httpx."""
    try:
        yield
    except _FAILURES as error:
        kinds = [getattr(httpx, cls.__name__, None) for cls in type(error).__mro__]
        kind = next(kind for kind in kinds if kind is not None)
        raise kind(str(error)) from error


class _Body(httpx.SyncByteStream):
    """Body of a response, as it arrives."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        with _httpx_errors():
            yield from self._stream

    def close(self) -> None:
        """Give the connection back to the pool."""
        self._stream.close()


class CheckedTransport(httpx.BaseTransport):
    """Transport of an HTTP client that sends to trusted servers alone.

    ``context`` is that of ``https``, ``signed`` that of :meth:`TrustedServers.check`. Thread-safe,
    as the transport of httpx is.
    """

    def __init__(
        self, servers: TrustedServers, context: ssl.SSLContext, *, signed: bool = True
    ) -> None:
        self._secure = httpx.HTTPTransport(verify=context, trust_env=False, limits=_LIMITS)
        self._plain = httpcore.ConnectionPool(
            network_backend=_CheckedBackend(servers, signed=signed),
            # Never used: a pool without it makes one, which takes long.
            ssl_context=context,
            max_connections=_LIMITS.max_connections,
            max_keepalive_connections=_LIMITS.max_keepalive_connections,
            keepalive_expiry=_LIMITS.keepalive_expiry,
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and return its response, whose body is still to be read."""
        if request.url.scheme != "http":
            return self._secure.handle_request(request)
        plain = httpcore.Request(
            method=request.method,
            url=httpcore.URL(
                scheme=request.url.raw_scheme,
                host=request.url.raw_host,
                port=request.url.port,
                target=request.url.raw_path,
            ),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        with _httpx_errors():
            response = self._plain.handle_request(plain)
        return httpx.Response(
            status_code=response.status,
            headers=response.headers,
            stream=_Body(response.stream),
            extensions=response.extensions,
        )

    def close(self) -> None:
        """Close the connections."""
        self._secure.close()
        with _httpx_errors():
            self._plain.close()
