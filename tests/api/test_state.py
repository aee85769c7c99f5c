"""Stateful bolts: checkpoints, replays, other numbers of tasks."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.api import (
    BatchingBolt,
    Bolt,
    Grouping,
    StatefulBolt,
    Topology,
    Tuple,
    TupleWindow,
    Window,
    WindowedBolt,
)
from storm_dagster.core.dataplane.keyed_state import Contents
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.groupings import stable_hash
from storm_dagster.model.records import StateHome
from storm_dagster.testing.topology_harness import HarnessResult, TopologyHarness
from storm_dagster.worker.state import driver as stateful
from storm_dagster.worker.state.log import StateLog
from storm_dagster.worker.state.storage import marker_path
from storm_rigs.components import Words
from storm_rigs.worker.first_error import first_error

WORDS = [f"word{n}" for n in range(40)]


class Count(StatefulBolt):
    outputs = ["word", "count"]

    def process(self, tup: Tuple) -> None:
        word = tup.values[0]
        self.state[word] = self.state.get(word, 0) + 1
        if word == "poison":
            raise ValueError("after the state was changed")
        self.emit([word, self.state[word]])


def counting(par: int, bolt: type[Bolt] = Count, grouping: Any = None) -> type[Topology]:
    class Counting(Topology):
        name = "counting"
        words = Words.spec()
        count = bolt.spec(inputs={words: grouping or Grouping.fields("word")}, par=par)

    return Counting


def run(
    tmp_path: Path, par: int, words: list[str], bolt: type[Bolt] = Count, **options: Any
) -> tuple[HarnessResult, list[dict[Any, Any]]]:
    """(result, the state of each task) after these words."""
    with TopologyHarness(
        counting(par, bolt, options.pop("grouping", None)),
        {"words": [[word] for word in words]},
        state_dir=tmp_path,
        **options,
    ) as harness:
        return harness.run(), [dict(task.state.items()) for task in harness.tasks("count")]


def test_state_survives_and_is_divided_over_other_numbers_of_tasks(tmp_path: Path) -> None:
    total: Counter[str] = Counter()
    for par in (2, 3, 3, 1, 4):
        result, states = run(tmp_path, par, WORDS)
        assert sorted(result.acked["words"]) == list(range(len(WORDS)))
        total.update(WORDS)
        together: Counter[str] = Counter()
        for index, state in enumerate(states):
            assert all(stable_hash(word) % par == index for word in state), (
                "each key is where its tuples go"
            )
            together.update(state)
        assert together == total
    folder = tmp_path / "counting" / "count.state"
    assert [path.name for path in folder.glob("*.json")] == ["000004.json"], (
        "earlier divisions are removed"
    )
    assert len(list(folder.glob("000004/*.log"))) == 4


def test_what_a_tuple_that_fails_did_to_the_state_is_taken_back(tmp_path: Path) -> None:
    result, states = run(tmp_path, 1, ["a", "poison", "a"])
    assert states == [{"a": 2}]
    assert result.failed["words"] == [1] and sorted(result.acked["words"]) == [0, 2]


def test_a_tuple_is_acked_only_after_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No checkpoint of its own accord, however slow this machine is.
    monkeypatch.setattr(stateful, "_PAUSE_SECS", 3600.0)
    with TopologyHarness(counting(1), {"words": [["a"], ["b"]]}, state_dir=tmp_path) as harness:
        driver = next(
            one for one in harness.engine.runners.values() if one.component == "count"
        ).state
        while driver is None or not driver.pending_acks:
            harness.engine.run(harness.shared.clock())
            driver = next(
                one for one in harness.engine.runners.values() if one.component == "count"
            ).state
        assert harness.tasks("words")[0].acked == []
        # The process dies here: what is on disk is what the next one finds.
        kept = tmp_path / "kept"
        _copy(tmp_path / "counting", kept / "counting")
        monkeypatch.undo()
        assert sorted(harness.run().acked["words"]) == [0, 1]
    assert run(kept, 1, [])[1] == [{}]
    assert run(tmp_path, 1, [])[1] == [{"a": 1, "b": 1}]


def _copy(source: Path, target: Path) -> None:
    import shutil

    shutil.copytree(source, target)


def test_a_checkpoint_cut_short_by_a_crash_does_not_count(tmp_path: Path) -> None:
    run(tmp_path, 1, ["a", "a"])
    with TopologyHarness(counting(1), {"words": [["b"]]}, state_dir=tmp_path) as harness:
        harness.run()
        (log,) = (tmp_path / "counting" / "count.state").glob("*/*.log")
        whole = log.read_bytes()
    kept = tmp_path / "kept"
    _copy(tmp_path / "counting", kept / "counting")
    (log,) = (kept / "counting" / "count.state").glob("*/*.log")
    log.write_bytes(whole[:-3])
    assert run(kept, 1, [])[1] == [{"a": 2}]


def test_damaged_state_is_reported_and_never_guessed(tmp_path: Path) -> None:
    run(tmp_path, 1, ["a", "a"])
    with TopologyHarness(counting(1), {"words": [["b"]]}, state_dir=tmp_path) as harness:
        harness.run()
    (log,) = (tmp_path / "counting" / "count.state").glob("*/*.log")
    raw = bytearray(log.read_bytes())
    raw[12] ^= 0xFF
    log.write_bytes(bytes(raw))
    with TopologyHarness(counting(1), {"words": []}, state_dir=tmp_path) as harness:
        assert "is damaged at byte 0" in str(first_error(harness)[1])


class Once(Count):
    message_id = "word"
    again: list[str] = []

    def process_again(self, tup: Tuple) -> None:
        self.again.append(tup.values[0])


def test_a_message_that_comes_again_is_not_applied_twice(tmp_path: Path) -> None:
    Once.again = []
    assert run(tmp_path, 2, ["a", "b", "a"], Once)[1] in (
        [{"a": 1}, {"b": 1}],
        [{"b": 1}, {"a": 1}],
        [{"a": 1, "b": 1}, {}],
        [{}, {"a": 1, "b": 1}],
    )
    assert Once.again == ["a"]
    result, states = run(tmp_path, 3, ["a", "b", "c"], Once)
    assert Counter(dict(item for state in states for item in state.items())) == Counter("abc")
    assert sorted(Once.again) == ["a", "a", "b"], "the ids moved with their keys"
    assert sorted(result.acked["words"]) == [0, 1, 2]


class AcksItself(Count):
    message_id = "word"
    auto_ack = False

    def process(self, tup: Tuple) -> None:
        super().process(tup)
        self.ack(tup)


def test_a_message_that_was_applied_is_acked_when_it_comes_again(tmp_path: Path) -> None:
    """Also by a bolt that acks by itself: ``process`` does not see it."""
    with TopologyHarness(
        counting(1, AcksItself), {"words": [["a"]]}, state_dir=tmp_path, simulated=True
    ) as harness:
        harness.advance(5)
        harness.give("words", ["a"])
        harness.advance(5)
        result = harness.run()
        assert sorted(result.acked["words"]) == [0, 1] and result.failed.get("words", []) == []


class Gathers(StatefulBolt, BatchingBolt):
    outputs = ["word", "count"]
    message_id = "word"
    config = {"topology.tick.tuple.freq.secs": 5}

    def group_key(self, tup: Tuple) -> Any:
        return tup.values[0]

    def process_batch(self, key: Any, tups: list[Tuple]) -> None:
        self.state[key] = self.state.get(key, 0) + len(tups)


class GathersInOne(BatchingBolt, StatefulBolt):
    """The classes the other way round, and one batch of all words."""

    outputs = ["word", "count"]
    message_id = "word"
    config = {"topology.tick.tuple.freq.secs": 5}

    def process_batch(self, key: Any, tups: list[Tuple]) -> None:
        words = [tup.values[0] for tup in tups]
        assert words == sorted(words), "in the order in which they came"
        for word in words:
            self.state[word] = self.state.get(word, 0) + 1


@pytest.mark.parametrize("bolt", [Gathers, GathersInOne])
def test_copies_in_one_batch_are_applied_once_and_acked_together(
    tmp_path: Path, bolt: type[Bolt]
) -> None:
    """A copy may come while the first one is still gathered."""
    words = [[word] for word in ("a", "b", "a", "c", "a")]
    with TopologyHarness(
        counting(1, bolt), {"words": words}, state_dir=tmp_path, simulated=True
    ) as harness:
        harness.advance(12)
        harness.give("words", ["a"])
        harness.advance(12)
        result = harness.run()
        assert dict(harness.tasks("count")[0].state.items()) == {"a": 1, "b": 1, "c": 1}
        assert sorted(set(result.acked["words"])) == [0, 1, 2, 3, 4, 5]


class FailsOne(GathersInOne):
    """Fails a word of its first batch, and counts the others."""

    def process_batch(self, key: Any, tups: list[Tuple]) -> None:
        for tup in tups:
            if tup.values[0] == "b" and "seen" not in self.state:
                self.state["seen"] = 1
                self.fail(tup)
            else:
                self.state[tup.values[0]] = self.state.get(tup.values[0], 0) + 1


def test_what_a_batch_fails_is_not_applied_nor_are_its_copies(tmp_path: Path) -> None:
    words = [[word] for word in ("a", "b", "b")]
    with TopologyHarness(
        counting(1, FailsOne), {"words": words}, state_dir=tmp_path, simulated=True
    ) as harness:
        harness.advance(12)
        harness.give("words", ["b"])
        harness.advance(12)
        result = harness.run()
        assert dict(harness.tasks("count")[0].state.items()) == {"seen": 1, "a": 1, "b": 1}
        assert (sorted(result.failed["words"]), sorted(result.acked["words"])) == ([1, 2], [0, 3])


def test_ids_are_forgotten_after_a_while(tmp_path: Path) -> None:
    conf = {"topology.message.timeout.secs": 5}
    with TopologyHarness(
        counting(1, Once), {"words": [["a"]]}, state_dir=tmp_path, simulated=True, conf=conf
    ) as harness:
        harness.advance(19)
        harness.give("words", ["a"])
        harness.advance(1)
        assert dict(harness.tasks("count")[0].state.items()) == {"a": 1}
        harness.advance(41)
        harness.give("words", ["a"])
        harness.advance(1)
        assert dict(harness.tasks("count")[0].state.items()) == {"a": 2}


class Merged(Count):
    def merge_states(self, key: Any, values: list[Any]) -> Any:
        return sum(values)


def test_states_of_tasks_of_their_own_are_merged(tmp_path: Path) -> None:
    _, states = run(tmp_path, 4, ["a"] * 8, Merged, grouping=Grouping.SHUFFLE)
    assert states == [{"a": 2}] * 4
    assert run(tmp_path, 2, [], Merged, grouping=Grouping.SHUFFLE)[1] == [{"a": 4}] * 2
    assert run(tmp_path, 3, [], Merged, grouping=Grouping.SHUFFLE)[1] == [{"a": 4}, {"a": 4}, {}]
    with TopologyHarness(
        counting(1, Count, Grouping.SHUFFLE), {"words": []}, state_dir=tmp_path
    ) as harness:
        assert "define merge_states" in str(first_error(harness)[1])


class WrongKey(StatefulBolt):
    def process(self, tup: Tuple) -> None:
        self.state["total"] = self.state.get("total", 0) + 1


class Unsaveable(StatefulBolt):
    def process(self, tup: Tuple) -> None:
        self.state[tup.values[0]] = object()


def test_foreign_keys_and_values_that_cannot_be_saved_fail_their_tuples(
    tmp_path: Path,
) -> None:
    result, _ = run(tmp_path / "one", 2, WORDS, WrongKey)
    assert result.failed["words"] and any(
        "use the value that the input is grouped by" in str(error) for _, error in result.errors
    )
    result, _ = run(tmp_path / "two", 1, ["a"], Unsaveable)
    assert result.failed["words"] == [0] and "cannot be saved" in str(result.errors[0][1])


class Decays(Count):
    config = {"topology.tick.tuple.freq.secs": 1}

    def process_tick(self, tup: Tuple) -> None:
        for word in self.state:
            self.state[word] = self.state[word] + 1


def test_state_that_only_ticks_change_does_not_grow(tmp_path: Path) -> None:
    words = {"words": [[word] for word in WORDS]}
    with TopologyHarness(counting(1, Decays), words, state_dir=tmp_path, simulated=True) as harness:
        harness.advance(10)
        state = harness.tasks("count")[0].state
        assert state["word1"] == 11 and len(state._journal) <= len(WORDS)


class Totals(StatefulBolt, WindowedBolt):
    window = Window.tumbling(count=3)
    outputs = ["total"]

    def process_window(self, window: TupleWindow) -> None:
        self.state["total"] = self.state.get("total", 0) + len(window)
        self.emit([self.state["total"]])


def test_a_window_and_its_state_are_acked_together(tmp_path: Path) -> None:
    result, states = run(tmp_path, 1, ["a", "b", "c", "d"], Totals, grouping=Grouping.GLOBAL)
    assert states == [{"total": 3}] and result.values("count") == [[3]]
    assert sorted(result.acked["words"]) == [0, 1, 2, 3]
    result, states = run(tmp_path, 1, ["e", "f"], Totals, grouping=Grouping.GLOBAL)
    assert states == [{"total": 6}] and result.values("count") == [[6]], "the fourth one was held"


class Blocking(Count):
    blocking = True


def test_a_stateful_bolt_that_blocks(tmp_path: Path) -> None:
    result, states = run(tmp_path, 2, WORDS, Blocking)
    assert sum((Counter(state) for state in states), Counter()) == Counter(WORDS)
    assert sorted(result.acked["words"]) == list(range(len(WORDS)))


def test_a_failed_checkpoint_fails_its_tuples_and_restarts_the_task(
    tmp_path: Path,
) -> None:
    with TopologyHarness(counting(1), {"words": [["a"]]}, state_dir=tmp_path, replays=5) as harness:
        harness.run()
        driver = next(
            one for one in harness.engine.runners.values() if one.component == "count"
        ).state
        assert driver is not None
        # As if a worker with a newer assignment had redistributed the tasks.
        folder = tmp_path / "counting" / "count.state"
        (folder / "000002.json").write_text('{"tasks": 1, "by_key": true, "stamp": [0, 0]}')
        harness.give("words", ["a"])
        result = harness.run()
        assert 1 in result.failed["words"] and sorted(set(result.acked["words"])) == [0, 1]
        assert dict(harness.tasks("count")[0].state.items()) == {"a": 2}
        assert any("divided over another number" in str(error) for _, error in result.errors)


class AsyncState(StatefulBolt):
    async def process(self, tup: Tuple) -> None:
        pass


def test_async_state_and_ids_without_fields_grouping_are_refused(tmp_path: Path) -> None:
    for bolt, grouping, words in (
        (AsyncState, None, "async process"),
        (Once, Grouping.SHUFFLE, "not grouped by fields"),
    ):
        with TopologyHarness(
            counting(2, bolt, grouping), {"words": []}, state_dir=tmp_path
        ) as harness:
            assert isinstance(first_error(harness)[1], InvalidTopology) and words in str(
                harness.errors[0][1]
            )


class Remembers(Bolt):
    """Uses the store of its task, which nobody can know before."""

    def process(self, tup: Tuple) -> None:
        self.context.state.save({"last": tup.values[0]})


class Pairs(WindowedBolt):
    """Its state is only what its windows hold."""

    window = Window.tumbling(count=100)
    outputs = ["words"]

    def process_window(self, window: TupleWindow) -> None:
        self.emit([len(window)])


@pytest.mark.parametrize("bolt", [Count, Blocking, Remembers, Pairs])
def test_state_that_would_stay_behind_on_its_host_is_refused(
    bolt: type[Bolt], tmp_path: Path
) -> None:
    with TopologyHarness(
        counting(1, bolt), {"words": [["a"]]}, state_dir=tmp_path, simulated=True
    ) as harness:
        # The file of the other host is not here.
        storage = harness.shared.storage
        storage.hosts, storage.home = frozenset({"alpha", "beta"}), StateHome(marker="m1")
        with contextlib.suppress(TimeoutError):
            assert harness.run(timeout=0.5).failed["words"] == [0]
        text = str(first_error(harness)[1])
        assert "task " in text and "(count)" in text and "alpha, beta" in text
        assert "topology.state.dir" in text and "topology.state.local: true" in text
        if bolt is Blocking:
            return  # Its checkpoints wait for real time.
        marker_path(tmp_path, "counting", "m1").parent.mkdir(exist_ok=True)
        marker_path(tmp_path, "counting", "m1").touch()
        harness.advance(3)
        harness.give("words", ["b"])
        harness.advance(1)
        assert harness.tasks("words")[0].acked[-1] in (0, 1)


def test_state_on_each_host_alone_is_possible_where_it_is_wanted(tmp_path: Path) -> None:
    local = {"topology.state.local": True}
    for bolt in (Count, Remembers):
        topology = counting(1, bolt)
        with TopologyHarness(
            topology, {"words": [["a"]]}, state_dir=tmp_path / bolt.__name__, conf=local
        ) as harness:
            harness.shared.storage.hosts = frozenset({"alpha", "beta"})
            assert harness.run().acked["words"] == [0] and not harness.errors


@pytest.mark.parametrize("bolt", [Count, Remembers, Pairs])
def test_state_older_than_acknowledged_is_refused_or_taken_with_a_warning(
    bolt: type[Bolt], tmp_path: Path
) -> None:
    """A task went to a storage and came back, after it was open elsewhere."""
    topology, given = counting(1, bolt), {"words": [["a"]]}
    with TopologyHarness(topology, given, state_dir=tmp_path) as harness:
        harness.run()
        task = str(
            next(one.task_id for one in harness.engine.runners.values() if one.component == "count")
        )
    known = StateHome(marker="", openings={"count/0": (1, 7), task: (0, 7)})
    with TopologyHarness(topology, given, state_dir=tmp_path, simulated=True) as harness:
        harness.shared.storage.home = known
        text = str(first_error(harness)[1])
        assert (
            f"task {task} (count)" in text and "opening 1" in text and "opening 7 is known" in text
        )
        assert "topology.state.dir" in text and "topology.state.local: true" in text
    conf = {"topology.state.local": True}
    for before in (7, 8):
        with TopologyHarness(topology, given, state_dir=tmp_path, conf=conf) as harness:
            harness.shared.storage.home = known
            harness.shared.storage.report = harness.shared.report
            assert harness.run().acked["words"] == [0]
            # Now it is the newest: its number goes on from the one that was known.
            assert bool(harness.errors) == (before == 7)
            assert not harness.errors or "older state" in str(harness.errors[0][1])
    with TopologyHarness(topology, given, state_dir=tmp_path) as harness:
        harness.shared.storage.home = StateHome(
            marker="", openings={"count/0": (3, 1), task: (0, 99)}
        )
        assert "is known" in str(first_error(harness)[1]), "nor one of an older division"


@pytest.mark.parametrize("bolt", [Count, Blocking])
def test_a_tuple_of_another_task_is_passed_on(bolt: type[Bolt], tmp_path: Path) -> None:
    """While a rebalance changes the number of tasks, senders and readers know different ones for a
    moment.
    """
    with TopologyHarness(counting(3, bolt), {"words": []}, state_dir=tmp_path) as harness:
        harness.run()
        counts = [one for one in harness.engine.runners.values() if one.component == "count"]
        for word in WORDS:
            values = [word]
            # Untracked, into the queue that a sender with one task would have taken.
            counts[0].queue.append(Tuple(1, "words", "default", 1, values, None))
        route = next(
            one for one in harness.engine.runners.values() if one.component == "words"
        ).routes["default"]
        at = next(
            at
            for at, choose in enumerate(route.fans)
            if choose(["a"]).task in {one.task_id for one in counts}
        )
        links = {link.task: link for link in map(route.fans[at], ([word] for word in WORDS))}
        assert len(links) == 3
        route.fans[at] = lambda values: links[counts[1].task_id]
        harness.give("words", *([word] for word in WORDS))
        result = harness.run()
        assert (
            sorted(result.acked["words"]) == list(range(len(WORDS))) and not result.failed["words"]
        )
        assert not result.errors
        together: Counter[str] = Counter()
        for task in harness.tasks("count"):
            together.update(dict(task.state.items()))
        assert together == Counter(WORDS * 2)


def test_a_tuple_of_another_task_enters_the_windows_of_that_task(tmp_path: Path) -> None:
    with TopologyHarness(counting(3, Pairs), {"words": []}, state_dir=tmp_path) as harness:
        harness.run()
        counts = [one for one in harness.engine.runners.values() if one.component == "count"]
        counts[0].queue += [Tuple(1, "words", "default", 1, [word], None) for word in WORDS]
        assert not harness.run().errors
        held: Counter[str] = Counter()
        for index, runner in enumerate(counts):
            assert runner.state is not None
            contents = runner.state.log.contents
            words = [entry.item[3][0] for entry in contents.entries()]
            assert words and all(stable_hash(word) % 3 == index for word in words)
            assert all(owner % 3 == index for owner, _ in contents.held.values()), (
                "as another division needs it"
            )
            held.update(words)
        assert held == Counter(WORDS)


def test_windows_are_read_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    entries = Contents.entries

    def seen(self: Contents) -> Any:
        threads.append(threading.current_thread().name)
        return entries(self)

    monkeypatch.setattr(Contents, "entries", seen)
    for start in (0, 60):
        words = [[f"w{n}"] for n in range(start, start + 60)]
        with TopologyHarness(counting(1, Pairs), {"words": words}, state_dir=tmp_path) as harness:
            result = harness.run()
            assert len(result.acked["words"]) == 60
    assert result.values("count") == [[100]]
    assert len(threads) == 2 and all(name.startswith("state-") for name in threads)


def test_tuples_wait_for_state_that_is_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, 1, ["a"])
    read, may_read = threading.Event(), threading.Event()
    load = StateLog._load

    def slow(self: StateLog, number: int, index: int) -> Contents:
        read.set()
        assert may_read.wait(30)
        return load(self, number, index)

    monkeypatch.setattr(StateLog, "_load", slow)
    with TopologyHarness(counting(1), {"words": [["a"]]}, state_dir=tmp_path) as harness:
        harness.engine.run(harness.shared.clock())
        assert read.wait(30)
        for _ in range(100):  # The loop goes on.
            harness.engine.run(harness.shared.clock())
        assert harness.tasks("count") == [None] and not harness.tasks("words")[0].acked
        may_read.set()
        harness.run()
        assert dict(harness.tasks("count")[0].state.items()) == {"a": 2}
    # Closed in the middle: the file that it has not written is not written later either.
    may_read.clear()
    read.clear()
    harness = TopologyHarness(counting(1), {"words": []}, state_dir=tmp_path)
    harness.engine.run(harness.shared.clock())
    assert read.wait(30)
    before = sorted(tmp_path.rglob("*.log"))
    harness.close()
    may_read.set()
    for thread in threading.enumerate():
        if thread.name.startswith("state-"):
            thread.join(30)
    assert sorted(tmp_path.rglob("*.log")) == before


def test_a_worker_that_lost_its_task_cannot_change_its_state(tmp_path: Path) -> None:
    from storm_dagster.core.dataplane.keyed_state import Checkpoint, Partitioning, encode_value
    from storm_dagster.model.errors import Unavailable

    owns = [True]
    whole = Partitioning(1, True)

    def opened(division: Partitioning, version: int, mine: bool = True) -> StateLog:
        owner = (lambda: owns[0]) if not mine else (lambda: True)
        return StateLog(tmp_path, division, 0, (0, version), lambda key, values: values[0], owner)

    def record(value: int) -> Checkpoint:
        return Checkpoint(values=[("a", encode_value(value, "a"))])

    old = opened(whole, 1, mine=False)
    old.append(record(1))
    owns[0] = False
    new = opened(whole, 2)
    assert new.contents.values == {"a": 1}
    new.append(record(5))
    with pytest.raises(Unavailable):
        old.append(record(2))
    # Even if it believed itself the owner again: what it appends to is no longer there.
    owns[0] = True
    with pytest.raises(Unavailable):
        old.append(record(3))
    assert opened(whole, 3).contents.values == {"a": 5}
    opened(Partitioning(3, True), 4)
    with pytest.raises(Unavailable, match="newer assignment"):
        opened(Partitioning(2, True), 3)
    with pytest.raises(Unavailable, match="another number of tasks"):
        new.append(record(6))


def test_a_log_that_cannot_be_opened_again_writes_into_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from storm_dagster.core.dataplane.keyed_state import Checkpoint, Partitioning, encode_value

    folder = tmp_path / "state"
    log = StateLog(
        folder, Partitioning(1, True), 0, (1, 1), lambda key, values: values[0], lambda: True
    )
    record = Checkpoint(values=[("k", encode_value("x" * 100_000, "k"))])
    for _ in range(15):
        log.append(record)
    log.compact()
    assert log._compaction is not None
    log._compaction.thread.join()
    real = os.open

    def refused(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if str(path).endswith(".log") and flags & os.O_APPEND:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, flags, *rest, **options)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="Too many open files"):
        patched.setattr(os, "open", refused)
        log.compact()
    with (tmp_path / "another").open("wb") as another:
        with pytest.raises(OSError):
            log.append(record)
        assert os.fstat(another.fileno()).st_size == 0
    again = StateLog(
        folder, Partitioning(1, True), 0, (1, 2), lambda key, values: values[0], lambda: True
    )
    assert list(again.contents.values) == ["k"]


def test_long_logs_are_rewritten(tmp_path: Path) -> None:
    from storm_dagster.core.dataplane.keyed_state import Checkpoint, Partitioning, encode_value

    def opened() -> StateLog:
        return StateLog(
            tmp_path, Partitioning(1, True), 0, (0, 0), lambda key, values: values[0], lambda: True
        )

    log = opened()
    for number in range(60):
        text = f"{number}" * 50_000
        log.contents.values["a"] = text
        log.append(Checkpoint(values=[("a", encode_value(text, "a"))]))
        log.compact()
        if log._compaction is not None:
            log._compaction.thread.join()
    (path,) = tmp_path.glob("*/*.log")
    assert path.stat().st_size < 2 << 20
    assert opened().contents.values == {"a": "59" * 50_000}


class BlockingCount(Count):
    blocking = True


@pytest.mark.parametrize("blocking", [False, True])
def test_a_harness_closes_after_what_is_being_opened_in_its_folder(
    blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, held, opened = threading.Event(), threading.Event(), dict[int, Path]()
    enter = StateLog._enter_division

    def held_up(log: StateLog, stamp: Any) -> int:
        begun.set()
        assert held.wait(60)
        number = enter(log, stamp)
        # Again by itself, when both create the folder at once.
        opened[log.index] = log.folder
        return number

    monkeypatch.setattr(StateLog, "_enter_division", held_up)
    harness = TopologyHarness(counting(2, BlockingCount if blocking else Count), {"words": []})
    with contextlib.suppress(TimeoutError):
        harness.run(timeout=0.05)
    assert begun.wait(60)
    threading.Timer(0.2, held.set).start()
    harness.close()
    assert len(opened) == 2
    assert not any(folder.exists() for folder in opened.values())
