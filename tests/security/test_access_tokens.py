"""Access tokens: who has one, what it opens and for whom, and when it ends; at every daemon."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from storm_dagster.client.blobs import NimbusBlobClient
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.host.endpoints import cluster_conf
from storm_dagster.model import paths
from storm_dagster.model.access_tokens import FORMER_LIFE_SECS, TOKEN_SCOPES, TokenScope
from storm_dagster.model.errors import (
    InvalidRequest,
    KeyNotFound,
    NotAuthenticated,
    Unavailable,
)
from storm_dagster.model.records import encode_record
from storm_dagster.model.token_records import AccessTokens
from storm_dagster.operations.live.access_tokens import create_token, record_tokens, revoke_token
from storm_dagster.operations.read.exposures import ClusterPlace, exposures
from storm_dagster.operations.submit.uploaded_source import read_source
from storm_dagster.security.access_tokens import (
    derive_metrics_token,
    make_token,
    new_token_id,
    read_claims,
    token_of_header,
)
from storm_dagster.security.settings import Security
from storm_dagster.supervisor.log_service import LogService
from storm_dagster.testing.cluster import run_cli
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.access_tokens import AccessTokenList, OpenedTokenList
from storm_dagster.zk.storm_cluster_state import StormClusterState, open_cluster_state
from storm_rigs.protocols.tokens import bearer, former_token, recorded_token
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.nimbus_thread import NimbusThread
from storm_rigs.stage.records import ARCHIVE, WORD_COUNT, World

SECRET = "a-secret-planted-for-tests-4711"
NOW = 1_800_000_000
REVOKED_SECS = 10.0
"""Time within which a revoked token counts nowhere."""


# -- the token itself ------------------------------------------------------------------------------
@pytest.mark.parametrize("scope", TOKEN_SCOPES)
def test_a_token_names_scope_and_user_until_it_expires(scope: TokenScope) -> None:
    token = make_token(SECRET, scope, NOW + 3600, new_token_id(), "ann@b.c")
    claims = read_claims((SECRET,), token, NOW + 3599)
    assert SECRET not in token
    assert (claims.scope, claims.user) == (scope, "ann@b.c")
    with pytest.raises(NotAuthenticated, match="expired at 2027-01-15 09:00:00 UTC, and it is"):
        read_claims((SECRET,), token, NOW + 3601)
    # A clock that is a day ahead ends it early, and the error names the clock.
    with pytest.raises(NotAuthenticated, match="or set the clock"):
        read_claims((SECRET,), token, NOW + 86_400)
    for wrong in (
        token.replace(f".{scope}.", ".admin." if scope != "admin" else ".read."),
        token.replace("ann", "bob"),
        token.replace("sdt2", "sdt"),
        token + "0",
        token[:-1],
        "",
        SECRET,
    ):
        with pytest.raises(NotAuthenticated):
            read_claims((SECRET,), wrong, NOW)
    later = token.replace(str(NOW + 3600), str(NOW + 3601))
    with pytest.raises(NotAuthenticated, match="another secret"):
        read_claims((SECRET,), later, NOW)


def test_forms_of_tokens_do_not_stand_for_each_other() -> None:
    former = read_claims((SECRET,), former_token(SECRET, "operate", 60, NOW), NOW)
    assert (former.kind, former.scope, former.user) == ("former", "operate", "")
    derived = read_claims((SECRET,), derive_metrics_token(SECRET, "prometheus", 60, NOW), NOW)
    assert (derived.kind, derived.scope) == ("derived", "metrics")
    for token in (
        former_token(SECRET, "operate", 60, NOW).replace("sdt.", "sdtd."),
        derive_metrics_token(SECRET, "prometheus", 60, NOW).replace("metrics", "admin"),
    ):
        with pytest.raises(NotAuthenticated):
            read_claims((SECRET,), token, NOW)


@pytest.mark.parametrize("user", ["", "a b", "-rf", "a\nb", "x" * 200])
def test_a_token_is_of_a_user_whom_a_certificate_could_name(user: str) -> None:
    if user:
        with pytest.raises(InvalidRequest, match="is not the name of a user"):
            make_token(SECRET, "read", NOW, new_token_id(), user)
    else:
        assert read_claims((SECRET,), make_token(SECRET, "read", NOW, "0" * 16), NOW).user == ""


def test_where_a_token_stands() -> None:
    basic = httpx.BasicAuth("anybody", "sdt.x")
    request = next(basic.auth_flow(httpx.Request("GET", "http://a/")))
    assert token_of_header(request.headers["Authorization"]) == "sdt.x"
    assert token_of_header("Bearer sdt.x") == "sdt.x"
    assert token_of_header("") is None
    assert token_of_header("Basic !!") == ""


# -- the list --------------------------------------------------------------------------------------
@pytest.mark.zookeeper
def test_the_list_has_what_was_made_and_not_what_was_revoked(stage: Stage) -> None:
    world = stage.world()
    ctx = world.context()
    tokens = AccessTokenList(lambda: world.cluster.state)
    with pytest.raises(Unavailable, match="does not record tokens yet"):
        create_token(ctx, "1" * 16, scope="read", user="", life_secs=60, made_by="storm")
    record_tokens(ctx, ctx.current_epoch())
    first = create_token(ctx, "1" * 16, scope="read", user="", life_secs=60, made_by="storm")
    world.time += 5
    again = create_token(ctx, "1" * 16, scope="read", user="", life_secs=60, made_by="storm")
    assert again == first, "its client did not get the first answer"
    create_token(ctx, "2" * 16, scope="admin", user="ann", life_secs=60, made_by="boss")
    tokens.read_now()
    listing = tokens.listing()
    assert listing is not None and listing.is_fresh
    assert {key: record.user for key, record in listing.records.items()} == {
        "1" * 16: "",
        "2" * 16: "ann",
    }
    revoke_token(ctx, "1" * 16)
    with pytest.raises(KeyNotFound, match="token list"):
        revoke_token(ctx, "1" * 16)
    tokens.read_now()
    listing = tokens.listing()
    assert listing is not None and list(listing.records) == ["2" * 16]


@pytest.mark.zookeeper
def test_expired_records_go_and_the_start_stays(stage: Stage) -> None:
    world = stage.world()
    ctx = world.context()
    epoch = ctx.current_epoch()
    record_tokens(ctx, epoch)
    before = world.cluster.state.get_data(paths.ACCESS_TOKENS)
    create_token(ctx, "1" * 16, scope="read", user="", life_secs=60, made_by="storm")
    world.time += 3 * 86_400
    record_tokens(ctx, epoch)
    create_token(ctx, "2" * 16, scope="read", user="", life_secs=60, made_by="storm")
    assert world.cluster.state.get_children(paths.ACCESS_TOKENS) == ["2" * 16]
    assert world.cluster.state.get_data(paths.ACCESS_TOKENS) == before


# -- a cluster -------------------------------------------------------------------------------------
@pytest.fixture
def nimbus(stage: Stage) -> NimbusThread:
    return stage.nimbus(storm__secret=SECRET, nimbus__users=["ann"]).await_leading()


@contextmanager
def state_of(nimbus: NimbusThread) -> Iterator[StormClusterState]:
    cluster = StormClusterState.open(nimbus.conf)
    try:
        yield cluster
    finally:
        cluster.disconnect()


def token_cli(nimbus: NimbusThread, home: Path, *words: str) -> Any:
    """``storm-dagster token`` on a machine that has the secret."""
    home.mkdir(exist_ok=True)
    (home / "storm.yaml").touch(mode=0o600)
    url = httpx.URL(nimbus.url)
    keys = {"storm.secret": SECRET, "nimbus.seeds": [f"{url.host}:{url.port}"]}
    (home / "storm.yaml").write_text(json.dumps(keys))
    return run_cli("token", *words, "--json", home=home)


def status_of(url: str, token: str, path: str) -> int:
    with httpx.Client(base_url=url, timeout=20, trust_env=False) as http:
        return http.get(path, headers=bearer(token)).status_code


@pytest.mark.zookeeper
def test_a_token_is_made_listed_used_and_revoked_everywhere(
    nimbus: NimbusThread, stage: Stage, tmp_path: Path
) -> None:
    home = tmp_path / "home-of-ci"
    made = token_cli(nimbus, home, "create", "--scope", "admin", "--expires", "2h").document
    assert 0 <= time.time() + 7200 - made["expires"] < 600
    (row,) = token_cli(nimbus, home, "list").document["tokens"]
    assert (row["id"], row["scope"], row["user"]) == (made["id"], "admin", None)
    assert (row["expires_secs"], row["made_by"]) == (made["expires"], "storm")
    with state_of(nimbus) as cluster:
        stored = cluster.state.get_data(paths.access_token(made["id"])) or b""
        assert made["token"].rpartition(".")[2].encode() not in stored
        opened = OpenedTokenList(lambda: open_cluster_state(nimbus.conf))
        opened.start()
        service = LogService(
            load_cluster_conf(None, {"storm.secret": SECRET, "supervisor.http.port": 0}),
            tmp_path,
            "s1",
        )
        service.start(lambda: (), lambda: cluster.state)
        follower = stage.nimbus("n2", storm__secret=SECRET).await_serving()
        places = [
            (nimbus.url, "/v1/blacklist"),
            (follower.url, "/v1/blacklist"),
            (service.url, "/v1/workers"),
        ]

        def statuses() -> set[int]:
            return {status_of(url, made["token"], path) for url, path in places}

        def in_web_list() -> bool:
            listing = opened.tokens.listing()
            return listing is not None and made["id"] in listing.records

        try:
            eventually(lambda: statuses() == {200}, 10, "a token that counts everywhere")
            eventually(in_web_list, 10, "the list of the web application")
            token_cli(nimbus, home, "revoke", made["id"]).check()
            eventually(lambda: statuses() == {401}, REVOKED_SECS, "the end of the token")
            eventually(lambda: not in_web_list(), REVOKED_SECS, "its end there")
        finally:
            service.stop()
            opened.close()
    assert token_cli(nimbus, home, "list").document["tokens"] == []
    with pytest.raises(KeyNotFound, match="is recorded"):
        token_cli(nimbus, home, "revoke", made["id"]).check()


@pytest.mark.zookeeper
def test_no_token_is_printed_whose_record_is_not_written(
    nimbus: NimbusThread, tmp_path: Path
) -> None:
    home = tmp_path / "home-of-ci"
    for words, reason in (
        (("--expires", "0h"), "is not a time"),
        (("--expires", "366d"), "longer than 365 days"),
        (("--user", "a b"), "is not the name of a user"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            token_cli(nimbus, home, "create", "--scope", "read", *words).check()
    nimbus.stop()
    refused = run_cli("token", "create", "--scope", "read", "--json", home=home)
    with pytest.raises(Unavailable, match="no token was made"):
        refused.check()
    (home / "storm.yaml").write_text("{}")
    with pytest.raises(InvalidRequest, match="has no secret"):
        run_cli("token", "create", "--scope", "read", "--json", home=home).check()


@pytest.mark.zookeeper
def test_the_code_of_a_token_runs_as_nobody_but_its_user(nimbus: NimbusThread) -> None:
    conf = {"topology.submitter.user": "alice", "topology.users": ["mallory"]}

    def upload(http: httpx.Client, token: str) -> str:
        handle = http.post("/v1/uploads", headers=bearer(token)).json()["handle"]
        contents = {
            "archive": ARCHIVE,
            "conf": json.dumps(conf).encode(),
            "topology": json.dumps(WORD_COUNT).encode(),
        }
        for part, content in contents.items():
            path = f"/v1/uploads/{handle}/{part}"
            assert http.put(path, content=content, headers=bearer(token)).status_code == 201
        return handle

    with (
        nimbus.client(Security()) as http,
        nimbus.client() as admin,
        state_of(nimbus) as cluster,
        NimbusBlobClient(nimbus.url, security=Security.of(nimbus.conf)) as blobs,
    ):
        ctx = World(cluster, blobs, dict(nimbus.conf.values)).context()  # type: ignore[arg-type]
        unowned = recorded_token(admin, SECRET, "operate")
        ann = recorded_token(admin, SECRET, "operate", "ann")
        former = former_token(SECRET, "operate", 600)
        handles = {token: upload(http, token) for token in (unowned, ann, former)}
        for token in (unowned, former):
            uploaded = read_source(ctx, handles[token], None)
            assert uploaded.conf["topology.submitter.user"] is None
            assert uploaded.conf["topology.users"] == []
            (warning,) = uploaded.warnings
            assert "topology.submitter.user, topology.users" in warning
        uploaded = read_source(ctx, handles[ann], None)
        assert uploaded.conf["topology.submitter.user"] == "ann"
        # Uploads of other users and tokens do not exist for a token.
        for token, handle in ((unowned, handles[ann]), (ann, handles[former])):
            request = {"name": "wc", "handle": handle}
            answer = http.post("/v1/submit", json=request, headers=bearer(token))
            assert answer.status_code == 404 and "no upload" in answer.text
        eve = recorded_token(admin, SECRET, "operate", "eve")
        refused = http.post("/v1/uploads", headers=bearer(eve))
        assert refused.status_code == 403 and "nimbus.users" in refused.text


@pytest.mark.zookeeper
def test_tokens_of_the_release_before_end_thirty_days_after_the_upgrade(
    nimbus: NimbusThread,
) -> None:
    token = former_token(SECRET, "read", 10**9)
    assert status_of(nimbus.url, token, "/v1/topologies") == 200
    derived = derive_metrics_token(SECRET, "prometheus", 600)
    assert status_of(nimbus.url, derived, "/metrics") == 200
    assert status_of(nimbus.url, derived, "/v1/topologies") == 403
    long_ago = int(time.time()) - FORMER_LIFE_SECS - 60
    with state_of(nimbus) as cluster:
        record = encode_record(AccessTokens(recorded_from_secs=long_ago))
        cluster.state.set_data(paths.ACCESS_TOKENS, record)

    def is_refused() -> bool:
        return status_of(nimbus.url, token, "/v1/topologies") == 401

    eventually(is_refused, REVOKED_SECS, "the end of tokens without a record")
    assert status_of(nimbus.url, derived, "/metrics") == 200


@pytest.mark.zookeeper
@pytest.mark.long
def test_while_zookeeper_is_away_readers_go_on_by_the_last_list(
    nimbus: NimbusThread, tmp_path: Path
) -> None:
    tokens = {}
    with nimbus.client() as admin:
        for scope in TOKEN_SCOPES:
            tokens[scope] = recorded_token(admin, SECRET, scope)
    cluster = StormClusterState.open(nimbus.conf)
    service = LogService(
        load_cluster_conf(None, {"storm.secret": SECRET, "supervisor.http.port": 0}),
        tmp_path,
        "s1",
    )
    service.start(lambda: (), lambda: cluster.state)
    try:
        eventually(
            lambda: status_of(service.url, tokens["admin"], "/v1/workers") == 200, 10, "the list"
        )
        cluster.disconnect()

        def is_refused() -> bool:
            return status_of(service.url, tokens["admin"], "/v1/workers") == 503

        eventually(is_refused, 20, "the refusal of an administrator's token")
        # Its routes are for administrators: 403 says that the token itself counts.
        for scope in ("metrics", "read", "read:tuples"):
            assert status_of(service.url, tokens[scope], "/v1/workers") == 403
        assert status_of(service.url, tokens["operate"], "/v1/workers") == 503
    finally:
        service.stop()


@pytest.mark.zookeeper
def test_doctor_names_tokens_of_administrators_and_of_no_user(
    nimbus: NimbusThread, tmp_path: Path
) -> None:
    url = httpx.URL(nimbus.url)
    keys = {"storm.secret": SECRET, "nimbus.seeds": [f"{url.host}:{url.port}"]}
    place = ClusterPlace(tmp_path, tmp_path, cluster_conf(tmp_path, tmp_path, keys))

    def rows() -> dict[str, str]:
        return {what: state for state, what, _ in exposures(place)["tokens"](place)}

    with nimbus.client() as admin:
        recorded_token(admin, SECRET, "operate", "ann")
        before = rows()
        assert before.pop("1 access tokens, each with a user, none of the scope admin") == "ok"
        (former,) = before
        assert former.startswith("access tokens of earlier releases count until 2")
        recorded_token(admin, SECRET, "admin")
    after = rows()
    assert set(after.values()) == {"warning"}
    assert any("have the scope admin: " in what for what in after)
    assert any("belong to no user: " in what for what in after)
