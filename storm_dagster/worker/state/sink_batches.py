"""Batches that a bolt writes to a sink, in the checkpoints of its state."""

from collections.abc import Sequence
from typing import Any, Protocol

from storm_dagster.api.tuples import Tuple
from storm_dagster.core.dataplane.keyed_state import Checkpoint, stored_key
from storm_dagster.worker.state.host import StateTask
from storm_dagster.worker.state.log import StateLog


class SinkState(Protocol):
    """State of a sink's task.

    ``StateDriver`` of ``worker/state/driver.py``.
    """

    runner: StateTask
    log: StateLog
    pending_acks: list[Tuple]

    def checkpoint(self) -> None:
        """Save the state. If that fails, the task restarts."""
        ...

    def key_hash(self, tup: Tuple) -> int:
        """Hash of the grouping key of a tuple."""
        ...

    def id_of(self, tup: Tuple) -> Any:
        """Return the id by which a repeated tuple is recognized.

        ``None`` without one.
        """
        ...

    def crash(self, error: Exception) -> None:
        """Restart the task, because its state could not be saved."""
        ...


class SinkBatches:
    """Batches of one task.

    Each batch is in a checkpoint, with its token and the ids of its tuples, before it is written.
    Used by the thread that runs the bolt. A method that cannot save returns ``False``: the task
    restarts.
    """

    def __init__(self, driver: SinkState) -> None:
        self._driver = driver
        self._log = driver.log
        context = driver.runner.context
        division, _ = driver.log.position
        self.owner = f"{context.topology_name}/{context.component}/{division}.{driver.log.index}"
        """Name of this task at the sink, the same until the number of tasks changes."""
        self.save = driver.checkpoint
        """Take a checkpoint now."""

    def undecided(self) -> dict[str, int]:
        """Return owner -> token of the batches that may be written or not.

        They are of this task, and of earlier ones that had its keys.
        """
        return {owner: token for owner, (token, _) in self._log.contents.batches.items()}

    def begin(self, token: int, tups: Sequence[Tuple]) -> bool:
        """Save that these tuples are written with ``token`` from now on.

        They replace this owner's last batch. False if that could not be saved.
        """
        ids = [(self._driver.key_hash(tup), self._driver.id_of(tup)) for tup in tups]
        return self._append(Checkpoint(batches=[(self.owner, token, ids)]))

    def decide(self, owner: str, written: bool) -> bool:
        """Drop the batch of an owner of :meth:`undecided`.

        If it is written, its ids count as applied. False if that could not be saved.
        """
        token, key_hash_of = self._log.contents.batches[owner]
        applied: list[tuple[int, Any]] = []
        if written:
            applied = [(key_hash, tuple_id) for tuple_id, key_hash in key_hash_of.items()]
        # A batch without ids removes the owner's batch.
        return self._append(Checkpoint(ids=applied, batches=[(owner, token, [])]))

    def id_of(self, tup: Tuple) -> Any:
        """Return the id of a tuple; ``None`` without one.

        ``InvalidRequest`` if it cannot be saved.
        """
        tuple_id = self._driver.id_of(tup)
        # Only for its error.
        stored_key(tuple_id)
        return tuple_id

    def ack_unapplied(self, tup: Tuple) -> None:
        """Ack a tuple at the next checkpoint.

        Its id does not count as applied.
        """
        self._driver.pending_acks.append(tup)

    def _append(self, record: Checkpoint) -> bool:
        """Save and apply a record; without it the task restarts, and this returns False."""
        try:
            self._log.append(record)
        except Exception as error:
            self._driver.crash(error)
            return False
        self._log.contents.apply_ids(record)
        return True
