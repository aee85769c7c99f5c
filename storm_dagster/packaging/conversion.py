"""Conversion of topology objects to the spec that is uploaded."""

from __future__ import annotations

import inspect
from typing import Any

from storm_dagster.model.topology import TopologySpec


def topology_spec_of(value: Any) -> TopologySpec | None:
    """The spec of a Topology class (or instance), a TopologyBuilder or a spec; ``None`` for anything else.

    Raises :class:`InvalidTopology` when it is one and breaks a rule.
    """
    from storm_dagster.api import Topology, TopologyBuilder

    if isinstance(value, TopologySpec):
        return value
    if isinstance(value, Topology):
        value = type(value)
    if isinstance(value, TopologyBuilder) or (inspect.isclass(value) and issubclass(value, Topology)):
        return value.to_spec()
    return None
