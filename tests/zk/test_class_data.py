"""Class data that JVMs share: made once, mapped afterwards, and never a reason not to start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from storm_dagster.host.java import class_data_options, java_command
from storm_dagster.zk.embedded import zookeeper_jars
from storm_rigs.servers.embedded_zookeeper import EmbeddedZooKeeper

pytestmark = [pytest.mark.zookeeper, pytest.mark.timeout(120)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "storm-dagster" / "class-data"


def options() -> list[str]:
    return class_data_options("zookeeper", java_command(), zookeeper_jars())


def maps(server: EmbeddedZooKeeper, archive: Path) -> bool:
    return str(archive) in Path(f"/proc/{server.pid}/maps").read_text(encoding="utf-8")


@pytest.mark.long
def test_the_first_server_makes_what_the_next_ones_map(cache: Path, tmp_path: Path) -> None:
    with EmbeddedZooKeeper(tmp_path / "a"):
        # While it does, others start without, and make none.
        assert options() == []
    with EmbeddedZooKeeper(tmp_path / "b") as second:
        (archive,) = cache.glob("*.jsa")
        assert maps(second, archive)
        assert options()[0] == f"-XX:SharedArchiveFile={archive}"
    # Cut off, overwritten, or gone: the server starts all the same, and makes another.
    whole = archive.read_bytes()
    for broken in (whole[:-5000], b"\xff" * len(whole), b""):
        archive.unlink()
        archive.write_bytes(broken)
        with EmbeddedZooKeeper(tmp_path / "c") as third:
            assert third.running and not maps(third, archive)
        with EmbeddedZooKeeper(tmp_path / "c") as fourth:
            assert maps(fourth, archive)


def test_other_jars_have_an_archive_of_their_own(cache: Path, tmp_path: Path) -> None:
    jar = tmp_path / "a.jar"
    jar.write_bytes(b"1")
    (first,) = [
        option for option in class_data_options("x", java_command(), [jar]) if "Archive" in option
    ]
    jar.write_bytes(b"22")
    (other,) = [
        option for option in class_data_options("x", java_command(), [jar]) if "Archive" in option
    ]
    assert first != other


def test_who_ended_before_it_was_made_leaves_it_to_others(cache: Path, tmp_path: Path) -> None:
    with EmbeddedZooKeeper(tmp_path / "a") as server:
        server.kill()
    assert options() == []
    (claim,) = cache.iterdir()
    an_hour_ago = claim.stat().st_mtime - 3700
    os.utime(claim, (an_hour_ago, an_hour_ago))
    assert options()[0] == f"-XX:ArchiveClassesAtExit={claim}"


def test_without_a_cache_of_ones_own_there_is_none(cache: Path) -> None:
    cache.mkdir(parents=True)
    # What others may write would be mapped as code.
    cache.chmod(0o777)
    assert options() == [] and list(cache.iterdir()) == []
    cache.rmdir()
    cache.write_text("no folder")
    assert options() == []
