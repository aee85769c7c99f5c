"""The HTTP service's blobs and uploads, over real sockets."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator

import httpx
import pytest

from storm_dagster.client.blobs import NimbusBlobClient
from storm_dagster.model.errors import Fenced
from storm_dagster.nimbus.blobs.registry import BlobRegistry
from storm_dagster.testing.waiting import eventually
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.nimbus_thread import NimbusThread

pytestmark = pytest.mark.zookeeper


def sha(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


@pytest.fixture
def nimbus(stage: Stage) -> NimbusThread:
    return stage.nimbus(nimbus__upload__max__bytes=5_000_000).await_leading()


@pytest.fixture
def http(nimbus: NimbusThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=nimbus.url, timeout=20, trust_env=False) as client:
        yield client


def error_type(response: httpx.Response) -> str:
    assert response.headers["content-type"].startswith("application/json"), response.text
    return response.json()["error"]["type"]


def test_writes_of_another_epoch_are_fenced(nimbus: NimbusThread) -> None:
    epoch = nimbus.health()["epoch"]
    with NimbusBlobClient(nimbus.url, epoch=epoch) as blobs:
        blobs.put("k", b"1")
    with NimbusBlobClient(nimbus.url, epoch=epoch - 1) as stale:
        with pytest.raises(Fenced):
            stale.put("k", b"2")
        with pytest.raises(Fenced):
            stale.delete("k")
        assert stale.read("k") == b"1"


def test_a_client_sends_a_blob_again_if_the_leader_changes_while_it_is_stored(
    stage: Stage, nimbus: NimbusThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run acts for its leader, and ends; an upload acts for no leader, and goes to the next."""
    world = stage.world()
    check_epoch = BlobRegistry.check_epoch
    changes: list[int] = []

    def depose_first(registry: BlobRegistry, epoch: int) -> None:
        if not changes:
            changes.append(world.lead("127.0.0.1:1"))
        check_epoch(registry, epoch)

    monkeypatch.setattr(BlobRegistry, "check_epoch", depose_first)
    with NimbusBlobClient(nimbus.url) as client:
        client.put("upload.h.conf", b"{}")
        assert changes and client.read("upload.h.conf") == b"{}"
    changes.clear()
    with (
        NimbusBlobClient(nimbus.url, epoch=nimbus.health()["epoch"]) as run,
        pytest.raises(Fenced),
    ):
        run.put("upload.h.topology", b"{}")


def test_parts_of_a_blob_are_served_with_the_hash_of_the_whole(http: httpx.Client) -> None:
    content = b"0123456789"
    assert http.put("/v1/blobs/k", content=content).status_code == 201
    whole = http.get("/v1/blobs/k")
    assert whole.content == content and whole.headers["etag"] == f'"{sha(content)}"'
    assert whole.headers["x-content-sha256"] == sha(content)
    for header, expected, part in (
        ("bytes=2-4", "bytes 2-4/10", b"234"),
        ("bytes=7-", "bytes 7-9/10", b"789"),
        ("bytes=-3", "bytes 7-9/10", b"789"),
        ("bytes=0-99", "bytes 0-9/10", content),
    ):
        answer = http.get("/v1/blobs/k", headers={"Range": header})
        assert (answer.status_code, answer.headers["content-range"], answer.content) == (
            206,
            expected,
            part,
        )
    for header in ("bytes=10-", "bytes=5-2", "bytes=-0"):
        answer = http.get("/v1/blobs/k", headers={"Range": header})
        assert answer.status_code == 416 and answer.headers["content-range"] == "bytes */10"
    for header in ("bytes=-", "lines=1-2", "bytes=0-1,3-4", f"bytes=0-{'9' * 30}", "bytes=x-y"):
        assert http.get("/v1/blobs/k", headers={"Range": header}).status_code == 200
    assert (
        http.get("/v1/blobs/k", headers={"If-None-Match": whole.headers["etag"]}).status_code == 304
    )
    head = http.head("/v1/blobs/k")
    assert head.content == b"" and head.headers["content-length"] == "10"


