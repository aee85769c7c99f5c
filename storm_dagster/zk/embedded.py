"""A real ZooKeeper server from the jars of pyspark.

No download is needed. The server is an ordinary child process (``QuorumPeerMain``, standalone).
``storm-dagster daemon zookeeper`` executes :func:`zookeeper_command`.

An ensemble of three serves while any two of them see each other. For production, use one on
separate hosts; this one serves ``storm-dagster dev --zookeepers 3``, tests and ``make chaos``.
"""

import importlib.util
import os
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storm_dagster.host.class_data import ClassData
from storm_dagster.host.files import make_own_folder, write_atomically
from storm_dagster.host.java import java_command
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.model.names import url_host
from storm_dagster.model.tables import load_table
from storm_dagster.security.authority import CertificateFolder
from storm_dagster.security.server_identity import TrustedServers
from storm_dagster.zk.connect_errors import check_server

_TABLE = load_table(__name__, "embedded")
"""Names of the jars, and settings of servers and members (``embedded.yaml``)."""


def zookeeper_jars() -> list[Path]:
    """The jars of pyspark that a ZooKeeper server needs.

    pyspark itself is not imported. Raises ``Unavailable`` when pyspark is not installed or was
    installed without its jars.
    """
    spec = importlib.util.find_spec("pyspark")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    if not roots:
        raise Unavailable(
            "pyspark is not installed, and the embedded ZooKeeper is in its jars: "
            "pip install 'pyspark[connect]>=4.1', or name an ensemble in storm.zookeeper.servers"
        )
    folder = Path(roots[0]) / "jars"
    jars = sorted(folder.glob("*.jar"))
    names = {*_TABLE["jars"], *_TABLE["optional_jars"]}
    server_jars = [jar for jar in jars if _name_of(jar) in names]
    missing = set(_TABLE["jars"]) - {_name_of(jar) for jar in server_jars}
    if missing:
        raise Unavailable(
            f"{folder} holds no {', '.join(f'{name}-*.jar' for name in sorted(missing))}: "
            "install pyspark from PyPI (pyspark-client has no jars), "
            "or name an ensemble in storm.zookeeper.servers"
        )
    return server_jars


def _name_of(jar: Path) -> str:
    """Name of a jar without its version."""
    return re.split(r"-\d", jar.name, maxsplit=1)[0]


@dataclass(frozen=True)
class ServerFiles:
    """PEM files of a server that speaks TLS."""

    keystore: Path
    """Its key and certificate."""
    truststore: Path
    """Certificate of the authority of its clients."""

    @staticmethod
    def of(folder: CertificateFolder) -> "ServerFiles":
        """The files in HOME."""
        return ServerFiles(folder.server_file, folder.authority_file)

    @staticmethod
    def of_members(folder: CertificateFolder) -> "ServerFiles":
        """The files in HOME with which the members of an ensemble know each other."""
        return ServerFiles(folder.members_file, folder.members_authority_file)


def zookeeper_command(
    data_dir: Path,
    port: int,
    *,
    host: str = "127.0.0.1",
    tick_ms: int = 500,
    heap_mb: int = 256,
    durable: bool = True,
    tls: ServerFiles | None = None,
    more: Mapping[str, object] | None = None,
    java_options: Sequence[str] = (),
    class_data: Sequence[str] | None = None,
) -> list[str]:
    """Write the configuration of a standalone server.

    Returns its command line. The configuration is written to ``data_dir``. Sessions of 2 ticks to
    60 s are granted. ``durable=False`` leaves out the fsync of the transaction log: the state then
    survives the end of the process, but not of the machine. With ``tls`` the port serves clients
    that have a certificate, and no others. ``more`` are further lines of the configuration,
    ``java_options`` further options of the command (:func:`ensemble_command`).
    ``class_data`` are the JVM's options for class data; by default an archive that exists is used.
    Raises ``Unavailable`` when Java or the jars are missing, ``InvalidRequest`` for a port out of
    range.
    """
    if not 0 < port < 65536:
        raise InvalidRequest(f"ZooKeeper cannot listen on port {port}: give one from 1 to 65535")
    jars = zookeeper_jars()
    java = java_command()
    if class_data is None:
        class_data = ClassData.of("zookeeper", java, jars).options()
    data_dir = data_dir.absolute()
    make_own_folder(data_dir)
    settings: dict[str, object] = {
        "tickTime": tick_ms,
        "minSessionTimeout": 2 * tick_ms,
        "dataDir": data_dir,
        "forceSync": "yes" if durable else "no",
        **_TABLE["settings"],
        **_port_settings(port, host, tls),
    }
    if more is not None:
        settings.update(more)
    config = data_dir / "zoo.cfg"
    lines = [f"{key}={value}\n" for key, value in settings.items()]
    config.write_text("".join(lines), encoding="utf-8")
    log_config = data_dir / "log4j2.properties"
    log_config.write_text(_TABLE["log4j2.properties"], encoding="utf-8")
    return [
        java,
        f"-Xmx{heap_mb}m",
        *_TABLE["java_options"],
        *class_data,
        f"-Dlog4j2.configurationFile={log_config}",
        *java_options,
        "-cp",
        os.pathsep.join(str(jar) for jar in jars),
        "org.apache.zookeeper.server.quorum.QuorumPeerMain",
        str(config),
    ]


