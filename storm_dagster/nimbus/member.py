"""One nimbus as its parts see it: conf, identity, handles.

The daemon builds it, and all its threads share it.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.core.transitions import DueMemory, secs_until_removal
from storm_dagster.host.clock import boot_clock, boot_id
from storm_dagster.http.probes import LoopPasses
from storm_dagster.model.conf import ClusterConf, seed_urls
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.names import url_host
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.nimbus.blobs.registry import BlobRegistry
from storm_dagster.nimbus.blobs.replicated_store import NimbusBlobStore
from storm_dagster.nimbus.blobs.replication import NimbusPeer
from storm_dagster.nimbus.blobs.uploads import Uploads
from storm_dagster.nimbus.dagster.client import DagsterClient
from storm_dagster.nimbus.leader_status import LeaderStatus
from storm_dagster.nimbus.requests.launches import Launches
from storm_dagster.nimbus.requests.unreported import LeaderOutbox
from storm_dagster.nimbus.time_cache_map import TimeCacheMap
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.inimbus import INimbus
from storm_dagster.zk.access_tokens import AccessTokenList
from storm_dagster.zk.cached_state import CachedReads
from storm_dagster.zk.leadership import LeadershipSession
from storm_dagster.zk.state_protocol import ClusterState
from storm_dagster.zk.storm_cluster_state import StormClusterState

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """Identity of this nimbus."""

    id: str
    """Name of its local folder."""
    host: str
    thrift_port: int
    http_port: int
    version: str
    scheme: str = "http"
    """``https`` when its services speak TLS."""
    started: float = field(default_factory=time.monotonic)
    """Monotonic seconds."""
    started_secs: int = field(default_factory=lambda: int(time.time()))
    """Epoch seconds of this machine (shown, never compared)."""

    @property
    def address(self) -> str:
        """``host:port`` of its Thrift service: its name in ZooKeeper."""
        return f"{self.host}:{self.thrift_port}"

    @property
    def http(self) -> str:
        """Base URL of its HTTP service."""
        return f"{self.scheme}://{url_host(self.host)}:{self.http_port}"

    @property
    def uptime_secs(self) -> int:
        """Seconds since it started."""
        return int(time.monotonic() - self.started)


@dataclass
class Nimbus:
    """The handles of one nimbus. All of them are safe to use from many threads."""

    conf: ClusterConf
    identity: Identity
    inbox: Path
    """Folder of transfers in progress."""
    cluster: StormClusterState
    leadership: LeadershipSession
    status: LeaderStatus
    registry: BlobRegistry
    blobs: NimbusBlobStore
    uploads: Uploads
    dagster: DagsterClient
    unreported: LeaderOutbox
    launches: Launches = field(default_factory=Launches)
    expiring: list[TimeCacheMap[Any, Any]] = field(default_factory=list)
    """Transfers and tokens that expire when they are left idle; advanced by the upkeep thread."""
    alarm: str | None = None
    """Reason why this leader's own healing is frozen; ``None`` while it is not."""
    paused_causes: tuple[str, ...] = ()
    """Causes that wait for the end of a pause of healing, in words.

    They are of this leader's observation.
    """
    due: DueMemory = field(default_factory=DueMemory)
    """Topologies whose transition this leader waits for, such as the removal of a killed one."""
    inimbus: INimbus | None = None
    """The plug-in of ``nimbus.inimbus.class``."""
    reads: CachedReads | None = None
    """Cached reads of the cluster's state, for pages, documents and frequent checks.

    Writes are decided by reads of ZooKeeper itself.
    """
    wake_election: Callable[[], None] = lambda: None
    """Make the election poll at once; the daemon sets it when the election exists."""
    verb_executed: threading.Event = field(default_factory=threading.Event)
    """Set when the leader has executed a verb: its duties then poll at once."""
    events_taken: threading.Event = field(default_factory=threading.Event)
    """Set when the leader has taken events for Dagster: it then forwards them at once."""
    passes: LoopPasses = field(default_factory=LoopPasses)
    """Passes of the election, for the probe of liveness."""

    def __post_init__(self) -> None:
        self.expiring.append(self.launches.runs)
        self.access_tokens: AccessTokenList = AccessTokenList(lambda: self.cluster.state)
        """Tokens that count; a thread of the daemon keeps the list up to date."""

    @property
    def logs(self) -> Path:
        """The folder of logs of its HOME."""
        return self.inbox.parents[2] / "logs"

    def operations(self, epoch: int) -> OperationsContext:
        """Return the context for this nimbus's own operations, fenced with its epoch.

        Its planner is the local one: nimbus has no Spark, and its own placements are
        reassignments and due transitions.
        """
        return OperationsContext(
            cluster=self.cluster,
            blobs=self.blobs,
            conf=self.conf,
            planner=plan_placement,
            epoch=epoch,
            inimbus=self.inimbus,
        )

    @property
    def cached(self) -> ClusterState:
        """State for frequent reads: cached where that is possible."""
        return self.cluster.state if self.reads is None else self.reads

    def secs_until_removal(self, topology: TopologyView) -> float | None:
        """Seconds until this leader removes a killed topology, by its own clock.

        ``None`` if it has not seen the kill yet.
        """
        return secs_until_removal(self.due, topology, boot_id=boot_id(), boot_now=boot_clock())

    def shown_view(self) -> ClusterView:
        """Load the current state of the cluster, for documents and pages.

        Nodes that rarely change come from the cache.
        """
        if self.reads is None:
            return self.cluster.load_view()
        return self.reads.load_view(self.cluster.cluster_id())

    def peers(self) -> list[NimbusPeer]:
        """Return every other nimbus that is alive, the leader included, by address.

        A leader whose epoch has not begun or has another leader is left out: its URL is not known.
        """
        peers: dict[str, NimbusPeer] = {}
        for address, detail in self.leadership.followers().items():
            http = detail.get("http")
            if isinstance(http, str):
                peers[address] = NimbusPeer(address, http)
        epoch = self.cluster.epoch()
        if epoch is not None:
            _, record = epoch
            if record.leader == self.leadership.current():
                peers[record.leader] = NimbusPeer(record.leader, record.http)
        peers.pop(self.identity.address, None)
        return sorted(peers.values(), key=lambda peer: peer.address)

    def absent_seeds(self) -> list[str]:
        """Return the addresses in ``nimbus.seeds`` at which no nimbus is registered."""
        registered = {self.identity.http, *(peer.http for peer in self.peers())}
        return [url for url in seed_urls(self.conf) if url not in registered]


def repeat(
    work: Callable[[], object], pause_secs: float, ended: threading.Event, later: str
) -> None:
    """Do the work after each pause until ``ended`` is set; the first pause comes first.

    An error is logged with ``later``, which names the delayed work, and the work continues after
    the next pause.
    """
    while not ended.wait(pause_secs):
        try:
            work()
        except StormDagsterError as error:
            _log.warning("%s: %s", later, error.message)
        except Exception:
            _log.exception("%s", later)
