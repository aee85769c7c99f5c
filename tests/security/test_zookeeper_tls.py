"""TLS to ZooKeeper, with a real server that listens on nothing else for clients of a cluster."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from kazoo.handlers.threading import SequentialThreadingHandler

from storm_dagster.api import TopologyBuilder
from storm_dagster.cli.options import Invocation
from storm_dagster.core.slots.model import Work
from storm_dagster.host.endpoints import ZooKeeperTls, zookeeper_tls_conf
from storm_dagster.host.files import make_home_private
from storm_dagster.host.worker_spec import WorkerSpec
from storm_dagster.model.conf import default_conf
from storm_dagster.model.errors import InvalidRequest, Misconfigured, Unavailable
from storm_dagster.operations.read.exposures import ClusterPlace, exposures
from storm_dagster.security.authority import CertificateFolder
from storm_dagster.security.settings import zookeeper_tls
from storm_dagster.supervisor.launcher import Launcher
from storm_dagster.supervisor.localizer import LocalCode
from storm_dagster.testing.waiting import eventually, patience
from storm_dagster.zk.connection import make_client
from storm_dagster.zk.embedded import server_answers
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.servers.embedded_zookeeper import EmbeddedZooKeeper
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.builder import Stage

pytestmark = pytest.mark.zookeeper


def pem(path: Path, issued: trustme.LeafCert) -> Path:
    """Certificate and key in one file, in the form that ZooKeeper reads, too."""
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    form = (
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(
        key.private_bytes(*form) + b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    )
    path.chmod(0o600)
    return path


class Server:
    """The server's TLS port, and the files of its clients."""

    def __init__(self, folder: Path, authority: trustme.CA) -> None:
        self.port = free_port()
        self.ca, self.client = (
            folder / "ca.pem",
            pem(folder / "client.pem", authority.issue_cert("client.example")),
        )
        self.ca.write_bytes(authority.cert_pem.bytes())
        server = pem(folder / "server.pem", authority.issue_cert("localhost"))
        self.more = {
            "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
            "secureClientPort": self.port,
            "secureClientPortAddress": "127.0.0.1",
            "ssl.keyStore.location": server,
            "ssl.trustStore.location": self.ca,
            # Else it looks for the name of its client's address.
            "ssl.hostnameVerification": "false",
        }

    def conf(self, **values: Any) -> dict[str, Any]:
        return {
            "storm.zookeeper.servers": [f"localhost:{self.port}"],
            "storm.zookeeper.ssl.enable": True,
            "storm.zookeeper.ssl.truststore.path": str(self.ca),
            "storm.zookeeper.ssl.keystore.path": str(self.client),
            "storm.zookeeper.session.timeout": patience(8000),
            **{f"storm.zookeeper.{key.replace('__', '.')}": value for key, value in values.items()},
        }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, authority: trustme.CA) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tls")
    server = Server(folder, authority)
    with EmbeddedZooKeeper(folder / "zk", durable=False, more=server.more):
        yield server


@pytest.fixture
def conf(server: Server, zk_root: str) -> Callable[..., dict[str, Any]]:
    """Makes the conf of the test's cluster; ``ssl__keystore__path=...`` is a key of
    ``storm.zookeeper``.
    """
    return lambda **values: server.conf(root=zk_root, **values)


def test_a_cluster_over_tls(conf: Callable[..., dict[str, Any]]) -> None:
    with StormClusterState.open(
        {**conf(), "storm.secret": "a-secret-for-tests-4711"}, create_root=True
    ) as cluster:
        state = cluster.state
        large = os.urandom(300_000)
        state.set_data("/tasks/a-1-1", large)
        # More answers at once than one record of TLS takes.
        transaction = state.transaction()
        for number in range(300):
            transaction.create(f"/topology/t-{number}-1", b"x" * number)
        transaction.commit()
        found = state.get_many([f"/topology/t-{number}-1" for number in range(300)])
        assert [each[0] for each in found if each] == [b"x" * number for number in range(300)]
        assert state.get_data("/tasks/a-1-1") == large
        seen: list[str] = []
        state.register(lambda kind, path: seen.append(path))
        state.get_data("/tasks/a-1-1", watch=True)
        cluster.session.drop_link()
        again = eventually(
            lambda: state.get_data("/tasks/a-1-1", watch=True),
            60,
            "a connection",
            ignore=(Unavailable,),
        )
        assert again == large, "the same session, in a new connection"
        state.set_data("/tasks/a-1-1", b"small")
        eventually(lambda: "/tasks/a-1-1" in seen, what="the event")


