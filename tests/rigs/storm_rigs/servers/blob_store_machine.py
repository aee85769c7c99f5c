"""State machine of a blob store against a map in memory: open uploads, readers, two users of one
store.

Each store has a subclass, which says how it is opened, and has rules for what only it promises.
"""

from __future__ import annotations

import hashlib
import string
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar
from unittest.mock import patch

import pytest
from greenlet import getcurrent, greenlet
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from storm_dagster.blobstore.store import BlobMeta, BlobStore, put_by_hash
from storm_dagster.model.errors import Corrupt, InvalidRequest, KeyNotFound

LEGAL_CHARACTERS = string.ascii_letters + string.digits + "_ .:-"
KEYS = st.one_of(
    # A key `staging.TOKEN.PART` would be garbage to a nimbus, which deletes it after a minute.
    st.sampled_from(["a", "ab", "b", "a b:c", ".dot", "staging.t1"]),
    # A key of nothing but dots is not legal.
    st.text(LEGAL_CHARACTERS, min_size=1, max_size=80).filter(lambda key: key.strip(".")),
)
LARGE = bytes(range(256)) * 280
"""More than one chunk of a download."""
CONTENTS = st.one_of(st.sampled_from([b"", b"1", b"2", b"same", LARGE]), st.binary(max_size=60))
ILLEGAL_KEYS: Sequence[Any] = (
    *("", ".", "..", "a/b", "a?b", "../x", "a\0b", "a\nb", "a\tb", "con/../..", "x" * 256),
    *("\N{PILE OF POO}", "a\\b", "%2e%2e/x", None, 7),
)


def sha256_of(content: bytes) -> str:
    """The version of a content."""
    return hashlib.sha256(content).hexdigest()


class Killed(BaseException):
    """The process ended here."""


class SourceError(Exception):
    """The sender of a content is gone."""


class PausedUpload:
    """A ``put`` whose content arrives chunk by chunk, between other calls of the same thread."""

    def __init__(self, store: BlobStore, key: str, announced: str | None) -> None:
        self.key = key
        self.announced = announced
        self.sent = b""
        self.is_cleaned = False
        """True if the store has dropped the part that has arrived."""
        self._caller = getcurrent()
        self._call = greenlet(lambda: store.put(key, self._chunks(), expected_sha256=announced))
        self._call.switch()

    def _chunks(self) -> Iterator[bytes]:
        """Wait for each chunk in the caller."""
        while (chunk := self._caller.switch(None)) is not None:
            yield chunk

    def append(self, chunk: bytes) -> None:
        """Send a chunk, which the store has taken when this returns."""
        self._call.switch(chunk)
        self.sent += chunk

    def finish(self) -> BlobMeta:
        """End the content; returns or raises as ``put`` does."""
        return self._call.switch(None)

    def break_off(self, error: BaseException) -> None:
        """Raise ``error`` in the source of the content, which ``put`` raises again."""
        self._call.throw(error)


@dataclass(eq=False)
class OpenReader:
    """A stream, and the content of the version that it was opened at."""

    context: AbstractContextManager[BinaryIO]
    stream: BinaryIO
    content: bytes


