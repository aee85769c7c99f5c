"""Proof of the cluster's secret without sending it: signed requests, and tokens for whoever cannot
sign.

A signature covers method, path with query, host, body, what headers say of it, time and a number
that is used once. A token names its scope and when it expires. Whoever listens to either learns
nothing of the secret, and cannot change what was asked.
"""

import base64
import hashlib
import hmac
import re
import secrets as random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from storm_dagster.model.errors import InvalidRequest, NotAuthenticated

Scope = Literal["metrics", "read", "operate", "admin"]
"""``metrics``: ``/metrics`` alone; ``read``: looking at topologies and the cluster; ``operate``:
submitting and changing topologies, too; ``admin``: everything.
"""
SCOPES: tuple[Scope, ...] = get_args(Scope)

_SKEW_SECS = 120
_MOST_NONCES = 1_000_000
_SIGNATURE = re.compile(
    r"Storm (?P<time>\d{1,12})\.(?P<nonce>[0-9a-f]{32})\.(?P<body>[0-9a-f]{64})\.(?P<mac>[0-9a-f]{64})"
)
_TOKEN = re.compile(
    r"sdt\.(?P<claims>(?P<scope>[a-z]+)\.(?P<expires>\d{1,12})\.(?P<id>[0-9a-f]{8}))\.(?P<mac>[0-9a-f]{64})"
)


@dataclass(frozen=True)
class RequestHead:
    """What a request asks for, as it stands in its head."""

    method: str
    host: str
    path: str
    """Percent-encoded, with the query."""
    about: str = ""
    """Of :func:`about_content`."""


def about_content(headers: Iterable[tuple[str, str]]) -> str:
    """What headers say of a content and of who sends it, ``X-Content-*`` and ``X-Storm-*``, as a
    signature covers it.
    """
    named = ((name.lower(), value) for name, value in headers)
    return "\n".join(
        sorted(
            f"{name}: {value}"
            for name, value in named
            if name.startswith(("x-content-", "x-storm-"))
        )
    )


def body_hash(body: bytes) -> str:
    """Hash of a whole body for a signature."""
    return hashlib.sha256(body).hexdigest()


def _mac(secret: str, purpose: str, *parts: str) -> str:
    # A length before each part: no two requests have the same text.
    text = "".join(f"{len(part)}:{part}" for part in (purpose, *parts))
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def sign(secret: str, target: RequestHead, body: str, now: float | None = None) -> str:
    """The header ``Authorization`` of a request; ``body`` is the :func:`body_hash` of what is
    sent.
    """
    when, nonce = str(int(time.time() if now is None else now)), random.token_hex(16)
    mac = _mac(
        secret, "request", target.method, target.host, target.path, target.about, body, when, nonce
    )
    return f"Storm {when}.{nonce}.{body}.{mac}"


def signer(secret: str, *, tls: bool) -> Callable[[Any], Any]:
    """The ``auth`` of an httpx client. ``/healthz`` is asked without; with ``tls`` nothing is sent
    in the clear.

    A request that has the header already keeps it. Of a body that is sent as it is made,
    ``X-Content-SHA256`` is signed. :class:`InvalidRequest` for ``http`` in a cluster with TLS, and
    for such a body without that header.
    """

    def authenticate(request: Any) -> Any:
        if tls and request.url.scheme != "https":
            raise InvalidRequest(
                f"{request.url.copy_with(query=None)} is not https, and this cluster has storm.tls.*"
            )
        if request.url.path != "/healthz" and "Authorization" not in request.headers:
            path, about = (
                request.url.raw_path.decode("ascii"),
                about_content(request.headers.items()),
            )
            target = RequestHead(request.method, request.headers["Host"], path, about)
            try:
                body = body_hash(request.content)
            except RuntimeError as error:  # Not read: it is sent as it is made.
                body = request.headers.get("X-Content-SHA256")
                if body is None:
                    raise InvalidRequest(
                        "a body that is sent in parts needs X-Content-SHA256, its hash"
                    ) from error
            request.headers["Authorization"] = sign(secret, target, body)
        return request

    return authenticate


class Verifier:
    """Checks signatures; one for each service, safe for threads."""

    def __init__(self, secrets: Sequence[str]) -> None:
        self._secrets = secrets
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._former: set[str] = set()
        self._turned = 0.0

    def check(self, header: str, target: RequestHead, now: float | None = None) -> str:
        """The hash that the body must have; :class:`NotAuthenticated` for any signature that does
        not count.
        """
        now = time.time() if now is None else now
        found = _SIGNATURE.fullmatch(header)
        if found is None:
            raise NotAuthenticated(
                "the signature of the request is damaged: use a client of this release"
            )
        when, nonce, body, mac = found["time"], found["nonce"], found["body"], found["mac"]
        parts = (target.method, target.host, target.path, target.about, body, when, nonce)
        if not any(
            hmac.compare_digest(_mac(secret, "request", *parts), mac) for secret in self._secrets
        ):
            raise NotAuthenticated(
                "the request is signed with another secret, or was changed on its way: compare storm.secret"
            )
        if abs(int(when) - now) > _SKEW_SECS:
            raise NotAuthenticated(
                f"the request was signed {int(when) - now:+.0f} s from now, at most {_SKEW_SECS} s are allowed: set the clocks"
            )
        if not self._is_first(nonce, now):
            raise NotAuthenticated(
                "the request was seen before: send it again with a new signature"
            )
        return body

    def _is_first(self, nonce: str, now: float) -> bool:
        with self._lock:
            # A signature counts for twice the skew: what is older than that is forgotten in two
            # steps.
            if abs(now - self._turned) > 2 * _SKEW_SECS or len(self._seen) >= _MOST_NONCES:
                self._seen, self._former, self._turned = set(), self._seen, now
            if nonce in self._seen or nonce in self._former:
                return False
            self._seen.add(nonce)
            return True


def make_token(secret: str, scope: Scope, secs: float, now: float | None = None) -> str:
    """A token that counts for ``secs`` seconds; for ``Authorization: Bearer``, or as the password
    of Basic.
    """
    claims = f"{scope}.{int((time.time() if now is None else now) + secs)}.{random.token_hex(4)}"
    return f"sdt.{claims}.{_mac(secret, 'token', claims)}"


def read_token(secrets: Sequence[str], token: str, now: float | None = None) -> tuple[Scope, str]:
    """Scope and id of a token; :class:`NotAuthenticated` when it is none, or has expired."""
    found = _TOKEN.fullmatch(token)
    scope: Scope | None = next(
        (known for known in SCOPES if found and known == found["scope"]), None
    )
    if found is None or scope is None:
        raise NotAuthenticated(
            "this is no token of the cluster: make one with `storm-dagster token create`"
        )
    if not any(
        hmac.compare_digest(_mac(secret, "token", found["claims"]), found["mac"])
        for secret in secrets
    ):
        raise NotAuthenticated(
            "the token was made with another secret: make one with `storm-dagster token create`"
        )
    if int(found["expires"]) < (time.time() if now is None else now):
        raise NotAuthenticated("the token has expired: make one with `storm-dagster token create`")
    return scope, found["id"]


def shown_token(header: str) -> str | None:
    """The token in a header ``Authorization``, ``None`` for another scheme."""
    scheme, _, rest = header.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode("utf-8").partition(":")[2]
        except ValueError:
            return ""
    return None
