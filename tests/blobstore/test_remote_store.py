"""The remote blob store on a real S3 server (moto, over HTTP through s3fs) and on a real file
system.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.exceptions import FSTimeoutError
from moto.server import ThreadedMotoServer

from storm_dagster.blobstore.fsspec_store import FsspecBlobStore
from storm_dagster.model.errors import Corrupt, KeyNotFound, Unavailable


def sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


@pytest.fixture(scope="module")
def s3_server() -> Iterator[ThreadedMotoServer]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in (
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("NO_PROXY", "127.0.0.1"),
        ("no_proxy", "127.0.0.1"),
    ):
        monkeypatch.setenv(key, value)


@pytest.fixture(params=["s3", "file"])
def open_store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], FsspecBlobStore]:
    """Opens the same store again and again, as every nimbus does."""
    if request.param == "file":
        return lambda: FsspecBlobStore(f"file://{tmp_path}/blobs")
    server: ThreadedMotoServer = request.getfixturevalue("s3_server")
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    bucket = f"b-{uuid.uuid4().hex[:12]}"
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    # By the URL alone, as `blobstore.dir` names it; endpoint and credentials come from the
    # environment.
    return lambda: FsspecBlobStore(f"s3://{bucket}/storm")


def test_what_one_nimbus_stores_every_other_reads(
    open_store: Callable[[], FsspecBlobStore],
) -> None:
    first, second = open_store(), open_store()
    content = bytes(range(256)) * 20_000
    meta = first.put("wc-1-1-stormjar.jar", [content[:1000], content[1000:]])
    assert (meta.size, meta.sha256) == (len(content), sha256(content))
    assert (
        second.meta("wc-1-1-stormjar.jar") == meta and second.read("wc-1-1-stormjar.jar") == content
    )
    with second.open("wc-1-1-stormjar.jar") as stream:
        stream.seek(5000)
        assert stream.read(100) == content[5000:5100]
    first.put("wc-1-1-stormjar.jar", b"new")
    assert second.read("wc-1-1-stormjar.jar") == b"new"
    assert second.keys("wc-") == ["wc-1-1-stormjar.jar"] and second.keys("x") == []
    second.delete("wc-1-1-stormjar.jar")
    assert not first.exists("wc-1-1-stormjar.jar")
    with pytest.raises(KeyNotFound):
        first.read("wc-1-1-stormjar.jar")
    with pytest.raises(KeyNotFound):
        first.delete("wc-1-1-stormjar.jar")


def test_contents_are_shared_and_go_once_no_key_has_them(
    open_store: Callable[[], FsspecBlobStore],
) -> None:
    store = open_store()
    meta, kept = store.put("a", b"same"), store.put("kept", b"other")
    assert store.put_existing("b", meta.sha256) is not None
    assert store.put_existing("c", sha256(b"unknown")) is None
    store.delete("a")
    assert store.clean_abandoned(-10) == 0 and store.read("b") == b"same"
    store.delete("b")
    assert store.clean_abandoned(3600) == 0 and store.has_content(meta.sha256), "too young to go"
    assert store.clean_abandoned(-10) == 1 and not store.has_content(meta.sha256)
    assert store.read("kept") == b"other" and store.has_content(kept.sha256)


class Interrupted(FsspecBlobStore):
    """A store whose cleaner is interrupted after it has read the keys."""

    then: Callable[[], object] | None = None

    def keys(self, prefix: str = "") -> list[str]:
        found = super().keys(prefix)
        then, self.then = self.then, None
        if then is not None:
            then()
        return found


def test_a_content_that_is_named_while_it_is_cleaned_stays(tmp_path: Path) -> None:
    url = (tmp_path / "shared").as_uri()
    cleaner, other = Interrupted(url), FsspecBlobStore(url)
    meta = other.put("a", b"same")
    other.delete("a")

    def age(*parts: str) -> None:
        for part in parts:
            os.utime(tmp_path / "shared" / part / meta.sha256, (1, 1))

    # Named again between the cleaner's reading of the keys and its removal.
    age("objects")
    cleaner.then = lambda: other.put_existing("b", meta.sha256)
    assert cleaner.clean_abandoned() == 0 and other.read("b") == b"same"
    age("condemned")
    assert cleaner.clean_abandoned() == 0 and other.read("b") == b"same"
    # A condemned content is written again by who wants to name it, and is young then.
    other.delete("b")
    assert cleaner.clean_abandoned() == 0
    age("condemned")
    assert other.put_existing("c", meta.sha256) is None
    cleaner.then = lambda: other.put("c", b"same")
    assert cleaner.clean_abandoned() == 0 and other.read("c") == b"same"
    other.delete("c")
    age("objects")
    assert cleaner.clean_abandoned() == 0, "condemned first"
    age("condemned")
    assert cleaner.clean_abandoned() == 1 and not other.has_content(meta.sha256)
    assert not list((tmp_path / "shared" / "condemned").iterdir())


def test_a_blob_that_is_deleted_during_a_listing_is_left_out(tmp_path: Path) -> None:
    """Another nimbus deletes it after its name was read; the cleaner continues, too."""
    url = (tmp_path / "shared").as_uri()
    store, other = Interrupted(url), FsspecBlobStore(url)
    kept = other.put("kept", b"kept")
    other.put("gone", b"gone")
    store.then = lambda: other.delete("gone")
    assert store.list() == [kept]
    gone = other.put("gone", b"gone")
    os.utime(tmp_path / "shared" / "objects" / kept.sha256, (1, 1))
    store.then = lambda: other.delete("gone")
    assert store.clean_abandoned() == 0
    assert other.read("kept") == b"kept"
    assert other.has_content(gone.sha256), "too young to go"


def test_foreign_bytes_are_never_handed_out(open_store: Callable[[], FsspecBlobStore]) -> None:
    store = open_store()
    meta = store.put("k", b"content")
    store._fs.pipe_file(store._path("objects", meta.sha256), b"forged!")
    with pytest.raises(Corrupt, match="hash"):
        store.read("k")
    store._fs.rm_file(store._path("objects", meta.sha256))
    with pytest.raises(Corrupt, match="store the blob again"):
        store.read("k")
    store._fs.pipe_file(store._key_path("k"), b"\x80\x04nonsense")
    with pytest.raises(Corrupt, match="describe"):
        store.meta("k")


def test_two_writers_of_one_key_leave_one_whole_content(
    open_store: Callable[[], FsspecBlobStore],
) -> None:
    contents = [bytes([number]) * 100_000 for number in range(6)]
    stores = [open_store() for _ in contents]
    threads = [
        threading.Thread(target=store.put, args=("k", content))
        for store, content in zip(stores, contents, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert open_store().read("k") in contents


def test_an_error_without_a_text_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the limit of a request, which fsspec raises without a text."""
    store = FsspecBlobStore((tmp_path / "shared").as_uri())

    def time_out(*_: object, **__: object) -> None:
        raise FSTimeoutError

    monkeypatch.setattr(store._fs, "cat_file", time_out)
    with pytest.raises(Unavailable, match=r"failed \(FSTimeoutError\): check"):
        store.meta("k")


def test_a_server_that_is_away_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free.getsockname()[1]}")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        with pytest.raises(Unavailable, match="can be reached"):
            FsspecBlobStore("s3://bucket-away/storm", skip_instance_cache=True)
