"""Inspection of a live cluster for its invariants.

The rules are in :mod:`storm_dagster.core.invariants`.
"""

import math
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from storm_dagster.blobstore.store import BlobMeta, BlobStore
from storm_dagster.core.invariants.rules import RULES
from storm_dagster.core.invariants.rules import violations as violations_of
from storm_dagster.core.invariants.snapshot import (
    ClusterSnapshot,
    GrayNodes,
    PendingViolations,
    Violation,
    WorkerPid,
    confirm_violations,
)
from storm_dagster.core.submission.conf import total_conf
from storm_dagster.host.worker_spec import WorkerSpec
from storm_dagster.host.worker_spec import worker_processes as all_workers
from storm_dagster.model import names, paths
from storm_dagster.model.errors import Corrupt, KeyNotFound, StormDagsterError
from storm_dagster.model.names import jar_key, placement_key
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import OperationsContext, decode_json, load_stored_conf
from storm_dagster.operations.live.cleaner import read_tokens, survey

_LISTED_KEYS = 16
"""Number of blobs above which all of them are listed, instead of a request for each."""
_BETWEEN_SECS = 1.0
"""Pause between two snapshots of an inspection."""


def worker_processes(home: Path | None = None) -> tuple[WorkerPid, ...]:
    """The worker processes of this machine, with ``home`` only those of that HOME.

    A worker is recognized by its command line, with or without a record of it.
    """
    workers: list[WorkerPid] = []
    for process, path in all_workers():
        try:
            spec = WorkerSpec.read(path)
        except (Corrupt, OSError):
            continue
        if home is None or os.path.realpath(spec.home) == os.path.realpath(home):
            workers.append(WorkerPid(spec.topology_id, spec.node, spec.port, process.pid))
    return tuple(sorted(workers, key=lambda worker: (worker.slot, worker.pid)))


def take_snapshot(
    ctx: OperationsContext,
    former: ClusterSnapshot | None = None,
    *,
    home: Path | None = None,
    confs: dict[str, dict[str, Any]] | None = None,
) -> ClusterSnapshot:
    """Snapshot of the cluster, with the snapshot ``former`` of the same observer.

    With ``home`` also of the worker processes of this machine that belong to that HOME. ``confs``
    keeps stored confs for later snapshots, by code folder: a stored conf never changes.
    """
    if confs is None:
        confs = {}
    processes = None if home is None else worker_processes(home)
    view = ctx.cluster.load_view()
    visible = _visible_topologies(view)
    keys = code_keys(view)
    copies, nimbuses = _copies(ctx, keys)
    rebalance_requests = frozenset(
        topology.id for topology in visible if _has_pending_rebalance(ctx, topology.id)
    )
    # Tokens are claimed before a base exists, and read after the bases here.
    tokens, _ = read_tokens(ctx)
    return ClusterSnapshot(
        view=view,
        tokens=tokens,
        blobs=stored_hashes(ctx.blobs, keys),
        copies=copies,
        wanted_copies={
            topology.id: _wanted_copies(ctx, topology, nimbuses, confs) for topology in visible
        },
        unschedulable=dict(_unschedulable(ctx, visible)),
        rebalance_requests=rebalance_requests,
        gray={topology.id: _gray(ctx, topology.id) for topology in visible},
        processes=processes,
        # Without the one before it: otherwise every snapshot would keep all earlier ones.
        former=None if former is None else replace(former, former=None),
    )


def _visible_topologies(view: ClusterView) -> list[TopologyView]:
    """The topologies that are not killed."""
    return [topology for topology in view.topologies.values() if topology.base.status != "KILLED"]


def _has_pending_rebalance(ctx: OperationsContext, topology_id: str) -> bool:
    """True if a requested rebalance is stored below the base."""
    children = ctx.cluster.state.find_children(paths.topology(topology_id)) or ()
    return "rebalance" in children


def code_keys(view: ClusterView) -> list[str]:
    """Blob keys of archive, conf and code of every topology that is not killed."""
    keys: list[str] = []
    for topology in _visible_topologies(view):
        keys += names.code_keys(topology.code_dir)
    return keys


@runtime_checkable
class _ListingStore(Protocol):
    """Blob store that describes all its blobs in one call."""

    def list(self, prefix: str = "") -> Sequence[BlobMeta]:
        """Descriptions of all blobs of the ``prefix``."""
        ...


def stored_hashes(blobs: BlobStore, keys: Collection[str]) -> dict[str, str]:
    """Blob key -> SHA-256, of the blobs that are stored.

    Many of them are read with one call, if the store has one.
    """
    hashes: dict[str, str] = {}
    if len(keys) > _LISTED_KEYS and isinstance(blobs, _ListingStore):
        wanted = set(keys)
        for meta in blobs.list():
            if meta.key in wanted:
                hashes[meta.key] = meta.sha256
        return hashes
    for key in keys:
        with suppress(KeyNotFound):
            hashes[key] = blobs.meta(key).sha256
    return hashes


