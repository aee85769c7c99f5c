"""The local blob store where the state machine of all stores does not reach."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from storm_dagster.blobstore import BlobMeta, LocalBlobStore
from storm_dagster.model.errors import Corrupt, Unavailable


def sha(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def test_a_key_file_that_names_no_hash_is_damaged() -> None:
    meta = BlobMeta("k", 1, sha(b"x"))
    assert BlobMeta.of_key_file(meta.key_file()) == meta
    # The hash becomes a path: this one would lead out of the store.
    raw = BlobMeta("k", 1, "../x").key_file()
    assert BlobMeta.of_key_file(raw) is None


def test_damaged_description_is_reported_and_protects_contents(tmp_path: Path) -> None:
    store = LocalBlobStore(tmp_path)
    store.put("k", b"1")
    (tmp_path / "keys" / "k").write_text("{}")
    with pytest.raises(Corrupt, match="does not describe a blob"):
        store.meta("k")
    assert store.clean_abandoned(older_than_secs=-1) == 0
    store_folder = list((tmp_path / "objects").iterdir())
    assert len(store_folder) == 1


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


def test_unusable_folder_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match=r"blobstore\.dir"):
        LocalBlobStore(tmp_path / "file")


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.put("k", b"2"),
        lambda store: store.put_existing("k", sha(b"1")),
        lambda store: store.delete("k"),
        lambda store: store.meta("k"),
        lambda store: store.open("k"),
        lambda store: store.read("k"),
        lambda store: store.keys(),
        lambda store: store.list(),
        lambda store: store.clean_abandoned(older_than_secs=-1),
    ],
    ids=["put", "put_existing", "delete", "meta", "open", "read", "keys", "list", "clean"],
)
def test_a_disk_that_breaks_later_is_unavailable(
    tmp_path: Path, call: Callable[[LocalBlobStore], object]
) -> None:
    """Every method has the one error; none lets an ``OSError`` of the disk through."""
    store = LocalBlobStore(tmp_path)
    store.put("k", b"1")
    for folder in ("keys", "tmp"):
        (tmp_path / folder).rename(tmp_path / f"former-{folder}")
        (tmp_path / folder).write_text("")
    with pytest.raises(Unavailable, match="blob store's disk"):
        call(store)


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
