"""Decision whether an access token counts, and as which caller."""

from collections.abc import Mapping
from dataclasses import dataclass

from storm_dagster.core.authorization import Caller
from storm_dagster.model.access_tokens import (
    FORMER_LIFE_SECS,
    TokenClaims,
    unowned_caller,
)
from storm_dagster.model.errors import NotAuthenticated, Unavailable
from storm_dagster.model.token_records import AccessTokenRecord

_CLOCK_SKEW_SECS = 120
"""Largest difference between the clocks of the leader that recorded a token and of this host."""
_NEED_FRESH_LIST = frozenset({"operate", "admin"})
"""Scopes whose tokens are refused while the list cannot be read."""
_REMEDY = "make one with `storm-dagster token create`"


@dataclass(frozen=True)
class TokenListing:
    """The list of tokens, as this process read it last."""

    records: Mapping[str, AccessTokenRecord]
    """Id -> record of each token that was made and not revoked."""
    recorded_from_secs: int | None
    """Start of the first leader that records tokens; ``None`` before it."""
    is_fresh: bool
    """True if the list was read within the last seconds: a revoked token is not in it."""


def check_access_token(claims: TokenClaims, listing: TokenListing | None, now: float) -> None:
    """Raise unless the token counts now (epoch seconds).

    :class:`NotAuthenticated` for a token that is revoked, was never recorded, or has outlived its
    kind; :class:`Unavailable` while the list that decides about it cannot be read. ``listing`` is
    ``None`` before its first read. A derived token needs no list.
    """
    if claims.kind == "derived":
        return
    if listing is None:
        raise _unreadable(claims)
    if claims.kind == "recorded":
        _check_record(claims, listing, now)
    else:
        _check_former(listing, now)
    if claims.scope in _NEED_FRESH_LIST and not listing.is_fresh:
        raise _unreadable(claims)


def _check_record(claims: TokenClaims, listing: TokenListing, now: float) -> None:
    """Raise unless the list has the token with these claims."""
    record = listing.records.get(claims.id)
    if record is None:
        raise NotAuthenticated(
            f"token {claims.id} is revoked, or was never recorded in this cluster: see "
            f"`storm-dagster token list`, or {_REMEDY}"
        )
    recorded = (record.scope, record.user, record.expires_secs)
    if recorded != (claims.scope, claims.user, claims.expires_secs):
        raise NotAuthenticated(
            f"token {claims.id} claims another scope, user or end than its record: revoke it, and "
            f"{_REMEDY}"
        )
    early_secs = record.made_secs - now
    if early_secs > _CLOCK_SKEW_SECS:
        raise NotAuthenticated(
            f"token {claims.id} was made {early_secs:.0f} s from now by the clock of this host: "
            "set the clocks of this host and of the leading nimbus"
        )


def _check_former(listing: TokenListing, now: float) -> None:
    """Raise for a token without a record once the time of such tokens is over."""
    if listing.recorded_from_secs is None:
        return
    if now > listing.recorded_from_secs + FORMER_LIFE_SECS:
        raise NotAuthenticated(
            "the token was made by a release that recorded no tokens, and such tokens counted for "
            f"{FORMER_LIFE_SECS // 86_400} days after the upgrade: {_REMEDY}"
        )


def _unreadable(claims: TokenClaims) -> Unavailable:
    return Unavailable(
        "the list of tokens cannot be read, which shows whether this one is revoked: a token of "
        f"the scope {claims.scope} counts again when ZooKeeper answers this host"
    )


def token_caller(claims: TokenClaims, *, host: str, groups: frozenset[str]) -> Caller:
    """The caller with a token that counts.

    A token with a user is that user, as a certificate would be, and its scope limits it further;
    the scope ``admin`` does not. ``groups`` are those of the user, ``host`` is the address of the
    request.
    """
    is_admin = claims.scope == "admin"
    scope = None if is_admin else claims.scope
    if claims.user:
        return Caller(claims.user, host=host, groups=groups, scope=scope, token=claims.id)
    return Caller(
        unowned_caller(claims.id),
        cluster=is_admin,
        host=host,
        scope=scope,
        token=claims.id,
        unowned=True,
    )
