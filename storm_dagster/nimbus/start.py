"""What is checked and made before a nimbus serves (seeds 002 and 003): mode, addresses, folders, cluster id."""

from __future__ import annotations

import logging
import os
import re
import uuid
from pathlib import Path

from storm_dagster.blobstore import LocalBlobStore
from storm_dagster.blobstore.fsspec_store import FsspecBlobStore
from storm_dagster.http.listening import listen
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.errors import Conflict, Corrupt, InvalidRequest
from storm_dagster.model.exposure import address_beyond_loopback, check_exposure
from storm_dagster.model.run_file import start_ticks
from storm_dagster.model.security import Security
from storm_dagster.nimbus.container import ContainerHeartbeat
from storm_dagster.nimbus.replicated_store import BaseStore
from storm_dagster.zk.cached_state import CachedReads
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.disk_cache import open_disk_cache
from storm_dagster.zk.storm_cluster_state import StormClusterState

__all__ = [
    "PidFile",
    "check_bind",
    "check_mode",
    "choose_port",
    "container_heartbeat",
    "listen",
    "open_blob_store",
    "open_cluster",
    "open_reads",
    "resolve_nimbus_id",
    "thrift_host",
]

_log = logging.getLogger(__name__)
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_mode(conf: ClusterConf) -> None:
    """A daemon refuses ``storm.cluster.mode: local``."""
    if conf["storm.cluster.mode"] != "distributed":
        raise InvalidRequest(
            f"nimbus does not run with storm.cluster.mode={conf['storm.cluster.mode']}: set it to distributed, or use "
            "`storm-dagster plan` and the test harness for local mode"
        )


def check_bind(conf: ClusterConf) -> str:
    """The host to bind and announce; beyond loopback only with ``storm.bind.external`` and a secret or TLS."""
    return check_exposure(conf, "nimbus", "secret or tls")


def thrift_host(conf: ClusterConf, host: str) -> str:
    """Where the Thrift service binds: at ``host``, which beyond loopback takes TLS.

    Thrift's calls have no place for a secret, so that without certificates only this machine may call.
    """
    if Security.of(conf).tls or address_beyond_loopback(host) is None:
        return host
    _log.warning("the Thrift service listens on loopback only: storm.tls.* lets other hosts call it")
    return "127.0.0.1"


def choose_port(host: str, port: int, key: str) -> int:
    """``port`` itself, seen to be free, or with 0 a free one."""
    with listen(host, port, key) as probe:
        return int(probe.getsockname()[1])


def resolve_nimbus_id(home: Path, nimbus_id: str | None) -> str:
    """The id itself, checked; without one, that of HOME's own nimbus, made at its first start."""
    if nimbus_id is None:
        kept = home / "nimbus" / "id"
        try:
            nimbus_id = kept.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            nimbus_id = uuid.uuid4().hex[:12]
            kept.parent.mkdir(parents=True, exist_ok=True)
            _write_atomically(kept, nimbus_id)
    if not _ID.fullmatch(nimbus_id) or nimbus_id == "id":
        raise InvalidRequest(
            f"nimbus id {nimbus_id!r:.120} may hold 1 to 100 letters, digits and any of ._- : choose another"
        )
    return nimbus_id


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


class PidFile:
    """``pids/<pid>`` of this process: one process per local folder.

    Files of processes that are gone are cleared; a live one (same pid and start) makes the start fail. Nobody
    is killed, unlike in JStorm: a pid in an old file may be a stranger's by now.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            try:
                pid, ticks = int(path.name), int(path.read_text(encoding="ascii") or "0")
            except (ValueError, OSError):
                pid, ticks = 0, 0
            if pid and pid != os.getpid() and ticks and start_ticks(pid) == ticks:
                raise Conflict(
                    f"a nimbus runs on {folder.parent} already (pid {pid}): stop it, or give this one another --id"
                )
            path.unlink(missing_ok=True)
        self._path = folder / str(os.getpid())
        self._path.write_text(str(start_ticks(os.getpid()) or 0), encoding="ascii")

    def remove(self) -> None:
        """Clear it at the end."""
        self._path.unlink(missing_ok=True)


def open_blob_store(conf: ClusterConf, folder: Path) -> BaseStore:
    """The store of ``nimbus.blobstore.class``: a folder of this nimbus, or an fsspec URL that all share."""
    place = conf["blobstore.dir"]
    if conf["nimbus.blobstore.class"] == "fsspec":
        if not place:
            raise InvalidRequest("nimbus.blobstore.class=fsspec needs blobstore.dir: set it to an fsspec URL")
        return FsspecBlobStore(place)
    # Several nimbuses of one machine must not share a local folder: each is a copy of its own.
    return LocalBlobStore(Path(place) / folder.name / "blobs" if place else folder / "blobs")


def open_reads(conf: ClusterConf, folder: Path, cluster: StormClusterState) -> CachedReads | None:
    """The two-level read cache (``nimbus.cache.class``, ``nimbus.cache.reset``); ``None`` on another state store."""
    if not isinstance(cluster.state, ZooKeeperClusterState):
        return None
    disk = open_disk_cache(folder / "cache", conf["nimbus.cache.class"], reset=conf["nimbus.cache.reset"])
    return CachedReads(cluster.state, disk)


def container_heartbeat(conf: ClusterConf, folder: Path) -> ContainerHeartbeat | None:
    """The beats exchanged with nimbus's container, when ``container.nimbus.heartbeat`` names its folder."""
    place = conf["container.nimbus.heartbeat"]
    if not place:
        return None
    return ContainerHeartbeat(
        Path(place),
        folder / "nimbus.heartbeat",
        timeout_secs=conf["container.heartbeat.timeout.seconds"],
        pause_secs=conf["container.heartbeat.frequence"],
    )


def open_cluster(conf: ClusterConf, folder: Path, blobs: BaseStore) -> StormClusterState:
    """The cluster state, its id compared with the one that this nimbus remembers.

    Only a nimbus that remembers no id and has no blobs creates a root: for any other, a root that is absent
    means a wrong path or lost state (hazards J3, K8), and it refuses to start.
    """
    path = folder / "cluster_id"
    try:
        remembered = path.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        remembered = None
    except UnicodeDecodeError:
        raise Corrupt(f"{path} is damaged: look at it, and remove it if this nimbus is new") from None
    fresh = remembered is None and not blobs.keys()
    cluster = StormClusterState.open(conf, create_root=fresh, cluster_id=remembered)
    if remembered is None:
        _write_atomically(path, cluster.cluster_id())
        _log.info("this nimbus belongs to cluster %s from now on", cluster.cluster_id())
    return cluster
