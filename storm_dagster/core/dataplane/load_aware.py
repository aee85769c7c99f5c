"""Load-aware shuffle: in turn, but less often to tasks that cannot keep up.

Pure. The rule is Storm's (LoadAwareShuffleGrouping): with every refresh of the loads, a target
whose load is within 5 % of the least one gains a little weight, any other loses much, so that a
busy task is left alone at once and comes back slowly. Other than there, the heaviest target always
has the full weight: where targets are the busy one in turn, all weights would sink together, and
one step near nought send everything to a single task.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_MOST = 100
_GAIN, _LOSS = 1, 10
_ALIKE = 0.05


def smooth_turns(weights: Sequence[int], length: int) -> Iterator[int]:
    """``length`` indices in which each appears by its weight, spread as evenly as can be."""
    total = sum(weights)
    current = [0] * len(weights)
    for _ in range(length):
        best = 0
        for index, weight in enumerate(weights):
            current[index] += weight
            if current[index] > current[best]:
                best = index
        current[best] -= total
        yield best


class LoadAwareShuffle(Generic[T]):
    """Chooser among targets; without loads strictly in turn, from ``offset`` on."""

    def __init__(self, targets: Sequence[T], offset: int = 0) -> None:
        start = offset % len(targets)
        self.targets: tuple[T, ...] = tuple(targets[start:]) + tuple(targets[:start])
        self.weights = [_MOST] * len(self.targets)
        turn = cycle(self.targets).__next__

        def choose(values: Sequence[Any]) -> T:
            return turn()

        def restart(order: Sequence[T]) -> None:
            nonlocal turn
            turn = cycle(order).__next__

        self.choose: Callable[[Sequence[Any]], T] = choose
        self._restart = restart

    def refresh(self, loads: Sequence[float]) -> None:
        """Use new loads (0 to 1, in the order of :attr:`targets`)."""
        least = min(loads)
        weights = [
            min(_MOST, weight + _GAIN) if load <= least + _ALIKE else max(0, weight - _LOSS)
            for weight, load in zip(self.weights, loads, strict=True)
        ]
        lift = _MOST - max(weights)
        weights = [weight + lift for weight in weights]
        if weights == self.weights:
            return
        self.weights: list[int] = weights
        if len(set(weights)) == 1:
            self._restart(self.targets)
        else:
            self._restart(
                [
                    self.targets[index]
                    for index in smooth_turns(weights, max(_MOST, 2 * len(weights)))
                ]
            )
