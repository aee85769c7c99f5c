"""Topologies as classes: components are class attributes, in declared order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from storm_dagster.api.builder import build_spec
from storm_dagster.api.specs import Spec
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.topology import TopologySpec

__all__ = ["Topology"]


class Topology:
    """Base of topologies::

        class WordCount(Topology):
            words = WordSpout.spec()
            count = CountBolt.spec(inputs={words: Grouping.fields("word")}, par=2)

    The name of an attribute is the component's id unless its spec names another. ``config`` is the
    topology's own conf, which a submission's conf overrides. Components of base classes come first.
    """

    config: ClassVar[Mapping[str, Any] | None] = None
    name: ClassVar[Any] = None
    """Name of the topology; by default the file or module gives it."""

    @classmethod
    def specs(cls) -> dict[str, Spec]:
        """The component specs by id, in declared order."""
        found: dict[str, tuple[str, Spec]] = {}
        for base in reversed(cls.__mro__):
            for attribute, value in vars(base).items():
                if isinstance(value, Spec):
                    found[attribute] = (value.name or attribute, value)
                else:
                    found.pop(attribute, None)
        specs: dict[str, Spec] = {}
        for attribute, (component, spec) in found.items():
            if component in specs:
                raise InvalidTopology(
                    f"topology {cls.__name__} has two components with the id {component!r} (one is {attribute!r}): "
                    "rename one of them"
                )
            specs[component] = spec
        return specs

    @classmethod
    def to_spec(cls) -> TopologySpec:
        """The serializable topology; :class:`InvalidTopology` if it is not valid."""
        name = cls.name if isinstance(cls.name, str) else ""
        return build_spec(cls.specs(), name=name, config=cls.config or {}, title=f"topology {cls.__name__}")
