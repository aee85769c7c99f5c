"""Asset checks: the correctness rules of the cluster, asked of the live cluster. They change
nothing.

They cover all topologies at once, so that they can be run from the UI without a partition. They are
left out of `submit_topology`, whose run has exactly six steps; `supervisor_sensor` evaluates them
whenever the cluster changes.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import dagster as dg

from storm_dagster.core.diagnosis import diagnose
from storm_dagster.core.invariants.rules import RULES
from storm_dagster.core.invariants.snapshot import ClusterSnapshot
from storm_dagster.core.reassignment import current_topology
from storm_dagster.core.scheduling import assignment_checks
from storm_dagster.core.snapshot.topology import snapshot_topology
from storm_dagster.defs import keys
from storm_dagster.defs.binding import bind, cluster_key
from storm_dagster.defs.instance_settings import SETTINGS_CHECK, settings_check
from storm_dagster.defs.keys import catalog
from storm_dagster.defs.metadata import notes, step_errors, table
from storm_dagster.defs.resources.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.resources.operating import Handles, operations
from storm_dagster.model.dagster_names import DagsterNames
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.names import placement_key
from storm_dagster.model.placement import TopologyToPlace
from storm_dagster.model.slot import Slot
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext, load_runnable
from storm_dagster.operations.live.worker_requests import ask_topology_master, link_key_of
from storm_dagster.operations.read.exposures import ClusterPlace, exposures
from storm_dagster.operations.read.inspection import code_keys, inspect_cluster, stored_hashes
from storm_dagster.security.settings import Security

EXPOSURES_CHECK = "exposures"
DIAGNOSIS_CHECK = "diagnosis"
_STABLE_SECS = 5.0
_Outcome = TypeVar("_Outcome", dg.AssetCheckResult, dg.AssetCheckEvaluation)

_ASSETS: Mapping[str, dg.AssetKey] = {
    "one_slot_per_task": keys.PUBLISHED_ASSIGNMENT,
    "slots_not_shared": keys.PUBLISHED_ASSIGNMENT,
    "assigned_to_live_slots": keys.SUPERVISORS,
}

CHECK_ASSETS: Mapping[str, tuple[dg.AssetKey, dg.AssetCheckSeverity, str]] = {
    rule.name: (
        _ASSETS.get(rule.name, keys.ACTIVE_TOPOLOGY),
        # A lost supervisor is what the cluster heals from: a warning for as long as that takes.
        dg.AssetCheckSeverity.WARN if rule.heals else dg.AssetCheckSeverity.ERROR,
        rule.words,
    )
    for rule in RULES
    if rule.by_view
}
"""Check -> the asset it stands at, its severity, and the rule in words: the rules that one view
decides.
"""


def view_findings(view: ClusterView) -> dict[str, list[str]]:
    """Check name -> violations of its rule in ``view``."""
    facts = ClusterSnapshot(view)
    return {
        rule.name: [violation.sentence for violation in rule.check(facts)]
        for rule in RULES
        if rule.by_view
    }


def violations_result(
    found: Iterable[str],
    topologies: int,
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
) -> dg.AssetCheckResult:
    """The outcome of one check, with the violations spelled out."""
    lines = list(found)
    metadata = {"violations": len(lines), "found": notes(lines[:50]), "topologies": topologies}
    return dg.AssetCheckResult(passed=not lines, severity=severity, metadata=metadata)


def outcome_of(
    result: dg.AssetCheckResult, key: dg.AssetKey, name: str, kind: type[_Outcome]
) -> _Outcome:
    """The result, or the evaluation without a run, of that check of an asset."""
    return kind(
        asset_key=key,
        check_name=name,
        passed=result.passed,
        severity=result.severity,
        description=result.description,
        metadata=dict(result.metadata or {}),
    )


def _view_check(name: str) -> Callable[..., dg.AssetCheckResult]:
    def check(zookeeper: ZooKeeperResource) -> dg.AssetCheckResult:
        with step_errors(), zookeeper.cluster() as cluster:
            view = cluster.load_view()
        return violations_result(
            view_findings(view)[name], len(view.topologies), CHECK_ASSETS[name][1]
        )

    return check


def blobs_check(zookeeper: ZooKeeperResource, blobstore: BlobStoreResource) -> dg.AssetCheckResult:
    """Archive, conf and code of every topology are stored, each with its content hash."""
    with step_errors(), zookeeper.cluster() as cluster:
        view = cluster.load_view()
        with blobstore.blobs(cluster) as blobs:
            facts = ClusterSnapshot(view, blobs=stored_hashes(blobs, code_keys(view)))
    (rule,) = (rule for rule in RULES if rule.name == "blobs_present")
    return violations_result(
        (violation.sentence for violation in rule.check(facts)), len(view.topologies)
    )


def exposures_check(zookeeper: ZooKeeperResource) -> dg.AssetCheckResult:
    """No exposure that ``doctor --security`` would list; else each with its remedy."""
    with step_errors():
        place = ClusterPlace(zookeeper.home_path(), zookeeper.conf_dir, zookeeper.conf())
        rows = [(name, *row) for name, check in exposures(place).items() for row in check(place)]
    exposed = [row for row in rows if row[1] != "ok"]
    return dg.AssetCheckResult(
        passed=not exposed,
        severity=dg.AssetCheckSeverity.WARN,
        description="; ".join(f"{found}: {remedy}" for _, _, found, remedy in exposed)
        or "nothing is exposed",
        metadata={"exposures": len(exposed), "findings": table("check state found remedy", rows)},
    )


def diagnosis_check(zookeeper: ZooKeeperResource) -> dg.AssetCheckResult:
    """No active topology has a bottleneck, a growing lag or another finding of ``show``; else each
    with its remedy.
    """
    with step_errors(), zookeeper.cluster() as cluster:
        view, security, now = cluster.load_view(), Security.of(zookeeper.conf()), int(time.time())
        active = [one for one in view.topologies.values() if one.base.status == "ACTIVE"]
        rows: list[tuple[str, str, str, str, str]] = []
        for topology in active:
            report = ask_topology_master(topology, 1.0, link_key_of(security, topology.id))
            snapshot = snapshot_topology(view, topology, report, now_secs=now)
            rows += [
                (snapshot.name, finding.kind, finding.component, finding.text, finding.remedy)
                for finding in diagnose(snapshot)
                if finding.severity == "warning"
            ]
    return dg.AssetCheckResult(
        passed=not rows,
        severity=dg.AssetCheckSeverity.WARN,
        description="; ".join(f"{name}: {text} {remedy}" for name, _, _, text, remedy in rows)
        or "every topology keeps up",
        metadata={
            "findings": table("topology kind component found remedy", rows),
            "topologies": len(active),
        },
    )


def invariants_check(
    context: dg.AssetCheckExecutionContext, handles: Handles
) -> dg.AssetCheckResult:
    """Every invariant of the cluster, in at least two looks."""
    home = handles.zookeeper.home_path()
    # With conf_dir, what runs in this HOME is of another cluster.
    local = handles.zookeeper.conf_dir is None and home.is_dir()
    with operations(context, handles) as ops:
        seen = inspect_cluster(ops, home=home if local else None, stable_secs=_STABLE_SECS)
    return dg.AssetCheckResult(
        passed=seen.sound,
        severity=dg.AssetCheckSeverity.ERROR,
        metadata={
            "violations": len(seen.violations),
            "found": notes(
                [
                    f"{part.invariant} {part.sentence}: {part.remedy}"
                    for part in seen.violations[:50]
                ]
            ),
            "warnings": notes([f"{part.invariant} {part.sentence}" for part in seen.warnings[:50]]),
            "looks": seen.snapshots,
            "topologies": len(seen.view.topologies),
        },
    )


@dataclass(frozen=True)
class _CheckedTopology:
    """An assignment and what it was made from."""

    topology: TopologyToPlace
    hosts: frozenset[str]
    stored: Mapping[str, Any]


def _moves(checked: _CheckedTopology) -> Iterator[str]:
    moves = checked.stored.get("moves")
    if moves is None:
        return
    workers = {
        Slot(worker["node"], worker["port"]).key: worker["tasks"]
        for worker in checked.stored.get("workers", ())
    }
    yield from assignment_checks.move_faults(checked.topology.name, moves, workers)


PLACEMENT_CHECKS: Mapping[str, Callable[[_CheckedTopology], Iterator[str]]] = {
    "quotas_kept": lambda checked: assignment_checks.quota_faults(checked.topology),
    "isolation_kept": lambda checked: assignment_checks.isolation_faults(
        checked.topology, checked.hosts
    ),
    "differ_node_kept": lambda checked: assignment_checks.differ_node_faults(checked.topology),
    "fewest_moves": _moves,
}
"""Check of `storm/assignment` -> its function for one topology.

