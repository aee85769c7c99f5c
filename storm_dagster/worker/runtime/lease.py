"""Lease of a worker on its slot."""

from collections.abc import Callable

from storm_dagster.host.clock import boot_clock


class WorkerLease:
    """Permission to run tasks while the ZooKeeper session is certainly alive.

    See ``docs/decisions.md#one-owner``. Reading is cheap and safe from any thread; only
    ``ClusterSync`` grants. An expired lease stays expired, even if the session survived, until
    ``ClusterSync`` has refreshed the assignment: a worker that was disconnected or frozen must not
    continue with a stale one.
    """

    def __init__(self, lease_end: Callable[[int | None], float]) -> None:
        """Create a lease that is not granted.

        ``lease_end(session id)``: boot clock until which that session (``None``: the current one)
        certainly lives.
        """
        self._lease_end = lease_end
        self._owner = 0
        """Session that the worker's node was written under; 0: not granted."""
        self._until = 0.0
        """Boot clock until which the session certainly lives, as far as it was asked."""
        self.pauses: int = 0
        """Number of times that the lease expired."""

    def grant(self, session_id: int) -> None:
        """Start the lease.

        The caller has seen that this session owns the worker's node, and that the assignment names
        the worker.
        """
        self._until = self._lease_end(session_id)
        self._owner = session_id

    def revoke(self) -> None:
        """End the lease now."""
        self._owner = 0

    @property
    def granted(self) -> bool:
        """True if the lease was granted, and no expiry was noticed since."""
        return self._owner != 0

    def valid(self) -> bool:
        """True if tasks may run now.

        The first call after the expiry revokes the lease.
        """
        owner = self._owner
        if not owner:
            return False
        now = boot_clock()
        if now < self._until:
            return True
        # The server may have confirmed the session since. If it is still the same session, the
        # worker's node has existed all the time, and no other worker can have opened the tasks.
        end = self._lease_end(owner)
        self._until = end
        if now < end:
            return True
        self._owner = 0
        self.pauses += 1
        return False
