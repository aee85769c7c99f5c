"""A reply that the network loses: a reader asks again soon, because nobody heals while a run waits
for a blob.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from storm_dagster.blobstore import LocalBlobStore
from storm_dagster.client import blobs as client_blobs
from storm_dagster.client.blobs import NimbusBlobClient
from storm_dagster.model.conf import default_conf
from storm_dagster.nimbus.blobs import sync
from storm_dagster.nimbus.keyed_locks import KeyedLocks
from storm_dagster.supervisor import localizer
from storm_dagster.supervisor.localizer import Localizer
from storm_rigs.servers.blob_server import BlobServer, serve_blobs

CODE = "wc-1-1700000000"
CONF = f"{CODE}-stormconf.ser"

pytestmark = pytest.mark.timeout(60)


def read(server: BlobServer, folder: Path) -> bytes:
    with NimbusBlobClient(server.url) as blobs:
        return blobs.read(CONF)


def look(server: BlobServer, folder: Path) -> bytes:
    with NimbusBlobClient(server.url) as blobs:
        assert blobs.meta(CONF).size == len(server.blobs[CONF])
    return server.blobs[CONF]


def fetch(server: BlobServer, folder: Path) -> bytes:
    conf = {**default_conf(), "nimbus.file.copy.expiration.secs": 600}
    code = Localizer(folder, lambda: [server.url], conf, stop=threading.Event())
    code.prepare()
    try:
        return (code.fetch(CODE).path / "stormconf.ser").read_bytes()
    finally:
        code.close()


def follow(server: BlobServer, folder: Path) -> bytes:
    """A nimbus that copies a blob: what fails is tried again with the next pass."""
    store = LocalBlobStore(folder)
    apart = dict.fromkeys(("cluster", "registry", "status", "peers"))
    blobs = SimpleNamespace(base=store, changes=KeyedLocks())
    nimbus: Any = SimpleNamespace(**apart, blobs=blobs, inbox=folder, conf=default_conf())
    copies = sync.BlobSync(nimbus)
    sha256 = hashlib.sha256(server.blobs[CONF]).hexdigest()
    try:
        copies._fetch_from_leader(server.url, CONF, sha256)
        assert store.keys() == [], "half a blob is none"
        copies._fetch_from_leader(server.url, CONF, sha256)
        return store.read(CONF)
    finally:
        copies.close()


CASES = [(look, 0), *((reader, arrived) for reader in (read, fetch, follow) for arrived in (0, 5))]


@pytest.mark.parametrize(
    ("reader", "arrived"), CASES, ids=[f"{reader.__name__}-{arrived}" for reader, arrived in CASES]
)
def test_a_reader_retries_when_a_reply_or_its_rest_is_lost(
    reader: Callable[[BlobServer, Path], bytes],
    arrived: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (client_blobs, localizer, sync):
        monkeypatch.setattr(module, "SILENT_SECS", 1.0)
    with serve_blobs() as server:
        server.put_code(CODE, {"topology.workers": 2})
        server.lost_after = arrived
        assert reader(server, tmp_path) == server.blobs[CONF]
        assert server.lost_after is None, "a reply was lost"
