"""Transport to Dagster's webserver.

It handles addresses and credentials, and turns responses into typed errors.

A failure that may pass is :class:`Unavailable`. One that an administrator has to correct first
(credentials that are refused, an address without GraphQL) is :class:`Misconfigured` and names the
conf key. Credentials go into headers only: no error, log line or link of this module holds one. No
request is retried here.
"""

from __future__ import annotations

import base64
import functools
import re
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx

from storm_dagster.host.files import read_private_file
from storm_dagster.model.dagster_names import STORAGE_REMEDY, storage_problem
from storm_dagster.model.errors import (
    InvalidRequest,
    Misconfigured,
    Unavailable,
    error_text,
    untrusted,
)
from storm_dagster.security.settings import Security, public_authorities
from storm_dagster.security.signing import signer

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[!-~](?:[ -~]*[!-~])?")
"""One line of ASCII text without spaces at its ends."""
_OPERATION = re.compile(r"(?:query|mutation) Storm(\w+).*\n  (\w+)")
"""Begin of an operation in ``queries.graphql``: its name, and the field in its second line."""
_CREDENTIALS_REMEDY = "set dagster.graphql.token.file or dagster.graphql.headers"


class NoResponse(Unavailable):
    """No response of Dagster to a request that may have had its effect."""


@functools.cache
def queries() -> Mapping[str, tuple[str, str]]:
    """Return operation -> its text and the field of its answer."""
    text = Path(__file__).with_name("queries.graphql").read_text(encoding="utf-8")
    operations: dict[str, tuple[str, str]] = {}
    for part in text.split("\n\n"):
        match = _OPERATION.match(part)
        if match is not None:
            name, field_name = match.groups()
            operations[name] = (part, field_name)
    return operations


@dataclass(frozen=True)
class DagsterAccess:
    """Address of a Dagster and credentials of each request.

    Its ``repr`` holds no credential.
    """

    url: str
    """GraphQL address without user and password, so that messages may contain it."""
    fixed: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers of each request, credentials included."""
    token_file: Path | None = None
    """File of a bearer token; ``None`` if the conf names none."""

    @staticmethod
    def of(conf: Any, url: str | None = None) -> DagsterAccess | None:
        """Read ``dagster.graphql.*`` of a conf.

        ``url`` is the address if the conf names none. ``None`` without an address.
        :class:`Misconfigured` for an invalid address, headers that are not text, and two different
        values for the header ``Authorization``.
        """
        address = conf.get("dagster.graphql.url") or url
        if not address:
            return None
        headers = conf.get("dagster.graphql.headers") or {}
        invalid_names = sorted(
            name for name, value in headers.items() if not _is_header(name, value)
        )
        if invalid_names:
            raise Misconfigured(
                f"dagster.graphql.headers: header {invalid_names[0]!r:.80} is not one line of "
                "ASCII text: quote its value"
            )
        file = conf.get("dagster.graphql.token.file")
        public_url, login = _split_login(str(address))
        sources: list[str] = []
        if any(name.lower() == "authorization" for name in headers):
            sources.append("dagster.graphql.headers")
        if file:
            sources.append("dagster.graphql.token.file")
        if login:
            sources.append("the user in dagster.graphql.url")
        if len(sources) > 1:
            raise Misconfigured(
                f"{' and '.join(sources)} both give the header Authorization: keep one of them"
            )
        fixed = dict(headers)
        if login:
            fixed["Authorization"] = login
        return DagsterAccess(public_url, fixed, Path(file).expanduser() if file else None)

    @property
    def site(self) -> str:
        """Base URL of this Dagster's UI, without a slash at the end."""
        return self.url.rstrip("/").removesuffix("/graphql")

    @property
    def has_credentials(self) -> bool:
        """True if requests carry headers of the conf."""
        return bool(self.fixed) or self.token_file is not None

    def headers(self) -> dict[str, str]:
        """Return the headers with the credentials.

        A token file is read at each call, so that a renewed token counts at once.
        :class:`Misconfigured` if it is empty, missing, or readable by other users.
        """
        if self.token_file is None:
            return dict(self.fixed)
        try:
            token = read_private_file(self.token_file, "dagster.graphql.token.file")
        except InvalidRequest as error:
            raise Misconfigured(error.message) from None
        if not token or not _is_header("Authorization", token):
            raise Misconfigured(
                f"dagster.graphql.token.file {self.token_file} does not hold one token: write the "
                "token alone into it"
            )
        return {**self.fixed, "Authorization": f"Bearer {token}"}

    def refusal(self, response: httpx.Response) -> Misconfigured | Unavailable | None:
        """Return the error of a response by its status; ``None`` if it is to be read."""
        status = response.status_code
        if status == 401:
            action = "refuses the credentials" if self.headers() else "requires credentials"
            return Misconfigured(
                f"Dagster at {self.url} {action} (401): {_CREDENTIALS_REMEDY} to what it knows"
            )
        if status == 403:
            return Misconfigured(
                f"Dagster at {self.url} does not permit nimbus to do this (403): give the user of "
                f"the token the right to launch runs, or {_CREDENTIALS_REMEDY} to another"
            )
        if response.is_redirect:
            return Misconfigured(
                f"Dagster at {self.url} sends nimbus to another page ({status}), as a login page "
                f"or a moved address does: {_CREDENTIALS_REMEDY}, or correct dagster.graphql.url"
            )
        if status in (404, 405):
            return Misconfigured(
                f"no GraphQL answers at {self.url} ({status}): dagster.graphql.url is the "
                "webserver's address with /graphql at its end"
            )
        is_json = "json" in response.headers.get("content-type", "")
        if (status == 429 or status >= 500) and not is_json:
            # After the timeout of a proxy the request may still have had its effect.
            kind = Unavailable if status == 429 else NoResponse
            return kind(
                f"Dagster at {self.url} answered {status}: check its webserver (or the proxy "
                "before it), try again"
            )
        return None


