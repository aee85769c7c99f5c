"""The Thrift service of one nimbus, wired."""

from __future__ import annotations

import logging
import socket
import threading

from storm_dagster.http.authentication import groups_of
from storm_dagster.model.peers import owners_only
from storm_dagster.model.security import Security
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.requests.submitting import Submissions
from storm_dagster.nimbus.thrift.access import Access
from storm_dagster.nimbus.thrift.dispatch import Dispatcher
from storm_dagster.nimbus.thrift.handler import NimbusHandler
from storm_dagster.nimbus.thrift.pending import PendingSubmissions
from storm_dagster.nimbus.thrift.server import ServerLimits, ThriftServer

_log = logging.getLogger(__name__)


class ThriftService:
    """Storm's Nimbus service on an open socket."""

    def __init__(
        self, nimbus: Nimbus, reader: ClusterReader, submissions: Submissions, listener: socket.socket
    ) -> None:
        self._pending = PendingSubmissions(nimbus, submissions)
        self._handler = NimbusHandler(nimbus, reader, self._pending)
        limits = ServerLimits(
            frame_bytes=nimbus.conf["nimbus.thrift.max_buffer_size"], threads=nimbus.conf["nimbus.thrift.threads"]
        )
        security = Security.of(nimbus.conf)
        access = Access(security, nimbus.conf.values, reader.conf, groups_of)
        dispatcher = Dispatcher(self._handler, access.check)
        tls = security.server_context() if security.tls else None
        self._server = ThriftServer(dispatcher.answer, listener, limits, tls=tls, own_user_only=owners_only(security))

        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._pending.run, args=(self._ended,), name="nimbus-thrift-pending", daemon=True
        )

    def start(self) -> None:
        """Begin to serve; :class:`Unavailable` when that does not happen in time."""
        self._server.start()
        self._thread.start()

    def advance(self, now: float) -> None:
        """Expire idle transfers; called by the upkeep thread."""
        self._handler.advance(now)

    def stop(self) -> None:
        """End within a few seconds."""
        self._ended.set()
        self._server.stop()
        self._handler.close()
        if self._thread.is_alive():
            self._thread.join(timeout=2)
