"""Durable state of one task: a small key-value store that survives the worker.

It belongs to the *name* of the topology, the component and the task id, so that it survives
restarts, moves between slots, and new deployments of the topology.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.identities import former_identity_text, identity_text
from storm_dagster.model.values import decode_value, encode_value


@dataclass(frozen=True)
class StateChanges:
    """Changes of one transaction."""

    values: Mapping[str, bytes]
    """Key -> encoded value."""
    removed: tuple[str, ...] = ()
    """Keys that are deleted."""
    applied: tuple[str, ...] = ()
    """Ids that count as applied from now on."""
    forgotten: tuple[str, ...] = ()
    """Ids that no longer count as applied, also if they are in ``applied``."""
    clears: bool = False
    """True if all earlier values and ids are dropped."""


class StateStore(Protocol):
    """Storage behind a :class:`TaskState`. The worker of the task provides it."""

    @property
    def path(self) -> Path:
        """Folder of the store."""
        ...

    @property
    def values(self) -> Mapping[str, bytes]:
        """Key -> encoded value."""
        ...

    @property
    def applied(self) -> Iterable[str]:
        """The applied ids."""
        ...

    @property
    def has_former_ids(self) -> bool:
        """True if ids may have the form of an earlier release, which is ``str()`` of a value."""
        ...

    def is_applied(self, id: str) -> bool:
        """True if the id is applied."""
        ...

    def write(self, changes: StateChanges, *, sync: bool) -> None:
        """Store all changes or none.

        They are durable when it returns, with ``sync`` also after a power cut.
        """
        ...

    def close(self) -> None:
        """Close the store."""
        ...


def _encode(key: str, value: Any) -> bytes:
    try:
        return encode_value(value)
    except TypeError as error:
        raise TypeError(f"the state of {key!r:.80} cannot be saved: it is {error}") from None


class TaskState:
    """Map of strings to the values that tuples may hold, and a set of applied ids.

    :meth:`save` changes both in one transaction: after a crash all changes are stored or none. So a
    bolt that saves the id of a line together with the changed counts, and acks only then, counts
    every line exactly once, although lines are delivered at least once::

        if not state.applied(line_id):
            values = {word: state.get(word, 0) + n for word, n in counts.items()}
            state.save(values, applied=[line_id])
        self.ack(tup)

    A component has it as ``self.context.state``. For tests and tools,
    ``storm_dagster.testing.task_state`` opens or reads the state of any task.
    """

    def __init__(self, store: StateStore) -> None:
        self.path: Path = store.path
        """Folder of the state."""
        self._open_store: StateStore | None = store
        """``None`` after :meth:`close`."""
        self._lock = threading.RLock()

    @property
    def _store(self) -> StateStore:
        if self._open_store is None:
            raise InvalidRequest(f"the state in {self.path} is closed: use context.state instead")
        return self._open_store

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or ``default``."""
        with self._lock:
            raw = self._store.values.get(str(key))
        return default if raw is None else decode_value(raw)

    def items(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """All (key, value) pairs whose key starts with ``prefix``, by key."""
        with self._lock:
            values = self._store.values
            rows = [(key, values[key]) for key in values if key.startswith(prefix)]
        for key, raw in sorted(rows):
            yield key, decode_value(raw)

    def __len__(self) -> int:
        with self._lock:
            return len(self._store.values)

    def applied(self, id: object) -> bool:
        """True if the id was saved as applied."""
        with self._lock:
            return any(self._store.is_applied(text) for text in self._id_texts(id))

    def _id_texts(self, id: object) -> list[str]:
        """The id as text, and as an earlier release may have stored it."""
        texts = [identity_text(id)]
        former = former_identity_text(id)
        if former is not None and self._store.has_former_ids:
            texts.append(former)
        return texts

    def applied_ids(self) -> set[str]:
        """All applied ids, as strings."""
        with self._lock:
            return set(self._store.applied)

    def save(
        self,
        values: Mapping[str, Any] | None = None,
        *,
        applied: Iterable[object] = (),
        remove: Iterable[str] = (),
        forget: Iterable[object] = (),
        sync: bool = False,
    ) -> None:
        """Store all these changes, or none.

        Sets ``values``, deletes the keys ``remove``, adds the ids ``applied`` and drops the ids
        ``forget``. When it returns, the changes survive the death of the process, and with ``sync``
        also a power cut. Raises :class:`Unavailable`, without a change, when the worker's lease has
        ended: then another worker may own the task.
        """
        encoded = {str(key): _encode(key, value) for key, value in (values or {}).items()}
        changes = StateChanges(
            values=encoded,
            removed=tuple([str(key) for key in remove]),
            applied=tuple([identity_text(id) for id in applied]),
        )
        with self._lock:
            forgotten: list[str] = []
            for id in forget:
                forgotten += self._id_texts(id)
            changes = replace(changes, forgotten=tuple(forgotten))
            self._store.write(changes, sync=sync)

    def clear(self) -> None:
        """Delete everything. Raises as :meth:`save`."""
        with self._lock:
            self._store.write(StateChanges({}, clears=True), sync=False)

    def close(self) -> None:
        """Close the store; further use fails."""
        with self._lock:
            if self._open_store is not None:
                self._open_store.close()
                self._open_store = None
