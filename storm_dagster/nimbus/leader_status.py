"""Current leadership of this nimbus, as all its threads see it."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from storm_dagster.model.errors import Fenced, NotLeading


@dataclass(frozen=True)
class LeadershipSnapshot:
    """Snapshot of leadership by the election loop."""

    epoch: int | None = None
    """This nimbus's epoch while it leads and has finished its initialization."""
    leader: str | None = None
    """Address of the leader, which may be this nimbus."""
    leader_http: str | None = None
    """Base URL of the leader; ``None`` without a leader or while it is not known."""
    lacking: frozenset[str] = frozenset()
    """Keys of blobs of active topologies that this nimbus lacks."""

    @property
    def missing(self) -> int:
        """Number of the blobs in ``lacking``."""
        return len(self.lacking)


class LeaderStatus:
    """Permission to act as the leader.

    The HTTP threads, the duties and the blob store use it. ``certain(epoch)`` calls the leadership
    session, which denies it as soon as its connection is suspended: a remembered permission is
    never enough to act on.
    """

    def __init__(self, me: str, certain: Callable[[int], bool]) -> None:
        self.me = me
        """Address of this nimbus, ``host:port``."""
        self._certain = certain
        self.snapshot: LeadershipSnapshot = LeadershipSnapshot()
        """The newest snapshot, replaced as a whole."""
        self._lock = threading.Lock()
        """Held while a new snapshot is made of the old one: several threads replace it."""

    def update(self, *, epoch: int | None, leader: str | None, leader_http: str | None) -> None:
        """Replace the snapshot (called by the election loop only)."""
        with self._lock:
            self.snapshot = replace(
                self.snapshot, epoch=epoch, leader=leader, leader_http=leader_http
            )

    def set_lacking(self, keys: Iterable[str]) -> None:
        """Record the needed blobs that this nimbus lacks."""
        with self._lock:
            self.snapshot = replace(self.snapshot, lacking=frozenset(keys))

    @property
    def epoch(self) -> int | None:
        """Epoch in which this nimbus may act now; ``None`` if it must not act as the leader."""
        epoch = self.snapshot.epoch
        if epoch is None or not self._certain(epoch):
            return None
        return epoch

    def require(self, claimed: int | None = None) -> int:
        """Return the epoch for a write.

        :class:`NotLeading`, with the name of the leader, if this nimbus does not lead;
        :class:`Fenced` if the writer acts for another epoch (``claimed``).
        """
        epoch = self.epoch
        if epoch is None:
            snapshot = self.snapshot
            if snapshot.leader and snapshot.leader != self.me:
                raise NotLeading(
                    f"nimbus {self.me} is a follower and takes no writes: send this to the leader "
                    f"{snapshot.leader} at {snapshot.leader_http or 'its HTTP address'}"
                )
            raise NotLeading(
                f"nimbus {self.me} does not lead, and no other nimbus does at the moment: try "
                "again in a few seconds"
            )
        if claimed is not None and claimed != epoch:
            raise Fenced(
                f"the write acts for leadership epoch {claimed}, the present one is {epoch}: "
                "the write was refused; start the operation again"
            )
        return epoch
