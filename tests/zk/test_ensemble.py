"""An ensemble of real servers, and links to it that break: what a session notices of each."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from storm_dagster.host.clock import boot_clock
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.testing.waiting import eventually, patience
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.embedded import Member, ServerFiles, ensemble_command
from storm_dagster.zk.root import create_root_node
from storm_dagster.zk.session import QuorumLease, ZkSession
from storm_rigs.servers.ensemble import ZooKeeperEnsemble, server_mode
from storm_rigs.servers.fault_proxy import FaultProxy
from storm_rigs.servers.namespaces import Network, missing_requirement

pytestmark = [pytest.mark.zookeeper, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperEnsemble]:
    with ZooKeeperEnsemble(tmp_path_factory.mktemp("ensemble")) as made:
        yield made


def connect(hosts: str) -> ZkSession:
    return ZkSession(hosts, root="/ensemble", session_timeout_ms=patience(4000))


def test_members_are_named_once() -> None:
    twice = [Member(1, 1, 2, 3), Member(1, 4, 5, 6)]
    for members, id in ((twice, 1), (twice[:1], 2), ([], 1)):
        with pytest.raises(InvalidRequest, match="a different id"):
            ensemble_command(members, id, Path("/nowhere"))


def test_a_server_without_the_password_does_not_join(ensemble: ZooKeeperEnsemble) -> None:
    ensemble.heal()
    id = ensemble.followers()[0]
    ensemble.kill(id)
    ensemble.passwords[id] = "guessed"
    try:
        ensemble.launch(id)
        refusals = (b"SaslException", b"SASL", b"checksum")
        eventually(
            lambda: any(word in ensemble.log(id).read_bytes() for word in refusals), 60, "a refusal"
        )
        others = [member.id for member in ensemble.members if member.id != id]
        eventually(
            lambda: all(ensemble.mode(other) for other in others), 60, "service of the others"
        )
        assert ensemble.mode(id) is None
    finally:
        ensemble.passwords.clear()
        ensemble.kill(id)
        ensemble.heal()
    eventually(
        lambda: all(ensemble.mode(member.id) for member in ensemble.members), 60, "service of all"
    )


def member_context(ensemble: ZooKeeperEnsemble, identity: Path | None) -> ssl.SSLContext:
    """TLS context of somebody who connects to a member, with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(ensemble.certificates.members_authority_file)
    if identity is not None:
        context.load_cert_chain(identity)
    return context


def refuses_handshake(
    member: Member, port: int, context: ssl.SSLContext, wait: float = 10.0
) -> bool:
    """True if the member ends the handshake.

    False if it has accepted the certificate: it sends nothing, and waits for a proof that the
    password is known, or has given that up.
    """
    with socket.create_connection((member.host, port), timeout=patience(10)) as plain:
        try:
            link = context.wrap_socket(plain)
            link.settimeout(wait)
            # The refusal comes after the handshake: a client of TLS 1.3 ends it first.
            link.recv(1)
        except TimeoutError:
            return False
        except (ssl.SSLError, ConnectionError):
            return True
        return False


def ends_plain_text(member: Member, port: int) -> bool:
    """True if the member ends a connection that begins as those without TLS do."""
    if port == member.election:
        address = f"127.0.0.1:{member.peer}".encode()
        begin = struct.pack("!qqi", -65536, member.id % 3 + 1, len(address)) + address
    else:
        begin = struct.pack("!q", 0x5F2435013501EDCC)  # of each message of a proof
    with socket.create_connection((member.host, port), timeout=patience(10)) as plain:
        plain.sendall(begin)
        try:
            return plain.recv(1) == b""
        except ConnectionError:
            return True


def test_a_member_talks_to_nobody_without_a_members_certificate(
    ensemble: ZooKeeperEnsemble,
) -> None:
    ensemble.heal()
    leader = ensemble.members[ensemble.leader() - 1]
    files = ensemble.certificates
    for port in (leader.election, leader.peer):
        member = member_context(ensemble, files.members_file)
        assert not refuses_handshake(leader, port, member, wait=1.0)
        for identity in (None, files.client_file, files.server_file):
            assert refuses_handshake(leader, port, member_context(ensemble, identity))
        assert ends_plain_text(leader, port)


