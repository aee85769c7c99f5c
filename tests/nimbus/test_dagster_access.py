"""A Dagster behind a proxy that asks who calls: what is sent, what is never shown, what a refusal
says.
"""

from __future__ import annotations

import base64
import http.server
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.model.conf import HIDDEN, ClusterConf, mask
from storm_dagster.model.errors import InvalidRequest, Misconfigured, Unavailable
from storm_dagster.nimbus.dagster.client import DagsterClient
from storm_dagster.nimbus.dagster.transport import DagsterAccess, DagsterTransport
from storm_rigs.stage.dagster_webserver import DagsterServer

pytestmark = pytest.mark.dagster
PASSWORD = "pa/ss@word-4711"
BASIC = "Basic " + base64.b64encode(f"ann:{PASSWORD}".encode()).decode()


class Gate:
    """A proxy before the real webserver that lets through who shows ``admitted`` in the header
    ``name``.
    """

    def __init__(self, target: str) -> None:
        self.name, self.admitted, self.refusal = "Authorization", "", 401
        gate = self
        site = target.removesuffix("/graphql")

        class Handler(http.server.BaseHTTPRequestHandler):
            def _answer(self, method: str) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if self.headers.get(gate.name) != gate.admitted:
                    self.send_response(gate.refusal)
                    self.send_header("location", "/login?from=nimbus")
                    self.send_header("content-length", "0")
                    self.end_headers()
                    return
                answer = httpx.request(
                    method,
                    site + self.path,
                    content=body,
                    headers={"content-type": self.headers.get("content-type") or "text/plain"},
                    timeout=20,
                    trust_env=False,
                )
                self.send_response(answer.status_code)
                self.send_header("content-type", answer.headers.get("content-type", "text/plain"))
                self.send_header("content-length", str(len(answer.content)))
                self.end_headers()
                self.wfile.write(answer.content)

            def do_POST(self) -> None:
                self._answer("POST")

            def do_GET(self) -> None:
                self._answer("GET")

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.place = f"127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def gate(dagster_server: DagsterServer) -> Iterator[Gate]:
    gate = Gate(dagster_server.url)
    yield gate
    gate.close()


def conf(**values: object) -> ClusterConf:
    return load_cluster_conf(
        None, {f"dagster.graphql.{key}": value for key, value in values.items()}
    )


def client(**values: object) -> DagsterClient:
    access = DagsterAccess.of(conf(**values))
    return DagsterClient(DagsterTransport(lambda: access, timeout=20))


def token_file(folder: Path, token: str) -> Path:
    path = folder / "token"
    path.write_text(f"{token}\n")
    path.chmod(0o600)
    return path


