"""Transport to Dagster's webserver: addresses, credentials, and responses as typed errors.

What a later try may heal is :class:`Unavailable`; what somebody has to set right first (credentials
that are refused, a path that is no GraphQL) is :class:`Misconfigured` and names the conf key.
Credentials go into headers only: no error, log line or link of this module holds one. Nothing is
retried here.
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
from storm_dagster.model.errors import InvalidRequest, Misconfigured, Unavailable
from storm_dagster.security.settings import Security, public_authorities
from storm_dagster.security.signing import signer

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[!-~](?:[ -~]*[!-~])?")
_OPERATION = re.compile(r"(?:query|mutation) Storm(\w+).*\n  (\w+)")
_WHO = "set dagster.graphql.token.file or dagster.graphql.headers"


class NoResponse(Unavailable):
    """No response of Dagster to a request that may have reached it, and may have had its effect."""


@functools.cache
def queries() -> Mapping[str, tuple[str, str]]:
    """Operation -> its text and the field of its answer."""
    text = Path(__file__).with_name("queries.graphql").read_text(encoding="utf-8")
    found = [(_OPERATION.match(part), part) for part in text.split("\n\n")]
    return {match[1]: (part, match[2]) for match, part in found if match}


@dataclass(frozen=True)
class DagsterAccess:
    """The address of a Dagster and the credentials of each request. Its ``repr`` holds no
    credential.
    """

    url: str
    """GraphQL address without user and password: it may be shown."""
    fixed: Mapping[str, str] = field(default_factory=dict, repr=False)
    token_file: Path | None = None

    @staticmethod
    def of(conf: Any, url: str | None = None) -> DagsterAccess | None:
        """By ``dagster.graphql.*`` of a conf; ``url`` is the address if the conf names none.

        ``None`` when there is no address. :class:`Misconfigured` for an address that is none,
        headers that are no text, and two different values for the header ``Authorization``.
        """
        given = conf.get("dagster.graphql.url") or url
        if not given:
            return None
        headers = conf.get("dagster.graphql.headers") or {}
        if wrong := sorted(name for name, value in headers.items() if not _is_header(name, value)):
            raise Misconfigured(
                f"dagster.graphql.headers: header {wrong[0]!r:.80} is not one line of ASCII text: quote its value"
            )
        file = conf.get("dagster.graphql.token.file")
        shown, login = _without_login(str(given))
        sources = [
            "dagster.graphql.headers"
            if any(name.lower() == "authorization" for name in headers)
            else None,
            "dagster.graphql.token.file" if file else None,
            "the user in dagster.graphql.url" if login else None,
        ]
        named = [source for source in sources if source]
        if len(named) > 1:
            raise Misconfigured(
                f"{' and '.join(named)} both give the header Authorization: keep one of them"
            )
        fixed = {**headers, **({"Authorization": login} if login else {})}
        return DagsterAccess(shown, fixed, Path(file).expanduser() if file else None)

    @property
    def site(self) -> str:
        """Base URL of this Dagster's UI, without a slash at the end."""
        return self.url.rstrip("/").removesuffix("/graphql")

    def headers(self) -> dict[str, str]:
        """The credentials. A token file is read at each call, so that a renewed token counts at
        once.

        :class:`Misconfigured` when it is empty, missing, or can be read by others.
        """
        if self.token_file is None:
            return dict(self.fixed)
        try:
            token = read_private_file(self.token_file, "dagster.graphql.token.file")
        except InvalidRequest as error:
            raise Misconfigured(error.message) from None
        if not token or not _is_header("Authorization", token):
            raise Misconfigured(
                f"dagster.graphql.token.file {self.token_file} does not hold one token: write the token alone into it"
            )
        return {**self.fixed, "Authorization": f"Bearer {token}"}

    def refused(self, answer: httpx.Response) -> Misconfigured | Unavailable | None:
        """The error for the status of a response; ``None`` for one to be read."""
        status = answer.status_code
        if status == 401:
            shown = "refuses the credentials" if self.headers() else "asks who nimbus is"
            return Misconfigured(f"Dagster at {self.url} {shown} (401): {_WHO} to what it knows")
        if status == 403:
            return Misconfigured(
                f"Dagster at {self.url} does not permit nimbus to do this (403): give the user of the token the "
                f"right to launch runs, or {_WHO} to another"
            )
        if answer.is_redirect:
            return Misconfigured(
                f"Dagster at {self.url} sends nimbus to another page ({status}), as a login page or a moved address "
                f"does: {_WHO}, or correct dagster.graphql.url"
            )
        if status in (404, 405):
            return Misconfigured(
                f"no GraphQL answers at {self.url} ({status}): dagster.graphql.url is the webserver's address with "
                "/graphql at its end"
            )
        is_json = "json" in answer.headers.get("content-type", "")
        if (status == 429 or status >= 500) and not is_json:
            # A proxy that gave up waiting says nothing about the request's effect.
            kind = Unavailable if status == 429 else NoResponse
            return kind(
                f"Dagster at {self.url} answered {status}: check its webserver (or the proxy before it), try again"
            )
        return None