@pytest.mark.parametrize(
    "kind", [pytest.param("no certificate", marks=pytest.mark.long), "a client's certificate"]
)
def test_who_knows_the_password_alone_is_not_followed(
    ensemble: ZooKeeperEnsemble, kind: str
) -> None:
    """A member's ports are another's, who takes part as far as the members let it.

    Among equals it would win, as its id is the highest one.
    """
    folder = ensemble.certificates
    client = ServerFiles(folder.client_file, folder.members_authority_file)
    for member in ensemble.members:
        ensemble.kill(member.id)
    impostor = ensemble.members[-1].id
    ensemble.identities[impostor] = None if kind == "no certificate" else client
    try:
        ensemble.launch(impostor)
        eventually(lambda: b"LOOKING" in ensemble.log(impostor).read_bytes(), 60, "an election")
        others = [member.id for member in ensemble.members if member.id != impostor]
        for id in others:
            ensemble.launch(id)
        eventually(lambda: all(ensemble.mode(id) for id in others), 60, "service of the others")
        assert ensemble.leader() in others
        assert ensemble.mode(impostor) is None
    finally:
        ensemble.identities.clear()
        ensemble.kill(impostor)
        ensemble.heal()


def test_a_session_outlives_the_server_that_leads(ensemble: ZooKeeperEnsemble) -> None:
    session = connect(",".join(ensemble.addresses))
    try:
        create_root_node(session)
        state = ZooKeeperClusterState(session)
        state.create_node("/kept", b"1")
        number, old = session.session_id, ensemble.leader()
        ensemble.kill(old)
        assert ensemble.leader() != old
        assert (
            eventually(lambda: state.get_data("/kept"), 60, "an answer", ignore=(Unavailable,))
            == b"1"
        )
        if not state.exists("/new"):
            state.create_node("/new", b"2")
        assert session.session_id == number
        ensemble.heal()

        def modes() -> list[str]:
            return sorted(
                str(server_mode(member.host, member.client)) for member in ensemble.members
            )

        eventually(lambda: modes() == ["follower", "follower", "leader"], 60, "all servers")
    finally:
        session.close()


def test_a_link_that_is_cut_suspends_and_what_was_held_arrives(ensemble: ZooKeeperEnsemble) -> None:
    member = ensemble.members[0]
    with FaultProxy(member.host, member.client) as link:
        session = connect(link.address)
        try:
            create_root_node(session)
            state = ZooKeeperClusterState(session)
            number = session.session_id
            link.reset()
            eventually(
                lambda: session.connected and state.exists("/"),
                30,
                "a new connection",
                ignore=(Unavailable,),
            )
            assert session.session_id == number, "a connection that ends is no lost session"
            link.cut()
            with pytest.raises(Unavailable):
                state.create_node("/held", b"x")
            eventually(lambda: not session.connected, 30, "the client's own doubt")
            link.restore()
            eventually(lambda: session.connected, 30, "the connection again")
            # Whether it landed is known only to who looks.
            if not eventually(
                lambda: (state.exists("/held"),), 30, "an answer", ignore=(Unavailable,)
            )[0]:
                state.create_node("/held", b"x")
            assert state.get_data("/held") == b"x"
        finally:
            session.close()


@pytest.mark.skipif(
    missing_requirement() is not None,
    reason=f"servers cannot be parted here: {missing_requirement()}",
)
@pytest.mark.parametrize("mode", [pytest.param("follower", marks=pytest.mark.chaos), "leader"])
def test_a_lease_ends_before_the_session_of_a_partitioned_server(tmp_path: Path, mode: str) -> None:
    """The server that is out of touch goes on answering its clients; nothing that it says prolongs
    the lease.
    """
    with (
        Network("sdle", 3) as network,
        ZooKeeperEnsemble(
            tmp_path,
            hosts=[network.address(host) for host in range(3)],
            prefixes=[network.prefix(host) for host in range(3)],
        ) as ensemble,
    ):
        leading = ensemble.leader()
        parted = leading if mode == "leader" else ensemble.followers()[0]
        others = [member for member in ensemble.members if member.id != parted]
        owner, watcher = (
            connect(ensemble.members[parted - 1].address),
            connect(",".join(member.address for member in others)),
        )
        lease = QuorumLease(owner).start()
        try:
            create_root_node(owner)
            ZooKeeperClusterState(owner).set_ephemeral_node("/worker", b"")
            seen = ZooKeeperClusterState(watcher)
            seen.sync_path("/worker")
            assert seen.exists("/worker")
            connected = owner.lease().connected_boot
            eventually(
                lambda: lease.lease_end() > connected + owner.lease().negotiated_ms / 1000,
                60,
                "a proof by the leader",
            )
            network.part(parted - 1, *(member.id - 1 for member in others))
            eventually(
                lambda: not seen.exists("/worker"), 60, "the session's end", ignore=(Unavailable,)
            )
            assert lease.lease_end() < boot_clock(), (
                "nobody may run a task that another may open now"
            )
        finally:
            owner.close(1.0)
            watcher.close()
