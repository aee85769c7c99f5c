"""The worker's right to run its tasks: as long as its ZooKeeper session certainly lives (design 4).

Once the lease has ended it stays ended until the keeper has read the assignment again and renews it, even
when the session survived: a worker that was frozen must look before it goes on.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Lease", "SessionClock", "boot_clock"]


def boot_clock() -> float:
    """Seconds since boot; it goes on while the machine sleeps, and nobody sets it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SessionClock(Protocol):
    """The part of a ZooKeeper session that a lease needs."""

    def lease_end(self, session_id: int | None = None) -> float: ...


class Lease:
    """Whether the worker may run. Reading is cheap and safe from any thread; granting is the keeper's."""

    def __init__(self, session: SessionClock) -> None:
        self._session = session
        self._owner = 0
        """Session that the worker's node was written under; 0: not granted."""
        self._until = 0.0
        self.pauses = 0
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
        """Whether tasks may be run at this moment. The first look after its end ends it for good."""
        owner = self._owner
        if not owner:
            return False
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if now < self._until:
            return True
        # What was known is over: the session may have been heard of since, but a gap in between, in which
        # it was over, must not be missed. Refreshing happens in time (see refresh), so this is the end.
        self._owner = 0
        self.pauses += 1
        return False

    def refresh(self) -> None:
        """Take over how far the session's newest answer reaches. Called often, before the old end.

        Looks at the old end first, with :meth:`valid`, so that an answer that comes too late renews nothing.
        """
        if self.valid():
            end = self._session.lease_end(self._owner)
            if end > self._until:
                self._until = end
