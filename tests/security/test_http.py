"""A nimbus with a secret, with certificates, with users."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import queue
import select
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import trustme

from storm_dagster.client.blobs import NimbusBlobClient
from storm_dagster.client.http import NimbusClient
from storm_dagster.core.dataplane.event_outbox import ReportResponse
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.model.access_tokens import TokenScope
from storm_dagster.model.conf import default_conf
from storm_dagster.model.errors import InvalidRequest, NotAuthenticated
from storm_dagster.security.settings import Security
from storm_dagster.security.signing import (
    RequestHead,
    about_content,
    body_hash,
    sign,
)
from storm_dagster.supervisor.handed_conf import handed_conf
from storm_dagster.supervisor.log_service import LogService
from storm_dagster.worker.dataplane.events import EventSender
from storm_rigs.protocols.tokens import bearer, recorded_token
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.nimbus_thread import NimbusThread

pytestmark = pytest.mark.zookeeper
SECRET = "a-secret-planted-for-tests-4711"


def test_with_a_secret_only_who_shows_it_is_served(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    first = stage.nimbus(storm__secret=SECRET).await_leading()
    second = stage.nimbus("n2", storm__secret=SECRET)
    with first.client(Security()) as outsider, first.client() as friend:
        assert outsider.get("/healthz").status_code == 200
        assert outsider.get("/livez").status_code == outsider.get("/readyz").status_code == 200
        for method, path in (
            ("GET", "/v1/topologies"),
            ("GET", "/v1/cluster"),
            ("GET", "/metrics"),
            ("PUT", "/v1/blobs/k"),
            ("POST", "/v1/submit"),
            ("GET", "/no/such/path"),
        ):
            wrong = ("Bearer wrong", "Basic !!", f"Bearer {SECRET}", "Storm 1.2.3.4")
            for header in ({}, *({"Authorization": value} for value in wrong)):
                refused = outsider.request(method, path, headers=header)
                assert refused.status_code == 401, (method, path, header)
                assert refused.json()["error"]["type"] == "NotAuthenticated"
                assert (
                    refused.headers["WWW-Authenticate"] == "Bearer" and SECRET not in refused.text
                )
            assert friend.request(method, path).status_code != 401
        token = recorded_token(friend, SECRET, "read")
        assert outsider.get("/v1/topologies", auth=("anybody", token)).status_code == 200
        with pytest.raises(NotAuthenticated), NimbusBlobClient(first.url) as blobs:
            blobs.put("k", b"x")
        security = Security(SECRET)
        with NimbusBlobClient(
            first.url, min_replication=2, security=security, deadline_secs=40
        ) as blobs:
            assert blobs.put("k", b"content").size == 7, "nimbuses prove themselves to each other"
        with NimbusClient([second.url], security=security) as client:
            assert client.get("/v1/topologies")["topologies"] == []
        told = friend.get("/metrics").text + friend.get("/v1/cluster").text
        configuration = friend.get("/api/v1/cluster/configuration")
        assert SECRET not in told + configuration.text
    assert SECRET not in caplog.text and "refused GET" in caplog.text


def test_a_supervisors_logs_need_a_proof(tmp_path: Path) -> None:
    service = LogService(
        load_cluster_conf(None, {"storm.secret": SECRET, "supervisor.http.port": 0}), tmp_path, "s1"
    )
    service.start(lambda: ())
    try:
        options = {"base_url": service.url, "timeout": 20}
        with (
            httpx.Client(**options, **Security().client_options()) as outsider,
            httpx.Client(**options, **Security(SECRET).client_options()) as friend,
        ):
            for path in ("/healthz", "/livez", "/readyz"):
                assert outsider.get(path).json()["status"] == "ok"
            for method, path in (
                ("GET", "/v1/workers"),
                ("POST", "/v1/workers/1/restart"),
                ("GET", "/no/such/path"),
            ):
                assert outsider.request(method, path).status_code == 401
                assert friend.request(method, path).status_code != 401
            assert friend.get("/v1/workers").json() == {"workers": []}
    finally:
        service.stop()


_ASKED: dict[TokenScope, list[tuple[str, str]]] = {
    "metrics": [("GET", "/metrics")],
    "read": [("GET", "/v1/topologies"), ("GET", "/v1/cluster"), ("GET", "/v1/topologies/x")],
    "read:tuples": [
        ("GET", "/v1/topologies/x/dead-letters"),
        ("GET", "/v1/topologies/x/state/totals"),
    ],
    "operate": [
        ("POST", "/v1/topologies/x/kill"),
        ("POST", "/v1/submit"),
        ("POST", "/v1/uploads"),
        ("GET", "/v1/topologies/x/events"),
        ("POST", "/v1/topologies/x/events/taken"),
    ],
    "admin": [("POST", "/v1/blacklist"), ("GET", "/v1/blobs"), ("GET", "/no/such/path")],
}
_ASKED["admin"] += [("GET", "/api/v1/cluster/configuration"), ("GET", "/v1/access-tokens")]


def test_a_token_opens_what_its_scope_names(stage: Stage) -> None:
    nimbus = stage.nimbus(storm__secret=SECRET).await_leading()
    with nimbus.client(Security()) as client, nimbus.client() as friend:
        for opened, scope in enumerate(_ASKED, start=1):
            login = bearer(recorded_token(friend, SECRET, scope))
            for place, asked in enumerate(_ASKED.values()):
                for method, path in asked:
                    status = client.request(method, path, headers=login).status_code
                    assert (status == 403) == (place >= opened), (scope, method, path, status)


def test_a_changed_body_is_refused_before_anything_is_done(
    stage: Stage,
) -> None:
    nimbus = stage.nimbus(storm__secret=SECRET).await_leading()
    with nimbus.client(Security()) as client, nimbus.client() as friend:
        signed = RequestHead("POST", httpx.URL(nimbus.url).netloc.decode(), "/v1/blacklist")
        for body, content in (
            (b'{"add": ["a"]}', b'{"add": ["evil"]}'),
            (b"", b'{"add": ["evil"]}'),
        ):
            header = sign(SECRET, signed, body_hash(body))
            refused = client.post(
                "/v1/blacklist", content=content, headers={"Authorization": header}
            )
            assert refused.status_code == 401, refused.text
        assert friend.get("/v1/blacklist").json() == {"hosts": []}


def test_a_changed_upload_is_refused_and_nothing_is_stored(
    stage: Stage,
) -> None:
    nimbus = stage.nimbus(storm__secret=SECRET).await_leading()
    with nimbus.client(Security()) as client, nimbus.client() as friend:
        about = about_content([("X-Content-SHA256", body_hash(b"good"))])
        signed = RequestHead("PUT", httpx.URL(nimbus.url).netloc.decode(), "/v1/blobs/k", about)
        for announced, sent, status in (
            (b"good", b"evil", 401),
            (b"evil", b"evil", 401),
            (b"good", b"good", 201),
        ):
            headers = {"Authorization": sign(SECRET, signed, body_hash(b"good"))}
            headers["X-Content-SHA256"] = body_hash(announced)
            assert friend.get("/v1/blobs/k").status_code == 404
            answer = client.put("/v1/blobs/k", content=iter([sent[:2], sent[2:]]), headers=headers)
            assert answer.status_code == status, answer.text
        assert friend.get("/v1/blobs/k").content == b"good"


def shaken(nimbus: NimbusThread, tls: dict[str, str] | None, authority: trustme.CA) -> int | str:
    """Status of a request over TLS with that certificate; ``"refused"`` when there is no
    connection.
    """
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if tls is not None:
        context.load_cert_chain(tls["storm.tls.cert"], tls["storm.tls.key"])
    try:
        with httpx.Client(
            base_url=nimbus.url, verify=context, trust_env=False, timeout=20
        ) as client:
            return client.get("/v1/topologies").status_code
    except httpx.TransportError:
        return "refused"


def test_certificates_fail_closed(
    stage: Stage,
    certificate: Callable[..., dict[str, str]],
    authority: trustme.CA,
    caplog: pytest.LogCaptureFixture,
) -> None:
    past = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=2)
    users = {"nimbus.admins": ["daemon"], "nimbus.users": ["ann"], "nimbus.groups": []}
    nimbus = stage.nimbus(conf={**certificate(), **users}).await_leading()
    assert nimbus.url.startswith("https://")
    expired = certificate("daemon", not_before=past - datetime.timedelta(days=2), not_after=past)
    for wrong in (None, expired, certificate("daemon", by=trustme.CA())):
        assert shaken(nimbus, wrong, authority) == "refused"
    assert "a TLS client was refused" in caplog.text
    assert {
        record.levelname for record in caplog.records if "TLS client" in record.getMessage()
    } == {"WARNING"}
    assert shaken(nimbus, certificate("daemon"), authority) == 200
    assert shaken(nimbus, certificate("ann"), authority) == 200
    assert shaken(nimbus, certificate("eve"), authority) == 403
    with pytest.raises(httpx.HTTPError):
        httpx.get(nimbus.url.replace("https", "http") + "/healthz", timeout=5, trust_env=False)


class Heard:
    """A port whose every byte is written down, and which passes on to ``target``, if there is
    one.
    """

    def __init__(self, target: int | None = None) -> None:
        self.bytes = bytearray()
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            link, _ = self._listener.accept()
            with link:
                if self._target == 0:
                    return
                answers = (
                    socket.create_connection(("127.0.0.1", self._target)) if self._target else None
                )
                ends = [link] if answers is None else [link, answers]
                while (ready := select.select(ends, [], [], 20)[0]) and (
                    got := ready[0].recv(65_536)
                ):
                    self.bytes += got
                    if answers is not None:
                        (answers if ready[0] is link else link).sendall(got)
                if answers is not None:
                    answers.close()

    def close(self) -> None:
        self._target = 0
        socket.create_connection(("127.0.0.1", self.port)).close()
        self._thread.join(30)
        self._listener.close()


@pytest.mark.long
def test_a_workers_events_reach_a_nimbus_with_tls(
    stage: Stage, certificate: Callable[..., dict[str, str]]
) -> None:
    tls = certificate()
    nimbus = stage.nimbus(storm__secret=SECRET, conf=tls).await_leading()
    conf = handed_conf({**default_conf(), **tls, "storm.secret": SECRET}, other_user=True)
    spec: Any = SimpleNamespace(conf=conf, topology_id="wc-1-1700000000", token="t")
    cluster: Any = SimpleNamespace(leader_http=lambda: nimbus.url)
    responses: queue.SimpleQueue[ReportResponse] = queue.SimpleQueue()
    EventSender(spec, cluster, responses.put).send([])
    problem = responses.get(timeout=60).problem
    # Nimbus has read the request: there is no such worker here.
    assert problem is not None and "come from its live workers only" in problem


def test_with_tls_and_a_secret_signatures_travel_over_tls_alone(
    stage: Stage, certificate: Callable[..., dict[str, str]]
) -> None:
    tls, client = certificate(), certificate("eve")
    nimbus = stage.nimbus(storm__secret=SECRET, conf=tls).await_leading()
    assert nimbus.url.startswith("https://")
    both = Security.of({**client, "storm.secret": SECRET})
    authority = tls["storm.tls.ca"]
    for security, status in (
        (both, 200),
        (Security(SECRET, ca=authority), 200),
        (Security("f" * 32, ca=authority), 401),
        (Security(ca=authority), 401),
        # A certificate alone is that of its user, who is in no list.
        (dataclasses.replace(both, secret=None), 403),
    ):
        with nimbus.client(security) as http:
            assert http.get("/healthz").status_code == 200
            assert http.get("/v1/topologies").status_code == status, security
            assert http.post("/v1/blacklist", json={"add": ["h"]}).status_code == status
    foreign = {
        **certificate("daemon", by=trustme.CA()),
        "storm.tls.ca": authority,
        "storm.secret": SECRET,
    }
    with nimbus.client(Security.of(foreign)) as http:
        with pytest.raises(httpx.TransportError):
            http.get("/v1/topologies")
    with pytest.raises(httpx.TransportError):
        httpx.get(nimbus.url.replace("https", "http") + "/v1/topologies", trust_env=False)

    through, clear = Heard(nimbus.ports["http"]), Heard()
    try:
        with httpx.Client(
            base_url=f"https://127.0.0.1:{through.port}", **both.client_options()
        ) as http:
            assert http.get("/v1/topologies").status_code == 200
        url = f"http://127.0.0.1:{clear.port}"
        with (
            pytest.raises(InvalidRequest, match="is not https"),
            NimbusBlobClient(url, security=both) as blobs,
        ):
            blobs.put("k", b"x")
        # Who knows the cluster's authority knows that it speaks TLS, also without a certificate of
        # his own.
        for security in (both, Security(SECRET, ca=authority)):
            with httpx.Client(base_url=url, **security.client_options()) as http:
                for method, path in (
                    ("GET", "/v1/topologies"),
                    ("POST", "/v1/submit"),
                    ("GET", "/healthz"),
                ):
                    with pytest.raises(InvalidRequest, match="is not https"):
                        http.request(method, path)
    finally:
        through.close()
        clear.close()
    assert len(through.bytes) > 1_000 and not clear.bytes
    for text in (SECRET, "Authorization", "Storm ", "/v1/topologies"):
        assert text.encode() not in through.bytes


def test_users_see_what_is_theirs_alone(
    stage: Stage,
    certificate: Callable[..., dict[str, str]],
) -> None:
    keys = {"nimbus.admins": ["daemon", "boss"], "nimbus.users": ["ann"]}
    nimbus = stage.nimbus(conf={**certificate(), **keys}).await_leading()

    def status(user: str, path: str) -> int:
        with nimbus.client(Security.of(nimbus.conf.with_values(certificate(user), "t"))) as client:
            return client.get(path).status_code

    assert status("boss", "/v1/cluster") == status("ann", "/v1/topologies") == 200
    for hidden in (
        "/v1/cluster",
        "/api/v1/supervisor?host=127.0.0.1",
        "/v1/blobs",
        "/v1/topologies/others",
    ):
        assert status("ann", hidden) == 403, hidden
    assert status("gateway", "/v1/topologies") == 403


def test_a_nimbus_beyond_loopback_without_proof_does_not_start(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    nimbus = stage.nimbus(storm__local__hostname="0.0.0.0", storm__bind__external=True)
    assert nimbus.stop() == InvalidRequest.exit_code
    assert "storm.secret.file" in caplog.text and "not authenticate callers" in caplog.text
