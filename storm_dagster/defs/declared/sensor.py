"""`declared_topologies_sensor`: one for all declared topologies of a code location, and the jobs
that they share.

It keeps nothing but the time of its last tick: what it observed before is the newest observation of
each asset. Observations follow changes of state. While nothing changes, a small one every 10
minutes confirms that all tasks run.
"""

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import dagster as dg

from storm_dagster.defs.declared.checks import LAST_UPDATED, fresh
from storm_dagster.defs.declared.runs import (
    DEPLOY_JOB,
    DEPLOY_TAG,
    REBALANCE_JOB,
    ask_job,
    deploy_request,
)
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
_CHANGED_EVERY_SECS = 60.0
_MOST_EVENTS = 500


def shared_definitions(topologies: Mapping[str, DeclaredTopology]) -> dg.Definitions:
    """The sensor and the jobs. ``topologies`` is read when they run: it may be filled later."""
    deploy = dg.define_asset_job(
        DEPLOY_JOB,
        selection=dg.AssetSelection.tag(*next(iter(DECLARED_TAG.items()))).without_checks(),
        executor_def=dg.in_process_executor,
        description="Brings declared topologies to what is declared: those that are selected, else all.",
        tags={**DEPLOY_TAG, **PRIORITY_TAGS},
    )
    kill = "Ends a declared topology. It stays ended until somebody deploys it by hand."
    rebalance = "Moves the fewest tasks of a declared topology that restore balance."
    return dg.Definitions(
        jobs=[
            deploy,
            ask_job("kill", "kill_declared", kill, topologies, {}),
            ask_job("rebalance", REBALANCE_JOB, rebalance, topologies, {}),
        ],
        sensors=[_sensor(topologies)],
    )


