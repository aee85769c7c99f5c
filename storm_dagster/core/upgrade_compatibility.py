"""Whether two versions of a topology can run side by side, tuples flowing between them."""

from __future__ import annotations

from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.topology import TopologySpec

__all__ = ["check_compatible"]


def check_compatible(name: str, old: TopologySpec, new: TopologySpec) -> None:
    """:class:`InvalidTopology` unless both have the same components, streams and groupings.

    What a component does may change, its parallelism is that of the running topology. Another wiring would mix:
    an old task would send by the old rule what a new one expects by the new, and the same key could reach two tasks.
    """
    remedy = "use `storm-dagster update`, which replaces the whole topology"
    for kind, before, after in (("spout", old.spouts, new.spouts), ("bolt", old.bolts, new.bolts)):
        for component in sorted(before.keys() ^ after.keys()):
            what = "has no" if component in before else "has a new"
            raise InvalidTopology(
                f"the new code of {name!r} {what} {kind} {component!r}, so that it cannot run beside the old: {remedy}"
            )
        for component, part in before.items():
            other = after[component]
            if part.outputs != other.outputs:
                raise InvalidTopology(
                    f"the streams of {kind} {component!r} differ in the new code of {name!r}, so that it cannot run "
                    f"beside the old: {remedy}"
                )
            if part.inputs != other.inputs:
                raise InvalidTopology(
                    f"the inputs of {kind} {component!r} differ in the new code of {name!r}, so that it cannot run "
                    f"beside the old: {remedy}"
                )
