"""Blobs of a nimbus against a map in memory: its HTTP client and Storm's Thrift methods, side by
side.
"""

from __future__ import annotations

import importlib
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import quote

import httpx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, precondition, rule, run_state_machine_as_test
from thriftpy2.thrift import TApplicationException

from storm_dagster.client.blobs import NimbusBlobClient
from storm_dagster.host.processes import RunFile
from storm_rigs.servers.blob_store_machine import CONTENTS, KEYS, LARGE, BlobStoreMachine, sha256_of
from storm_rigs.stage.nimbus_thread import NimbusThread

pytestmark = pytest.mark.zookeeper

# Made when it is imported, from the definition file of Storm: no type checker knows what it has.
storm = importlib.import_module("streamparse.thrift")

THRIFT_KEYS = KEYS.filter(lambda key: not key.startswith("staging."))
"""Others are closed to Thrift."""


@dataclass(eq=False)
class Session:
    """An upload in chunks."""

    id: str
    key: str
    sent: bytes = b""
    has_ended: bool = False


@dataclass(eq=False)
class Download:
    """A download in chunks, and what it must return."""

    id: str
    content: bytes


class NimbusMachine(BlobStoreMachine):
    """The blobs of one nimbus, for its own client and for Storm's."""

    nimbus: ClassVar[NimbusThread]
    thrift: ClassVar[Any]
    ours: ClassVar[Any]
    url: ClassVar[str]
    sessions: ClassVar[Bundle[Session]] = Bundle("sessions")
    downloads: ClassVar[Bundle[Download]] = Bundle("downloads")

    def prepare(self) -> None:
        self.open_sessions: list[Session] = []
        self.open_downloads: list[Download] = []
        self.read_count = 0
        self.clients: list[NimbusBlobClient] = []
        # What an example left that failed.
        with NimbusBlobClient(self.url) as client:
            for meta in client.list():
                client.delete(meta.key)
            for key, content in {"large": LARGE, "staging.hidden": b"of the system"}.items():
                client.put(key, content)
                self.model[key] = content
        self.download("large")

    def open_store(self) -> NimbusBlobClient:
        self.clients.append(NimbusBlobClient(self.url))
        return self.clients[-1]

    def clean_up(self) -> None:
        for session in self.open_sessions:
            self.thrift.cancelBlobUpload(session.id)
        for download in list(self.open_downloads):
            self.download_rest(download)
        for key in self.model:
            self.clients[0].delete(key)
        for client in self.clients:
            client.close()

    def keys_to_read(self) -> list[str]:
        # A list has all versions; each read is a request.
        if not self.model:
            return []
        self.read_count += 1
        return [sorted(self.model)[self.read_count % len(self.model)]]

    def check_inbox(self) -> None:
        """Only an upload that goes on has a file."""
        assert len(list(self.nimbus.inbox.iterdir())) == len(self.open_sessions)

    # Parts of a blob

    @precondition(lambda self: self.model)
    @rule(data=st.data(), start=st.integers(0, 70), end=st.none() | st.integers(0, 90))
    def get_range(self, data: st.DataObject, start: int, end: int | None) -> None:
        """A part of a blob has the hash of the whole."""
        key = data.draw(st.sampled_from(sorted(self.model)))
        content = self.model[key]
        request = {"Range": f"bytes={start}-{'' if end is None else end}"}
        url = f"{self.url}/v1/blobs/{quote(key, safe='')}"
        response = httpx.get(url, headers=request, timeout=20, trust_env=False)
        if start >= len(content) or (end is not None and end < start):
            assert response.status_code == 416
            return
        assert response.headers["etag"] == f'"{sha256_of(content)}"'
        last = len(content) - 1 if end is None else min(end, len(content) - 1)
        assert response.status_code == 206 and response.content == content[start : last + 1]
        assert response.headers["content-range"] == f"bytes {start}-{last}/{len(content)}"

    # Uploads of Storm's clients

    @precondition(lambda self: len(self.open_sessions) < 3)
    @rule(target=sessions, key=THRIFT_KEYS, data=st.data())
    def begin_create(self, key: str, data: st.DataObject) -> Session:
        """Begin to create a blob, which must not be there."""
        key = data.draw(st.sampled_from([key, *self.visible_keys()]))
        if key in self.model:
            with pytest.raises(storm.KeyAlreadyExistsException):
                self.thrift.beginCreateBlob(key, None)
            return Session("none", key, has_ended=True)
        session = Session(self.thrift.beginCreateBlob(key, None), key)
        self.open_sessions.append(session)
        return session

    @precondition(lambda self: len(self.open_sessions) < 3)
    @rule(target=sessions, key=THRIFT_KEYS, data=st.data())
    def begin_update(self, key: str, data: st.DataObject) -> Session:
        """Begin to replace a blob, which must be there."""
        key = data.draw(st.sampled_from([key, *self.visible_keys()]))
        if key not in self.model:
            with pytest.raises(storm.KeyNotFoundException):
                self.thrift.beginUpdateBlob(key)
            return Session("none", key, has_ended=True)
        session = Session(self.thrift.beginUpdateBlob(key), key)
        self.open_sessions.append(session)
        return session

    @rule(session=sessions, chunk=CONTENTS | st.just(LARGE))
    def append_chunk(self, session: Session, chunk: bytes) -> None:
        """Readers see none of it yet."""
        if session.has_ended:
            with pytest.raises(TApplicationException, match="KeyNotFound"):
                self.thrift.uploadBlobChunk(session.id, chunk)
            return
        self.thrift.uploadBlobChunk(session.id, chunk)
        session.sent += chunk
        self.check_inbox()

    @rule(session=sessions)
    def finish_session(self, session: Session) -> None:
        """What was sent is the blob, whatever happened to the key in between."""
        if session.has_ended:
            with pytest.raises(TApplicationException, match="KeyNotFound"):
                self.thrift.finishBlobUpload(session.id)
            return
        self.thrift.finishBlobUpload(session.id)
        self.end_session(session)
        self.model[session.key] = session.sent
        self.check_description(session.key)
        self.download_rest(self.download(session.key))

    @rule(session=sessions)
    def cancel_session(self, session: Session) -> None:
        """Nothing of it is left."""
        if session.has_ended:
            with pytest.raises(TApplicationException, match="KeyNotFound"):
                self.thrift.cancelBlobUpload(session.id)
            return
        self.thrift.cancelBlobUpload(session.id)
        self.end_session(session)

    def end_session(self, session: Session) -> None:
        """Note the end of a session, which leaves no file."""
        session.has_ended = True
        self.open_sessions.remove(session)
        self.check_inbox()

    # Downloads of Storm's clients

    @precondition(lambda self: self.visible_keys())
    @rule(target=downloads, data=st.data())
    def begin_download(self, data: st.DataObject) -> Download:
        """A download keeps the version that it began with."""
        return self.download(data.draw(st.sampled_from(self.visible_keys())))

    def download(self, key: str) -> Download:
        """Begin a download."""
        begun = self.thrift.beginBlobDownload(key)
        assert begun.data_size == len(self.model[key])
        download = Download(begun.session, self.model[key])
        self.open_downloads.append(download)
        return download

    @rule(download=consumes(downloads))
    def download_rest(self, download: Download) -> None:
        """Chunks end with an empty one, and the session with it."""
        self.open_downloads.remove(download)
        chunks = list(iter(lambda: self.thrift.downloadBlobChunk(download.id), b""))
        assert b"".join(chunks) == download.content
        with pytest.raises(TApplicationException, match="KeyNotFound"):
            self.thrift.downloadBlobChunk(download.id)

    # Descriptions and deletion by Storm's clients

    def visible_keys(self) -> list[str]:
        """Keys of the map that Storm's clients see."""
        return sorted(key for key in self.model if not key.startswith("staging."))

    @rule()
    def list_blobs(self) -> None:
        """Keys of the system are hidden."""
        assert self.thrift.listBlobs("").keys == self.visible_keys()

    @rule(key=THRIFT_KEYS)
    def use_missing_blob(self, key: str) -> None:
        """A missing blob is an exception of its own."""
        if key in self.model:
            return
        for call in ("beginUpdateBlob", "getBlobMeta", "beginBlobDownload", "deleteBlob"):
            with pytest.raises(storm.KeyNotFoundException):
                getattr(self.thrift, call)(key)
        assert not self.ours.isRemoteBlobExists(key)

    def check_description(self, key: str) -> None:
        """The version is of the content; other rights and other numbers of copies are refused."""
        meta = self.thrift.getBlobMeta(key)
        assert meta.version == int(sha256_of(self.model[key])[:15], 16)
        (entry,) = meta.settable.acl
        assert (entry.type, entry.access) == (storm.AccessControlType.OTHER, 7)
        assert self.ours.isRemoteBlobExists(key)
        self.thrift.createStateInZookeeper(key)
        self.thrift.setBlobMeta(key, storm.SettableBlobMeta(acl=[entry]))
        assert self.thrift.updateBlobReplication(key, 1) == 1
        assert self.thrift.getBlobReplication(key) == 1
        with pytest.raises(storm.AuthorizationException, match="number of copies"):
            self.thrift.updateBlobReplication(key, 3)
        rights = storm.AccessControl(type=storm.AccessControlType.USER, name="bob", access=1)
        with pytest.raises(storm.AuthorizationException, match="not be enforced"):
            self.thrift.setBlobMeta(key, storm.SettableBlobMeta(acl=[rights]))

    @precondition(lambda self: self.visible_keys())
    @rule(data=st.data())
    def delete_blob(self, data: st.DataObject) -> None:
        """Delete a blob."""
        key = data.draw(st.sampled_from(self.visible_keys()))
        self.thrift.deleteBlob(key)
        del self.model[key]


def test_blobs_of_a_nimbus_are_as_the_map(nimbus: NimbusThread) -> None:
    record = RunFile.read(RunFile.path_of(nimbus.home, "nimbus", nimbus.id))
    assert record is not None
    NimbusMachine.nimbus = nimbus
    NimbusMachine.url = f"http://127.0.0.1:{record.ports['http']}"
    with (
        closing(nimbus.thrift_client()) as theirs,
        closing(nimbus.thrift_client(ours=True)) as ours,
    ):
        NimbusMachine.thrift, NimbusMachine.ours = theirs, ours
        run_state_machine_as_test(
            NimbusMachine,
            settings=settings(max_examples=max(1, settings().max_examples // 5)),
        )