def _sensor(topologies: Mapping[str, DeclaredTopology]) -> dg.SensorDefinition:
    @dg.sensor(
        name="declared_topologies_sensor",
        job_name=DEPLOY_JOB,
        minimum_interval_seconds=30,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Observes the declared topologies and their components when their state changes, evaluates their "
        "checks, and deploys changed code where the deploy policy is hot or gray.",
    )
    def watch(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        now, cursor, instance = time.time(), read_cursor(context.cursor), context.instance
        events, requests, summary = list[Any](), list[dg.RunRequest](), list[str]()
        places = (
            (digest([one.zookeeper.home, one.zookeeper.conf_dir])[:8], one)
            for one in topologies.values()
        )
        clusters = multimap(places)
        ticked = {where: cursor.get(where) for where in clusters}
        for where, declared in clusters.items():
            snapshots, trouble = _look(declared, instance)
            for topology in declared:
                snapshot = snapshots.get(topology.name)
                if len(events) < _MOST_EVENTS:
                    before = newest_observation(instance, topology.key)
                    events += state_events(topology, snapshot, before, now, ticked[where], trouble)
                if snapshot is None:
                    continue
                summary += [
                    str(verdict.description)
                    for verdict in snapshot.check_results.values()
                    if not verdict.passed
                ]
                events += _new_version(instance, topology, snapshot)
                declaration, described = topology.declaration, topology.described
                if topology.policy == "manual" or topology.files.changed():
                    # A run would load the newer files, and leave the same difference from those of
                    # here.
                    continue
                if request := deploy_request(
                    instance, topology.key, declaration, described, snapshot.actual, now
                ):
                    requests.append(request)
            summary += [trouble] if trouble else []
            ticked[where] = ticked[where] if trouble else now
        text = "; ".join(summary[:20]) or f"all tasks of {len(topologies)} declared topologies run"
        skipped = None if requests else dg.SkipReason(text)
        return dg.SensorResult(
            requests, asset_events=events, skip_reason=skipped, cursor=json.dumps(ticked)
        )

    return watch


def _look(
    declared: list[DeclaredTopology], instance: dg.DagsterInstance
) -> tuple[dict[str, DeclaredSnapshot], str]:
    """Snapshots of the topologies of one cluster, taken in one session, and the error that ended
    it.
    """
    found: dict[str, DeclaredSnapshot] = {}
    with ExitStack() as stack:
        nimbus: Any = stack.enter_context(declared[0].nimbus.client(2.0))

        def measure(name: str) -> dict[str, Any] | None:
            nonlocal nimbus
            try:
                return nimbus.get(f"/v1/topologies/{name}") if nimbus else None
            except StormDagsterError:
                nimbus = None  # Not once more for each topology.
                return None

        try:
            cluster, blobs = stack.enter_context(declared[0].connect(instance))
            view = cluster.load_view()
            for topology in declared:
                found[topology.name] = topology.snapshot(cluster, blobs, view, measure)
        except StormDagsterError as error:
            return found, error.message
    return found, ""


def state_events(
    topology: DeclaredTopology,
    snapshot: DeclaredSnapshot | None,
    before: Mapping[str, Any],
    now: float,
    ticked: float | None,
    trouble: str,
) -> list[Any]:
    """Events to record, ``before`` being the newest observation; none while that still holds.

    ``look`` is ``None`` while the cluster is out of reach, by ``trouble``; a tick last saw it at
    ``ticked``.
    """
    key, former = topology.key, str(before.get("state", ""))
    times = [before.get(LAST_UPDATED), ticked if before.get("runs") else None]
    seen = now if snapshot and snapshot.runs else max(filter(None, times), default=None)
    freshness = fresh(seen, now, topology.freshness)
    if snapshot is None:
        if freshness.passed or seen is None:
            return []
        snapshot = DeclaredSnapshot(
            {}, metadata={"status": "OUT OF REACH"}, details={"problem": trouble}
        )
    found = {**snapshot.check_results, "fresh": freshness}
    outcomes = {name: [one.passed, one.passed or str(one.severity)] for name, one in found.items()}
    rows, parts = str(snapshot.details.get("workers_and_logs")), digest(snapshot.components)
    state = f"{digest([snapshot.metadata, rows, outcomes, snapshot.problems])}.{parts}"
    changed = state != former
    if changed and former and 0 <= now - before["at"] < _CHANGED_EVERY_SECS:
        return []
    if not changed and not (
        seen == now and now - before.get(LAST_UPDATED, 0.0) >= _SEEN_EVERY_SECS
    ):
        return []
    metadata = {
        **snapshot.metadata,
        **(snapshot.details if changed else {}),
        "state": state,
        "runs": seen == now,
    }
    metadata |= {} if seen is None else {LAST_UPDATED: dg.MetadataValue.timestamp(seen)}
    words = found.get("all_tasks_run", freshness).description
    events: list[Any] = [dg.AssetObservation(key, description=words, metadata=metadata)]
    if changed and parts != former.rpartition(".")[2]:
        shown = [name for name in snapshot.components if name in topology.components]
        events += [
            dg.AssetObservation(topology.components[n], metadata=snapshot.components[n])
            for n in shown
        ]
    if changed:
        events += [
            outcome_of(one, key, name, dg.AssetCheckEvaluation) for name, one in found.items()
        ]
    return events


def _new_version(
    instance: dg.DagsterInstance, topology: DeclaredTopology, snapshot: DeclaredSnapshot
) -> list[dg.AssetMaterialization]:
    """The materialization of a version that was deployed from elsewhere."""
    actual, key = snapshot.actual, topology.key
    if actual is None or not snapshot.runs or actual.status not in ("ACTIVE", "INACTIVE"):
        return []
    tags = topology_tags(topology.name)
    if newest_version(instance, key) == actual.data_version or run_under_way(instance, tags=tags):
        return []
    metadata = {**snapshot.metadata, **snapshot.details}
    return [dg.AssetMaterialization(key, metadata=metadata, tags=actual.version_tags)]
