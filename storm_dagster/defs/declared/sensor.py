"""`declared_topologies_sensor`, and the jobs that all declared topologies share.

A code location has one such sensor. Its cursor is only the time of its last tick: the newest
observation of each asset has the former state. Observations follow changes of state. While the
state is unchanged, a small one every 10 minutes confirms that all tasks run.
"""

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from storm_dagster.defs.declared.checks import LAST_UPDATED, check_freshness
from storm_dagster.defs.declared.events import cluster_key, events_sensor
from storm_dagster.defs.declared.owner import ownership_problem
from storm_dagster.defs.declared.parts import CompleteParts, part_materializations
from storm_dagster.defs.declared.runs import DEPLOY_TAG, deploy_request, request_job
from storm_dagster.defs.declared.schedules import DEPLOY_JOB, REBALANCE_JOB
from storm_dagster.defs.declared.topology import DeclaredSnapshot, DeclaredTopology, newest_version
from storm_dagster.defs.keys import run_under_way, topology_tags
from storm_dagster.defs.observe.checks import outcome_of
from storm_dagster.defs.observe.history import newest_observation
from storm_dagster.defs.observe.sensors import digest, read_cursor
from storm_dagster.model.dagster_names import PRIORITY_TAGS
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.multimap import multimap

DECLARED_TAG = {"storm/declared": "topology"}
"""Tag of the asset of each declared topology."""
_SEEN_EVERY_SECS = 600.0
"""Pause between two observations that all tasks run, while the state is unchanged."""
_CHANGED_EVERY_SECS = 60.0
"""Shortest pause between two observations of an asset."""
_MAX_EVENTS = 500
"""Number of events after which a tick observes no further topology."""


