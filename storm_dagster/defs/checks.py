"""Asset checks: the correctness rules of the cluster, asked of the live cluster. They change nothing.

They cover all topologies at once, so that they can be run from the UI without a partition. They are left
out of `submit_topology`, whose run has exactly six steps; `supervisor_sensor` evaluates them whenever the
cluster changes.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of the decorated functions.
from collections.abc import Iterable, Mapping

import dagster as dg

from storm_dagster.blobstore.store import BlobStore
from storm_dagster.defs.failures import step_errors
from storm_dagster.defs.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.invariants import VIEW_RULES, blobs_present
from storm_dagster.defs.keys import ACTIVE_TOPOLOGY, PUBLISHED_ASSIGNMENT, SUPERVISORS, TOPOLOGY_CODE
from storm_dagster.defs.metadata import notes
from storm_dagster.model.errors import KeyNotFound
from storm_dagster.model.view import ClusterView

__all__ = ["CHECK_ASSETS", "build_checks", "view_findings"]

CHECK_ASSETS: Mapping[str, tuple[dg.AssetKey, dg.AssetCheckSeverity, str]] = {
    "one_slot_per_task": (
        PUBLISHED_ASSIGNMENT,
        dg.AssetCheckSeverity.ERROR,
        "Every task of every topology stands in exactly one slot.",
    ),
    "slots_not_shared": (
        PUBLISHED_ASSIGNMENT,
        dg.AssetCheckSeverity.ERROR,
        "No slot is given to two topologies.",
    ),
    "base_implies_published": (
        ACTIVE_TOPOLOGY,
        dg.AssetCheckSeverity.ERROR,
        "A topology that is visible has its tasks and its assignment.",
    ),
    "one_live_owner": (
        ACTIVE_TOPOLOGY,
        dg.AssetCheckSeverity.ERROR,
        "At most one live process runs a task.",
    ),
    "records_intact": (
        ACTIVE_TOPOLOGY,
        dg.AssetCheckSeverity.ERROR,
        "Every record of the cluster in ZooKeeper is readable.",
    ),
    # A lost supervisor is what the cluster heals from: a warning for as long as that takes.
    "assigned_to_live_slots": (
        SUPERVISORS,
        dg.AssetCheckSeverity.WARN,
        "Every assigned slot belongs to a supervisor that lives and offers it.",
    ),
}
"""Check -> the asset it stands at, its severity, and the rule in words."""


def view_findings(view: ClusterView) -> dict[str, list[str]]:
    """Check name -> violations of its rule in ``view``."""
    return {name: list(rule(view)) for name, rule in VIEW_RULES.items()}


def result_of(name: str, found: Iterable[str], looked_at: int) -> dg.AssetCheckResult:
    """The outcome of one check, with the violations spelled out."""
    key, severity, _ = CHECK_ASSETS.get(name, (TOPOLOGY_CODE, dg.AssetCheckSeverity.ERROR, ""))
    lines = list(found)
    return dg.AssetCheckResult(
        passed=not lines,
        asset_key=key,
        check_name=name,
        severity=severity,
        metadata={"violations": len(lines), "found": notes(lines[:50]), "topologies": looked_at},
    )


def missing_blobs(view: ClusterView, blobs: BlobStore) -> list[str]:
    """Violations of the rule that the code of every topology is stored."""

    def sha256_of(key: str) -> str | None:
        try:
            return blobs.meta(key).sha256
        except KeyNotFound:
            return None

    return list(blobs_present(view, sha256_of))


def _view_check(name: str) -> dg.AssetChecksDefinition:
    key, _, description = CHECK_ASSETS[name]

    @dg.asset_check(asset=key, name=name, description=description)
    def check(zookeeper: ZooKeeperResource) -> dg.AssetCheckResult:
        with step_errors(), zookeeper.cluster() as cluster:
            view = cluster.load_view()
        return result_of(name, VIEW_RULES[name](view), len(view.topologies))

    return check


@dg.asset_check(
    asset=TOPOLOGY_CODE,
    name="blobs_present",
    description="Archive, conf and code of every topology are stored, each with its content hash.",
)
def blobs_check(zookeeper: ZooKeeperResource, blobstore: BlobStoreResource) -> dg.AssetCheckResult:
    """Archive, conf and code of every topology are stored, each with its content hash."""
    with step_errors(), zookeeper.cluster() as cluster:
        view = cluster.load_view()
        with blobstore.blobs(cluster) as blobs:
            return result_of("blobs_present", missing_blobs(view, blobs), len(view.topologies))


def build_checks() -> list[dg.AssetChecksDefinition]:
    """All checks."""
    return [*(_view_check(name) for name in CHECK_ASSETS), blobs_check]
