"""The sensor that finishes what waits: delayed removals and rebalances, unfinished activations.

It also keeps the partitions in step with the cluster: a topology that lives has a key, wherever it
was submitted; the key of one that was seen alive, or that the leader removed, is dropped once no
run uses it.
"""

import hashlib
import json
import logging
from collections.abc import Iterable

import dagster as dg
import msgspec

from storm_dagster.core.transitions import DueMemory
from storm_dagster.defs.instance_settings import SETTINGS_CHECK, check_settings
from storm_dagster.defs.keys import SUPERVISORS, run_under_way
from storm_dagster.defs.observe.checks import outcome_of
from storm_dagster.defs.observe.sensors import digest, read_cursor
from storm_dagster.defs.resources.operating import Handles, connect
from storm_dagster.host.clock import boot_clock, boot_id
from storm_dagster.model import paths
from storm_dagster.model.dagster_names import DagsterNames
from storm_dagster.model.errors import Corrupt, Fenced, Unavailable
from storm_dagster.model.names import topology_name_of
from storm_dagster.model.records import decode_record
from storm_dagster.model.unreported import UnreportedEvents
from storm_dagster.operations.live.lifecycle import DoneAction, finish_due
from storm_dagster.zk.sensor_memory import decode_memory, encode_memory, load_memory, store_memory
from storm_dagster.zk.storm_cluster_state import StormClusterState

_log = logging.getLogger(__name__)
_NAME = "lifecycle_sensor"
_PARTITION_TAG = "dagster/partition"
_MOST_MARKS = 400


