"""Whom a client may send to in clear: the decision, and what the kernel says of the server."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.security import peers
from storm_dagster.security.peers import can_identify_peers, is_of_this_machine, server_user
from storm_dagster.security.server_identity import (
    PlaintextPeer,
    ServerProcess,
    TrustedServers,
    UntrustedServer,
    user_id,
)
from storm_dagster.testing.waiting import patience

OWN, OTHER, DAEMON = 1000, 1001, 1002
TRUSTED = TrustedServers(frozenset({OWN, 0, DAEMON}))
SECURED = TrustedServers(
    frozenset({OWN, 0}),
    tuple(PlaintextPeer.parse(text) for text in ("nimbus1", "zk1:2181", "10.1.0.0/16")),
    needs_proof=True,
)


def decided(servers: TrustedServers, process: ServerProcess, **options: Any) -> str:
    """The refusal; empty if the server is trusted."""
    try:
        servers.check_process(process, server="http://h:7621", **options)
    except UntrustedServer as error:
        assert isinstance(error, Unavailable) and "is sent nothing" in error.message
        return error.message
    return ""


# -- the decision ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "trusted"), [(OWN, True), (0, True), (DAEMON, True), (OTHER, False)]
)
@pytest.mark.parametrize("needs_proof", [False, True])
def test_on_this_machine_the_owner_decides(owner: int, trusted: bool, needs_proof: bool) -> None:
    servers = TrustedServers(TRUSTED.users, needs_proof=needs_proof)
    refusal = decided(servers, ServerProcess("127.0.0.1", 7621, owner=owner), signed=True)
    assert (refusal == "") is trusted
    assert trusted or ("http://h:7621" in refusal and f"uid {OTHER}" in refusal)


def test_the_refusal_of_another_user_says_the_line_to_write() -> None:
    nobody = pwd.getpwnam("nobody")
    refusal = decided(TRUSTED, ServerProcess("127.0.0.1", 7621, owner=nobody.pw_uid))
    assert "`storm.security.peer.users: [nobody]`" in refusal
    assert f"nobody (uid {nobody.pw_uid})" in refusal


def test_a_user_of_root_alone_trusts_no_other_user() -> None:
    root = TrustedServers(frozenset({0}))
    assert decided(root, ServerProcess("127.0.0.1", 7621, owner=OWN))


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("needs_proof", [False, True])
def test_where_the_kernel_names_no_owner_only_a_signature_with_a_secret_goes(
    signed: bool, needs_proof: bool
) -> None:
    servers = TrustedServers(frozenset({OWN}), needs_proof=needs_proof)
    unknown = ServerProcess("127.0.0.1", 7621, users_are_known=False)
    refusal = decided(servers, unknown, signed=signed)
    assert (refusal == "") is (signed and needs_proof)
    assert not refusal or ("storm.secret.file" in refusal) is signed


def test_a_connection_that_nobody_holds_is_sent_nothing() -> None:
    gone = ServerProcess("127.0.0.1", 7621)
    assert "no process" in decided(SECURED, gone, signed=True)


@pytest.mark.parametrize(
    ("host", "port", "name", "trusted"),
    [
        ("192.0.2.1", 7621, "nimbus1", True),
        ("192.0.2.1", 7621, "NIMBUS1", True),
        ("192.0.2.1", 7621, "nimbus2", False),
        ("192.0.2.1", 2181, "zk1", True),
        ("192.0.2.1", 2182, "zk1", False),
        ("10.1.255.1", 1, "anything", True),
        ("::ffff:10.1.255.1", 1, "anything", True),
        ("10.2.0.1", 1, "anything", False),
        ("192.0.2.1", 7621, "", False),
    ],
)
def test_off_this_machine_a_secret_needs_tls_or_a_named_network(
    host: str, port: int, name: str, trusted: bool
) -> None:
    away = ServerProcess(host, port, is_here=False)
    refusal = decided(SECURED, away, name=name, signed=True)
    assert (refusal == "") is trusted
    assert trusted or ("storm.security.plaintext.peers: ['" in refusal and "storm.tls" in refusal)
    assert not decided(TRUSTED, away, name=name), "without a secret there is nothing to prove"


@pytest.mark.parametrize(
    ("text", "covered", "other"),
    [
        ("Nimbus1", ("192.0.2.9", 1, "nimbus1"), ("192.0.2.9", 1, "nimbus")),
        ("[2001:db8::1]:7621", ("2001:db8::1", 7621, ""), ("2001:db8::1", 7622, "")),
        ("2001:db8::1", ("2001:db8::1", 7622, ""), ("2001:db8::2", 7622, "")),
        ("2001:db8::/32", ("2001:db8::77", 5, "x"), ("2001:db9::77", 5, "x")),
        ("192.0.2.1:80", ("192.0.2.1", 80, ""), ("192.0.2.1", 81, "")),
        # Who calls by address, as kazoo does, is known by the addresses of the name.
        ("localhost", ("127.0.0.1", 2181, ""), ("192.0.2.1", 2181, "")),
    ],
)
def test_entries_name_a_host_a_port_or_a_network(
    text: str, covered: tuple[str, int, str], other: tuple[str, int, str]
) -> None:
    entry = PlaintextPeer.parse(text)
    assert entry.covers(*covered) and not entry.covers(*other)


@pytest.mark.parametrize(
    "text",
    ["", "a b", "host:", "host:0", "host:70000", ":80", "10.0.0.1/8", "10.0.0.0/40", "a:b:c"],
)
def test_an_entry_that_is_none_of_them_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"storm\.security\.plaintext\.peers"):
        TrustedServers.of({"storm.security.plaintext.peers": [text]})


def test_the_users_of_a_conf() -> None:
    nobody = pwd.getpwnam("nobody").pw_uid
    conf = {
        "storm.security.peer.users": ["nobody", "4711", "a-user-that-is-not-here"],
        "storm.security.daemon.user": 4712,
    }
    servers = TrustedServers.of(conf, users=[4713])
    assert servers.users == {os.geteuid(), 0, nobody, 4711, 4712, 4713}
    assert not servers.needs_proof and user_id("a-user-that-is-not-here") is None
    assert TrustedServers.of({"storm.secret.file": "/x"}).needs_proof


# -- the kernel --------------------------------------------------------------------------------

kernel = pytest.mark.skipif(not can_identify_peers(), reason="the kernel names no users here")
root = pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
LISTEN = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
server = socket.create_server((sys.argv[2], int(sys.argv[3])))
print(server.getsockname()[1], flush=True)
for line in sys.stdin:
    if line == "accept\\n":
        link, _ = server.accept()
        link.sendall(b"an answer")
    elif line == "close\\n":
        link.close()
    else:
        server.close()
    print("done", flush=True)
"""