class DagsterTransport:
    """Requests to one Dagster webserver; safe to share between threads.

    If the conf names no credentials, ``security`` signs the requests, as ``storm-dagster web``
    requires it; a signature reveals no secret to another server. ``access`` is called before each
    request, because a local webserver may start after this nimbus; ``None`` means that no Dagster
    is configured. An answer that does not come within ``timeout`` seconds is :class:`Unavailable`.
    """

    def __init__(
        self,
        access: Callable[[], DagsterAccess | None],
        *,
        timeout: float = 5.0,
        security: Security | None = None,
    ) -> None:
        self._access = access
        self._timeout = timeout
        self._security = security or Security()
        context = self._context()
        self._signing = httpx.Client(
            timeout=timeout, trust_env=False, transport=self._security.transport(context)
        )
        bearing = self._security.transport(context, signed=False)
        self._bearing = httpx.Client(timeout=timeout, trust_env=False, transport=bearing)

    def _context(self) -> ssl.SSLContext:
        """Return a TLS context that trusts public authorities and the cluster's own."""
        if self._security.ca is None:
            return public_authorities()
        context = httpx.create_ssl_context()
        self._security.load_into(context)
        return context

    def _http(self, access: DagsterAccess) -> httpx.Client:
        """Return the client for a Dagster: another one for credentials that it could use."""
        return self._bearing if access.has_credentials else self._signing

    def _credentials(self, access: DagsterAccess) -> dict[str, Any]:
        """Return the keyword arguments of a request that carry its credentials."""
        headers = access.headers()
        security = self._security
        if headers or security.secret is None:
            return {"headers": headers}
        # In a cluster with TLS the signer refuses http: such a webserver gets no signature.
        if security.ca and not access.url.startswith("https:"):
            return {"headers": headers}
        return {"auth": signer(security.secret, tls=security.ca is not None)}

    def close(self) -> None:
        """Close the connections."""
        self._signing.close()
        self._bearing.close()

    @property
    def site(self) -> str | None:
        """Base URL of Dagster's UI; ``None`` when no Dagster is known."""
        access = self._access()
        return access.site if access else None

    def graphql(
        self, operation: str, variables: Mapping[str, Any], patience: float | None = None
    ) -> dict[str, Any]:
        """Return the answer to an operation of ``queries.graphql``.

        It is the value of the operation's field. It must come within ``patience`` seconds, by
        default the timeout. :class:`Unavailable` without such a value.
        """
        access = self._require()
        query, field_name = queries()[operation]
        body = {"query": query, "variables": dict(variables)}
        document = self.post(access.url, body, patience=patience)
        errors = document  # Shown whole if it is not an object of GraphQL.
        if isinstance(document, dict):
            errors = document.get("errors")
            data = document.get("data")
            if isinstance(data, dict) and isinstance(data.get(field_name), dict):
                return data[field_name]
        problem = storage_problem(errors)
        if problem is not None:
            raise without_storage(f"Dagster at {access.url}", problem)
        raise Unavailable(
            f"Dagster at {access.url} answered {field_name} with an error: {errors!r:.500}"
        )

    def report(self, route: str, body: Mapping[str, Any]) -> None:
        """Post an asset event to a REST route such as ``report_asset_materialization/``.

        :class:`InvalidRequest` if Dagster will never accept it, :class:`Unavailable` if it may
        later.
        """
        response = self._send(f"{self._require().site}/{route}", body, self._timeout)
        if response.is_success:
            return
        kind = InvalidRequest if response.status_code in (400, 413, 422) else Unavailable
        raise kind(
            f"Dagster answered {route} with {response.status_code}: {response.text.strip()[:300]}"
        )

    def post(self, address: str, body: Mapping[str, Any], *, patience: float | None = None) -> Any:
        """Post a JSON document to an address, and return the JSON answer.

        :class:`NoResponse` for an answer that is not JSON.
        """
        response = self._send(address, body, patience or self._timeout)
        try:
            return response.json()
        except ValueError as error:
            raise NoResponse(
                f"{self._require().url} does not answer as Dagster does ({error}): start its "
                "webserver there, or correct dagster.graphql.url"
            ) from None

    def _send(self, address: str, body: Mapping[str, Any], patience: float) -> httpx.Response:
        """Post a JSON document, and return a response that is to be read.

        :class:`NoResponse` if the request may have had its effect; another :class:`Unavailable` if
        it was not sent.
        """
        access = self._require()
        try:
            response = self._http(access).post(
                address, json=body, **self._credentials(access), timeout=patience
            )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unavailable(_out_of_reach(access, error)) from None
        except httpx.TimeoutException:
            raise NoResponse(self._slow(access, patience)) from None
        except httpx.HTTPError as error:
            raise NoResponse(_out_of_reach(access, error)) from None
        refusal = access.refusal(response)
        if refusal is not None:
            raise refusal
        return response

    def require_life(self) -> None:
        """Raise :class:`Unavailable` if the webserver does not answer in time.

        The request is the cheapest one. An address that is unknown or refuses the connection is
        left to the call that follows.
        """
        access = self._access()
        if access is None:
            return
        try:
            self._http(access).get(f"{access.site}/server_info", **self._credentials(access))
        except httpx.TimeoutException:
            raise Unavailable(_silence(access, self._timeout)) from None
        except httpx.HTTPError:
            return

    def _require(self) -> DagsterAccess:
        access = self._access()
        if access is None:
            raise Unavailable(
                "no Dagster is configured: start one with `storm-dagster dev`, or set "
                "dagster.graphql.url"
            )
        return access

    def _slow(self, access: DagsterAccess, secs: float) -> str:
        """Return the error text of a request without a response in time.

        It names the part that does not respond.
        """
        webserver_lives = False
        with suppress(httpx.HTTPError):
            webserver_lives = (
                self._http(access)
                .get(f"{access.site}/server_info", **self._credentials(access), timeout=1.0)
                .is_success
            )
        if not webserver_lives:
            return _silence(access, secs)
        return (
            f"Dagster at {access.url} did not answer within {secs:g} s although its webserver "
            "lives: its storage may be out of reach, or the machine busy: "
            f"{STORAGE_REMEDY}; then try again"
        )


