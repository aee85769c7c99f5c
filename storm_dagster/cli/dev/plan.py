"""Daemons of a local cluster and their command lines."""

import hashlib
import json
import os
import secrets
import sys
from dataclasses import KW_ONLY, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from storm_dagster.cli.dev.daemon import DaemonSpec
from storm_dagster.cli.dev.ports import DevPorts
from storm_dagster.cli.dev.sockets import code_socket
from storm_dagster.cli.log_setup import QUIET_STDERR
from storm_dagster.client.command import CLUSTER_MARK
from storm_dagster.host.files import write_atomically
from storm_dagster.model.conf import ClusterConf
from storm_dagster.packaging.target import target_roots
from storm_dagster.security.exposure import make_private
from storm_dagster.security.peers import can_tell_users
from storm_dagster.security.settings import Security, zookeeper_payload

HOST = "127.0.0.1"
PLACED = "the first placement is made"
"""Line of the process that warms Spark up."""


@dataclass(frozen=True)
class DevOptions:
    """Options of ``dev``."""

    supervisors: int = 2
    slots: int = 4
    nimbuses: int = 1
    ports: Literal["auto", "default"] = "default"
    timeout: float = 240.0
    """Longest wait for readiness, seconds."""
    zookeepers: int = 1
    """Servers of the ZooKeeper ensemble."""
    warm_runs: bool = True
    """Whether Dagster's runs start in forks of a process that has loaded their libraries."""
    spark_workers: int = 0
    """Workers of a Spark standalone cluster on which the Connect server runs its jobs; 0: they run
    in the server.
    """

    @property
    def size(self) -> tuple[int, int, int, int]:
        """Supervisors, slots of each, nimbuses, ZooKeeper servers."""
        return self.supervisors, self.slots, self.nimbuses, self.zookeepers


