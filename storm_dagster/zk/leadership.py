"""Leadership of one nimbus, with an epoch that fences its writes
(``docs/decisions.md#fenced-writes``).

The leader holds the ephemeral ``/nimbus_master``; taking it also rewrites ``/epoch``, whose data
version is the epoch. Every write of a leader checks that version, so a deposed one is ``Fenced``
whatever it believes. kazoo's Lock and Election are not used: they keep saying "acquired" after the
session is lost.
"""

import json
import logging
import threading
from collections.abc import Mapping
from typing import Any

from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Fenced
from storm_dagster.model.records import EpochRecord, encode_record
from storm_dagster.zk.state_protocol import read_children
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_dagster.zk.watches import Wake

_log = logging.getLogger(__name__)
_ATTEMPTS = 5


class LeadershipSession:
    """Leadership of one nimbus, in the session of its cluster state.

    All methods may be called from any thread. :meth:`is_leader` needs no request and turns false at
    the very moment at which the connection is suspended; :meth:`try_lead` (which the loop calls
    anyway) tells whether leadership survived.
    """

    def __init__(self, cluster: StormClusterState) -> None:
        self._cluster = cluster
        self._state = cluster.state
        self._lock = threading.Lock()
        # Rises with every interruption: an answer that was asked for before one proves nothing
        # after it.
        self._interruptions = 0
        # The epoch, and the number of interruptions when its confirmation was asked for.
        self._confirmed: tuple[int, int] | None = None
        self._state.add_listener(self._on_connection)

    def _on_connection(self, connection: str) -> None:
        # Without the lock: nothing may delay this.
        if connection != "CONNECTED":
            self._interruptions += 1
            confirmed, self._confirmed = self._confirmed, None
            if confirmed is not None:
                _log.warning(
                    "the connection is %s: epoch %d is not acted for", connection, confirmed[0]
                )

    def is_leader(self, epoch: int | None = None) -> bool:
        """Whether this nimbus leads now (in ``epoch``, when given), as far as it can know without
        asking.
        """
        mine = self.held_epoch
        return mine is not None and (epoch is None or mine == epoch)

    @property
    def held_epoch(self) -> int | None:
        """The epoch that this nimbus leads in; ``None`` while it does not lead, or cannot know."""
        confirmed = self._confirmed
        if confirmed is None or confirmed[1] != self._interruptions or not self._state.connected:
            return None
        return confirmed[0]

    def try_lead(self, leader: str, http: str, wake: Wake | None = None) -> int | None:
        """Try to become leader; the epoch when this nimbus leads afterwards, ``None`` when another
        does.

        ``leader`` is the ``host:port`` of its Thrift service, ``http`` the base URL of its HTTP
        service. Calling it while leading asks ZooKeeper and confirms; after an interruption that
        the session survived it finds the same epoch again. ``wake`` is called at the next change of
        the leader. Raises ``Unavailable`` when ZooKeeper is out of reach: the outcome shows at the
        next call.
        """
        with self._lock:
            for _ in range(_ATTEMPTS):
                before = self._interruptions
                epoch = self._held(wake)
                if epoch is None:
                    self._confirmed = None
                    if self._state.exists(paths.NIMBUS_MASTER):
                        return None
                    epoch = self._take(leader, http)
                if epoch is not None:
                    self._confirmed = (epoch, before)
                    return self.held_epoch
            return None

    def _held(self, wake: Wake | None) -> int | None:
        """The epoch that goes with a ``/nimbus_master`` of this session."""
        path = paths.NIMBUS_MASTER
        if not self._state.exists(
            path, watch=self._cluster.watch(path, wake)
        ) or not self._state.owned(path):
            return None
        # Only who creates /nimbus_master raises /epoch, so that while the node is ours the epoch is
        # too.
        found = self._cluster.epoch()
        return found[0] if found is not None and self._state.owned(path) else None

    def _take(self, leader: str, http: str) -> int | None:
        version = self._state.get_version(paths.EPOCH)
        if version is None:
            self._cluster.check_cluster_id()
            self._state.mkdirs(paths.EPOCH)
            return None
        record = encode_record(EpochRecord(leader=leader, http=http))
        transaction = self._state.transaction().set(paths.EPOCH, record, version)
        transaction.create(paths.NIMBUS_MASTER, leader.encode(), ephemeral=True)
        try:
            epoch = transaction.commit()[0]
        except Conflict:
            return None
        assert isinstance(epoch, int)
        _log.info("%s leads in epoch %d", leader, epoch)
        return epoch

    def resign(self) -> None:
        """Give leadership up now; no error when it is not held. Its epoch can then not be used any
        more once another takes over, and :meth:`is_leader` is false at once.
        """
        with self._lock:
            self._confirmed = None
            if (epoch := self._held(None)) is not None:
                try:
                    # Every /nimbus_master has data version 0: that it is still ours is what the
                    # epoch says.
                    self._state.transaction().check(paths.EPOCH, epoch).delete(
                        paths.NIMBUS_MASTER
                    ).commit()
                except (Conflict, Fenced):
                    _log.info("leadership was gone already")

    def current(self, wake: Wake | None = None) -> str | None:
        """Thrift address of the leader; ``None`` at the moment. ``wake`` is called when that
        changes.
        """
        raw = self._state.get_data(
            paths.NIMBUS_MASTER, self._cluster.watch(paths.NIMBUS_MASTER, wake)
        )
        return raw.decode("utf-8", "replace") if raw else None

    # -- followers ---------------------------------------------------------------------------------

    def register_follower(self, address: str, uptime_secs: int, detail: Mapping[str, Any]) -> None:
        """Write the ephemeral ``/nimbus_slave/<address>`` (uptime as text) and its detail (a JSON
        map).
        """
        self._state.set_ephemeral_node(f"{paths.NIMBUS_SLAVE}/{address}", str(uptime_secs).encode())
        raw = json.dumps(dict(detail), sort_keys=True).encode()
        self._state.set_ephemeral_node(f"{paths.NIMBUS_SLAVE_DETAIL}/{address}", raw)

    def unregister_follower(self, address: str) -> None:
        """Remove both nodes of a nimbus, as it does when it becomes the leader."""
        for folder in (paths.NIMBUS_SLAVE, paths.NIMBUS_SLAVE_DETAIL):
            self._state.delete_node(f"{folder}/{address}")

    def followers(self, wake: Wake | None = None) -> dict[str, dict[str, Any]]:
        """:func:`read_followers` of this cluster."""
        return read_followers(self._cluster, wake)

    def close(self) -> None:
        """Stop listening to the connection; leadership ends with the session, or by
        :meth:`resign`.
        """
        self._state.remove_listener(self._on_connection)
        self._confirmed = None


def read_followers(
    cluster: StormClusterState, wake: Wake | None = None
) -> dict[str, dict[str, Any]]:
    """Address -> detail of every registered nimbus. ``wake`` is called when one comes or goes."""
    folder = paths.NIMBUS_SLAVE_DETAIL
    details: dict[str, dict[str, Any]] = {}
    for address, (raw, _) in read_children(
        cluster.state, folder, cluster.watch(folder, wake)
    ).items():
        try:
            detail = json.loads(raw)
        except (ValueError, RecursionError):
            detail = None
        if not isinstance(detail, dict):
            # It lives, so it is listed; its damaged detail is ignored.
            _log.error(
                "%s/%s does not hold a valid JSON map: restart that nimbus, which rewrites it",
                folder,
                address,
            )
            detail = {}
        details[address] = detail
    return details
