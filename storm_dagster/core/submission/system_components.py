"""Additions of the system to every topology.

They are its own components, and streams and inputs of the users' components.
"""

from dataclasses import dataclass

from storm_dagster.model.groupings import Grouping
from storm_dagster.model.names import ACKER
from storm_dagster.model.topology import ComponentObject, ComponentSpec, InputSpec, StreamSpec

_SYSTEM_STREAM = StreamSpec(fields=("event",))
"""Stream ``__system`` of a component."""

ACKER_COMPONENT = ComponentSpec(
    object=ComponentObject(python="storm_dagster.worker.engine.system:Acker"),
    outputs={
        "__ack_ack": StreamSpec(fields=("id",), direct=True),
        "__ack_fail": StreamSpec(fields=("id",), direct=True),
        "__ack_reset_timeout": StreamSpec(fields=("id", "time-delta-ms"), direct=True),
        "__system": _SYSTEM_STREAM,
    },
)

TOPOLOGY_MASTER_COMPONENT = ComponentSpec(
    object=ComponentObject(python="storm_dagster.worker.engine.system:TopologyMaster"),
    outputs={"__system": _SYSTEM_STREAM},
)

SYSTEM_COMPONENT = ComponentSpec(
    object=ComponentObject(python="storm_dagster.worker.engine.system:System"),
    parallelism=0,
    outputs={
        "__tick": StreamSpec(fields=("rate_secs",)),
        "__metrics_tick": StreamSpec(fields=("interval",)),
    },
)


@dataclass(frozen=True)
class Additions:
    """Inputs and outputs that the system adds to each component of a kind."""

    outputs: dict[str, StreamSpec]
    inputs: tuple[InputSpec, ...] = ()

    def add_to(self, component: ComponentSpec) -> ComponentSpec:
        """Copy of the component with these inputs and outputs."""
        return component.model_copy(
            update={
                "outputs": {**component.outputs, **self.outputs},
                "inputs": (*component.inputs, *self.inputs),
            }
        )


BOLT_ADDITIONS = Additions(
    outputs={
        "__ack_ack": StreamSpec(fields=("id", "ack-val")),
        "__ack_fail": StreamSpec(fields=("id",)),
        "__ack_reset_timeout": StreamSpec(fields=("id",)),
        "__system": _SYSTEM_STREAM,
    },
)

SPOUT_ADDITIONS = Additions(
    outputs={
        "__ack_init": StreamSpec(fields=("id", "init-val", "spout-task")),
        "__system": _SYSTEM_STREAM,
    },
    inputs=(
        InputSpec(component=ACKER, stream="__ack_ack", grouping=Grouping.DIRECT),
        InputSpec(component=ACKER, stream="__ack_fail", grouping=Grouping.DIRECT),
        InputSpec(component=ACKER, stream="__ack_reset_timeout", grouping=Grouping.DIRECT),
    ),
)