class BlobStoreMachine(RuleBasedStateMachine):
    """What every :class:`~storm_dagster.blobstore.store.BlobStore` promises."""

    uploads: ClassVar[Bundle[PausedUpload]] = Bundle("uploads")
    readers: ClassVar[Bundle[OpenReader]] = Bundle("readers")
    max_readers: ClassVar[int] = 3

    # What a store says about itself

    def open_store(self) -> BlobStore:
        """Open the same store, as another user of it does."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Make an empty store."""

    def clean_up(self) -> None:
        """Remove the store."""

    # The machine

    @initialize()
    def begin(self) -> None:
        """Open an empty store twice."""
        self.model: dict[str, bytes] = {}
        self.open_uploads: list[PausedUpload] = []
        self.open_readers: list[OpenReader] = []
        self.user_of_step = 0
        self.prepare()
        self.stores = [self.open_store(), self.open_store()]
        assert isinstance(self.stores[0], BlobStore)

    def teardown(self) -> None:
        """End what is open."""
        if hasattr(self, "stores"):
            self.end_calls()
            self.clean_up()

    def end_calls(self) -> None:
        """Break off all uploads, and close all readers."""
        for upload in self.open_uploads:
            with pytest.raises(SourceError):
                upload.break_off(SourceError())
        for reader in self.open_readers:
            reader.context.__exit__(None, None, None)
        self.open_uploads.clear()
        self.open_readers.clear()

    def check_meta(self, meta: BlobMeta, key: str, content: bytes) -> None:
        """The version of a blob is the hash of its content."""
        assert meta == BlobMeta(key, len(content), sha256_of(content))

    def is_named(self, content: bytes) -> bool:
        """True if a key has the content."""
        return content in self.model.values()

    @rule(key=KEYS, content=CONTENTS, cut=st.integers(0, 70), user=st.integers(0, 1))
    def put(self, key: str, content: bytes, cut: int, user: int) -> None:
        """Create or replace a blob, in one piece or in several."""
        chunks = [content[:cut], b"", content[cut:]] if cut else content
        self.check_meta(self.stores[user].put(key, chunks), key, content)
        self.model[key] = content

    @rule(key=KEYS, content=CONTENTS, user=st.integers(0, 1))
    def put_damaged(self, key: str, content: bytes, user: int) -> None:
        """A content whose hash is not the announced one changes nothing."""
        with pytest.raises(InvalidRequest, match="announced"):
            self.stores[user].put(key, content, expected_sha256=sha256_of(content + b"!"))

    @rule(key=KEYS, data=st.data(), user=st.integers(0, 1))
    def put_existing(self, key: str, data: st.DataObject, user: int) -> None:
        """Name a content that another key has."""
        content = data.draw(st.sampled_from([*self.model.values(), b"of no blob"]))
        meta = self.stores[user].put_existing(key, sha256_of(content))
        if self.is_named(content):
            assert meta is not None
        if meta is not None:
            self.check_meta(meta, key, content)
            self.model[key] = content

    @rule(key=KEYS, content=CONTENTS, user=st.integers(0, 1))
    def put_by_hash(self, key: str, content: bytes, user: int) -> None:
        """The bytes travel only if no key has them."""
        store = self.stores[user]
        if self.is_named(content):
            with patch.object(store, "put", side_effect=AssertionError("stored again")):
                meta = put_by_hash(store, key, content)
        else:
            meta = put_by_hash(store, key, content)
        self.check_meta(meta, key, content)
        self.model[key] = content

    @rule(key=st.sampled_from(ILLEGAL_KEYS), user=st.integers(0, 1))
    def use_illegal_key(self, key: Any, user: int) -> None:
        """A key that could name a path is refused by every call."""
        store = self.stores[user]
        calls: list[Callable[[Any], object]] = [
            *(store.read, store.meta, store.delete, store.exists),
            lambda key: store.put(key, b"x"),
            lambda key: store.put_existing(key, sha256_of(b"x")),
        ]
        for call in calls:
            with pytest.raises(InvalidRequest):
                call(key)
        with pytest.raises(InvalidRequest), store.open(key):
            pass

    @rule(key=KEYS, user=st.integers(0, 1))
    def use_missing_key(self, key: str, user: int) -> None:
        """A blob that is not there has a typed error, which names it."""
        if key in self.model:
            return
        store = self.stores[user]
        for call in (store.read, store.meta, store.delete):
            with pytest.raises(KeyNotFound, match="no blob"):
                call(key)
        with pytest.raises(KeyNotFound), store.open(key):
            pass
        assert not store.exists(key)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), user=st.integers(0, 1))
    def delete(self, data: st.DataObject, user: int) -> None:
        """Remove a blob; other keys keep the content."""
        key = data.draw(st.sampled_from(sorted(self.model)))
        self.stores[user].delete(key)
        del self.model[key]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), start=st.integers(0, 70), size=st.integers(0, 70))
    def read_range(self, data: st.DataObject, start: int, size: int) -> None:
        """Read a part of a blob."""
        key = data.draw(st.sampled_from(sorted(self.model)))
        content = self.model[key]
        with self.stores[0].open(key) as stream:
            stream.seek(min(start, len(content)))
            assert stream.read(size) == content[start : start + size]

    @rule(prefix=st.sampled_from(["", "a", "a ", ".", "staging.", "x"]), user=st.integers(0, 1))
    def list_keys(self, prefix: str, user: int) -> None:
        """Keys come in order."""
        listed = self.stores[user].keys(prefix)
        assert listed == sorted(key for key in self.model if key.startswith(prefix))

    # Uploads that take their time

    @precondition(lambda self: len(self.open_uploads) < 3)
    @rule(target=uploads, key=KEYS, user=st.integers(0, 1), content=st.none() | CONTENTS)
    def begin_upload(self, key: str, user: int, content: bytes | None) -> PausedUpload:
        """Begin to store a content, perhaps with its hash."""
        announced = None if content is None else sha256_of(content)
        upload = PausedUpload(self.stores[user], key, announced)
        self.open_uploads.append(upload)
        return upload

    @rule(upload=uploads, chunk=CONTENTS)
    def append(self, upload: PausedUpload, chunk: bytes) -> None:
        """Send a part of a content."""
        if upload in self.open_uploads:
            upload.append(chunk)

    @rule(upload=consumes(uploads))
    def finish_upload(self, upload: PausedUpload) -> None:
        """The last upload that ends has the key."""
        if upload not in self.open_uploads:
            return
        self.open_uploads.remove(upload)
        if upload.announced not in (None, sha256_of(upload.sent)):
            with pytest.raises(InvalidRequest, match="announced"):
                upload.finish()
            return
        if upload.is_cleaned:
            self.finish_cleaned_upload(upload)
            return
        self.check_meta(upload.finish(), upload.key, upload.sent)
        self.model[upload.key] = upload.sent

    def finish_cleaned_upload(self, upload: PausedUpload) -> None:
        """Finish an upload whose part is gone."""
        raise NotImplementedError

    @rule(upload=consumes(uploads))
    def cancel_upload(self, upload: PausedUpload) -> None:
        """An upload whose source fails changes nothing."""
        if upload in self.open_uploads:
            self.open_uploads.remove(upload)
            with pytest.raises(SourceError):
                upload.break_off(SourceError("gone"))

    # Readers that take their time

    @precondition(lambda self: self.model and len(self.open_readers) < self.max_readers)
    @rule(target=readers, data=st.data(), user=st.integers(0, 1))
    def begin_reading(self, data: st.DataObject, user: int) -> OpenReader:
        """Open a blob."""
        key = data.draw(st.sampled_from(sorted(self.model)))
        context = self.stores[user].open(key)
        reader = OpenReader(context, context.__enter__(), self.model[key])
        self.open_readers.append(reader)
        return reader

    @rule(reader=readers, size=st.integers(0, 40))
    def read_on(self, reader: OpenReader, size: int) -> None:
        """A reader keeps its version, whatever became of the blob."""
        if reader in self.open_readers:
            start = reader.stream.tell()
            assert reader.stream.read(size) == reader.content[start : start + size]

    @rule(reader=consumes(readers))
    def end_reading(self, reader: OpenReader) -> None:
        """Read the rest, and close the stream."""
        if reader in self.open_readers:
            self.open_readers.remove(reader)
            start = reader.stream.tell()
            assert reader.stream.read() == reader.content[start:]
            reader.context.__exit__(None, None, None)

    @rule(user=st.integers(0, 1))
    def open_again(self, user: int) -> None:
        """Another user takes the place of one."""
        if not self.open_uploads:
            self.stores[user] = self.open_store()

    @precondition(lambda self: hasattr(self, "stores"))
    @invariant()
    def is_as_the_map(self) -> None:
        """Both users find the blobs of the map, and no others."""
        self.user_of_step = 1 - self.user_of_step
        reader = self.stores[self.user_of_step]
        other: Any = self.stores[1 - self.user_of_step]
        assert reader.keys() == sorted(self.model)
        expected = [
            BlobMeta(key, len(content), sha256_of(content))
            for key, content in sorted(self.model.items())
        ]
        listed = other.list()
        # This module's assertions are not rewritten by pytest.
        assert listed == expected, f"{listed} are listed, {expected} expected"
        for key in self.keys_to_read():
            assert other.exists(key) and reader.read(key) == self.model[key]
            self.check_meta(other.meta(key), key, self.model[key])

    def keys_to_read(self) -> Sequence[str]:
        """Keys whose contents are read after each step."""
        return list(self.model)


