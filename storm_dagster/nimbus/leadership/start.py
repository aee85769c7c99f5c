"""Checks and preparations before a nimbus serves.

They concern its mode, addresses, folders, cluster id and container.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path

from storm_dagster.blobstore import LocalBlobStore
from storm_dagster.blobstore.fsspec_store import FsspecBlobStore
from storm_dagster.host.files import write_atomically, write_if_possible
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.errors import Corrupt, InvalidRequest, StormDagsterError, Unavailable
from storm_dagster.nimbus.blobs.replicated_store import BaseStore
from storm_dagster.security.exposure import address_beyond_loopback
from storm_dagster.security.object_stores import check_object_store
from storm_dagster.security.settings import Security
from storm_dagster.zk.cached_state import CachedReads
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.disk_cache import open_disk_cache
from storm_dagster.zk.storm_cluster_state import StormClusterState

_log = logging.getLogger(__name__)
_MAX_STAMPS = 10
"""Newest files of own beats that are kept."""
_MAX_MISSES = 30
"""Checks without any beat of the container before it counts as absent (JStorm)."""


@dataclass
class ContainerHeartbeat:
    """Mutual heartbeat with the container that nimbus runs in (JStorm's, by files).

    Each side touches a file in its folder (``own``, ``container``) every few seconds, named by the
    present time in seconds; the other one checks for a newer name. The age is the time since the
    newest name last changed, by this process's monotonic clock: a wall clock that is set, on either
    side, ends neither.
    """

    container: Path
    own: Path
    _: KW_ONLY
    timeout_secs: float
    """Age of the container's newest beat above which the container is gone."""
    pause_secs: float
    """Pause between two beats."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds, by which ages are measured."""
    wall: Callable[[], float] = time.time
    """Epoch seconds, which name the files of own beats."""
    failure: StormDagsterError | None = None
    """Error that ended :meth:`run`."""

    def __post_init__(self) -> None:
        self._newest: int | None = None
        """Newest beat of the container, by the container's clock."""
        self._seen_at = self.clock()
        """Time at which the newest beat was first seen."""
        self._misses = 0
        """Checks in a row that found no beat at all."""

    def tick(self) -> None:
        """Beat once and check once; :class:`Unavailable` if the container is gone."""
        self.own.mkdir(parents=True, exist_ok=True)
        (self.own / str(int(self.wall()))).touch()
        for stamp in _stamps(self.own)[:-_MAX_STAMPS]:
            (self.own / str(stamp)).unlink(missing_ok=True)
        container_stamps = _stamps(self.container)
        now = self.clock()
        if not container_stamps:
            self._misses += 1
            if self._misses > _MAX_MISSES:
                raise Unavailable(
                    f"no beat of the container is in {self.container} after {self._misses} checks: "
                    "start its heartbeat, or unset container.nimbus.heartbeat"
                )
            return
        self._misses = 0
        newest = container_stamps[-1]
        if newest != self._newest:
            self._newest = newest
            self._seen_at = now
        elif now - self._seen_at > self.timeout_secs:
            raise Unavailable(
                f"the container's newest beat in {self.container} is {self._newest}, unchanged for "
                f"{now - self._seen_at:g} s: the container is gone, and nimbus ends with it"
            )

    def run(self, ended: threading.Event, stop: threading.Event) -> None:
        """Run until ``ended``.

        If the container is gone, this sets :attr:`failure` and then ``stop``.
        """
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
    """Return the times of the beats in the folder, oldest first."""
    try:
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    except FileNotFoundError:
        return []


def check_mode(conf: ClusterConf) -> None:
    """Refuse ``storm.cluster.mode: local``, in which no daemon runs."""
    if conf["storm.cluster.mode"] != "distributed":
        raise InvalidRequest(
            f"nimbus does not run with storm.cluster.mode={conf['storm.cluster.mode']}: set it to "
            "distributed, or use `storm-dagster plan` and the test harness for local mode"
        )


def thrift_host(conf: ClusterConf, host: str) -> str:
    """Return the address that the Thrift service listens at.

    It is ``host`` if that is loopback or TLS is configured, and loopback otherwise: a Thrift call
    cannot carry a secret, so that without certificates only this machine may call.
    """
    if Security.of(conf).tls or address_beyond_loopback(host) is None:
        return host
    _log.warning(
        "the Thrift service listens on loopback only: storm.tls.* lets other hosts call it"
    )
    return "127.0.0.1"


def open_blob_store(conf: ClusterConf, folder: Path) -> BaseStore:
    """Open the store of ``nimbus.blobstore.class``.

    It is a folder of this nimbus, or an fsspec URL that all nimbuses share. ``folder`` is this
    nimbus's own folder. :class:`InvalidRequest` for fsspec without ``blobstore.dir``,
    :class:`UntrustedServer` for an object store that is not known.
    """
    place = conf["blobstore.dir"]
    if conf["nimbus.blobstore.class"] == "fsspec":
        if not place:
            raise InvalidRequest(
                "nimbus.blobstore.class=fsspec needs blobstore.dir: set it to an fsspec URL"
            )
        check_object_store(place, Security.of(conf).servers)
        return FsspecBlobStore(place)
    if not place:
        return LocalBlobStore(folder / "blobs")
    # Several nimbuses of one machine must not share a local folder: each holds its own copies.
    return LocalBlobStore(Path(place) / folder.name / "blobs")


def open_reads(conf: ClusterConf, folder: Path, cluster: StormClusterState) -> CachedReads | None:
    """Open the two-level read cache; ``None`` if the state store is not ZooKeeper.

    ``nimbus.cache.class`` and ``nimbus.cache.reset`` configure it.
    """
    if not isinstance(cluster.state, ZooKeeperClusterState):
        return None
    disk = open_disk_cache(
        folder / "cache", conf["nimbus.cache.class"], reset=conf["nimbus.cache.reset"]
    )
    return CachedReads(cluster.state, disk)


def container_heartbeat(conf: ClusterConf, folder: Path) -> ContainerHeartbeat | None:
    """Return the heartbeat with nimbus's container.

    ``None`` if ``container.nimbus.heartbeat`` does not name the container's folder.
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
    """Open the cluster state and compare its id with the remembered one.

    Only a nimbus that remembers no id and has no blobs creates a root. For any other, an absent
    root means a wrong path or lost state, and it refuses to start. A nimbus that remembers no id
    stores that of the cluster in its ``folder``.
    """
    path = folder / "cluster_id"
    try:
        remembered = path.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        remembered = None
    except UnicodeDecodeError:
        raise Corrupt(f"{path} is damaged: check it, and remove it if this nimbus is new") from None
    is_new = remembered is None and not blobs.keys()
    cluster = StormClusterState.open(conf, create_root=is_new, cluster_id=remembered)
    if remembered is None:
        text = cluster.cluster_id() + "\n"
        store = partial(write_atomically, path, text, sync=True)
        write_if_possible(store, f"{path} is missing, so that another cluster would not be refused")
        _log.info("this nimbus belongs to cluster %s from now on", cluster.cluster_id())
    return cluster
