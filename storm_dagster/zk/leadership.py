"""Leadership of one nimbus, with an epoch that fences its writes.

The leader holds the ephemeral ``/nimbus_master``; taking it also rewrites ``/epoch``, whose data
version is the epoch. Every write of a leader checks that version, so a deposed one is ``Fenced``
also if it does not know it yet (``docs/decisions.md#fenced-writes``). kazoo's Lock and Election are
not used: they still report "acquired" after the session is lost.
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
"""Attempts to take a leadership that is free; the next call of ``try_lead`` tries again."""


class LeadershipSession:
    """Leadership of one nimbus, in the session of its cluster state.

    All methods may be called from any thread. :meth:`is_leader` needs no request and becomes false
    as soon as the connection is suspended; :meth:`try_lead`, which the loop calls regularly, finds
    out if leadership survived.
    """

    def __init__(self, cluster: StormClusterState) -> None:
        self._cluster = cluster
        self._state = cluster.state
        self._lock = threading.Lock()
        self._interruptions = 0
        """Number of interruptions: a response to an older request proves no leadership."""
        self._confirmed: tuple[int, int] | None = None
        """Epoch, and the number of interruptions when its confirmation was requested."""
        self._state.add_listener(self._on_connection)

    def _on_connection(self, connection: str) -> None:
        """Drop the confirmed leadership at each interruption."""
        # Without the lock, so that no request delays it.
        if connection != "CONNECTED":
            self._interruptions += 1
            confirmed = self._confirmed
            self._confirmed = None
            if confirmed is not None:
                epoch, _ = confirmed
                _log.warning("the connection is %s: epoch %d is not acted for", connection, epoch)

    def is_leader(self, epoch: int | None = None) -> bool:
        """True if this nimbus leads now, in ``epoch`` if one is given.

        It uses the state of the connection and the last confirmation, without a request.
        """
        held_epoch = self.held_epoch
        if held_epoch is None:
            return False
        return epoch is None or held_epoch == epoch

    @property
    def held_epoch(self) -> int | None:
        """Epoch in which this nimbus leads.

        ``None`` if it does not, or cannot know.
        """
        confirmed = self._confirmed
        if confirmed is None:
            return None
        epoch, interruptions = confirmed
        if interruptions != self._interruptions or not self._state.connected:
            return None
        return epoch

    def try_lead(self, leader: str, http: str, wake: Wake | None = None) -> int | None:
        """Try to become leader.

        Returns the epoch if this nimbus leads afterwards, ``None`` if another one does. ``leader``
        is the ``host:port`` of its Thrift service, ``http`` the base URL of its HTTP service. A
        call by the leader confirms its leadership with ZooKeeper; after an interruption that the
        session survived it returns the same epoch. ``wake`` is called at the next change of the
        leader. Raises ``Unavailable`` if ZooKeeper is out of reach: the next call finds the
        outcome.
        """
        with self._lock:
            for _ in range(_ATTEMPTS):
                interruptions = self._interruptions
                epoch = self._read_own_epoch(wake)
                if epoch is None:
                    self._confirmed = None
                    if self._state.exists(paths.NIMBUS_MASTER):
                        return None
                    epoch = self._take(leader, http)
                if epoch is not None:
                    self._confirmed = (epoch, interruptions)
                    return self.held_epoch
            return None

    def _read_own_epoch(self, wake: Wake | None) -> int | None:
        """The epoch, if ``/nimbus_master`` is a node of this session."""
        path = paths.NIMBUS_MASTER
        if not self._state.exists(path, watch=self._cluster.watch(path, wake)):
            return None
        if not self._state.owned(path):
            return None
        # Only the creator of /nimbus_master raises /epoch: while this session owns the node, the
        # epoch is its own.
        current = self._cluster.epoch()
        if current is None or not self._state.owned(path):
            return None
        epoch, _ = current
        return epoch

    def _take(self, leader: str, http: str) -> int | None:
        """Take the free leadership, and return its epoch.

        ``None`` if another nimbus was faster, or if ``/epoch`` had to be created first.
        """
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
        """Give leadership up; without leadership, the call has no effect.

        :meth:`is_leader` is false at once, and the epoch becomes invalid when another nimbus takes
        over.
        """
        with self._lock:
            self._confirmed = None
            epoch = self._read_own_epoch(None)
            if epoch is None:
                return
            # Every /nimbus_master has data version 0: the epoch proves that it is the same node.
            transaction = self._state.transaction().check(paths.EPOCH, epoch)
            transaction.delete(paths.NIMBUS_MASTER)
            try:
                transaction.commit()
            except (Conflict, Fenced):
                _log.info("leadership was gone already")

    def current(self, wake: Wake | None = None) -> str | None:
        """Thrift address of the leader; ``None`` while there is none.

        ``wake`` is called at the next change.
        """
        watch = self._cluster.watch(paths.NIMBUS_MASTER, wake)
        raw = self._state.get_data(paths.NIMBUS_MASTER, watch)
        return raw.decode("utf-8", "replace") if raw else None

    # -- followers ---------------------------------------------------------------------------------

    def register_follower(self, address: str, uptime_secs: int, detail: Mapping[str, Any]) -> None:
        """Write the ephemeral nodes of a nimbus.

        ``/nimbus_slave/<address>`` is the uptime as text, ``/nimbus_slave_detail/<address>`` a JSON
        map.
        """
        self._state.set_ephemeral_node(f"{paths.NIMBUS_SLAVE}/{address}", str(uptime_secs).encode())
        raw = json.dumps(dict(detail), sort_keys=True).encode()
        self._state.set_ephemeral_node(f"{paths.NIMBUS_SLAVE_DETAIL}/{address}", raw)

    def unregister_follower(self, address: str) -> None:
        """Remove both nodes of a nimbus, which becomes the leader."""
        for folder in (paths.NIMBUS_SLAVE, paths.NIMBUS_SLAVE_DETAIL):
            self._state.delete_node(f"{folder}/{address}")

    def followers(self, wake: Wake | None = None) -> dict[str, dict[str, Any]]:
        """:func:`read_followers` of this cluster."""
        return read_followers(self._cluster, wake)

    def close(self) -> None:
        """Stop listening to the connection.

        Leadership ends with the session, or by :meth:`resign`.
        """
        self._state.remove_listener(self._on_connection)
        self._confirmed = None


def read_followers(
    cluster: StormClusterState, wake: Wake | None = None
) -> dict[str, dict[str, Any]]:
    """Address -> detail of every registered nimbus.

    ``wake`` is called when a nimbus comes or goes.
    """
    folder = paths.NIMBUS_SLAVE_DETAIL
    nodes = read_children(cluster.state, folder, cluster.watch(folder, wake))
    details: dict[str, dict[str, Any]] = {}
    for address, (raw, _) in nodes.items():
        try:
            detail = json.loads(raw)
        except (ValueError, RecursionError):
            detail = None
        if not isinstance(detail, dict):
            # The nimbus lives, so it is listed; its damaged detail is ignored.
            _log.error(
                "%s/%s does not hold a valid JSON map: restart that nimbus, which rewrites it",
                folder,
                address,
            )
            detail = {}
        details[address] = detail
    return details
