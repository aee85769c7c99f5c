"""The rows that the stages of the assignment exchange: columns for keys, bytes for values."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import storm_dagster.spark
import storm_dagster.spark.assignment
from storm_dagster.core.scheduling.history import history_rows
from storm_dagster.core.scheduling.plan import event_of
from storm_dagster.core.scheduling.slot_allocation import FreePorts
from storm_dagster.core.scheduling.strategy import TopologyEvent, allocate
from storm_dagster.core.scheduling.units import Codes, Executors, executors_of
from storm_dagster.model.placement import TopologyToPlace
from storm_dagster.model.slot import Slot
from storm_dagster.spark.assignment import exchange, groups
from storm_dagster.spark.assignment.executor_runs import executor_runs, executors_of_runs
from storm_rigs.placement.placement_clusters import generated_batch, small_topology, supervisor

REASONS = "storm_dagster.model.placement_reasons"
SPARK = Path(str(storm_dagster.spark.__file__)).parent


def exchanged_event(topology: TopologyToPlace, event: TopologyEvent) -> TopologyEvent:
    """The event as a Python worker of Spark reads it."""
    codes: Codes = {}
    runs = list(executor_runs(topology, codes))
    return TopologyEvent(
        exchange.decode_summary(exchange.encode(event.about)),
        executors_of_runs(exchange.decode(exchange.encode(runs))),
        exchange.decode(exchange.encode(list(history_rows(topology, codes)))),
    )


def fields_of(executors: Executors) -> tuple[list[int], list[list[int]]]:
    """First tasks, and all tasks of each executor."""
    return executors.unit, [list(tasks) for tasks in executors.tasks()]


@given(seed=st.integers(0, 2**32))
def test_the_rules_get_the_values_that_the_rules_gave(seed: int) -> None:
    batch = generated_batch(random.Random(seed))
    nodes = sorted(batch.supervisors, key=lambda node: node.id)
    for topology in batch.topologies:
        event = event_of(topology)
        request = event.request()
        assert exchange.decode_request(exchange.encode(request)) == request
        ports = FreePorts(
            ((node.id, node.info) for node in nodes),
            ((Slot(node.id, port), 0) for node in nodes for port in sorted({*node.info.ports})),
        )
        allocated = allocate(event.about, request, ports)
        read = exchange.decode_allocated(exchange.encode(allocated))
        assert read == allocated
        rows = event.assign(allocated)
        assert exchange.decode(exchange.encode(rows)) == rows


@given(seed=st.integers(0, 2**32))
def test_executors_and_history_are_the_same_from_their_values(seed: int) -> None:
    for topology in generated_batch(random.Random(seed)).topologies:
        event = event_of(topology)
        read = exchanged_event(topology, event)
        assert fields_of(read.executors) == fields_of(event.executors)
        assert read.history.needed == event.history.needed
        assert read.history.old == event.history.old


def test_an_executor_of_scattered_tasks_keeps_them() -> None:
    topology = small_topology(bolts={"b": (5, ["s"])}, spouts={"s": 4})
    topology = topology.model_copy(update={"executors": ((1, 3, 5), (2, 4), (8, 9))})
    runs = list(executor_runs(topology, {}))
    read = executors_of_runs(exchange.decode(exchange.encode(runs)))
    assert fields_of(read) == fields_of(executors_of(topology, {}))


def test_a_component_of_many_tasks_is_one_run() -> None:
    topology = small_topology(bolts={}, spouts={"s": 1000}, ackers=0)
    assert len(list(executor_runs(topology, {}))) == 2


def test_names_of_any_text_are_exchanged() -> None:
    topology = small_topology("Gr\u00f6\u00dfe \U0001f40d \"'\n", bolts={}, spouts={"s": 1})
    event = event_of(topology)
    assert exchange.decode_summary(exchange.encode(event.about)).name == topology.name


def assignment_modules() -> list[str]:
    package = storm_dagster.spark.assignment
    modules = pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    return [module.name for module in modules]


def column_types(value: Any) -> list[pa.DataType]:
    """The types of a schema, or of a type that could be in one."""
    if isinstance(value, pa.Schema):
        return list(value.types)
    return [value] if isinstance(value, pa.DataType) else []


def is_flat(kind: pa.DataType) -> bool:
    """True if the type is a value, or a list of values."""
    return not pa.types.is_nested(kind) or (
        pa.types.is_list(kind) and not pa.types.is_nested(kind.value_type)
    )


@pytest.mark.parametrize("module", assignment_modules())
def test_columns_are_keys_and_bytes_never_nested_values(module: str) -> None:
    for name, value in vars(importlib.import_module(module)).items():
        assert all(is_flat(kind) for kind in column_types(value)), f"{module}.{name}"


def test_spark_decides_no_placement_by_itself() -> None:
    """Constants of the rules are read in ``core`` alone."""
    imported: set[str] = set()
    for path in SPARK.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == REASONS:
                imported.update(alias.name for alias in node.names)
    assert imported <= {"Refusal"}


def test_the_groups_return_the_columns_that_they_declare() -> None:
    topology = small_topology(bolts={}, spouts={"s": 2})
    event = event_of(topology)
    records = [("s1", supervisor(1, [6900]).info)]
    cluster = exchange.values_table(
        [(3, exchange.CLUSTER, exchange.SUPERVISOR_RECORDS, exchange.encode(records))]
    )
    values = exchange.values_table(
        [
            (3, 7, exchange.SUMMARY, exchange.encode(event.about)),
            (3, 7, exchange.EXECUTORS, exchange.encode(list(executor_runs(topology, {})))),
        ]
    )
    slots = pa.table(
        {
            "node": ["s1"],
            "port": [6900],
            "rank": [1],
            "holders": [0],
        }
    )
    key = (pa.scalar(3),)
    allocated = groups.allocate_in_cluster(key, slots, pa.concat_tables([cluster, values]))
    placed = groups.assign_in_part(key, pa.concat_tables([values, allocated]))
    request = groups.request_in_part(key, values)
    for table, kind in (
        (request, exchange.REQUEST),
        (allocated, exchange.ALLOCATED),
        (placed, exchange.PLACED),
    ):
        assert table.schema == exchange.VALUES
        assert [row[:3] for row in exchange.read_values(table)] == [(3, 7, kind)]
