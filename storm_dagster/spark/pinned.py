"""Pinned Spark Connect sessions: one server-side session that many processes attach to in turn.

A process that attaches to a session that lives already finds its Python workers and plans warm; a session of
its own would cost more than a second before the first Python function runs. The id is kept where all
processes of the cluster find it, and replaced by compare and set when the server has dropped the session.
"""

from __future__ import annotations

import uuid
from typing import Any

from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Corrupt


class ClusterSessionIds:
    """The id in ZooKeeper, at ``/spark_sessions/placement``; ``state`` is a ``zk.ClusterState``."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._path = paths.spark_session("placement")

    def read(self) -> tuple[str, int] | None:
        """The id and its data version; :class:`Corrupt` when the node holds something else."""
        found = self._state.get_data_with_version(self._path)
        if found is None:
            return None
        raw, at = found
        try:
            return str(uuid.UUID(raw.decode("ascii"))), at.version
        except (UnicodeDecodeError, ValueError):
            raise Corrupt(f"{self._path} holds no session id: delete the node, a new one is written") from None

    def replace(self, session_id: str, version: int | None) -> bool:
        """Keep another id if the version is still this one (``None``: if there is none); whether it was."""
        data = session_id.encode("ascii")
        try:
            if version is None:
                self._state.transaction().create(self._path, data).commit()
            else:
                self._state.set_data(self._path, data, version)
        except Conflict:
            return False
        return True


class FixedSessionIds:
    """An id that is agreed upon beforehand, for one process; a replacement is known to it alone."""

    def __init__(self, session_id: str) -> None:
        self._kept = (session_id, 0)

    def read(self) -> tuple[str, int]:
        return self._kept

    def replace(self, session_id: str, version: int | None) -> bool:
        self._kept = (session_id, (version or 0) + 1)
        return True


SessionIds = ClusterSessionIds | FixedSessionIds
"""Store of the id of one pinned session."""


def pinned_id(ids: SessionIds, *, gone: str | None = None) -> str:
    """The stored id, created when there is none, and replaced when it is the one that is ``gone``.

    Of several processes that find it gone one writes, the others take what that one wrote.
    """
    for _ in range(10):
        kept = ids.read()
        if kept is not None and kept[0] != gone:
            return kept[0]
        fresh = str(uuid.uuid4())
        if ids.replace(fresh, kept[1] if kept is not None else None):
            return fresh
    raise Conflict("the id of the pinned Spark session changed ten times in a row: try again")
