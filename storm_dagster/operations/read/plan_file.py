"""Placements of ``storm-dagster plan``, which reads the cluster from a file.

They are those that a submission, a healing or a rebalance would get. Normalization, numbering and
planner are those of a submission; no state is written.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import yaml

from storm_dagster.core.scheduling.build import topology_to_place
from storm_dagster.core.submission.conf import total_conf
from storm_dagster.core.submission.tasks import (
    executor_counts,
    executors_of,
    normalize_topology,
    number_tasks,
    with_system_components,
)
from storm_dagster.core.submission.validation import validate_topology
from storm_dagster.model.conf import ClusterConf, Conf, default_conf, validate_conf
from storm_dagster.model.errors import InvalidRequest, StormDagsterError
from storm_dagster.model.groupings import Grouping
from storm_dagster.model.placement import (
    PlacementBatch,
    SupervisorSlots,
    TopologyPlacement,
    TopologyToPlace,
)
from storm_dagster.model.plan_document import (
    PlanComponent,
    PlanDocument,
    PlanOldWorker,
    PlanSupervisor,
    PlanTopology,
    decode_plan,
    place,
)
from storm_dagster.model.ranges import encode_ranges
from storm_dagster.model.records import SupervisorInfo, TaskTable, WorkerSlot
from storm_dagster.model.topology import (
    DEFAULT_STREAM,
    ComponentObject,
    ComponentSpec,
    InputSpec,
    StreamSpec,
    TopologySpec,
)
from storm_dagster.operations.context import Planner
from storm_dagster.zk.storm_cluster_state import StormClusterState


def plan_text(
    text: str, *, conf: ClusterConf | Conf, log: Callable[[str], None] | None = None
) -> list[dict[str, Any]]:
    """Plan each document of ``text``; the results as ``plan --json`` prints them.

    The planner uses the Spark that the cluster conf names, else one in this process. ``log`` gets
    one line before the plans. Raises the errors of :func:`parse_plans` and of the planner.
    """
    from storm_dagster.spark.planner import planner_for

    conf = conf.values if isinstance(conf, ClusterConf) else conf
    plans = parse_plans(text)
    if log is not None:
        spark = conf.get("spark.remote") or conf.get("spark.master") or "a Spark session of its own"
        log(f"planning {sum(len(plan.topologies) for plan in plans)} topologies on {spark}")
    planner = planner_for(conf, _pinned_session(conf))
    return [result_document(plan, planner) for plan in plans]


def _pinned_session(conf: Conf) -> str | None:
    """Id of the warm session in which the cluster's placements run.

    ``None`` without a cluster.
    """
    if not conf.get("spark.remote"):
        return None
    from storm_dagster.spark.planner import ClusterSessionIds

    # A plan needs no cluster: a ZooKeeper that is down delays it by two seconds at most.
    quick_conf = {**conf, "storm.zookeeper.connection.timeout": 2000}
    try:
        with StormClusterState.open(quick_conf) as cluster:
            stored = ClusterSessionIds(cluster.state).read()
    except StormDagsterError:
        return None
    if stored is None:
        return None
    session_id, _ = stored
    return session_id


def parse_plans(text: str) -> list[PlacementBatch]:
    """Decode the documents of a YAML stream, or one JSON document, to batches.

    All of them are checked; :class:`InvalidRequest` (or :class:`InvalidTopology`) names the
    document if there are several.
    """
    values = _load(text)
    plans: list[PlacementBatch] = []
    for number, value in enumerate(values, 1):
        source = "plan" if len(values) == 1 else f"plan, document {number}"
        plans.append(plan_batch(decode_plan(value, source), source))
    if not plans:
        raise InvalidRequest("the plan file is empty: give supervisors and topologies")
    return plans


def _load(text: str) -> list[Any]:
    """The documents of the text; empty ones are left out."""
    if text.lstrip()[:1] == "{":
        # Much faster than YAML for large clusters; the code below reads a YAML flow map that is not
        # JSON.
        with suppress(ValueError):
            return [json.loads(text)]
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return [value for value in yaml.load_all(text, Loader=loader) if value is not None]
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidRequest(f"the plan file is neither valid YAML nor JSON: {error}") from None


def plan_batch(document: PlanDocument, source: str = "plan") -> PlacementBatch:
    """Make the batch that the document describes, with the checks of a submission."""
    values, _ = validate_conf(document.conf, source=f"{source}: conf")
    cluster_conf = {**default_conf(), **values}
    supervisors = tuple(_supervisor(supervisor) for supervisor in document.supervisors)
    hosts = {supervisor.id: supervisor.info.host for supervisor in supervisors}
    topologies: list[TopologyToPlace] = []
    for index, topology in enumerate(document.topologies):
        position = f"{source}: {place('topologies', index)}"
        topologies.append(_to_place(topology, cluster_conf, hosts, position))
    return PlacementBatch(supervisors=supervisors, topologies=tuple(topologies))


def _supervisor(supervisor: PlanSupervisor) -> SupervisorSlots:
    """The supervisor as its heartbeat would announce it.

    Its host is by default its id.
    """
    heartbeat = supervisor.model_dump(exclude={"id", "used"})
    heartbeat["host"] = supervisor.host or supervisor.id
    heartbeat["ports"] = tuple(supervisor.ports)
    info = SupervisorInfo(**heartbeat, started=0, count=0, version="")
    return SupervisorSlots(id=supervisor.id, info=info, used=tuple(supervisor.used))


def _old_worker(worker: PlanOldWorker, hosts: Mapping[str, str]) -> WorkerSlot:
    """The worker as an assignment names it.

    Its host is by default that of its supervisor.
    """
    fields = worker.model_dump()
    fields["host"] = worker.host or hosts.get(worker.node, worker.node)
    fields["tasks"] = encode_ranges(worker.tasks)
    return WorkerSlot(**fields)


def _to_place(
    topology: PlanTopology, cluster_conf: Mapping[str, Any], hosts: Mapping[str, str], source: str
) -> TopologyToPlace:
    """A topology of the document as the planner takes it.

    It has passed the checks of a submission. ``cluster_conf``: defaults and the document's conf;
    ``hosts``: supervisor id -> host; ``source``: place in the document, for errors.
    """
    own_conf, _ = validate_conf(topology.conf, source=f"{source}.conf", submitted=True)
    conf = total_conf(cluster_conf, own_conf)
    spec = TopologySpec(
        name=topology.name,
        spouts={
            name: _component(part, f"{source}.spouts.{name}")
            for name, part in topology.spouts.items()
        },
        bolts={
            name: _component(part, f"{source}.bolts.{name}")
            for name, part in topology.bolts.items()
        },
    )
    try:
        spec = normalize_topology(conf, spec)
        validate_topology(spec, conf)
    except InvalidRequest as error:
        raise type(error)(f"{source}: {error.message}") from None
    full_spec = with_system_components(spec, conf)
    table = _assign_declared_ids(number_tasks(full_spec, conf), topology.tasks, source)
    executors = executor_counts(full_spec)
    _check_executors(table, executors, source)
    for key in ("dead", "unstopped"):
        _check_tasks(f"{source}.{key}", getattr(topology, key), table)
    to_place = topology_to_place(
        name=topology.name,
        topology_id="",
        spec=spec,
        conf=conf,
        tasks=table,
        executors=executors_of(table, executors),
    )
    # As a new topology until here; the document may describe one that runs, and an event of it.
    return to_place.model_copy(
        update={
            "event": topology.event,
            "reassign": topology.reassign,
            "old": tuple(_old_worker(worker, hosts) for worker in topology.old),
            "dead": tuple(topology.dead),
            "unstopped": tuple(topology.unstopped),
        }
    )


def _component(part: PlanComponent, source: str) -> ComponentSpec:
    """The component as a spec.

    Its streams and groupings do not matter to a plan, either.
    """
    conf, _ = validate_conf(part.conf, source=f"{source}.conf", submitted=True)
    names = dict.fromkeys(part.inputs)
    return ComponentSpec(
        # The code of a component does not matter to a plan.
        object=ComponentObject(python="plan:component"),
        parallelism=part.parallelism,
        conf=conf,
        inputs=tuple(InputSpec(component=name, grouping=Grouping.SHUFFLE) for name in names),
        outputs={DEFAULT_STREAM: StreamSpec()},
    )


def _check_tasks(path: str, tasks: list[int], table: TaskTable) -> None:
    """Require that the topology has these tasks.

    ``path`` is their place in the document.
    """
    table_tasks = table.component_of()
    for number, task in enumerate(tasks):
        if task not in table_tasks:
            raise InvalidRequest(
                f"{path}[{number}]: task {task} does not exist, "
                f"the topology has {encode_ranges(table_tasks)}"
            )


def _assign_declared_ids(
    table: TaskTable, declared: Mapping[str, list[int]], source: str
) -> TaskTable:
    """The table with the task ids that the document declares.

    The tasks of other components get the free ids, in declared order.
    """
    if not declared:
        return table
    unknown = sorted(declared.keys() - table.components.keys())
    if unknown:
        raise InvalidRequest(
            f"{source}.tasks.{unknown[0]}: component {unknown[0]!r} has no tasks: remove it"
        )
    declared_ids: set[int] = set()
    for ids in declared.values():
        declared_ids.update(ids)
    components = {}
    # The lowest id that no component without declared ids has taken yet.
    next_id = 1
    for name, part in table.components.items():
        ids = list(declared.get(name, ()))
        while name not in declared and len(ids) < len(part.ids):
            if next_id not in declared_ids:
                ids.append(next_id)
            next_id += 1
        if not ids:
            raise InvalidRequest(
                f"{source}.tasks.{name}: component {name!r} has no id here: give at least one"
            )
        components[name] = part.model_copy(update={"tasks": encode_ranges(ids)})
    return table.model_copy(update={"components": components})


def _check_executors(table: TaskTable, executors: Mapping[str, int], source: str) -> None:
    """Require at least one task for each executor of a component."""
    for name, part in table.components.items():
        if len(part.ids) < executors.get(name, 0):
            raise InvalidRequest(
                f"{source}.tasks.{name}: component {name!r} has parallelism {executors[name]} "
                f"and {len(part.ids)} task ids: give as many ids, or lower its parallelism"
            )


def result_document(batch: PlacementBatch, planner: Planner) -> dict[str, Any]:
    """Plan the batch, and return the result as ``plan --json`` prints it."""
    result = planner(batch)
    return {
        "topologies": {
            topology.name: _placement_document(topology, result.placement(topology.name))
            for topology in batch.topologies
        },
        "seconds": {
            "session": round(result.session_secs, 4),
            "assign": round(result.assign_secs, 4),
        },
    }


def _placement_document(topology: TopologyToPlace, placement: TopologyPlacement) -> dict[str, Any]:
    error = None
    if placement.status == "failed":
        error = {"type": placement.error_type, "message": placement.error}
    return {
        "status": placement.status,
        "error": error,
        "workers": [
            {**worker, "components": _component_counts(topology, worker["tasks"])}
            for worker in placement.worker_documents()
        ],
        "tasks": {str(task): component for task, component in sorted(topology.tasks.items())},
        "unassigned": {str(task): reason for task, reason in sorted(placement.unassigned.items())},
        "moved": placement.moved,
        "warnings": list(placement.warnings),
    }


def _component_counts(topology: TopologyToPlace, tasks: Iterable[int]) -> dict[str, int]:
    """Component -> number of these tasks that are its own."""
    counts = Counter(topology.tasks[task] for task in tasks)
    return dict(sorted(counts.items()))
