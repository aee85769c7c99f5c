"""A reply that the network loses: a reader asks again soon, because nobody heals while a run waits for a blob."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from storm_dagster.blobstore import client
from storm_dagster.blobstore.client import NimbusBlobClient
from storm_dagster.model.conf import default_conf
from storm_dagster.supervisor import localizer
from storm_dagster.supervisor.localizer import Localizer
from storm_rigs.blob_server import BlobServer, serve_blobs

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


@pytest.mark.parametrize(
    ("reader", "arrived"), [(read, 0), (read, 5), (look, 0), (fetch, 0), (fetch, 5)], ids=lambda each: str(each)[:14]
)
def test_a_reader_asks_again_when_the_reply_or_the_rest_of_it_is_lost(
    reader: Callable[[BlobServer, Path], bytes], arrived: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SILENT_SECS", 1.0)
    monkeypatch.setattr(localizer, "SILENT_SECS", 1.0)
    with serve_blobs() as server:
        server.put_code(CODE, {"topology.workers": 2})
        server.lost_after = arrived
        assert reader(server, tmp_path) == server.blobs[CONF]
        assert server.lost_after is None, "a reply was lost"
