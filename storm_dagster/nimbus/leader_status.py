"""Leadership of this nimbus now, as all its threads see it."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from storm_dagster.model.errors import Fenced, NotLeading


@dataclass(frozen=True)
class Known:
    """Snapshot of leadership by the election loop."""

    epoch: int | None = None
    """This nimbus's epoch while it leads and has finished its initialization."""
    leader: str | None = None
    """Address of the leader, whoever it is."""
    leader_http: str | None = None
    lacking: frozenset[str] = frozenset()
    """Keys of blobs of active topologies that this nimbus lacks."""

    @property
    def missing(self) -> int:
        """Number of blobs that this nimbus lacks."""
        return len(self.lacking)


class LeaderStatus:
    """Permission to act as the leader, for the HTTP threads, the duties and the blob store.

    ``certain(epoch)`` asks the leadership session, which denies it at once when its connection is
    suspended: a remembered yes is never enough to act on.
    """

    def __init__(self, me: str, certain: Callable[[int], bool]) -> None:
        self.me = me
        self._certain = certain
        self.known: Known = Known()
        """The newest snapshot, replaced as a whole."""
        self._lock = threading.Lock()

    def update(self, *, epoch: int | None, leader: str | None, leader_http: str | None) -> None:
        """Replace the snapshot (called by the election loop only)."""
        with self._lock:
            self.known = replace(self.known, epoch=epoch, leader=leader, leader_http=leader_http)

    def set_lacking(self, keys: Iterable[str]) -> None:
        """Record which needed blobs this nimbus lacks."""
        with self._lock:
            self.known = replace(self.known, lacking=frozenset(keys))

    @property
    def epoch(self) -> int | None:
        """The epoch under which this nimbus may act now, else ``None``."""
        epoch = self.known.epoch
        return epoch if epoch is not None and self._certain(epoch) else None

    def require(self, claimed: int | None = None) -> int:
        """The epoch, for a write.

        :class:`NotLeading`, naming the leader, when this nimbus does not lead; :class:`Fenced`
        when the writer acts for another epoch (``claimed``).
        """
        epoch = self.epoch
        if epoch is None:
            known = self.known
            if known.leader and known.leader != self.me:
                raise NotLeading(
                    f"nimbus {self.me} is a follower and takes no writes: send this to the leader {known.leader} "
                    f"at {known.leader_http or 'its HTTP address'}"
                )
            raise NotLeading(
                f"nimbus {self.me} does not lead, and no other nimbus does at the moment: try again in a few seconds"
            )
        if claimed is not None and claimed != epoch:
            raise Fenced(
                f"the write acts for leadership epoch {claimed}, the present one is {epoch}: nothing was written; "
                "start the operation again"
            )
        return epoch
