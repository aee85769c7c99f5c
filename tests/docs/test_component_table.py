"""The table of kinds of components in docs/authoring.md: each row has tests that prove it."""

from __future__ import annotations

import ast
import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from storm_dagster.api import (
    Bolt,
    StatefulBolt,
    TopologyBuilder,
    Tuple,
    Window,
    WindowedBolt,
)
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually
from storm_rigs.components import AsyncHoldBolt, CollectBolt, Numbers

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "authoring.md").read_text(encoding="utf-8")
HEAD = "## What holds for each kind of component"
GUARD, THREADS = "tests/worker/test_guard.py::", "tests/worker/test_threads.py::"
STATE, WINDOWS = "tests/api/test_state.py::", "tests/api/test_windows.py::"
MULTILANG, PROGRAMS = "tests/worker/test_multilang.py::", "tests/worker/test_shell_pending.py::"
ROWS, SPARK = (
    "tests/spark_components/test_bad_rows.py::",
    "tests/spark_components/test_pipeline.py::",
)
VALUES, HERE = "tests/worker/test_values.py::", "tests/docs/test_component_table.py::"
EVERY_KIND = "tests/worker/test_hostile_values.py::test_every_tuple_is_acked_or_failed_once_whatever_its_bolt_does"
PROOFS = {
    "runs in": (
        THREADS + "test_blocking_bolts_run_in_their_own_threads",
        THREADS + "test_async_bolts_overlap_and_anchor_to_their_own_tuple",
        STATE + "test_a_stateful_bolt_that_blocks",
        STATE + "test_async_state_and_ids_without_fields_grouping_are_refused",
        WINDOWS + "test_a_windowed_bolt_that_blocks_has_its_thread",
        MULTILANG + "test_components_in_node_js",
        SPARK + "test_micro_batches_are_dataframes_and_are_acked_after_the_function",
    ),
    "a tuple is acked": (
        EVERY_KIND,
        STATE + "test_a_tuple_is_acked_only_after_its_checkpoint",
        WINDOWS + "test_few_pending_tuples_do_not_stop_a_window",
        SPARK + "test_micro_batches_are_dataframes_and_are_acked_after_the_function",
    ),
    "order, from one task to another": (
        "tests/worker/test_delivery.py::test_tuples_between_two_tasks_keep_their_order",
        HERE + "test_tuples_are_processed_in_the_order_of_the_table",
    ),
    "a tuple that comes again": (
        EVERY_KIND,
        STATE + "test_a_message_that_comes_again_is_not_applied_twice",
        "tests/worker/test_window_processes.py::"
        "test_windowed_counts_are_exact_after_the_worker_of_the_windows_was_killed",
        SPARK + "test_a_batch_whose_function_raises_fails_as_a_whole",
    ),
    "state": (
        "tests/worker/test_lease_and_limits.py::test_state_is_saved_whole_or_not_at_all",
        STATE + "test_state_survives_and_is_divided_over_other_numbers_of_tasks",
        STATE + "test_a_window_and_its_state_are_acked_together",
        "tests/core/test_windowing.py::test_windows_that_are_restored_from_values_are_the_same_ones",
    ),
    "the code raises": (
        "tests/worker/test_bad_input.py::test_each_mistake_is_reported_once_and_replayed_whatever_runs_the_bolt",
        MULTILANG + "test_a_program_that_misbehaves_is_replaced_and_its_tuples_replayed",
        STATE + "test_what_a_tuple_that_fails_did_to_the_state_is_taken_back",
        WINDOWS + "test_a_window_that_raises_is_tried_again_until_it_succeeds",
        ROWS + "test_only_the_rows_that_break_the_function_fail",
        ROWS + "test_a_function_that_fails_with_any_rows_is_not_called_for_each",
    ),
    "`sys.exit`, `CancelledError`": (
        GUARD + "test_what_is_no_exception_restarts_the_task_and_its_tuple_is_replayed",
        EVERY_KIND,
        ROWS + "test_a_batch_whose_function_exits_is_gathered_until_the_task_restarts",
    ),
    "a call does not return": (
        GUARD + "test_a_hanging_call_is_reported_once_with_the_line_of_the_user",
        "tests/supervisor/test_supervisor.py::test_hung_and_silent_workers_are_replaced",
        MULTILANG + "test_a_program_that_misbehaves_is_replaced_and_its_tuples_replayed",
    ),
    "values": (
        VALUES + "test_a_value_keeps_its_type_in_another_worker",
        VALUES + "test_a_value_and_its_key_keep_their_types_in_state",
        VALUES + "test_a_shell_component_is_warned_once",
        ROWS + "test_values_arrive_as_the_types_of_spark",
    ),
    "a target is full": (
        "tests/worker/test_pressure.py::test_only_the_fan_out_waits_for_its_slow_bolt",
        HERE + "test_no_call_begins_while_a_target_is_full",
    ),
    "the message timeout passes": (
        "tests/worker/test_bad_input.py::test_tuples_for_a_task_that_never_starts_time_out_and_are_replayed",
        WINDOWS + "test_a_session_longer_than_the_message_timeout_is_emitted_once",
        ROWS + "test_dividing_a_batch_ends_before_its_tuples_time_out",
    ),
    "a [dead letter](errors.md#a-tuple-that-fails-every-time) names": (
        "tests/worker/test_dead_letters.py::test_a_poison_tuple_becomes_a_letter_and_the_rest_flows",
        "tests/worker/test_dead_letters.py::test_a_program_gives_a_reason_and_later_tuples_are_not_blamed",
        WINDOWS + "test_a_stamp_that_is_no_time_fails_its_tuple",
        ROWS + "test_only_the_rows_that_break_the_function_fail",
    ),
    "the task closes": (
        "tests/worker/test_graceful_stop.py::test_nothing_is_applied_twice_by_a_graceful_stop",
        GUARD + "test_threads_close_side_by_side_and_a_stuck_one_delays_no_other",
        HERE + "test_coroutines_in_flight_are_canceled_when_their_task_closes",
        ROWS + "test_a_batch_whose_function_exits_is_gathered_until_the_task_restarts",
    ),
}


