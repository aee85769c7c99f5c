"""Asset checks: the correctness rules, applied to the live cluster.

They change no state. They cover all topologies at once, so that they can be run from the UI without
a partition. They are not part of `submit_topology`, whose run has exactly six steps;
`supervisor_sensor` evaluates them whenever the cluster changes.
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
from storm_dagster.operations.live.worker_requests import WorkerLinks, ask_topology_master
from storm_dagster.operations.read.exposures import ClusterPlace, exposures
from storm_dagster.operations.read.inspection import code_keys, inspect_cluster, stored_hashes

EXPOSURES_CHECK = "exposures"
DIAGNOSIS_CHECK = "diagnosis"
_STABLE_SECS = 5.0
"""Time for which a violation of an invariant must last; a run waits for it."""
_Outcome = TypeVar("_Outcome", dg.AssetCheckResult, dg.AssetCheckEvaluation)

_ASSETS: Mapping[str, dg.AssetKey] = {
    "one_slot_per_task": keys.PUBLISHED_ASSIGNMENT,
    "slots_not_shared": keys.PUBLISHED_ASSIGNMENT,
    "assigned_to_live_slots": keys.SUPERVISORS,
}
"""Rule -> asset of its check; the others are checks of ``storm/active_topology``."""


def _check_assets() -> Iterator[tuple[str, tuple[dg.AssetKey, dg.AssetCheckSeverity, str]]]:
    """The items of :data:`CHECK_ASSETS`."""
    for rule in RULES:
        if not rule.by_view:
            continue
        asset = _ASSETS.get(rule.name, keys.ACTIVE_TOPOLOGY)
        # The cluster recovers from a lost supervisor without help: a warning until it has.
        severity = dg.AssetCheckSeverity.WARN if rule.heals else dg.AssetCheckSeverity.ERROR
        yield rule.name, (asset, severity, rule.words)


CHECK_ASSETS: Mapping[str, tuple[dg.AssetKey, dg.AssetCheckSeverity, str]] = dict(_check_assets())
"""Check -> its asset, severity and rule, for the rules that need only a view."""


def view_findings(view: ClusterView) -> dict[str, list[str]]:
    """Check name -> violations of its rule in ``view``."""
    snapshot = ClusterSnapshot(view)
    findings: dict[str, list[str]] = {}
    for rule in RULES:
        if rule.by_view:
            findings[rule.name] = [violation.sentence for violation in rule.check(snapshot)]
    return findings


def violations_result(
    sentences: Iterable[str],
    topologies: int,
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
) -> dg.AssetCheckResult:
    """Result of one check, with a sentence for each violation.

    The first 50 are in its metadata. ``topologies``: number of those that were checked.
    """
    lines = list(sentences)
    metadata = {"violations": len(lines), "found": notes(lines[:50]), "topologies": topologies}
    return dg.AssetCheckResult(passed=not lines, severity=severity, metadata=metadata)


def outcome_of(
    result: dg.AssetCheckResult, key: dg.AssetKey, name: str, kind: type[_Outcome]
) -> _Outcome:
    """The result of an asset's check, or its evaluation without a run."""
    return kind(
        asset_key=key,
        check_name=name,
        passed=result.passed,
        severity=result.severity,
        description=result.description,
        metadata=dict(result.metadata or {}),
    )


def _view_check(name: str) -> Callable[..., dg.AssetCheckResult]:
    """The function of the check ``name`` of :data:`CHECK_ASSETS`."""

    def check(zookeeper: ZooKeeperResource) -> dg.AssetCheckResult:
        with step_errors(), zookeeper.cluster() as cluster:
            view = cluster.load_view()
        _, severity, _ = CHECK_ASSETS[name]
        return violations_result(view_findings(view)[name], len(view.topologies), severity)

    return check


def blobs_check(zookeeper: ZooKeeperResource, blobstore: BlobStoreResource) -> dg.AssetCheckResult:
    """Check that archive, conf and code of every topology are stored.

    Each blob must have its content hash.
    """
    with step_errors(), zookeeper.cluster() as cluster:
        view = cluster.load_view()
        with blobstore.blobs(cluster) as blobs:
            snapshot = ClusterSnapshot(view, blobs=stored_hashes(blobs, code_keys(view)))
    # This rule needs the blobs as well, so that view_findings does not have it.
    (rule,) = (rule for rule in RULES if rule.name == "blobs_present")
    sentences = [violation.sentence for violation in rule.check(snapshot)]
    return violations_result(sentences, len(view.topologies))


def exposures_check(zookeeper: ZooKeeperResource) -> dg.AssetCheckResult:
    """Exposures that ``doctor --security`` lists, each with its remedy.

    It passes if every finding is ``ok``.
    """
    # (check, state, problem or measurement, remedy)
    rows: list[tuple[str, str, str, str]] = []
    with step_errors():
        place = ClusterPlace(zookeeper.home_path(), zookeeper.conf_dir, zookeeper.conf())
        for name, check in exposures(place).items():
            rows += [(name, *row) for row in check(place)]
    sentences = [f"{problem}: {remedy}" for _, state, problem, remedy in rows if state != "ok"]
    return dg.AssetCheckResult(
        passed=not sentences,
        severity=dg.AssetCheckSeverity.WARN,
        description="; ".join(sentences) or "nothing is exposed",
        metadata={"exposures": len(sentences), "findings": table("check state found remedy", rows)},
    )


