"""Authentication of every request of a secured cluster, before any route.

Without ``storm.secret`` and ``storm.tls.*`` nobody is asked anything, and the service is on loopback. With the
secret, requests carry it (``Authorization: Bearer``, or as the password of Basic, for browsers). With TLS, a
client certificate of the cluster's authority names its user by its common name.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from storm_dagster.core.authorization import (
    CLUSTER,
    Caller,
    Operation,
    authorize,
    impersonate,
    is_admin,
)
from storm_dagster.model.errors import NotAuthenticated, NotAuthorized, StormDagsterError
from storm_dagster.model.security import Security

_log = logging.getLogger(__name__)
_audit = logging.getLogger("storm_dagster.audit")

_OPEN = frozenset({"/healthz"})
"""Asked by load balancers and by clients that search the leader; contains nothing about topologies."""
_WORKERS = re.compile(r"/v1/topologies/[^/]+/events")
"""Sent by workers, which have no secret: the route itself knows them by their start tokens."""
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,127}")
_TOPOLOGY = re.compile(r"/v1/topologies/([^/]+)(/.*)?|/api/v1/topology/(?!summary$)([^/]+)(/.*)?")
_SUBMIT = re.compile(r"/v1/(submit|runs/[^/]+|uploads(/.*)?)")
_LIST = frozenset({"/v1/topologies", "/api/v1/topology/summary"})
_STATE = "storm.caller"
_CERTIFICATE = "storm.certificate"

TopologyConf = Callable[[str], Mapping[str, Any] | None]
"""Conf of a running topology by name or id; ``None`` when there is none."""


def groups_of(user: str) -> frozenset[str]:
    """Groups of a user of this machine, by library calls and never by a command; empty for an unknown user."""
    import grp
    import pwd

    if not _USER.fullmatch(user):
        return frozenset()
    try:
        entry = pwd.getpwnam(user)
        numbers = os.getgrouplist(user, entry.pw_gid)
    except (KeyError, OSError):
        return frozenset()
    found: set[str] = set()
    for number in numbers:
        try:
            found.add(grp.getgrgid(number).gr_name)
        except KeyError:
            continue
    return frozenset(found)


def certificate_state(transport: Any) -> dict[str, Any]:
    """State of a connection for the application: the common name of the client's certificate."""
    link = transport.get_extra_info("ssl_object")
    return {} if link is None else {_CERTIFICATE: _common_name(link.getpeercert())}


def _common_name(certificate: Mapping[str, Any] | None) -> str | None:
    for part in (certificate or {}).get("subject", ()):
        for key, value in part:
            if key == "commonName" and _USER.fullmatch(str(value)):
                return str(value)
    return None


def operation_of(method: str, path: str) -> tuple[Operation, str | None]:
    """The operation of a request and its topology. Unknown requests are for administrators."""
    if method in ("GET", "HEAD") and path in _LIST:
        return "list", None
    if _SUBMIT.fullmatch(path):
        return "submit", None
    match = _TOPOLOGY.fullmatch(path)
    if match:
        return "topology", match[1] or match[3]
    return "admin", None


class Authentication:
    """Middleware that admits only requests of authenticated and authorized callers."""

    def __init__(
        self,
        app: ASGIApp,
        security: Security,
        conf: Mapping[str, Any],
        topology_conf: TopologyConf,
        groups: Callable[[str], frozenset[str]] = groups_of,
    ) -> None:
        self._app = app
        self._security = security
        self._conf = conf
        self._topology_conf = topology_conf
        self._groups = groups

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if (
            scope["type"] != "http"
            or not self._security.configured
            or scope["path"] in _OPEN
            or (scope["method"] == "POST" and _WORKERS.fullmatch(scope["path"]))
        ):
            await self._app(scope, receive, send)
            return
        try:
            caller = self._identify(scope)
            if not is_admin(caller, self._conf):
                await run_in_threadpool(self._authorize, caller, scope)
        except StormDagsterError as error:
            await self._refuse(error, scope, receive, send)
            return
        scope.setdefault("state", {})[_STATE] = caller
        await self._app(scope, receive, send)

    def _identify(self, scope: Scope) -> Caller:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = str((scope.get("client") or ("",))[0])
        certificate = (scope.get("state") or {}).get(_CERTIFICATE)
        if self._security.matches(_shown_secret(headers.get(b"authorization", ""))):
            caller = CLUSTER
        elif certificate is not None and self._security.ca is not None:
            caller = Caller(certificate, host=host, groups=self._groups(certificate))
        else:
            raise NotAuthenticated(
                "this cluster needs authentication: send its secret (storm.secret.file of the client's conf; "
                "Authorization: Bearer), or show a client certificate (storm.tls.cert)"
            )
        wanted = headers.get(b"doasuser") or _do_as(scope)
        if not wanted:
            return caller
        if not _USER.fullmatch(wanted):
            raise NotAuthorized(f"{wanted!r:.100} is not a user name")
        acting = impersonate(caller, wanted, self._conf, self._groups)
        _audit.info("%r acts for %r: %s %r", caller.name, wanted, scope["method"], scope["path"])
        return acting

    def _authorize(self, caller: Caller, scope: Scope) -> None:
        operation, topology = operation_of(scope["method"], scope["path"])
        conf = None if topology is None else self._topology_conf(topology)
        authorize(caller, operation, self._conf, conf)

    async def _refuse(self, error: StormDagsterError, scope: Scope, receive: Receive, send: Send) -> None:
        _audit.warning(
            "refused %s %r of %s: %s",
            scope["method"],
            scope["path"][:200],
            (scope.get("client") or ("?",))[0],
            error.message,
        )
        headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, NotAuthenticated) else None
        answer = JSONResponse(error.to_document(), status_code=error.http_status, headers=headers)
        await answer(scope, receive, send)


def _shown_secret(header: str) -> str:
    scheme, _, rest = header.partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode("utf-8").partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


def _do_as(scope: Scope) -> str | None:
    query = parse_qs(scope.get("query_string", b"").decode("latin-1"), max_num_fields=100)
    return next(iter(query.get("doAsUser", ())), None)
