"""CurveZMQ between workers, and from nimbus to workers, when the cluster has a secret.

Every worker of a topology serves with one key, derived from the cluster's secret and the topology's id. Its
public half is published nowhere: a client needs it for the handshake, so that only a process that can derive the
key connects, and a worker of another topology cannot. ZeroMQ encrypts what follows with keys of the session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from storm_dagster.model.security import Security

if TYPE_CHECKING:
    import zmq


def link_key_of(security: Security, topology_id: str) -> str:
    """The key of a topology's workers in hex; ``""`` without a secret (links are then open, on loopback).

    Derived from the oldest secret that counts: while the secret is changed, workers that start reach those that run.
    """
    return "" if security.secret is None else security.derived(f"worker links of {topology_id}", -1).hex()


def _secret_half(link_key: str) -> bytes:
    # Dagster's processes load this module for the keys alone; they have no use for ZeroMQ.
    from zmq.utils import z85

    return z85.encode(bytes.fromhex(link_key))


def secure_server(socket: zmq.Socket[Any], link_key: str) -> None:
    """Before ``bind``: admit only clients that know the key; does nothing for an empty one."""
    if link_key:
        import zmq

        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, _secret_half(link_key))


def secure_client(socket: zmq.Socket[Any], link_key: str) -> None:
    """Before ``connect``: prove knowledge of the key; does nothing for an empty one."""
    if link_key:
        import zmq

        public, secret = zmq.curve_keypair()
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(_secret_half(link_key)))
