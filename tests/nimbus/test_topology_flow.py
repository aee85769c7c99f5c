"""What the page of a topology is made of: large topologies, older workers, and what waits for
whom.
"""

from __future__ import annotations

from typing import Any

from storm_dagster.api import SparkBolt, SparkSpout, TopologyBuilder
from storm_dagster.core.reassignment import Runnable
from storm_dagster.model.records import ComponentTasks, StormBase, TaskTable
from storm_dagster.model.view import TopologyView, Versioned
from storm_dagster.nimbus.http.pages.flow import TopologyFlow
from storm_rigs.operations.snapshots import snapshot_alone


def chain(count: int) -> TopologyView:
    """A spout and bolts behind it, one behind the other."""
    components = {
        f"c{n:02}": ComponentTasks(type="bolt" if n else "spout", tasks=str(n + 1))
        for n in range(count)
    }
    base = StormBase(
        name="wide", launch_time_secs=1, status="ACTIVE", workers=1, executors={}, token="t"
    )
    return TopologyView(
        id="wide-1-1", base=base, base_at=Versioned(0, 1), tasks=TaskTable(components=components)
    )


def measured(count: int, **components: dict[str, Any]) -> dict[str, Any]:
    edges = {f"c{n:02}": {f"c{n - 1:02}:default": 10.0 * n} for n in range(1, count)}
    return {"components": components, "edges": edges, "tasks": {}, "workers": {}}


def flow(count: int, stats: dict[str, Any] | None, code: Runnable | None = None) -> TopologyFlow:
    return TopologyFlow(snapshot_alone(chain(count), stats, now_secs=1000, code=code))


def test_a_large_topology_is_drawn_around_its_worst_component() -> None:
    found = flow(50, measured(50, c20={"waiting": 900.0, "capacity": 0.7}, c30={"waiting": 3.0}))
    assert found.center("") == "c20" and found.center("c40") == "c40"
    svg = found.picture("", lambda name: f"?focus={name}")
    assert [name for name in found.rows if f">{name}<" in svg] == [
        "c18",
        "c19",
        "c20",
        "c21",
        "c22",
    ]
    assert flow(40, measured(40)).center("") == "", "all of it is drawn"


def test_components_are_sorted_by_what_is_asked_for() -> None:
    found = flow(4, measured(4, c01={"waiting": 5.0}, c02={"waiting": 70.0}, c03={}))
    assert [row["name"] for row in found.sorted_rows("waiting")] == ["c02", "c01", "c00", "c03"]
    assert [row["name"] for row in found.sorted_rows("name")] == ["c00", "c01", "c02", "c03"]
    assert found.edge_rows()[0] == ("c00", "default", "c01", 10.0)


def test_a_worker_of_the_release_before_has_no_figures_and_no_findings() -> None:
    found = flow(3, {"tasks": {}, "workers": {}})
    assert found.findings == [] and found.rows["c01"]["rate"] is None
    assert "no statistics" in found.picture("", None)
    silent = flow(3, None)
    assert [one.kind for one in silent.findings] == ["silent-master"]


def test_a_fused_bolt_says_in_whose_query_it_runs() -> None:
    builder = TopologyBuilder("wide")
    args = {"source": "missing_module:lines", "checkpoint": "/c"}
    builder.set_spout("c00", SparkSpout, args=args, outputs=["line"])
    for name, source in (("c01", "c00"), ("c02", "c01")):
        function = {"function": "missing_module:split"}
        builder.set_bolt(name, SparkBolt, inputs=source, args=function, outputs=["word"])
    code = Runnable(builder.build(), {})
    found = flow(3, measured(3), code)
    assert {name: row["fused"] for name, row in found.rows.items()} == {
        "c00": "",
        "c01": "c00",
        "c02": "c00",
    }
    assert found.picture("", None).count(">in the query of c00<") == 2
    apart = flow(3, measured(3), Runnable(code.spec, {"topology.spark.fuse": False}))
    assert "in the query" not in apart.picture("", None)
