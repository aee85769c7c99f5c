"""The components that the system adds to every topology, as in Storm and JStorm.

The worker runs these ids natively; here they stand as ordinary components, so that task numbering, the
placement and ``show`` treat them like any other. The stored topology does not contain them.
"""

from __future__ import annotations

from storm_dagster.model.conf import Conf
from storm_dagster.model.groupings import GroupingSpec
from storm_dagster.model.names import ACKER, SYSTEM, TOPOLOGY_MASTER
from storm_dagster.model.topology import ComponentObject, ComponentSpec, InputSpec, StreamSpec, TopologySpec

ACK_INIT = "__ack_init"
ACK_ACK = "__ack_ack"
ACK_FAIL = "__ack_fail"
ACK_RESET_TIMEOUT = "__ack_reset_timeout"
SYSTEM_STREAM = "__system"
TICK = "__tick"
METRICS_TICK = "__metrics_tick"

_BY_ID = GroupingSpec(type="fields", fields=("id",))
_DIRECT = GroupingSpec(type="direct")
_MODULE = "storm_dagster.worker.engine.system"


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
    inputs = [InputSpec(component=spout, stream=ACK_INIT, grouping=_BY_ID) for spout in spec.spouts]
    for bolt in spec.bolts:
        inputs.extend(
            InputSpec(component=bolt, stream=stream, grouping=_BY_ID)
            for stream in (ACK_ACK, ACK_FAIL, ACK_RESET_TIMEOUT)
        )
    acker = ComponentSpec(
        object=ComponentObject(python=f"{_MODULE}:Acker"),
        parallelism=ackers,
        inputs=tuple(inputs),
        outputs={
            ACK_ACK: StreamSpec(fields=("id",), direct=True),
            ACK_FAIL: StreamSpec(fields=("id",), direct=True),
            ACK_RESET_TIMEOUT: StreamSpec(fields=("id", "time-delta-ms"), direct=True),
            SYSTEM_STREAM: StreamSpec(fields=("event",)),
        },
    )
    master = ComponentSpec(
        object=ComponentObject(python=f"{_MODULE}:TopologyMaster"),
        parallelism=1,
        outputs={SYSTEM_STREAM: StreamSpec(fields=("event",))},
    )
    system = ComponentSpec(
        object=ComponentObject(python=f"{_MODULE}:System"),
        parallelism=0,
        outputs={TICK: StreamSpec(fields=("rate_secs",)), METRICS_TICK: StreamSpec(fields=("interval",))},
    )
    return spec.model_copy(
        update={
            "bolts": {
                **{bolt: _bolt(part) for bolt, part in spec.bolts.items()},
                ACKER: acker,
                TOPOLOGY_MASTER: master,
                SYSTEM: system,
            },
            "spouts": {spout: _spout(part) for spout, part in spec.spouts.items()},
        }
    )


def _bolt(part: ComponentSpec) -> ComponentSpec:
    streams = {
        ACK_ACK: StreamSpec(fields=("id", "ack-val")),
        ACK_FAIL: StreamSpec(fields=("id",)),
        ACK_RESET_TIMEOUT: StreamSpec(fields=("id",)),
        SYSTEM_STREAM: StreamSpec(fields=("event",)),
    }
    return part.model_copy(update={"outputs": {**part.outputs, **streams}})


def _spout(part: ComponentSpec) -> ComponentSpec:
    streams = {
        ACK_INIT: StreamSpec(fields=("id", "init-val", "spout-task")),
        SYSTEM_STREAM: StreamSpec(fields=("event",)),
    }
    answers = tuple(
        InputSpec(component=ACKER, stream=stream, grouping=_DIRECT) for stream in (ACK_ACK, ACK_FAIL, ACK_RESET_TIMEOUT)
    )
    return part.model_copy(update={"outputs": {**part.outputs, **streams}, "inputs": (*part.inputs, *answers)})