def diagnosis_check(zookeeper: ZooKeeperResource) -> dg.AssetCheckResult:
    """Bottlenecks, growing lags and other findings of ``show`` at active topologies.

    Each has its remedy.
    """
    rows: list[tuple[str, str, str, str, str]] = []
    with step_errors(), zookeeper.cluster() as cluster:
        view = cluster.load_view()
        links = WorkerLinks.of(zookeeper.conf())
        now = int(time.time())
        active = [
            topology for topology in view.topologies.values() if topology.base.status == "ACTIVE"
        ]
        for topology in active:
            key, trusted = links.to(topology)
            report = ask_topology_master(topology, 1.0, key, trusted=trusted)
            snapshot = snapshot_topology(view, topology, report, now_secs=now)
            rows += [
                (snapshot.name, finding.kind, finding.component, finding.text, finding.remedy)
                for finding in diagnose(snapshot)
                if finding.severity == "warning"
            ]
    sentences = [f"{name}: {text} {remedy}" for name, _, _, text, remedy in rows]
    return dg.AssetCheckResult(
        passed=not rows,
        severity=dg.AssetCheckSeverity.WARN,
        description="; ".join(sentences) or "every topology keeps up",
        metadata={
            "findings": table("topology kind component found remedy", rows),
            "topologies": len(active),
        },
    )


def invariants_check(
    context: dg.AssetCheckExecutionContext, handles: Handles
) -> dg.AssetCheckResult:
    """Violations of the cluster's invariants, in at least two snapshots."""
    home = handles.zookeeper.home_path()
    # With conf_dir, the workers of this HOME belong to another cluster.
    is_local = handles.zookeeper.conf_dir is None and home.is_dir()
    with operations(context, handles) as ops:
        inspection = inspect_cluster(ops, home=home if is_local else None, stable_secs=_STABLE_SECS)
    violations = [
        f"{violation.invariant} {violation.sentence}: {violation.remedy}"
        for violation in inspection.violations[:50]
    ]
    warnings = [
        f"{violation.invariant} {violation.sentence}" for violation in inspection.warnings[:50]
    ]
    return dg.AssetCheckResult(
        passed=inspection.sound,
        severity=dg.AssetCheckSeverity.ERROR,
        metadata={
            "violations": len(inspection.violations),
            "found": notes(violations),
            "warnings": notes(warnings),
            "looks": inspection.snapshots,
            "topologies": len(inspection.view.topologies),
        },
    )


@dataclass(frozen=True)
class _CheckedTopology:
    """An assignment, and the input that it was made from."""

    topology: TopologyToPlace
    """The topology with its current assignment."""
    hosts: frozenset[str]
    """Hosts of the live supervisors that are not blacklisted."""
    stored: Mapping[str, Any]
    """The blob with the reasons of the newest placement."""


def _moves(checked: _CheckedTopology) -> Iterator[str]:
    """Faults of the newest placement's moves; none if they were not recorded."""
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

Healing does not move live tasks, so that an assignment may be uneven for a while: these checks
warn, and a rebalance fixes their findings.
"""


def _checked_topologies(ops: OperationsContext) -> Iterator[_CheckedTopology]:
    """The topologies that are placed, and not killed.

    Those without a readable blob of code or reasons are left out.
    """
    view = ops.cluster.load_view()
    hosts = frozenset(
        info.host for info in view.supervisors.values() if info.host not in view.blacklist
    )
    for topology in view.topologies.values():
        if topology.base.status == "KILLED":
            continue
        if topology.tasks is None or topology.assignment is None:
            continue
        try:
            runnable = load_runnable(ops, topology)
            stored = json.loads(ops.blobs.read(placement_key(topology.id)))
        except (StormDagsterError, ValueError):
            # Another check reports missing blobs.
            continue
        checked = current_topology(view, topology, runnable, topology.tasks)
        yield _CheckedTopology(checked, hosts, stored)


def placement_check(name: str) -> Callable[..., dg.AssetCheckResult]:
    """The function of the check ``name`` of :data:`PLACEMENT_CHECKS`."""

    def check(context: dg.AssetCheckExecutionContext, handles: Handles) -> dg.AssetCheckResult:
        with operations(context, handles) as ops:
            topologies = list(_checked_topologies(ops))
        sentences: list[str] = []
        for topology in topologies:
            sentences += PLACEMENT_CHECKS[name](topology)
        return violations_result(sentences, len(topologies), dg.AssetCheckSeverity.WARN)

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
"""Name of each check -> its asset and its function."""


def build_checks(names: DagsterNames) -> list[dg.AssetChecksDefinition]:
    """All checks of the cluster with these names."""
    descriptions = {name: words for name, (_, _, words) in CHECK_ASSETS.items()}
    descriptions.update(catalog()["checks"])
    checks: list[dg.AssetChecksDefinition] = []
    for name, (key, function) in _CHECKS.items():
        decorate = dg.asset_check(
            asset=cluster_key(names, key), name=name, description=descriptions[name]
        )
        checks.append(decorate(bind(function, names)))
    return checks
