"""The ZooKeeper session of the healing sensor, and ``/healer``.

The session lasts from tick to tick, and so does ``/healer``: the leader leaves healing to the
sensor for as long as its next tick is not overdue. A sensor that is switched off, or whose Dagster
daemon has stopped, gives ``/healer`` up ten seconds after its next tick was due.
"""

import json
import logging
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from storm_dagster.model import paths
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.live.outlook import ReassignmentOutlook
from storm_dagster.zk.cached_state import CachedReads
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.storm_cluster_state import StormClusterState

_log = logging.getLogger(__name__)

_BETWEEN_POLLS_SECS = 0.5
"""Shortest pause between two polls, while the cluster changes all the time."""
_OVERDUE_SECS = 10.0
"""Seconds after the time of the next tick, or after the end of a tick that hangs.

Then the sensor gives ``/healer`` up.
"""
_RETRY_SECS = 5.0
"""Pause before another attempt to give ``/healer`` up."""
_MAX_IDLE_WATCHES = 2
"""Watches that a process keeps between ticks, one for each cluster."""


class SensorWatch:
    """The armed sensor: one ZooKeeper session with its watches, and ``/healer``.

    That node marks the sensor as armed.
    """

    def __init__(self, cluster: StormClusterState) -> None:
        self.cluster = cluster
        self._changed = threading.Event()
        """Set by a change of the cluster or of the connection; ends :meth:`wait`."""
        self._interrupted = threading.Event()
        """Set while :meth:`interrupted` has not reported that the connection broke."""
        cluster.state.add_listener(self._on_connection)
        self._reads: CachedReads | None = None
        """Reads of the views; ``None`` on another state store than ZooKeeper."""
        if isinstance(cluster.state, ZooKeeperClusterState):
            self._reads = CachedReads(cluster.state, disk=None)
            self._reads.register(lambda *_: self._changed.set())
        self._polled_at = 0.0
        """Monotonic clock of the last poll."""
        self.outlook: ReassignmentOutlook = ReassignmentOutlook()
        """Plans of earlier ticks."""
        self._healer = threading.Lock()
        """Held while ``/healer`` is created, changed or deleted."""
        self._healer_session = 0
        """Session that created ``/healer``, 0 without one."""
        self._healer_document = {"v": 1, "host": socket.gethostname(), "pid": os.getpid()}
        """Content of ``/healer`` without an alarm."""
        self._published: str | None = None
        """The alarm in ``/healer``."""
        self._overdue_at = 0.0
        """Monotonic clock at which ``/healer`` is given up."""
        self._rearmed = threading.Event()
        """Set when that time has changed, or when the session is closed."""
        self._guard: threading.Thread | None = None
        """Thread that waits for that time; ``None`` before the first tick."""
        self._is_closed = False

    def _on_connection(self, connection: str) -> None:
        if connection != "CONNECTED":
            self._interrupted.set()
        self._changed.set()

    def interrupted(self) -> bool:
        """True if the connection broke since the last call, which this call forgets.

        An outage that ends this session ends those of workers and supervisors as well. Then a
        missing node does not show that its process is dead.
        """
        is_broken = self._interrupted.is_set()
        self._interrupted.clear()
        return is_broken

    def poll(self) -> ClusterView:
        """Arm the watches, then read the view.

        A change after the view was read ends the next :meth:`wait`.
        """
        self._changed.clear()
        self._polled_at = time.monotonic()
        if self._reads is None:
            return self.cluster.load_view(self._changed.set)
        return self._reads.load_view(self.cluster.cluster_id())

    def hold_healer(self) -> None:
        """Create ``/healer``, which prevents the leader from healing, unless it exists.

        A node that this session created needs no call of ZooKeeper.
        """
        state = self.cluster.state
        # 0 on another state store.
        session = 0 if self._reads is None else self.cluster.session.session_id
        with self._healer:
            if session and self._healer_session == session:
                return
            # Another armed sensor (a code reload in progress) may hold it: then this sensor claims
            # it after the end of that one.
            document = json.dumps(self._healer_document).encode()
            is_claimed = state.claim_ephemeral_node(paths.HEALER, document)
            self._healer_session = session if is_claimed else 0
            self._published = None

    def release_healer(self) -> None:
        """Delete ``/healer``, so that the leader heals; that of another session stays."""
        state = self.cluster.state
        with self._healer:
            if state.owned(paths.HEALER):
                state.delete_node(paths.HEALER)
            self._healer_session = 0
            self._published = None

    def expect_tick(self, secs: float) -> None:
        """Give ``/healer`` up in ``secs`` and ten more, unless a later call comes before.

        The thread that does so continues after the tick.
        """
        self._overdue_at = time.monotonic() + secs + _OVERDUE_SECS
        self._rearmed.set()
        if self._guard is None:
            self._guard = threading.Thread(
                target=self._release_when_overdue, name="storm-healer", daemon=True
            )
            self._guard.start()

    def close(self) -> None:
        """End the session, and ``/healer`` with it."""
        self._is_closed = True
        self._rearmed.set()
        self.cluster.disconnect()

    def _release_when_overdue(self) -> None:
        """Delete ``/healer`` whenever a tick is overdue, until :meth:`close`."""
        while True:
            self._rearmed.clear()
            if self._is_closed:
                return
            remaining_secs = self._overdue_at - time.monotonic()
            if remaining_secs > 0:
                self._rearmed.wait(remaining_secs)
                continue
            try:
                self.release_healer()
            except StormDagsterError as error:
                _log.warning("/healer is not given up yet: %s", error.message)
                self._rearmed.wait(_RETRY_SECS)
                continue
            self._rearmed.wait()

    def publish_alarm(self, alarm: str | None) -> None:
        """Write the reason of a freeze of healing into ``/healer``; ``status`` reads it.

        ``None`` removes it. No write if it is there already, or if another session has the node.
        """
        with self._healer:
            if alarm == self._published or not self.cluster.state.owned(paths.HEALER):
                return
            document: dict[str, Any] = dict(self._healer_document)
            if alarm is not None:
                document["alarm"] = alarm
            self.cluster.state.set_data(paths.HEALER, json.dumps(document).encode())
            self._published = alarm

    def wait(self, seconds: float) -> None:
        """Sleep until the cluster changes, at most ``seconds``.

        After a change it sleeps on until the shortest pause since the last poll has passed, so
        that changes that follow each other are seen together.
        """
        self._changed.wait(max(0.0, seconds))
        next_poll_secs = self._polled_at + _BETWEEN_POLLS_SECS - time.monotonic()
        time.sleep(max(0.0, min(seconds, next_poll_secs)))


