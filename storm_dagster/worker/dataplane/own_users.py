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
    """Before ``bind``: end connections of other users of this machine, in a thread, until its context ends.

    What one of them sent before that is of an unknown sender: the token is in files and nodes that are closed to them.
    Does nothing where the kernel names no users.
    """
    if can_tell_users():
        events = listener.get_monitor_socket(zmq.EVENT_ACCEPTED)
        threading.Thread(target=_watch, args=(events,), name="worker-peers", daemon=True).start()


def _watch(events: zmq.Socket[bytes]) -> None:
    warned = False
    with events, contextlib.suppress(zmq.ContextTerminated):
        while True:
            event = recv_monitor_message(events)
            # It may have left, and its descriptor be another socket's.
            with contextlib.suppress(OSError, IndexError), socket.socket(fileno=os.dup(event["value"])) as link:
                own, peer = link.getsockname(), link.getpeername()
                ours = str(own[1]) == event["endpoint"].rpartition(b":")[2].decode()
                if ours and not is_own_peer(own, peer):
                    link.shutdown(socket.SHUT_RDWR)
                    if not warned:
                        _log.warning("connections of other users of this machine are ended: set storm.secret.file")
                    warned = True
