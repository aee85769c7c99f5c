"""Every blob store against a map in memory."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from storm_dagster.blobstore import LocalBlobStore
from storm_dagster.blobstore.fsspec_store import FsspecBlobStore
from storm_dagster.model.errors import Unavailable
from storm_rigs.servers.blob_store_machine import (
    CONTENTS,
    KEYS,
    CleanedStoreMachine,
    PausedUpload,
    sha256_of,
)
from storm_rigs.servers.memory_folder import MEMORY_FOLDER

LONG_KEY = ":" * 255
"""Too long for a file name when it is quoted."""


class FolderMachine(CleanedStoreMachine):
    """A store in a folder."""

    def prepare(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="storm-blobs-", dir=MEMORY_FOLDER))

    def clean_up(self) -> None:
        shutil.rmtree(self.folder)

    def contents(self) -> set[str]:
        return set(os.listdir(self.folder / "blobs" / "objects"))

    def temporary_files(self) -> list[str]:
        return sorted(os.listdir(self.folder / "blobs" / "tmp"))

    def write_content(self, sha256: str, content: bytes) -> None:
        (self.folder / "damaged").write_bytes(content)
        os.replace(self.folder / "damaged", self.folder / "blobs" / "objects" / sha256)

    def copy_files(self) -> Path:
        copied = Path(tempfile.mkdtemp(prefix="storm-blobs-", dir=MEMORY_FOLDER))
        shutil.copytree(self.folder, copied, dirs_exist_ok=True)
        return copied

    def use_files(self, copied: Path) -> None:
        shutil.rmtree(self.folder)
        self.folder = copied

    def discard_files(self, copied: Path) -> None:
        shutil.rmtree(copied)

    @precondition(lambda self: hasattr(self, "stores"))
    @invariant()
    def keeps_to_its_folder(self) -> None:
        """No key leads to a file elsewhere."""
        assert os.listdir(self.folder) == ["blobs"]


class LocalMachine(FolderMachine):
    """The local store, which holds contents exactly as long as a key names them."""

    crash_points = ((os, "replace"), (os, "fsync"), (os, "unlink"), (os, "utime"))

    uploads_have_files = True

    def open_store(self) -> LocalBlobStore:
        return LocalBlobStore(self.folder / "blobs")

    def check_damaged(self, sha256: str, damaged: bytes) -> None:
        assert (self.folder / "blobs" / "quarantine" / sha256).read_bytes() == damaged

    def finish_cleaned_upload(self, upload: PausedUpload) -> None:
        with pytest.raises(Unavailable, match="cannot be stored"):
            upload.finish()

    @rule(content=CONTENTS)
    def put_long_key(self, content: bytes) -> None:
        """A key may be too long for the name of a file."""
        self.check_meta(self.stores[0].put(LONG_KEY, content), LONG_KEY, content)
        self.model[LONG_KEY] = content

    @rule()
    def touch(self) -> None:
        """Times of files mean nothing."""
        for key in (self.folder / "blobs" / "keys").iterdir():
            os.utime(key, (1, 1))

    @rule(key=KEYS, content=CONTENTS, has_bytes=st.booleans())
    def fill_disk(self, key: str, content: bytes, has_bytes: bool) -> None:
        """A full disk is named, and leaves nothing."""
        before = self.contents(), self.temporary_files()
        self.fail_fsync(key, content, has_bytes, lambda descriptor: True)
        assert (self.contents(), self.temporary_files()) == before

    @rule(key=KEYS, content=CONTENTS, has_bytes=st.booleans())
    def fail_once(self, key: str, content: bytes, has_bytes: bool) -> None:
        """A disk that fails once, whenever that is: the blob is old or new, and whole."""
        for step in range(5):
            # After these the store knows how many keys each content has.
            for former in (b"former", b"replaced"):
                self.put(key, former, 0, 0)
            steps = iter(range(step, -100, -1))
            before = self.temporary_files()
            self.fail_fsync(
                key, content, has_bytes, lambda descriptor, steps=steps: next(steps) == 0
            )
            self.has_garbage = True
            assert self.temporary_files() == before

    def fail_fsync(
        self, key: str, content: bytes, has_bytes: bool, fails: Callable[[int], bool]
    ) -> None:
        real = os.fsync
        failed: list[int] = []

        def fsync(descriptor: int) -> None:
            if fails(descriptor):
                failed.append(descriptor)
                raise OSError(errno.ENOSPC, "No space left on device")
            real(descriptor)

        store = self.stores[0]
        content = content if has_bytes or not self.model else next(iter(self.model.values()))
        with patch.object(os, "fsync", fsync):
            try:
                if has_bytes:
                    store.put(key, content)
                else:
                    content_is_there = sha256_of(content) in self.contents()
                    stored = store.put_existing(key, sha256_of(content))
                    assert (stored is not None) == content_is_there
            except Unavailable as error:
                assert failed and "free space on the blob store's disk" in str(error)
            else:
                assert not failed
        if store.exists(key):
            stored_content = store.read(key)
            assert stored_content in (self.model.get(key), content)
            self.model[key] = stored_content

    @precondition(lambda self: hasattr(self, "stores"))
    @invariant()
    def has_no_other_contents(self) -> None:
        """A content goes with its last key."""
        if not self.has_garbage:
            assert self.contents() == self.named()
            assert len(self.temporary_files()) == sum(
                not upload.is_cleaned for upload in self.open_uploads
            )


class FsspecFolderMachine(FolderMachine):
    """The remote store on a file system."""

    crash_points = (
        *((os, "replace"), (os, "rename"), (os, "remove")),
        (LocalFileSystem, "pipe_file"),
    )
    uploads_have_files = False

    def open_store(self) -> FsspecBlobStore:
        return FsspecBlobStore((self.folder / "blobs").as_uri())


class MemoryMachine(CleanedStoreMachine):
    """The remote store in memory, whose files are each one object with one position."""

    crash_points = tuple((MemoryFileSystem, name) for name in ("pipe_file", "rm_file", "cp_file"))
    uploads_have_files = False
    max_readers = 1

    def prepare(self) -> None:
        self.root = f"/{secrets.token_hex(8)}"

    def clean_up(self) -> None:
        self.use_files({})

    def open_store(self) -> FsspecBlobStore:
        return FsspecBlobStore(f"memory:/{self.root}")

    def files(self, part: str = "") -> list[str]:
        return [path for path in MemoryFileSystem.store if path.startswith(f"{self.root}/{part}")]

    def contents(self) -> set[str]:
        return {path.rpartition("/")[2] for path in self.files("objects/")}

    def temporary_files(self) -> list[str]:
        return self.files("tmp/")

    def write_content(self, sha256: str, content: bytes) -> None:
        MemoryFileSystem().pipe_file(f"{self.root}/objects/{sha256}", content)

    def copy_files(self) -> dict[str, bytes]:
        return {path: MemoryFileSystem.store[path].getvalue() for path in self.files()}

    def use_files(self, copied: dict[str, bytes]) -> None:
        for path in self.files():
            del MemoryFileSystem.store[path]
        for path, content in copied.items():
            MemoryFileSystem().pipe_file(path, content)


# Each step reads the whole store.
SETTINGS = settings(max_examples=max(1, settings().max_examples // 5))
TestLocalStore = LocalMachine.TestCase
TestLocalStore.settings = SETTINGS
TestFsspecFolder = FsspecFolderMachine.TestCase
TestFsspecFolder.settings = SETTINGS
TestFsspecMemory = MemoryMachine.TestCase
TestFsspecMemory.settings = SETTINGS
