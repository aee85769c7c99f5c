"""Security of a cluster: its secret and certificates, and the settings of servers and clients.

Nothing is configured by default, and then everything listens on loopback only (``exposure``).
``storm.secret`` (or ``storm.secret.file``, in which a second line is a secret that counts, too,
while it is changed) is what every daemon, run and client of a cluster knows; whoever signs with it
is the cluster itself. ``storm.tls.*`` names a certificate, its key and the authority that both
sides trust.
"""

import functools
import hashlib
import hmac
import logging
import os
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storm_dagster.host.files import read_private_file
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.security.signing import signer

_log = logging.getLogger(__name__)
_SHORTEST_SECRET = 16
SILENT_SECS = 5.0
"""Silence of a nimbus after which a read of a blob is tried again: the reply, or the rest of it,
may be lost.
"""


@functools.cache
def public_authorities() -> ssl.SSLContext:
    """TLS context of a client that trusts the authorities of the web. To load them takes 50 ms:
    once in a process.
    """
    import httpx

    return httpx.create_ssl_context(trust_env=False)


def _secrets_of(conf: Any) -> tuple[str, ...]:
    secret, file = conf.get("storm.secret"), conf.get("storm.secret.file")
    if secret and file:
        raise InvalidRequest("storm.secret and storm.secret.file are both set: keep the file")
    if file:
        lines = read_private_file(Path(file).expanduser(), "storm.secret.file").splitlines()
        found = tuple(line.strip() for line in lines if line.strip()) or ("",)
    else:
        found = () if secret is None else (str(secret),)
    if any(len(one) < _SHORTEST_SECRET for one in found):
        raise InvalidRequest(
            f"storm.secret has fewer than {_SHORTEST_SECRET} characters: make one with `openssl rand -hex 32`"
        )
    return found


def _derived(secret: str, purpose: str) -> bytes:
    return hmac.new(secret.encode(), f"storm-dagster {purpose}".encode(), hashlib.sha256).digest()


def zookeeper_payload(conf: Any) -> str | None:
    """User and password in ZooKeeper: ``storm.zookeeper.auth.payload``, else derived from each
    secret, then of the file.

    The first line owns what is created, all are shown.
    """
    if given := conf.get("storm.zookeeper.auth.payload"):
        return given
    lines = [f"storm:{_derived(one, 'zookeeper').hex()}" for one in _secrets_of(conf)]
    if file := conf.get("storm.zookeeper.auth.file"):
        lines += read_private_file(
            Path(file).expanduser(), "storm.zookeeper.auth.file"
        ).splitlines()
    return "\n".join(lines) or None