def test_an_answer_that_tls_holds_already_is_not_waited_for(server: Server) -> None:
    """A proxy such as stunnel sends many answers in one record: the kernel shows no more to read
    after the first.
    """
    tls = zookeeper_tls(server.conf())
    assert tls is not None
    handler = make_client(f"localhost:{server.port}", 4000, tls=tls)[0].handler
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.more["ssl.keyStore.location"])
    near, far = socket.socketpair()

    def answer() -> None:
        with context.wrap_socket(far, server_side=True) as link:
            link.sendall(b"two answers")
            link.recv(1)

    thread = threading.Thread(target=answer)
    thread.start()
    with tls.wrap_socket(near, server_hostname="localhost") as link:
        assert link.recv(4) == b"two "
        assert SequentialThreadingHandler().select([link], [], [], 0)[0] == [], (
            "the kernel has nothing"
        )
        assert handler.select([link], [], [], 30) == ([link], [], [])
        assert link.recv(100) == b"answers"
        assert handler.select([link], [], [], 0)[0] == []
        link.sendall(b"x")
        thread.join()


def test_who_is_not_trusted_is_refused_with_the_key(
    tmp_path: Path, conf: Callable[..., dict[str, Any]], server: Server
) -> None:
    other = tmp_path / "other.pem"
    other.write_bytes(trustme.CA().cert_pem.bytes())
    with pytest.raises(
        Misconfigured, match=r"not trusted.*storm\.zookeeper\.ssl\.truststore\.path"
    ):
        StormClusterState.open(conf(ssl__truststore__path=str(other)))
    # The server's certificate names localhost.
    with pytest.raises(
        Misconfigured, match=r"storm\.zookeeper\.servers the hosts that its certificates name"
    ):
        StormClusterState.open(conf(servers=[f"127.0.0.1:{server.port}"]))
    lax = conf(servers=[f"127.0.0.1:{server.port}"], ssl__hostnameVerification=False)
    with StormClusterState.open(lax, create_root=True) as cluster:
        assert cluster.cluster_id()


def test_without_what_the_server_asks_for_there_is_no_session(
    conf: Callable[..., dict[str, Any]], zookeeper_server: str
) -> None:
    soon = {"connection__timeout": 600}
    with pytest.raises(Unavailable, match=r"storm\.zookeeper\.ssl\.keystore\.path"):
        StormClusterState.open(conf(ssl__keystore__path=None, **soon))
    with pytest.raises(Unavailable, match=r"storm\.zookeeper\.ssl\.enable"):
        StormClusterState.open(conf(ssl__enable=False, **soon))
    with pytest.raises(Unavailable, match=r"over TLS.*secureClientPort"):
        StormClusterState.open(conf(servers=[zookeeper_server], **soon))


@pytest.mark.parametrize("key", ["truststore", "keystore"])
def test_a_file_that_is_no_pem_is_an_error_with_its_key(
    tmp_path: Path, server: Server, key: str
) -> None:
    store = tmp_path / "store.jks"
    store.write_bytes(b"\xfe\xed\xfe\xed")
    for path in (store, tmp_path / "missing.pem"):
        with pytest.raises(InvalidRequest, match=rf"storm\.zookeeper\.ssl\.{key}\.path .* PEM"):
            zookeeper_tls(server.conf(**{f"ssl__{key}__path": str(path)}))
    with pytest.raises(InvalidRequest, match=r"needs storm\.zookeeper\.ssl\.truststore\.path"):
        zookeeper_tls(server.conf(ssl__truststore__path=None))
    assert zookeeper_tls(default_conf()) is None


def test_a_key_with_a_password(tmp_path: Path, server: Server) -> None:
    key = serialization.load_pem_private_key(server.client.read_bytes(), None)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    closed = tmp_path / "closed.pem"
    chain = server.client.read_bytes().partition(b"-----BEGIN CERT")
    closed.write_bytes(
        key.private_bytes(*form, serialization.BestAvailableEncryption(b"pw")) + b"".join(chain[1:])
    )
    assert zookeeper_tls(server.conf(ssl__keystore__path=str(closed), ssl__keystore__password="pw"))
    with pytest.raises(InvalidRequest, match=r"keystore\.password"):
        zookeeper_tls(server.conf(ssl__keystore__path=str(closed)))


@pytest.mark.long
def test_a_worker_runs_over_tls(tmp_path: Path, conf: Callable[..., dict[str, Any]]) -> None:
    builder = TopologyBuilder("wc")
    builder.set_spout("numbers", "rig_code:Numbers", outputs=["n"])
    tasks = {"numbers": "1", "__acker": "2", "__topology_master": "3"}
    code = "from storm_dagster.api import Spout\n\n\nclass Numbers(Spout):\n    outputs = ['n']\n\n    def next_tuple(self):\n        pass\n"
    with Stage(tmp_path, conf()) as stage:
        rig = stage.workers(builder, tasks, code=code)
        port = free_port()
        rig.assign({("s1", port): "1-3"})
        rig.start("s1", port)
        eventually(rig.running, 60, "the worker")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs processes of other users")
