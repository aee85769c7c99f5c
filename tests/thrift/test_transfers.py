"""Uploads and downloads in chunks, with streamparse's client at a real nimbus."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable

import pytest
from thriftpy2.thrift import TApplicationException, TPayload

from storm_dagster.blobstore import LocalBlobStore
from storm_dagster.testing.waiting import eventually
from storm_rigs.stage.nimbus_thread import NimbusThread

# Made when it is imported, from the definition file of Storm: no type checker knows what it has.
storm = importlib.import_module("streamparse.thrift")


def leftovers(nimbus: NimbusThread) -> list[str]:
    return [path.name for path in nimbus.inbox.iterdir()]


def test_a_file_comes_back_as_it_went(nimbus: NimbusThread) -> None:
    client = nimbus.thrift_client()
    raw = os.urandom(700_001)
    location = client.beginFileUpload()
    for start in range(0, len(raw), 307_200):
        client.uploadChunk(location, raw[start : start + 307_200])
    client.finishFileUpload(location)
    assert leftovers(nimbus) == []
    with pytest.raises(TApplicationException, match="KeyNotFound: no file upload"):
        client.uploadChunk(location, b"late")
    with pytest.raises(TApplicationException, match="KeyNotFound"):
        client.finishFileUpload(location)
    # Its name is what entitles to use it: nobody else learns it, or reads it by key.
    assert not any(location in key for key in client.listBlobs("").keys)
    with pytest.raises(storm.KeyNotFoundException):
        client.beginBlobDownload(f"upload.{location}.archive")


@pytest.mark.parametrize(
    "location", ["", "nope", "../../etc/passwd", "/etc/passwd", "a" * 5000, "\0"]
)
def test_unknown_handles_are_unknown_whatever_they_look_like(
    nimbus: NimbusThread, location: str
) -> None:
    client = nimbus.thrift_client()
    for call in (
        lambda: client.uploadChunk(location, b"x"),
        lambda: client.finishFileUpload(location),
        lambda: client.uploadBlobChunk(location, b"x"),
        lambda: client.finishBlobUpload(location),
        lambda: client.cancelBlobUpload(location),
        lambda: client.downloadChunk(location),
        lambda: client.downloadBlobChunk(location),
        lambda: client.beginFileDownload(location),
    ):
        with pytest.raises((TApplicationException, storm.AuthorizationException)):
            call()
    with pytest.raises(storm.InvalidTopologyException, match="no uploaded archive"):
        client.submitTopology("x", location, "{}", topology())
    assert leftovers(nimbus) == []


def topology() -> TPayload:
    common = storm.ComponentCommon(
        inputs={}, streams={"default": storm.StreamInfo(output_fields=["word"], direct=False)}
    )
    shell = storm.ComponentObject(
        shell=storm.ShellComponent(execution_command="python", script="s.py")
    )
    return storm.StormTopology(
        spouts={"s": storm.SpoutSpec(spout_object=shell, common=common)}, bolts={}, state_spouts={}
    )


def test_idle_uploads_and_downloads_expire_and_leave_nothing(
    start_nimbus: Callable[..., NimbusThread],
) -> None:
    nimbus = start_nimbus(nimbus__file__copy__expiration__secs=8)
    client = nimbus.thrift_client()
    location = client.beginFileUpload()
    client.uploadChunk(location, b"x" * 1000)
    session = client.beginCreateBlob("idle", None)
    client.uploadBlobChunk(session, b"x")
    assert len(leftovers(nimbus)) == 2
    kept = client.beginFileUpload()

    def only_one_is_left() -> bool:
        client.uploadChunk(kept, b"y")  # Each chunk begins the time from zero.
        return len(leftovers(nimbus)) == 1

    eventually(only_one_is_left, 60, "the end of what nobody goes on with", interval=0.2)
    for call in (
        lambda: client.uploadChunk(location, b"x"),
        lambda: client.uploadBlobChunk(session, b"x"),
    ):
        with pytest.raises(TApplicationException, match="KeyNotFound"):
            call()
    client.finishFileUpload(kept)
    eventually(lambda: leftovers(nimbus) == [], 20, "an empty inbox")


def test_an_upload_over_the_limit_is_dropped(start_nimbus: Callable[..., NimbusThread]) -> None:
    nimbus = start_nimbus(nimbus__upload__max__bytes=1000)
    client = nimbus.thrift_client()
    location = client.beginFileUpload()
    client.uploadChunk(location, b"x" * 900)
    with pytest.raises(TApplicationException, match="larger than 1000 bytes"):
        client.uploadChunk(location, b"x" * 101)
    assert leftovers(nimbus) == []
    with pytest.raises(TApplicationException, match="KeyNotFound"):
        client.uploadChunk(location, b"x")


def put(client, key: str, *chunks: bytes) -> None:
    session = client.beginCreateBlob(key, storm.SettableBlobMeta(acl=[], replication_factor=1))
    for chunk in chunks:
        client.uploadBlobChunk(session, chunk)
    client.finishBlobUpload(session)


def get(client, key: str) -> bytes:
    session = client.beginBlobDownload(key).session
    return b"".join(iter(lambda: client.downloadBlobChunk(session), b""))


@pytest.mark.parametrize("key", ["", ".", "..", "a/b", "../x", "é", "x" * 300, None])
def test_keys_that_are_none(nimbus: NimbusThread, key: str | None) -> None:
    client = nimbus.thrift_client()
    for call in (lambda: client.beginCreateBlob(key, None), lambda: client.beginBlobDownload(key)):
        with pytest.raises((TApplicationException, storm.KeyNotFoundException)):
            call()


def test_the_system_s_blobs_are_closed(nimbus: NimbusThread) -> None:
    client = nimbus.thrift_client()
    for key in ("staging.t.conf", "upload.x.archive", "staging-of.x"):
        with pytest.raises(storm.AuthorizationException, match="belongs to the system"):
            client.beginCreateBlob(key, None)
        with pytest.raises(storm.AuthorizationException):
            client.deleteBlob(key)


def test_listing_goes_by_pages_of_a_hundred(nimbus: NimbusThread) -> None:
    client = nimbus.thrift_client()
    store = LocalBlobStore(nimbus.home / "nimbus" / nimbus.id / "blobs")
    for number in range(103):
        store.put(f"zz {number:03}", b"x")
    first = client.listBlobs("zz")
    second = client.listBlobs(first.session)
    third = client.listBlobs(second.session)
    assert [len(page.keys) for page in (first, second, third)] == [100, 3, 0]
    assert first.keys + second.keys == [f"zz {number:03}" for number in range(103)]


def test_large_content_has_its_hash(nimbus: NimbusThread) -> None:
    client = nimbus.thrift_client()
    raw = os.urandom(3_000_000)
    put(client, "large", raw[:1_000_000], raw[1_000_000:])
    assert hashlib.sha256(get(client, "large")).digest() == hashlib.sha256(raw).digest()
    assert client.beginFileDownload("large")