def shared_definitions(
    topologies: Mapping[str, DeclaredTopology],
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.Definitions:
    """The sensors and the jobs that all declared topologies share.

    ``topologies`` is read when they run and may be filled later. ``default_status`` is that of the
    sensors.
    """
    ((tag, value),) = DECLARED_TAG.items()
    deploy = dg.define_asset_job(
        DEPLOY_JOB,
        selection=dg.AssetSelection.tag(tag, value).without_checks(),
        executor_def=dg.in_process_executor,
        description="Applies the declarations of the selected topologies, else of all.",
        tags={**DEPLOY_TAG, **PRIORITY_TAGS},
    )
    kill = "Ends a declared topology. It stays ended until a user deploys it by hand."
    rebalance = "Moves the fewest tasks of a declared topology that restore balance."
    return dg.Definitions(
        jobs=[
            deploy,
            request_job("kill", "kill_declared", kill, topologies, {}),
            request_job("rebalance", REBALANCE_JOB, rebalance, topologies, {}),
        ],
        sensors=[
            _sensor(topologies, default_status),
            events_sensor(topologies, default_status),
        ],
    )


def _sensor(
    topologies: Mapping[str, DeclaredTopology], default_status: dg.DefaultSensorStatus
) -> dg.SensorDefinition:
    """The sensor of the ``topologies``, which it reads in each tick."""
    complete_parts = CompleteParts()

    @dg.sensor(
        name="declared_topologies_sensor",
        job_name=DEPLOY_JOB,
        minimum_interval_seconds=30,
        default_status=default_status,
        description="Observes the declared topologies and their components when their state "
        "changes, evaluates their checks, and deploys changed code where the deploy policy is "
        "hot or gray.",
    )
    def watch(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        cursor = read_cursor(context.cursor)
        tick = _Tick(context, time.time(), complete_parts)
        # Key of each cluster -> its topologies, and epoch seconds of the last tick that saw it.
        clusters = multimap((cluster_key(topology), topology) for topology in topologies.values())
        seen_at = {cluster: cursor.get(cluster) for cluster in clusters}
        for cluster, cluster_topologies in clusters.items():
            if tick.visit(cluster_topologies, seen_at[cluster]):
                seen_at[cluster] = tick.now
        text = "; ".join(tick.summary[:20])
        text = text or f"all tasks of {len(topologies)} declared topologies run"
        return dg.SensorResult(
            tick.requests,
            asset_events=tick.events,
            skip_reason=None if tick.requests else dg.SkipReason(text),
            cursor=json.dumps(seen_at),
        )

    return watch


@dataclass
class _Tick:
    """One tick of the sensor, with its events and requests up to now."""

    context: dg.SensorEvaluationContext
    now: float
    """Epoch seconds at its begin."""
    complete_parts: CompleteParts
    events: list[Any] = field(default_factory=list)
    requests: list[dg.RunRequest] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)
    """Failed checks, and errors of sessions, in words."""

    def visit(self, cluster_topologies: list[DeclaredTopology], seen_at: float | None) -> bool:
        """Observe the topologies of one cluster; false if its session has failed.

        ``seen_at`` are the epoch seconds of the last tick that saw the cluster.
        """
        instance = self.context.instance
        snapshots, problem = _take_snapshots(cluster_topologies, instance)
        for topology in cluster_topologies:
            snapshot = snapshots.get(topology.name)
            if len(self.events) < _MAX_EVENTS:
                former = newest_observation(instance, topology.key)
                self.events += state_events(topology, snapshot, former, self.now, seen_at, problem)
            if snapshot is not None:
                self._add_snapshot(topology, snapshot)
        if problem:
            self.summary.append(problem)
        return not problem

    def _add_snapshot(self, topology: DeclaredTopology, snapshot: DeclaredSnapshot) -> None:
        """Add the failed checks, a new version, and the request of a deploy that is due."""
        self.summary += [
            str(result.description)
            for result in snapshot.check_results.values()
            if not result.passed
        ]
        self.events += _new_version(self.context, topology, snapshot, self.complete_parts)
        if topology.policy == "manual" or topology.files.changed():
            # A run would load the newer files, and the difference from the loaded ones would stay.
            return
        request = deploy_request(
            self.context.instance,
            topology.key,
            topology.declaration,
            topology.described,
            snapshot.actual,
            self.now,
        )
        if request is not None:
            tags = {**topology.job_tags, **request.tags}
            self.requests.append(request.with_replaced_attrs(tags=tags))


def _take_snapshots(
    declared: list[DeclaredTopology], instance: dg.DagsterInstance
) -> tuple[dict[str, DeclaredSnapshot], str]:
    """Snapshots of the topologies of one cluster, and the error of the session.

    Name -> snapshot; they are taken in one session, up to its error. ``""`` without an error.
    """
    snapshots: dict[str, DeclaredSnapshot] = {}
    with ExitStack() as stack:
        # All have the resources of the same cluster. A tick waits at most 2 s for a leader.
        first = declared[0]
        nimbus: Any = stack.enter_context(first.nimbus.client(patience_secs=2.0))

        def measure(name: str) -> dict[str, Any] | None:
            nonlocal nimbus
            try:
                return nimbus.get(f"/v1/topologies/{name}") if nimbus else None
            except StormDagsterError:
                nimbus = None  # The other topologies do not wait for it.
                return None

        try:
            cluster, blobs = stack.enter_context(first.connect(instance))
            view = cluster.load_view()
            for topology in declared:
                snapshots[topology.name] = topology.snapshot(
                    cluster, blobs, view, instance, measure
                )
        except StormDagsterError as error:
            return snapshots, error.message
    return snapshots, ""


def state_events(
    topology: DeclaredTopology,
    snapshot: DeclaredSnapshot | None,
    former: Mapping[str, Any],
    now: float,
    seen_at: float | None,
    problem: str,
) -> list[Any]:
    """Events of a change since the newest observation ``former``.

    They are observations of the topology and of its components whose sizes changed, and evaluations
    of its checks; a change within a minute after ``former`` waits. Without a change, one
    observation every ten minutes while all tasks run, else none. ``snapshot`` is ``None`` while the
    cluster is unreachable, because of ``problem``; a tick last saw it at ``seen_at``. Such a state
    has events only once the check `fresh` fails.
    """
    key = topology.key
    former_state = str(former.get("state", ""))
    last_running = _last_running(snapshot, former, now, seen_at)
    freshness = check_freshness(last_running, now, topology.freshness)
    if snapshot is None:
        if freshness.passed or last_running is None:
            return []
        snapshot = DeclaredSnapshot(
            {}, metadata={"status": "OUT OF REACH"}, details={"problem": problem}
        )
    results = {**snapshot.check_results, "fresh": freshness}
    # The part after the dot shows if the components have to be observed as well.
    components_digest = digest(snapshot.components)
    state = f"{_state_digest(snapshot, results)}.{components_digest}"
    is_changed = state != former_state
    runs_now = last_running == now
    if is_changed:
        if former_state and 0 <= now - former["at"] < _CHANGED_EVERY_SECS:
            return []
    elif not runs_now or now - former.get(LAST_UPDATED, 0.0) < _SEEN_EVERY_SECS:
        return []
    metadata = dict(snapshot.metadata)
    if is_changed:
        metadata.update(snapshot.details)
    metadata["state"] = state
    metadata["runs"] = runs_now
    if last_running is not None:
        metadata[LAST_UPDATED] = dg.MetadataValue.timestamp(last_running)
    description = results.get("all_tasks_run", freshness).description
    events: list[Any] = [dg.AssetObservation(key, description=description, metadata=metadata)]
    if not is_changed:
        return events
    if components_digest != former_state.rpartition(".")[2]:
        for name, sizes in snapshot.components.items():
            if name in topology.components:
                events.append(dg.AssetObservation(topology.components[name], metadata=sizes))
    for name, result in results.items():
        events.append(outcome_of(result, key, name, dg.AssetCheckEvaluation))
    return events


def _last_running(
    snapshot: DeclaredSnapshot | None,
    former: Mapping[str, Any],
    now: float,
    seen_at: float | None,
) -> float | None:
    """Epoch seconds at which all tasks were last seen running; ``None`` for never."""
    if snapshot is not None and snapshot.runs:
        return now
    times = [former.get(LAST_UPDATED)]
    if former.get("runs"):
        # No tick has seen a change since, up to the last one that saw the cluster.
        times.append(seen_at)
    return max(filter(None, times), default=None)


def _state_digest(snapshot: DeclaredSnapshot, results: Mapping[str, dg.AssetCheckResult]) -> str:
    """Hash of the state without the sizes of components."""
    # A passed check has no severity that matters.
    outcomes = {
        name: [result.passed, result.passed or str(result.severity)]
        for name, result in results.items()
    }
    workers = str(snapshot.details.get("workers_and_logs"))
    return digest([snapshot.metadata, workers, outcomes, snapshot.problems])


def _new_version(
    context: dg.SensorEvaluationContext,
    topology: DeclaredTopology,
    snapshot: DeclaredSnapshot,
    complete_parts: CompleteParts,
) -> list[dg.AssetMaterialization]:
    """The materializations of a version that a run of another instance deployed.

    They are those of the topology and of its parts. Of a version that is not new, they are those
    of parts and sources without any. Empty unless all tasks run, and for the versions of another
    owner, which are not those of this declaration. A new version waits while a run of the topology
    is under way.
    """
    actual = snapshot.actual
    instance = context.instance
    key = topology.key
    if actual is not None:
        owner = topology.declaration.owner
        if ownership_problem(topology.name, owner, actual.owner) is not None:
            return []
    if actual is None or not snapshot.runs or actual.status not in ("ACTIVE", "INACTIVE"):
        return []
    tags = topology_tags(topology.name)
    if newest_version(instance, key) == actual.data_version:
        return complete_parts.missing(context, topology, snapshot)
    if run_under_way(instance, tags=tags):
        return []
    metadata = {**snapshot.metadata, **snapshot.details}
    materialization = dg.AssetMaterialization(key, metadata=metadata, tags=actual.version_tags)
    parts = part_materializations(topology, actual, details=snapshot.details)
    return [*parts, materialization]
