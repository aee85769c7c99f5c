"""Authentication of every request of a secured cluster, before any route.

Without ``storm.secret`` and ``storm.tls.*`` the service admits every request, and listens on
loopback only. With the secret, requests are signed with it, or carry a token made of it
(``Authorization: Bearer``, or as the password of Basic, for browsers), which counts if the cluster
has a record of it. With TLS, a client certificate of the cluster's authority names its user by its
common name.

A request to act for another user (Storm's ``doAsUser``) is refused from every client, in a secured
cluster and in an open one.
"""

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import parse_qsl

from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from storm_dagster.core.access_tokens import TokenListing, check_access_token, token_caller
from storm_dagster.core.authorization import (
    CLUSTER,
    LIMITED_USER,
    REQUEST_USER,
    UNKNOWN_USER,
    Caller,
    Operation,
    authorize,
    is_admin,
)
from storm_dagster.http.responses import error_response, refuse_websocket
from storm_dagster.model.access_tokens import is_user_name
from storm_dagster.model.errors import NotAuthenticated, NotAuthorized, StormDagsterError
from storm_dagster.security.access_tokens import read_claims, token_of_header
from storm_dagster.security.settings import Security
from storm_dagster.security.signing import OPEN_PATHS, RequestHead, Verifier, about_content

_log = logging.getLogger(__name__)
_audit = logging.getLogger("storm_dagster.audit")

_WORKERS = re.compile(r"/v1/topologies/[^/]+/events")
"""Sent by workers, which have no secret: the route itself checks their start tokens."""
_EVENTS = re.compile(r"/v1/topologies/[^/]+/events(/taken)?")
"""Pulled and acknowledged by code locations: both need the right to change the topology."""
_TOPOLOGY = re.compile(
    r"(?:/v1)?/topologies/([^/]+)(/.*)?|/api/v1/topology/(?!summary$)([^/]+)(/.*)?"
)
"""Paths about one topology, whose name or id is group 1 or 3."""
_SUBMIT = re.compile(r"/v1/(submit|runs/[^/]+|uploads(/.*)?)")
"""Paths that a user who may submit needs."""
_LIST = frozenset({"/v1/topologies", "/v1/operations", "/api/v1/topology/summary", "/"})
"""Paths whose documents have only the topologies that their reader may see."""
_PAGE = re.compile(r"/|/hosts|/topologies/[^/]+(/placement|/graph\.svg)?")
"""Pages of nimbus, for which a browser prompts its user for a password."""
_STATIC = re.compile(r"/static/[a-z]+\.(css|js)")
"""The same for every cluster."""
_READ = re.compile(
    r"/metrics|/v1/(cluster|operations|problems|topologies(/.*)?|runs/[^/]+)"
    r"|/api/v1/(cluster|nimbus|supervisor|topology|owner-resources)(/.*)?"
)
"""Paths that a token of each scope but ``metrics`` may read, besides the pages."""
_TUPLES = re.compile(r"/v1/topologies/[^/]+/(dead-letters|state/.*)")
"""Paths of :data:`_READ` whose documents hold tuples, or what a component keeps of them."""
_CLUSTER_CONF = re.compile(r"/api/v1/cluster/configuration")
"""Paths of :data:`_READ` that show confs of the cluster, and so are for administrators."""
BASIC = 'Basic realm="storm_dagster", charset="UTF-8"'
"""Challenge to a browser."""
# Keys of a request's ``state``.
_STATE = "storm.caller"
"""The authenticated caller; missing if the cluster or the path is open."""
_BODY = "storm.body"
"""Hash of the body that a signed request announces."""
_CERTIFICATE = "storm.certificate"
"""User that the client's certificate names, or ``None``; of all requests of the connection."""

TopologyConf = Callable[[str], Mapping[str, Any] | None]
"""Conf of a running topology by name or id; ``None`` when there is none."""


def groups_of(user: str) -> frozenset[str]:
    """Groups of a user of this machine; empty for an unknown user.

    They come from library calls, never from a command.
    """
    import grp
    import pwd

    if not is_user_name(user):
        return frozenset()
    try:
        numbers = os.getgrouplist(user, pwd.getpwnam(user).pw_gid)
    except (KeyError, OSError):
        return frozenset()
    groups: set[str] = set()
    for number in numbers:
        with suppress(KeyError):
            groups.add(grp.getgrgid(number).gr_name)
    return frozenset(groups)


def certificate_state(transport: Any) -> dict[str, Any]:
    """State of a connection: the common name of the client's certificate.

    Empty for a connection without TLS.
    """
    link = transport.get_extra_info("ssl_object")
    return {} if link is None else {_CERTIFICATE: _common_name(link.getpeercert())}


def _common_name(certificate: Mapping[str, Any] | None) -> str | None:
    """The first common name that can be the name of a user."""
    if certificate is None:
        return None
    for attributes in certificate.get("subject", ()):
        for key, value in attributes:
            name = str(value)
            if key == "commonName" and is_user_name(name):
                return name
    return None


