"""The client of nimbus against a small HTTP server that answers by nimbus's contract."""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme

from storm_dagster.cli.dev import readiness
from storm_dagster.client import NimbusClient, upload, wait_for_run, wait_for_tasks
from storm_dagster.client.blobs import NimbusBlobClient
from storm_dagster.client.changes import change_topology, drain_hosts
from storm_dagster.client.leader import UnavailableAtLeader
from storm_dagster.client.submission import submit_uploaded
from storm_dagster.client.uploads import Uploaded
from storm_dagster.core.dataplane.event_outbox import ReportResponse
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.model.conf import seed_urls
from storm_dagster.model.errors import (
    NOT_LEADING_HEADER,
    AlreadyAlive,
    Fenced,
    InvalidRequest,
    KeyNotFound,
    StormDagsterError,
    Unavailable,
)
from storm_dagster.model.topology import TopologySpec
from storm_dagster.packaging.archive import Archive
from storm_dagster.worker.dataplane.events import EventSender

LOST_REPLY = 0
"""Status of a response that never arrives: the connection is closed instead."""
NOT_THE_LEADER = (503, {"error": {"type": "Unavailable", "message": "not the leader"}})


class Peer:
    """One nimbus: its leadership, its archives, and what it was asked."""

    def __init__(self) -> None:
        self.leads = True
        self.status = "no leader"
        self.leader_http: str | None = None
        self.epochs: list[int] = [1]
        """Epoch of each further answer of its health; the last one stays."""
        self.archives: set[str] = set()
        self.asked: list[tuple[str, str]] = []
        self.marks_refusals = False
        """Send the header of a nimbus that does not lead with each 503."""
        self.scripted: dict[str, list[tuple[int, Any]]] = {}
        peer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def answer(self, status: int, document: Any) -> None:
                if status == LOST_REPLY:
                    self.close_connection = True
                    return
                body = json.dumps(document).encode()
                self.send_response(status)
                if status == 503 and peer.marks_refusals:
                    self.send_header(NOT_LEADING_HEADER, "true")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                peer.asked.append((self.command, self.path))
                self.answer(*peer.reply(self.command, self.path, body, dict(self.headers)))

            do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = handle_any

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def reply(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, Any]:
        if path == "/healthz":
            status = "ok" if self.leads else self.status
            epoch = self.epochs.pop(0) if len(self.epochs) > 1 else self.epochs[0]
            return 200, {
                "status": status,
                "leader": self.leads,
                "leader_http": self.leader_http,
                "epoch": epoch,
            }
        if self.scripted.get(path):
            answers = self.scripted[path]
            return answers.pop(0) if len(answers) > 1 else answers[0]
        if not self.leads:
            return 503, {"error": {"type": "Unavailable", "message": "not the leader"}}
        if method == "HEAD":
            return (200 if path.rpartition("/")[2] in self.archives else 404), {}
        if method == "PUT" and "/archive" in path:
            if "sha256=" in path:
                return 200, {}
            digest = hashlib.sha256(body).hexdigest()
            if headers["X-Content-SHA256"] != digest:
                return 400, {"error": {"type": "InvalidRequest", "message": "hash"}}
            self.archives.add(digest)
        return 200, {"handle": "h1", "run_id": "r1"}


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    made = [Peer(), Peer()]
    yield made
    for peer in made:
        peer.server.shutdown()
        peer.server.server_close()
        peer.thread.join(5)


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    path = tmp_path / "a.zip"
    path.write_bytes(tmp_path.name.encode() * 100_000)
    return Archive(path, hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size, 1)


def test_the_leader_is_found_through_a_follower(peers: list[Peer]) -> None:
    follower, leader = peers
    follower.leads, follower.leader_http = False, leader.url
    with NimbusClient([follower.url], patience=5) as nimbus:
        assert nimbus.leader() == leader.url
        assert nimbus.post("/v1/x") == {"handle": "h1", "run_id": "r1"}