Healing leaves alone what lives, so an assignment may be uneven for a while: these warn, and a
rebalance fixes what they find.
"""


def _checked_topologies(ops: OperationsContext) -> Iterator[_CheckedTopology]:
    view = ops.cluster.load_view()
    hosts = frozenset(
        info.host for info in view.supervisors.values() if info.host not in view.blacklist
    )
    for topology in view.topologies.values():
        if (
            topology.base.status == "KILLED"
            or topology.tasks is None
            or topology.assignment is None
        ):
            continue
        try:
            runnable = load_runnable(ops, topology)
            stored = json.loads(ops.blobs.read(placement_key(topology.id)))
        except (StormDagsterError, ValueError):
            # Missing blobs are what another check is about.
            continue
        checked = current_topology(view, topology, runnable, topology.tasks)
        yield _CheckedTopology(checked, hosts, stored)


def placement_check(name: str) -> Callable[..., dg.AssetCheckResult]:
    """The function of one of them."""

    def check(context: dg.AssetCheckExecutionContext, handles: Handles) -> dg.AssetCheckResult:
        with operations(context, handles) as ops:
            topologies = list(_checked_topologies(ops))
        found = [text for checked in topologies for text in PLACEMENT_CHECKS[name](checked)]
        return violations_result(found, len(topologies), dg.AssetCheckSeverity.WARN)

    return check


_CHECKS: Mapping[str, tuple[dg.AssetKey, Callable[..., dg.AssetCheckResult]]] = {
    **{name: (key, _view_check(name)) for name, (key, _, _) in CHECK_ASSETS.items()},
    "blobs_present": (keys.TOPOLOGY_CODE, blobs_check),
    "invariants": (keys.ACTIVE_TOPOLOGY, invariants_check),
    EXPOSURES_CHECK: (keys.NIMBUS, exposures_check),
    DIAGNOSIS_CHECK: (keys.ACTIVE_TOPOLOGY, diagnosis_check),
    SETTINGS_CHECK: (keys.SUPERVISORS, settings_check),
    **{name: (keys.ASSIGNMENT, placement_check(name)) for name in PLACEMENT_CHECKS},
}


def build_checks(names: DagsterNames) -> list[dg.AssetChecksDefinition]:
    """All checks."""
    words = {**{name: words for name, (_, _, words) in CHECK_ASSETS.items()}, **catalog()["checks"]}
    return [
        dg.asset_check(asset=cluster_key(names, key), name=name, description=words[name])(
            bind(function, names)
        )
        for name, (key, function) in _CHECKS.items()
    ]
