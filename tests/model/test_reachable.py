"""Which components are downstream of another one."""

from __future__ import annotations

from storm_dagster.model.topology import reachable


def test_a_component_is_downstream_of_itself_only_in_a_cycle() -> None:
    assert reachable("a", {"a": {"b"}}) == {"b"}
    assert reachable("a", {"a": {"b"}, "b": {"a"}}) == {"a", "b"}
