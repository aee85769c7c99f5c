"""Differences between a run in this process and the same topology in a cluster, as sentences."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storm_dagster.api.spark.session import spark_target
from storm_dagster.model.fusion import is_spark_component
from storm_dagster.model.topology import TopologySpec

_CLUSTER_KEYS = (
    "topology.priority",
    "topology.scheduler.strategy",
    "topology.state.dir",
    "use.userdefine.assignment",
    "worker.memory.size",
)
"""Keys of a topology that only a cluster obeys: placement, and the storage of hosts."""


def differences(
    spec: TopologySpec,
    conf: Mapping[str, Any],
    submitted: Mapping[str, Any],
    kept_state: Path | None,
) -> list[str]:
    """Return the differences of a cluster for this topology.

    ``submitted`` has the values that the author or the caller set. ``kept_state`` is the folder of
    the state, if it is kept after the run.
    """
    lines: list[str] = []
    workers = conf.get("topology.workers") or 1
    executors = sum(part.parallelism for _, _, part in spec.components())
    if workers > 1:
        lines.append(
            f"a cluster runs {workers} worker processes (topology.workers), on as many cores; here "
            f"all {executors} executors share one process, and all but blocking ones one core"
        )
    if kept_state is None:
        lines.append(
            "a cluster keeps state, dead letters and positions of sources; here they are deleted "
            "at the end: --state-dir DIR keeps them for the next run"
        )
    else:
        lines.append(f"state, dead letters and positions of sources are kept in {kept_state}")
    lines.append("a cluster restarts a worker that dies; here the run ends with this process")
    ignored = [key for key in _CLUSTER_KEYS if key in submitted]
    if ignored:
        lines.append(f"without effect here: {', '.join(ignored)}")
    spark = [name for name, _, part in spec.components() if is_spark_component(part)]
    if spark:
        url = spark_target(conf)[1]
        lines.append(f"Spark at {url} runs {', '.join(spark)}: its start takes some seconds")
    return lines
