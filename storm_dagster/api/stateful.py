"""Bolts with checkpointed state: what they know survives their worker, and is divided anew with their tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, Protocol

from storm_dagster.api.bolt import Bolt
from storm_dagster.api.tuples import Tuple
from storm_dagster.model.errors import InvalidRequest

__all__ = ["KeyValueState", "StatefulBolt"]


class KeyValueState(Protocol):
    """Keys to values, kept in memory and saved at checkpoints. Values are what tuples may hold.

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

    A tuple is acked only when what it did to the state is in a checkpoint, so that nothing counted is ever
    lost: what no checkpoint holds is replayed. A checkpoint is taken when nothing waits for the task, and
    every ``topology.state.checkpoint.interval.ms`` in any case. When ``process`` raises, what it did to the
    state is taken back.

    The other way round, a tuple can be applied twice: when its worker dies between a checkpoint and the acks,
    or when another bolt failed it. With ``message_id`` that is noticed: a tuple whose id was applied in the
    last ``topology.state.remember.secs`` goes to ``process_again`` instead of ``process``.

    If all inputs are grouped by fields, state is divided by key: the key of a state entry must be the value
    that the tuple was grouped by (a tuple of them for several fields), and follows it when the number of
    tasks changes. Otherwise each task has a state of its own; then ``merge_states`` decides what becomes of
    the states of tasks that are no more.
    """

    state: KeyValueState
    state_scope: ClassVar[Literal["key", "task"] | None] = None
    """Overrides how the state is divided."""
    message_id: ClassVar[str | Sequence[str] | None] = None
    """Fields whose values make the id of a tuple on its stream. Needs inputs grouped by fields."""

    _state_driver: Any = None

    def process_again(self, tup: Tuple) -> None:
        """A tuple that the state holds already. Emit again what others need of it; by default nothing."""

    def merge_states(self, key: Any, values: list[Any]) -> Any:
        """The value for a key that several tasks had when fewer tasks take their states over."""
        raise InvalidRequest(
            f"{type(self).__name__} has fewer tasks than before, and {len(values)} values for {key!r:.80}: "
            "define merge_states(self, key, values)"
        )

    def _begin(self) -> None:
        self.state._begin()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]

    def _undo(self) -> None:
        self.state._undo()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
