"""Batches that a bolt writes to a sink, in the checkpoints of its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from storm_dagster.api.tuples import Tuple
from storm_dagster.core.keyed_state import Checkpoint, stored_key

if TYPE_CHECKING:
    from storm_dagster.worker.tasks.stateful import StateDriver


class SinkBatches:
    """Batches of one task: each is in a checkpoint, with its token and the ids of its tuples, before it is written.

    A later opening of the task asks the sink for its newest token, and calls :meth:`decide`. Used by the thread that runs
    the bolt.
    """

    def __init__(self, driver: StateDriver) -> None:
        self._driver = driver
        log, context = driver.log, driver.runner.context
        self.owner = f"{context.topology_name}/{context.component}/{log.position[0]}.{log.index}"
        """Name of this task at the sink, the same until the number of tasks changes."""

    def undecided(self) -> Mapping[str, int]:
        """Owner -> token of the batches that may be written or not: of this task, and of earlier ones that had its keys."""
        return {owner: token for owner, (token, _) in self._driver.log.contents.batches.items()}

    def begin(self, token: int, tups: Sequence[Tuple]) -> bool:
        """Save that these tuples are written with ``token`` from now on; they take the place of this owner's last batch.

        ``False`` if that could not be saved: the error is reported, and the task restarts.
        """
        names: dict[Any, int] = {}
        for tup in tups:
            names[self.id_of(tup)] = self._driver.key_hash(tup)
        saved = self._append(Checkpoint(batches=[(self.owner, token, [(at, name) for name, at in names.items()])]))
        if saved:
            self._driver.log.contents.batches[self.owner] = token, names
        return saved

    def decide(self, owner: str, written: bool) -> bool:
        """Drop the batch of an owner; if it is written, its ids count as applied. The result is that of :meth:`begin`."""
        contents = self._driver.log.contents
        token, names = contents.batches.pop(owner)
        ids = [(at, name) for name, at in names.items()] if written else []
        contents.ids.update({name: at for at, name in ids})
        return self._append(Checkpoint(ids=ids, batches=[(owner, token, [])]))

    def id_of(self, tup: Tuple) -> Any:
        """The id of a tuple; ``InvalidRequest`` for one that cannot be saved."""
        name = self._driver.id_of(tup)
        stored_key(name)
        return name

    def ack_unapplied(self, tup: Tuple) -> None:
        """Ack a tuple at the next checkpoint, whose id shall not count as applied: what it emitted is its only effect."""
        self._driver.pending_acks.append(tup)

    def save(self) -> None:
        """Take a checkpoint, which sends the acks."""
        self._driver.checkpoint()

    def _append(self, record: Checkpoint) -> bool:
        try:
            self._driver.log.append(record)
        except Exception as error:
            self._driver.crash(error)
            return False
        return True
