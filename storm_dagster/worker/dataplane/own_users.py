"""Refusal of other users' connections to a worker whose cluster has no secret."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading

import zmq
from zmq.utils.monitor import recv_monitor_message

from storm_dagster.model.peers import can_tell_users, is_own_peer

_log = logging.getLogger(__name__)


def refuse_other_users(listener: zmq.Socket[bytes]) -> None:
    """Before ``bind``: end connections of other users of this machine, in a thread, until the socket's context ends.

    They may send before they end, but know no token. Does nothing where the kernel names no users.
    """
    if can_tell_users():
        threading.Thread(target=_watch, args=(listener.get_monitor_socket(zmq.EVENT_ACCEPTED),), daemon=True).start()


def _watch(events: zmq.Socket[bytes]) -> None:
    log = _log.warning
    with events, contextlib.suppress(zmq.ContextTerminated):
        while event := recv_monitor_message(events):
            # It may have left, and its descriptor be another socket's.
            with contextlib.suppress(OSError, IndexError), socket.socket(fileno=os.dup(event["value"])) as link:
                own, peer = link.getsockname(), link.getpeername()
                if str(own[1]) == event["endpoint"].rpartition(b":")[2].decode() and not is_own_peer(own, peer):
                    link.shutdown(socket.SHUT_RDWR)
                    log("connections of other users of this machine are ended: set storm.secret.file")
                    log = _log.debug