@pytest.mark.parametrize(
    "path",
    [
        "..",
        "%2e%2e",
        "%252e%252e",
        "..%2f..%2fetc%2fpasswd",
        "a%00b",
        "a%5cb",
        "%c0%ae%c0%ae",
        "x" * 300,
        "%F0%9F%92%A9",
    ],
)
def test_no_path_of_a_caller_reaches_the_file_system(
    http: httpx.Client, nimbus: NimbusThread, path: str
) -> None:
    before = sorted(str(p) for p in nimbus.home.rglob("*"))
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        answer = http.request(
            method, f"/v1/blobs/{path}", content=b"x" if method == "PUT" else None
        )
        assert answer.status_code in (400, 404, 405), (method, answer.status_code)
    after = [p for p in sorted(str(p) for p in nimbus.home.rglob("*")) if "/blobs/.lock" not in p]
    assert set(after) - set(before) == set()


def test_an_upload_is_finished_once_all_parts_are_there(http: httpx.Client) -> None:
    handle = http.post("/v1/uploads").json()["handle"]
    assert len(handle) == 32
    archive = b"PK" + bytes(2000)
    put = http.put(
        f"/v1/uploads/{handle}/archive", content=archive, headers={"X-Content-SHA256": sha(archive)}
    )
    assert put.status_code == 201 and put.json()["sha256"] == sha(archive)
    missing = http.post(f"/v1/uploads/{handle}/finish")
    assert missing.status_code == 400 and "conf, topology" in missing.json()["error"]["message"]
    for part in ("conf", "topology"):
        assert http.put(f"/v1/uploads/{handle}/{part}", content=b"{}").status_code == 201
    for _ in range(2):  # repeatable
        finished = http.post(f"/v1/uploads/{handle}/finish").json()
        assert finished["handle"] == handle and set(finished["parts"]) == {
            "archive",
            "conf",
            "topology",
        }
    assert http.get(f"/v1/uploads/{handle}/archive").content == archive
    assert http.head(f"/v1/archives/{sha(archive)}").status_code == 200
    assert http.head(f"/v1/archives/{sha(b'other')}").status_code == 404
    other = http.post("/v1/uploads").json()["handle"]
    reused = http.put(f"/v1/uploads/{other}/archive", params={"sha256": sha(archive)}, content=b"")
    assert reused.status_code == 201 and reused.json()["size"] == len(archive)
    unknown = http.put(
        f"/v1/uploads/{other}/archive", params={"sha256": sha(b"other")}, content=b""
    )
    assert unknown.status_code == 404
    assert http.delete(f"/v1/uploads/{other}").status_code == 204
    assert http.put(f"/v1/uploads/{other}/conf", content=b"{}").status_code == 404
    assert http.get(f"/v1/uploads/{handle}/archive").content == archive


def test_handles_are_opaque(http: httpx.Client) -> None:
    for handle in ("0" * 32, "../../etc", "%2e%2e", "a" * 31, "G" * 32, "", "x" * 5000):
        assert http.put(f"/v1/uploads/{handle}/conf", content=b"{}").status_code in (400, 404, 405)
    handle = http.post("/v1/uploads").json()["handle"]
    for part in ("passwd", "..", "record"):
        assert http.put(f"/v1/uploads/{handle}/{part}", content=b"{}").status_code in (
            400,
            404,
            405,
        )
    assert error_type(http.post(f"/v1/uploads/{'f' * 32}/finish")) == "KeyNotFound"