def test_a_change_of_leader_is_waited_for(peers: list[Peer]) -> None:
    old, new = peers
    new.leads = False
    with NimbusClient([old.url, new.url], patience=20) as nimbus:
        assert nimbus.leader() == old.url
        old.leads = False
        timer = threading.Timer(0.5, lambda: setattr(new, "leads", True))
        timer.start()
        nimbus.post("/v1/x")
        timer.join()
        assert ("POST", "/v1/x") in new.asked


@pytest.mark.parametrize(
    "refusal",
    [
        "nimbus a:1 is a follower and takes no writes: send this to the leader b:1 at http://b:2",
        "nimbus a:1 does not lead, and no other nimbus does at the moment: try again",
    ],
)
@pytest.mark.parametrize("is_marked", [True, False], ids=["header", "words"])
def test_a_change_that_a_follower_refused_is_made_at_the_leader(
    peers: list[Peer], refusal: str, is_marked: bool
) -> None:
    """A nimbus of the release before refuses in words only."""
    old, new = peers
    new.leads = False
    path = "/v1/topologies/wc/restart"
    with NimbusClient([old.url, new.url], patience=20) as nimbus:
        assert nimbus.leader() == old.url
        old.leads, new.leads = False, True
        text = "refused" if is_marked else refusal
        old.marks_refusals = is_marked
        old.scripted[path] = [(503, {"error": {"type": "Unavailable", "message": text}})]
        nimbus.post(path, repeat=False)
    assert old.asked.count(("POST", path)) == new.asked.count(("POST", path)) == 1


def test_a_change_of_unknown_outcome_is_not_repeated_at_a_new_leader(
    peers: list[Peer],
) -> None:
    old, new = peers
    new.leads = False
    path = "/v1/topologies/wc/restart"
    late = (503, {"error": {"type": "Unavailable", "message": "Dagster did not answer"}})
    with NimbusClient([old.url, new.url], patience=20) as nimbus:
        assert nimbus.leader() == old.url
        old.leads, new.leads = False, True
        old.scripted[path] = [late]
        with pytest.raises(Unavailable, match="Dagster did not answer"):
            nimbus.post(path, repeat=False)
        assert ("POST", path) not in new.asked
        nimbus.post(path)
        assert ("POST", path) in new.asked, "what is safe to repeat is repeated"


def test_only_a_harmless_call_is_repeated_after_a_lost_reply(
    peers: list[Peer],
) -> None:
    leader = peers[0]
    lost_once = [(LOST_REPLY, None), (200, {"run_id": "r1"})]
    leader.scripted = {"/v1/read": [*lost_once], "/v1/launch": [*lost_once]}
    with NimbusClient([leader.url], patience=20) as nimbus:
        assert nimbus.get("/v1/read") == {"run_id": "r1"}
        with pytest.raises(Unavailable, match=r"POST /v1/launch: .* does not answer"):
            nimbus.post("/v1/launch", repeat=False)
    assert leader.asked.count(("GET", "/v1/read")) == 2
    assert leader.asked.count(("POST", "/v1/launch")) == 1


def test_a_deletion_whose_reply_was_lost_has_succeeded(peers: list[Peer]) -> None:
    """Its repetition finds no token or blob; without a lost reply that is an error."""
    leader = peers[0]
    absent = (404, {"error": {"type": "KeyNotFound", "message": "it is not there"}})
    token_path = "/v1/access-tokens/1a"
    leader.scripted = {
        token_path: [(LOST_REPLY, None), absent],
        "/v1/blobs/k": [(LOST_REPLY, None), absent],
    }
    with NimbusClient([leader.url], patience=20) as nimbus:
        nimbus.request("DELETE", token_path)
        with pytest.raises(KeyNotFound, match="it is not there"):
            nimbus.request("DELETE", token_path)
    with NimbusBlobClient(leader.url, deadline_secs=20) as blobs:
        blobs.delete("k")
        with pytest.raises(KeyNotFound, match="it is not there"):
            blobs.delete("k")


def test_a_refusal_is_final_only_from_a_nimbus_that_leads(peers: list[Peer]) -> None:
    leader = peers[0]
    silent = {"error": {"type": "Unavailable", "message": "Dagster does not answer"}}
    leader.scripted = {"/v1/runs/r1": [(503, silent)]}
    with NimbusClient([leader.url], patience=20) as nimbus:
        with pytest.raises(UnavailableAtLeader, match="Dagster does not answer"):
            nimbus.get("/v1/runs/r1")
    assert leader.asked.count(("GET", "/v1/runs/r1")) == 1