def _copies(ctx: OperationsContext, keys: Sequence[str]) -> tuple[Mapping[str, int] | None, int]:
    """Blob key -> nimbuses that hold the newest content, and the number of nimbuses.

    ``None`` instead of the map if no nimbus registers blobs (a shared store).
    """
    state = ctx.cluster.state
    followers = state.find_children(paths.NIMBUS_SLAVE) or ()
    nimbuses = len(followers) + state.exists(paths.NIMBUS_MASTER)
    holder_lists = state.find_children_many([paths.blob(key) for key in keys])
    if all(holders is None for holders in holder_lists):
        return None, nimbuses
    copies: dict[str, int] = {}
    for key, holders in zip(keys, holder_lists, strict=True):
        # A holder's node is its address, and the number of the content that it holds.
        sequences = [holder.rpartition("-")[2] for holder in holders or ()]
        newest = max((int(text) for text in sequences if text.isdigit()), default=0)
        copies[key] = sum(1 for text in sequences if text == str(newest))
    return copies, nimbuses


def _wanted_copies(
    ctx: OperationsContext,
    topology: TopologyView,
    nimbuses: int,
    confs: dict[str, dict[str, Any]],
) -> int:
    """Number of nimbuses that should hold its blobs, at most those that exist."""
    if nimbuses <= 1:
        return 1
    code_dir = topology.code_dir
    if code_dir not in confs:
        with suppress(StormDagsterError):  # Another rule reports a missing or damaged conf.
            confs[code_dir] = load_stored_conf(ctx, code_dir)
    copies = total_conf(ctx.values(), confs.get(code_dir, {})).get("topology.min.replication.count")
    return min(int(copies or 1), nimbuses)


def _unschedulable(
    ctx: OperationsContext, topologies: Sequence[TopologyView]
) -> Iterator[tuple[str, frozenset[int]]]:
    """Topology id and its tasks for which the placement has a reason to have no slot.

    Only of topologies of which a task has no slot; those without a readable blob are left out.
    """
    for topology in topologies:
        if topology.tasks is None or topology.assignment is None:
            continue
        if topology.tasks.component_of().keys() == topology.assignment.task_slots().keys():
            continue
        with suppress(StormDagsterError, KeyError, TypeError, ValueError):
            key = placement_key(topology.id)
            document = decode_json(ctx.blobs.read(key), key)
            yield topology.id, frozenset(int(task) for task in document["unassigned"])


def _gray(ctx: OperationsContext, topology_id: str) -> GrayNodes:
    """The gray upgrade of the topology, and the hash of its archive."""
    state = ctx.cluster.read_upgrade(topology_id)
    if state.record is None:
        return GrayNodes(False)
    key = jar_key(state.record.code_dir)
    code = stored_hashes(ctx.blobs, [key]).get(key)
    return GrayNodes(
        True,
        frozenset(state.upgrading),
        frozenset(state.upgraded),
        None if code is None else code[:16],
    )


@dataclass(frozen=True)
class InspectionResult:
    """Result of an inspection."""

    violations: tuple[Violation, ...]
    """Violations that lasted for the whole ``stable_secs``."""
    warnings: tuple[Violation, ...]
    """Violations that do not count.

    The cluster is healing them, or they were in the last snapshot but did not last long enough.
    """
    garbage: tuple[str, ...]
    """Paths and keys without an owner that wait for the cleaner."""
    view: ClusterView
    """View of the last snapshot."""
    snapshots: int
    """Number of snapshots."""
    seconds: float
    """Duration of the inspection."""

    @property
    def sound(self) -> bool:
        """True if every invariant holds."""
        return not self.violations


def inspect_cluster(
    ctx: OperationsContext, *, home: Path | None = None, stable_secs: float = 10.0
) -> InspectionResult:
    """Take at least two snapshots, and more while a violation is pending.

    A violation counts if it lasts for ``stable_secs``. The call stops waiting after three times
    ``stable_secs``; a violation that comes and goes is a warning. With ``home`` the worker
    processes of this machine are inspected as well. No state is changed.
    """
    began = ctx.monotonic()
    # Violations that may not last, with the time of their first snapshot.
    pending = PendingViolations()
    former: ClusterSnapshot | None = None
    snapshots = 0
    healing_rules = {rule.name for rule in RULES if rule.heals}
    confirmed: dict[Violation, None] = {}
    confs: dict[str, dict[str, Any]] = {}
    while True:
        snapshot = take_snapshot(ctx, former, home=home, confs=confs)
        violations = violations_of(snapshot)
        now = ctx.monotonic()
        counted, pending = confirm_violations(
            pending, violations, boot_now=now, stable_secs=stable_secs
        )
        for violation in counted:
            # An event and not a state: the last snapshot need not show it.
            if violation.rule == "no_idle_writes":
                confirmed[violation] = None
        former = snapshot
        snapshots += 1
        # Violations from which the cluster recovers by itself are not waited for.
        unhealed = [violation for violation in violations if violation.rule not in healing_rules]
        is_over = now - began >= 3 * stable_secs
        if snapshots > 1 and (is_over or all(violation in counted for violation in unhealed)):
            break
        ctx.sleep(_BETWEEN_SECS)
    for violation in counted:
        if violation.rule not in healing_rules:
            confirmed[violation] = None
    # All other garbage is listed at any age, because an inspection has no memory. Live tokens and
    # uploads are not garbage: their limits are infinite.
    garbage, _ = survey(
        ctx, boot_now=time.monotonic(), grace_secs=0.0, token_secs=math.inf, upload_secs=math.inf
    )
    return InspectionResult(
        violations=tuple(confirmed),
        warnings=tuple(violation for violation in violations if violation not in confirmed),
        garbage=(*garbage.nodes, *garbage.blobs),
        view=snapshot.view,
        snapshots=snapshots,
        seconds=round(ctx.monotonic() - began, 3),
    )
