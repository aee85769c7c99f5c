"""Checks of a nimbus before it serves."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.blobstore import LocalBlobStore
from storm_dagster.blobstore.fsspec_store import FsspecBlobStore
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.host.files import hold_folder
from storm_dagster.http.server import listen
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.errors import Conflict, InvalidRequest, Unavailable
from storm_dagster.nimbus.blobs.uploads import clean_inbox
from storm_dagster.nimbus.daemon import run
from storm_dagster.nimbus.leadership.start import check_mode, open_blob_store
from storm_dagster.security.exposure import check_exposure
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.session import ZkSession
from storm_rigs.stage.builder import Stage


def conf(**values: object) -> ClusterConf:
    return load_cluster_conf(None, {key.replace("__", "."): value for key, value in values.items()})


def test_local_mode_is_refused() -> None:
    check_mode(conf())
    with pytest.raises(InvalidRequest, match="distributed"):
        check_mode(conf(storm__cluster__mode="local"))


def test_binding_beyond_loopback_needs_consent() -> None:
    def bind(values: ClusterConf) -> str:
        return check_exposure(values, "nimbus", "secret or tls")

    assert bind(conf()) == "127.0.0.1"
    assert bind(conf(storm__local__hostname="localhost")) == "localhost"
    anywhere = {"storm__local__hostname": "0.0.0.0"}
    with pytest.raises(InvalidRequest, match=r"storm\.bind\.external=true and storm\.secret\.file"):
        bind(conf(**anywhere))
    with pytest.raises(InvalidRequest, match=r"not authenticate callers: set storm\.secret\.file"):
        bind(conf(**anywhere, storm__bind__external=True))
    with pytest.raises(InvalidRequest, match=r"set storm\.bind\.external=true, or"):
        bind(conf(**anywhere, storm__secret="0123456789abcdef"))
    assert (
        bind(conf(**anywhere, storm__bind__external=True, storm__secret="0123456789abcdef"))
        == "0.0.0.0"
    )
    with pytest.raises(InvalidRequest, match="cannot be resolved"):
        bind(conf(storm__local__hostname="no-such-host.invalid"))


def test_a_taken_port_is_named() -> None:
    with listen("127.0.0.1", 0, "nimbus.http.port") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=rf"port {port} .*nimbus\.thrift\.port"):
            listen("127.0.0.1", port, "nimbus.thrift.port")


def test_one_process_per_folder(tmp_path: Path) -> None:
    with hold_folder(tmp_path, "nimbus", "n1"):
        with pytest.raises(Conflict, match="another nimbus 'n1' runs in"):
            hold_folder(tmp_path, "nimbus", "n1")
    holder = subprocess.Popen(
        [
            sys.executable, "-c",
            "import sys, time; from pathlib import Path; from storm_dagster.host.files import hold_folder\n"
            "held = hold_folder(Path(sys.argv[1]), 'nimbus', 'n1'); print('held', flush=True); time.sleep(600)",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(Conflict):
            hold_folder(tmp_path, "nimbus", "n1")
    finally:
        holder.kill()
        holder.communicate()
    hold_folder(tmp_path, "nimbus", "n1").close()  # A process that was killed holds nothing.


def test_blob_stores_by_conf(tmp_path: Path) -> None:
    assert isinstance(open_blob_store(conf(), tmp_path / "n1"), LocalBlobStore)
    first = open_blob_store(conf(blobstore__dir=str(tmp_path / "b")), tmp_path / "n1")
    second = open_blob_store(conf(blobstore__dir=str(tmp_path / "b")), tmp_path / "n2")
    first.put("k", b"x")
    assert not second.exists("k"), "each nimbus of a machine has a copy of its own"
    shared = conf(nimbus__blobstore__class="fsspec", blobstore__dir=f"file://{tmp_path}/shared")
    assert isinstance(open_blob_store(shared, tmp_path / "n1"), FsspecBlobStore)
    with pytest.raises(InvalidRequest, match=r"blobstore\.dir"):
        open_blob_store(conf(nimbus__blobstore__class="fsspec"), tmp_path / "n1")


def test_only_what_is_old_leaves_the_inbox(tmp_path: Path) -> None:
    inbox, outside = tmp_path / "inbox", tmp_path / "outside"
    inbox.mkdir()
    outside.mkdir()
    (outside / "kept").write_text("")
    for name, age in (("old", 3600), ("young", 3599)):
        (inbox / name).write_text("")
        os.utime(inbox / name, (10_000 - age, 10_000 - age))
    (inbox / "folder").mkdir()
    (inbox / "folder" / "file").write_text("")
    os.utime(inbox / "folder", (1, 1))
    (inbox / "link").symlink_to(outside)
    os.utime(inbox / "link", (1, 1), follow_symlinks=False)
    assert clean_inbox(inbox, expiration_secs=3600, now=10_000) == ["folder", "link", "old"]
    assert [path.name for path in inbox.iterdir()] == ["young"] and (outside / "kept").exists()


def ended(values: ClusterConf, home: Path) -> int:
    return run(values, home, "n1", threading.Event())


def test_failed_starts_clean_up_and_say_why(
    tmp_path: Path, zk_conf: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert ended(conf(storm__cluster__mode="local"), tmp_path) == 2
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        busy = load_cluster_conf(
            None, {**zk_conf, "nimbus.http.port": port, "nimbus.thrift.port": 0}
        )
        assert ended(busy, tmp_path) == 4
    assert f"port {port}" in caplog.text and "storm.cluster.mode" in caplog.text
    hold_folder(tmp_path, "nimbus", "n1").close()
    assert not list(tmp_path.glob("run/*"))


@pytest.mark.zookeeper
def test_ordered_stop_leaves_nothing(stage: Stage) -> None:
    nimbus = stage.nimbus().await_leading()
    assert (nimbus.folder / "cluster_id").read_text().strip() == nimbus.health()["cluster_id"]
    assert nimbus.stop() == 0
    assert not list(nimbus.home.glob("run/*"))
    hold_folder(nimbus.home, "nimbus", nimbus.id).close()
    alive = {thread.name for thread in threading.enumerate()}
    eventually(
        lambda: not any(thread.name.startswith("nimbus-") for thread in threading.enumerate()),
        what=f"the end of nimbus's threads ({alive})",
    )


@pytest.mark.zookeeper
def test_an_emptied_root_costs_no_blob(stage: Stage, zk_connect: Callable[..., ZkSession]) -> None:
    """The root is wiped; the restarted nimbus refuses, creates nothing, deletes nothing."""
    nimbus = stage.nimbus().await_leading()
    LocalBlobStore(nimbus.folder / "blobs").put("t-1-100-stormjar.jar", b"code")
    assert nimbus.stop() == 0
    session = zk_connect()
    client = session._client  # the test plays the careless operator
    client.delete(session.root, recursive=True)
    again = stage.nimbus()
    eventually(lambda: again.code is not None, what="the refusal")
    assert again.code == 4
    assert LocalBlobStore(nimbus.folder / "blobs").read("t-1-100-stormjar.jar") == b"code"
    assert client.exists(session.root) is None


@pytest.mark.zookeeper
def test_another_cluster_is_refused(stage: Stage, zk_connect: Callable[..., ZkSession]) -> None:
    nimbus = stage.nimbus().await_leading()
    nimbus.stop()
    (nimbus.folder / "cluster_id").write_text("another-cluster\n")
    again = stage.nimbus()
    eventually(lambda: again.code is not None, what="the refusal")
    assert again.code == 3


@pytest.mark.zookeeper
def test_a_nimbus_with_blobs_creates_no_root(
    stage: Stage, zk_connect: Callable[..., ZkSession]
) -> None:
    LocalBlobStore(stage.home / "nimbus" / "n1" / "blobs").put("k", b"x")
    nimbus = stage.nimbus()
    eventually(lambda: nimbus.code is not None, what="the refusal")
    assert nimbus.code == 4
    session = zk_connect()
    assert session._client.exists(session.root) is None