class CleanedStoreMachine(BlobStoreMachine):
    """Promises of a store whose files this process has: upkeep, damage, crashes."""

    stores: list[Any]
    has_garbage: bool = False
    """True if a crash or a failed disk may have left files that no key names."""

    # What a store says about itself

    uploads_have_files: ClassVar[bool]
    """True if what has arrived of an upload is a file of the store."""

    crash_points: ClassVar[Sequence[tuple[Any, str]]]
    """Functions that change the files of the store: object and attribute."""

    def contents(self) -> set[str]:
        """Hashes of the contents that the store has."""
        raise NotImplementedError

    def temporary_files(self) -> list[str]:
        """Names of the files that are being written."""
        raise NotImplementedError

    def write_content(self, sha256: str, content: bytes) -> None:
        """Put other bytes in the place of a content; open readers keep theirs."""
        raise NotImplementedError

    def check_damaged(self, sha256: str, damaged: bytes) -> None:
        """Check what became of damaged bytes that were read."""

    def copy_files(self) -> Any:
        """The files of the store as they are now."""
        raise NotImplementedError

    def use_files(self, copied: Any) -> None:
        """Go on with files that were copied."""
        raise NotImplementedError

    def discard_files(self, copied: Any) -> None:
        """Remove files that were copied."""

    def named(self) -> set[str]:
        """Hashes of the contents that a key has."""
        return {sha256_of(content) for content in self.model.values()}

    @precondition(lambda self: self.model)
    @rule(data=st.data(), user=st.integers(0, 1))
    def damage(self, data: st.DataObject, user: int) -> None:
        """Damaged bytes are never returned, and storing the blob again repairs it."""
        key = data.draw(st.sampled_from(sorted(self.model)))
        content = self.model[key]
        damaged = b"damaged" + content[7:]
        self.write_content(sha256_of(content), damaged)
        for _ in range(2):
            with pytest.raises(Corrupt):
                self.stores[user].read(key)
        self.check_damaged(sha256_of(content), damaged)
        self.check_meta(self.stores[user].put(key, content), key, content)

    @rule(key=KEYS, content=CONTENTS, user=st.integers(0, 1))
    def adopt(self, key: str, content: bytes, user: int) -> None:
        """Take a file over."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "received"
            file.write_bytes(content)
            meta = self.stores[user].adopt(key, file, sha256_of(content))
            assert not file.exists()
        self.check_meta(meta, key, content)
        self.model[key] = content

    @rule(user=st.integers(0, 1))
    def clean_nothing(self, user: int) -> None:
        """What is young stays, uploads above all."""
        before = self.contents(), self.temporary_files()
        assert self.stores[user].clean_abandoned(3600.0) == 0
        assert (self.contents(), self.temporary_files()) == before

    @rule(user=st.integers(0, 1))
    def clean(self, user: int) -> None:
        """All goes that no key names."""
        before = len(self.contents() - self.named()) + len(self.temporary_files())
        assert self.stores[user].clean_abandoned(-10.0) == before
        assert self.contents() == self.named() and not self.temporary_files()
        self.has_garbage = False
        for upload in self.open_uploads:
            upload.is_cleaned = self.uploads_have_files

    @rule(
        last_step=st.integers(0, 8),
        call=st.sampled_from(["put", "put_existing", "delete", "clean"]),
        key=KEYS,
        content=CONTENTS,
        data=st.data(),
    )
    def crash(
        self, last_step: int, call: str, key: str, content: bytes, data: st.DataObject
    ) -> None:
        """The process ends before a change of a file: the blob is old or new.

        Before each change up to ``last_step``; the store goes on with the files of the last crash.
        """
        if self.model and call != "put":
            key = data.draw(st.sampled_from(sorted(self.model)))
            content = self.model[data.draw(st.sampled_from(sorted(self.model)))]
        before = self.model.get(key)
        after = {"put": content, "put_existing": content, "delete": None, "clean": before}[call]
        is_possible = call != "put_existing" or self.is_named(content)
        calls: dict[str, Callable[[Any], object]] = {
            "put": lambda store: store.put(key, content),
            "put_existing": lambda store: store.put_existing(key, sha256_of(content)),
            "delete": lambda store: store.delete(key),
            "clean": lambda store: store.clean_abandoned(-10.0),
        }
        files = self.copy_files()
        # Of the uploads, the copy has what a crash leaves.
        self.end_calls()
        for step in range(last_step + 1):
            self.use_files(files)
            files = self.copy_files()
            self.has_garbage = True
            crashed = self.files_after_crash(partial(calls[call], self.open_store()), step)
            is_over = crashed is None
            self.use_files(self.copy_files() if is_over else crashed)
            self.stores = [self.open_store(), self.open_store()]
            stored = self.stores[1].read(key) if self.stores[1].exists(key) else None
            assert stored in (before, after)
            self.note(key, stored)
            if is_over:
                assert stored == after or not is_possible
                break
            if step < last_step:
                self.clean(0)
                self.note(key, before)
        self.discard_files(files)

    def note(self, key: str, content: bytes | None) -> None:
        """Note a blob in the map, or that it is not there."""
        if content is None:
            self.model.pop(key, None)
        else:
            self.model[key] = content

    def files_after_crash(self, call: Callable[[], object], step: int) -> Any:
        """The files as they are before a change of ``call``; ``None`` if it has no such change."""
        copied: list[Any] = []
        left = step

        def kill_in(real: Callable[..., Any]) -> Callable[..., Any]:
            def change(*args: Any, **options: Any) -> Any:
                nonlocal left
                left -= 1
                if left == -1:
                    # An exception has handlers, which a crash has not.
                    copied.append(self.copy_files())
                    raise Killed
                return real(*args, **options)

            return change

        with ExitStack() as patches:
            for owner, name in self.crash_points:
                patches.enter_context(patch.object(owner, name, kill_in(getattr(owner, name))))
            with suppress(Killed, KeyNotFound):
                call()
        return copied[0] if copied else None

    @precondition(lambda self: hasattr(self, "stores"))
    @invariant()
    def has_the_contents(self) -> None:
        """Each content that a key names is there."""
        named = self.named()
        assert named <= self.contents()
        for store in self.stores:
            assert all(store.has_content(sha256) for sha256 in named)
