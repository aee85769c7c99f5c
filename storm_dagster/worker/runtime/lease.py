"""Lease of a worker on its slot."""

from collections.abc import Callable

from storm_dagster.host.clock import boot_clock


class WorkerLease:
    """Permission to run tasks while the ZooKeeper session is certainly alive
    (``docs/decisions.md#one-owner``).

    Reading is cheap and safe from any thread; only ``ClusterSync`` grants. An expired lease stays
    expired, even if the session survived, until that has read the assignment again: a worker that
    was cut off or frozen must not continue with a stale one.
    """

    def __init__(self, lease_end: Callable[[int | None], float]) -> None:
        """``lease_end(session id)``: boot clock until which that session (``None``: the current
        one) certainly lives.
        """
        self._lease_end = lease_end
        self._owner = 0
        """Session that the worker's node was written under; 0: not granted."""
        self._until = 0.0
        self.pauses: int = 0
        """How often the lease expired."""

    def grant(self, session_id: int) -> None:
        """Start the lease: this session owns the worker's node, and the assignment names the
        worker.
        """
        self._until = self._lease_end(session_id)
        self._owner = session_id

    def revoke(self) -> None:
        """End the lease now."""
        self._owner = 0

    @property
    def granted(self) -> bool:
        """Whether the lease was granted and not found expired since."""
        return self._owner != 0

    def valid(self) -> bool:
        """Whether tasks may run now. The first call after the expiry revokes the lease."""
        owner = self._owner
        if not owner:
            return False
        now = boot_clock()
        if now < self._until:
            return True
        # The server may have confirmed the session since. If it is still the same session, the
        # worker's node has existed all the time, and no other worker can have opened the tasks.
        self._until = end = self._lease_end(owner)
        if now < end:
            return True
        self._owner = 0
        self.pauses += 1
        return False
