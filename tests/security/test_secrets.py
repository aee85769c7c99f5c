"""Secrets: checked when they are read, never shown, and readable by their owner only."""

from __future__ import annotations

import os
import re
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.api.spark.session import worker_session
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.host.files import make_home_private
from storm_dagster.model.conf import (
    CONF_KEYS,
    HARMLESS_ENDS,
    HIDDEN,
    SECRET_KEYS,
    SECRET_PARTS,
    SECRET_WORDS,
    is_secret_key,
    mask,
    parse_assignments,
)
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.security.exposure import check_exposure
from storm_dagster.security.settings import Security
from storm_dagster.security.spark_remote import cluster_spark_servers, spark_token, with_spark_token
from storm_dagster.spark.link import check_reachable
from storm_dagster.spark.planner import ConnectPlanner
from storm_dagster.spark.query_sessions import end_query_session
from storm_dagster.spark.session import within
from storm_dagster.worker.tasks.errors import ErrorReporter

SECRET = "a-secret-planted-for-tests-4711"


def conf(**values: object) -> Any:
    return load_cluster_conf(None, {key.replace("__", "."): value for key, value in values.items()})


def private(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_the_secret_comes_from_a_file_of_its_owner(tmp_path: Path) -> None:
    path = private(tmp_path / "secret", SECRET + "\n")
    assert Security.of(conf(storm__secret__file=str(path))).secret == SECRET
    path.chmod(0o640)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        Security.of(conf(storm__secret__file=str(path)))
    with pytest.raises(InvalidRequest, match="openssl rand"):
        Security.of(conf(storm__secret="short"))
    with pytest.raises(InvalidRequest, match="keep the file"):
        Security.of(conf(storm__secret=SECRET, storm__secret__file=str(path)))


def test_a_second_line_of_the_file_counts_too(tmp_path: Path) -> None:
    path = private(tmp_path / "secret", f"{SECRET}\n{SECRET}-former\n")
    security = Security.of(conf(storm__secret__file=str(path)))
    assert security.secrets == (SECRET, f"{SECRET}-former") and SECRET not in repr(security)
    assert Security().secrets == ()


def test_what_is_derived_differs_by_purpose_and_betrays_nothing() -> None:
    security = Security(SECRET)
    made = {
        security.derived(purpose)
        for purpose in ("worker links of a-1-1", "worker links of b-2-1", "x")
    }
    assert len(made) == 3 and all(len(key) == 32 and SECRET.encode() not in key for key in made)
    assert (
        security.derived("x")
        == Security(SECRET).derived("x")
        != Security(SECRET + "1").derived("x")
    )


def test_no_representation_shows_a_secret() -> None:
    merged = conf(storm__secret=SECRET, storm__zookeeper__auth__payload="storm:planted")
    for text in (repr(merged), str(merged), repr(Security(SECRET)), repr([merged])):
        assert SECRET not in text and "planted" not in text


def test_a_shown_conf_hides_secrets_at_any_depth() -> None:
    given = {
        "storm.secret": SECRET,
        "storm.secret.file": "/etc/storm/secret",
        "my.db.password": "p",
        "topology.environment": {"AWS_SECRET_ACCESS_KEY": "k", "LANG": "C"},
        "my.list": [{"api_token": "t", "n": 1}],
        "storm.zookeeper.auth.payload": "u:p",
        "topology.workers": 3,
        "storm.zookeeper.port": 2181,
    }
    shown = mask(given)
    assert (
        shown["storm.secret"]
        == shown["my.db.password"]
        == shown["storm.zookeeper.auth.payload"]
        == HIDDEN
    )
    assert shown["topology.environment"] == {"AWS_SECRET_ACCESS_KEY": HIDDEN, "LANG": "C"}
    assert shown["my.list"] == [{"api_token": HIDDEN, "n": 1}]
    assert (shown["topology.workers"], shown["storm.secret.file"]) == (3, "/etc/storm/secret")
    assert given["storm.secret"] == SECRET, "the conf itself is left as it is"


PLANTED: dict[str, object] = {
    **{
        f"db.{name}": "planted"
        for name in ("password", "passwd", "pwd", "passphrase", "credential", "private.key")
    },
    **dict.fromkeys(
        (
            "PGPASSWORD",
            "AWS_ACCESS_KEY_ID",
            "apikey",
            "api_key",
            "SESSION_COOKIE",
            "sasl.jaas.config",
        ),
        "planted",
    ),
    **{
        "db.password": 47114711,
        "db.passwords": [47114711, "planted"],
        "db.secret": {"value": "planted"},
    },
    **{"kafka.token": ("planted",), "http.authorization": {"a": ["planted"]}},
    "DATABASE_URL": "mysql://u:planted@h/db",
    "topology.spark.remote": "sc://h:15002/;token=planted;user_id=me",
    "blobstore.dir": "s3://KEY:planted@bucket/x",
    "jdbc": "jdbc:postgresql://h/db?user=me&password=planted&ssl=true",
    "my.headers": ["Authorization: Bearer planted-planted"],
    "deep": [{"a": [{"api_token": "planted"}]}],
}


def test_the_page_lists_the_telltale_parts() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    listed = page.partition("\nTelltale names")[2].partition("\nGive a secret")[0]
    rules = [set(re.findall(r"`([a-z ]+)`", rule)) for rule in listed.split("\n* ")[1:]]
    assert rules == [set(SECRET_PARTS), set(SECRET_WORDS), set(HARMLESS_ENDS)]


def test_the_table_and_not_the_name_decides_on_a_known_key() -> None:
    assert {
        "storm.secret",
        "storm.zookeeper.auth.payload",
        "storm.zookeeper.ssl.keystore.password",
        "dagster.graphql.headers",
    } == SECRET_KEYS
    assert all(is_secret_key(key) for key in SECRET_KEYS)
    shown = [key for key, conf_key in CONF_KEYS.items() if not conf_key.secret]
    assert not any(is_secret_key(key) for key in shown)
    for key, conf_key in CONF_KEYS.items():
        assert conf_key.doc.endswith("Secret") == conf_key.secret, f"the reference on {key}"
    unnamed = [key for key in CONF_KEYS if key not in SECRET_KEYS and is_secret_key(f"my.{key}")]
    assert unnamed == [], "its name says secret, the table does not"


def test_no_planted_value_is_shown_in_a_conf_or_in_metadata() -> None:
    shown = mask(PLANTED)
    assert "planted" not in str(shown) and "47114711" not in str(shown)
    assert shown["topology.spark.remote"] == f"sc://h:15002/;token={HIDDEN};user_id=me"
    assert shown["db.secret"] == {"value": HIDDEN}


def nothing() -> None:
    time.sleep(1)


@pytest.mark.parametrize(
    "ask",
    [
        lambda url: worker_session({"spark.remote": url}),
        check_reachable,
        lambda url: check_reachable(url.replace("sc:", "http:")),
        lambda url: within(0.01, f"Spark at {url}", nothing),
        lambda url: within(1, f"Spark at {url}", lambda: 1 // 0),
        lambda url: end_query_session(url, "a-1-1"),
        lambda url: ConnectPlanner(url, Any)({}),  # type: ignore[arg-type]
    ],
    ids=["worker", "check", "no-url", "late", "fails", "end", "plan"],
)
def test_an_error_of_spark_does_not_tell_the_token_of_its_url(ask: Callable[[str], Any]) -> None:
    with pytest.raises(Unavailable) as raised:
        ask("sc://127.0.0.1:1/;token=planted;user_id=me")
    assert "planted" not in str(raised.value)
    assert f"://127.0.0.1:1/;token={HIDDEN};user_id=me" in str(raised.value)


def test_an_error_that_a_worker_logs_and_records_has_no_secret(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorded: list[tuple[Any, ...]] = []
    reporter = ErrorReporter({}, lambda *error: recorded.append(error), time.monotonic)
    try:
        try:
            raise ValueError("no route to sc://h:443/;token=planted")
        except ValueError as cause:
            raise RuntimeError("mysql://u:planted@h/db does not answer") from cause
    except RuntimeError as error:
        reporter(1, "totals", error, "bolt")
    reporter(1, "totals", RuntimeError("sc://h:443/;token=planted"), "bolt")
    assert "planted" not in f"{recorded} {caplog.text}"
    assert f"ValueError: no route to sc://h:443/;token={HIDDEN}" in recorded[0][2]
    assert recorded[1][4] == f"bolt: RuntimeError sc://h:443/;token={HIDDEN}"


def test_what_is_no_secret_is_shown() -> None:
    plain = {key: "value" for key in CONF_KEYS if not is_secret_key(key)}
    assert set(CONF_KEYS) - set(plain) == SECRET_KEYS
    assert mask(plain) == plain
    given = {
        "token.ttl.secs": 60,
        "keyboard": "qwerty",
        "monkey": 1,
        "x.enabled": True,
        "path": "/a:b@c?x=1",
    }
    assert mask(given) == given


@pytest.mark.parametrize("value", [99887766554433221100, ["planted", 1], {"a": "planted"}, 1.5])
def test_errors_name_the_key_and_not_the_value(tmp_path: Path, value: object) -> None:
    for key in ("storm.secret", "storm.zookeeper.auth.payload"):
        with pytest.raises(InvalidRequest, match=key) as refused:
            conf().with_values({key: value}, "t")
        assert "planted" not in refused.value.message and "998877" not in refused.value.message
    path = private(tmp_path / "storm.yaml", 'storm.secret: "planted\nother: [')
    with pytest.raises(InvalidRequest, match="line 2") as refused:
        load_cluster_conf(tmp_path)
    assert path.name in refused.value.message and "planted" not in refused.value.message


def test_a_command_line_takes_no_secret() -> None:
    with pytest.raises(InvalidRequest, match=r"storm\.secret\.file") as refused:
        parse_assignments([f"storm.secret={SECRET}"])
    assert SECRET not in refused.value.message


def test_a_conf_file_with_secrets_belongs_to_its_owner(tmp_path: Path) -> None:
    path = private(tmp_path / "storm.yaml", f"storm.secret: {SECRET}\n")
    assert load_cluster_conf(tmp_path)["storm.secret"] == SECRET
    path.chmod(0o644)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        load_cluster_conf(tmp_path)
    path.write_text("topology.workers: 2\n")
    assert load_cluster_conf(tmp_path)["topology.workers"] == 2


def test_the_state_folder_is_closed_to_others(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert make_home_private(home).stat().st_mode & 0o777 == 0o700
    home.chmod(0o755)
    assert make_home_private(home).stat().st_mode & 0o777 == 0o700
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    assert make_home_private(shared).stat().st_mode & 0o7777 == 0o1777


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_the_state_folder_is_not_of_another_user(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 12_345, 12_345)
    with pytest.raises(InvalidRequest, match="belongs to user 12345"):
        make_home_private(home)


@pytest.mark.parametrize("needs", ["secret or tls", "secret", "zookeeper auth"])
def test_services_beyond_loopback_need_a_setting_and_a_proof(needs: Any) -> None:
    assert check_exposure(conf(), "it", needs) == "127.0.0.1"
    proof: dict[str, object] = (
        {"storm__zookeeper__auth__payload": "u:p"}
        if needs == "zookeeper auth"
        else {"storm__secret": SECRET}
    )
    for host in ("0.0.0.0", "::"):
        for external in (False, True):
            for proven in ({}, proof):
                merged = conf(storm__local__hostname=host, storm__bind__external=external, **proven)
                if external and proven:
                    assert check_exposure(merged, "it", needs) == host
                else:
                    with pytest.raises(InvalidRequest, match="it would listen"):
                        check_exposure(merged, "it", needs)


def test_tls_files_must_belong_together(
    tmp_path: Path, certificate: Callable[..., dict[str, str]]
) -> None:
    tls = certificate()
    whole = Security.of(conf().with_values(tls, "t"))
    contexts = (whole.client_context(), whole.server_context())
    assert whole.tls and all(one.minimum_version == ssl.TLSVersion.TLSv1_2 for one in contexts)
    with pytest.raises(InvalidRequest, match="both or none"):
        Security.of(conf(storm__tls__cert=tls["storm.tls.cert"]))
    with pytest.raises(InvalidRequest, match=r"storm\.tls\.ca"):
        Security.of(conf().with_values({**tls, "storm.tls.ca": None}, "t"))
    os.chmod(tls["storm.tls.key"], 0o644)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        Security.of(conf().with_values(tls, "t"))
    other = certificate()
    with pytest.raises(InvalidRequest, match="belong together"):
        Security.of(conf().with_values({**tls, "storm.tls.key": other["storm.tls.key"]}, "t"))


def test_the_spark_token_is_private_and_shown_to_the_clusters_servers_only(tmp_path: Path) -> None:
    token = spark_token(conf(), tmp_path)
    assert (
        spark_token(conf(), tmp_path) == token
        and (tmp_path / "spark.token").stat().st_mode & 0o77 == 0
    )
    shown = f";authorization=Bearer%20{token}"
    cluster = conf(
        spark__remote="sc://127.0.0.1:5", topology__spark__remote="sc://Spark.example/;user_id=a"
    )
    servers = cluster_spark_servers(cluster)
    assert servers == ("sc://127.0.0.1:5", "sc://Spark.example/;user_id=a")
    for own in ("sc://127.0.0.1:5/", "sc://127.0.0.1:5/;session_id=a"):
        assert with_spark_token(own, servers, tmp_path) == own + shown
    assert with_spark_token("sc://127.0.0.1:5", servers, tmp_path) == f"sc://127.0.0.1:5/{shown}"
    others = (
        *(
            "sc://127.0.0.1:6",
            "sc://127.0.0.1",
            "sc://localhost:5",
            "sc://[::1]:5",
            "sc://127.0.0.1.evil:5",
        ),
        *(
            "sc://127.0.0.1:5@evil:5",
            "sc://evil:5/127.0.0.1:5",
            "sc://127.0.0.1:5?@evil",
            "sc://evil#@127.0.0.1:5",
        ),
        *("sc://spark.example:5", "sc://127.0.0.1:5/;token=mine", "http://127.0.0.1:5", "local[2]"),
    )
    for other in others:
        assert with_spark_token(other, servers, tmp_path) == other
    # The token of one HOME is known on its machine only.
    assert (
        with_spark_token("sc://spark.example:15002", servers, tmp_path)
        == "sc://spark.example:15002"
    )
    assert with_spark_token("sc://127.0.0.1:5", servers, tmp_path / "nowhere") == "sc://127.0.0.1:5"
    assert with_spark_token("sc://127.0.0.1:5", (), tmp_path) == "sc://127.0.0.1:5"
    derived = Security(SECRET).derived("spark connect").hex()
    assert spark_token(conf(storm__secret=SECRET), tmp_path) == derived
    assert with_spark_token("sc://spark.example:15002", servers, tmp_path).endswith(
        f"Bearer%20{derived}"
    )
    for other in others:
        assert (
            with_spark_token(other, servers, tmp_path)
            == with_spark_token(other, servers, None, derived)
            == other
        )
    (tmp_path / "spark.token").chmod(0o644)
    assert with_spark_token("sc://127.0.0.1:5", servers, tmp_path) == "sc://127.0.0.1:5"
