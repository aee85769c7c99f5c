"""Files of HOME about its local cluster, and the conf of its clients.

``cluster.json`` has addresses and pids of the processes while it runs; ``dev.json`` has its conf
and ports, and outlives it.
"""

import json
import os
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.host.files import write_atomically
from storm_dagster.model.conf import ClusterConf, Conf
from storm_dagster.model.errors import Corrupt


class _Endpoint(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="ignore")


class NimbusEndpoint(_Endpoint):
    """One nimbus."""

    thrift: str
    """``host:port``."""
    http: str
    """``http://host:port``."""
    pid: int


class SupervisorEndpoint(_Endpoint):
    """One supervisor."""

    id: str
    host: str
    ports: tuple[int, ...]
    """Its slots."""
    pid: int
    http: str | None = None
    """Base URL of its HTTP service."""


class DagsterEndpoint(_Endpoint):
    """Dagster's webserver and its home."""

    url: str
    """Base URL of the webserver, without user and password."""
    home: str
    """``DAGSTER_HOME``; empty if ``dev`` did not start this Dagster."""
    pids: tuple[int, ...]
    own: bool = True
    """False if ``dev`` did not start this Dagster: it exists without the cluster."""


class SparkEndpoint(_Endpoint):
    """The embedded Spark Connect server."""

    remote: str
    """``sc://host:port``."""
    pid: int | None = None
    starting: bool = False
    """True while ``dev`` starts it: a placement waits for it."""


class ZooKeeperTls(_Endpoint):
    """PEM files of the clients of the embedded ZooKeeper; only this user may read them."""

    ca: str
    """Path of the certificate of the authority that has issued the server's."""
    certificate: str
    """Path of the client's certificate."""
    key: str
    """Path of its key: the same file."""


class ClusterFile(_Endpoint):
    """Content of ``HOME/cluster.json``."""

    zookeeper: str
    """``host:port``, those of an ensemble separated by commas."""
    zookeeper_tls: ZooKeeperTls | None = None
    """``None``: a ``dev`` of an earlier release runs, whose ZooKeeper does not speak TLS."""
    zookeeper_root: str
    nimbuses: tuple[NimbusEndpoint, ...] = ()
    supervisors: tuple[SupervisorEndpoint, ...] = ()
    dagster: DagsterEndpoint | None = None
    spark: SparkEndpoint | None = None
    zookeeper_pid: int | None = None

    def write(self, home: Path) -> None:
        """Replace ``home/cluster.json`` atomically."""
        write_atomically(home / "cluster.json", self.model_dump_json(indent=2) + "\n")

    @staticmethod
    def read(home: Path) -> "ClusterFile | None":
        """Read the file of ``home``; ``None`` without one.

        Raises :class:`Corrupt` if it is damaged.
        """
        path = home / "cluster.json"
        try:
            return ClusterFile.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise _damaged(path, error.errors()[0]["msg"]) from None


def home_dir(explicit: str | os.PathLike[str] | None = None) -> Path:
    """State folder of a local cluster.

    It is ``explicit``, else ``STORM_DAGSTER_HOME``, else ``./.storm-dagster``.
    """
    folder = explicit or os.environ.get("STORM_DAGSTER_HOME") or ".storm-dagster"
    return Path(folder).expanduser().absolute()


DEV_FILE = "dev.json"
"""File of HOME with the conf and the ports of its newest ``dev``; it outlives the cluster."""
_FORMER_PORTS = "ports.json"
"""File of the ports in an earlier release, whose ``dev.json`` was only the conf."""


