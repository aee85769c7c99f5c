"""Security of a cluster: secret, certificates, settings of both ends.

By default neither is configured, and all services listen on loopback only (``exposure``). All
daemons, runs and clients of a cluster have ``storm.secret`` (or ``storm.secret.file``, whose second
line is valid, too, while the secret is changed); a signature with it proves to be of the cluster.
``storm.tls.*`` names a certificate, its key and the authority that both sides trust.
"""

import functools
import hashlib
import hmac
import logging
import os
import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storm_dagster.host.files import read_private_file
from storm_dagster.host.secret_files import refuse_shared_file
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.security.server_identity import TrustedServers
from storm_dagster.security.signing import signer

if TYPE_CHECKING:
    from storm_dagster.security.checked_http import CheckedTransport

_log = logging.getLogger(__name__)
_MIN_SECRET_CHARS = 16
"""Length below which a secret is refused."""
SILENT_SECS = 5.0
"""Silence of a nimbus after which a read of a blob is retried: its reply, or a part of it, may be
lost.
"""


@functools.cache
def public_authorities() -> ssl.SSLContext:
    """TLS context of a client that trusts the authorities of the web.

    It takes 50 ms to load them, once in a process.
    """
    import httpx

    return httpx.create_ssl_context(trust_env=False)


def _secrets_of(conf: Any) -> tuple[str, ...]:
    """Valid secrets, the current one first; empty if none is configured."""
    secret = conf.get("storm.secret")
    file = conf.get("storm.secret.file")
    if secret and file:
        raise InvalidRequest("storm.secret and storm.secret.file are both set: keep the file")
    if file:
        lines = read_private_file(Path(file).expanduser(), "storm.secret.file").splitlines()
        secrets = tuple(line.strip() for line in lines if line.strip())
        if not secrets:
            secrets = ("",)  # Refused below: an empty file must not mean a cluster without secret.
    elif secret is not None:
        secrets = (str(secret),)
    else:
        secrets = ()
    if any(len(secret) < _MIN_SECRET_CHARS for secret in secrets):
        raise InvalidRequest(
            f"storm.secret has fewer than {_MIN_SECRET_CHARS} characters: make one with "
            "`openssl rand -hex 32`"
        )
    return secrets


def _derive(secret: str, purpose: str) -> bytes:
    """32 bytes that follow from a secret, and do not reveal it."""
    return hmac.new(secret.encode(), f"storm-dagster {purpose}".encode(), hashlib.sha256).digest()


def zookeeper_payload(conf: Any) -> str | None:
    """Lines ``user:password`` for ZooKeeper; ``None`` without any.

    They are ``storm.zookeeper.auth.payload``, else a line derived from each secret, then those of
    ``storm.zookeeper.auth.file``. The user of the first line owns the nodes that this process
    creates; it authenticates with all lines. :class:`InvalidRequest` if the file alone has to name
    a user and is empty: the nodes would be open to every user of ZooKeeper.
    """
    payload = conf.get("storm.zookeeper.auth.payload")
    if payload:
        return payload
    lines = [f"storm:{_derive(secret, 'zookeeper').hex()}" for secret in _secrets_of(conf)]
    file = conf.get("storm.zookeeper.auth.file")
    if file:
        text = read_private_file(Path(file).expanduser(), "storm.zookeeper.auth.file")
        lines += text.splitlines()
        if not lines:
            raise InvalidRequest(
                f"storm.zookeeper.auth.file {file} is empty: write a line user:password into it, "
                "or remove the key"
            )
    return "\n".join(lines) or None


