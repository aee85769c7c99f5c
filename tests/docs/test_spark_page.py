"""The tables of docs/spark.md about SparkQuery: each row has tests that prove it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUERY, BRIDGE = (
    "tests/spark_components/test_query.py::",
    "tests/spark_components/test_pipeline.py::",
)
WORKER = "tests/spark_components/test_query_worker.py::"
WINDOWS = QUERY + "test_windows_of_event_time_go_to_files_once_across_stop_and_start"
COUNTED = QUERY + "test_rows_are_counted_and_timed_as_the_statistics_show_them"
FUNCTION = QUERY + "test_a_function_gets_batch_and_id_and_its_errors_are_reported"
REFUSED = QUERY + "test_what_cannot_run_is_refused"
LAG = QUERY + "test_the_lag_is_reported_by_the_source_or_computed_from_offsets"
PROOFS = {
    "| sink | argument |": {
        "files in a folder": (WINDOWS,),
        "a table of": (QUERY + "test_a_table_of_spark_takes_the_rows",),
        "another sink": (QUERY + "test_a_change_against_the_checkpoint_is_an_error_with_remedy",),
        "a function": (
            FUNCTION,
            QUERY + "test_the_example_counts_lines_by_hour_of_file_change",
        ),
        "the topology": (COUNTED,),
    },
    "| metric |": {
        "`batches`": (WINDOWS, COUNTED),
        "`input_rows": (LAG,),
        "`lag`": (LAG,),
        "`state_rows`": (WINDOWS,),
        "`watermark_secs`": (WINDOWS, LAG),
    },
    "| mistake |": {
        "two sinks": (
            QUERY + "test_arguments_that_cannot_be_right_are_refused_when_the_topology_is_built",
            QUERY
            + "test_two_components_with_one_checkpoint_are_refused_when_the_topology_is_built",
        ),
        "no streaming": (REFUSED,),
        "a missing connector": (
            REFUSED,
            BRIDGE + "test_a_connector_that_spark_lacks_is_said_once_with_the_remedy",
        ),
        "a checkpoint of": (
            QUERY + "test_a_checkpoint_of_another_component_is_refused_with_its_name",
            QUERY + "test_a_change_against_the_checkpoint_is_an_error_with_remedy",
        ),
        "a sink or a query": (REFUSED,),
        "a function that raises": (
            FUNCTION,
            QUERY + "test_an_error_of_a_batch_is_the_line_that_says_what_happened",
        ),
        "a Spark that": (
            QUERY + "test_a_spark_that_does_not_answer_is_unavailable_and_tried_again",
        ),
    },
}
PARAGRAPHS = {
    "**One owner.**": (
        QUERY + "test_of_two_owners_the_older_one_loses_and_names_the_other",
        QUERY + "test_of_two_runs_spark_stops_the_older_whose_owner_names_the_other",
    ),
    "**Stop and continue.**": (
        WINDOWS,
        WORKER + "test_a_query_stops_while_inactive_and_goes_on_without_its_worker",
    ),
    "**If the owner dies.**": (
        QUERY + "test_a_query_outlives_its_owner_and_ends_with_its_topology",
        "tests/operations/test_cleaner.py::test_a_spark_that_does_not_answer_keeps_no_topology",
    ),
}


@pytest.mark.parametrize("head", PROOFS)
def test_each_row_has_its_tests(head: str) -> None:
    text = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
    rows = text.partition(f"\n{head}")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(rows) == len(PROOFS[head])
    for row, name in zip(rows, PROOFS[head], strict=True):
        assert row.startswith(f"| {name}")


def test_each_paragraph_is_there() -> None:
    text = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
    assert [name for name in PARAGRAPHS if f"\n{name} " not in text] == []


def test_each_proof_exists() -> None:
    proofs = {
        proof for rows in (*PROOFS.values(), PARAGRAPHS) for each in rows.values() for proof in each
    }
    for path in {proof.partition("::")[0] for proof in proofs}:
        body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        names = {f"{path}::{node.name}" for node in body if isinstance(node, ast.FunctionDef)}
        assert {proof for proof in proofs if proof.startswith(f"{path}::")} <= names