def without_storage(doing: str, problem: str) -> Unavailable:
    """Return the error of a Dagster whose database does not respond."""
    return Unavailable(f"{doing}: Dagster's storage does not answer ({problem}): {STORAGE_REMEDY}")


def _silence(access: DagsterAccess, secs: float) -> str:
    return (
        f"Dagster at {access.url} did not answer within {secs:g} s: check its webserver, then try "
        "again"
    )


def _out_of_reach(access: DagsterAccess, error: Exception) -> str:
    refused = untrusted(error)
    if refused is not None:
        return f"Dagster at {access.url}: {refused.message}"
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return (
            f"Dagster at {access.url} has a certificate that is not trusted ({error}): set "
            "storm.tls.ca to the certificate of its authority, or dagster.graphql.url to the name "
            "in the certificate"
        )
    return (
        f"Dagster at {access.url} does not answer ({error_text(error)}): start its "
        "webserver, or set dagster.graphql.url"
    )


def _is_header(name: str, value: Any) -> bool:
    return (
        bool(_HEADER_NAME.fullmatch(name))
        and isinstance(value, str)
        and bool(_HEADER_VALUE.fullmatch(value))
    )


def _split_login(url: str) -> tuple[str, str | None]:
    """Split user and password from an address.

    Returns the address without them, and the header value that carries them, ``None`` without a
    user. :class:`Misconfigured`, which does not show the address, if it is invalid.
    """
    problem = Misconfigured(
        "dagster.graphql.url is not an address such as http://dagster.example:3000/graphql: "
        "correct it"
    )
    try:
        parts = urlsplit(url)
        host = parts.hostname
        # Reading the port checks it.
        _ = parts.port
    except ValueError:
        raise problem from None
    if not host or parts.scheme not in ("http", "https"):
        raise problem
    login, _, location = parts.netloc.rpartition("@")
    if not login:
        return url, None
    user, _, password = login.partition(":")
    token = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    return parts._replace(netloc=location).geturl(), f"Basic {token}"
