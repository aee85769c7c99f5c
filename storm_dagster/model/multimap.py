"""A map that keeps several values for a key."""

from collections.abc import Iterable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def multimap(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Key -> its values, both in the order in which they come."""
    values_of_key: dict[K, list[V]] = {}
    for key, value in pairs:
        values_of_key.setdefault(key, []).append(value)
    return values_of_key
