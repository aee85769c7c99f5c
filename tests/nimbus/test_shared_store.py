"""Nimbuses whose blobs lie in one S3 bucket (a real server, over HTTP): nothing is copied, nothing
is missing.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import fsspec
import fsspec.config
import httpx
import pytest
from moto.server import ThreadedMotoServer

from storm_dagster.client.blobs import NimbusBlobClient
from storm_dagster.testing.waiting import eventually
from storm_rigs.stage.builder import Stage

pytestmark = pytest.mark.zookeeper


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for key, value in (
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
        ("NO_PROXY", "127.0.0.1"),
    ):
        monkeypatch.setenv(key, value)
    # Instances of file systems are kept by their arguments, which do not show the endpoint.
    fsspec.config.conf["s3"] = {"skip_instance_cache": True}
    name = f"b-{uuid.uuid4().hex[:12]}"
    fsspec.filesystem("s3").mkdir(name)
    yield name
    fsspec.config.conf.pop("s3")
    server.stop()


@pytest.mark.long
def test_blobs_outlive_every_nimbus(stage: Stage, bucket: str) -> None:
    keys = {"nimbus.blobstore.class": "fsspec", "blobstore.dir": f"s3://{bucket}/storm"}
    first = stage.nimbus("n1", keys).await_leading()
    second = stage.nimbus("n2", keys).await_serving()
    content = b"code" * 100_000
    with NimbusBlobClient(first.url, min_replication=2) as blobs:
        stored = blobs.put("wc-1-1-stormjar.jar", content)
        assert blobs.put("wc-1-1-stormjar.jar", content) == stored
    assert second.get("/v1/blobs/wc-1-1-stormjar.jar").content == content
    assert not list((first.folder / "blobs").glob("objects/*")), "nothing lies on its own disk"
    first.stop()
    second.await_leading()
    assert second.health()["missing"] == 0
    with NimbusBlobClient(second.url) as blobs:
        assert blobs.read("wc-1-1-stormjar.jar") == content
        blobs.delete("wc-1-1-stormjar.jar")
    third = stage.nimbus("n3", keys)
    eventually(
        lambda: third.get("/v1/blobs").json()["blobs"] == [],
        40,
        "n3",
        ignore=(AssertionError, httpx.HTTPError),
    )
