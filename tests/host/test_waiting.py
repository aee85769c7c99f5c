"""Waiting for a condition, and pauses that grow, in a time of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.host.waiting import Backoff, poll
from storm_dagster.testing.waiting import eventually

# Sums of binary fractions are exact, so that the tests can compare times.
SECONDS = st.integers(1, 4096).map(lambda units: units / 64)


class VirtualTime:
    """A clock that moves only while something sleeps or works."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.pauses.append(seconds)
        self.now += seconds


class Condition:
    """Becomes true at a moment, and takes some seconds for each answer."""

    def __init__(self, time: VirtualTime, true_after: float, takes: float = 0.0) -> None:
        self.time = time
        self.true_at = time.now + true_after
        self.takes = takes
        self.calls: list[float] = []

    def __call__(self) -> str:
        self.calls.append(self.time.now)
        is_true = self.time.now >= self.true_at
        self.time.now += self.takes
        return "yes" if is_true else ""


@given(true_after=SECONDS, timeout=SECONDS, pause=SECONDS, takes=st.just(0.0) | SECONDS)
def test_a_wait_ends_with_its_condition_or_its_time(
    true_after: float, timeout: float, pause: float, takes: float
) -> None:
    time = VirtualTime()
    began = time.now
    condition = Condition(time, true_after, takes)
    value = poll(condition, timeout=timeout, pause=pause, clock=time.clock, sleep=time.sleep)
    last_call = condition.calls[-1]
    # The condition is asked once more when the time is over, and not after that.
    assert (value == "yes") == (last_call >= condition.true_at)
    if not value:
        assert last_call >= began + timeout
    assert all(call < began + timeout for call in condition.calls[:-1])
    # It sleeps as it was asked to, and never beyond the deadline.
    assert all(slept <= pause for slept in time.pauses)
    assert all(call < condition.true_at for call in condition.calls[:-1])
    assert last_call <= max(began + timeout, condition.calls[0]) + takes


def test_a_condition_that_holds_already_is_not_waited_for() -> None:
    time = VirtualTime()
    found = poll(lambda: ["a value"], timeout=5.0, clock=time.clock, sleep=time.sleep)
    assert found == ["a value"]
    assert time.pauses == []


@pytest.mark.parametrize("timeout", [0.0, -3.0])
def test_a_condition_is_asked_once_when_there_is_no_time(timeout: float) -> None:
    time = VirtualTime()
    condition = Condition(time, true_after=1.0)
    assert poll(condition, timeout=timeout, clock=time.clock, sleep=time.sleep) == ""
    assert len(condition.calls) == 1
    assert time.pauses == []


def test_an_exception_of_the_condition_ends_the_wait() -> None:
    time = VirtualTime()

    def broken() -> bool:
        raise OSError("no such device")

    with pytest.raises(OSError, match="no such device"):
        poll(broken, timeout=5.0, clock=time.clock, sleep=time.sleep)
    assert time.pauses == []


def test_a_wait_takes_the_pauses_of_a_backoff() -> None:
    time = VirtualTime()
    condition = Condition(time, true_after=100.0)
    poll(condition, timeout=10.0, pause=Backoff(0.5, 4.0), clock=time.clock, sleep=time.sleep)
    assert time.pauses == [0.5, 1.0, 2.0, 4.0, 2.5]


@given(
    first=SECONDS, growth=SECONDS, factor=st.sampled_from([1.0, 1.5, 2.0]), count=st.integers(1, 40)
)
def test_pauses_grow_from_the_first_to_the_longest(
    first: float, growth: float, factor: float, count: int
) -> None:
    longest = first + growth
    backoff = Backoff(first, longest, factor=factor)
    pauses = [backoff.next_pause() for _ in range(count)]
    assert pauses == [pytest.approx(min(longest, first * factor**tries)) for tries in range(count)]
    backoff.reset()
    assert backoff.next_pause() == first


@pytest.mark.parametrize(
    ("first", "longest", "factor"), [(0.0, 1.0, 2.0), (2.0, 1.0, 2.0), (1.0, 2.0, 0.5)]
)
def test_pauses_that_cannot_grow_are_refused(first: float, longest: float, factor: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        Backoff(first, longest, factor=factor)


def test_a_test_waits_until_its_condition_holds() -> None:
    answers = iter([None, 0, "ready"])
    assert eventually(lambda: next(answers), timeout=30, interval=0.0) == "ready"


def test_a_test_counts_expected_exceptions_as_not_yet() -> None:
    answers = iter([KeyError("first"), KeyError("second")])

    def condition() -> str:
        for error in answers:
            raise error
        return "ready"

    assert eventually(condition, timeout=30, interval=0.0, ignore=(KeyError,)) == "ready"


def test_a_condition_that_never_holds_is_named_with_the_reason() -> None:
    def condition() -> str:
        raise LookupError("no nimbus leads")

    with pytest.raises(AssertionError, match=r"a leader did not come true .*no nimbus leads"):
        eventually(condition, timeout=0.0, what="a leader", ignore=(LookupError,))
