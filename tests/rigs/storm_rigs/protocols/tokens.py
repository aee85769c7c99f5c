"""Access tokens of tests: recorded in a cluster or in a list of its own, and those of the release
before.
"""

from __future__ import annotations

import time

import httpx

from storm_dagster.core.access_tokens import TokenListing
from storm_dagster.model.access_tokens import TokenScope
from storm_dagster.model.token_records import AccessTokenRecord
from storm_dagster.security.access_tokens import make_token, new_token_id
from storm_dagster.security.signing import keyed_mac


def bearer(token: str) -> dict[str, str]:
    """Headers of a request with the token."""
    return {"Authorization": f"Bearer {token}"}


def recorded_token(admin: httpx.Client, secret: str, scope: TokenScope, user: str = "") -> str:
    """A token that the nimbus of an administrator's client has recorded."""
    request = {"id": new_token_id(), "scope": scope, "user": user, "life_secs": 600}
    answer = admin.post("/v1/access-tokens", json=request)
    assert answer.status_code == 201, answer.text
    record = answer.json()
    return make_token(secret, scope, record["expires_secs"], record["id"], user)


def former_token(secret: str, scope: str, secs: int, now: float | None = None) -> str:
    """A token as the release before made it: without a user, and never recorded."""
    end = int((time.time() if now is None else now) + secs)
    claims = f"{scope}.{end}.0123abcd"
    return f"sdt.{claims}.{keyed_mac(secret, 'token', claims)}"


class TokensOfTest:
    """A list of tokens that is always fresh, and makes tokens that are in it."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self.records: dict[str, AccessTokenRecord] = {}

    def listing(self) -> TokenListing:
        return TokenListing(dict(self.records), int(time.time()), is_fresh=True)

    def refresh(self, token_id: str) -> TokenListing:
        return self.listing()

    def make(self, scope: TokenScope, user: str = "", secs: int = 60) -> str:
        """A token in the list."""
        now_secs = int(time.time())
        token_id = new_token_id()
        self.records[token_id] = AccessTokenRecord(
            scope=scope, user=user, expires_secs=now_secs + secs, made_secs=now_secs
        )
        return make_token(self._secret, scope, now_secs + secs, token_id, user)
