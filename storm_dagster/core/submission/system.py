"""The components that the system adds to every topology, as in Storm and JStorm.

The worker runs these ids natively; here they stand as ordinary components, so that task numbering, the
placement and ``show`` treat them like any other. The stored topology does not contain them.
"""

from __future__ import annotations

from pydantic import BaseModel

from storm_dagster.model.conf import Conf
from storm_dagster.model.groupings import GroupingSpec
from storm_dagster.model.names import ACKER, SYSTEM, TOPOLOGY_MASTER
from storm_dagster.model.tables import load_table
from storm_dagster.model.topology import ComponentSpec, InputSpec, StreamSpec, TopologySpec


class _Additions(BaseModel):
    """What each component of a kind gets."""

    inputs: tuple[InputSpec, ...] = ()
    outputs: dict[str, StreamSpec]

    def to(self, part: ComponentSpec) -> ComponentSpec:
        changed = {"outputs": {**part.outputs, **self.outputs}, "inputs": (*part.inputs, *self.inputs)}
        return part.model_copy(update=changed)


class _Table(BaseModel):
    acker: ComponentSpec
    master: ComponentSpec
    system: ComponentSpec
    bolt: _Additions
    spout: _Additions


_TABLE = _Table.model_validate(load_table(__name__, "system"))
_BY_ID = GroupingSpec(type="fields", fields=("id",))


def with_system_components(spec: TopologySpec, conf: Conf) -> TopologySpec:
    """The topology with ``__acker``, ``__topology_master`` and ``__system`` appended to its bolts, in this order.

    ``conf`` is the total conf. ``__acker`` stands there even with no ackers (then without tasks), is
    capped by ``topology.max.task.parallelism``, and hears every spout's init and every bolt's
    ack, fail and reset stream; spouts hear its answers on direct streams. ``__system`` has no tasks.
    """
    ackers = conf.get("topology.acker.executors")
    ackers = 1 if ackers is None else ackers
    most = conf.get("topology.max.task.parallelism")
    if most is not None:
        ackers = min(ackers, most)
    inputs = [
        InputSpec(component=name, stream=stream, grouping=_BY_ID)
        for parts, added in ((spec.spouts, _TABLE.spout), (spec.bolts, _TABLE.bolt))
        for name in parts
        for stream in added.outputs
        if stream.startswith("__ack_")
    ]
    system = {
        ACKER: _TABLE.acker.model_copy(update={"parallelism": ackers, "inputs": tuple(inputs)}),
        TOPOLOGY_MASTER: _TABLE.master,
        SYSTEM: _TABLE.system,
    }
    bolts = {name: _TABLE.bolt.to(part) for name, part in spec.bolts.items()}
    spouts = {name: _TABLE.spout.to(part) for name, part in spec.spouts.items()}
    return spec.model_copy(update={"bolts": {**bolts, **system}, "spouts": spouts})
