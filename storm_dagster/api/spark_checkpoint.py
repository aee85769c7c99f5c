"""Owner of a checkpoint: a record in its folder ``owner``, which Spark writes and reads.

The checkpoint is where the Spark server can write, which a worker may not reach. Of the tasks of one component the one
of the newest assignment owns it, of equal ones the last; another component is refused.
"""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

from storm_dagster.model.errors import Conflict, InvalidTopology

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["CheckpointOwner"]


class CheckpointOwner:
    """This task's claim to a checkpoint."""

    def __init__(self, checkpoint: str, context: Any) -> None:
        launched = str(context.topology_id).rpartition("-")[2]
        self._checkpoint = checkpoint
        self._place = f"{checkpoint.rstrip('/')}/owner"
        self._name = f"component {context.component!r} of topology {context.topology_name!r}"
        self._epoch = [int(launched) if launched.isdigit() else 0, context.assignment_version]
        self._token = uuid.uuid4().hex
        self._worker = f"task {context.task_id} at {context.host}:{context.port}"

    def take(self, session: SparkSession) -> None:
        """Become the owner, before the query starts.

        :class:`InvalidTopology` if it belongs to another component or topology, :class:`Conflict` if it belongs to a
        task of a newer assignment.
        """
        found = self._read(session)
        if found is not None and found["name"] != self._name:
            raise InvalidTopology(
                f"checkpoint {self._checkpoint} belongs to {found['name']} ({found['worker']}), not to {self._name}: name "
                f"another checkpoint; if that one is gone for good, remove {self._place}"
            )
        if found is not None and found["epoch"] > self._epoch:
            raise self._lost_to(found)
        mine = {"name": self._name, "epoch": self._epoch, "token": self._token, "worker": self._worker}
        mine["session"] = _session_id(session)
        frame = session.createDataFrame([(json.dumps(mine),)], "value string")
        frame.coalesce(1).write.mode("overwrite").text(self._place)

    def check(self, session: SparkSession) -> None:
        """Return if this task is the owner; :class:`Conflict` names the other one."""
        found = self._read(session)
        if found is not None and found["token"] != self._token:
            raise self._lost_to(found)

    def is_passed_on(self, session: SparkSession) -> bool:
        """Whether another task has taken over the query that this one runs in the session they share."""
        found = self._read(session)
        shared = _session_id(session)
        return bool(shared and found and found["token"] != self._token and found.get("session") == shared)

    def _lost_to(self, found: dict[str, Any]) -> Conflict:
        return Conflict(
            f"the query of {self._name} with checkpoint {self._checkpoint} now belongs to {found['worker']}, so "
            f"{self._worker} stops it: one task at a time runs a query; nothing is to be done if the task has moved"
        )

    def _read(self, session: SparkSession) -> dict[str, Any] | None:
        try:
            rows = session.read.text(self._place).collect()
        except Exception as error:
            if "PATH_NOT_FOUND" in str(error):
                return None
            raise
        try:
            found = json.loads(rows[0][0]) if rows else None
            return found if isinstance(found, dict) and {"name", "epoch", "token", "worker"} <= found.keys() else None
        except ValueError:
            return None


def _session_id(session: SparkSession) -> str:
    # A classic session ends with its worker, and has none.
    return str(getattr(session, "session_id", ""))