class DevFile(BaseModel):
    """Conf and ports of the newest ``dev`` of a HOME.

    They are in ``HOME/dev.json``, which only its user can read.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="ignore")

    conf: dict[str, Any]
    """Options of that ``dev`` beyond ``HOME/storm.yaml``.

    They apply only while the cluster runs: the code location and clients then have the same conf as
    the daemons.
    """
    ports: dict[str, Any]
    """Ports by purpose, as :class:`storm_dagster.cli.dev.ports.DevPorts` has them."""

    @property
    def own_dagster(self) -> bool:
        """False if that ``dev`` used a Dagster that it did not start."""
        return self.ports.get("webserver") != 0

    def write(self, home: Path) -> None:
        """Replace ``home/dev.json`` atomically.

        The file of ports of an earlier release is removed.
        """
        # The conf may contain the cluster's secret.
        write_atomically(home / DEV_FILE, self.model_dump_json() + "\n", mode=0o600)
        (home / _FORMER_PORTS).unlink(missing_ok=True)

    @staticmethod
    def read(home: Path) -> "DevFile":
        """Read the file of ``home``; empty without one.

        The two files of an earlier release are accepted, too. Raises :class:`Corrupt` if the file
        is damaged.
        """
        path = home / DEV_FILE
        document = _json_map(path)
        if document is None:
            return DevFile(conf={}, ports=_former_ports(home))
        if document.keys() != {"conf", "ports"}:
            # A conf of an earlier release, whose keys have dots.
            return DevFile(conf=document, ports=_former_ports(home))
        try:
            return DevFile.model_validate(document)
        except ValidationError as error:
            raise _damaged(path, error.errors()[0]["msg"]) from None


def _json_map(path: Path) -> dict[str, Any] | None:
    """Read the JSON object in a file; ``None`` without the file.

    Raises :class:`Corrupt` for any other document.
    """
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(document, dict):
        raise _damaged(path, "not a map")
    return document


def _former_ports(home: Path) -> dict[str, Any]:
    """Ports in the file of an earlier release.

    Empty if the file is missing or damaged.
    """
    try:
        return _json_map(home / _FORMER_PORTS) or {}
    except (OSError, Corrupt):
        return {}


def _damaged(path: Path, reason: str) -> Corrupt:
    return Corrupt(f"{path} is damaged ({reason}): stop the cluster and remove the file")


def zookeeper_tls_conf(tls: ZooKeeperTls | None) -> dict[str, Any]:
    """Conf keys of the clients of an embedded ZooKeeper; ``None``: it does not speak TLS.

    They replace those of a conf that was written for another ensemble.
    """
    if tls is None:
        return {"storm.zookeeper.ssl.enable": False}
    return {
        "storm.zookeeper.ssl.enable": True,
        "storm.zookeeper.ssl.truststore.path": tls.ca,
        "storm.zookeeper.ssl.keystore.path": tls.certificate,
        "storm.zookeeper.ssl.hostnameVerification": True,
    }


def cluster_addresses(cluster: "ClusterFile") -> dict[str, Any]:
    """Conf keys that follow from the addresses of a running local cluster."""
    values: dict[str, Any] = {
        "storm.zookeeper.servers": cluster.zookeeper.split(","),
        "storm.zookeeper.root": cluster.zookeeper_root,
        **zookeeper_tls_conf(cluster.zookeeper_tls),
    }
    if cluster.nimbuses:
        values["nimbus.seeds"] = [
            nimbus.http.partition("://")[2].rstrip("/") for nimbus in cluster.nimbuses
        ]
    if cluster.spark is not None:
        values["spark.remote"] = cluster.spark.remote
    # The conf has the address of a Dagster that `dev` did not start, with the user in it.
    if cluster.dagster is not None and cluster.dagster.own:
        values["dagster.graphql.url"] = cluster.dagster.url.rstrip("/") + "/graphql"
    return values


def cluster_conf(
    home: Path | None = None, conf_dir: Path | None = None, overrides: Conf | None = None
) -> ClusterConf:
    """Merge the conf for a client of the cluster in ``home``.

    ``home`` is ``STORM_DAGSTER_HOME`` by default. Later values win: shipped defaults,
    ``storm.yaml`` and ``storm.d`` (of ``--conf-dir``, else of HOME), the ``-c`` options of the
    running ``dev`` (``HOME/dev.json``), the addresses in ``HOME/cluster.json``, then ``-c
    KEY=VALUE`` of the caller. With an explicit ``conf_dir`` the cluster is the one that its files
    name, and ``HOME/cluster.json`` is not read. Raises :class:`InvalidRequest` for a wrong conf and
    :class:`Corrupt` for a damaged ``cluster.json``.
    """
    if conf_dir is not None:
        return load_cluster_conf(conf_dir, overrides)
    home = home_dir(home)
    conf = load_cluster_conf(home)
    cluster = ClusterFile.read(home)
    if cluster is not None:
        conf = conf.with_values(DevFile.read(home).conf, str(home / DEV_FILE))
        conf = conf.with_values(cluster_addresses(cluster), str(home / "cluster.json"))
    if overrides:
        conf = conf.with_values(overrides, "-c")
    return conf