def operation_of(method: str, path: str) -> tuple[Operation, str | None]:
    """The operation of a request, and its topology if it is about one.

    Unknown requests are for administrators.
    """
    if method in ("GET", "HEAD") and path in _LIST:
        return "list", None
    if _SUBMIT.fullmatch(path):
        return "submit", None
    if match := _TOPOLOGY.fullmatch(path):
        return "topology", match[1] or match[3]
    return "admin", None


def allows(scope: str, method: str, path: str) -> bool:
    """True if a token of a scope other than ``admin`` permits the request."""
    if scope == "metrics":
        return method in ("GET", "HEAD") and path == "/metrics"
    if scope == "operate" and operation_of(method, path)[0] in ("submit", "topology"):
        return True
    if method not in ("GET", "HEAD") or _EVENTS.fullmatch(path) or _CLUSTER_CONF.fullmatch(path):
        return False
    if _TUPLES.fullmatch(path):
        return scope == "read:tuples"
    return bool(_READ.fullmatch(path) or _PAGE.fullmatch(path))


def may_do_all(scope: Scope, conf: Mapping[str, Any]) -> bool:
    """True if the caller is an administrator, or the cluster is open to all."""
    caller = scope.get("state", {}).get(_STATE)
    return caller is None or is_admin(caller, conf)


def _audited(send: Send, scope: Scope, caller: str) -> Send:
    """Wrap ``send`` to log a change when its response is a success."""
    if scope["method"] in ("GET", "HEAD", "OPTIONS"):
        return send

    async def watched(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] < 400:
            host = (scope.get("client") or ("?",))[0]
            _audit.info(
                "%s at %s: %s %r: %d",
                caller,
                host,
                scope["method"],
                scope["path"][:200],
                message["status"],
            )
        await send(message)

    return watched


def _is_open(method: str, path: str) -> bool:
    """True for a request that needs no authentication in a secured cluster."""
    return path in OPEN_PATHS or bool(
        _STATIC.fullmatch(path) or (method == "POST" and _WORKERS.fullmatch(path))
    )


class TokenSource(Protocol):
    """Source of the list of tokens."""

    def listing(self) -> TokenListing | None:
        """The list as it was read last, without waiting; ``None`` before the first read."""
        ...

    def refresh(self, token_id: str) -> TokenListing | None:
        """The list, read again for a token that it lacks if its source can be reached; may wait."""
        ...


class NoTokens:
    """Source of a service that has no list: only derived tokens count."""

    def listing(self) -> TokenListing | None:
        """No list."""
        return None

    def refresh(self, token_id: str) -> TokenListing | None:
        """No list."""
        return None


