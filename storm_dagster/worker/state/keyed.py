"""State of a stateful bolt's task, by key."""

from collections.abc import Iterator, MutableMapping
from itertools import islice
from typing import Any

import msgspec

from storm_dagster.api.tuples import Tuple
from storm_dagster.core.dataplane.keyed_state import (
    Contents,
    Partitioning,
    encode_value,
    key_of,
    stored_key,
)
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.model.wire import StateQuery

_ABSENT: Any = object()
"""In a journal: the key had no value, or no change."""
_TRIES = 20
"""Tries to list keys while the task adds others."""
_PAGE_BYTES = 256 << 10
_VALUE_BYTES = 16 << 10
"""Longest value, as JSON with its key, that a page has in full."""
_REPR_LENGTH = 1000


class KeyedState:
    """State of one task.

    See :class:`storm_dagster.api.bolts.KeyValueState`.
    """

    def __init__(self, contents: Contents, division: Partitioning, index: int) -> None:
        self._values = contents.values
        self._division = division
        self._index = index
        self._has_all_keys = division.tasks == 1 or not division.by_key
        """True if no key can belong to another task."""
        self.changed: dict[Any, msgspec.Raw | None] = {}
        """Key -> encoded value, ``None`` if removed; since the last checkpoint."""
        self._journal: list[tuple[Any, Any, Any]] = []
        """(key, value before, change before) of each change by the current tuple."""
        self.refused: dict[Any, tuple[Tuple, Any]] = {}
        """Id -> (tuple, reason) of tuples that the code of the current tuple or batch failed. Their
        copies fail, too.
        """

    def _own_key(self, key: Any) -> Any:
        """Return the hashable form of a key.

        ``InvalidRequest`` if it cannot be hashed, or belongs to another task.
        """
        # Called per access of the state, measured by benchmarks/dataplane.py.
        key = key_of(key)
        try:
            has_value = key in self._values
        except TypeError:
            raise InvalidRequest(
                f"{type(key).__name__} {key!r:.60} cannot be a key of the state: use a string, a "
                "number, bytes or a tuple of them"
            ) from None
        if not has_value and not self._has_all_keys:
            owner = self._division.owner(key)
            if owner != self._index:
                raise InvalidRequest(
                    f"the state of key {key!r:.80} belongs to task number {owner} of this "
                    f"component, not to number {self._index}: use the value that the input is "
                    "grouped by as the key"
                )
        return key

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of a key, or ``default``."""
        return self._values.get(self._own_key(key), default)

    def __getitem__(self, key: Any) -> Any:
        return self._values[self._own_key(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        key = self._own_key(key)
        # Raises for a key that cannot be saved, before anything is changed.
        stored_key(key)
        raw = encode_value(value, key)
        self._journal.append((key, self._values.get(key, _ABSENT), self.changed.get(key, _ABSENT)))
        self._values[key] = value
        self.changed[key] = raw

    def __delitem__(self, key: Any) -> None:
        key = self._own_key(key)
        before = self._values.pop(key)
        self._journal.append((key, before, self.changed.get(key, _ABSENT)))
        self.changed[key] = None

    def __contains__(self, key: Any) -> bool:
        return self._own_key(key) in self._values

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._values))

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Return the (key, value) pairs of this task."""
        return iter(list(self._values.items()))

    def page(self, query: StateQuery) -> dict[str, Any]:
        """Return current entries: ``{"entries": [{"key", "value"}], "next"}``.

        Some may not be saved yet. ``next`` is the offset of the next entry, ``None`` at the end,
        and for a query of keys. At most about 256 KiB. For a value longer than 16 KiB, or not valid
        in JSON, ``shown`` is the beginning of its ``repr``. Any thread.
        """
        if query.keys:
            keys = [key for key in map(key_of, query.keys) if key in self._values]
            entries = [_entry(key, self._values[key])[0] for key in keys[: query.limit]]
            return {"entries": entries, "next": None}
        end = query.offset + query.limit + 1
        for _ in range(_TRIES):
            try:
                pairs = list(islice(self._values.items(), query.offset, end))
                break
            except RuntimeError:
                # The task's thread added a key.
                continue
        else:
            raise Unavailable(
                f"the state of task {query.task} changes too fast to be listed: ask for a key"
            )
        entries = []
        size = 0
        for key, value in pairs[: query.limit]:
            entry, length = _entry(key, value)
            size += length
            if entries and size > _PAGE_BYTES:
                break
            entries.append(entry)
        next_offset = query.offset + len(entries) if len(entries) < len(pairs) else None
        return {"entries": entries, "next": next_offset}

    def _begin(self) -> None:
        """Begin a call of the bolt's code: changes before it are no longer undone."""
        self._journal.clear()
        self.refused.clear()

    def _undo(self) -> None:
        """Undo all changes since :meth:`_begin`."""
        for key, value, change in reversed(self._journal):
            _restore(self._values, key, value)
            _restore(self.changed, key, change)
        self._journal.clear()


def _restore(target: MutableMapping[Any, Any], key: Any, value: Any) -> None:
    """Restore an entry to its value before a change."""
    if value is _ABSENT:
        target.pop(key, None)
    else:
        target[key] = value


def _entry(key: Any, value: Any) -> tuple[dict[str, Any], int]:
    """Return an entry of a page, and about its length in bytes."""
    try:
        raw = msgspec.json.encode([key, value])
    except (TypeError, ValueError, OverflowError, RecursionError):
        raw = b""
    if raw and len(raw) <= _VALUE_BYTES:
        return {"key": key, "value": value}, len(raw)
    text = repr(value)[:_REPR_LENGTH]
    key_text = repr(key)
    shown_key = key
    if len(key_text) > _REPR_LENGTH or not isinstance(key, str | int | float | bool | None):
        shown_key = key_text[:_REPR_LENGTH]
    entry = {"key": shown_key, "value": None, "shown": text}
    return entry, len(text) + len(repr(shown_key))
