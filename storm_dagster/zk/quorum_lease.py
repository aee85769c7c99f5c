"""Lease of a session with an ensemble, proved by the leader: responses of a follower alone prove nothing.

A ZooKeeper server that follows answers pings and reads without asking its leader, and goes on doing so for
``syncLimit`` ticks after it has lost it; the leader meanwhile ends the sessions that are silent. Measured: a
session's ephemeral node vanished 3.4 s after its server had been cut off, and that server still answered its owner. Two
kinds of answers do prove something:

* that to a connect: the leader made the session, or was asked for it, after the connect was sent;
* that to a chain of three ``sync`` in one connection, each sent after the answer to the one before, the second at
  least half a tick after the first: the leader pings its followers every half tick, what a follower replies
  names the sessions that it heard of, and requests and pings keep their order. So the leader heard of the session
  after the first of the three had been sent. (Half a tick is at most a quarter of any session timeout that it grants.)
"""

from __future__ import annotations

import logging
import threading

from storm_dagster.model.clock import boot_clock
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.zk.session import LEASE_MARGIN_SECS, ZkSession

_log = logging.getLogger(__name__)


class QuorumLease:
    """The lease of a session with several servers, kept up by a thread until the session is closed."""

    def __init__(self, session: ZkSession) -> None:
        self._session = session
        # Session id, and the boot clock at which the leader had not heard of it for the last time.
        self._proven: tuple[int, float] = (0, 0.0)
        self._stop = threading.Event()

    def start(self) -> QuorumLease:
        """Start the thread that renews the lease."""
        threading.Thread(target=self._run, name="zookeeper-lease", daemon=True).start()
        return self

    def stop(self) -> None:
        """Stop the renewal: the lease ends by itself."""
        self._stop.set()

    def lease_end(self, session_id: int | None = None) -> float:
        """As :meth:`ZkSession.lease_end`, by responses of the leader only."""
        lease = self._session.lease()
        if not lease.session_id or (session_id is not None and lease.session_id != session_id):
            return 0.0
        owner, proven = self._proven
        newest = max(lease.connected_boot, proven if owner == lease.session_id else 0.0)
        return newest + lease.negotiated_ms / 1000.0 - LEASE_MARGIN_SECS

    def lease_valid(self, session_id: int | None = None) -> bool:
        """Whether the boot clock has not reached :meth:`lease_end`."""
        return boot_clock() < self.lease_end(session_id)

    def _run(self) -> None:
        while not self._stop.is_set() and not self._session.closed:
            try:
                self._chain()
            except StormDagsterError as error:
                _log.debug("the session cannot be proven alive now: %s", error)
                self._stop.wait(0.1)

    def _chain(self) -> None:
        """Chains of syncs, the last of one being the first of the next, while the session is connected."""
        at = self._session.lease()
        first = self._sync()
        while not self._stop.wait(at.negotiated_ms / 4000.0):
            self._sync()
            last = self._sync()
            now = self._session.lease()
            if (now.session_id, now.connected_boot) != (at.session_id, at.connected_boot):
                return
            self._proven = (at.session_id, first)
            first = last

    def _sync(self) -> float:
        """One round trip to the leader; the boot clock before it was sent."""
        sent = boot_clock()
        self._session.call(lambda client: client.sync_async("/"), "a sync")
        return sent


def lease_of(session: ZkSession) -> ZkSession | QuorumLease:
    """Lease of a worker's session: the session itself with one server, else a started :class:`QuorumLease`."""
    return QuorumLease(session).start() if "," in session.hosts else session
