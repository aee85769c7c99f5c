"""``storm-dagster plan``: the placement that a submission, a healing or a rebalance would get.

The same normalization, numbering and planner as in a submission; nothing is written anywhere.
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
    executors_of,
    normalize_topology,
    number_tasks,
    wanted_executors,
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
    """Plans each document of ``text`` on the Spark that the cluster conf names, else on one in this
    process.
    """
    from storm_dagster.spark.planner import planner_for

    conf = conf.values if isinstance(conf, ClusterConf) else conf
    plans = parse_plans(text)
    if log is not None:
        where = conf.get("spark.remote") or conf.get("spark.master") or "a Spark session of its own"
        log(f"planning {sum(len(plan.topologies) for plan in plans)} topologies on {where}")
    planner = planner_for(conf, _pinned_session(conf))
    return [result_document(plan, planner) for plan in plans]


def _pinned_session(conf: Conf) -> str | None:
    """The id of the session in which the cluster's placements run, which is warm; ``None`` without
    a cluster.
    """
    if not conf.get("spark.remote"):
        return None
    from storm_dagster.spark.planner import ClusterSessionIds

    try:
        with StormClusterState.open(
            {**conf, "storm.zookeeper.connection.timeout": 2000}
        ) as cluster:
            kept = ClusterSessionIds(cluster.state).read()
    except StormDagsterError:
        return None
    return kept[0] if kept is not None else None


def parse_plans(text: str) -> list[PlacementBatch]:
    """The documents of a YAML stream, or of one JSON document, as batches.

    All of them are checked; :class:`InvalidRequest` (or :class:`InvalidTopology`) names the
    document when there are several.
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
    if text.lstrip()[:1] == "{":
        # Much faster than YAML for large clusters; a YAML flow map that is not JSON is read below.
        with suppress(ValueError):
            return [json.loads(text)]
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return [value for value in yaml.load_all(text, Loader=loader) if value is not None]
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidRequest(f"the plan file is neither valid YAML nor JSON: {error}") from None


def plan_batch(document: PlanDocument, source: str = "plan") -> PlacementBatch:
    """The batch that the document describes, checked as a submission would be."""
    values, _ = validate_conf(document.conf, source=f"{source}: conf")
    cluster = {**default_conf(), **values}
    supervisors = tuple(_supervisor(supervisor) for supervisor in document.supervisors)
    hosts = {supervisor.id: supervisor.info.host for supervisor in supervisors}
    return PlacementBatch(
        supervisors=supervisors,
        topologies=tuple(
            _to_place(topology, cluster, hosts, f"{source}: {place('topologies', index)}")
            for index, topology in enumerate(document.topologies)
        ),
    )


def _supervisor(supervisor: PlanSupervisor) -> SupervisorSlots:
    """The supervisor as its heartbeat would announce it. Its host is named like it by default."""
    heartbeat = supervisor.model_dump(exclude={"id", "used"})
    heartbeat["host"] = supervisor.host or supervisor.id
    heartbeat["ports"] = tuple(supervisor.ports)
    info = SupervisorInfo(**heartbeat, started=0, count=0, version="")
    return SupervisorSlots(id=supervisor.id, info=info, used=tuple(supervisor.used))


def _old_worker(worker: PlanOldWorker, hosts: Mapping[str, str]) -> WorkerSlot:
    """The worker as an assignment names it. Its host is that of its supervisor by default."""
    host = worker.host or hosts.get(worker.node, worker.node)
    tasks = encode_ranges(worker.tasks)
    return WorkerSlot(**{**worker.model_dump(), "host": host, "tasks": tasks})