@dataclass(eq=False, repr=False)
class Authentication:
    """Middleware that admits only authenticated and authorized callers."""

    _app: ASGIApp
    _security: Security
    _conf: Mapping[str, Any]
    """Conf of the daemon, which names the administrators and the users."""
    _topology_conf: TopologyConf
    challenge: str = "Bearer"
    """Challenge of a refusal, except for pages, which have ``BASIC``."""
    administrators_only: bool = False
    """True if no path is open, and every caller must be an administrator."""
    tokens: TokenSource = field(default_factory=NoTokens)
    """Tokens that are recorded, by which a token is accepted."""

    def __post_init__(self) -> None:
        self._verifier = Verifier(self._security.secrets) if self._security.secrets else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the handshake of a WebSocket, which is a GET."""
        if scope["type"] == "websocket":
            scope = {**scope, "method": "GET"}
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            caller = await self._admit(scope)
        except StormDagsterError as error:
            await self._refuse(error, scope, receive, send)
            return
        if caller is None:
            # Events of workers are not changes for the audit log.
            events = scope["type"] != "http" or _WORKERS.fullmatch(scope["path"])
            await self._app(scope, receive, send if events else _audited(send, scope, UNKNOWN_USER))
            return
        state = scope.setdefault("state", {})
        state[_STATE] = caller
        await self._app(
            scope, _signed_body(receive, state.get(_BODY)), _audited(send, scope, f"user {caller}")
        )

    async def _admit(self, scope: Scope) -> Caller | None:
        """The authenticated and authorized caller.

        ``None`` where the cluster or the path is open to all.
        """
        is_open = not self.administrators_only and _is_open(scope["method"], scope["path"])
        if is_open or not self._security.configured:
            _refuse_impersonation(scope, None)
            REQUEST_USER.set("")
            return None
        caller = await self._identify(scope)
        _refuse_impersonation(scope, caller)
        limited = not is_admin(caller, self._conf)
        # Also for an administrator: a pipelined request begins with the values of the request
        # before it.
        LIMITED_USER.set(caller.name if limited else None)
        REQUEST_USER.set(caller.name)
        if limited:
            await run_in_threadpool(self._authorize, caller, scope)
        return caller

    async def _identify(self, scope: Scope) -> Caller:
        """The caller by the signature, else the token, else the client's certificate.

        The hash of a signed body is put into the request's state. Raises :class:`NotAuthenticated`
        without any of them, and for a wrong signature or token; :class:`Unavailable` for a token
        while the list of tokens cannot be read.
        """
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = str((scope.get("client") or ("",))[0])
        certificate = (scope.get("state") or {}).get(_CERTIFICATE)
        authorization = headers.get(b"authorization", "")
        if self._verifier is not None and authorization.startswith("Storm "):
            query = scope["query_string"].decode()
            path = scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
            about = about_content(
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in scope["headers"]
            )
            target = RequestHead(scope["method"], headers.get(b"host", ""), path, about)
            scope.setdefault("state", {})[_BODY] = self._verifier.check(authorization, target)
            return CLUSTER
        token = token_of_header(authorization)
        if self._verifier is not None and token is not None:
            return await self._identify_token(token, host)
        if certificate is not None and self._security.ca is not None:
            return Caller(certificate, host=host, groups=groups_of(certificate))
        raise NotAuthenticated(
            "this cluster needs authentication: sign with its secret (storm.secret.file of the "
            "client's conf), send a "
            "token (`storm-dagster token create`; Authorization: Bearer), or show a client "
            "certificate (storm.tls.cert)"
        )

    async def _identify_token(self, token: str, host: str) -> Caller:
        """The caller with a token that counts."""
        now = time.time()
        claims = read_claims(self._security.secrets, token, now)
        listing = self.tokens.listing()
        if claims.kind == "recorded" and (listing is None or claims.id not in listing.records):
            # A token that was made a moment ago counts at once.
            listing = await run_in_threadpool(self.tokens.refresh, claims.id)
        check_access_token(claims, listing, now)
        groups = groups_of(claims.user) if claims.user else frozenset[str]()
        return token_caller(claims, host=host, groups=groups)

    def _authorize(self, caller: Caller, scope: Scope) -> None:
        """Raise :class:`NotAuthorized` if the caller is not permitted to send this request.

        Runs in a thread, since it may have to read the topology's conf.
        """
        if self.administrators_only:
            raise NotAuthorized(
                f"{caller} is not permitted to do this: it is for administrators "
                "(`storm-dagster token create --scope admin`)"
            )
        if caller.scope is not None:
            if not allows(caller.scope, scope["method"], scope["path"]):
                raise NotAuthorized(
                    f"{caller} has the scope {caller.scope!r}, which does not cover this: make "
                    "another token"
                )
            # The metrics are for administrators and for tokens of that scope alone.
            if caller.unowned or caller.scope == "metrics":
                return
        operation, topology = operation_of(scope["method"], scope["path"])
        topology_conf = None
        if topology is not None:
            topology_conf = self._topology_conf(topology)
        authorize(caller, operation, self._conf, topology_conf)

    async def _refuse(
        self, error: StormDagsterError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Log the refusal, and send the error document; a WebSocket gets only the status 403."""
        host = (scope.get("client") or ("?",))[0]
        _audit.warning(
            "refused %s %r of %s: %s", scope["method"], scope["path"][:200], host, error.message
        )
        if scope["type"] == "websocket":
            await refuse_websocket(send)
            return
        answer = error_response(error)
        if isinstance(error, NotAuthenticated):
            browser = _PAGE.fullmatch(scope["path"]) is not None
            answer.headers["WWW-Authenticate"] = BASIC if browser else self.challenge
        await answer(scope, receive, send)


def _signed_body(receive: Receive, expected: str | None) -> Receive:
    """Wrap ``receive`` to check the body against the hash that was signed.

    A body with another hash raises :class:`NotAuthenticated` before the application gets its end.
    """
    if expected is None:
        return receive
    hashed = hashlib.sha256()

    async def checked() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            hashed.update(message.get("body", b""))
            if not message.get("more_body") and hashed.hexdigest() != expected:
                raise NotAuthenticated(
                    "the body of the request is not the one that was signed: send it again"
                )
        return message

    return checked


def _refuse_impersonation(scope: Scope, caller: Caller | None) -> None:
    """Raise :class:`NotAuthorized` for a request with ``doAsUser``."""
    user = _user_to_act_for(scope)
    if user is None:
        return
    client = "a client" if caller is None else f"user {caller}"
    raise NotAuthorized(
        f"doAsUser is refused: {client} cannot act for {user!r:.100}; send the request without "
        "doAsUser, with a certificate of that user"
    )


def _user_to_act_for(scope: Scope) -> str | None:
    """The user in Storm's ``doAsUser``; ``None`` without a value."""
    for name, value in scope["headers"]:
        if name == b"doasuser" and value:
            return value.decode("latin-1")
    for name, value in parse_qsl(scope.get("query_string", b"").decode("latin-1")):
        if name == "doAsUser":
            return value
    return None
