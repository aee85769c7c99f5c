"""Class data that JVMs share: made on purpose, mapped afterwards, never a reason not to start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from storm_dagster.cli.dev.class_data import make_zookeeper_class_data, zookeeper_class_data
from storm_dagster.host.class_data import ClassData
from storm_dagster.host.java import java_command
from storm_dagster.model.errors import Conflict, Unavailable
from storm_dagster.testing.waiting import eventually
from storm_rigs.servers.embedded_zookeeper import EmbeddedZooKeeper

pytestmark = [pytest.mark.zookeeper, pytest.mark.timeout(120)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "storm-dagster" / "class-data"


def maps(server: EmbeddedZooKeeper, archive: Path) -> bool:
    return str(archive) in Path(f"/proc/{server.pid}/maps").read_text(encoding="utf-8")


def test_what_is_made_once_is_mapped_by_later_servers(cache: Path, tmp_path: Path) -> None:
    with EmbeddedZooKeeper(tmp_path / "a"):
        # A server that serves never writes an archive.
        assert zookeeper_class_data().options() == []
    assert list(cache.glob("*.jsa")) == []
    assert make_zookeeper_class_data()
    (archive,) = cache.glob("*.jsa")
    assert zookeeper_class_data().options()[0] == f"-XX:SharedArchiveFile={archive}"
    with EmbeddedZooKeeper(tmp_path / "b") as second:
        assert maps(second, archive)
    assert not make_zookeeper_class_data(), "it exists"


@pytest.mark.parametrize("damage", ["cut", "overwritten", "empty"])
def test_a_damaged_archive_is_not_mapped(cache: Path, damage: str) -> None:
    data = ClassData.of("program", java_command(), [])
    whole = b"\x01" * 10_000
    with data.creation() as options:
        Path(options[0].partition("=")[2]).write_bytes(whole)
    assert data.path is not None and data.options()
    contents = {"cut": whole[:-5000], "overwritten": b"\xff" * len(whole), "empty": b""}
    os.chmod(data.path, 0o600)
    data.path.write_bytes(contents[damage])
    assert not data.exists() and data.options() == []


def test_other_jars_have_an_archive_of_their_own(cache: Path, tmp_path: Path) -> None:
    jar = tmp_path / "a.jar"
    jar.write_bytes(b"1")
    first = ClassData.of("x", java_command(), [jar])
    jar.write_bytes(b"22")
    assert ClassData.of("x", java_command(), [jar]).path != first.path


def test_a_jvm_that_writes_nothing_leaves_nothing(cache: Path) -> None:
    data = ClassData.of("x", java_command(), [])
    with pytest.raises(Unavailable, match="has written no class data"), data.creation():
        pass
    assert not data.exists() and not list(cache.glob("*.new"))
    # Part of one: the header, which comes last, is missing.
    with pytest.raises(Unavailable), data.creation() as options:
        Path(options[0].partition("=")[2]).write_bytes(b"\0" * 5000)
    assert not data.exists() and not list(cache.glob("*.new"))


def test_only_one_process_makes_an_archive(cache: Path) -> None:
    data = ClassData.of("x", java_command(), [])
    with pytest.raises(Unavailable), data.creation():
        with pytest.raises(Conflict, match="another process"), data.creation():
            raise AssertionError


def test_without_a_cache_of_ones_own_there_is_none(cache: Path) -> None:
    cache.mkdir(parents=True)
    # What others may write would be mapped as code.
    cache.chmod(0o777)
    data = ClassData.of("x", java_command(), [])
    assert data.options() == [] and list(cache.iterdir()) == []
    with pytest.raises(Unavailable, match="XDG_CACHE_HOME"), data.creation():
        pass
    cache.rmdir()
    cache.write_text("no folder")
    assert ClassData.of("x", java_command(), []).options() == []


def test_links_to_an_environment_go_with_it(cache: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    environment.mkdir()
    data = ClassData.of("x", java_command(), [])
    gone = cache / "gone.home"
    kept = cache / "kept.home"
    for folder, target in ((gone, tmp_path / "deleted"), (kept, environment)):
        folder.mkdir()
        (folder / "jars").symlink_to(target)
    with data.creation() as options:
        Path(options[0].partition("=")[2]).write_bytes(b"\x01" * 100)
    assert data.exists() and not gone.exists() and kept.exists()


def test_who_ends_the_preparation_ends_its_server(cache: Path) -> None:
    command = [sys.executable, "-m", "storm_dagster", "dev", "--prepare"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as preparing:
        servers: list[psutil.Process] = []

        def serves() -> bool:
            for child in psutil.Process(preparing.pid).children(recursive=True):
                # Another child may end while it is read, such as `java -version`.
                with suppress(psutil.Error):
                    if any("QuorumPeerMain" in word for word in child.cmdline()):
                        servers.append(child)
            return bool(servers)

        eventually(serves, 60, "the server that is started for its class data")
        preparing.terminate()
        assert preparing.wait(60) == 128 + signal.SIGTERM
    eventually(lambda: not any(map(psutil.Process.is_running, servers)), 20, "its end")
    assert not list(cache.glob("*.new"))
