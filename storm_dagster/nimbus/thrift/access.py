"""Authorization on the Thrift port of a secured cluster.

Nothing is configured by default: the port is on loopback, and everybody who reaches it may call. Thrift's calls have
no place for a secret, so that with ``storm.secret`` alone every call is refused; with TLS the client's certificate
names its user.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storm_dagster.core.authorization import LIMITED_USER, Caller, Operation, authorize, is_admin
from storm_dagster.model.errors import NotAuthenticated, StormDagsterError
from storm_dagster.model.security import Security
from storm_dagster.nimbus.thrift.idl import METHODS
from storm_dagster.nimbus.thrift.structures import changes_a_topology

_audit = logging.getLogger("storm_dagster.audit")

_SUBMISSIONS = ("submitTopology", "submitTopologyWithOpts")


@dataclass(frozen=True)
class ThriftPeer:
    """The other end of a connection."""

    host: str = ""
    user: str | None = None
    """Common name of its certificate."""


def operation_of(method: str, arguments: Sequence[object] = ()) -> Operation:
    """The operation of a call; unknown methods are for administrators.

    Conf keys turn a submission into a change of the topology that runs under its name.
    """
    if method in _SUBMISSIONS and len(arguments) > 2 and changes_a_topology(arguments[2]):
        return "topology"
    return METHODS.get(method, {}).get("for", "admin")


class Access:
    """Authorization of each call."""

    def __init__(
        self,
        security: Security,
        conf: Mapping[str, Any],
        topology_conf: Callable[[str], Mapping[str, Any] | None],
        groups: Callable[[str], frozenset[str]],
    ) -> None:
        self._security = security
        self._conf = conf
        self._topology_conf = topology_conf
        self._groups = groups

    def check(self, peer: ThriftPeer, method: str, arguments: Sequence[object]) -> None:
        """Return when the peer may call.

        Raises :class:`NotAuthenticated` and :class:`NotAuthorized`, which the audit log keeps.
        """
        LIMITED_USER.set(None)
        if not self._security.configured:
            return
        try:
            self._check(peer, method, arguments)
        except StormDagsterError as error:
            _audit.warning("refused %s of %s: %s", method, peer.user or peer.host, error.message)
            raise

    def _check(self, peer: ThriftPeer, method: str, arguments: Sequence[object]) -> None:
        if peer.user is None:
            raise NotAuthenticated(
                "this cluster asks who you are, and Thrift's calls carry no secret: set storm.tls.* and show a client "
                "certificate, or use storm-dagster's command line or REST"
            )
        caller = Caller(peer.user, host=peer.host, groups=self._groups(peer.user))
        if is_admin(caller, self._conf):
            return
        LIMITED_USER.set(caller.name)
        operation = operation_of(method, arguments)
        first = arguments[0] if arguments else None
        named = operation == "topology" and isinstance(first, str)
        authorize(caller, operation, self._conf, self._topology_conf(str(first)) if named else None)
