"""Access tokens, for clients that cannot sign requests: curl, Prometheus, browsers.

A token names its scope, its end, its id and its user, and a code that follows from the cluster's
secret: an eavesdropper cannot derive the secret from it, nor change a claim. The cluster has a
record of each token that a user has made; whether a token counts is decided by
:mod:`storm_dagster.core.access_tokens`. Three forms exist:

* ``sdt2.SCOPE.END.ID.USER.CODE``: recorded. Releases that record no token know another form, and
  refuse this one, whose user they would not see.
* ``sdt.SCOPE.END.NUMBER.CODE``: made by a release that records none.
* ``sdtd.SCOPE.END.NAME.CODE``: derived for a part of the cluster itself, and not recorded.
"""

import base64
import re
import secrets as random
import time
from collections.abc import Sequence

from storm_dagster.model.access_tokens import (
    TokenClaims,
    TokenKind,
    TokenScope,
    check_token_user,
    scope_named,
)
from storm_dagster.model.amounts import utc_text
from storm_dagster.model.errors import NotAuthenticated
from storm_dagster.security.signing import is_among, keyed_mac

_FORMS: tuple[tuple[TokenKind, str, re.Pattern[str]], ...] = (
    (
        "recorded",
        "access token",
        re.compile(
            r"sdt2\.(?P<claims>(?P<scope>[a-z:]{1,20})\.(?P<expires>\d{1,12})"
            r"\.(?P<id>[0-9a-f]{16})\.(?P<user>[A-Za-z0-9_.@-]{0,128}))\.(?P<mac>[0-9a-f]{64})"
        ),
    ),
    (
        "former",
        "token",
        re.compile(
            r"sdt\.(?P<claims>(?P<scope>[a-z]{1,20})\.(?P<expires>\d{1,12})"
            r"\.(?P<id>[0-9a-f]{8}))\.(?P<mac>[0-9a-f]{64})"
        ),
    ),
    (
        "derived",
        "derived token",
        re.compile(
            r"sdtd\.(?P<claims>(?P<scope>[a-z:]{1,20})\.(?P<expires>\d{1,12})"
            r"\.(?P<id>[a-z]{1,20}))\.(?P<mac>[0-9a-f]{64})"
        ),
    ),
)
"""Kind of a token, purpose of its code, and its form."""
_REMEDY = "make one with `storm-dagster token create`"


def new_token_id() -> str:
    """A random id for a token."""
    return random.token_hex(8)


def make_token(
    secret: str, scope: TokenScope, expires_secs: int, token_id: str, user: str = ""
) -> str:
    """Make the token whose record has these claims.

    It is for ``Authorization: Bearer``, or the password of Basic. It counts once the record is
    stored, until ``expires_secs`` (epoch seconds).
    """
    claims = f"{scope}.{expires_secs}.{token_id}.{check_token_user(user)}"
    return f"sdt2.{claims}.{keyed_mac(secret, 'access token', claims)}"


def derive_metrics_token(secret: str, part: str, secs: int, now: float | None = None) -> str:
    """Make a token for a part of the cluster itself, such as Prometheus in a container.

    Its scope is ``metrics``, and it has no record: it counts for ``secs`` seconds, or until the
    secret is changed. ``part`` are lower case letters.
    """
    now = time.time() if now is None else now
    claims = f"metrics.{int(now + secs)}.{part}"
    return f"sdtd.{claims}.{keyed_mac(secret, 'derived token', claims)}"


def read_claims(secrets: Sequence[str], token: str, now: float | None = None) -> TokenClaims:
    """Claims of a token.

    Raises :class:`NotAuthenticated` if it is not a token of the cluster, or has expired.
    """
    now = time.time() if now is None else now
    for kind, purpose, form in _FORMS:
        match = form.fullmatch(token)
        if match is None:
            continue
        scope = scope_named(match["scope"])
        if scope is None or (kind == "derived" and scope != "metrics"):
            break
        macs = [keyed_mac(secret, purpose, match["claims"]) for secret in secrets]
        if not is_among(match["mac"], macs):
            raise NotAuthenticated(f"the token was made with another secret: {_REMEDY}")
        user = match["user"] if kind == "recorded" else ""
        claims = TokenClaims(kind, scope, int(match["expires"]), match["id"], user)
        _check_end(claims, now)
        return claims
    raise NotAuthenticated(f"this is not a token of the cluster: {_REMEDY}")


def _check_end(claims: TokenClaims, now: float) -> None:
    """Raise :class:`NotAuthenticated` for a token that has expired by the clock of this host."""
    if claims.expires_secs >= now:
        return
    end = utc_text(claims.expires_secs)
    raise NotAuthenticated(
        f"the token has expired at {end}, and it is {utc_text(now)} by the clock of this host: "
        f"{_REMEDY}, or set the clock"
    )


def token_of_header(header: str) -> str | None:
    """Token in a header ``Authorization``: that of Bearer, or the password of Basic.

    ``None`` for another scheme; ``""`` for damaged credentials, which are then refused as a token.
    """
    scheme, _, credentials = header.partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    if scheme.lower() == "basic":
        try:
            decoded = base64.b64decode(credentials, validate=True).decode("utf-8")
        except ValueError:
            return ""
        return decoded.partition(":")[2]
    return None
