"""Load-aware shuffle."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.dataplane.load_aware import LoadAwareShuffle, smooth_turns


def test_without_loads_it_goes_strictly_in_turn() -> None:
    shuffle = LoadAwareShuffle("abc", offset=1)
    assert "".join(shuffle.choose([]) for _ in range(7)) == "bcabcab"
    shuffle.refresh([0.01, 0.02, 0.0])
    assert Counter(shuffle.choose([]) for _ in range(300)) == Counter(a=100, b=100, c=100)


def test_a_busy_target_is_left_alone_at_once_and_comes_back_slowly() -> None:
    shuffle = LoadAwareShuffle("ab")
    shares = []
    for _ in range(10):
        shuffle.refresh([1.0, 0.0])
        shares.append(Counter(shuffle.choose([]) for _ in range(100))["a"])
    assert shares == sorted(shares, reverse=True) and shares[-1] == 0
    shuffle.refresh([0.0, 0.0])
    assert 0 <= Counter(shuffle.choose([]) for _ in range(100))["a"] <= 1
    for _ in range(100):
        shuffle.refresh([0.0, 0.0])
    assert Counter(shuffle.choose([]) for _ in range(100))["a"] == 50


def test_targets_that_are_busy_in_turn_share_evenly() -> None:
    shuffle = LoadAwareShuffle("ab")
    for look in range(200):
        shuffle.refresh([1.0, 0.5] if look % 2 else [0.5, 1.0])
        assert min(Counter(shuffle.choose([]) for _ in range(100)).values()) >= 45


@given(
    st.tuples(
        st.lists(st.integers(0, 100), max_size=4),
        st.integers(1, 100),
        st.lists(st.integers(0, 100), max_size=3),
    ).map(lambda drawn: [*drawn[0], drawn[1], *drawn[2]])
)
def test_turns_are_spread_by_weight(weights: list[int]) -> None:
    total = sum(weights)
    turns = list(smooth_turns(weights, total))
    assert Counter(turns) == Counter(
        {index: weight for index, weight in enumerate(weights) if weight}
    )
    for index, weight in enumerate(weights):
        for until in range(1, total + 1):
            assert abs(turns[:until].count(index) - until * weight / total) < len(weights)


@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), max_size=60))
def test_somebody_always_gets_the_tuple(rounds: list[list[float]]) -> None:
    shuffle = LoadAwareShuffle([1, 2, 3])
    for loads in rounds:
        shuffle.refresh(loads)
        assert shuffle.choose([]) in (1, 2, 3)
        assert max(shuffle.weights) == 100 and all(0 <= weight <= 100 for weight in shuffle.weights)
