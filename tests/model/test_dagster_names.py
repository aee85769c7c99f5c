"""Names in Dagster: plain ones as they always were, a cluster's own ones unlike any other's."""

from __future__ import annotations

import pytest

from storm_dagster.model.dagster_names import STAGES, DagsterNames
from storm_dagster.model.errors import InvalidRequest


def test_without_a_cluster_only_resource_keys_have_a_prefix() -> None:
    names = DagsterNames()
    assert names.name("submit_topology") == "submit_topology"
    assert names.asset_path(("storm", "assignment")) == ("storm", "assignment")
    assert names.stage_op("assignment") == "storm__assignment"
    assert names.partitions == "storm_topologies"
    assert names.resource("spark") == "storm_spark"
    assert DagsterNames(resource_prefix="").resource("spark") == "spark"


def test_a_cluster_has_names_of_its_own() -> None:
    names = DagsterNames("prod")
    assert names.name("submit_topology") == "prod_submit_topology"
    assert names.asset_path(("storm", "assignment")) == ("prod", "storm", "assignment")
    assert names.stage_op("assignment") == "prod__storm__assignment"
    assert names.partitions == "prod_storm_topologies"
    assert names.resource("spark") == "storm_prod_spark"


@pytest.mark.parametrize("cluster", [None, "prod", "storm", "storm__x"])
def test_steps_are_shown_by_their_stage(cluster: str | None) -> None:
    names = DagsterNames(cluster)
    assert [names.step_name(names.stage_op(stage)) for stage in STAGES] == list(STAGES)
    assert names.step_name("kill_topology_op") == "kill_topology_op"


@pytest.mark.parametrize("cluster", ["", "pro-d", "a b", "ü", "a/b", "x" * 61, 3, "a\n"])
def test_what_dagster_cannot_name_is_refused(cluster: object) -> None:
    with pytest.raises(InvalidRequest, match="letters, digits and underscores"):
        DagsterNames(cluster)  # type: ignore[arg-type]
    if cluster != "":
        with pytest.raises(InvalidRequest, match="resource_prefix"):
            DagsterNames(resource_prefix=cluster)  # type: ignore[arg-type]