def zookeeper_tls(conf: Any) -> ssl.SSLContext | None:
    """TLS context for ZooKeeper by ``storm.zookeeper.ssl.*``.

    ``None`` without TLS.
    """
    if not conf.get("storm.zookeeper.ssl.enable"):
        return None
    truststore_key = "storm.zookeeper.ssl.truststore.path"
    keystore_key = "storm.zookeeper.ssl.keystore.path"
    if not conf.get(truststore_key):
        raise InvalidRequest(
            f"storm.zookeeper.ssl.enable needs {truststore_key}: name the PEM certificates of the "
            "authority of ZooKeeper's servers"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = bool(conf.get("storm.zookeeper.ssl.hostnameVerification", True))
    loaded_key = truststore_key
    try:
        context.load_verify_locations(conf[truststore_key])
        if conf.get(keystore_key):
            loaded_key = keystore_key
            # With an empty password, OpenSSL does not ask for one at the terminal.
            password = conf.get("storm.zookeeper.ssl.keystore.password") or ""
            context.load_cert_chain(conf[keystore_key], password=password)
    except OSError as error:
        raise InvalidRequest(
            f"{loaded_key} {conf[loaded_key]} cannot be used ({error.strerror or error}): name a "
            "PEM file that this user may read (a keystore holds certificate and key, and its "
            "password is in .keystore.password)"
        ) from None
    return context


@dataclass(frozen=True)
class Security:
    """Secret and certificates of a process. Its ``repr`` holds no secret."""

    secret: str | None = field(default=None, repr=False)
    """Secret that this process uses; ``None`` without one."""
    cert: str | None = None
    """Path of the PEM certificate; ``None`` without TLS, as ``key``."""
    key: str | None = None
    """Path of its private key."""
    ca: str | None = None
    """Path of the authority's certificate; a client may have it without its own certificate."""
    other_secrets: tuple[str, ...] = field(default=(), repr=False)
    """Secrets that are valid, too, while the secret is changed."""
    servers: TrustedServers = field(default_factory=TrustedServers)
    """Servers that this process sends to without TLS."""

    @staticmethod
    def of(conf: Any) -> "Security":
        """Read ``storm.secret``, ``storm.secret.file``, ``storm.tls.*``, ``storm.security.*``.

        Raises :class:`InvalidRequest` for a secret that is short, given twice, or readable by
        others, and for TLS files that do not belong together.
        """
        secret = None
        other_secrets: tuple[str, ...] = ()
        secrets = _secrets_of(conf)
        if secrets:
            secret = secrets[0]
            other_secrets = secrets[1:]
        cert = conf.get("storm.tls.cert")
        key = conf.get("storm.tls.key")
        ca = conf.get("storm.tls.ca")
        if bool(cert) != bool(key):
            raise InvalidRequest("storm.tls.cert and storm.tls.key go together: set both or none")
        if cert and not ca:
            raise InvalidRequest(
                "storm.tls.cert needs storm.tls.ca, the authority by which daemons and clients "
                "know each other: set it"
            )
        servers = TrustedServers.of(conf)
        security = Security(secret, cert or None, key or None, ca or None, other_secrets, servers)
        if security.tls:
            # Only to check the files.
            security.server_context()
        return security

    @property
    def tls(self) -> bool:
        """True if services use TLS."""
        return self.cert is not None

    @property
    def configured(self) -> bool:
        """True if clients must authenticate."""
        return self.secret is not None or self.tls

    @property
    def scheme(self) -> str:
        """``http`` or ``https``."""
        return "https" if self.tls else "http"

    @property
    def http_needs_certificate(self) -> bool:
        """True if the HTTP service refuses clients without a certificate.

        This is so with TLS and without a secret.
        """
        return self.tls and self.secret is None

    def derived(self, purpose: str, number: int = 0) -> bytes:
        """32 bytes for one purpose, derived from the secret of that number.

        They do not reveal the secret.
        """
        assert self.secrets, "a key is derived from a secret, and none is configured"
        return _derive(self.secrets[number], purpose)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Secrets that authenticate a client.

        This process uses the first one.
        """
        if self.secret is None:
            return ()
        return (self.secret, *self.other_secrets)

    def client_options(self, *, plain: bool = False) -> dict[str, Any]:
        """Keyword arguments for one HTTP client of the cluster.

        They set signatures, no proxy, and a transport that sends in clear to trusted servers alone
        and checks certificates. A ``plain`` client, for ``http://`` only, trusts no authority, and
        is ready 50 ms sooner.
        """
        if self.ca is not None:
            context = self.client_context()
        elif plain:
            # Without this empty context, httpx would load the authorities itself.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        else:
            context = public_authorities()
        # Addresses of the cluster never go through a proxy of the environment.
        options: dict[str, Any] = {"trust_env": False, "transport": self.transport(context)}
        if self.secret is not None:
            options["auth"] = signer(self.secret, tls=self.ca is not None)
        return options

    def transport(self, context: ssl.SSLContext, *, signed: bool = True) -> "CheckedTransport":
        """Transport of one HTTP client, whose connections in clear go to trusted servers alone.

        ``context`` is that of ``https``; ``signed`` is false for a client that sends credentials
        which a server could use.
        """
        # Not at the top: most workers send no request.
        from storm_dagster.security.checked_http import CheckedTransport

        needs_proof = self.secret is not None or self.servers.needs_proof
        servers = replace(self.servers, needs_proof=needs_proof)
        return CheckedTransport(servers, context, signed=signed)

    def server_context(self, *, client_certificate: bool = True) -> ssl.SSLContext:
        """TLS context of a server.

        Clients must present a certificate of ``storm.tls.ca`` unless it is optional.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.sslobject_class = _AuditedObject
        context.sslsocket_class = _AuditedSocket
        self.load_into(context)
        context.verify_mode = ssl.CERT_REQUIRED if client_certificate else ssl.CERT_OPTIONAL
        return context

    def client_context(self) -> ssl.SSLContext:
        """TLS context of a client.

        It presents the certificate of this process. Servers are checked by ``storm.tls.ca`` and
        their name.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.load_into(context)
        return context

    def load_into(self, context: ssl.SSLContext) -> None:
        """Load the certificate of this process and the cluster's authority into ``context``.

        Those that are not configured are left out. Raises :class:`InvalidRequest` for files that
        cannot be used, or a key that others may read.
        """
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            if self.cert is not None and self.key is not None:
                _refuse_shared_key(self.key)
                context.load_cert_chain(self.cert, self.key)
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as error:
            raise InvalidRequest(
                f"storm.tls.cert, .key or .ca cannot be used ({error}): name PEM files that belong "
                "together"
            ) from None


def _audit_class(kind: Any) -> Any:
    """Make a subclass of TLS ends that logs a failed handshake.

    Servers do not log it.
    """

    def do_handshake(self: Any, *block: bool) -> None:
        try:
            kind.do_handshake(self, *block)
        except ssl.SSLError as error:
            if not isinstance(error, ssl.SSLWantReadError | ssl.SSLWantWriteError):
                _log.warning("a TLS client was refused: %s", error)
            raise

    return type(f"_Audited{kind.__name__}", (kind,), {"do_handshake": do_handshake})


_AuditedObject = _audit_class(ssl.SSLObject)
"""TLS ends of asyncio servers."""
_AuditedSocket = _audit_class(ssl.SSLSocket)
"""TLS ends of blocking servers."""


def _refuse_shared_key(path: str) -> None:
    """Raise :class:`InvalidRequest` for a key that other users may read."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise Unavailable(f"storm.tls.key {path} cannot be read: {error.strerror}") from None
    refuse_shared_file(Path(path), status, "storm.tls.key")
