"""A real ZooKeeper server out of the jars that pyspark ships: nothing to download.

The server is an ordinary child process (``QuorumPeerMain``, standalone). :func:`zookeeper_command`
is what ``storm-dagster daemon zookeeper`` executes.

An ensemble of three serves while any two of them see each other. For production, use one that is
run on hosts of its own; this one serves ``storm-dagster dev --zookeepers 3``, tests and ``make
chaos``.
"""

import importlib.util
import os
import socket
import ssl
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storm_dagster.host.files import write_atomically
from storm_dagster.host.java import class_data_options, java_command
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.model.tables import load_table

_TABLE = load_table(__name__, "embedded")


def zookeeper_jars() -> list[Path]:
    """The jars of pyspark that make a ZooKeeper server; pyspark itself is not imported.

    Raises ``Unavailable`` when pyspark is not installed or was installed without its jars.
    """
    spec = importlib.util.find_spec("pyspark")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    if not roots:
        raise Unavailable(
            "pyspark is not installed, and the embedded ZooKeeper comes out of its jars: "
            "pip install 'pyspark[connect]>=4.1', or name an ensemble in storm.zookeeper.servers"
        )
    folder = Path(roots[0]) / "jars"
    jars = sorted(folder.glob("*.jar"))
    chosen = [
        jar for jar in jars if jar.name.startswith((*_TABLE["jars"], *_TABLE["optional_jars"]))
    ]
    lacking = [
        prefix
        for prefix in _TABLE["jars"]
        if not any(jar.name.startswith(prefix) for jar in chosen)
    ]
    if lacking:
        raise Unavailable(
            f"{folder} holds no {', '.join(name + '*.jar' for name in lacking)}: "
            "install pyspark from PyPI (pyspark-client has no jars), "
            "or name an ensemble in storm.zookeeper.servers"
        )
    return chosen


def zookeeper_command(
    data_dir: Path,
    port: int,
    *,
    host: str = "127.0.0.1",
    tick_ms: int = 500,
    heap_mb: int = 256,
    durable: bool = True,
    more: Mapping[str, object] | None = None,
    java_options: Sequence[str] = (),
) -> list[str]:
    """The command line of a standalone server, after writing its configuration into ``data_dir``.

    Sessions of 2 ticks to 60 s are granted. ``durable=False`` leaves out the fsync of the
    transaction log: the state then survives the end of the process, but not of the machine.
    ``more`` are further lines of its configuration, ``java_options`` of its command
    (:func:`ensemble_command`). Raises ``Unavailable`` when Java or the jars are missing,
    ``InvalidRequest`` for a port out of range.
    """
    if not 0 < port < 65536:
        raise InvalidRequest(f"ZooKeeper cannot listen on port {port}: give one from 1 to 65535")
    jars = zookeeper_jars()
    java = java_command()
    data_dir = data_dir.absolute()
    data_dir.mkdir(parents=True, exist_ok=True)
    settings = {
        "tickTime": tick_ms,
        "minSessionTimeout": 2 * tick_ms,
        "dataDir": data_dir,
        "clientPort": port,
        "clientPortAddress": host,
        "forceSync": "yes" if durable else "no",
        **_TABLE["settings"],
        **(more or {}),
    }
    config = data_dir / "zoo.cfg"
    config.write_text(
        "".join(f"{key}={value}\n" for key, value in settings.items()), encoding="utf-8"
    )
    log_config = data_dir / "log4j2.properties"
    log_config.write_text(_TABLE["log4j2.properties"], encoding="utf-8")
    return [
        java,
        f"-Xmx{heap_mb}m",
        *_TABLE["java_options"],
        *class_data_options("zookeeper", java, jars),
        f"-Dlog4j2.configurationFile={log_config}",
        *java_options,
        "-cp",
        os.pathsep.join(str(jar) for jar in jars),
        "org.apache.zookeeper.server.quorum.QuorumPeerMain",
        str(config),
    ]


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
        return f"[{self.host}]:{self.client}" if ":" in self.host else f"{self.host}:{self.client}"


def ensemble_command(
    members: Sequence[Member],
    id: int,
    data_dir: Path,
    *,
    tick_ms: int = 500,
    durable: bool = True,
    password: str | None = None,
) -> list[str]:
    """The command line of member ``id``, after writing its configuration and ``myid`` into
    ``data_dir``.

    With a ``password`` (letters and digits) only who knows it votes or follows: the ports between
    members are open to all users of the host. Everything else is as in :func:`zookeeper_command`.
    :class:`InvalidRequest` when ``id`` is not among the members, or two of them share an id.
    """
    by_id = {member.id: member for member in members}
    if id not in by_id or len(by_id) != len(members):
        raise InvalidRequest(
            f"ZooKeeper member {id} is not one of the ensemble {sorted(m.id for m in members)}: give each an id of its own"
        )
    me = by_id[id]
    peers = {
        f"server.{member.id}": f"{member.host}:{member.peer}:{member.election}:participant"
        for member in members
    }
    users = data_dir.absolute() / "quorum.jaas"
    if password:
        data_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(users, _TABLE["member_users"].format(password=password), mode=0o600)
    command = zookeeper_command(
        data_dir,
        me.client,
        host=me.host,
        tick_ms=tick_ms,
        heap_mb=128,
        durable=durable,
        more={**peers, **_TABLE["member"], **(_TABLE["member_auth"] if password else {})},
        # Its FIPS mode, which is the default, refuses DIGEST-MD5.
        java_options=[f"-Djava.security.auth.login.config={users}", "-Dzookeeper.fips-mode=false"]
        if password
        else (),
    )
    (data_dir / "myid").write_text(f"{id}\n", encoding="ascii")
    return command


def server_status(
    host: str, port: int, timeout: float = 1.0, tls: ssl.SSLContext | None = None
) -> bytes:
    """What the ZooKeeper server at that address says about itself (the ``srvr`` command); empty: it
    does not answer.
    """
    with suppress(OSError), ExitStack() as opened:
        link = opened.enter_context(socket.create_connection((host, port), timeout=timeout))
        if tls is not None:
            link = opened.enter_context(tls.wrap_socket(link, server_hostname=host.strip("[]")))
        link.sendall(b"srvr")
        return b"".join(iter(lambda: link.recv(4096), b""))
    return b""


def server_address(server: str, conf: Any) -> tuple[str, int]:
    """Host and port of one of ``storm.zookeeper.servers``; without a port it has the conf's."""
    host, colon, port = server.rpartition(":")
    return (host, int(port)) if colon else (server, int(conf["storm.zookeeper.port"]))


def server_answers(
    host: str, port: int, timeout: float = 1.0, tls: ssl.SSLContext | None = None
) -> bool:
    """Whether a ZooKeeper server at that address serves requests."""
    # `ruok` will not do: it is answered before the server has loaded its state.
    return b"Mode:" in server_status(host, port, timeout, tls)
