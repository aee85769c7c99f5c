"""Reports of bolts to Dagster, in the harness: the acks that wait for them, and the errors of wrong
ones.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from storm_dagster.api import Bolt, Spout, StatefulBolt, Topology, Tuple, Window, WindowedBolt
from storm_dagster.core.dataplane.event_outbox import FULL_EVENTS, MAX_TASK_EVENTS, ReportResponse
from storm_dagster.model.dagster_events import DagsterEvent, decode_event
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.names import AWAITED_METRIC
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually
from storm_dagster.worker.dataplane.events import ReportedEvent


class Hours(Spout):
    outputs = ["hour"]


class Landed(Bolt):
    """Reports the hours that are full; -1 is none."""

    def initialize(self, conf: Any, context: Any) -> None:
        self.dagster.observe("lake/clicks", description="a task began")

    def process(self, tup: Tuple) -> None:
        hour = tup.values[0]
        if hour >= 0:
            self.dagster.materialize(
                "lake/clicks", partition=f"2026-11-21-{hour:02}", metadata={"rows": hour}
            )

    def process_tick(self, tup: Tuple) -> None:
        self.dagster.check(
            ["lake", "clicks"], "on_time", passed=cast("bool", np.bool_(True)), severity="WARN"
        )


class Blocking(Landed):
    blocking = True


class Async(Landed):
    async def process(self, tup: Tuple) -> None:  # type: ignore[override]
        Landed.process(self, tup)


class Stateful(Landed, StatefulBolt):
    pass


KINDS = [Landed, Blocking, Async, Stateful]


def topology(bolt: type[Bolt]) -> type[Topology]:
    class Lake(Topology):
        hours = Hours.spec()
        landed = bolt.spec(inputs=[hours])

    return Lake


@pytest.mark.parametrize("bolt", KINDS)
def test_events_carry_what_was_given_and_go_in_order(bolt: type[Bolt], tmp_path: Path) -> None:
    with TopologyHarness(
        topology(bolt), {"hours": [[9], [-1], [10]]}, state_dir=tmp_path
    ) as harness:
        harness.run()
        harness.tick("landed")
        # A tick in a thread holds up no run.
        eventually(
            lambda: harness.run() and len(harness.dagster_events) == 4, what="the event of the tick"
        )
        result = harness.run()
        assert sorted(result.acked["hours"]) == [0, 1, 2] and result.errors == []
        began, *hours, check = harness.dagster_events
        assert (began.kind, began.description) == ("observation", "a task began")
        assert [(one.kind, one.asset, one.partition, one.metadata) for one in hours] == [
            ("materialization", "lake/clicks", "2026-11-21-09", {"rows": 9}),
            ("materialization", "lake/clicks", "2026-11-21-10", {"rows": 10}),
        ]
        assert (check.check, check.passed, check.severity) == ("on_time", True, "WARN")


@pytest.mark.parametrize("bolt", KINDS)
def test_without_nimbus_only_tuples_with_events_wait(bolt: type[Bolt], tmp_path: Path) -> None:
    conf = {"topology.message.timeout.secs": 3600}
    with TopologyHarness(
        topology(bolt), {"hours": [[-1]]}, conf=conf, simulated=True, state_dir=tmp_path
    ) as harness:
        harness.dagster_up = False
        harness.run()
        harness.give("hours", [9], [-1], [-1])
        result = harness.advance(10)
        assert sorted(result.acked["hours"]) == [0, 2, 3] and result.failed["hours"] == []
        assert harness.dagster_events == []
        assert ["wait to be taken" in str(error) for _, error in result.errors] == [True], (
            "said once, not each time"
        )
        harness.dagster_up = True
        result = harness.advance(20)
        assert sorted(result.acked["hours"]) == [0, 1, 2, 3]
        assert [one.kind for one in harness.dagster_events] == ["observation", "materialization"]
        assert ["answers again" in str(error) for _, error in result.errors] == [False, True]


@pytest.mark.parametrize("bolt", KINDS)
def test_no_try_of_a_tuple_is_used_up_while_its_event_waits(
    bolt: type[Bolt], tmp_path: Path
) -> None:
    conf = {"topology.message.timeout.secs": 10}
    with TopologyHarness(
        topology(bolt), {"hours": [[9]]}, conf=conf, simulated=True, state_dir=tmp_path
    ) as harness:
        harness.dagster_up = False
        result = harness.advance(100)
        assert result.acked["hours"] == result.failed["hours"] == []
        harness.give("hours", [-1])
        assert harness.advance(1).acked["hours"] == [1], "the stream goes on"
        harness.dagster_up = True
        result = harness.advance(40)
        assert sorted(result.acked["hours"]) == [0, 1] and result.failed["hours"] == []
        assert [one.kind for one in harness.dagster_events] == ["observation", "materialization"]


def test_a_replay_joins_the_event_that_waits(tmp_path: Path) -> None:
    # Without back pressure the message timeout runs while an event waits.
    conf = {"topology.message.timeout.secs": 10, "topology.backpressure.enable": False}
    with TopologyHarness(
        topology(Landed), {"hours": [[9]]}, conf=conf, replays=9, simulated=True
    ) as harness:
        harness.dagster_up = False
        result = harness.advance(45)
        assert result.acked["hours"] == [] and len(result.failed["hours"]) == 4
        harness.dagster_up = True
        result = harness.advance(20)
        assert result.acked["hours"] == [0]
        assert [one.kind for one in harness.dagster_events] == ["observation", "materialization"]


class Daily(WindowedBolt):
    window = Window.tumbling(secs=10)

    def process_window(self, window: Any) -> None:
        self.dagster.materialize("lake/window", metadata={"rows": len(window)})


def test_the_event_of_a_window_is_kept_until_the_cluster_has_it(tmp_path: Path) -> None:
    given = {"hours": [[1], [2]]}
    with TopologyHarness(topology(Daily), given, state_dir=tmp_path, simulated=True) as harness:
        harness.dagster_up = False
        assert sorted(harness.advance(12).acked["hours"]) == [0, 1]
        assert harness.dagster_events == []
    # As after a restart of the worker: the window is over, its event is in the checkpoint.
    with TopologyHarness(
        topology(Daily), {"hours": []}, state_dir=tmp_path, simulated=True
    ) as harness:
        harness.advance(5)
        assert [one.metadata for one in harness.dagster_events] == [{"rows": 2}]
    with TopologyHarness(
        topology(Daily), {"hours": []}, state_dir=tmp_path, simulated=True
    ) as harness:
        harness.advance(5)
        assert harness.dagster_events == []


class Plain(Bolt):
    """Acks without a report."""

    def process(self, tup: Tuple) -> None:
        pass


def two_streams(bolt: type[Bolt]) -> type[Topology]:
    """A component that reports, and another stream in the same worker."""

    class Lake(Topology):
        hours = Hours.spec()
        landed = bolt.spec(inputs=[hours])
        others = Hours.spec()
        plain = Plain.spec(inputs=[others])

    return Lake


def fill_log(harness: TopologyHarness) -> None:
    """Let the cluster answer that the event log has no room."""
    response = ReportResponse(problem="the event log of 'lake' is full", full=True)
    harness.shared.events.send = lambda batch: harness.shared.events.on_response(response)


def empty_log(harness: TopologyHarness) -> None:
    harness.shared.events.send = harness._store


@pytest.mark.parametrize("bolt", KINDS)
def test_a_component_whose_log_is_full_takes_no_tuples_and_loses_none(
    bolt: type[Bolt], tmp_path: Path
) -> None:
    """Its tuples do not time out; the other stream of the worker goes on."""
    given = {"hours": [], "others": []}
    with TopologyHarness(
        two_streams(bolt), given, simulated=True, state_dir=tmp_path, replays=0
    ) as harness:
        fill_log(harness)
        harness.run()
        harness.give("hours", [9], [-1], [-1])
        result = harness.advance(100)
        assert result.acked["hours"] == result.failed["hours"] == []
        harness.give("others", [1], [2])
        assert harness.advance(5).acked["others"] == [0, 1]
        runner = next(
            runner for runner in harness.engine.runners.values() if runner.component == "landed"
        )
        awaited = runner.stats.metrics[AWAITED_METRIC]
        assert awaited.startswith("waits for the cluster, for its events for Dagster, since ")
        assert awaited.endswith("the event log of 'lake' is full")
        empty_log(harness)
        result = harness.advance(20)
        assert runner.stats.metrics[AWAITED_METRIC] == ""
        assert sorted(result.acked["hours"]) == [0, 1, 2] and result.failed["hours"] == []
        assert [one.kind for one in harness.dagster_events] == ["observation", "materialization"]


@pytest.mark.parametrize("bolt", [Landed, Blocking])
def test_a_tick_waits_until_the_log_has_room(bolt: type[Bolt]) -> None:
    with TopologyHarness(topology(bolt), {"hours": []}, simulated=True) as harness:
        fill_log(harness)
        harness.run()
        harness.tick("landed")
        harness.advance(10)
        assert [entry.event.kind for entry in harness.shared.events.outbox.entries()] == [
            "observation"
        ], "the event of initialize alone waits"
        empty_log(harness)
        eventually(
            lambda: harness.advance(20) and len(harness.dagster_events) == 2, what="both events"
        )


class Chatty(Bolt):
    """Reports each tuple."""

    def process(self, tup: Tuple) -> None:
        self.dagster.observe("lake/clicks", metadata={"hour": tup.values[0]})


def test_a_component_with_many_waiting_events_takes_no_tuples() -> None:
    """So it is when no nimbus responds; nothing is lost or fails."""
    count = 3 * FULL_EVENTS
    given = {"hours": [[number] for number in range(count)]}
    with TopologyHarness(topology(Chatty), given, replays=0, simulated=True) as harness:
        harness.dagster_up = False
        result = harness.advance(100)
        assert result.acked["hours"] == result.failed["hours"] == []
        assert FULL_EVENTS <= len(harness.shared.events.outbox) < 2 * FULL_EVENTS
        harness.dagster_up = True
        result = harness.advance(30)
        assert sorted(result.acked["hours"]) == list(range(count))
        numbers = [one.metadata["hour"] for one in harness.dagster_events]
        assert numbers == list(range(count)), "in their order, each once"


class Flood(Bolt):
    """Reports more events in one call than a task may have."""

    def initialize(self, conf: Any, context: Any) -> None:
        for number in range(MAX_TASK_EVENTS + 1):
            self.dagster.observe("lake/clicks", metadata={"number": number})

    def process(self, tup: Tuple) -> None:
        self.dagster.observe("lake/clicks", metadata={"hour": tup.values[0]})


def test_one_call_with_too_many_events_is_reported() -> None:
    with TopologyHarness(topology(Flood), {"hours": [[1]]}, replays=0, simulated=True) as harness:
        harness.dagster_up = False
        result = harness.run()
        assert result.acked["hours"] == result.failed["hours"] == [], "the tuple waits"
        said = [str(error) for _, error in result.errors]
        assert sum("it is dropped; report fewer events in one call" in text for text in said) == 1
    lost = [str(error) for _, error in harness.errors if "is lost" in str(error)]
    assert len(lost) == MAX_TASK_EVENTS, "and what is lost when the worker ends"


class Undeclared(Bolt):
    def process(self, tup: Tuple) -> None:
        self.dagster.materialize("finance/ledger")


@pytest.mark.parametrize("is_refused", [True, False])
def test_an_undeclared_asset_is_an_error_of_its_task(is_refused: bool) -> None:
    """Its tuple fails if the cluster refuses the event, and is acked if it warns of it."""
    reason = "component 'landed' does not declare it: list it"
    with TopologyHarness(topology(Undeclared), {"hours": [[9]]}, replays=0) as harness:

        def send(batch: list[ReportedEvent]) -> None:
            reasons = {reported.event.id: reason for reported in batch}
            response = ReportResponse(stored=frozenset(reasons), undefined=reasons)
            if is_refused:
                response = ReportResponse(refused=reasons)
            harness.shared.events.on_response(response)

        harness.shared.events.send = send
        result = harness.run()
        (error,) = [str(error) for _, error in result.errors]
        assert "the materialization of 'finance/ledger' " in error and reason in error
        assert result.failed["hours"] == ([0] if is_refused else [])
        assert result.acked["hours"] == ([] if is_refused else [0])


OF = ("t/c", "materialization", "lake/clicks")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: DagsterEvent.make("t/c", "observation", ""), "the key must be a string such as"),
        (lambda: DagsterEvent.make("t/c", "observation", "a//b"), "the key must be"),
        (lambda: DagsterEvent.make("t/c", "observation", cast("Any", ["a", 1])), "the key must be"),
        (lambda: DagsterEvent.make("t/c", "observation", cast("Any", 3)), "the key must be"),
        (lambda: DagsterEvent.make("t/c", "observation", "x" * 513), "key must be a string of 1 to 512"),
        (lambda: DagsterEvent.make(*OF, partition=10), "partition must be a string of 1 to 512 characters"),
        (lambda: DagsterEvent.make(*OF, partition=""), "partition must be a string"),
        (lambda: DagsterEvent.make(*OF, partition="a\nb"), "without control characters"),
        (lambda: DagsterEvent.make(*OF, metadata=[1]), "metadata must be a map"),
        (lambda: DagsterEvent.make(*OF, metadata={"at": datetime(2026, 1, 1)}), "as .isoformat()"),
        (lambda: DagsterEvent.make(*OF, metadata={"a": {"b": [1, np.zeros(2)]}}), "metadata['a']['b'][1] is array"),
        (lambda: DagsterEvent.make(*OF, metadata={"share": float("nan")}), "metadata['share'] is nan"),
        (lambda: DagsterEvent.make(*OF, metadata={"text": "\ud800"}), "which JSON cannot hold"),
        (lambda: DagsterEvent.make(*OF, metadata={"\ud800": 1}), "without halves of characters"),
        (lambda: DagsterEvent.make(*OF, metadata={"rows": 2**64}), "a larger number as str()"),
        (lambda: DagsterEvent.make(*OF, metadata={"rows": -(10**5000)}), "metadata['rows'] is a value without"),
        (lambda: DagsterEvent.make(*OF, metadata={"text": "x" * 20_000}), "has 20012 bytes, the limit is 16384"),
        (lambda: DagsterEvent.make("t/c", "check", "a", check="on time", passed=True), "letters, digits and _ only"),
        (lambda: DagsterEvent.make("t/c", "check", "a", check="on_time", passed=1), "passed must be True or False"),
        (lambda: DagsterEvent.make("t/c", "check", "a", check="x", passed=True, severity="bad"), "'ERROR' or 'WARN'"),
        (lambda: decode_event({"kind": "check"}), "this is not a valid event"),
        (lambda: decode_event({"id": "x", "kind": "observation", "key": ["a"]}), "not the id of an event"),
    ],
)  # fmt: skip
def test_what_dagster_would_not_take_is_refused_where_it_is_reported(make: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make()
    assert says in refused.value.message


def test_scalars_of_numpy_become_numbers_and_equal_events_have_one_id() -> None:
    one = DagsterEvent.make(
        *OF, metadata={"rows": np.int64(3), "share": np.float32(0.5), "day": np.str_("mon")}
    )
    assert [type(value) for value in one.metadata.values()] == [int, float, str]
    assert one.id == DagsterEvent.make(*OF, metadata={"day": "mon", "share": 0.5, "rows": 3}).id
    others = [
        DagsterEvent.make(*OF, metadata={"rows": 4}),
        DagsterEvent.make(*OF, partition="a"),
        DagsterEvent.make("t/other", *OF[1:]),
    ]
    assert len({one.id, *(other.id for other in others)}) == 4


def test_a_mistake_fails_its_tuple_and_names_the_asset() -> None:

    with TopologyHarness(topology(Mistaken), {"hours": [[1]]}) as harness:
        result = harness.run()
        assert result.failed["hours"] == [0]
        assert "materialization of asset 'lake/clicks': partition must be a string" in str(
            result.errors[0][1]
        )


class Mistaken(Bolt):
    def process(self, tup: Tuple) -> None:
        self.dagster.materialize("lake/clicks", partition=tup.values[0])