def _to_place(
    topology: PlanTopology, cluster: Mapping[str, Any], hosts: Mapping[str, str], source: str
) -> TopologyToPlace:
    own, _ = validate_conf(topology.conf, source=f"{source}.conf", submitted=True)
    conf = total_conf(cluster, own)
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
    whole = with_system_components(spec, conf)
    table = _assign_given_ids(number_tasks(whole, conf), topology.tasks, source)
    wanted = wanted_executors(whole)
    _check_executors(table, wanted, source)
    for key in ("dead", "unstopped"):
        _check_tasks(f"{source}.{key}", getattr(topology, key), table)
    built = topology_to_place(
        name=topology.name,
        topology_id="",
        spec=spec,
        conf=conf,
        tasks=table,
        executors=executors_of(table, wanted),
    )
    old = tuple(_old_worker(worker, hosts) for worker in topology.old)
    dead, unstopped = tuple(topology.dead), tuple(topology.unstopped)
    given = {"event": topology.event, "reassign": topology.reassign}
    return built.model_copy(update={**given, "old": old, "dead": dead, "unstopped": unstopped})


def _component(part: PlanComponent, source: str) -> ComponentSpec:
    conf, _ = validate_conf(part.conf, source=f"{source}.conf", submitted=True)
    return ComponentSpec(
        # What it runs does not matter to a plan.
        object=ComponentObject(python="plan:component"),
        parallelism=part.parallelism,
        conf=conf,
        inputs=tuple(
            InputSpec(component=name, grouping=Grouping.SHUFFLE)
            for name in dict.fromkeys(part.inputs)
        ),
        outputs={DEFAULT_STREAM: StreamSpec()},
    )


def _check_tasks(where: str, tasks: list[int], table: TaskTable) -> None:
    known = table.component_of()
    for number, task in enumerate(tasks):
        if task not in known:
            raise InvalidRequest(
                f"{where}[{number}]: task {task} does not exist, the topology has {encode_ranges(known)}"
            )


def _assign_given_ids(table: TaskTable, given: Mapping[str, list[int]], source: str) -> TaskTable:
    """The table with the ids that the document gives; the others are numbered around them, in
    declared order.
    """
    if not given:
        return table
    if unknown := sorted(given.keys() - table.components.keys()):
        raise InvalidRequest(
            f"{source}.tasks.{unknown[0]}: component {unknown[0]!r} has no tasks: remove it"
        )
    taken = {task for ids in given.values() for task in ids}
    components = {}
    cursor = 1
    for name, part in table.components.items():
        ids = list(given.get(name, ()))
        while name not in given and len(ids) < len(part.ids):
            if cursor not in taken:
                ids.append(cursor)
            cursor += 1
        if not ids:
            raise InvalidRequest(
                f"{source}.tasks.{name}: component {name!r} has no id here: give at least one"
            )
        components[name] = part.model_copy(update={"tasks": encode_ranges(ids)})
    return table.model_copy(update={"components": components})


def _check_executors(table: TaskTable, wanted: Mapping[str, int], source: str) -> None:
    for name, part in table.components.items():
        if len(part.ids) < wanted.get(name, 0):
            raise InvalidRequest(
                f"{source}.tasks.{name}: component {name!r} has parallelism {wanted[name]} and {len(part.ids)} task ids: "
                "give as many ids, or lower its parallelism"
            )


def result_document(batch: PlacementBatch, planner: Planner) -> dict[str, Any]:
    """Plans the batch; the outcome as ``plan --json`` prints it."""
    result = planner(batch)
    return {
        "topologies": {
            topology.name: _outcome(topology, result.placement(topology.name))
            for topology in batch.topologies
        },
        "seconds": {
            "session": round(result.session_secs, 4),
            "assign": round(result.assign_secs, 4),
        },
    }


def _outcome(topology: TopologyToPlace, placement: TopologyPlacement) -> dict[str, Any]:
    failed = placement.status == "failed"
    return {
        "status": placement.status,
        "error": {"type": placement.error_type, "message": placement.error} if failed else None,
        "workers": [
            {**worker, "components": _component_counts(topology, worker["tasks"])}
            for worker in placement.worker_documents()
        ],
        "tasks": {str(task): component for task, component in sorted(topology.tasks.items())},
        "unassigned": {str(task): why for task, why in sorted(placement.unassigned.items())},
        "moved": placement.moved,
        "warnings": list(placement.warnings),
    }


def _component_counts(topology: TopologyToPlace, tasks: Iterable[int]) -> dict[str, int]:
    """Component -> how many of these tasks are its own."""
    counts = Counter(topology.tasks[task] for task in tasks)
    return dict(sorted(counts.items()))