def test_blobs_follow_a_change_of_leader(peers: list[Peer]) -> None:
    old, new = peers
    old.scripted = {"/v1/blobs?prefix=": [NOT_THE_LEADER]}
    new.scripted = {"/v1/blobs?prefix=": [(200, {"blobs": []})]}
    # ZooKeeper names none at first, then the old leader, and then the new one.
    named = iter([None, old.url, new.url])

    def leader_url() -> str:
        url = next(named)
        if url is None:
            raise Unavailable("no nimbus has led yet")
        return url

    with NimbusBlobClient(leader_url, deadline_secs=20) as blobs:
        assert blobs.list() == []
    assert ("GET", "/v1/blobs?prefix=") in old.asked
    assert ("GET", "/v1/blobs?prefix=") in new.asked


@pytest.mark.parametrize("repeated", [True, False])
def test_blobs_are_unavailable_when_no_leader_comes(repeated: bool, peers: list[Peer]) -> None:
    peers[0].scripted = {"/v1/blobs?prefix=": [NOT_THE_LEADER]}
    # The second try would come after 0.1 s.
    seconds = 0.5 if repeated else 0.1
    with NimbusBlobClient(peers[0].url, deadline_secs=seconds) as blobs:
        with pytest.raises(Unavailable, match="not the leader"):
            blobs.list()
    assert (len(peers[0].asked) > 1) == repeated


def test_events_go_to_the_leader_once(peers: list[Peer]) -> None:
    leader = peers[0]
    path = "/v1/topologies/wc-1-1700000000/events"
    stored = {"stored": ["e1"], "refused": {}, "undefined": {}, "problem": None}
    leader.scripted = {path: [(LOST_REPLY, None), (200, stored)]}
    cluster: Any = SimpleNamespace(leader_http=lambda: leader.url)
    spec: Any = SimpleNamespace(conf={}, topology_id="wc-1-1700000000", token="t")
    responses: queue.SimpleQueue[ReportResponse] = queue.SimpleQueue()
    sender = EventSender(spec, cluster, responses.put)
    sender.send([])
    lost = responses.get(timeout=30)
    # The outbox repeats a batch, with the events that have been added since.
    assert lost.problem is not None and "does not answer" in lost.problem
    assert leader.asked.count(("POST", path)) == 1
    sender.send([])
    response = responses.get(timeout=30)
    assert response.stored == {"e1"}
    # The response of a nimbus without event logs has no "full".
    assert response.problem is None and not response.full


def test_events_wait_while_the_authority_of_nimbus_cannot_be_read(
    peers: list[Peer], tmp_path: Path
) -> None:
    leader = peers[0]
    path = "/v1/topologies/wc-1-1700000000/events"
    stored = {"stored": ["e1"], "refused": {}, "undefined": {}, "problem": None}
    leader.scripted = {path: [(200, stored)]}
    cluster: Any = SimpleNamespace(leader_http=lambda: leader.url)
    authority = tmp_path / "ca.pem"
    conf = {"storm.tls.ca": str(authority)}
    spec: Any = SimpleNamespace(conf=conf, topology_id="wc-1-1700000000", token="t")
    responses: queue.SimpleQueue[ReportResponse] = queue.SimpleQueue()
    sender = EventSender(spec, cluster, responses.put)
    sender.send([])
    waiting = responses.get(timeout=30)
    assert waiting.problem is not None and "storm.tls" in waiting.problem
    trustme.CA().cert_pem.write_to_path(str(authority))
    sender.send([])
    assert responses.get(timeout=30).stored == {"e1"}


def test_a_local_cluster_finds_the_leader_that_its_nimbuses_name(peers: list[Peer]) -> None:
    follower, leader = peers
    follower.leads, follower.leader_http = False, leader.url
    assert readiness.leader_url([follower.url]) == leader.url
    leader.leads = False
    assert readiness.leader_url([follower.url, leader.url]) is None
    assert readiness.leader_url([]) is None