def daemon_environment(home: Path, mark: str) -> dict[str, str]:
    """The environment of every daemon: where the cluster is, and that it belongs to it."""
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
    """Write ``HOME/dagster/{dagster,workspace}.yaml`` (the former only if absent); returns the
    workspace.
    """
    make_private(code_socket(home).parent)
    folder = home / "dagster"
    folder.mkdir(parents=True, exist_ok=True)
    instance = folder / "dagster.yaml"
    if not instance.exists():
        # Its own file from then on: a user may set another storage there.
        text = (
            resources.files("storm_dagster.defs")
            .joinpath("dagster.yaml")
            .read_text(encoding="utf-8")
        )
        instance.write_text(text, encoding="utf-8")
    workspace = folder / "workspace.yaml"
    workspace.write_text(
        "# Written by `storm-dagster dev` at every start.\n"
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

    @property
    def zookeeper(self) -> str:
        """``host:port``, those of an ensemble separated by commas."""
        clients = [client for client, _, _ in self.ports.ensemble] or [self.ports.zookeeper]
        return ",".join(f"{HOST}:{port}" for port in clients)

    @property
    def spark_remote(self) -> str:
        """The Connect URL of the embedded server, or what the conf names instead of it."""
        return self.conf.get("spark.remote") or f"sc://{HOST}:{self.ports.spark}"

    @property
    def embeds_spark(self) -> bool:
        """Whether this cluster runs a Spark server of its own."""
        return self.conf.get("spark.remote") is None and self.conf.get("spark.master") is None

    @property
    def web_url(self) -> str:
        """Dagster's UI."""
        return f"{Security.of(self.conf).scheme}://{HOST}:{self.ports.webserver}"

    def nimbus_url(self, index: int) -> str:
        """Base URL of a nimbus's HTTP service."""
        return f"{Security.of(self.conf).scheme}://{HOST}:{self.ports.http[index]}"

    def supervisor_id(self, index: int) -> str:
        """Stable over restarts of the cluster: assignments name it."""
        return f"s{index + 1}"

    def given_conf(self) -> dict[str, Any]:
        """Conf values that do not come from ``HOME/storm.yaml`` or the defaults."""
        own = str(self.home / "storm.yaml")
        # Daemons work in HOME: the code location cannot know from where it was started.
        return {"dagster.target.roots": [str(root) for root in target_roots(self.conf)]} | {
            key: value
            for key, value in self.conf.values.items()
            if self.conf.origins.get(key, "default") not in ("default", own)
        }

    def close_ports(self) -> None:
        """Give HOME what keeps other users of this machine out of the cluster's ports.

        A new HOME gets a ZooKeeper user that only it knows; an older one stays as it is. Where the
        kernel does not name the user of a connection, HOME gets a secret; Thrift, which cannot be
        asked for one without TLS, serves nobody then.
        """
        if not Security.of(self.conf).configured and not can_tell_users():
            self._keep("secret", "storm.secret.file", "", True)
        new = zookeeper_payload(self.conf) is None and not (self.home / "cluster_id").exists()
        # Beside a secret that came later it opens what was created before.
        self._keep("zookeeper.user", "storm.zookeeper.auth.file", "storm:", new)

    def _keep(self, name: str, key: str, prefix: str, create: bool) -> None:
        path = self.home / name
        if create and not path.exists():
            write_atomically(path, f"{prefix}{secrets.token_hex(32)}\n", mode=0o600)
        if path.exists() and not self.conf.get(key):
            known = {key: str(path)}
            self.overrides = {**self.overrides, **known}
            self.conf = self.conf.with_values(known, "dev")

    def _daemon(self, role: str, values: dict[str, Any], *rest: str) -> tuple[str, ...]:
        """Command line of a daemon with the conf that this cluster adds."""
        merged = {**self.overrides, **self._addresses(), **values}
        pairs = [
            part for key, value in merged.items() for part in ("-c", f"{key}={json.dumps(value)}")
        ]
        conf_dir = ["--conf-dir", str(self.conf_dir)] if self.conf_dir is not None else []
        return (
            sys.executable,
            "-m",
            "storm_dagster",
            "daemon",
            role,
            "--home",
            str(self.home),
            *conf_dir,
            *rest,
            *pairs,
        )

    def _addresses(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "storm.zookeeper.servers": self.zookeeper.split(","),
            "storm.zookeeper.port": self.ports.zookeeper,
            "storm.zookeeper.ssl.enable": False,
            "nimbus.seeds": [f"{HOST}:{port}" for port in self.ports.http],
            "dagster.graphql.url": f"{self.web_url}/graphql",
        }
        if self.embeds_spark:
            values["spark.remote"] = self.spark_remote
            values["spark.connect.port"] = self.ports.spark
            if self.ports.spark_master:
                values["spark.connect.master"] = f"spark://{HOST}:{self.ports.spark_master}"
        return values

    def zookeeper_daemons(self) -> list[DaemonSpec]:
        """The embedded servers; each process is the JVM itself."""
        from storm_dagster.zk.embedded import Member, ensemble_command, zookeeper_command

        if self.ports.ensemble:
            members = [
                Member(index + 1, *ports, HOST) for index, ports in enumerate(self.ports.ensemble)
            ]
            known = zookeeper_payload(self.conf)
            password = hashlib.sha256(f"quorum {known}".encode()).hexdigest() if known else None

            def daemon(index: int, member: Member) -> DaemonSpec:
                folder = self.home / "zookeeper" / str(member.id)
                command = ensemble_command(members, member.id, folder, password=password)
                ports = {"client": member.client, "peer": member.peer, "election": member.election}
                return DaemonSpec("zookeeper", str(index), tuple(command), ports)

            return [daemon(index, member) for index, member in enumerate(members)]
        command = zookeeper_command(
            self.home / "zookeeper",
            self.ports.zookeeper,
            host=HOST,
        )
        return [DaemonSpec("zookeeper", "0", tuple(command), {"client": self.ports.zookeeper})]

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
        """Worker of the Spark standalone cluster, with room for one executor of one core."""
        name, memory = f"{index + 1}", str(self.conf.get("spark.executor.memory") or "1g")
        size = ("--host", HOST, "--id", name, "--cores", "1", "--memory", memory)
        return DaemonSpec("spark-worker", name, self._daemon("spark", {}, "worker", *size))

    def warm_up_command(self) -> tuple[str, ...]:
        """A process that runs the first jobs on the server, so that the first submission does
        not.
        """
        return self._daemon("spark", {}, "--warm-up", self.spark_remote)

    def nimbus_daemon(self, index: int) -> DaemonSpec:
        """One nimbus."""
        name, ports = (
            f"n{index + 1}",
            {"thrift": self.ports.thrift[index], "http": self.ports.http[index]},
        )
        values = {f"nimbus.{service}.port": port for service, port in ports.items()}
        return DaemonSpec("nimbus", name, self._daemon("nimbus", values, "--id", name), ports)

    def supervisor_daemon(self, index: int) -> DaemonSpec:
        """One supervisor."""
        name, http = self.supervisor_id(index), self.ports.supervisor_http[index]
        values = {
            "supervisor.slots.ports": list(self.ports.slots[index]),
            "supervisor.http.port": http,
        }
        return DaemonSpec(
            "supervisor", name, self._daemon("supervisor", values, "--id", name), {"http": http}
        )

    def code_daemon(self) -> DaemonSpec:
        """The code location, shared by webserver and daemon; it starts Dagster's runs."""
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
        """Dagster's UI and GraphQL, guarded."""
        address = ("--host", HOST, "--port", str(self.ports.webserver))
        return DaemonSpec(
            "dagster-webserver",
            "0",
            self._daemon("web", {}, *address, "--workspace", str(workspace)),
            {"http": self.ports.webserver},
        )

    def dagster_daemon(self, workspace: Path) -> DaemonSpec:
        """Sensors and schedules."""
        argv = (sys.executable, "-m", "dagster._daemon", "run", "--workspace", str(workspace))
        return DaemonSpec("dagster-daemon", "0", argv)
