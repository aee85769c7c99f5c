"""Bolts with checkpointed state, which survives their worker and is redistributed with their tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, Protocol

from storm_dagster.api.bolts import Bolt
from storm_dagster.api.tuples import Tuple
from storm_dagster.model.errors import InvalidRequest


class KeyValueState(Protocol):
    """Key-value store in memory, saved at checkpoints. Values are those that tuples may hold.

    Assign what has changed: ``state[key] = value``. A value that is changed in place is not saved.
    """

    def get(self, key: Any, default: Any = None) -> Any:
        """The value, or ``default``."""
        ...

    def __getitem__(self, key: Any) -> Any: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __delitem__(self, key: Any) -> None: ...

    def __contains__(self, key: Any) -> bool: ...

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...

    def items(self) -> Iterator[tuple[Any, Any]]:
        """The (key, value) pairs of this task."""
        ...


class StatefulBolt(Bolt):
    """A bolt with ``self.state``, from ``initialize`` on. Alone, or as a mixin: ``class Totals(StatefulBolt,
    WindowedBolt)``.

    A tuple is acked only when its changes of the state are in a checkpoint, so that no change is lost: tuples without
    a checkpoint are replayed. A checkpoint is taken when the task's queue is empty, and at least every
    ``topology.state.checkpoint.interval.ms``. When ``process`` raises, its changes of the state are reverted.

    A tuple can be applied twice: when its worker dies between a checkpoint and the acks, or when another bolt failed
    it. ``message_id`` prevents that: a tuple whose id was applied in the last ``topology.state.remember.secs`` goes to
    ``process_again`` instead of ``process``.

    If all inputs are grouped by fields, state is divided by key: the key of a state entry must be the value
    that the tuple was grouped by (a tuple of them for several fields), and the entry moves with it when the number of
    tasks changes. Otherwise each task has its own state; then ``merge_states`` merges the states of removed tasks.
    """

    state: KeyValueState
    state_scope: ClassVar[Literal["key", "task"] | None] = None
    """Overrides how the state is divided."""
    message_id: ClassVar[str | Sequence[str] | None] = None
    """Fields whose values make the id of a tuple on its stream. Needs inputs grouped by fields."""
    _sink_batches: Any = None

    def process_again(self, tup: Tuple) -> None:
        """Handle a tuple that was applied before: emit again what downstream needs; by default nothing."""

    def merge_states(self, key: Any, values: list[Any]) -> Any:
        """Merge the values that several tasks have for a key, when the number of tasks shrinks."""
        raise InvalidRequest(
            f"{type(self).__name__} has fewer tasks than before, and {len(values)} values for {key!r:.80}: "
            "define merge_states(self, key, values)"
        )

    def _begin(self) -> None:
        self.state._begin()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]

    def _undo(self) -> None:
        self.state._undo()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
