"""Inspection of a live cluster for its invariants (:mod:`storm_dagster.core.invariants`)."""

import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from storm_dagster.blobstore.store import BlobStore
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

_BETWEEN_SECS = 1.0


def worker_processes(home: Path | None = None) -> tuple[WorkerPid, ...]:
    """The worker processes of this machine, those of one HOME when it is given.

    A worker is recognized by its command line, whether or not anybody has a record of it.
    """
    found: list[WorkerPid] = []
    for process, path in all_workers():
        try:
            spec = WorkerSpec.read(path)
        except (Corrupt, OSError):
            continue
        if home is None or os.path.realpath(spec.home) == os.path.realpath(home):
            found.append(WorkerPid(spec.topology_id, spec.node, spec.port, process.pid))
    return tuple(sorted(found, key=lambda part: (part.slot, part.pid)))


def take_snapshot(
    ctx: OperationsContext, former: ClusterSnapshot | None = None, *, home: Path | None = None
) -> ClusterSnapshot:
    """One snapshot of the cluster; with ``home`` also of the worker processes of this machine."""
    processes = None if home is None else worker_processes(home)
    view = ctx.cluster.load_view()
    visible = [
        topology for topology in view.topologies.values() if topology.base.status != "KILLED"
    ]
    keys = code_keys(view)
    copies, nimbuses = _copies(ctx, keys)
    return ClusterSnapshot(
        view=view,
        # Tokens are claimed before a base exists, and read after it here.
        tokens=read_tokens(ctx)[0],
        blobs=stored_hashes(ctx.blobs, keys),
        copies=copies,
        wanted_copies={
            topology.id: _wanted_copies(ctx, topology, nimbuses) for topology in visible
        },
        unschedulable=dict(_unschedulable(ctx, visible)),
        rebalance_requests=frozenset(
            topology.id
            for topology in visible
            if "rebalance" in (ctx.cluster.state.find_children(paths.topology(topology.id)) or ())
        ),
        gray={topology.id: _gray(ctx, topology.id) for topology in visible},
        processes=processes,
        former=None if former is None else replace(former, former=None),
    )


def code_keys(view: ClusterView) -> list[str]:
    """Blob keys of archive, conf and code of every topology that is not killed."""
    visible = (
        topology for topology in view.topologies.values() if topology.base.status != "KILLED"
    )
    return [key for topology in visible for key in names.code_keys(topology.code_dir)]


def stored_hashes(blobs: BlobStore, keys: Iterable[str]) -> dict[str, str]:
    """Blob key -> SHA-256, of those that are stored."""
    found: dict[str, str] = {}
    for key in keys:
        with suppress(KeyNotFound):
            found[key] = blobs.meta(key).sha256
    return found


def _copies(ctx: OperationsContext, keys: Sequence[str]) -> tuple[Mapping[str, int] | None, int]:
    """Blob key -> nimbuses that hold the newest content; ``None`` when nobody registers blobs (a
    shared store).
    """
    state = ctx.cluster.state
    nimbuses = len(state.find_children(paths.NIMBUS_SLAVE) or ()) + state.exists(
        paths.NIMBUS_MASTER
    )
    held = state.find_children_many([paths.blob(key) for key in keys])
    if all(holders is None for holders in held):
        return None, nimbuses
    copies: dict[str, int] = {}
    for key, holders in zip(keys, held, strict=True):
        sequences = [holder.rpartition("-")[2] for holder in holders or ()]
        newest = max((int(text) for text in sequences if text.isdigit()), default=0)
        copies[key] = sum(1 for text in sequences if text == str(newest))
    return copies, nimbuses


def _wanted_copies(ctx: OperationsContext, topology: TopologyView, nimbuses: int) -> int:
    stored: dict[str, Any] = {}
    with suppress(StormDagsterError):  # That it is missing or damaged is another rule's business.
        stored = load_stored_conf(ctx, topology.code_dir)
    copies = total_conf(ctx.values(), stored).get("topology.min.replication.count")
    return min(int(copies or 1), max(1, nimbuses))


def _unschedulable(
    ctx: OperationsContext, topologies: Sequence[TopologyView]
) -> Iterator[tuple[str, frozenset[int]]]:
    for topology in topologies:
        if topology.tasks is None or topology.assignment is None:
            continue
        if topology.tasks.component_of().keys() == topology.assignment.task_slots().keys():
            continue
        with suppress(StormDagsterError, KeyError, TypeError, ValueError):
            document = decode_json(
                ctx.blobs.read(placement_key(topology.id)), placement_key(topology.id)
            )
            yield topology.id, frozenset(int(task) for task in document["unassigned"])


def _gray(ctx: OperationsContext, topology_id: str) -> GrayNodes:
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
    """Violations that the cluster is healing, or that were in the last snapshot but not for long
    enough to count.
    """
    garbage: tuple[str, ...]
    """Paths and keys that belong to nothing and wait for the cleaner."""
    view: ClusterView
    snapshots: int
    seconds: float

    @property
    def sound(self) -> bool:
        """Whether every invariant holds."""
        return not self.violations


def inspect_cluster(
    ctx: OperationsContext, *, home: Path | None = None, stable_secs: float = 10.0
) -> InspectionResult:
    """Take at least two snapshots, and more while something is broken; what stays so for
    ``stable_secs`` counts.

    Gives up waiting after three times ``stable_secs``: what keeps changing is a warning. With
    ``home`` the worker processes of this machine are inspected as well. Nothing is changed.
    """
    began = ctx.monotonic()
    pending, former, snapshots = PendingViolations(), None, 0
    heals = {rule.name for rule in RULES if rule.heals}
    idle: dict[Violation, None] = {}
    while True:
        snapshot = take_snapshot(ctx, former, home=home)
        found = violations_of(snapshot)
        now = ctx.monotonic()
        counted, pending = confirm_violations(pending, found, boot_now=now, stable_secs=stable_secs)
        idle.update(
            (violation, None) for violation in counted if violation.rule == "no_idle_writes"
        )
        former, snapshots = snapshot, snapshots + 1
        hard = [violation for violation in found if violation.rule not in heals]
        over = now - began >= 3 * stable_secs
        if snapshots > 1 and (over or all(violation in counted for violation in hard)):
            break
        ctx.sleep(_BETWEEN_SECS)
    bad = {**idle, **{violation: None for violation in counted if violation.rule not in heals}}
    # Live tokens and uploads are none.
    garbage, _ = survey(
        ctx, boot_now=time.monotonic(), grace_secs=0.0, token_secs=math.inf, upload_secs=math.inf
    )
    return InspectionResult(
        violations=tuple(bad),
        warnings=tuple(violation for violation in found if violation not in bad),
        garbage=(*garbage.nodes, *garbage.blobs),
        view=snapshot.view,
        snapshots=snapshots,
        seconds=round(ctx.monotonic() - began, 3),
    )
