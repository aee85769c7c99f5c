"""Proof of the cluster's secret: signed requests.

The secret itself is never sent. A signature covers method, path with query, host, body, the headers
about the body, time and a number that is used once. An eavesdropper cannot derive the secret from
it, and cannot change a request. Tokens, for clients that cannot sign, are in
:mod:`storm_dagster.security.access_tokens`.
"""

import hashlib
import hmac
import re
import secrets as random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from storm_dagster.model.errors import InvalidRequest, NotAuthenticated

OPEN_PATHS = frozenset({"/healthz", "/livez", "/readyz"})
"""Paths that need no proof: load balancers, kubelets and clients that search the leader read them.

Their documents name no topology.
"""
_SKEW_SECS = 120
"""Largest difference between the clocks of a client and a service."""
_MAX_NONCES = 1_000_000
"""Numbers in one of a verifier's two sets, which bounds its memory."""
_SIGNATURE = re.compile(
    r"Storm (?P<time>\d{1,12})\.(?P<nonce>[0-9a-f]{32})"
    r"\.(?P<body>[0-9a-f]{64})\.(?P<mac>[0-9a-f]{64})"
)


@dataclass(frozen=True)
class RequestHead:
    """Parts of a request's head that a signature covers."""

    method: str
    host: str
    path: str
    """Percent-encoded, with the query."""
    about: str = ""
    """Result of :func:`about_content`."""


def about_content(headers: Iterable[tuple[str, str]]) -> str:
    """Headers about the content and its sender, as they are signed.

    They are ``X-Content-*`` and ``X-Storm-*``.
    """
    lines: list[str] = []
    for name, value in headers:
        lower_name = name.lower()
        if lower_name.startswith(("x-content-", "x-storm-")):
            lines.append(f"{lower_name}: {value}")
    return "\n".join(sorted(lines))


def body_hash(body: bytes) -> str:
    """Hash of a whole body for a signature."""
    return hashlib.sha256(body).hexdigest()


def keyed_mac(secret: str, purpose: str, *parts: str) -> str:
    """HMAC-SHA256 of the parts, in hex; another ``purpose`` gives another one."""
    # A length before each part, so that no two requests have the same text.
    text = "".join(f"{len(part)}:{part}" for part in (purpose, *parts))
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def sign(secret: str, target: RequestHead, body: str, now: float | None = None) -> str:
    """Header ``Authorization`` of a request.

    ``body`` is the :func:`body_hash`.
    """
    signed_at = str(int(time.time() if now is None else now))
    nonce = random.token_hex(16)
    mac = _request_mac(secret, target, body, signed_at, nonce)
    return f"Storm {signed_at}.{nonce}.{body}.{mac}"


def _request_mac(secret: str, target: RequestHead, body: str, signed_at: str, nonce: str) -> str:
    head = (target.method, target.host, target.path, target.about)
    return keyed_mac(secret, "request", *head, body, signed_at, nonce)


def signer(secret: str, *, tls: bool) -> Callable[[Any], Any]:
    """The ``auth`` of an httpx client, which signs its requests.

    Health and probes (:data:`OPEN_PATHS`) are not signed, and a request that has the header already
    keeps it. For a streamed body, ``X-Content-SHA256`` is signed. Raises :class:`InvalidRequest`
    for ``http`` in a cluster with TLS, before any byte is sent, and for a streamed body without
    that header.
    """

    def authenticate(request: Any) -> Any:
        """Sign a request, and return it."""
        if tls and request.url.scheme != "https":
            raise InvalidRequest(
                f"{request.url.copy_with(query=None)} is not https, and this cluster has "
                "storm.tls.*"
            )
        if request.url.path not in OPEN_PATHS and "Authorization" not in request.headers:
            target = RequestHead(
                method=request.method,
                host=request.headers["Host"],
                path=request.url.raw_path.decode("ascii"),
                about=about_content(request.headers.items()),
            )
            try:
                body = body_hash(request.content)
            except RuntimeError as error:  # A streamed body, which has not been read.
                body = request.headers.get("X-Content-SHA256")
                if body is None:
                    raise InvalidRequest(
                        "a body that is sent in parts needs X-Content-SHA256, its hash"
                    ) from error
            request.headers["Authorization"] = sign(secret, target, body)
        return request

    return authenticate


class Verifier:
    """Verifier of signatures, one for each service. Thread-safe."""

    def __init__(self, secrets: Sequence[str]) -> None:
        self._secrets = secrets
        self._lock = threading.Lock()
        self._nonces: set[str] = set()
        """Numbers of the valid requests since :attr:`_set_began_at`."""
        self._former_nonces: set[str] = set()
        """Numbers of the set before."""
        self._set_began_at = 0.0
        """Epoch seconds."""

    def check(self, header: str, target: RequestHead, now: float | None = None) -> str:
        """Check a signature, and return the hash that the body must have.

        Raises :class:`NotAuthenticated` for a signature that is not valid.
        """
        now = time.time() if now is None else now
        match = _SIGNATURE.fullmatch(header)
        if match is None:
            raise NotAuthenticated(
                "the signature of the request is damaged: use a client of this release"
            )
        body = match["body"]
        nonce = match["nonce"]
        macs = [
            _request_mac(secret, target, body, match["time"], nonce) for secret in self._secrets
        ]
        if not is_among(match["mac"], macs):
            raise NotAuthenticated(
                "the request is signed with another secret, or was changed on its way: compare "
                "storm.secret"
            )
        skew_secs = int(match["time"]) - now
        if abs(skew_secs) > _SKEW_SECS:
            raise NotAuthenticated(
                f"the request was signed {skew_secs:+.0f} s from now, at most {_SKEW_SECS} s are "
                "allowed: set the clocks"
            )
        if not self._is_first(nonce, now):
            raise NotAuthenticated(
                "the request was seen before: send it again with a new signature"
            )
        return body

    def _is_first(self, nonce: str, now: float) -> bool:
        """Note the number of a request; false if it was noted before."""
        with self._lock:
            # A signature is valid for twice the skew: a number is dropped when the second set after
            # its own begins, and so is older than that, unless a set was full.
            set_secs = abs(now - self._set_began_at)
            if set_secs > 2 * _SKEW_SECS or len(self._nonces) >= _MAX_NONCES:
                self._former_nonces = self._nonces
                self._nonces = set()
                self._set_began_at = now
            if nonce in self._nonces or nonce in self._former_nonces:
                return False
            self._nonces.add(nonce)
            return True


def is_among(mac: str, valid_macs: Iterable[str]) -> bool:
    """True if the code is one of the valid ones.

    The comparison takes a time that does not depend on the characters.
    """
    # As bytes, because only they may be beyond ASCII.
    raw_mac = mac.encode("utf-8", "surrogatepass")
    return any(hmac.compare_digest(valid_mac.encode(), raw_mac) for valid_mac in valid_macs)