def test_no_leader_is_unavailable(peers: list[Peer]) -> None:
    peers[0].leads = False
    with NimbusClient([peers[0].url, "http://127.0.0.1:1"], patience=0.3) as nimbus:
        with pytest.raises(Unavailable, match="no leading nimbus"):
            nimbus.get("/v1/topologies")


def test_a_wait_names_its_subject_and_a_fitting_remedy(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storm_dagster.client.leader._QUIET_SECS", 0.2)
    urls = [peer.url for peer in peers]
    received: list[str] = []
    for peer in peers:
        peer.leads = False
    with pytest.raises(Unavailable, match="one will lead in a few seconds") as leaderless:
        NimbusClient(urls, patience=3.0, waiting=received.append).get("/v1/topologies")
    assert len(received) == 1 and "waiting up to 3 s for a leading nimbus" in received[0]
    assert "storm-dagster dev" not in leaderless.value.message, "it runs already"
    peers[0].status = "no connection to ZooKeeper"
    with pytest.raises(Unavailable, match="ZooKeeper does not answer; topologies pause"):
        NimbusClient(urls, patience=0.1).get("/v1/topologies")
    with pytest.raises(Unavailable, match="start it with `storm-dagster dev`"):
        NimbusClient(["http://127.0.0.1:1"], patience=0.1, waiting=received.append).get(
            "/v1/topologies"
        )
    assert len(received) == 1, "who does not wait long says nothing"


def test_errors_are_typed(peers: list[Peer]) -> None:
    peer = peers[0]
    peer.scripted["/v1/a"] = [(409, {"error": {"type": "AlreadyAlive", "message": "'wc' runs"}})]
    peer.scripted["/v1/b"] = [(503, {"error": {"type": "Unavailable", "message": "no slots"}})]
    peer.scripted["/v1/c"] = [(500, "what")]
    with NimbusClient([peer.url], patience=30) as nimbus:
        with pytest.raises(AlreadyAlive, match="'wc' runs"):
            nimbus.post("/v1/a")
        # The leader's own answer, not a missing leader: no waiting.
        with pytest.raises(Unavailable, match="no slots"):
            nimbus.post("/v1/b")
        assert peer.asked.count(("POST", "/v1/b")) == 1
        with pytest.raises(StormDagsterError, match="not an error document"):
            nimbus.get("/v1/c")


def test_an_archive_is_sent_once(peers: list[Peer], archive: Archive) -> None:
    peer = peers[0]
    with NimbusClient([peer.url]) as nimbus:
        first = upload(nimbus, archive=archive, conf={}, topology=TopologySpec(name="wc"))
        second = upload(nimbus, archive=archive, conf={}, topology=TopologySpec(name="wc"))
    assert first.sent and not second.sent and first.sha256 == archive.sha256
    assert ("PUT", "/v1/uploads/h1/archive") in peer.asked
    assert ("PUT", f"/v1/uploads/h1/archive?sha256={archive.sha256}") in peer.asked


def test_a_stored_archive_is_never_sent(peers: list[Peer], archive: Archive) -> None:
    peer = peers[0]
    peer.archives.add(archive.sha256)
    with NimbusClient([peer.url]) as nimbus:
        assert not upload(nimbus, archive=archive, conf={}, topology=TopologySpec(name="wc")).sent
    assert ("PUT", "/v1/uploads/h1/archive") not in peer.asked


def test_a_removed_archive_is_sent_again(peers: list[Peer], archive: Archive) -> None:
    peer = peers[0]
    peer.archives.add(archive.sha256)
    path = f"/v1/uploads/h1/archive?sha256={archive.sha256}"
    peer.scripted[path] = [(404, {"error": {"type": "NotAlive", "message": "gone"}})]
    with NimbusClient([peer.url]) as nimbus:
        assert upload(nimbus, archive=archive, conf={}, topology=TopologySpec(name="wc")).sent


def test_a_failed_upload_is_cancelled(peers: list[Peer], archive: Archive) -> None:
    peer = peers[0]
    peer.scripted["/v1/uploads/h1/conf"] = [
        (400, {"error": {"type": "InvalidRequest", "message": "no"}})
    ]
    with NimbusClient([peer.url]) as nimbus, pytest.raises(InvalidRequest):
        upload(nimbus, archive=archive, conf={}, topology=TopologySpec(name="wc"))
    assert ("DELETE", "/v1/uploads/h1") in peer.asked


def test_a_host_that_cannot_be_drained_is_named_with_every_reason(peers: list[Peer]) -> None:
    peer = peers[0]
    running = [{"id": 1, "component": "a", "status": "running"}]

    def topology(name: str, *hosts: str) -> tuple[int, Any]:
        document = {"id": f"{name}-1-1", "name": name, "status": "ACTIVE", "tasks": running}
        return 200, {**document, "workers": [{"host": host} for host in hosts]}

    names = ("ends", "full", "moves", "other")
    peer.scripted = {
        "/v1/topologies": [(200, {"topologies": [{"name": name} for name in names]})],
        "/v1/topologies/ends": [
            topology("ends", "h1"),
            (404, {"error": {"type": "NotAlive", "message": "gone"}}),
        ],
        "/v1/topologies/ends/rebalance": [
            (404, {"error": {"type": "NotAlive", "message": "gone"}})
        ],
        "/v1/topologies/full": [topology("full", "h1", "h2")],
        "/v1/topologies/full/rebalance": [
            (503, {"error": {"type": "Unavailable", "message": "needs 2 slots"}})
        ],
        "/v1/topologies/moves": [
            topology("moves", "h2", "h1"),
            topology("moves", "h1"),
            topology("moves", "h2"),
        ],
        "/v1/topologies/moves/rebalance": [
            (200, {"run_id": "r1", "id": "moves-1-1", "name": "moves"})
        ],
        "/v1/topologies/other": [topology("other", "h2")],
        "/v1/runs/r1": [
            (200, {"run_id": "r1", "status": "SUCCESS", "finished": True, "steps": []})
        ],
    }
    with NimbusClient([peer.url]) as nimbus:
        with pytest.raises(
            Unavailable, match=r"^not empty, h1 stay blacklisted.*keep running: full: needs 2 slots"
        ) as refused:
            drain_hosts(nimbus, ["h1"], timeout=10)
        assert ("POST", "/v1/topologies/moves/rebalance") in peer.asked
        assert ("POST", "/v1/topologies/other/rebalance") not in peer.asked
        assert "moves:" not in str(refused.value)
        peer.scripted["/v1/topologies/moves"] = [topology("moves", "h1")]
        with pytest.raises(
            Unavailable, match="moves: it has workers that their supervisor cannot stop"
        ):
            drain_hosts(nimbus, ["h1"])
        peer.scripted["/v1/topologies"] = [(200, {"topologies": [{"name": "other"}]})]
        assert drain_hosts(nimbus, ["h1"]) == []


def test_waiting_for_a_run_and_its_tasks(peers: list[Peer]) -> None:
    peer = peers[0]
    step = {"name": "assignment", "status": "STARTED", "seconds": None}
    peer.scripted["/v1/runs/r1"] = [
        (200, {"run_id": "r1", "status": "STARTED", "finished": False, "steps": [step]}),
        (
            200,
            {
                "run_id": "r1",
                "status": "SUCCESS",
                "finished": True,
                "steps": [{**step, "status": "SUCCESS"}],
            },
        ),
    ]
    error = {"type": "AlreadyAlive", "message": "topology 'wc' runs already"}
    peer.scripted["/v1/runs/r2"] = [
        (200, {"run_id": "r2", "status": "FAILURE", "finished": True, "steps": [], "error": error})
    ]
    tasks = [{"id": 1, "component": "a", "status": "starting"}]
    peer.scripted["/v1/topologies/wc"] = [
        (200, {"id": "wc-1-1", "tasks": tasks}),
        (200, {"id": "wc-1-1", "tasks": [{**tasks[0], "status": "running"}]}),
    ]
    received: list[tuple[str, str]] = []
    with NimbusClient([peer.url]) as nimbus:
        deadline = time.monotonic() + 30
        wait_for_run(nimbus, "r1", deadline=deadline, progress=lambda *said: received.append(said))
        assert received == [("assignment", "STARTED"), ("assignment", "SUCCESS")]
        with pytest.raises(AlreadyAlive, match="runs already"):
            wait_for_run(nimbus, "r2", deadline=deadline)
        assert wait_for_tasks(nimbus, "wc", deadline=deadline)["id"] == "wc-1-1"
        peer.scripted["/v1/topologies/wc"] = [(200, {"id": "wc-1-1", "tasks": tasks})]
        with pytest.raises(Unavailable, match=r"waiting for 1 \(a, starting\)"):
            wait_for_tasks(nimbus, "wc", deadline=time.monotonic())


def test_the_wait_for_a_run_outlives_a_short_silence_of_dagster(
    peers: list[Peer],
) -> None:
    peer = peers[0]
    silent = (503, {"error": {"type": "Unavailable", "message": "Dagster did not answer: wait"}})
    ended = (200, {"run_id": "r1", "status": "SUCCESS", "finished": True, "steps": []})
    peer.scripted["/v1/runs/r1"] = [silent, silent, ended]
    peer.scripted["/v1/runs/r2"] = [silent]
    steps: list[tuple[str, str]] = []
    with NimbusClient([peer.url], launch_secs=30.0) as nimbus:
        deadline = time.monotonic() + 60
        document = wait_for_run(
            nimbus, "r1", deadline=deadline, progress=lambda *step: steps.append(step)
        )
    assert document["status"] == "SUCCESS"
    assert steps == [("Dagster", "does not respond"), ("Dagster", "SUCCESS")]
    with NimbusClient([peer.url], launch_secs=0.5) as nimbus:
        with pytest.raises(
            Unavailable, match="run r2 may still continue, but Dagster did not answer"
        ):
            wait_for_run(nimbus, "r2", deadline=time.monotonic() + 60)


def test_a_seed_may_be_a_host_an_address_or_a_url() -> None:
    conf = load_cluster_conf(
        None, {"nimbus.seeds": ["a", "b:1", "http://c:2/"], "nimbus.http.port": 9}
    )
    assert seed_urls(conf) == ["http://a:9", "http://b:1", "http://c:2"]
    # With TLS nothing goes to http unless somebody wrote it, and then the client refuses to.
    secured = conf.with_values({"storm.tls.ca": "ca.pem"}, "test")
    assert seed_urls(secured) == ["https://a:9", "https://b:1", "http://c:2"]


def test_a_kill_ends_with_its_topology_even_if_the_name_is_reused(
    peers: list[Peer],
) -> None:
    peer = peers[0]
    answer = {"id": "wc-1-100", "name": "wc", "status": "KILLED", "run_id": None}
    peer.scripted["/v1/topologies/wc/kill"] = [(202, answer)]
    peer.scripted["/v1/topologies/wc-1-100"] = [
        (404, {"error": {"type": "NotAlive", "message": "no such topology"}})
    ]
    peer.scripted["/v1/topologies/wc"] = [
        (200, {"id": "wc-2-200", "name": "wc", "status": "ACTIVE"})
    ]
    with NimbusClient([peer.url]) as nimbus:
        killed = change_topology(nimbus, "wc", verb="kill", timeout=5.0)
    assert (killed.id, killed.status) == ("wc-1-100", "KILLED")


# -- repetition by the client token ----------------------------------------------------------------

UPLOADED = Uploaded("h-1", "wc", "0" * 64, 1, sent=False)


def run_ended(kind: str, message: str) -> tuple[int, Any]:
    error = {"type": kind, "message": message}
    return 200, {"run_id": "r", "status": "FAILURE", "finished": True, "steps": [], "error": error}


SUCCESS = (200, {"run_id": "r", "status": "SUCCESS", "finished": True, "steps": []})
RUNS = (200, {"id": "wc-1-1", "status": "ACTIVE", "tasks": [{"id": 1, "status": "running"}]})


def script(peer: Peer, *runs: tuple[int, Any]) -> None:
    """Each try has the next of these runs."""
    peer.scripted["/v1/submit"] = [(200, {"run_id": "r", "token": "t-1"})]
    peer.scripted["/v1/topologies/wc/update"] = [(200, {"run_id": "r", "name": "wc"})]
    peer.scripted["/v1/runs/r"] = list(runs)
    peer.scripted["/v1/topologies/wc"] = [RUNS]
    peer.scripted["/v1/uploads/h-1"] = [(200, {})]


def send(nimbus: NimbusClient, verb: str) -> Any:
    if verb == "submit":
        return submit_uploaded(nimbus, UPLOADED, name="wc", token="t-1", timeout=20)
    return change_topology(nimbus, "wc", verb="update", handle="h-1", token="t-1", timeout=20)


POSTED = {"submit": ("POST", "/v1/submit"), "update": ("POST", "/v1/topologies/wc/update")}
DROPPED = ("DELETE", "/v1/uploads/h-1")


@pytest.mark.parametrize("verb", POSTED)
def test_a_request_whose_leader_was_lost_is_repeated_with_its_token(
    peers: list[Peer], verb: str
) -> None:
    peer = peers[0]
    fenced = run_ended("Fenced", "the epoch is over")
    script(peer, fenced, fenced, SUCCESS)
    with NimbusClient([peer.url]) as nimbus:
        assert send(nimbus, verb).status == "ACTIVE"
        assert peer.asked.count(POSTED[verb]) == 3
        assert DROPPED not in peer.asked
        # The third try is the last one.
        script(peer, fenced)
        with pytest.raises(Fenced, match=r"the epoch is over; repeat .*--token t-1"):
            send(nimbus, verb)
    assert peer.asked.count(POSTED[verb]) == 6
    assert peer.asked.count(DROPPED) == 1


def test_a_run_that_was_lost_with_the_leader_is_repeated(peers: list[Peer]) -> None:
    peer = peers[0]
    lost = run_ended("Unavailable", "no nimbus leads")
    script(peer, lost, SUCCESS)
    # The search for the leader reads its health once, and each request for the epoch as well.
    peer.epochs = [1, 1, 2]
    with NimbusClient([peer.url]) as nimbus:
        assert send(nimbus, "submit").status == "ACTIVE"
        assert peer.asked.count(POSTED["submit"]) == 2
        # Without a change of the leader the same error is final, as for too few slots.
        script(peer, lost)
        with pytest.raises(Unavailable, match=r"no nimbus leads; repeat .*--token t-1"):
            send(nimbus, "submit")
    assert peer.asked.count(POSTED["submit"]) == 3
    assert peer.asked[-1] == DROPPED


def test_what_is_final_is_not_repeated_and_removes_its_upload(peers: list[Peer]) -> None:
    peer = peers[0]
    script(peer, run_ended("AlreadyAlive", "another submission came first"))
    with NimbusClient([peer.url]) as nimbus:
        with pytest.raises(AlreadyAlive) as refused:
            send(nimbus, "submit")
        assert "--token" not in refused.value.message
        assert peer.asked.count(POSTED["submit"]) == 1
        assert peer.asked[-1] == DROPPED


def test_without_an_answer_of_dagster_the_token_is_shown(peers: list[Peer]) -> None:
    """The leader may launch the run nevertheless, which uses the upload."""
    peer = peers[0]
    script(peer)
    message = "Dagster did not answer within 18 s: it is busy"
    peer.scripted["/v1/submit"] = [(503, {"error": {"type": "Unavailable", "message": message}})]
    with NimbusClient([peer.url]) as nimbus:
        with pytest.raises(Unavailable, match=r"within 18 s: it is busy; repeat .*--token t-1"):
            send(nimbus, "submit")
    assert peer.asked.count(POSTED["submit"]) == 1
    assert DROPPED not in peer.asked


def test_a_wait_that_ends_keeps_the_upload_and_shows_the_token(peers: list[Peer]) -> None:
    peer = peers[0]
    script(peer, (200, {"run_id": "r", "status": "STARTED", "finished": False, "steps": []}))
    with NimbusClient([peer.url]) as nimbus:
        with pytest.raises(Unavailable, match=r"still STARTED.*--token t-1"):
            submit_uploaded(nimbus, UPLOADED, name="wc", token="t-1", timeout=0)
    assert peer.asked.count(POSTED["submit"]) == 1
    assert DROPPED not in peer.asked
