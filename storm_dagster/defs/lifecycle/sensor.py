"""The sensor that executes due transitions.

They are delayed removals and rebalances, and unfinished activations. The sensor also keeps the
partitions in step with the cluster: a live topology has a key, wherever it was submitted. The key
of a removed one, which was seen alive or which the leader removed, is dropped once no run uses it.
"""

import hashlib
import json
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass

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
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.live.lifecycle import DoneAction, DueResult, finish_due
from storm_dagster.zk.sensor_memory import decode_memory, encode_memory, load_memory, store_memory
from storm_dagster.zk.storm_cluster_state import StormClusterState

_log = logging.getLogger(__name__)
_NAME = "lifecycle_sensor"
_PARTITION_TAG = "dagster/partition"
"""Dagster's tag of a run: its partition key."""
_MAX_MARKS = 400
"""Marks of names in a cursor; of more names it has none."""


class LifecycleMemory(msgspec.Struct, frozen=True):
    """Memory of the sensor between two ticks."""

    due: DueMemory = msgspec.field(default_factory=DueMemory)
    alive: tuple[str, ...] = ()
    """Names of the topologies that are alive, or that were and whose key is not dropped yet."""
    removed: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Ids of the topologies that the leader had removed by then.

    Unset in a record of an earlier release.
    """


def may_drop(instance: dg.DagsterInstance, names: DagsterNames, name: str, cluster_id: str) -> bool:
    """True if the partition key of a removed topology can be dropped.

    It stays while a run of the partition is under way, of any job, and while a topology of
    that name lives in another cluster whose code location in this instance has the same
    partitions: both clusters are then without a name.
    """
    if run_under_way(instance, tags={_PARTITION_TAG: name}):
        return False
    return not _alive_elsewhere(instance, names, name, cluster_id)


def drop_key(instance: dg.DagsterInstance, names: DagsterNames, name: str, cluster_id: str) -> bool:
    """Drop the partition key of a removed topology; false if it stays in use (:func:`may_drop`).

    A run that was launched between that check and the deletion would fail in Dagster before its
    first step begins, without a reason that a user can read. So the runs are read once more after
    the deletion, and such a run gets its key back.
    """
    if not may_drop(instance, names, name, cluster_id):
        return False
    instance.delete_dynamic_partition(names.partitions, name)
    if not run_under_way(instance, tags={_PARTITION_TAG: name}):
        return True
    instance.add_dynamic_partitions(names.partitions, [name])
    return False


def removed_by_leader(cluster: StormClusterState) -> tuple[str, ...]:
    """Ids of the topologies that the leader removed, the newest of them.

    Empty without a record, or for a damaged one.
    """
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
    """True if another cluster's sensor has the mark of a live namesake in its cursor.

    That sensor has the same name, because both clusters are without one. The mark of another name
    may be equal, and then counts as well.
    """
    try:
        states = instance.all_instigator_state()
    except Exception:
        return False  # An instance without a schedule storage, or of another release.
    for state in states:
        if state.instigator_name != names.name(_NAME):
            continue
        cursor = read_cursor(getattr(state.instigator_data, "cursor", None))
        is_other_cluster = cursor.get("cluster") not in (None, cluster_id)
        if is_other_cluster and _has_mark(str(cursor.get("alive", "")), name):
            return True
    return False


def name_marks(names: Iterable[str]) -> str:
    """Four hexadecimal digits for each name, for a cursor.

    Above 400 names it is one star, which matches every name.
    """
    marks = sorted({hashlib.sha256(name.encode()).hexdigest()[:4] for name in names})
    return "".join(marks) if len(marks) <= _MAX_MARKS else "*"


def _has_mark(marks: str, name: str) -> bool:
    """True if ``marks``, of :func:`name_marks`, has the mark of the name."""
    if marks == "*":
        return True
    return name_marks([name]) in {marks[at : at + 4] for at in range(0, len(marks), 4)}


def _removal(names: DagsterNames, action: DoneAction) -> dg.AssetObservation:
    """The observation that the leader reports if it removes the topology itself."""
    return dg.AssetObservation(
        asset_key=dg.AssetKey(names.asset_path(("storm", "active_topology"))),
        partition=action.name,
        description=f"kill: {action.topology_id} is gone",
        metadata={"verb": "kill", "topology_id": action.topology_id, "status": "gone"},
    )


@dataclass(frozen=True)
class _KeyChanges:
    """Partition keys to add, dropped keys, both sorted, and the names of the next memory."""

    new: list[str]
    dropped: list[str]
    alive: tuple[str, ...]
    """As :attr:`LifecycleMemory.alive`: the next tick checks names whose key cannot go yet."""


def _change_keys(
    instance: dg.DagsterInstance,
    names: DagsterNames,
    memory: LifecycleMemory,
    view: ClusterView,
    removed_ids: Collection[str],
    done: Iterable[DoneAction],
) -> _KeyChanges:
    """Compare the partition keys with the live topologies, and drop those of removed ones.

    ``memory`` is that of the former tick, ``removed_ids`` are the topologies that the leader has
    removed, ``done`` the transitions of this tick. Keys are dropped here, and not by Dagster after
    the tick, because the runs are read again after the deletion (:func:`drop_key`).
    """
    registered = set(instance.get_dynamic_partitions(names.partitions))
    alive = {topology.base.name for topology in view.topologies.values()}
    # A topology that lived for less than a tick was not seen alive.
    former_ids = () if memory.removed is msgspec.UNSET else memory.removed
    removed_names = {topology_name_of(id) for id in set(removed_ids) - set(former_ids)}
    # The same holds for a topology that this tick removed.
    removed_names |= {action.name for action in done if action.action == "remove"}
    # A key that was never seen alive belongs to a submission that is being prepared, by hand or by
    # a run.
    candidates = (set(memory.alive) | removed_names) & registered
    dropped = [
        name
        for name in sorted(candidates - alive)
        if drop_key(instance, names, name, view.cluster_id)
    ]
    pending_names = alive | candidates - {*dropped}
    return _KeyChanges(sorted(alive - registered), dropped, tuple(sorted(pending_names)))


@dataclass(frozen=True)
class _TickResult:
    """Effect of one tick on the cluster and on the partition keys."""

    view: ClusterView
    """The cluster afterwards."""
    due: DueResult
    keys: _KeyChanges
    memory_record: str | None
    """Name of the record of the memory, for the cursor."""

    def changes(self) -> list[str]:
        """Describe the transitions and the changes of keys."""
        changes = [action.describe() for action in self.due.done]
        changes += [f"new key {name}" for name in self.keys.new]
        changes += [f"dropped key {name}" for name in self.keys.dropped]
        return changes

    def skip_reason(self) -> dg.SkipReason:
        """Reason of the tick, which requests no run."""
        waiting = len(self.due.memory.seen) - len(self.due.done)
        changes = ", ".join(self.changes())
        return dg.SkipReason(
            changes or f"nothing is due, {waiting} topologies wait for their delay"
        )


def _act(
    context: dg.SensorEvaluationContext,
    names: DagsterNames,
    handles: Handles,
    record: str | None,
) -> _TickResult:
    """Execute the due transitions, drop partition keys, and store the memory.

    ``record`` is the name of the record of the former tick's memory. Raises :class:`Unavailable`
    and :class:`Fenced`.
    """
    with connect(handles, _log) as ops:
        memory = decode_memory(LifecycleMemory, load_memory(ops.cluster, _NAME, record))
        view = ops.cluster.load_view()
        report = finish_due(ops, memory.due, boot_id=boot_id(), boot_now=boot_clock(), view=view)
        if report.done:
            view = ops.cluster.load_view()
        removed = removed_by_leader(ops.cluster)
        keys = _change_keys(context.instance, names, memory, view, removed, report.done)
        memory = LifecycleMemory(report.memory, keys.alive, removed)
        encoded = encode_memory(memory)
        record = store_memory(ops.cluster, _NAME, encoded, record, epoch=view.epoch)
    return _TickResult(view, report, keys, record)


def lifecycle_sensor(
    context: dg.SensorEvaluationContext, names: DagsterNames, handles: Handles
) -> dg.SensorResult | dg.SkipReason:
    """Execute the due transitions, and add or drop partition keys.

    It also evaluates the check of the instance's settings when its result changes.
    """
    cursor = read_cursor(context.cursor)
    try:
        result = _act(context, names, handles, cursor.get("memory"))
    except (Unavailable, Fenced) as error:
        return dg.SkipReason(error.message)
    for action in result.due.done:
        context.log.info(action.describe())
    for topology_id, message in result.due.failed.items():
        context.log.warning(f"{topology_id}: {message}")
    requests: list[dg.AddDynamicPartitionsRequest] = []
    if result.keys.new:
        requests.append(dg.AddDynamicPartitionsRequest(names.partitions, result.keys.new))
    settings = check_settings(context.instance)
    view = result.view
    state = {
        "memory": result.memory_record,
        "alive": name_marks(topology.base.name for topology in view.topologies.values()),
        "cluster": view.cluster_id,
        "settings": digest(settings.description),
    }
    events: list[dg.AssetObservation | dg.AssetCheckEvaluation] = [
        _removal(names, action) for action in result.due.done if action.action == "remove"
    ]
    if cursor.get("settings") != state["settings"]:
        key = handles.zookeeper.asset_key(SUPERVISORS)
        events.append(outcome_of(settings, key, SETTINGS_CHECK, dg.AssetCheckEvaluation))
    return dg.SensorResult(
        asset_events=events,
        dynamic_partitions_requests=requests,
        skip_reason=result.skip_reason(),
        cursor=json.dumps(state),
    )
