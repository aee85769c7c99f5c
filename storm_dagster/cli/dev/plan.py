"""Daemons of a local cluster and their command lines."""

import hashlib
import json
import os
import secrets
import sys
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from storm_dagster.cli.dev.daemon import DaemonSpec
from storm_dagster.cli.dev.options import DevOptions
from storm_dagster.cli.dev.ports import DevPorts
from storm_dagster.cli.dev.sockets import code_socket
from storm_dagster.cli.log_setup import QUIET_STDERR
from storm_dagster.client.command import CLUSTER_MARK
from storm_dagster.host.conf_files import conf_files
from storm_dagster.host.endpoints import ZooKeeperTls, zookeeper_tls_conf
from storm_dagster.host.files import make_home_private, read_private_file, write_atomically
from storm_dagster.model.conf import ClusterConf
from storm_dagster.nimbus.dagster.transport import DagsterAccess
from storm_dagster.packaging.target import target_roots
from storm_dagster.security.authority import CertificateFolder
from storm_dagster.security.home_key import identity_of_start
from storm_dagster.security.peers import can_identify_peers
from storm_dagster.security.settings import Security, zookeeper_payload

HOST = "127.0.0.1"
PLACED = "the first placement is made"
"""Line of the process that warms Spark up."""


def daemon_environment(home: Path, mark: str) -> dict[str, str]:
    """Environment of every daemon, with HOME and the mark of this cluster."""
    env = dict(os.environ)
    env["STORM_DAGSTER_HOME"] = str(home)
    env[CLUSTER_MARK] = mark
    env[QUIET_STDERR] = "1"
    env["DAGSTER_HOME"] = str(home / "dagster")
    env["DAGSTER_DISABLE_TELEMETRY"] = "yes"
    env["PYTHONUNBUFFERED"] = "1"
    # Proxies are for the outside world; gRPC and HTTP clients read this one under both names.
    for name in ("NO_PROXY", "no_proxy"):
        env[name] = ",".join(filter(None, [env.get(name, ""), HOST, "localhost"]))
    # A Connect URL or master of the caller's shell must not decide where a placement is computed.
    for name in ("SPARK_REMOTE", "SPARK_LOCAL_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "STORM_JAR"):
        env.pop(name, None)
    return env


def prepare_dagster_home(home: Path) -> Path:
    """Write ``workspace.yaml`` of ``HOME/dagster``.

    ``dagster.yaml`` is written if it is absent. Returns the path of the workspace.
    """
    make_home_private(code_socket(home).parent)
    folder = home / "dagster"
    folder.mkdir(parents=True, exist_ok=True)
    instance = folder / "dagster.yaml"
    if not instance.exists():
        # It is not written a second time: a user may set another storage there.
        template = resources.files("storm_dagster.defs").joinpath("dagster.yaml")
        text = template.read_text(encoding="utf-8")
        instance.write_text(text, encoding="utf-8")
    workspace = folder / "workspace.yaml"
    workspace.write_text(
        "# Written by `storm-dagster dev` at every start; `dev --workspace FILE` adds locations.\n"
        "load_from:\n"
        "  - grpc_server:\n"
        f"      socket: {json.dumps(str(code_socket(home)))}\n"
        "      location_name: storm\n",
        encoding="utf-8",
    )
    return workspace


@dataclass
class ClusterPlan:
    """The daemons of one local cluster."""

    home: Path
    options: DevOptions
    conf: ClusterConf
    ports: DevPorts
    _: KW_ONLY
    conf_dir: Path | None
    overrides: dict[str, Any]
    """Values of ``-c`` and of :meth:`close_ports`, which every daemon gets."""

    @property
    def certificates(self) -> CertificateFolder:
        """Authority and certificates of the embedded ZooKeeper."""
        return CertificateFolder.of(self.home)

    @property
    def zookeeper_tls(self) -> ZooKeeperTls:
        """Files of the clients of the embedded ZooKeeper."""
        client = str(self.certificates.client_file)
        return ZooKeeperTls(
            ca=str(self.certificates.authority_file), certificate=client, key=client
        )

    @property
    def zookeeper(self) -> str:
        """``host:port``, those of an ensemble separated by commas."""
        clients = [client for client, _, _ in self.ports.ensemble] or [self.ports.zookeeper]
        return ",".join(f"{HOST}:{port}" for port in clients)

    @property
    def spark_remote(self) -> str:
        """Connect URL of the embedded server, or that of the conf."""
        return self.conf.get("spark.remote") or f"sc://{HOST}:{self.ports.spark}"

    @property
    def embeds_spark(self) -> bool:
        """True if this cluster runs a Spark server."""
        return self.conf.get("spark.remote") is None and self.conf.get("spark.master") is None

    @property
    def web_url(self) -> str:
        """URL of Dagster's UI, of this cluster or of the one that the conf names."""
        if self.options.own_dagster:
            return f"{Security.of(self.conf).scheme}://{HOST}:{self.ports.webserver}"
        access = DagsterAccess.of(self.conf)
        assert access is not None, "the verb has set the address of a Dagster that exists"
        return access.site

    def nimbus_url(self, index: int) -> str:
        """Base URL of a nimbus's HTTP service."""
        return f"{Security.of(self.conf).scheme}://{HOST}:{self.ports.http[index]}"

    def supervisor_id(self, index: int) -> str:
        """Id of a supervisor, which restarts keep: assignments name it."""
        return f"s{index + 1}"

    def given_conf(self) -> dict[str, Any]:
        """Conf values that are not of the conf files of HOME or the defaults."""
        files = {str(path) for path in conf_files(self.home)}
        # Daemons work in HOME: the code location cannot know the folder in which `dev` was started.
        values: dict[str, Any] = {
            "dagster.target.roots": [str(root) for root in target_roots(self.conf)]
        }
        return values | {
            key: value
            for key, value in self.conf.values.items()
            if self.conf.origins.get(key, "default") not in ("default", *files)
        }

    def close_ports(self) -> None:
        """Close the cluster's ports to other users of this machine.

        ZooKeeper gets certificates of an authority in HOME, and the servers of an ensemble those of
        an authority of their own. A HOME whose ZooKeeper has a user of
        its own, as a new one has, gets another one for this start. Where the kernel does not name
        the user of a connection, HOME gets a secret. Thrift cannot check the secret without TLS,
        and then refuses every client.
        """
        self.certificates.prepare()
        if self.ports.ensemble:
            self.certificates.prepare_members()
        if not Security.of(self.conf).configured and not can_identify_peers():
            secret = self.home / "secret"
            if not secret.exists():
                write_atomically(secret, f"{secrets.token_hex(32)}\n", mode=0o600)
            self._use_secret_file(secret, "storm.secret.file")
        self._use_zookeeper_user()

    def _use_zookeeper_user(self) -> None:
        """Make the ZooKeeper user of this start, unless the conf names another one.

        The users of former starts, to whom nodes may still belong, stay below it in the file until
        :meth:`forget_former_users`.
        """
        former_users = self._zookeeper_users()
        if zookeeper_payload(self.conf) is None and (former_users or self._is_new_home()):
            user = f"storm:{identity_of_start(self.home, 'zookeeper')}"
            self._write_zookeeper_users([user, *former_users])
        if self._users_file.exists():
            # Beside a secret that was set later, this user still opens the nodes created before.
            self._use_secret_file(self._users_file, "storm.zookeeper.auth.file")

    def forget_former_users(self) -> None:
        """Remove the users of former starts: all nodes belong to the user of this one."""
        users = self._zookeeper_users()
        if users:
            self._write_zookeeper_users(users[:1])

    @property
    def _users_file(self) -> Path:
        """File with the ZooKeeper user of the newest start, and of those before it."""
        return self.home / "zookeeper.user"

    def _zookeeper_users(self) -> list[str]:
        """Lines ``user:password`` of the file; none without it."""
        if not self._users_file.exists():
            return []
        return read_private_file(self._users_file, "the ZooKeeper user of HOME").splitlines()

    def _write_zookeeper_users(self, users: Iterable[str]) -> None:
        text = "".join(f"{user}\n" for user in dict.fromkeys(users))
        write_atomically(self._users_file, text, mode=0o600, sync=True)

    def _is_new_home(self) -> bool:
        """True if no cluster was ever started in HOME."""
        return not (self.home / "cluster_id").exists()

    def _use_secret_file(self, path: Path, key: str) -> None:
        """Set the conf key to the path, unless it names another file."""
        if not self.conf.get(key):
            self.overrides = {**self.overrides, key: str(path)}
            self.conf = self.conf.with_values({key: str(path)}, "dev")

    def _daemon(self, role: str, values: dict[str, Any], *arguments: str) -> tuple[str, ...]:
        """Command line of a daemon with the conf that this cluster adds."""
        command = [sys.executable, "-m", "storm_dagster", "daemon", role, "--home", str(self.home)]
        if self.conf_dir is not None:
            command += ["--conf-dir", str(self.conf_dir)]
        command += arguments
        for key, value in {**self.overrides, **self._addresses(), **values}.items():
            command += ["-c", f"{key}={json.dumps(value)}"]
        return tuple(command)

    def _addresses(self) -> dict[str, Any]:
        """Conf values with the addresses of this cluster's services, which every daemon gets."""
        values: dict[str, Any] = {
            "storm.zookeeper.servers": self.zookeeper.split(","),
            "storm.zookeeper.port": self.ports.zookeeper,
            **zookeeper_tls_conf(self.zookeeper_tls),
            "supervisor.worker.zookeeper.keystore.path": None,
            "supervisor.worker.zookeeper.authority": str(self.certificates.path),
            "nimbus.seeds": [f"{HOST}:{port}" for port in self.ports.http],
        }
        if self.options.own_dagster:
            values["dagster.graphql.url"] = f"{self.web_url}/graphql"
        if self.embeds_spark:
            values["spark.remote"] = self.spark_remote
            values["spark.connect.port"] = self.ports.spark
            if self.ports.spark_master:
                values["spark.connect.master"] = f"spark://{HOST}:{self.ports.spark_master}"
        return values

    def zookeeper_daemons(self) -> list[DaemonSpec]:
        """The embedded servers; each process is the JVM itself."""
        from storm_dagster.zk.embedded import ServerFiles, zookeeper_command

        if self.ports.ensemble:
            return self._ensemble_daemons()
        command = zookeeper_command(
            self.home / "zookeeper",
            self.ports.zookeeper,
            host=HOST,
            tls=ServerFiles.of(self.certificates),
        )
        return [DaemonSpec("zookeeper", "0", tuple(command), {"client": self.ports.zookeeper})]

    def _ensemble_daemons(self) -> list[DaemonSpec]:
        """The servers of the ensemble.

        They authenticate to each other by a certificate, and by a password that is made of the
        ZooKeeper user's.
        """
        from storm_dagster.zk.embedded import Member, ServerFiles, ensemble_command

        members = [
            Member(index + 1, *ports, HOST) for index, ports in enumerate(self.ports.ensemble)
        ]
        payload = zookeeper_payload(self.conf)
        password = hashlib.sha256(f"quorum {payload}".encode()).hexdigest() if payload else None
        specs: list[DaemonSpec] = []
        for index, member in enumerate(members):
            folder = self.home / "zookeeper" / str(member.id)
            command = ensemble_command(
                members,
                member.id,
                folder,
                password=password,
                tls=ServerFiles.of(self.certificates),
                member_tls=ServerFiles.of_members(self.certificates),
            )
            ports = {"client": member.client, "peer": member.peer, "election": member.election}
            specs.append(DaemonSpec("zookeeper", str(index), tuple(command), ports))
        return specs

    def spark_daemon(self) -> DaemonSpec:
        """The embedded Spark Connect server."""
        return DaemonSpec(
            "spark",
            "0",
            self._daemon("spark", {"spark.remote": None}),
            {"connect": self.ports.spark},
        )

    def spark_master_daemon(self) -> DaemonSpec:
        """Master of the Spark standalone cluster."""
        address = ("--host", HOST, "--port", str(self.ports.spark_master))
        return DaemonSpec("spark-master", "0", self._daemon("spark", {}, "master", *address))

    def spark_worker_daemon(self, index: int) -> DaemonSpec:
        """Worker of the Spark cluster, for one executor of one core."""
        name = f"{index + 1}"
        memory = str(self.conf.get("spark.executor.memory") or "1g")
        size = ("--host", HOST, "--id", name, "--cores", "1", "--memory", memory)
        return DaemonSpec("spark-worker", name, self._daemon("spark", {}, "worker", *size))

    def class_data_command(self) -> tuple[str, ...]:
        """Command that makes the class data of later starts, at the lowest priority."""
        prepare = (sys.executable, "-m", "storm_dagster", "dev", "--prepare")
        return ("nice", "-n", "19", *prepare, "--home", str(self.home))

    def warm_up_command(self) -> tuple[str, ...]:
        """Command that runs the first jobs on the Spark server.

        A submission then does not wait for their imports.
        """
        return self._daemon("spark", {}, "--warm-up", self.spark_remote)

    def nimbus_daemon(self, index: int) -> DaemonSpec:
        """One nimbus."""
        name = f"n{index + 1}"
        ports = {"thrift": self.ports.thrift[index], "http": self.ports.http[index]}
        values = {f"nimbus.{service}.port": port for service, port in ports.items()}
        return DaemonSpec("nimbus", name, self._daemon("nimbus", values, "--id", name), ports)

    def supervisor_daemon(self, index: int) -> DaemonSpec:
        """One supervisor."""
        name = self.supervisor_id(index)
        http = self.ports.supervisor_http[index]
        values = {
            "supervisor.slots.ports": list(self.ports.slots[index]),
            "supervisor.http.port": http,
        }
        return DaemonSpec(
            "supervisor", name, self._daemon("supervisor", values, "--id", name), {"http": http}
        )

    def code_daemon(self) -> DaemonSpec:
        """The code location, which starts Dagster's runs."""
        serving = ("--socket", str(code_socket(self.home)), "--lazy-load-user-code")
        if self.options.warm_runs:
            program = ("storm_dagster", "daemon", "code", "--home", str(self.home))
            location = ("--module", "storm_dagster.defs", "--location", "storm")
        else:
            program = ("dagster", "api", "grpc", "--use-python-environment-entry-point")
            location = ("--module-name", "storm_dagster.defs", "--location-name", "storm")
        command = (sys.executable, "-m", *program, *location, *serving)
        return DaemonSpec("dagster-code", "0", command)

    def webserver_daemon(self, workspace: Path) -> DaemonSpec:
        """Dagster's UI and GraphQL, behind a password.

        ``workspace`` is the file with the cluster's code location.
        """
        address = ("--host", HOST, "--port", str(self.ports.webserver))
        return DaemonSpec(
            "dagster-webserver",
            "0",
            self._daemon("web", {}, *address, *self._workspace_options(workspace)),
            {"http": self.ports.webserver},
        )

    def dagster_daemon(self, workspace: Path) -> DaemonSpec:
        """Sensors and schedules."""
        run = (sys.executable, "-m", "dagster._daemon", "run")
        return DaemonSpec("dagster-daemon", "0", (*run, *self._workspace_options(workspace)))

    def _workspace_options(self, workspace: Path) -> tuple[str, ...]:
        """Options that name the workspace of this cluster, then those of the user."""
        options: list[str] = []
        for path in (workspace, *self.options.workspaces):
            options += ["--workspace", str(path)]
        return tuple(options)