_idle_watches: OrderedDict[str, SensorWatch] = OrderedDict()
"""The cluster's conf of ZooKeeper -> its watch between two ticks, oldest use first."""


@contextmanager
def open_watch(
    conf: Mapping[str, Any], *, tick_secs: float, interval_secs: float
) -> Iterator[SensorWatch]:
    """A watch of that cluster, which is kept for the next tick, as is ``/healer``.

    The block is a tick of at most ``tick_secs``, and the next one begins ``interval_secs`` after
    the start of this one. It keeps its session and its reads; after an error in the block its
    session is closed. :class:`Unavailable` if ZooKeeper is unreachable or the root does not exist.
    """
    next_tick_at = time.monotonic() + interval_secs
    storm_conf = {name: conf[name] for name in sorted(conf) if name.startswith("storm.")}
    key = json.dumps(storm_conf, default=str)
    watch = _idle_watches.pop(key, None) or SensorWatch(StormClusterState.open(conf))
    watch.expect_tick(tick_secs)
    try:
        yield watch
        watch.expect_tick(max(0.0, next_tick_at - time.monotonic()))
    except BaseException:
        watch.close()
        raise
    # Two ticks at once (a code reload in progress) had one watch each: the later one is kept.
    other_watch = _idle_watches.pop(key, None)
    _idle_watches[key] = watch
    if other_watch is not None:
        other_watch.close()
    while len(_idle_watches) > _MAX_IDLE_WATCHES:
        _, oldest = _idle_watches.popitem(last=False)
        oldest.close()
