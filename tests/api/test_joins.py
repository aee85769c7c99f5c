"""Joins over windows, compared with SQL."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.api import Grouping, Join, JoinBolt, Spout, Topology, Window
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_rigs.worker.first_error import first_error


class Orders(Spout):
    outputs = ["customer", "item"]


class Customers(Spout):
    outputs = ["id", "name"]


class Ratings(Spout):
    outputs = ["customer", "stars"]


JOIN = (
    Join("orders", "customer")
    .inner("customers", "id", "orders")
    .left("ratings", "customer", "orders")
    .select("customer", "item", "customers:name", "ratings:stars as rating")
)


class Joined(Topology):
    orders = Orders.spec()
    customers = Customers.spec()
    ratings = Ratings.spec()
    joined = JoinBolt.spec(
        JOIN,
        Window.tumbling(secs=10),
        inputs={
            orders: Grouping.fields("customer"),
            customers: Grouping.fields("id"),
            ratings: Grouping.fields("customer"),
        },
        par=2,
    )


SMALL = st.integers(1, 4)
PAIRS = st.lists(st.tuples(SMALL, SMALL), max_size=6)


@given(PAIRS, PAIRS, PAIRS)
def test_a_window_is_joined_as_sql_would(
    orders: list[Any], customers: list[Any], ratings: list[Any]
) -> None:
    tables = {"orders": orders, "customers": customers, "ratings": ratings}
    with sqlite3.connect(":memory:") as db:
        for name, rows in tables.items():
            db.execute(f"CREATE TABLE {name} (k, v)")
            db.executemany(f"INSERT INTO {name} VALUES (?, ?)", rows)
        expected = db.execute(
            "SELECT orders.k, orders.v, customers.v, ratings.v FROM orders JOIN customers ON customers.k = orders.k "
            "LEFT JOIN ratings ON ratings.k = orders.k"
        ).fetchall()
    with TopologyHarness(Joined, tables, simulated=True) as harness:
        result = harness.advance(10)
    assert Counter(tuple(values) for values in result.values("joined")) == Counter(expected)
    assert all(len(result.acked[name]) == len(rows) for name, rows in tables.items())


def test_the_selected_fields_are_declared_and_nested_ones_found() -> None:
    assert Joined.to_spec().bolts["joined"].outputs["default"].fields == (
        "customer",
        "item",
        "name",
        "rating",
    )

    class Nested(Topology):
        orders = Orders.spec()
        customers = Customers.spec()
        joined = JoinBolt.spec(
            Join("orders", "item.owner")
            .inner("customers", "id", "orders")
            .select("item.name", "name as who"),
            Window.tumbling(count=2),
            inputs=[orders, customers],
        )

    given_ = {"orders": [["c", {"owner": 7, "name": "book"}]], "customers": [[7, "ann"]]}
    with TopologyHarness(Nested, given_, simulated=True) as harness:
        assert harness.run().values("joined") == [["book", "ann"]]


def test_joins_that_cannot_work_are_refused() -> None:
    with pytest.raises(InvalidTopology, match="not joined before"):
        Join("a", "x").inner("b", "y", "c")
    with pytest.raises(InvalidTopology, match="joined twice"):
        Join("a", "x").inner("a", "y", "a")
    with pytest.raises(InvalidTopology, match="called 'x'"):
        Join("a", "x").inner("b", "x", "a").select("a:x", "b:x")
    with pytest.raises(InvalidTopology, match="selects no field"):
        JoinBolt.spec(Join("a", "x"), Window.tumbling(count=1))

    class Shuffled(Topology):
        orders = Orders.spec()
        customers = Customers.spec()
        joined = JoinBolt.spec(
            Join("orders", "customer").inner("customers", "id", "orders").select("item"),
            Window.tumbling(count=2),
            inputs=[orders, customers],
            par=2,
        )

    with TopologyHarness(Shuffled, {"orders": [], "customers": []}, simulated=True) as harness:
        assert "Grouping.fields('customer')" in str(first_error(harness)[1])


@pytest.mark.parametrize(
    ("selected", "said"),
    [
        ("orders.item", r"selects 'orders\.item', which no stream .* is written orders:item"),
        (
            "customers:item",
            r"selects 'item', which no stream of its join has \(customers: id, name\)",
        ),
    ],
)
def test_a_selected_field_that_no_stream_has_is_refused(selected: str, said: str) -> None:
    class Selecting(Topology):
        orders = Orders.spec()
        customers = Customers.spec()
        joined = JoinBolt.spec(
            Join("orders", "customer").inner("customers", "id", "orders").select(selected),
            Window.tumbling(count=2),
            inputs=[orders, customers],
        )

    with TopologyHarness(Selecting, {"orders": [], "customers": []}, simulated=True) as harness:
        component, error = first_error(harness)
        assert component == "joined" and re.search(said, str(error))
