"""The embedded server and the Java below it: found, started, refused with a remedy, stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from storm_dagster.host import java
from storm_dagster.host.java import java_command, java_version
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.security.authority import CertificateFolder
from storm_dagster.testing.waiting import eventually, patience
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.embedded import server_answers, zookeeper_command, zookeeper_jars
from storm_dagster.zk.session import ZkSession
from storm_rigs.servers.embedded_zookeeper import EmbeddedZooKeeper, client_context
from storm_rigs.servers.ports import free_port

pytestmark = [pytest.mark.zookeeper, pytest.mark.timeout(300)]


def fake_java(folder: Path, text: str, code: int = 0) -> Path:
    """A Java home whose ``java`` says ``text``."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{text}' >&2\nexit {code}\n")
    program.chmod(0o755)
    return folder


def test_java_is_found_here() -> None:
    assert java_version(java_command()) >= java.MINIMUM_JAVA


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('openjdk version "11.0.20" 2023-07-18', "version 11"),
        ('java version "1.8.0_391"', "version 8"),
        ("Segmentation fault", "does not print its version"),
    ],
)
def test_an_unsuitable_java_is_named_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "jdk", text)))
    with pytest.raises(Unavailable, match=said) as refused:
        java_command()
    assert "install Java 17" in refused.value.message


def test_newer_versions_are_read(tmp_path: Path) -> None:
    for text, major in (('openjdk version "21" 2023-09-19', 21), ('openjdk version "25-ea"', 25)):
        home = fake_java(tmp_path / str(major), text)
        assert java_version(str(home / "bin" / "java")) == major


def test_no_java_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="no 'java' on the path"):
        java_command()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(Unavailable, match="JAVA_HOME"):
        java_command()


def test_the_jars_are_found_without_importing_pyspark() -> None:
    code = (
        "import sys; from storm_dagster.zk.embedded import zookeeper_jars; assert zookeeper_jars(); "
        "sys.exit('pyspark' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
    assert any(jar.name.startswith("zookeeper-3") for jar in zookeeper_jars())


def test_start_stop_and_find_the_state_again(tmp_path: Path) -> None:
    server = EmbeddedZooKeeper(tmp_path / "zk")
    with pytest.raises(Unavailable):
        _ = server.pid
    assert server.start() is server.start()
    address, pid = server.address, server.pid
    host, _, port = address.rpartition(":")
    assert server_answers(host, int(port))
    session = ZkSession(address, root="/", session_timeout_ms=patience(4000))
    ZooKeeperClusterState(session).set_data("/kept", b"1")
    session.close()
    server.stop()
    server.stop()
    assert not server.running
    assert not server_answers(host, int(port))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with EmbeddedZooKeeper(tmp_path / "zk", int(port)) as again:
        session = ZkSession(again.address, root="/", session_timeout_ms=patience(4000))
        assert ZooKeeperClusterState(session).get_data("/kept") == b"1"
        session.close()


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"port {port} on 127.0.0.1 is taken"):
            EmbeddedZooKeeper(tmp_path / "zk", port).start()


def test_a_foreign_address_and_a_wrong_port(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="cannot listen"):
        EmbeddedZooKeeper(tmp_path / "zk", host="192.0.2.1").start()
    for port in (0, 65536, -1):
        with pytest.raises(InvalidRequest):
            zookeeper_command(tmp_path / "zk", port)


def test_a_server_that_dies_while_starting_quotes_its_log(tmp_path: Path) -> None:
    folder = tmp_path / "zk"
    folder.mkdir()
    (folder / "version-2").write_text("a file where ZooKeeper wants a folder")
    with pytest.raises(Unavailable, match=r"ended with code .* while starting"):
        EmbeddedZooKeeper(folder).start()


@pytest.mark.parametrize("option", ["", "--tls"])
def test_a_server_ends_on_term_that_its_parent_ignores(tmp_path: Path, option: str) -> None:
    port = free_port()
    daemon = f"{sys.executable} -m storm_dagster daemon zookeeper"
    verb = f"{daemon} --host 127.0.0.1 --port {port} --home {tmp_path} {option}"
    certificates = CertificateFolder.of(tmp_path)

    def answers() -> bool:
        if not option:
            return server_answers("127.0.0.1", port)
        if not certificates.client_file.exists():
            return False
        tls = client_context(certificates)
        return server_answers("127.0.0.1", port, tls=tls)

    process = subprocess.Popen(["sh", "-c", f"trap '' TERM; exec {verb}"])
    try:
        eventually(answers, 60)
        assert not option or not server_answers("127.0.0.1", port), "nor in clear text"
        process.terminate()
        # By the signal, and not after an order of its own.
        assert process.wait(patience(30)) == 128 + signal.SIGTERM
    finally:
        process.kill()


def test_servers_of_background_tests_end_on_term() -> None:
    """Dagster copies the disposition of SIGINT, which a script's ``&`` ignores, to SIGTERM."""
    code = (
        "import interrupts, signal; from dagster._utils.interrupts import capture_interrupts\n"
        "interrupts.pytest_configure()\n"
        "with capture_interrupts(): pass\n"
        "assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler"
    )
    folder = Path(__file__).parents[1] / "plugins"
    script = "trap '' INT; exec \"$@\""
    done = subprocess.run(
        ["sh", "-c", script, "-", sys.executable, "-c", code], cwd=folder, timeout=60, check=False
    )
    assert done.returncode == 0
