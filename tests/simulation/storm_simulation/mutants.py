"""Planted bugs: proof that the general program sees what it looks for. Each must be caught within
twenty seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from storm_dagster.core.liveness import retries, step
from storm_dagster.core.liveness.detection import LivenessResult
from storm_dagster.core.liveness.retries import Permission
from storm_dagster.core.upgrade import machine
from storm_dagster.core.upgrade.machine import Move, UpgradeEvent
from storm_dagster.core.upgrade.selection import worker_phase
from storm_dagster.defs.healing import heartbeat_sensor
from storm_dagster.http import server
from storm_dagster.model import paths
from storm_dagster.nimbus import daemon as nimbus_daemon
from storm_dagster.nimbus.blobs import replication
from storm_dagster.nimbus.leadership import draining as nimbus_draining
from storm_dagster.nimbus.leadership import duties, election
from storm_dagster.operations import transactions
from storm_dagster.operations.live import (
    cleaner,
    healing,
    lifecycle,
    rebalance,
    rebalance_end,
)
from storm_dagster.operations.submit import code_storage, continuing, publishing
from storm_dagster.supervisor import cluster_link, upgrades
from storm_dagster.worker.runtime import cluster_sync
from storm_dagster.zk import cluster_state, leadership, session, storm_cluster_state, transaction
from storm_simulation.workers import ModelLoop

Change = tuple[Any, str, Callable[[Any], Any]]
"""(where, name, what to make of the original)."""


@dataclass(frozen=True)
class Mutant:
    """One planted bug."""

    name: str
    invariant: str
    """The invariant that sees it, by the first word of its violation; several are divided by
    ``|``.
    """
    changes: tuple[Change, ...]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The product with the bug in it."""
        before = [(where, name, vars(where)[name]) for where, name, _ in self.changes]
        try:
            for where, name, make in self.changes:
                setattr(where, name, make(getattr(where, name)))
            yield
        finally:
            for where, name, original in before:
                setattr(where, name, original)


def _always(value: Any) -> Callable[[Any], Any]:
    """In the place of a function: one that does nothing and gives that value."""
    return lambda original: lambda *args, **kwargs: value


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _without(*kinds: str) -> Callable[[Any], Any]:
    """``observe`` that does not see causes of those kinds."""

    def make(original: Callable[..., LivenessResult]) -> Callable[..., LivenessResult]:
        def observe(*args: Any, **kwargs: Any) -> LivenessResult:
            seen = original(*args, **kwargs)
            return replace(
                seen, causes=tuple(cause for cause in seen.causes if cause.kind not in kinds)
            )

        return observe

    return make


def _due_without(kind: str) -> Callable[[Any], Any]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def due(*args: Any, **kwargs: Any) -> Any:
            found, memory = original(*args, **kwargs)
            return [each for each in found if each.action != kind], memory

        return due

    return make


def _later(secs: float) -> Callable[[Any], Any]:
    return lambda original: lambda *args, **kwargs: original(*args, **kwargs) + secs


