"""Load-aware shuffle: in turn, but less often to tasks that cannot keep up.

Pure. The rule is Storm's (LoadAwareShuffleGrouping). With every refresh of the loads, a target
whose load is within 5 % of the least one gains a little weight, any other loses much. A busy task
so gets few tuples at once, and its full share only slowly. One rule differs from Storm: the
heaviest target always has the full weight. If targets are the busy one in turn, all weights would
sink together, and one step near zero would send all tuples to a single task.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_MAX_WEIGHT = 100
"""Weight of the heaviest target, and the least number of turns in one round."""
_GAIN = 1
"""Weight that a target with little load gains at a refresh."""
_LOSS = 10
"""Weight that any other target loses at a refresh."""
_ALIKE = 0.05
"""Difference of loads that count as equal."""


def smooth_turns(weights: Sequence[int], length: int) -> Iterator[int]:
    """Yield ``length`` indices, each by its weight and spread as evenly as possible."""
    total = sum(weights)
    # Turns that each index is owed, in units of 1 / ``total``: the one that is owed most is next.
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
    """Chooser among targets; without loads in turn, from ``offset`` on.

    ``choose`` runs for every tuple and is measured (``benchmarks/dataplane.py``): it is a closure
    over an iterator.
    """

    def __init__(self, targets: Sequence[T], offset: int = 0) -> None:
        start = offset % len(targets)
        self.targets: tuple[T, ...] = tuple(targets[start:]) + tuple(targets[:start])
        """The targets in the order of turns."""
        self.weights = [_MAX_WEIGHT] * len(self.targets)
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
        weights: list[int] = []
        for weight, load in zip(self.weights, loads, strict=True):
            if load <= least + _ALIKE:
                weights.append(min(_MAX_WEIGHT, weight + _GAIN))
            else:
                weights.append(max(0, weight - _LOSS))
        # The heaviest target keeps the full weight.
        lift = _MAX_WEIGHT - max(weights)
        weights = [weight + lift for weight in weights]
        if weights == self.weights:
            # The present round continues, and does not begin again.
            return
        self.weights: list[int] = weights
        if len(set(weights)) == 1:
            self._restart(self.targets)
        else:
            length = max(_MAX_WEIGHT, 2 * len(weights))
            self._restart([self.targets[index] for index in smooth_turns(weights, length)])