@pytest.mark.long
def test_user_and_password_of_the_address_are_used_and_never_shown(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    gate.admitted = BASIC
    url = f"http://ann:pa%2Fss%40word-4711@{gate.place}/graphql"
    dagster = client(url=url)
    dagster.add_partition("behind-basic")
    assert dagster.find_run("storm/token", "nothing") is None
    gate.admitted = "another"
    with pytest.raises(Misconfigured) as refused:
        dagster.add_partition("behind-basic")
    access = DagsterAccess.of(conf(url=url))
    shown = [
        caplog.text,
        refused.value.message,
        dagster.run_url("r1"),
        repr(access),
        repr(conf(url=url)),
    ]
    assert not [text for text in shown if "4711" in str(text) or "ann" in str(text)]
    assert dagster.run_url("r1") == f"http://{gate.place}/runs/r1"
    dagster.close()


def test_a_renewed_token_counts_at_once(gate: Gate, tmp_path: Path) -> None:
    gate.admitted = "Bearer first"
    file = token_file(tmp_path, "first")
    dagster = client(**{"url": f"http://{gate.place}/graphql", "token.file": str(file)})
    dagster.add_partition("behind-token")
    gate.admitted = "Bearer second"
    with pytest.raises(Misconfigured, match=r"refuses the credentials \(401\).*token\.file"):
        dagster.add_partition("behind-token")
    token_file(tmp_path, "second")
    dagster.add_partition("behind-token")
    file.chmod(0o644)
    with pytest.raises(Misconfigured, match=r"token\.file .* chmod 600"):
        dagster.add_partition("behind-token")
    file.unlink()
    with pytest.raises(Misconfigured, match=r"token\.file .* cannot be read"):
        dagster.add_partition("behind-token")
    dagster.close()


def test_headers_are_sent_as_they_are_given(gate: Gate) -> None:
    gate.name, gate.admitted = "Dagster-Cloud-Api-Token", "user:planted"
    dagster = client(
        url=f"http://{gate.place}/graphql", headers={"Dagster-Cloud-Api-Token": "user:planted"}
    )
    dagster.add_partition("behind-header")
    dagster.close()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (
            401,
            r"requires credentials \(401\): set dagster\.graphql\.token\.file or dagster\.graphql\.headers",
        ),
        (403, r"does not permit nimbus to do this \(403\)"),
        (302, r"login page.*dagster\.graphql\.url"),
        (404, r"no GraphQL answers.*dagster\.graphql\.url"),
    ],
)
def test_what_no_later_try_heals_names_the_key(gate: Gate, status: int, words: str) -> None:
    gate.refusal = status
    gate.admitted = "nobody"
    dagster = client(url=f"http://{gate.place}/graphql")
    with pytest.raises(Misconfigured, match=words) as refused:
        dagster.add_partition("x")
    assert "try again" not in refused.value.message
    dagster.close()


def test_a_proxy_without_its_webserver_heals_by_itself(gate: Gate) -> None:
    gate.refusal, gate.admitted = 502, "nobody"
    dagster = client(url=f"http://{gate.place}/graphql")
    with pytest.raises(Unavailable, match="answered 502"):
        dagster.add_partition("x")
    dagster.close()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"headers": {"X-Key": "two\nlines"}}, r"headers: header 'X-Key'"),
        ({"headers": {"X-Key": 7}}, r"headers: header 'X-Key'"),
        (
            {"headers": {"authorization": "Bearer a"}, "token.file": "/t"},
            "both give the header Authorization",
        ),
        (
            {"url": "http://ann:b@h/graphql", "token.file": "/t"},
            "both give the header Authorization",
        ),
        ({"url": "h:3000/graphql"}, "is not an address"),
        ({"url": "http://ann:4711@[broken/graphql"}, "is not an address"),
    ],
)
def test_a_wrong_conf_is_refused_before_anything_is_sent(
    values: dict[str, Any], words: str
) -> None:
    with pytest.raises(Misconfigured, match=words) as refused:
        DagsterAccess.of(conf(**{"url": "http://h/graphql", **values}))
    assert "4711" not in refused.value.message


def test_a_conf_is_shown_without_its_credentials(tmp_path: Path) -> None:
    values = {
        "dagster.graphql.url": "https://ann:4711@dagster.example/graphql",
        "dagster.graphql.headers": {"Dagster-Cloud-Api-Token": "planted", "X-Plain": "planted"},
        "dagster.graphql.token.file": "/etc/storm_dagster/token",
    }
    assert mask(values) == {
        "dagster.graphql.url": f"https://{HIDDEN}@dagster.example/graphql",
        "dagster.graphql.headers": {"Dagster-Cloud-Api-Token": HIDDEN, "X-Plain": HIDDEN},
        "dagster.graphql.token.file": "/etc/storm_dagster/token",
    }
    with pytest.raises(InvalidRequest, match="must be a map") as wrong:
        conf(headers="Dagster-Cloud-Api-Token: planted")
    assert "planted" not in wrong.value.message
    file = tmp_path / "storm.yaml"
    file.write_text(json.dumps(values))
    file.chmod(0o644)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        load_cluster_conf(tmp_path)