def _any_version(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, path, data, version: original(self, path, data, -1)


def _fenced_by_nothing(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, epoch: self.state.transaction()


def _owned_if_there(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, path: self.exists(path)


def _resign_whoever_leads(original: Callable[..., Any]) -> Callable[..., Any]:
    def resign(self: Any) -> None:
        self._confirmed = None
        self._state.delete_node("/nimbus_master")

    return resign


def _end_of_any_session(original: Callable[..., float]) -> Callable[..., float]:
    return lambda self, session_id=None: original(self)


def _valid_by_session(original: Callable[..., bool]) -> Callable[..., bool]:
    def valid(self: Any) -> bool:
        # Granted once: for ever, while some session of the process lives.
        if self._owner:
            self._until = self._lease_end(None)
        return original(self)

    return valid


def _rolled_back_at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    def due(snapshot: Any, *, age_secs: float = 0.0) -> Any:
        record = snapshot.state.record
        if record is not None and record.rollback:
            return UpgradeEvent("finish_rollback", "it was asked for")
        return original(snapshot, age_secs=age_secs)

    return due


def _upgraded_when_picked(original: Callable[..., Any]) -> Callable[..., Any]:
    def next_move(address: str, state: Any, former: str, run: Any, **how: Any) -> Any:
        if worker_phase(address, state) == "upgrading" and run is not None:
            return Move(address, "upgraded", state.upgrading[address])
        return original(address, state, former, run, **how)

    return next_move


def _bump_without_lock(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda transaction, *_: transaction.set("/assignments", b"", -1)


def _nothing_alive(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda inventory, memory, **how: original(
        replace(inventory, topologies=(), busy_workers=()), memory, **how
    )


def _without_last_worker(original: Callable[..., Any]) -> Callable[..., Any]:
    def assignment_of(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        return (
            made.model_copy(update={"workers": made.workers[:-1]})
            if len(made.workers) > 1
            else made
        )

    return assignment_of


def _explained_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def commit(ctx: Any, transaction: Any, what: str) -> Any:
        ctx.blobs.put("reasons", b"")
        return original(ctx, transaction, what)

    return commit


def _always_watched(original: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: Any, cluster: Any, topology_id: str, wake: Any = None) -> Any:
        found = original(self, cluster, topology_id, self._wake_of(topology_id))
        if found is None:
            cluster.state.exists(paths.assignment(topology_id), self._wake_of(topology_id))
        return found

    return read


def _m(name: str, invariant: str, *changes: Change) -> Mutant:
    return Mutant(name, invariant, changes)


MUTANTS: tuple[Mutant, ...] = (
    _m(
        "a worker opens tasks that another still has",
        "I2",
        (cluster_sync, "decode_ranges", _always(())),
    ),
    _m("a lease lasts 60 s too long", "I2", (session.ZkSession, "lease_end", _later(60.0))),
    _m(
        "writes are not fenced",
        "I5",
        (storm_cluster_state.StormClusterState, "fenced", _fenced_by_nothing),
    ),
    _m(
        "no version is checked",
        "I1|I5|I6|acknowledged",
        (transaction.Transaction, "set", _any_version),
    ),
    _m(
        "checks are left out",
        "I5",
        (transaction.Transaction, "check", lambda _: lambda self, path, version: self),
    ),
    _m(
        "a node counts as owned when it is there",
        "I5",
        (cluster_state.ZooKeeperClusterState, "owned", _owned_if_there),
    ),
    _m(
        "who resigns deletes whoever leads",
        "I5",
        (leadership.LeadershipSession, "resign", _resign_whoever_leads),
    ),
    _m(
        "placements do not lock each other out",
        "I1",
        (transactions, "bump_assignments_version", _bump_without_lock),
    ),
    _m(
        "the name is not looked at again before publishing",
        "I6|acknowledged",
        (publishing, "check_target", _always(None)),
    ),
    _m(
        "a blob is acknowledged before it is copied",
        "I4",
        (replication.Replicator, "push", _always(1)),
        (
            code_storage,
            "_await_copies",
            lambda _: lambda ctx, blobs, wanted, secs: {blob.key: wanted for blob in blobs},
        ),
    ),
    _m(
        "the cleaner takes what lives for garbage",
        "I3|I5|core|crash|liveness",
        (cleaner, "find_garbage", _nothing_alive),
    ),
    _m(
        "nobody cleans",
        "I3",
        (duties.cleaner, "clean", lambda _: lambda ctx, memory, **how: (_CLEANED, memory)),
    ),
    _m(
        "the sensor sees and does nothing",
        "healer",
        (heartbeat_sensor, "run_requests", _always([])),
    ),
    _m(
        "healing tries again whenever something changes",
        "runs",
        (step, "permit_attempt", _always(Permission(True))),
    ),
    _m(
        "every cause is new when it comes back",
        "runs",
        (step, "note_attempts", _always({})),
    ),
    _m(
        "a late run is taken for one that moved tasks",
        "runs",
        (retries, "_healed_by_run", _always(True)),
    ),
    _m(
        "healing does not know its pause",
        "pause",
        (step, "note_pause", _always(None)),
        (healing, "_is_in_force", _always(False)),
    ),
    _m("no leader ends a pause", "pause", (duties, "must_end", _always(False))),
    _m("lost hosts are no cause", "liveness", (step, "observe", _without("lost_host"))),
    _m("the leader never heals", "liveness", (duties.LeaderHealing, "_heal", _always(None))),
    _m(
        "delayed removals are forgotten",
        "liveness",
        (lifecycle, "due_actions", _due_without("remove")),
    ),
    _m(
        "rebalances are not finished by others",
        "liveness",
        (lifecycle, "due_actions", _due_without("finish_rebalance")),
    ),
    _m(
        "activations are not finished by others",
        "liveness",
        (lifecycle, "due_actions", _due_without("activate")),
    ),
    _m(
        "nobody stands again after an election",
        "liveness",
        (election.Election, "_may_try", _always((False, 5.0))),
    ),
    _m(
        "blobs are not fetched by who comes back",
        "liveness|I3",
        (nimbus_daemon, "_synchronize", _always(None)),
    ),
    _m(
        "a supervisor beats at every turn",
        "I8",
        (cluster_link.ClusterLink, "_beat_due", _always(True)),
        (cluster_link.ClusterLink, "_until_due", _always(0.5)),
    ),
    _m(
        "a placement leaves a worker out",
        "core|liveness|I8",
        (healing, "assignment_of", _without_last_worker),
    ),
    _m(
        "a run ends with its leader",
        "continues",
        (continuing, "MAX_CONTINUATIONS", _constant(0)),
    ),
    _m(
        "supervisors do not hear of changes",
        "liveness",
        (cluster_link, "changes_since", _always({})),
    ),
    _m(
        "a killed topology's nodes stay",
        "I3",
        (lifecycle, "sweep", _always(None)),
        (cleaner, "_PER_TOPOLOGY", _constant((paths.WORKERS,))),
    ),
    _m(
        "blobs of killed topologies stay",
        "I3",
        (lifecycle, "delete_blobs", _always(None)),
        (duties.cleaner, "clean", lambda _: lambda ctx, memory, **how: (_CLEANED, memory)),
    ),
    _m(
        "an acknowledged kill does nothing",
        "acknowledged|liveness|I3",
        (lifecycle, "remove", lambda _: lambda ctx, topology_id: None),
    ),
    _m("a rollback ends before the workers are back", "I7", (machine, "due", _rolled_back_at_once)),
    _m(
        "a worker that was picked counts as upgraded",
        "I7",
        (upgrades, "next_move", _upgraded_when_picked),
    ),
    _m(
        "the base keeps the conf of before a gray upgrade",
        "conf",
        (machine, "with_base_conf", lambda _: lambda base, fields: base),
    ),
    _m(
        "a rebalance begins with an overtaken plan",
        "plan",
        (rebalance, "check_assignments", lambda _: lambda transaction, view: transaction),
    ),
    _m(
        "spouts resume before workers know their places",
        "replay",
        (rebalance_end, "wait_until_applied", _always(None)),
    ),
    _m(
        "hosts that drain are not moved off",
        "drain",
        (nimbus_draining, "topologies_to_move", _always({})),
    ),
    _m(
        "a lease counts for whatever session",
        "I2",
        (session.ZkSession, "lease_end", _end_of_any_session),
    ),
    _m("tasks are given up before they are closed", "I2", (ModelLoop, "call", _always(None))),
    _m(
        "what is dead waits for copies of the reasons",
        "liveness",
        (healing, "commit", _explained_first),
    ),
    _m(
        "supervisors watch what is gone",
        "I3",
        (cluster_link.ClusterLink, "_read_assignment", _always_watched),
    ),
    _m(
        "everybody watches what is gone",
        "I3",
        (cluster_state.ZooKeeperClusterState, "_awaits", _always(True)),
    ),
    _m(
        "a daemon stays where its name was",
        "liveness",
        (server.AnnouncedName, "check", _always(None)),
    ),
    _m(
        "an expired lease comes back by itself",
        "I2",
        (cluster_sync.WorkerLease, "valid", _valid_by_session),
    ),
)


class _Cleaned:
    nodes = blobs = tokens = problems = ()
    waiting = 0


_CLEANED = _Cleaned()


def missing() -> list[str]:
    """What mutants would replace and the product does not have any more."""
    changes = [change for mutant in MUTANTS for change in mutant.changes]
    return [f"{where.__name__}.{name}" for where, name, _ in changes if name not in vars(where)]
