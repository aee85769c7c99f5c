"""Object stores that are called in clear: whom blobs and signatures of keys would go to."""

import os
import socket
from typing import Any
from urllib.parse import urlsplit

from storm_dagster.model.errors import Unavailable
from storm_dagster.security.server_identity import TrustedServers

_CONNECT_SECS = 5.0
_HTTP_PORT = 80
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""Variables that name the server of S3, the first one first."""


def plain_endpoint(file_system: Any) -> str | None:
    """Address of a file system's server that is called without TLS; ``None`` without one.

    It is known for S3, whose server may be named in the URL's settings or in the environment.
    """
    endpoint = _endpoint_of(file_system)
    if endpoint.lower().startswith("http://"):
        return endpoint
    return None


def _endpoint_of(file_system: Any) -> str:
    """Address of a file system's server; empty if it is not known."""
    settings = getattr(file_system, "client_kwargs", None) or {}
    endpoint = getattr(file_system, "endpoint_url", None) or settings.get("endpoint_url")
    if endpoint:
        return str(endpoint)
    protocol = getattr(file_system, "protocol", ())
    protocols = (protocol,) if isinstance(protocol, str) else tuple(protocol)
    if "s3" in protocols:
        for name in _ENDPOINTS:
            if os.environ.get(name):
                return os.environ[name]
    return ""


def check_object_store(url: str, servers: TrustedServers) -> None:
    """Check the server of the blob store at an fsspec URL, if it is called without TLS.

    It is done when a nimbus starts: the library of the store makes its connections itself. Raises
    :class:`UntrustedServer`, and :class:`Unavailable` if the server does not answer.
    """
    # Loads the libraries of the protocol.
    import fsspec

    try:
        file_system, _ = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError):
        return  # The error names the reason when the store is opened.
    endpoint = plain_endpoint(file_system)
    if endpoint is None:
        return
    address = urlsplit(endpoint)
    host = address.hostname or ""
    try:
        link = socket.create_connection((host, address.port or _HTTP_PORT), _CONNECT_SECS)
    except OSError as error:
        raise Unavailable(
            f"the blob store at {endpoint} does not answer ({error.strerror or error}): start it, "
            "or correct blobstore.dir"
        ) from None
    with link:
        servers.check_socket(link, server=endpoint, name=host, signed=True)