@pytest.mark.parametrize("other_user", [True, False])
def test_a_worker_of_another_user_gets_a_certificate_of_its_own(
    server: Server, other_user: bool
) -> None:
    top = Path(tempfile.mkdtemp(prefix="storm-users-", dir="/tmp"))
    top.chmod(0o755)
    keys = {
        "supervisor.run.worker.as.user": other_user,
        "supervisor.worker.user": "65533",
        "supervisor.worker.zookeeper.keystore.path": "/etc/worker.pem",
        "storm.zookeeper.ssl.keystore.password": "planted-password",
    }
    try:
        home = make_home_private(top / "home")
        code = home / "code"
        (code / "code").mkdir(parents=True)
        (code / "stormconf.ser").write_text('{"topology.python": "/bin/true"}')
        launcher = Launcher(home, "s1", "127.0.0.1", {**default_conf(), **server.conf(), **keys})
        launched = launcher.launch(6900, Work("a-1-1", "a-1-1"), LocalCode(code, "0" * 64))
        assert launched.process.child is not None
        launched.process.child.wait()
        folder = home / "workers" / launched.worker.id
        spec = WorkerSpec.read(folder / "own" / "SPEC.json" if other_user else folder / "SPEC.json")
    finally:
        shutil.rmtree(top)
    shown = [spec.conf[f"storm.zookeeper.ssl.keystore.{each}"] for each in ("path", "password")]
    assert shown == (
        ["/etc/worker.pem", None] if other_user else [str(server.client), "planted-password"]
    )
    assert zookeeper_tls({**spec.conf, "storm.zookeeper.ssl.keystore.path": None}) is not None


def answers_to(user: int, port: int, conf: dict[str, Any]) -> bool:
    """True if the server answers a process of the user that has this conf."""
    child = os.fork()
    if child == 0:
        answered = False
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            answered = server_answers("127.0.0.1", port, 20.0, zookeeper_tls(conf))
        finally:
            os._exit(0 if answered else 1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs processes of other users")
def test_each_worker_of_another_user_gets_a_certificate_that_it_alone_reads() -> None:
    top = Path(tempfile.mkdtemp(prefix="storm-users-", dir="/tmp"))
    top.chmod(0o755)
    try:
        home = make_home_private(top / "home")
        authority = CertificateFolder.of(home)
        authority.prepare()
        client = str(authority.client_file)
        tls = ZooKeeperTls(ca=str(authority.authority_file), certificate=client, key=client)
        conf = {
            **default_conf(),
            **zookeeper_tls_conf(tls),
            "supervisor.run.worker.as.user": True,
            "supervisor.worker.user": "65533",
            "supervisor.worker.zookeeper.authority": str(authority.path),
        }
        code = home / "code"
        (code / "code").mkdir(parents=True)
        (code / "stormconf.ser").write_text('{"topology.python": "/bin/true"}')
        launched = Launcher(home, "s1", "127.0.0.1", conf).launch(
            6900, Work("a-1-1", "a-1-1"), LocalCode(code, "0" * 64)
        )
        assert launched.process.child is not None
        launched.process.child.wait()
        own = home / "workers" / launched.worker.id / "own"
        spec = WorkerSpec.read(own / "SPEC.json")
        assert zookeeper_tls(spec.conf) is not None
        paths = [
            spec.conf[f"storm.zookeeper.ssl.{store}.path"] for store in ("truststore", "keystore")
        ]
        assert {Path(path).parent for path in paths} == {own}
        for path in map(Path, paths):
            assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (65533, 0o600)
        assert Path(paths[1]).read_bytes() != authority.client_file.read_bytes()
        assert authority.path.stat().st_mode & 0o077 == 0, "no worker reads the authority's key"
        assert "supervisor.worker.zookeeper.authority" not in spec.conf
        with EmbeddedZooKeeper(home / "zk", durable=False, certificates=authority) as zookeeper:
            assert answers_to(65533, zookeeper.port, spec.conf), "the server knows it"
            assert not answers_to(65533, zookeeper.port, conf), "it reads no other certificate"
    finally:
        shutil.rmtree(top)


def test_doctor_asks_over_tls(
    tmp_path: Path, conf: Callable[..., dict[str, Any]], server: Server
) -> None:
    values = {**default_conf(), **conf()}
    assert server_answers("localhost", server.port, 5.0, zookeeper_tls(values))
    assert not server_answers("localhost", server.port, 1.0)
    with StormClusterState.open(conf(), create_root=True):
        invocation = Invocation(tmp_path, tmp_path, conf())
        place = ClusterPlace(tmp_path, tmp_path, invocation.conf)
        (row,) = exposures(place)["ZooKeeper"](place)
        assert row[0] == "warning" and "make it run code" in row[1]
