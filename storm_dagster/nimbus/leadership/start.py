"""Checks and preparations before a nimbus serves: mode, addresses, folders, cluster id,
container.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from storm_dagster.blobstore import LocalBlobStore
from storm_dagster.blobstore.fsspec_store import FsspecBlobStore
from storm_dagster.host.files import write_atomically
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.errors import Corrupt, InvalidRequest, StormDagsterError, Unavailable
from storm_dagster.nimbus.blobs.replicated_store import BaseStore
from storm_dagster.security.exposure import address_beyond_loopback
from storm_dagster.security.settings import Security
from storm_dagster.zk.cached_state import CachedReads
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.disk_cache import open_disk_cache
from storm_dagster.zk.storm_cluster_state import StormClusterState

_log = logging.getLogger(__name__)
_KEPT = 10
_TOLERATED = 30
"""Checks without any beat of the container before it counts as absent (JStorm)."""


@dataclass
class ContainerHeartbeat:
    """Mutual heartbeat with the container that nimbus runs in (JStorm's, by files).

    Each side touches a file in its folder (``own``, ``container``) every few seconds, named by the
    present time in seconds; the other one checks for a newer name. The age is taken from this
    process's own clock since the newest name last changed: a clock that is set meanwhile, here or
    there, ends nobody.
    """

    container: Path
    own: Path
    _: KW_ONLY
    timeout_secs: float
    pause_secs: float
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    failure: StormDagsterError | None = None

    def __post_init__(self) -> None:
        self._newest: int | None = None
        self._seen_at = self.clock()
        self._misses = 0

    def tick(self) -> None:
        """Beat once and check once; :class:`Unavailable` when the container is gone."""
        self.own.mkdir(parents=True, exist_ok=True)
        (self.own / str(int(self.wall()))).touch()
        for old in _stamps(self.own)[:-_KEPT]:
            (self.own / str(old)).unlink(missing_ok=True)
        found = _stamps(self.container)
        now = self.clock()
        if not found:
            self._misses += 1
            if self._misses > _TOLERATED:
                raise Unavailable(
                    f"no beat of the container is in {self.container} after {self._misses} checks: "
                    "start its heartbeat, or unset container.nimbus.heartbeat"
                )
            return
        self._misses = 0
        if found[-1] != self._newest:
            self._newest, self._seen_at = found[-1], now
        elif now - self._seen_at > self.timeout_secs:
            raise Unavailable(
                f"the container's newest beat in {self.container} is {self._newest}, unchanged for "
                f"{now - self._seen_at:g} s: the container is gone, and nimbus ends with it"
            )

    def run(self, ended: threading.Event, stop: threading.Event) -> None:
        """Run until ``ended``; sets ``stop``, with :attr:`failure`, when the container is gone."""
        while True:
            try:
                self.tick()
            except StormDagsterError as error:
                self.failure = error
                stop.set()
                return
            except OSError as error:
                _log.warning("the container's heartbeat cannot be kept: %s", error)
            if ended.wait(self.pause_secs):
                return


def _stamps(folder: Path) -> list[int]:
    try:
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    except FileNotFoundError:
        return []


def check_mode(conf: ClusterConf) -> None:
    """A daemon refuses ``storm.cluster.mode: local``."""
    if conf["storm.cluster.mode"] != "distributed":
        raise InvalidRequest(
            f"nimbus does not run with storm.cluster.mode={conf['storm.cluster.mode']}: set it to distributed, or use "
            "`storm-dagster plan` and the test harness for local mode"
        )


def thrift_host(conf: ClusterConf, host: str) -> str:
    """Address of the Thrift service: at ``host``, which beyond loopback takes TLS.

    Thrift's calls have no place for a secret, so that without certificates only this machine may
    call.
    """
    if Security.of(conf).tls or address_beyond_loopback(host) is None:
        return host
    _log.warning(
        "the Thrift service listens on loopback only: storm.tls.* lets other hosts call it"
    )
    return "127.0.0.1"


def open_blob_store(conf: ClusterConf, folder: Path) -> BaseStore:
    """The store of ``nimbus.blobstore.class``: a folder of this nimbus, or an fsspec URL that all
    share.
    """
    place = conf["blobstore.dir"]
    if conf["nimbus.blobstore.class"] == "fsspec":
        if not place:
            raise InvalidRequest(
                "nimbus.blobstore.class=fsspec needs blobstore.dir: set it to an fsspec URL"
            )
        return FsspecBlobStore(place)
    # Several nimbuses of one machine must not share a local folder: each is a copy of its own.
    return LocalBlobStore(Path(place) / folder.name / "blobs" if place else folder / "blobs")


def open_reads(conf: ClusterConf, folder: Path, cluster: StormClusterState) -> CachedReads | None:
    """The two-level read cache (``nimbus.cache.class``, ``nimbus.cache.reset``); ``None`` on
    another state store.
    """
    if not isinstance(cluster.state, ZooKeeperClusterState):
        return None
    disk = open_disk_cache(
        folder / "cache", conf["nimbus.cache.class"], reset=conf["nimbus.cache.reset"]
    )
    return CachedReads(cluster.state, disk)


def container_heartbeat(conf: ClusterConf, folder: Path) -> ContainerHeartbeat | None:
    """The beats exchanged with nimbus's container, when ``container.nimbus.heartbeat`` names its
    folder.
    """
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

    Only a nimbus that remembers no id and has no blobs creates a root: for any other, a root that
    is absent means a wrong path or lost state, and it refuses to start.
    """
    path = folder / "cluster_id"
    try:
        remembered = path.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        remembered = None
    except UnicodeDecodeError:
        raise Corrupt(f"{path} is damaged: check it, and remove it if this nimbus is new") from None
    fresh = remembered is None and not blobs.keys()
    cluster = StormClusterState.open(conf, create_root=fresh, cluster_id=remembered)
    if remembered is None:
        write_atomically(path, cluster.cluster_id() + "\n", sync=True)
        _log.info("this nimbus belongs to cluster %s from now on", cluster.cluster_id())
    return cluster