def zookeeper_tls(conf: Any) -> ssl.SSLContext | None:
    """TLS context for ZooKeeper by ``storm.zookeeper.ssl.*``; ``None`` where it is not enabled."""
    if not conf.get("storm.zookeeper.ssl.enable"):
        return None
    truststore, keystore = (
        "storm.zookeeper.ssl.truststore.path",
        "storm.zookeeper.ssl.keystore.path",
    )
    if not conf.get(truststore):
        raise InvalidRequest(
            f"storm.zookeeper.ssl.enable needs {truststore}: name the PEM certificates of the authority of ZooKeeper's servers"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = bool(conf.get("storm.zookeeper.ssl.hostnameVerification", True))
    loading = truststore
    try:
        context.load_verify_locations(conf[truststore])
        if conf.get(keystore):
            loading = keystore
            # With an empty password, OpenSSL does not ask for one at the terminal.
            context.load_cert_chain(
                conf[keystore], password=conf.get("storm.zookeeper.ssl.keystore.password") or ""
            )
    except OSError as error:
        raise InvalidRequest(
            f"{loading} {conf[loading]} cannot be used ({error.strerror or error}): name a PEM file that this user may "
            "read (a keystore holds certificate and key, and its password is in .keystore.password)"
        ) from None
    return context


@dataclass(frozen=True)
class Security:
    """Secret and certificates of a process. Its ``repr`` holds no secret."""

    secret: str | None = field(default=None, repr=False)
    cert: str | None = None
    key: str | None = None
    ca: str | None = None
    others: tuple[str, ...] = field(default=(), repr=False)
    """Secrets that count beside it while the secret is changed."""

    @staticmethod
    def of(conf: Any) -> "Security":
        """By the keys ``storm.secret``, ``storm.secret.file`` and ``storm.tls.*`` of a conf.

        Raises :class:`InvalidRequest` for a secret that is short, given twice, or readable by
        others, and for TLS files that do not belong together.
        """
        secret, *others = _secrets_of(conf) or (None,)
        cert, key, ca = (conf.get(f"storm.tls.{part}") for part in ("cert", "key", "ca"))
        if bool(cert) != bool(key):
            raise InvalidRequest("storm.tls.cert and storm.tls.key go together: set both or none")
        if cert and not ca:
            raise InvalidRequest(
                "storm.tls.cert needs storm.tls.ca, the authority by which daemons and clients know each other: set it"
            )
        security = Security(secret, cert or None, key or None, ca or None, tuple(others))
        if security.tls:
            security.server_context()
        return security

    @property
    def tls(self) -> bool:
        """Whether services speak TLS."""
        return self.cert is not None

    @property
    def configured(self) -> bool:
        """Whether clients must authenticate."""
        return self.secret is not None or self.tls

    @property
    def scheme(self) -> str:
        """``http`` or ``https``."""
        return "https" if self.tls else "http"

    @property
    def http_needs_certificate(self) -> bool:
        """Whether the HTTP service refuses clients without a certificate: with TLS and no
        secret.
        """
        return self.tls and self.secret is None

    def derived(self, purpose: str, number: int = 0) -> bytes:
        """32 bytes for one purpose, derived from the secret (the one of that number), which they do
        not reveal.
        """
        assert self.secrets, "nothing is derived without a secret"
        return _derived(self.secrets[number], purpose)

    @property
    def secrets(self) -> tuple[str, ...]:
        """The secrets that prove a client, the one that we use first."""
        return () if self.secret is None else (self.secret, *self.others)

    def client_options(self, *, plain: bool = False) -> dict[str, Any]:
        """Keyword arguments for an HTTP client of the cluster: signatures, certificates, no proxy.

        A ``plain`` one, for ``http://`` only, trusts nobody, and is there 50 ms sooner.
        """
        options: dict[str, Any] = {"trust_env": False}
        if self.secret is not None:
            options["auth"] = signer(self.secret, tls=self.ca is not None)
        nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if plain else None
        options["verify"] = (
            self.client_context() if self.ca is not None else nobody or public_authorities()
        )
        return options

    def server_context(self, *, client_certificate: bool = True) -> ssl.SSLContext:
        """TLS context of a server. Clients must show a certificate of ``storm.tls.ca`` unless it is
        optional.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.sslobject_class, context.sslsocket_class = _AuditedObject, _AuditedSocket
        self.load_into(context)
        context.verify_mode = ssl.CERT_REQUIRED if client_certificate else ssl.CERT_OPTIONAL
        return context

    def client_context(self) -> ssl.SSLContext:
        """TLS context of a client: servers are checked by ``storm.tls.ca`` and their name; it shows
        our certificate.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.load_into(context)
        return context

    def load_into(self, context: ssl.SSLContext) -> None:
        """Our certificate and the cluster's authority for a context."""
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            if self.cert is not None and self.key is not None:
                _refuse_shared_key(self.key)
                context.load_cert_chain(self.cert, self.key)
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as error:
            raise InvalidRequest(
                f"storm.tls.cert, .key or .ca cannot be used ({error}): name PEM files that belong together"
            ) from None


def _audited(kind: Any) -> Any:
    """That class of TLS ends, as one that reports a failed handshake: servers do not."""

    def do_handshake(self: Any, *block: bool) -> None:
        try:
            kind.do_handshake(self, *block)
        except ssl.SSLError as error:
            if not isinstance(error, ssl.SSLWantReadError | ssl.SSLWantWriteError):
                _log.warning("a TLS client was refused: %s", error)
            raise

    return type(f"_Audited{kind.__name__}", (kind,), {"do_handshake": do_handshake})


# Of asyncio servers, and of blocking ones.
_AuditedObject, _AuditedSocket = _audited(ssl.SSLObject), _audited(ssl.SSLSocket)


def _refuse_shared_key(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise Unavailable(f"storm.tls.key {path} cannot be read: {error.strerror}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidRequest(f"storm.tls.key {path} can be read by other users: chmod 600 {path}")