class DagsterTransport:
    """Requests to one Dagster webserver; safe to share between threads.

    Where the conf names no credentials, requests are signed by ``security``, as ``storm-dagster
    web`` wants it; that tells another server nothing. ``access`` is asked before each request,
    because a local webserver may start after this nimbus; ``None`` means that no Dagster is
    configured. An answer that does not come within ``timeout`` seconds is :class:`Unavailable`.
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
        self._http = httpx.Client(timeout=timeout, trust_env=False, verify=self._verify())

    def _verify(self) -> ssl.SSLContext:
        """Public authorities and the cluster's own."""
        if self._security.ca is None:
            return public_authorities()
        context = httpx.create_ssl_context()
        self._security.load_into(context)
        return context

    def _shown(self, access: DagsterAccess) -> dict[str, Any]:
        """Keyword arguments of a request that prove who sends it."""
        headers, security = access.headers(), self._security
        if (
            headers
            or security.secret is None
            or (security.ca and not access.url.startswith("https:"))
        ):
            return {"headers": headers}
        return {"auth": signer(security.secret, tls=security.ca is not None)}

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    @property
    def site(self) -> str | None:
        """Base URL of Dagster's UI; ``None`` when no Dagster is known."""
        access = self._access()
        return access.site if access else None

    def graphql(
        self, operation: str, variables: Mapping[str, Any], patience: float | None = None
    ) -> dict[str, Any]:
        """The answer to an operation of ``queries.graphql``, within ``patience`` seconds (default:
        the timeout).
        """
        access = self._require()
        query, field = queries()[operation]
        document = self.post(
            access.url, {"query": query, "variables": dict(variables)}, patience=patience
        )
        data = document.get("data") if isinstance(document, dict) else None
        result = data.get(field) if isinstance(data, dict) else None
        if not isinstance(result, dict):
            errors = document.get("errors") if isinstance(document, dict) else document
            if (problem := storage_problem(errors)) is not None:
                raise without_storage(f"Dagster at {access.url}", problem)
            raise Unavailable(
                f"Dagster at {access.url} answered {field} with an error: {errors!r:.500}"
            )
        return result

    def report(self, route: str, body: Mapping[str, Any]) -> None:
        """Post an asset event to the webserver's REST route, ``report_asset_materialization/`` for
        example.

        :class:`InvalidRequest` when Dagster will never take it, :class:`Unavailable` when it may
        later.
        """
        answer = self._send(f"{self._require().site}/{route}", body, self._timeout)
        if not answer.is_success:
            kind = InvalidRequest if answer.status_code in (400, 413, 422) else Unavailable
            raise kind(
                f"Dagster answered {route} with {answer.status_code}: {answer.text.strip()[:300]}"
            )

    def post(self, address: str, body: Mapping[str, Any], *, patience: float | None = None) -> Any:
        """The JSON answer to a JSON document, posted to an address of the webserver."""
        try:
            return self._send(address, body, patience or self._timeout).json()
        except ValueError as error:
            raise NoResponse(_out_of_reach(self._require(), error)) from None

    def _send(self, address: str, body: Mapping[str, Any], patience: float) -> httpx.Response:
        access = self._require()
        try:
            answer = self._http.post(address, json=body, **self._shown(access), timeout=patience)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unavailable(_out_of_reach(access, error)) from None
        except httpx.TimeoutException:
            raise NoResponse(self._slow(access, patience)) from None
        except httpx.HTTPError as error:
            raise NoResponse(_out_of_reach(access, error)) from None
        if (error := access.refused(answer)) is not None:
            raise error
        return answer

    def require_life(self) -> None:
        """:class:`Unavailable` unless the webserver answers its cheapest question in time."""
        access = self._access()
        if access is None:
            return  # the call itself raises the error
        try:
            self._http.get(f"{access.site}/server_info", **self._shown(access))
        except httpx.TimeoutException:
            raise Unavailable(_silence(access, self._timeout)) from None
        except httpx.HTTPError:
            return

    def _require(self) -> DagsterAccess:
        access = self._access()
        if access is None:
            raise Unavailable(
                "no Dagster is configured: start one with `storm-dagster dev`, or set dagster.graphql.url"
            )
        return access

    def _slow(self, access: DagsterAccess, secs: float) -> str:
        """Error text of a request without a response in time; it names the part that does not
        respond.
        """
        with suppress(httpx.HTTPError):
            if self._http.get(
                f"{access.site}/server_info", **self._shown(access), timeout=1.0
            ).is_success:
                return (
                    f"Dagster at {access.url} did not answer within {secs:g} s although its webserver lives: its "
                    f"storage may be out of reach, or the machine busy: {STORAGE_REMEDY}; then try again"
                )
        return _silence(access, secs)


def without_storage(doing: str, problem: str) -> Unavailable:
    """The error of a Dagster whose webserver responds and whose database does not."""
    return Unavailable(f"{doing}: Dagster's storage does not answer ({problem}): {STORAGE_REMEDY}")


def _silence(access: DagsterAccess, secs: float) -> str:
    return f"Dagster at {access.url} did not answer within {secs:g} s: check its webserver, then try again"


def _out_of_reach(access: DagsterAccess, error: Exception) -> str:
    return (
        f"Dagster at {access.url} does not answer ({error or type(error).__name__}): start its webserver, "
        "or set dagster.graphql.url"
    )


def _is_header(name: str, value: Any) -> bool:
    return (
        bool(_HEADER_NAME.fullmatch(name))
        and isinstance(value, str)
        and bool(_HEADER_VALUE.fullmatch(value))
    )


def _without_login(url: str) -> tuple[str, str | None]:
    """The address without user and password, and the header value that shows them."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if not host or parts.scheme not in ("http", "https"):
        raise Misconfigured(
            "dagster.graphql.url is not an address such as http://dagster.example:3000/graphql: correct it"
        )
    login, _, place = parts.netloc.rpartition("@")
    if not login:
        return url, None
    user, _, password = login.partition(":")
    shown = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    return parts._replace(netloc=place).geturl(), f"Basic {shown}"
