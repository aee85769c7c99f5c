"""ZooKeeper's clients show no password to a server of another user, whenever it comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from storm_dagster.host.endpoints import ZooKeeperTls, zookeeper_tls_conf
from storm_dagster.model.conf import ClusterConf, default_conf
from storm_dagster.model.errors import Misconfigured, StormDagsterError, Unavailable
from storm_dagster.operations.read.exposures import ClusterPlace, exposures
from storm_dagster.security import peers
from storm_dagster.security.authority import CertificateFolder
from storm_dagster.security.peers import can_identify_peers
from storm_dagster.security.server_identity import TrustedServers, UntrustedServer
from storm_dagster.testing.waiting import eventually, patience
from storm_dagster.zk.embedded import server_answers
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.servers.embedded_zookeeper import EmbeddedZooKeeper
from storm_rigs.servers.zookeeper_intruder import ZooKeeperIntruder, another_user

pytestmark = [pytest.mark.zookeeper, pytest.mark.timeout(300)]
PASSWORD = "password-planted-for-tests-4711"


def certificates(home: Path) -> CertificateFolder:
    home.mkdir(exist_ok=True)
    folder = CertificateFolder.of(home)
    folder.prepare()
    return folder


def conf_of(
    port: int, root: str = "/storm", folder: CertificateFolder | None = None
) -> dict[str, Any]:
    tls = None
    if folder is not None:
        client = str(folder.client_file)
        tls = ZooKeeperTls(ca=str(folder.authority_file), certificate=client, key=client)
    return {
        **default_conf(),
        "storm.zookeeper.servers": [f"127.0.0.1:{port}"],
        "storm.zookeeper.root": root,
        "storm.zookeeper.auth.payload": f"storm:{PASSWORD}",
        "storm.zookeeper.connection.timeout": patience(400),
        "storm.zookeeper.session.timeout": patience(20_000),
        **zookeeper_tls_conf(tls),
    }


@another_user
@pytest.mark.parametrize(
    ("cluster_speaks_tls", "intruder_speaks_tls"),
    [(False, False), (True, True), pytest.param(True, False, marks=pytest.mark.long)],
)
def test_who_listens_before_the_server_starts_is_shown_no_password(
    tmp_path: Path, cluster_speaks_tls: bool, intruder_speaks_tls: bool
) -> None:
    pem = certificates(tmp_path / "other").server_file if intruder_speaks_tls else None
    folder = certificates(tmp_path / "own") if cluster_speaks_tls else None
    with ZooKeeperIntruder(pem=pem) as intruder:
        with pytest.raises(StormDagsterError) as refused:
            StormClusterState.open(conf_of(intruder.port(), folder=folder))
        sent = intruder.received()
    assert intruder.calls and PASSWORD.encode() not in sent
    if folder is None:
        assert sent == b""
        assert isinstance(refused.value, UntrustedServer)
        assert "storm.security.peer.users: [nobody]" in refused.value.message
    elif intruder_speaks_tls:
        assert isinstance(refused.value, Misconfigured)
        assert "taken the port of this cluster's server" in refused.value.message


@another_user
@pytest.mark.parametrize("speaks_tls", [False, True])
def test_who_takes_the_port_of_a_server_that_ended_is_shown_no_password(
    tmp_path: Path, speaks_tls: bool
) -> None:
    """A client that has a session connects again by itself, and goes on when its server is back."""
    folder = certificates(tmp_path / "own") if speaks_tls else None
    pem = certificates(tmp_path / "other").server_file if speaks_tls else None
    server = EmbeddedZooKeeper(tmp_path / "zk", durable=False, certificates=folder)
    with (
        server,
        StormClusterState.open(conf_of(server.port, folder=folder), create_root=True) as own,
    ):
        session_id = own.session.session_id
        with ZooKeeperIntruder(server.port, pem) as intruder:
            server.kill()
            intruder.port()
            # It calls again after it has refused the first answer.
            intruder.await_calls(2)
            sent = intruder.received()
        assert intruder.calls and PASSWORD.encode() not in sent
        assert speaks_tls or sent == b""
        server.start()
        cluster_id = eventually(own.cluster_id, 60, "the session", ignore=(Unavailable,))
        assert cluster_id and own.session.session_id == session_id


@another_user
def test_a_user_that_the_conf_names_may_run_the_ensemble() -> None:
    with ZooKeeperIntruder() as server:
        conf = {**conf_of(server.port()), "storm.security.peer.users": ["nobody"]}
        with pytest.raises(StormDagsterError):
            StormClusterState.open(conf)
        assert PASSWORD.encode() in server.received(), "it is taken for a server of the cluster"


@another_user
def test_a_probe_takes_no_answer_of_another_user(tmp_path: Path) -> None:
    with ZooKeeperIntruder() as intruder:
        port = intruder.port()
        with pytest.raises(UntrustedServer, match=r"ZooKeeper at 127\.0\.0\.1:\d+ is sent nothing"):
            server_answers("127.0.0.1", port, patience(2), trusted=TrustedServers())
        place = ClusterPlace(
            tmp_path, tmp_path, ClusterConf(conf_of(port), dict.fromkeys(default_conf(), "-c"))
        )
        (row,) = exposures(place)["ZooKeeper"](place)
        assert row[0] == "warning" and "belongs to user nobody" in row[1]
        assert "storm.security.peer.users: [nobody]" in row[2]
        assert intruder.received() == b""


def test_where_the_kernel_names_no_owner_a_password_needs_tls(
    zookeeper_server: str, zk_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(zookeeper_server.rpartition(":")[2])
    for name in ("peer_user", "server_user"):
        monkeypatch.setattr(peers, name, lambda *_: None)
    monkeypatch.setattr("storm_dagster.security.server_identity.server_user", lambda *_: None)
    can_identify_peers.cache_clear()
    try:
        with pytest.raises(UntrustedServer, match=r"use TLS \(storm\.zookeeper\.ssl\.\*\)"):
            StormClusterState.open(conf_of(port, zk_root), create_root=True)
        without_password = {**conf_of(port, zk_root), "storm.zookeeper.auth.payload": None}
        with StormClusterState.open(without_password, create_root=True) as state:
            assert state.cluster_id()
    finally:
        can_identify_peers.cache_clear()
