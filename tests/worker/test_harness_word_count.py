"""Components, groupings, acking and replay, through the harness that users get."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from storm_dagster.api import (
    BatchingBolt,
    Bolt,
    Grouping,
    ReliableSpout,
    Spout,
    Stream,
    Topology,
    Tuple,
)
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.testing.topology_harness import TopologyHarness, run_topology
from storm_dagster.worker.tasks.spouts import SpoutBase
from storm_rigs.components import CollectBolt, CountBolt, RejectBolt, Sentences


class Split(Bolt):
    outputs = ["word"]

    def process(self, tup: Tuple) -> None:
        for word in tup.values[0].split():
            self.emit([word])


class WordCount(Topology):
    sentences = Sentences.spec()
    split = Split.spec(inputs=[sentences], par=2)
    count = CountBolt.spec(inputs={split: Grouping.fields("word")}, par=3)


GIVEN = {"sentences": [["a b a"], ["b c"], ["a"]]}


def test_counts_and_acks_every_sentence() -> None:
    with TopologyHarness(WordCount, GIVEN) as harness:
        result = harness.run()
        total: Counter[str] = Counter()
        for bolt in harness.tasks("count"):
            assert not total.keys() & bolt.counts.keys(), "a word was counted by two tasks"
            total.update(bolt.counts)
    assert total == {"a": 3, "b": 2, "c": 1}
    assert sorted(result.acked["sentences"]) == [0, 1, 2]
    assert result.failed["sentences"] == []
    assert len(result.values("split")) == 6


def test_tuples_that_are_given_before_the_first_run_are_emitted_in_it() -> None:
    with TopologyHarness(WordCount, GIVEN) as harness:
        harness.give("sentences", ["c c"])
        result = harness.run()
        harness.give("sentences", ["d"])
        assert sorted(harness.run().acked["sentences"]) == [0, 1, 2, 3, 4]
    assert sorted(result.acked["sentences"]) == [0, 1, 2, 3]
    assert [tup.values for tup in result.tuples if tup.component == "sentences"][-1] == ["c c"]
    with TopologyHarness(WordCount) as harness:
        with pytest.raises(InvalidRequest, match="is the topology's own: name it in given"):
            harness.give("sentences", ["a"])
        with pytest.raises(InvalidRequest, match="no component 'nothing'"):
            harness.give("nothing", ["a"])


def test_two_runs_are_alike() -> None:
    first = run_topology(WordCount, GIVEN)
    second = run_topology(WordCount, GIVEN)
    assert [tup.values for tup in first.tuples] == [tup.values for tup in second.tuples]


def test_without_ackers_tuples_are_acked_at_once() -> None:
    result = run_topology(WordCount, GIVEN, conf={"topology.acker.executors": 0})
    assert sorted(result.acked["sentences"]) == [0, 1, 2]


class Repeats(Bolt):
    outputs = ["word"]

    def initialize(self, conf, context) -> None:
        self.times = conf.get("repeats.times", 2)

    def process(self, tup: Tuple) -> None:
        self.emit([tup.values[0] * self.times])


class Repeated(Topology):
    config = {"repeats.times": 3}
    sentences = Sentences.spec()
    repeats = Repeats.spec(inputs=[sentences])


def test_a_key_that_a_submission_drops_has_the_code_s_default() -> None:
    given = {"sentences": [["a"]]}
    assert run_topology(Repeated, given).values("repeats") == [["aaa"]]
    dropped = run_topology(Repeated, given, conf={"repeats.times": None})
    assert dropped.values("repeats") == [["aa"]]


class WithFailure(Topology):
    sentences = Sentences.spec()
    fragile = RejectBolt.spec(
        inputs=[sentences], outputs=["word"], args={"values": ["a"], "times": 1}
    )


def test_a_tuple_whose_bolt_raises_fails_and_is_replayed() -> None:
    result = run_topology(WithFailure, {"sentences": [["a"], ["b"]]}, replays=1)
    assert result.failed["sentences"] == [0]
    assert sorted(result.acked["sentences"]) == [0, 1]
    assert [type(error).__name__ for _, error in result.errors] == ["ValueError"]
    assert sorted(values[0] for values in result.values("fragile")) == ["a", "b"]


class Reliable(ReliableSpout):
    outputs = ["n"]

    def initialize(self, conf, context) -> None:
        self.n = 0

    def next_tuple(self) -> None:
        if self.n < 2:
            self.n += 1
            self.emit([self.n], tup_id=self.n)


class GivesUp(Topology):
    spout = Reliable.spec()
    bolt = RejectBolt.spec(inputs=[spout], args={"values": [1]})


def test_a_reliable_spout_gives_up_after_max_fails() -> None:
    with TopologyHarness(GivesUp) as harness:
        result = harness.run()
        spout = harness.tasks("spout")[0]
        assert len(result.errors) == 4
        assert not spout.unacked_tuples and not spout.failed_tuples


def test_trees_that_are_lost_again_and_again_fail_once_a_second() -> None:
    """A spout that gives up after three fails outlives a move that loses its replays."""
    failed: list[float] = []
    with TopologyHarness(GivesUp, simulated=True) as harness:
        (spout,) = [
            runner for runner in harness.engine.runners.values() if isinstance(runner, SpoutBase)
        ]
        for tenth in range(10, 36):
            spout.pending.entries[tenth] = ((1, "default", None), 0.0)
            spout.lost.append(tenth)
            spout.deliver_verdicts(tenth / 10, lambda acked, _, now=tenth / 10: failed.append(now))
    assert sorted({*failed}) == [1.0, 2.0, 3.0]
    assert len(spout.lost) == 5


def test_trees_that_time_out_are_noted_once_while_nobody_tells_their_spout() -> None:
    with TopologyHarness(GivesUp, simulated=True) as harness:
        (spout,) = [
            runner for runner in harness.engine.runners.values() if isinstance(runner, SpoutBase)
        ]
        spout.pending.add(7, (1, "default", None), 0.0)
        for _ in range(3):
            spout.on_clock(100.0)
        assert spout.failed == [7]


class Joins(Bolt):
    """Acks by hand, and anchors one tuple to two."""

    auto_ack = False
    auto_anchor = False
    outputs = ["pair"]

    def initialize(self, conf, context) -> None:
        self.kept: list[Tuple] = []

    def process(self, tup: Tuple) -> None:
        self.kept.append(tup)
        if len(self.kept) == 2:
            self.emit([[one.values[0] for one in self.kept]], anchors=self.kept)
            for one in self.kept:
                self.ack(one)
            self.kept = []


class JoinTopology(Topology):
    sentences = Sentences.spec()
    join = Joins.spec(inputs=[sentences])
    bad = RejectBolt.spec(inputs=[join])


def test_a_tuple_anchored_to_two_fails_both() -> None:
    result = run_topology(JoinTopology, {"sentences": [["a"], ["b"]]})
    assert sorted(result.failed["sentences"]) == [0, 1]
    assert result.acked["sentences"] == []


class Batches(BatchingBolt):
    outputs = ["size"]

    def process_batch(self, key, tups) -> None:
        if key == "bad":
            raise ValueError("bad batch")
        self.emit([len(tups)])

    def group_key(self, tup: Tuple) -> str:
        return tup.values[0]


class BatchTopology(Topology):
    sentences = Sentences.spec()
    batch = Batches.spec(inputs=[sentences])


def test_batches_are_acked_or_failed_as_one() -> None:
    given = {"sentences": [["x"], ["x"], ["bad"]]}
    result = run_topology(BatchTopology, given)
    assert result.acked["sentences"] == []
    result = run_topology(BatchTopology, given, ticks=["batch"])
    assert sorted(result.acked["sentences"]) == [0, 1]
    assert result.failed["sentences"] == [2]
    assert result.values("batch") == [[2]]


class Routes(Bolt):
    outputs = [Stream(["v"], "left"), Stream(["v"], "right", direct=True)]

    def initialize(self, conf, context) -> None:
        self.targets = context.component_tasks("right")

    def process(self, tup: Tuple) -> None:
        assert self.emit(tup.values, stream="left", need_task_ids=True) is not None
        self.emit(tup.values, stream="right", direct_task=self.targets[-1])


class Routing(Topology):
    sentences = Sentences.spec()
    route = Routes.spec(inputs=[sentences])
    left = CollectBolt.spec(inputs={route["left"]: Grouping.ALL}, par=2)
    right = CollectBolt.spec(inputs={route["right"]: Grouping.DIRECT}, par=2)
    only = CollectBolt.spec(inputs={route["left"]: Grouping.GLOBAL}, par=2)


def test_all_direct_and_global_groupings() -> None:
    with TopologyHarness(Routing, {"sentences": [["a"], ["b"]]}) as harness:
        result = harness.run()
        assert [bolt.received for bolt in harness.tasks("left")] == [[["a"], ["b"]], [["a"], ["b"]]]
        assert [bolt.received for bolt in harness.tasks("right")] == [[], [["a"], ["b"]]]
        assert [bolt.received for bolt in harness.tasks("only")] == [[["a"], ["b"]], []]
        reports = harness.engine.stats()
        route = next(one for one in reports.values() if one.component == "route")
        assert route.streams["emitted"] == {"left": 2, "right": 2}
        assert route.streams["executed"] == {"sentences:default": 2}
        # left: two copies, the global reader and the harness's recorder; right: one.
        assert route.stats["transferred"] == 2 * 4 + 2
    assert sorted(result.acked["sentences"]) == [0, 1]


class SavesCounts(Bolt):
    auto_ack = False

    def process(self, tup: Tuple) -> None:
        line, text = tup.values
        state = self.context.state
        if not state.applied(line):
            counts = Counter(text.split())
            state.save({word: state.get(word, 0) + n for word, n in counts.items()}, applied=[line])
        self.ack(tup)


class Lines(Spout):
    outputs = ["id", "text"]


class Saved(Topology):
    name = "saved"
    lines = Lines.spec()
    count = SavesCounts.spec(inputs=[lines])


def test_state_survives_and_counts_each_line_once(tmp_path: Path) -> None:
    given = {"lines": [[1, "a b"], [2, "a"]]}
    for _ in range(2):
        result = run_topology(Saved, given, state_dir=tmp_path)
        assert sorted(result.acked["lines"]) == [0, 1]
    with TopologyHarness(Saved, {"lines": []}, state_dir=tmp_path) as harness:
        harness.run()
        assert dict(harness.tasks("count")[0].context.state.items()) == {"a": 2, "b": 1}


@pytest.mark.parametrize("values", ["text", ["one", "two"], 3])
def test_wrong_values_are_errors_of_the_component(values: object) -> None:
    class_result = run_topology(WrongValues, {"sentences": [[values]]})
    assert class_result.failed["sentences"] == [0]
    assert "InvalidRequest" in [type(error).__name__ for _, error in class_result.errors]


class EmitsRaw(Bolt):
    outputs = ["v"]

    def process(self, tup: Tuple) -> None:
        self.emit(tup.values[0])


class WrongValues(Topology):
    sentences = Sentences.spec()
    raw = EmitsRaw.spec(inputs=[sentences])


class Consumes(BatchingBolt):
    """Empties the list that it gets, and raises the first time."""

    raised = False

    def process_batch(self, key: object, tups: list[Tuple]) -> None:
        while tups:
            tups.pop()
        if not self.raised:
            self.raised = True
            raise ValueError("at first")


class Consuming(Topology):
    sentences = Sentences.spec()
    consumes = Consumes.spec(inputs=[sentences])


def test_a_batch_that_empties_its_list_is_still_failed_and_acked() -> None:
    with TopologyHarness(
        Consuming, {"sentences": [["a"], ["b"]]}, replays=1, simulated=True
    ) as harness:
        harness.run()
        harness.tick("consumes")
        assert sorted(harness.run().failed["sentences"]) == [0, 1]
        harness.tick("consumes")
        result = harness.run()
        assert sorted(result.acked["sentences"]) == [0, 1]
        assert [str(error) for _, error in result.errors] == ["at first"]
