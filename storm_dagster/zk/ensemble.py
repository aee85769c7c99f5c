"""Ensemble of embedded ZooKeeper servers: its members, and the command line of each.

An ensemble of three serves while any two of them see each other. For production, use one that is run on hosts of
its own; this one serves ``storm-dagster dev --zookeepers 3``, tests and ``make chaos``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from storm_dagster.model.errors import InvalidRequest
from storm_dagster.zk.embedded import zookeeper_command

INIT_TICKS = 40
"""Time in which a member must join and load the leader's state."""
SYNC_TICKS = 8
"""Time without contact after which leader and follower disconnect."""


@dataclass(frozen=True)
class Member:
    """One server of an ensemble."""

    id: int
    """From 1; the highest one wins an election among equals."""
    client: int
    """Port for clients."""
    peer: int
    """Port on which it serves followers while it leads."""
    election: int
    """Port for votes."""
    host: str = "127.0.0.1"

    @property
    def address(self) -> str:
        """``host:port`` for clients."""
        return f"[{self.host}]:{self.client}" if ":" in self.host else f"{self.host}:{self.client}"


def ensemble_command(
    members: Sequence[Member],
    id: int,
    data_dir: Path,
    *,
    tick_ms: int = 500,
    heap_mb: int = 128,
    durable: bool = True,
) -> list[str]:
    """The command line of member ``id``, after writing its configuration and ``myid`` into ``data_dir``.

    Everything else is as in :func:`~storm_dagster.zk.embedded.zookeeper_command`. :class:`InvalidRequest` when ``id``
    is not among the members, or two of them share an id.
    """
    by_id = {member.id: member for member in members}
    if id not in by_id or len(by_id) != len(members):
        raise InvalidRequest(
            f"ZooKeeper member {id} is not one of the ensemble {sorted(m.id for m in members)}: give each an id of its own"
        )
    me = by_id[id]
    peers = {f"server.{member.id}": f"{member.host}:{member.peer}:{member.election}:participant" for member in members}
    command = zookeeper_command(
        data_dir,
        me.client,
        host=me.host,
        tick_ms=tick_ms,
        heap_mb=heap_mb,
        durable=durable,
        more={
            **peers,
            "initLimit": INIT_TICKS,
            "syncLimit": SYNC_TICKS,
            # A vote for a member that is gone must not hold up an election for its default of five seconds.
            "cnxTimeout": 1000,
            "standaloneEnabled": "false",
            "reconfigEnabled": "false",
        },
    )
    (data_dir / "myid").write_text(f"{id}\n", encoding="ascii")
    return command
