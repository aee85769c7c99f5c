"""Code on the supervisor's disk, from a real HTTP server."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.model.conf import default_conf
from storm_dagster.model.errors import (
    Corrupt,
    InvalidRequest,
    InvalidTopology,
    KeyNotFound,
    Unavailable,
)
from storm_dagster.supervisor.localizer import Localizer
from storm_rigs.servers.blob_server import BlobServer, zip_bytes

CODE = "wc-1-1700000000"


@pytest.fixture
def make(tmp_path: Path, blob_server: BlobServer) -> Iterator[Callable[..., Localizer]]:
    made: list[Localizer] = []

    def build(*urls: str, **options: Any) -> Localizer:
        conf = {
            **default_conf(),
            "nimbus.file.copy.expiration.secs": 5.0,
            **options.pop("conf", {}),
        }
        options = {"stop": threading.Event(), **options}
        localizer = Localizer(tmp_path, lambda: urls or (blob_server.url,), conf, **options)
        localizer.prepare()
        made.append(localizer)
        return localizer

    yield build
    for localizer in made:
        localizer.close()


def test_code_is_fetched_verified_and_unpacked(
    make: Callable[..., Localizer], blob_server: BlobServer, tmp_path: Path
) -> None:
    archive = zip_bytes({"wc.py": b"x = 1\n", "resources/split.sh": b"#!/bin/sh\n"})
    blob_server.put_code(CODE, {"topology.workers": 2}, archive)
    localizer = make()
    assert localizer.local(CODE) is None
    code = localizer.fetch(CODE)
    assert code.path == tmp_path / "stormdist" / CODE
    assert (code.path / "stormjar.jar").read_bytes() == archive
    assert (code.path / "stormconf.ser").read_bytes() == b'{"topology.workers": 2}'
    assert (code.path / "stormcode.ser").read_bytes() == b"{}"
    assert (code.path / "code/wc.py").read_text() == "x = 1\n"
    assert os.listdir(tmp_path / "tmp") == []
    asked = len(blob_server.requests)
    assert localizer.fetch(CODE) == code == localizer.local(CODE)
    assert len(blob_server.requests) == asked


def test_the_same_archive_under_another_id_is_not_fetched_again(
    make: Callable[..., Localizer], blob_server: BlobServer
) -> None:
    blob_server.put_code(CODE)
    blob_server.put_code("wc-2-1700000001")
    localizer = make()
    localizer.fetch(CODE)
    again = localizer.fetch("wc-2-1700000001")
    assert blob_server.gets("wc-2-1700000001-stormjar.jar") == 0
    assert (again.path / "code/wc.py").is_file()


def test_a_damaged_cache_is_not_believed(
    make: Callable[..., Localizer], blob_server: BlobServer, tmp_path: Path
) -> None:
    blob_server.put_code(CODE)
    blob_server.put_code("wc-2-1700000001")
    localizer = make()
    code = localizer.fetch(CODE)
    cached = tmp_path / "cache" / code.sha256
    cached.unlink()
    cached.write_bytes(b"garbage")
    assert localizer.fetch("wc-2-1700000001").sha256 == code.sha256
    assert blob_server.gets("wc-2-1700000001-stormjar.jar") == 1


def test_three_tries_and_other_nimbuses(
    make: Callable[..., Localizer], blob_server: BlobServer
) -> None:
    blob_server.put_code(CODE)
    blob_server.failures = 2
    make().fetch(CODE)
    assert blob_server.gets(f"{CODE}-stormjar.jar") == 3
    blob_server.put_code("b-1-1")
    make("http://127.0.0.1:1", blob_server.url).fetch("b-1-1")
    # Its archive may be the same bytes, and then comes from the cache; its conf is always fetched.
    assert blob_server.gets("b-1-1-stormconf.ser") == 1


def test_what_fails_leaves_nothing(
    make: Callable[..., Localizer], blob_server: BlobServer, tmp_path: Path
) -> None:
    blob_server.put_code(CODE)
    key = f"{CODE}-stormjar.jar"
    with pytest.raises(Unavailable, match="no nimbus is known"):
        Localizer(tmp_path, lambda: (), default_conf(), threading.Event()).fetch(CODE)
    with pytest.raises(Unavailable, match="cannot be fetched from http"):
        make("http://127.0.0.1:1").fetch(CODE)
    with pytest.raises(KeyNotFound):
        make().fetch("gone-1-1")
    blob_server.lies[key] = "0" * 64
    with pytest.raises(Corrupt, match="0000 was announced"):
        make().fetch(CODE)
    assert blob_server.gets(key) == 3  # and no more than three
    blob_server.lies.clear()
    with pytest.raises(InvalidTopology, match="larger than 10 bytes"):
        make(conf={"nimbus.upload.max.bytes": 10}).fetch(CODE)
    blob_server.blobs[f"{CODE}-stormconf.ser"] = b"[1]"
    with pytest.raises(Corrupt, match="not a JSON object"):
        make().fetch(CODE)
    assert os.listdir(tmp_path / "stormdist") == []
    assert os.listdir(tmp_path / "tmp") == []


def test_an_unsafe_archive_is_refused_and_leaves_nothing(
    make: Callable[..., Localizer], blob_server: BlobServer, tmp_path: Path
) -> None:
    blob_server.put_code(CODE, archive=zip_bytes({"ok.py": b"", "../../evil.py": b"x"}))
    with pytest.raises(InvalidTopology, match=r"entry '\.\./\.\./evil\.py' points outside"):
        make().fetch(CODE)
    assert os.listdir(tmp_path / "stormdist") == []
    assert not list(tmp_path.rglob("evil.py"))


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a\nb"])
def test_code_names_that_could_be_paths_are_refused(
    make: Callable[..., Localizer], name: str
) -> None:
    with pytest.raises(InvalidRequest):
        make().fetch(name)


def test_a_folder_that_is_not_whole_is_replaced(
    make: Callable[..., Localizer], blob_server: BlobServer
) -> None:
    blob_server.put_code(CODE)
    localizer = make()
    code = localizer.fetch(CODE)
    (code.path / "stormconf.ser").unlink()
    (code.path / "stray").write_text("x")
    assert localizer.local(CODE) is None
    localizer.fetch(CODE)
    assert localizer.local(CODE) is not None
    assert not (code.path / "stray").exists()


def test_unused_code_is_removed_and_the_cache_kept_for_a_while(
    make: Callable[..., Localizer], blob_server: BlobServer, tmp_path: Path
) -> None:
    blob_server.put_code(CODE)
    blob_server.put_code("wc-2-1700000001")
    localizer = make()
    localizer.fetch(CODE)
    localizer.fetch("wc-2-1700000001")
    assert localizer.remove_unused(lambda: {CODE}) == ["wc-2-1700000001"]
    assert os.listdir(tmp_path / "stormdist") == [CODE]
    assert localizer.remove_unused(lambda: ()) == [CODE]
    assert len(os.listdir(tmp_path / "cache")) == 1
    now = (tmp_path / "cache").stat().st_mtime
    localizer.remove_unused(lambda: (), now_secs=now + 3600)
    assert os.listdir(tmp_path / "cache") == []
    assert os.listdir(tmp_path / "tmp") == []


def test_a_stop_ends_a_download(make: Callable[..., Localizer], blob_server: BlobServer) -> None:
    stop = threading.Event()
    stop.set()
    blob_server.put_code(CODE)
    with pytest.raises(Unavailable, match="stops"):
        make(stop=stop).fetch(CODE)


def test_code_that_the_leader_did_not_record_is_not_taken(
    make: Callable[..., Localizer], blob_server: BlobServer
) -> None:
    """Also when a nimbus announces the hash of what it serves, or it lies in the cache or on the
    disk already.
    """
    blob_server.put_code(CODE)
    good = dict(blob_server.blobs)
    true = {key: hashlib.sha256(content).hexdigest() for key, content in good.items()}
    blob_server.put_code(CODE, archive=zip_bytes({"wc.py": b"x = 'evil'\n"}))
    recorded: dict[str, str] = {}
    localizer = make(expected=recorded.get)
    localizer.fetch(CODE)
    recorded.update(true)
    assert localizer.local(CODE) is None
    with pytest.raises(Corrupt, match=r"the assignment of the leader says [0-9a-f]{64}"):
        localizer.fetch(CODE)
    blob_server.blobs.update(good)
    assert (localizer.fetch(CODE).path / "code/wc.py").read_text() == "x = 1\n"
    assert localizer.local(CODE) is not None