class LifecycleMemory(msgspec.Struct, frozen=True):
    """Memory of the sensor between two ticks."""

    due: DueMemory = msgspec.field(default_factory=DueMemory)
    alive: tuple[str, ...] = ()
    """Names of the topologies that were seen alive."""
    removed: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Ids of the topologies that the leader had removed by then; unset in a record of an earlier
    release.
    """


def may_drop(instance: dg.DagsterInstance, names: DagsterNames, name: str, cluster_id: str) -> bool:
    """True if the partition key of a topology that is gone from this cluster can be dropped.

    It stays while a run of the partition is under way, whatever its job, and while a topology of
    that name lives in another cluster whose code location in this instance has the same
    partitions: both are then without a name.
    """
    if run_under_way(instance, tags={_PARTITION_TAG: name}):
        return False
    return not _alive_elsewhere(instance, names, name, cluster_id)


def removed_by_leader(cluster: StormClusterState) -> tuple[str, ...]:
    """Ids of the newest topologies that the leader removed; none while the record is damaged."""
    raw = cluster.state.get_data(paths.UNREPORTED)
    if not raw:
        return ()
    try:
        return decode_record(UnreportedEvents, raw, paths.UNREPORTED).removed
    except Corrupt as error:
        _log.warning("which topologies the leader removed is unknown: %s", error.message)
        return ()


def _alive_elsewhere(
    instance: dg.DagsterInstance, names: DagsterNames, name: str, cluster_id: str
) -> bool:
    """Whether a sensor of our name saw a topology of that name alive in another cluster, as far as
    marks tell.
    """
    try:
        states = instance.all_instigator_state()
    except Exception:
        return False  # An instance without a schedule storage, or of another release.
    ours = (state.instigator_data for state in states if state.instigator_name == names.name(_NAME))
    cursors = [read_cursor(getattr(data, "cursor", None)) for data in ours]
    others = [cursor for cursor in cursors if cursor.get("cluster") not in (None, cluster_id)]
    return any(_holds(str(cursor.get("alive", "")), name) for cursor in others)


def name_marks(names: Iterable[str]) -> str:
    """Four hexadecimal digits for each name, for a cursor; above 400 names one star, which holds
    them all.
    """
    marks = sorted({hashlib.sha256(name.encode()).hexdigest()[:4] for name in names})
    return "".join(marks) if len(marks) <= _MOST_MARKS else "*"


def _holds(marks: str, name: str) -> bool:
    return marks == "*" or name_marks([name]) in {
        marks[at : at + 4] for at in range(0, len(marks), 4)
    }


def _removal(names: DagsterNames, done: DoneAction) -> dg.AssetObservation:
    """The observation that the leader reports if it removes the topology itself."""
    return dg.AssetObservation(
        asset_key=dg.AssetKey(names.asset_path(("storm", "active_topology"))),
        partition=done.name,
        description=f"kill: {done.topology_id} is gone",
        metadata={"verb": "kill", "topology_id": done.topology_id, "status": "gone"},
    )


def lifecycle_sensor(
    context: dg.SensorEvaluationContext, names: DagsterNames, handles: Handles
) -> dg.SensorResult | dg.SkipReason:
    """Do what is due, and add or drop partition keys."""
    cursor = read_cursor(context.cursor)
    record: str | None = cursor.get("memory")
    try:
        with connect(handles, _log) as ops:
            known = decode_memory(LifecycleMemory, load_memory(ops.cluster, _NAME, record))
            view, cluster_id = ops.cluster.load_view(), ops.cluster.cluster_id()
            report = finish_due(ops, known.due, boot_id=boot_id(), boot_now=boot_clock(), view=view)
            if report.done:
                view = ops.cluster.load_view()
            registered = set(context.instance.get_dynamic_partitions(names.partitions))
            alive = {topology.base.name for topology in view.topologies.values()}
            removed = removed_by_leader(ops.cluster)
            # One that lived for less than a tick was not seen alive.
            known_removed = () if known.removed is msgspec.UNSET else known.removed
            unseen = {topology_name_of(id) for id in set(removed) - set(known_removed)}
            # One that this tick removed goes the same way.
            unseen |= {done.name for done in report.done if done.action == "remove"}
            before = (set(known.alive) | unseen) & registered
            # A key that was never seen alive belongs to a submission that is being prepared, by
            # hand or by a run.
            gone = sorted(
                n for n in before - alive if may_drop(context.instance, names, n, cluster_id)
            )
            # Names that are gone but still being submitted are looked at again.
            memory = LifecycleMemory(
                report.memory, tuple(sorted(alive | before - {*gone})), removed
            )
            record = store_memory(
                ops.cluster, _NAME, encode_memory(memory), record, epoch=view.epoch
            )
    except (Unavailable, Fenced) as error:
        return dg.SkipReason(error.message)
    new = sorted(alive - registered)
    requests: list[dg.AddDynamicPartitionsRequest | dg.DeleteDynamicPartitionsRequest] = []
    if new:
        requests.append(dg.AddDynamicPartitionsRequest(names.partitions, new))
    if gone:
        requests.append(dg.DeleteDynamicPartitionsRequest(names.partitions, gone))
    lines = [done.describe() for done in report.done]
    for line in lines:
        context.log.info(line)
    for topology_id, message in report.failed.items():
        context.log.warning(f"{topology_id}: {message}")
    done = ", ".join([*lines, *(f"new key {n}" for n in new), *(f"dropped key {n}" for n in gone)])
    waiting = len(report.memory.seen) - len(lines)
    settings = check_settings(context.instance)
    state = {
        "memory": record,
        "alive": name_marks(alive),
        "cluster": cluster_id,
        "settings": digest(settings.description),
    }
    key = handles.zookeeper.asset_key(SUPERVISORS)
    evaluation = outcome_of(settings, key, SETTINGS_CHECK, dg.AssetCheckEvaluation)
    removals = [done for done in report.done if done.action == "remove"]
    events: list[dg.AssetObservation | dg.AssetCheckEvaluation] = [
        _removal(names, done) for done in removals
    ]
    if cursor.get("settings") != state["settings"]:
        events.append(evaluation)
    return dg.SensorResult(
        asset_events=events,
        dynamic_partitions_requests=requests,
        skip_reason=dg.SkipReason(
            done or f"nothing is due, {waiting} topologies wait for their delay"
        ),
        cursor=json.dumps(state),
    )
