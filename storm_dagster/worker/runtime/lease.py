"""The worker's right to run its tasks, while its ZooKeeper session certainly lives (``docs/decisions.md#one-owner``).

Once it has been seen to end it stays ended until the keeper has read the assignment again and grants it anew,
even when the session survived: a worker that was cut off or frozen looks before it goes on.
"""

from __future__ import annotations

from typing import Protocol

from storm_dagster.model.clock import boot_clock

__all__ = ["SessionClock", "WorkerLease"]


class SessionClock(Protocol):
    """The part of a ZooKeeper session that a lease needs."""

    def lease_end(self, session_id: int | None = None) -> float: ...


class WorkerLease:
    """Whether the worker may run. Reading is cheap and safe from any thread; granting is the keeper's."""

    def __init__(self, session: SessionClock) -> None:
        self._session = session
        self._owner = 0
        """Session that the worker's node was written under; 0: not granted."""
        self._until = 0.0
        self.pauses: int = 0
        """How often the lease ended while it was held."""

    def grant(self, session_id: int) -> None:
        """The worker's node stands, owned by this session, and its assignment names it."""
        self._until = self._session.lease_end(session_id)
        self._owner = session_id

    def revoke(self) -> None:
        """End the lease now."""
        self._owner = 0

    @property
    def granted(self) -> bool:
        """Whether the lease was granted and has not been seen to end."""
        return self._owner != 0

    def valid(self) -> bool:
        """Whether tasks may be run at this moment. The first look after its end revokes it."""
        owner = self._owner
        if not owner:
            return False
        now = boot_clock()
        if now < self._until:
            return True
        # The session may have been heard of since. As long as it is the same one, its node has stood all the
        # time, and nobody else can have opened the tasks.
        self._until = end = self._session.lease_end(owner)
        if now < end:
            return True
        self._owner = 0
        self.pauses += 1
        return False