class OtherUser:
    """A process of another user that listens at a port, and does what it is told."""

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        user = str(pwd.getpwnam("nobody").pw_uid)
        self._child = subprocess.Popen(
            [sys.executable, "-Sc", LISTEN, user, host, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._child.stdout is not None
        self.port = int(self._child.stdout.readline())

    def do(self, word: str) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(word + "\n")
        self._child.stdin.flush()
        assert self._child.stdout.readline() == "done\n"

    def end(self) -> None:
        self._child.communicate(timeout=patience(20))


@pytest.fixture
def other_user() -> Iterator[Callable[..., OtherUser]]:
    made: list[OtherUser] = []

    def make(*arguments: Any) -> OtherUser:
        made.append(OtherUser(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture(params=["asked", "tables"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to ask the kernel."""
    if request.param == "asked":
        monkeypatch.setattr(peers, "_TABLES", ())
    else:
        monkeypatch.delattr(socket, "AF_NETLINK")


def owner_of(link: socket.socket) -> int | None:
    return server_user(link.getsockname(), link.getpeername())


@kernel
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("bound", "called"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("::", "127.0.0.1"),
        ("::", "::1"),
        ("::1", "::1"),
    ],
)
def test_the_owner_is_known_before_and_after_the_server_accepts(bound: str, called: str) -> None:
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    try:
        server = socket.create_server((bound, 0), family=family, dualstack_ipv6=bound == "::")
    except (OSError, ValueError):
        pytest.skip(f"no {bound} here")
    with server, socket.create_connection((called, server.getsockname()[1])) as link:
        assert owner_of(link) == os.geteuid(), "while it waits to be accepted"
        accepted, _ = server.accept()
        assert owner_of(link) == os.geteuid()
        assert is_of_this_machine(link.getsockname(), link.getpeername())
        accepted.close()
        assert owner_of(link) is None, "nobody holds it any more"


@kernel
@pytest.mark.usefixtures("way")
def test_an_address_that_ipv6_maps_is_the_same_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = socket.socket(socket.AF_INET6)
        with link:
            link.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            try:
                link.connect(("::ffff:127.0.0.1", server.getsockname()[1]))
            except OSError:
                pytest.skip("no IPv6 here")
            assert owner_of(link) == os.geteuid()


@kernel
@root
@pytest.mark.usefixtures("way")
def test_another_user_is_known_before_and_after_it_accepts(
    other_user: Callable[..., OtherUser],
) -> None:
    other = other_user()
    with socket.create_connection(("127.0.0.1", other.port)) as link:
        nobody = pwd.getpwnam("nobody").pw_uid
        assert owner_of(link) == nobody
        other.do("accept")
        assert owner_of(link) == nobody
        with pytest.raises(UntrustedServer, match="nobody"):
            TrustedServers().check_socket(link, server="it")


@kernel
@root
@pytest.mark.usefixtures("way")
def test_an_answer_of_who_has_left_is_not_taken_for_that_of_the_next_at_its_port(
    other_user: Callable[..., OtherUser],
) -> None:
    """It answers before it is asked, ends, and the real server begins to listen at the port."""
    other = other_user()
    with socket.create_connection(("127.0.0.1", other.port)) as link:
        other.do("accept")
        other.do("close")
        other.do("end")
        with socket.create_server(("127.0.0.1", other.port)):
            assert owner_of(link) is None
            with pytest.raises(UntrustedServer, match="no process of this machine"):
                TrustedServers().check_socket(link, server="it")
            assert link.recv(100) == b"an answer", "and its answer is there to be read"


def test_a_server_of_another_machine_has_no_owner_here() -> None:
    assert not is_of_this_machine(("192.0.2.1", 4), ("192.0.2.2", 5))
    assert is_of_this_machine(("192.0.2.1", 4), ("192.0.2.1", 5))


INSIDE = """
import os, socket
from storm_dagster.security.peers import can_identify_peers, is_own_peer, unknown_users
from storm_dagster.security.server_identity import TrustedServers, UntrustedServer
assert os.geteuid() in unknown_users(), (os.geteuid(), unknown_users())
assert not can_identify_peers()
with socket.create_server(("127.0.0.1", 0)) as server:
    with socket.create_connection(server.getsockname()) as link:
        assert not is_own_peer(link.getpeername(), link.getsockname())
        try:
            TrustedServers(needs_proof=True).check_socket(link, server="it", signed=True)
        except UntrustedServer as error:
            print(error.message)
"""


def test_a_user_that_a_namespace_cannot_name_is_nobodys_own() -> None:
    """Outside and inside show the same id there: that of users without a name."""
    unshare = shutil.which("unshare")
    command = [unshare or "", "--user", sys.executable, "-c", INSIDE]
    root_folder = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root_folder, "HOME": "/"}
    try:
        subprocess.run([*command[:2], "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no user namespace may be made here")
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=patience(60), check=False
    )
    assert done.returncode == 0, done.stderr
    assert "a user outside this user namespace" in done.stdout
