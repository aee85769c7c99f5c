"""A map with a bound."""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedMap(dict[K, V]):
    """A map of at most ``max_size`` entries: a new one replaces the oldest."""

    def __init__(self, max_size: int) -> None:
        super().__init__()
        self.max_size: int = max_size

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.max_size and key not in self:
            del self[next(iter(self))]
        super().__setitem__(key, value)
