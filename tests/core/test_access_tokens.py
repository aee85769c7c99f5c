"""Which access token counts, and as which caller: by the token, the list and the clock alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.access_tokens import TokenListing, check_access_token, token_caller
from storm_dagster.core.authorization import authorize, is_admin
from storm_dagster.core.submission.conf import limited_conf
from storm_dagster.model.access_tokens import (
    FORMER_LIFE_SECS,
    TOKEN_SCOPES,
    TokenClaims,
    TokenScope,
    is_unowned_caller,
    is_user_name,
    scope_named,
    unowned_caller,
)
from storm_dagster.model.errors import NotAuthenticated, NotAuthorized, Unavailable
from storm_dagster.model.token_records import AccessTokenRecord

NOW = 1_800_000_000
ID = "0123456789abcdef"


def claims(scope: TokenScope = "read", **fields: Any) -> TokenClaims:
    return TokenClaims(
        **{"kind": "recorded", "scope": scope, "expires_secs": NOW + 600, "id": ID, **fields}
    )


def listing(
    scope: str = "read", *, is_fresh: bool = True, recorded_from: int | None = NOW, **fields: Any
) -> TokenListing:
    values: dict[str, Any] = {"expires_secs": NOW + 600, "made_secs": NOW, **fields}
    record = AccessTokenRecord(scope=scope, **values)
    return TokenListing({ID: record}, recorded_from, is_fresh)


EMPTY = TokenListing({}, NOW, is_fresh=True)


@pytest.mark.parametrize("scope", TOKEN_SCOPES)
def test_a_token_counts_while_the_list_has_it(scope: TokenScope) -> None:
    check_access_token(claims(scope), listing(scope), NOW)
    with pytest.raises(NotAuthenticated, match=f"token {ID} is revoked, or was never recorded"):
        check_access_token(claims(scope), EMPTY, NOW)
    with pytest.raises(Unavailable, match="cannot be read"):
        check_access_token(claims(scope), None, NOW)


@pytest.mark.parametrize("field", [{"user": "ann"}, {"expires_secs": NOW + 700}])
def test_a_token_that_claims_more_than_its_record_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(NotAuthenticated, match="than its record: revoke it"):
        check_access_token(claims(**field), listing(), NOW)
    with pytest.raises(NotAuthenticated, match="than its record: revoke it"):
        check_access_token(claims("operate"), listing("read"), NOW)


@pytest.mark.parametrize("scope", TOKEN_SCOPES)
def test_an_old_list_decides_for_readers_alone(scope: TokenScope) -> None:
    old = listing(scope, is_fresh=False)
    if scope in ("operate", "admin"):
        with pytest.raises(Unavailable, match=f"scope {scope} counts again when ZooKeeper"):
            check_access_token(claims(scope), old, NOW)
    else:
        check_access_token(claims(scope), old, NOW)
    with pytest.raises(NotAuthenticated, match="revoked"):
        check_access_token(claims(scope), TokenListing({}, NOW, is_fresh=False), NOW)


def test_a_clock_that_is_a_day_late_is_named() -> None:
    with pytest.raises(NotAuthenticated, match="86400 s from now by the clock of this host: set"):
        check_access_token(claims(), listing(), NOW - 86_400)
    check_access_token(claims(), listing(), NOW - 100)


@pytest.mark.parametrize("is_fresh", [True, False])
def test_tokens_of_earlier_releases_end_after_thirty_days(is_fresh: bool) -> None:
    former = claims(kind="former", id="0123abcd", expires_secs=NOW + 10**9)
    check_access_token(former, TokenListing({}, None, is_fresh), NOW)
    started = TokenListing({}, NOW, is_fresh)
    check_access_token(former, started, NOW + FORMER_LIFE_SECS)
    with pytest.raises(NotAuthenticated, match="for 30 days after the upgrade: make one with"):
        check_access_token(former, started, NOW + FORMER_LIFE_SECS + 1)


def test_a_derived_token_needs_no_list() -> None:
    derived = claims("metrics", kind="derived", id="prometheus")
    check_access_token(derived, None, NOW)
    check_access_token(derived, EMPTY, NOW)


def caller(scope: TokenScope, user: str = "") -> Any:
    return token_caller(claims(scope, user=user), host="h", groups=frozenset({"staff"}))


def test_a_token_permits_no_more_than_a_certificate_of_its_user() -> None:
    conf = {"nimbus.users": ["ann"], "nimbus.admins": ["boss"]}
    own, other = {"topology.users": ["ann"]}, {"topology.users": ["bob"]}
    for scope in TOKEN_SCOPES:
        ann = caller(scope, "ann")
        assert (ann.name, ann.cluster, is_admin(ann, conf)) == ("ann", False, False)
        authorize(ann, "topology", conf, own)
        with pytest.raises(NotAuthorized):
            authorize(ann, "topology", conf, other)
        with pytest.raises(NotAuthorized):
            authorize(ann, "admin", conf)
        assert is_admin(caller(scope, "boss"), conf) == (scope == "admin")
        assert is_admin(caller(scope), conf) == (scope == "admin")
    authorize(caller("operate", "boss"), "topology", conf, other)


@given(st.from_regex(r"[\w.@ -]{1,20}", fullmatch=True))
def test_no_user_is_taken_for_a_token_nor_a_token_for_a_user(name: str) -> None:
    assert not (is_user_name(name) and is_unowned_caller(name))
    token = unowned_caller(name)
    assert is_unowned_caller(token) and not is_user_name(token)


@pytest.mark.parametrize("text", ["", "READ", "read ", "read:", "operate:admin", "metrics,admin"])
def test_a_text_that_is_not_exactly_a_scope_grants_nothing(text: str) -> None:
    assert scope_named(text) is None
    assert [scope_named(scope) for scope in TOKEN_SCOPES] == list(TOKEN_SCOPES)


def test_a_token_without_a_user_owns_nothing_and_runs_as_no_user() -> None:
    name = caller("operate").name
    conf = {
        "topology.submitter.user": "alice",
        "topology.users": ["mallory"],
        "topology.groups": ["wheel"],
    }
    nobody = {"topology.submitter.user": None, "topology.users": [], "topology.groups": []}
    assert limited_conf(name, conf, None) == nobody
    with pytest.raises(NotAuthorized, match=r"must not replace the code .* --user alice"):
        limited_conf(name, {}, {"topology.submitter.user": "alice", "topology.users": ["alice"]})


def test_an_update_gives_a_topology_without_an_owner_none() -> None:
    former = {"topology.users": ["bob"]}
    for user in ("bob", caller("operate").name):
        kept = limited_conf(user, {"topology.submitter.user": "alice"}, former)
        assert kept["topology.submitter.user"] is None
        assert kept["topology.users"] == ["bob"]