def table() -> list[list[str]]:
    """Cells of the table's rows, without its head."""
    lines = PAGE.split(HEAD)[1].split("\n## ")[0].splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ]
    return rows[2:]


def test_each_row_is_full_and_has_its_tests() -> None:
    rows = table()
    assert [row[0] for row in rows] == list(PROOFS)
    assert all(len(row) == 8 and all(row) for row in rows)


@pytest.mark.parametrize("proof", sorted({proof for proofs in PROOFS.values() for proof in proofs}))
def test_each_proof_exists(proof: str) -> None:
    path, _, name = proof.partition("::")
    functions = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    assert name in {
        function.name for function in functions if isinstance(function, ast.FunctionDef)
    }


class Ordered(Bolt):
    outputs = ["n"]
    seen: ClassVar[list[int]] = []

    def process(self, tup: Tuple) -> None:
        self.seen.append(tup.values[0])
        self.emit(tup.values)


class OrderedBlocking(Ordered):
    blocking = True


class OrderedAsync(Ordered):
    async def process(self, tup: Tuple) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.seen.append(tup.values[0])
        await asyncio.sleep(0.01 if tup.values[0] % 2 else 0)
        self.emit(tup.values)


class OrderedStateful(Ordered, StatefulBolt):
    pass


class OrderedWindow(WindowedBolt):
    window = Window.tumbling(count=40)
    outputs = ["n"]

    def process_window(self, window: Any) -> None:
        for tup in window.tuples:
            Ordered.seen.append(tup.values[0])
            self.emit(tup.values)


class OrderedEventTime(OrderedWindow):
    window = Window.tumbling(secs=1)
    timestamp_field = "n"


@pytest.mark.parametrize(
    "bolt",
    [Ordered, OrderedBlocking, OrderedAsync, OrderedStateful, OrderedWindow, OrderedEventTime],
)
def test_tuples_are_processed_in_the_order_of_the_table(
    bolt: type[Bolt], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Ordered, "seen", [])
    given = [(n * 7) % 40 + 1 for n in range(40)]
    if bolt is OrderedEventTime:
        # The last one is the watermark that ends the window.
        given.append(5_000)
    builder = TopologyBuilder("ordered")
    builder.set_spout("numbers", Numbers, outputs=["n"])
    builder.set_bolt("bolt", bolt, inputs="numbers")
    threaded = bolt in (OrderedBlocking, OrderedAsync)
    with TopologyHarness(
        builder, {"numbers": [[n] for n in given]}, state_dir=tmp_path, simulated=not threaded
    ) as harness:
        result = harness.run(timeout=30) if threaded else harness.advance(3)
    wanted = sorted(given) if bolt is OrderedEventTime else given
    if bolt is not OrderedAsync:
        assert Ordered.seen == wanted
    finished = [values[0] for values in result.values("bolt")]
    assert (
        (sorted(finished) == sorted(wanted) and finished != wanted)
        if bolt is OrderedAsync
        else finished == wanted
    )


@pytest.mark.parametrize("bolt", [Ordered, OrderedBlocking, OrderedAsync, OrderedStateful])
def test_no_call_begins_while_a_target_is_full(
    bolt: type[Bolt], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Ordered, "seen", [])
    builder = TopologyBuilder("full")
    builder.set_spout("numbers", Numbers, outputs=["n"])
    builder.set_bolt("bolt", bolt, inputs="numbers")
    with TopologyHarness(builder, {"numbers": []}, state_dir=tmp_path) as harness:
        (runner,) = (one for one in harness.engine.runners.values() if one.component == "bolt")
        harness.run(timeout=30)
        # Over what the engine sets: the harness has no back pressure of its own.
        held = [True]
        monkeypatch.setattr(
            type(runner), "in_cycle", property(lambda _: False, lambda *_: None), raising=False
        )
        monkeypatch.setattr(
            type(runner), "held", property(lambda _: held[0], lambda *_: None), raising=False
        )
        harness.give("numbers", *([n] for n in range(5)))
        with suppress(TimeoutError):
            harness.run(timeout=0.5)
        assert Ordered.seen == []
        held[0] = False
        harness.run(timeout=30)
        # Coroutines that were held begin in any order.
        assert sorted(Ordered.seen) == list(range(5))


def test_coroutines_in_flight_are_canceled_when_their_task_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    CollectBolt.everything.clear()
    builder = TopologyBuilder("waits")
    builder.set_spout("numbers", Numbers, outputs=["n"])
    builder.set_bolt("waits", AsyncHoldBolt, inputs="numbers")
    with TopologyHarness(builder, {"numbers": [[1], [2]]}) as harness:

        def both_begun() -> bool:
            harness.engine.run(harness.shared.clock())
            return CollectBolt.everything == [[1], [2]]

        eventually(both_begun, 60, interval=0.001)
        (runner,) = (one for one in harness.engine.runners.values() if one.component == "waits")
        failed: list[Tuple] = []
        monkeypatch.setattr(
            type(harness.shared.ledger), "fail", lambda _, tup, *__: failed.append(tup)
        )
    assert sorted(tup.values[0] for tup in failed) == [1, 2]
    assert runner.has_ended() and not harness.errors