def _port_settings(port: int, host: str, tls: ServerFiles | None) -> dict[str, object]:
    """Settings of the port for clients, which is the only one."""
    if tls is None:
        return {"clientPort": port, "clientPortAddress": host}
    return {
        "secureClientPort": port,
        "secureClientPortAddress": host,
        "ssl.keyStore.location": tls.keystore,
        "ssl.trustStore.location": tls.truststore,
        **_TABLE["tls"],
    }


@dataclass(frozen=True)
class Member:
    """One server of an ensemble."""

    id: int
    """From 1; the highest one wins an election among equals."""
    client: int
    """Port for clients."""
    peer: int
    """Port on which it serves followers while it leads."""
    election: int
    """Port for votes."""
    host: str = "127.0.0.1"

    @property
    def address(self) -> str:
        """``host:port`` for clients."""
        return f"{url_host(self.host)}:{self.client}"


def ensemble_command(
    members: Sequence[Member],
    id: int,
    data_dir: Path,
    *,
    tick_ms: int = 500,
    durable: bool = True,
    password: str | None = None,
    tls: ServerFiles | None = None,
    member_tls: ServerFiles | None = None,
) -> list[str]:
    """Write the configuration of member ``id``, and return its command line.

    ``myid`` is written, too. The ports between members are open to all users of the host. With a
    ``password`` (letters and digits) only a server that knows it votes or follows, and with
    ``member_tls`` only one that has a certificate of the members' authority. The password alone
    does not hold off who takes a member's ports: the proofs of others can be relayed. For the other
    arguments and errors see :func:`zookeeper_command`. :class:`InvalidRequest` when ``id`` is not
    among the members, or two of them share an id.
    """
    by_id = {member.id: member for member in members}
    if id not in by_id or len(by_id) != len(members):
        ids = sorted(member.id for member in members)
        raise InvalidRequest(
            f"ZooKeeper member {id} is not one of the ensemble {ids}: give each a different id"
        )
    settings: dict[str, object] = {}
    for member in members:
        address = f"{member.host}:{member.peer}:{member.election}:participant"
        settings[f"server.{member.id}"] = address
    settings.update(_TABLE["member"])
    settings.update(_member_tls_settings(member_tls))
    java_options: list[str] = []
    if password:
        users = data_dir.absolute() / "quorum.jaas"
        make_own_folder(data_dir)
        write_atomically(users, _TABLE["member_users"].format(password=password), mode=0o600)
        settings.update(_TABLE["member_auth"])
        java_options.append(f"-Djava.security.auth.login.config={users}")
        # The FIPS mode of ZooKeeper, which is the default, refuses DIGEST-MD5.
        java_options.append("-Dzookeeper.fips-mode=false")
    own = by_id[id]
    command = zookeeper_command(
        data_dir,
        own.client,
        host=own.host,
        tick_ms=tick_ms,
        heap_mb=128,
        durable=durable,
        tls=tls,
        more=settings,
        java_options=java_options,
    )
    (data_dir / "myid").write_text(f"{id}\n", encoding="ascii")
    return command


def _member_tls_settings(files: ServerFiles | None) -> dict[str, object]:
    """Settings of the ports between members; none without TLS."""
    if files is None:
        return {}
    return {
        "ssl.quorum.keyStore.location": files.keystore,
        "ssl.quorum.trustStore.location": files.truststore,
        **_TABLE["member_tls"],
    }


def server_status(
    host: str,
    port: int,
    timeout: float = 1.0,
    tls: ssl.SSLContext | None = None,
    trusted: TrustedServers | None = None,
) -> bytes:
    """Response of a ZooKeeper server to the ``srvr`` command.

    Empty without a response. With ``trusted``, raises :class:`UntrustedServer` for a server that is
    called without TLS and is not one of them.
    """
    with suppress(OSError), ExitStack() as opened:
        link = opened.enter_context(socket.create_connection((host, port), timeout=timeout))
        if tls is not None:
            link = opened.enter_context(tls.wrap_socket(link, server_hostname=host.strip("[]")))
        elif trusted is not None:
            check_server(link, trusted, host, port)
        link.sendall(b"srvr")
        # The server closes the connection after its response.
        return b"".join(iter(lambda: link.recv(4096), b""))
    return b""


def server_address(server: str, conf: Any) -> tuple[str, int]:
    """Host and port of an entry of ``storm.zookeeper.servers``.

    An entry without a port has ``storm.zookeeper.port``.
    """
    host, colon, port = server.rpartition(":")
    if colon:
        return host, int(port)
    return server, int(conf["storm.zookeeper.port"])


def server_answers(
    host: str,
    port: int,
    timeout: float = 1.0,
    tls: ssl.SSLContext | None = None,
    trusted: TrustedServers | None = None,
) -> bool:
    """True if a ZooKeeper server at that address serves requests.

    Raises as :func:`server_status`.
    """
    # Not `ruok`: a server answers that before it has loaded its state.
    return b"Mode:" in server_status(host, port, timeout, tls, trusted)
