"""The blob stores: atomicity, verification, key grammar, upkeep."""

from __future__ import annotations

import errno
import hashlib
import os
import string
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.blobstore import BlobMeta, BlobStore, LocalBlobStore
from storm_dagster.blobstore.fsspec_store import FsspecBlobStore
from storm_dagster.blobstore.store import put_by_hash
from storm_dagster.model.errors import Corrupt, InvalidRequest, KeyNotFound, Unavailable

Store = LocalBlobStore | FsspecBlobStore


@pytest.fixture(params=["local", "fsspec-file", "fsspec-memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return LocalBlobStore(tmp_path / "blobs")
    if request.param == "fsspec-file":
        return FsspecBlobStore(f"file://{tmp_path}/blobs")
    return FsspecBlobStore(f"memory://{tmp_path}/blobs")


def sha(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def test_a_blob_is_created_updated_and_deleted(store: Store) -> None:
    assert isinstance(store, BlobStore)
    meta = store.put("test", b"\x01")
    assert (meta.key, meta.size, meta.sha256) == ("test", 1, sha(b"\x01"))
    assert store.keys() == ["test"] and store.read("test") == b"\x01" and store.exists("test")
    store.delete("test")
    assert store.keys() == [] and not store.exists("test")
    store.put("test", b"2")
    store.put("test", [b"3", b"", b"3"])
    assert store.read("test") == b"33"
    with store.open("test") as stream:
        assert stream.read() == b"33"
    assert store.meta("test").sha256 == sha(b"33")


def test_missing_blobs_are_typed(store: Store) -> None:
    for call in (store.read, store.meta, store.delete):
        with pytest.raises(KeyNotFound, match="no blob 'x'"):
            call("x")
    with pytest.raises(KeyNotFound):
        with store.open("x"):
            pass


def test_two_blobs_are_independent_even_with_one_content(store: Store) -> None:
    store.put("a", b"same")
    store.put("b", b"same")
    assert store.has_content(sha(b"same"))
    store.delete("a")
    assert store.read("b") == b"same"
    store.delete("b")
    # A remote store cannot know whether another nimbus is about to name the content: it goes when
    # it is old.
    store.clean_abandoned(-10)
    assert not store.has_content(sha(b"same"))
    store.put("b", b"again")
    assert store.meta("b").size == 5


def test_wrong_hash_changes_nothing(store: Store) -> None:
    store.put("k", b"old")
    with pytest.raises(InvalidRequest, match="announced"):
        store.put("k", b"new", expected_sha256=sha(b"other"))
    assert store.read("k") == b"old"


def test_existing_content_is_reused(store: Store) -> None:
    store.put("t-1-100-stormjar.jar", b"archive")
    meta = store.put_existing("upload.h.archive", sha(b"archive"))
    assert meta is not None and meta.size == 7
    assert store.put_existing("other", sha(b"unknown")) is None
    store.delete("t-1-100-stormjar.jar")
    assert store.read("upload.h.archive") == b"archive"


def test_known_bytes_are_named_and_unknown_ones_stored(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = put_by_hash(store, "staging.t.topology", b"code")
    monkeypatch.setattr(store, "put", lambda *_: pytest.fail("the bytes were stored again"))
    second = put_by_hash(store, "t-1-100-stormcode.ser", b"code")
    assert (first.sha256, first.size) == (second.sha256, second.size) == (sha(b"code"), 4)
    store.delete("staging.t.topology")
    assert store.read("t-1-100-stormcode.ser") == b"code"


def test_keys_are_listed_by_prefix_in_order(store: Store) -> None:
    keys = ["staging.t1.conf", "staging.t1.code", "staging.t2.conf", "a b:c\td", ".dot", "A" * 255]
    for key in keys:
        store.put(key, key.encode()) if len(key) < 255 or isinstance(
            store, LocalBlobStore
        ) else None
    stored = [key for key in keys if store.exists(key)]
    assert store.keys() == sorted(stored)
    assert store.keys("staging.t1.") == ["staging.t1.code", "staging.t1.conf"]
    assert [meta.key for meta in store.list("staging.t2")] == ["staging.t2.conf"]
    assert [store.read(key) for key in stored] == [key.encode() for key in stored]


@pytest.mark.parametrize(
    "key",
    [
        "",
        ".",
        "..",
        "a/b",
        "a?b",
        "../x",
        "a\0b",
        "a\nb",
        "con/../..",
        "x" * 256,
        "\N{PILE OF POO}",
        "a\\b",
        "%2e%2e/x",
        None,
        7,
    ],
)
def test_a_key_that_could_name_a_path_is_refused(store: Store, key: str, tmp_path: Path) -> None:
    for call in (store.read, store.meta, store.delete, store.exists, lambda k: store.put(k, b"x")):
        with pytest.raises(InvalidRequest):
            call(key)
    assert store.keys() == []


# "." and ".." are not legal: what is nothing but dots begins with a letter instead.
LEGAL_KEYS = st.text(
    string.ascii_letters + string.digits + "_ \t.:-", min_size=1, max_size=255
).map(lambda key: key if key.strip(".") else f"k{key[1:]}")


@given(LEGAL_KEYS)
def test_every_legal_key_round_trips_inside_the_folder(
    tmp_path_factory: pytest.TempPathFactory, key: str
) -> None:
    base = tmp_path_factory.mktemp("s")
    store = LocalBlobStore(base / "blobs")
    store.put(key, b"x")
    assert store.keys() == [key] and store.read(key) == b"x" and store.meta(key).key == key
    assert [path.name for path in base.iterdir()] == ["blobs"]
    store.delete(key)
    assert store.keys() == []


def test_unfinished_update_is_invisible_and_cleaned(tmp_path: Path) -> None:
    store = LocalBlobStore(tmp_path)
    store.put("k", b"3")

    def chunks() -> Iterator[bytes]:
        yield b"4"
        assert store.read("k") == b"3"
        assert store.clean_abandoned(older_than_secs=3600) == 0, "a running upload is left alone"
        assert store.clean_abandoned(older_than_secs=-1) == 1
        yield b"5"

    with pytest.raises(Unavailable, match="cannot be stored"):
        store.put("k", chunks())
    assert store.read("k") == b"3" and list((tmp_path / "tmp").iterdir()) == []


def test_crash_between_object_and_key_leaves_only_garbage(tmp_path: Path) -> None:
    store = LocalBlobStore(tmp_path)
    store.put("k", b"kept")
    (tmp_path / "objects" / sha(b"orphan")).write_bytes(b"orphan")
    again = LocalBlobStore(tmp_path)
    assert again.keys() == ["k"]
    assert again.clean_abandoned(older_than_secs=-1) == 1
    assert again.read("k") == b"kept" and not again.has_content(sha(b"orphan"))


def test_damaged_content_is_quarantined_and_never_returned(tmp_path: Path) -> None:
    store = LocalBlobStore(tmp_path)
    meta = store.put("k", b"content")
    (tmp_path / "objects" / meta.sha256).write_bytes(b"c0ntent")
    with pytest.raises(Corrupt, match="quarantine"):
        store.read("k")
    assert (tmp_path / "quarantine" / meta.sha256).read_bytes() == b"c0ntent"
    with pytest.raises(Corrupt):
        store.read("k")
    store.put("k", b"content")
    assert store.read("k") == b"content"


def test_a_full_disk_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalBlobStore(tmp_path)
    meta = store.put("a", b"1")
    full: list[bool] = []

    def no_space(descriptor: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    full.append(True)
    for change in (lambda: store.put("b", b"2"), lambda: store.put_existing("b", meta.sha256)):
        with pytest.raises(Unavailable, match="free space on the blob store's disk"):
            change()
        assert store.keys() == ["a"] and list((tmp_path / "tmp").iterdir()) == []
        assert [path.name for path in (tmp_path / "objects").iterdir()] == [meta.sha256]


def test_a_key_that_was_written_keeps_its_content_whatever_comes_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from storm_dagster.blobstore import local

    store = LocalBlobStore(tmp_path)
    store.put("a", b"1")
    store.put("a", b"2")
    synced = local._sync_folder

    def refused(folder: Path) -> None:
        if folder.name == "keys":
            raise OSError(errno.EIO, "Input/output error")
        synced(folder)

    monkeypatch.setattr(local, "_sync_folder", refused)
    with pytest.raises(Unavailable):
        store.put("a", b"3")
    assert store.read("a") == b"3"


def test_damaged_description_is_reported_and_protects_contents(tmp_path: Path) -> None:
    store = LocalBlobStore(tmp_path)
    store.put("k", b"1")
    (tmp_path / "keys" / "k").write_text("{}")
    with pytest.raises(Corrupt, match="does not describe a blob"):
        store.meta("k")
    assert store.clean_abandoned(older_than_secs=-1) == 0
    store_folder = list((tmp_path / "objects").iterdir())
    assert len(store_folder) == 1


def test_version_is_the_content_not_the_time(tmp_path: Path) -> None:
    first = LocalBlobStore(tmp_path).put("k", b"x")
    os.utime(tmp_path / "keys" / "k", (1, 1))
    second = LocalBlobStore(tmp_path)
    assert second.meta("k") == first
    assert second.put("k", b"x") == first


def test_reader_keeps_its_version_while_the_blob_is_replaced(tmp_path: Path) -> None:
    store = LocalBlobStore(tmp_path)
    store.put("k", b"old" * 1000)
    with store.open("k") as stream:
        assert stream.read(3) == b"old"
        store.put("k", b"new")
        store.delete("k")
        assert stream.read() == b"old" * 999


def test_writers_and_readers_race_without_torn_reads(tmp_path: Path) -> None:
    store = LocalBlobStore(tmp_path)
    contents = [bytes([n]) * 2000 for n in range(4)]
    store.put("k", contents[0])
    failures: list[str] = []
    done = threading.Event()

    def write(n: int) -> None:
        for _ in range(25):
            store.put("k", contents[n])

    def read() -> None:
        while not done.is_set():
            if store.read("k") not in contents:
                failures.append("torn read")

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert not failures
    assert len(list((tmp_path / "objects").iterdir())) == 1


def test_failing_source_leaves_the_old_content(tmp_path: Path) -> None:
    store = LocalBlobStore(tmp_path)
    store.put("k", b"old")

    def broken() -> Iterator[bytes]:
        yield b"part"
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        store.put("k", broken())
    assert store.read("k") == b"old" and list((tmp_path / "tmp").iterdir()) == []


def test_unusable_folder_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match=r"blobstore\.dir"):
        LocalBlobStore(tmp_path / "file")


def test_deleting_reads_no_other_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = LocalBlobStore(tmp_path), LocalBlobStore(tmp_path)
    for number in range(50):
        store.put(f"k{number}", b"%d" % (number // 2))
    store.delete("k0")
    read: list[Path] = []
    original = LocalBlobStore._read_key

    def counted(self: LocalBlobStore, path: Path) -> BlobMeta | None:
        read.append(path)
        return original(self, path)

    monkeypatch.setattr(LocalBlobStore, "_read_key", counted)
    for number in range(10, 40):
        store.delete(f"k{number}")
        store.put(f"k{number}", b"new")
    assert len(read) <= 4 * 30, "a few of the key itself, none of the others"
    # Another process that changes something is counted again.
    assert other.put_existing("kept", sha(b"20")) is not None
    store.delete("k40")
    store.delete("k41")
    assert store.read("kept") == b"20"
    other.delete("kept")
    assert not store.has_content(sha(b"20"))


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 1), st.integers(0, 3), st.integers(0, 2)),
        max_size=30,
    )
)
def test_a_content_stays_exactly_as_long_as_a_key_names_it(
    steps: list[tuple[bool, int, int, int]],
) -> None:
    """Two processes on one folder put and delete in any order."""
    with TemporaryDirectory() as folder:
        stores = [LocalBlobStore(Path(folder)), LocalBlobStore(Path(folder))]
        named: dict[str, bytes] = {}
        for put, which, key, content in steps:
            if put:
                named[f"k{key}"] = b"%d" % content
                stores[which].put(f"k{key}", named[f"k{key}"])
            elif named.pop(f"k{key}", None) is not None:
                stores[which].delete(f"k{key}")
            held = {path.name for path in (Path(folder) / "objects").iterdir()}
            assert held == {sha(content) for content in named.values()}