def test_damaged_and_oversized_bodies_leave_nothing(
    http: httpx.Client, nimbus: NimbusThread
) -> None:
    wrong = http.put("/v1/blobs/k", content=b"abc", headers={"X-Content-SHA256": sha(b"abd")})
    assert wrong.status_code == 400 and error_type(wrong) == "InvalidRequest"
    assert (
        http.put(
            "/v1/blobs/k", content=b"abc", headers={"X-Content-SHA256": "nonsense"}
        ).status_code
        == 400
    )

    def endless() -> Iterator[bytes]:
        for _ in range(8):
            yield bytes(1_000_000)

    for body in (bytes(6_000_000), endless()):
        try:
            answer = http.put("/v1/blobs/k", content=body)
        except httpx.HTTPError:
            continue  # the service answered and hung up while we were still sending
        assert answer.status_code == 400 and "nimbus.upload.max.bytes" in answer.text
    assert http.get("/v1/blobs/k").status_code == 404
    eventually(lambda: not list((nimbus.folder / "inbox").iterdir()), what="an empty inbox")


def test_json_bodies_are_checked(http: httpx.Client) -> None:
    for body in (b"{", b"[]", b"3", b"\xff", b"[" * 100_000):
        assert error_type(http.post("/v1/submit", content=body)) == "InvalidRequest"
    big = http.post("/v1/submit", content=json.dumps({"name": "x" * 2_000_000}))
    assert big.status_code == 400 and "larger" in big.text
    for path, status in (("/v1/nothing", 404), ("/etc/passwd", 404)):
        answer = http.get(path)
        assert answer.status_code == status and "error" in answer.json()
    assert http.patch("/v1/blobs/k").status_code == 405


def test_other_host_names_and_origins_are_refused(http: httpx.Client, nimbus: NimbusThread) -> None:
    rebound = http.get("/v1/blobs", headers={"Host": "attacker.example:7621"})
    assert rebound.status_code == 400 and "attacker.example" in rebound.json()["error"]["message"]
    assert http.get("/v1/blobs", headers={"Origin": "http://attacker.example"}).status_code == 400
    assert http.get("/v1/blobs", headers={"Origin": "null"}).status_code == 400
    port = nimbus.url.rpartition(":")[2]
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", "[::1]"):
        assert http.get("/healthz", headers={"Host": host}).status_code == 200
    assert http.get("/healthz", headers={"Origin": f"http://127.0.0.1:{port}"}).status_code == 200


def test_an_idle_upload_expires(stage: Stage) -> None:
    nimbus = stage.nimbus("n9", nimbus__file__copy__expiration__secs=4).await_leading()
    with httpx.Client(base_url=nimbus.url, timeout=20, trust_env=False) as http:
        handle = http.post("/v1/uploads").json()["handle"]
        assert http.put(f"/v1/uploads/{handle}/conf", content=b"{}").status_code == 201
        eventually(
            lambda: http.get(f"/v1/uploads/{handle}/conf").status_code == 404,
            what="expiry of the upload",
        )
        assert http.post(f"/v1/uploads/{handle}/finish").status_code == 404


def test_a_body_that_stops_arriving_is_dropped(stage: Stage) -> None:
    nimbus = stage.nimbus("n9", nimbus__file__copy__expiration__secs=1).await_leading()
    host, _, port = nimbus.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as link:
        link.sendall(
            b"PUT /v1/blobs/slow HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc"
        )
        assert b"503" in link.recv(200)
    assert nimbus.get("/v1/blobs/slow").status_code == 404
    eventually(lambda: not list((nimbus.folder / "inbox").iterdir()), what="an empty inbox")


def test_metrics_and_health_name_the_leader(http: httpx.Client) -> None:
    http.get("/v1/blobs/none")
    text = http.get("/metrics").text
    assert "storm_nimbus_leader 1.0" in text
    assert 'route="/v1/blobs/{key}",status="404"' in text
    health = http.get("/healthz").json()
    assert health["leader"] is True and health["status"] == "ok" and health["leader_http"]
    assert http.get("/v1/topologies").json() == {"topologies": []}
    cluster = http.get("/v1/cluster").json()
    assert [row["leader"] for row in cluster["nimbuses"]] == [True] and cluster["healer"] is False
    missing = http.get("/v1/topologies/nope")
    assert missing.status_code == 404 and error_type(missing) == "NotAlive"
