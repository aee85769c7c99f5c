"""``doctor --security`` names what is exposed, with a remedy for each."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.host.cgroups import cgroup_of, may_make_cgroups
from storm_dagster.host.endpoints import cluster_conf
from storm_dagster.host.files import make_home_private
from storm_dagster.operations.read import exposures as security_report
from storm_dagster.operations.read.exposures import ClusterPlace, exposures
from storm_dagster.testing.cluster import run_cli
from storm_dagster.zk.storm_cluster_state import StormClusterState

SECRET = "a-secret-planted-for-tests-4711"


def found(home: Path, **keys: Any) -> dict[str, list[tuple[str, str, str]]]:
    conf = cluster_conf(home, home, {key.replace("__", "."): value for key, value in keys.items()})
    place = ClusterPlace(home, home, conf)
    return {name: list(check(place)) for name, check in exposures(place).items()}


def only(rows: list[tuple[str, str, str]]) -> tuple[str, str]:
    ((state, what, remedy),) = rows
    assert state == "ok" or remedy, "an exposure without a remedy"
    return state, what


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_home_private(tmp_path / "home")


@pytest.fixture
def dagster() -> Iterator[str]:
    class Open(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            shown = self.headers.get("Authorization")
            self.send_response(200 if self.path == "/open" and shown is None else 401)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Open)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://ann:pw-planted@127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_cluster_without_any_conf(home: Path) -> None:
    rows = found(home)
    assert (
        only(rows["callers"])[0] == "warning"
        and "every user of this machine" in only(rows["callers"])[1]
    )
    assert only(rows["workers"]) == (
        "warning",
        "WORKERS RUN AS THE DAEMONS' USER: EVERY USER WITH SUBMIT RIGHTS IS AN ADMINISTRATOR",
    )
    assert {only(rows[name])[0] for name in ("TLS", "ZooKeeper", "HOME", "Spark", "Dagster")} == {
        "ok"
    }


def test_where_children_may_outlive_their_worker(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    can_make_cgroups = may_make_cgroups(cgroup_of("self"))
    assert only(found(home)["children"])[0] == ("ok" if can_make_cgroups else "warning")
    monkeypatch.setattr(security_report, "cgroup_of", lambda _: None)
    state, text = only(found(home)["children"])
    assert state == "warning" and "outlives it" in text


def test_where_the_kernel_names_no_users(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security_report, "can_identify_peers", lambda: False)
    assert "every local user may do all" in only(found(home)["callers"])[1]


def test_servers_that_are_called_in_clear_are_shown(home: Path) -> None:
    rows = found(
        home,
        storm__secret=SECRET,
        storm__security__plaintext__peers=["zk1:2181", "10.0.0.0/8"],
        storm__security__peer__users=["nobody", "a-user-that-is-not-here"],
    )["servers"]
    warned = [what for state, what, remedy in rows if state == "warning" and "TLS" in remedy]
    assert [what.split()[0] for what in warned] == ["zk1:2181", "10.0.0.0/8"]
    text = "\n".join(what for _, what, _ in rows)
    assert "nobody (uid " in text and "a-user-that-is-not-here" in text


def test_without_any_conf_no_server_is_called_in_clear_unseen(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert only(found(home)["servers"])[0] == "ok"
    monkeypatch.setattr(security_report, "can_identify_peers", lambda: False)
    assert only(found(home)["servers"])[0] == "warning"
    assert only(found(home, storm__secret=SECRET)["servers"])[0] == "ok"


def test_what_is_open_beyond_loopback(home: Path, dagster: str) -> None:
    home.chmod(0o755)
    rows = found(
        home,
        storm__secret=SECRET,
        storm__local__hostname="192.0.2.7",
        spark__remote="sc://192.0.2.8:15002",
        dagster__graphql__url=f"{dagster}/open",
    )
    assert only(rows["callers"])[0] == "ok"
    for name in ("TLS", "HOME", "Spark", "Dagster"):
        assert only(rows[name])[0] == "warning", name
    assert "pw-planted" not in repr(rows) and SECRET not in repr(rows)
    closed = found(
        home,
        spark__remote="sc://192.0.2.8:15002/;use_ssl=true",
        dagster__graphql__url=f"{dagster}/closed",
    )
    assert only(closed["Spark"])[0] == only(closed["Dagster"])[0] == "ok"


def test_an_open_and_a_closed_zookeeper(
    home: Path, zk_conf: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = {key.replace(".", "__"): value for key, value in zk_conf.items()}
    with StormClusterState.open(zk_conf, create_root=True):
        state, what = only(found(home, **conf)["ZooKeeper"])
        assert state == "warning" and "make it run code" in what
    closed = {
        "storm.zookeeper.root": f"{zk_conf['storm.zookeeper.root']}-closed",
        "storm.secret": SECRET,
    }
    with StormClusterState.open({**zk_conf, **closed}, create_root=True):
        conf |= {key.replace(".", "__"): value for key, value in closed.items()}
        assert only(found(home, **conf)["ZooKeeper"])[0] == "ok"
        monkeypatch.setattr(
            "storm_dagster.zk.embedded.server_status", lambda *_: b"Zookeeper version: 3.8.4-abc"
        )
        assert "3.8.4" in only(found(home, **conf)["ZooKeeper"][:1])[1]


def test_the_verb_and_its_json(home: Path) -> None:
    done = run_cli("doctor", "--security", "--json", home=home)
    rows = done.document["findings"]
    assert done.code == 0 and {row["check"] for row in rows} >= {"callers", "workers"}
    assert all(row["mend"] for row in rows if row["state"] != "ok")
