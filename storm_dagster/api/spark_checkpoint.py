"""Owner of a checkpoint: a record in its folder ``owner``, which Spark writes and reads.

The checkpoint is where the Spark server can write, which a worker may not reach.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from storm_dagster.model.errors import Conflict, InvalidTopology


class CheckpointOwner:
    """This task's claim. Of the tasks of a component the one of the newest assignment owns it, of equal ones the last."""

    def __init__(self, checkpoint: str, context: Any) -> None:
        launched = str(context.topology_id).rpartition("-")[2]
        self._checkpoint = checkpoint
        self._place = f"{checkpoint.rstrip('/')}/owner"
        self._mine: dict[str, Any] = {
            "name": f"component {context.component!r} of topology {context.topology_name!r}",
            "epoch": [int(launched) if launched.isdigit() else 0, context.assignment_version],
            "token": uuid.uuid4().hex,
            "worker": f"task {context.task_id} at {context.host}:{context.port}",
        }

    def take(self, session: Any) -> None:
        """Become the owner, before the query starts.

        :class:`InvalidTopology` if it belongs to another component or topology, :class:`Conflict` if it belongs to a
        task of a newer assignment.
        """
        mine, found = self._mine, self._read(session)
        if found["name"] != mine["name"]:
            raise InvalidTopology(
                f"checkpoint {self._checkpoint} belongs to {found['name']} ({found['worker']}), not to {mine['name']}: "
                f"name another checkpoint; if that one is gone for good, remove {self._place}"
            )
        if found["epoch"] > mine["epoch"]:
            raise self._lost_to(found)
        frame = session.createDataFrame([(json.dumps(mine),)], "value string")
        frame.coalesce(1).write.mode("overwrite").text(self._place)

    def check(self, session: Any) -> None:
        """Return if this task is the owner; :class:`Conflict` names the other one."""
        found = self._read(session)
        if found["token"] != self._mine["token"]:
            raise self._lost_to(found)

    def _lost_to(self, found: dict[str, Any]) -> Conflict:
        return Conflict(
            f"the query of {self._mine['name']} with checkpoint {self._checkpoint} now belongs to {found['worker']}, so "
            f"{self._mine['worker']} leaves it: one task at a time owns a query; nothing is to be done if the task moved"
        )

    def _read(self, session: Any) -> dict[str, Any]:
        """The record; this task's own if there is none, or a damaged one."""
        try:
            (row,) = session.read.text(self._place).collect()
            return {key: json.loads(row[0])[key] for key in self._mine}
        except (ValueError, KeyError, TypeError):
            return self._mine
        except Exception as error:
            if "PATH_NOT_FOUND" in str(error):
                return self._mine
            raise
