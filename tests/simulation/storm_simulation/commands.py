"""Commands on topologies, each in a process of its own, as runs of Dagster do them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from storm_dagster.client.blobs import NimbusBlobClient
from storm_dagster.core.upgrade.selection import Selection
from storm_dagster.model.errors import Fenced, StormDagsterError
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.operations.submit.continuing import MAX_CONTINUATIONS
from storm_dagster.operations.submit.staging import upload_key
from storm_rigs.operations.acting import submit
from storm_rigs.operations.archives import pack_archive
from storm_rigs.stage.records import WORD_COUNT
from storm_simulation.kernel import Process

if TYPE_CHECKING:
    from storm_simulation.cluster import Cluster

_ARCHIVES = [pack_archive(f"archive {number}") for number in range(4)]


@dataclass(eq=False)
class Command:
    """A command and what became of it."""

    verb: str
    name: str
    options: dict[str, Any]
    begun: float
    process: Process | None = None
    ended: float | None = None
    error: str | None = None
    answer: Any = None

    @property
    def acknowledged(self) -> bool:
        return self.ended is not None and self.error is None

    def __str__(self) -> str:
        state = "runs" if self.ended is None else self.error or "done"
        return f"{self.begun:.1f} {self.verb} {self.name} {self.options}: {state}"


def owner_by(token: str) -> str:
    """Owner that the code of a gray upgrade with that client token names in its conf."""
    return f"user-{token}"


def upload(
    ctx: OperationsContext,
    handle: str,
    workers: int,
    archive: int = 0,
    single: bool = False,
    **more: Any,
) -> str:
    """Put the parts of an upload; ``single``: the topology master gets a worker of its own.

    ``more`` are further keys of its conf.
    """
    conf = {
        "topology.workers": workers,
        "topology.message.timeout.secs": 5,
        "topology.master.single.worker": single,
        **more,
    }
    # A client uploads, which acts for no leader.
    with NimbusBlobClient(ctx.cluster.leader_http) as blobs:
        blobs.put(upload_key(handle, "topology"), json.dumps(WORD_COUNT).encode())
        blobs.put(upload_key(handle, "conf"), json.dumps(conf).encode())
        blobs.put(upload_key(handle, "archive"), _ARCHIVES[archive % len(_ARCHIVES)])
    return handle


def _submit(ctx: OperationsContext, name: str, options: dict[str, Any]) -> Any:
    token = options["token"]
    single = options.get("single", False)
    workers, archive = options.get("workers", 2), options.get("archive", 0)
    upload(ctx, f"handle-{token}", workers, archive, single, **options.get("conf") or {})
    submit(ctx, name=name, token=token, handle=f"handle-{token}")


def _kill(ctx: OperationsContext, name: str, options: dict[str, Any]) -> Any:
    return lifecycle.kill(ctx, name, options.get("wait", 0))


def _turn(verb: str) -> Callable[[OperationsContext, str, dict[str, Any]], Any]:
    return lambda ctx, name, options: getattr(lifecycle, verb)(ctx, name)


def _rebalance(ctx: OperationsContext, name: str, options: dict[str, Any]) -> Any:
    return rebalance(
        ctx,
        name,
        workers=options.get("workers"),
        reassign=options.get("reassign", False),
        wait_secs=1,
    )


def _update(ctx: OperationsContext, name: str, options: dict[str, Any]) -> Any:
    token = options["token"]
    upload(ctx, f"handle-{token}", options.get("workers", 2), options.get("archive", 1))
    return lifecycle.update(ctx, name, token=token, handle=f"handle-{token}")


def _restart(ctx: OperationsContext, name: str, options: dict[str, Any]) -> Any:
    return lifecycle.restart(ctx, name)


def _gray_upgrade(ctx: OperationsContext, name: str, options: dict[str, Any]) -> Any:
    token, selection = options["token"], Selection(number=options.get("number", 1))
    if options.get("more"):
        return lifecycle.gray_upgrade(ctx, name, selection)
    owner: dict[str, Any] = {"topology.submitter.user": owner_by(token)}
    upload(ctx, f"handle-{token}", options.get("workers", 2), options.get("archive", 1), **owner)
    return lifecycle.gray_upgrade(ctx, name, selection, handle=f"handle-{token}", token=token)


VERBS: dict[str, Callable[[OperationsContext, str, dict[str, Any]], Any]] = {
    "submit": _submit,
    "kill": _kill,
    "activate": _turn("activate"),
    "deactivate": _turn("deactivate"),
    "rebalance": _rebalance,
    "update": _update,
    "restart": _restart,
    "gray_upgrade": _gray_upgrade,
    "complete_upgrade": _turn("complete_upgrade"),
    "roll_back": _turn("roll_back"),
}


_CONTINUING = ("submit", "update", "rebalance")
"""Commands that continue when the leader changes."""
_NEXT_LEADER_SECS = 30.0
"""Longest wait of a command for the leader that follows."""


def _change_leader(cluster: Cluster) -> None:
    """Kill the leader while a command stands at a step, until another nimbus leads or it does so
    again.
    """
    leader, kernel = cluster.leader(), cluster.kernel
    if leader is None or leader.process is None:
        return
    cluster.leaders_changed_at_steps += 1
    epoch = cluster.epoch()
    leader.process.kill()
    kernel.after(1.0, cluster.start_missing)
    end = kernel.now + _NEXT_LEADER_SECS
    while kernel.now < end and (cluster.epoch() == epoch or cluster.leader() is None):
        kernel.sleep(0.1)


def begin(
    cluster: Cluster,
    verb: str,
    name: str,
    *,
    crash_at: int = 0,
    leader_changes_at: int = 0,
    **options: Any,
) -> Command:
    """Start a command; it ends in virtual time, or its process at that step (counted before and
    after each). At another step the leader changes.
    """
    from storm_simulation.dagster_side import operations

    command = Command(verb, name, options, cluster.kernel.now)
    number, epoch = len(cluster.commands), cluster.epoch()

    passed = 0

    def point(_: str) -> None:
        nonlocal passed
        passed += 1
        if passed == crash_at and command.process is not None:
            cluster.crashed_at_steps += 1
            command.process.kill()
            cluster.kernel.sleep(0.0)
        if passed == leader_changes_at:
            _change_leader(cluster)

    def work() -> None:
        try:
            with operations(cluster) as connected:
                ctx = replace(connected, checkpoint=point, run=f"run-{number}")
                command.answer = VERBS[verb](ctx, name, options)
            cluster.steps_of[verb] = passed
        except StormDagsterError as error:
            command.error = f"{type(error).__name__}: {error.message}"
            changes = cluster.epoch() - epoch
            if verb in _CONTINUING and isinstance(error, Fenced) and changes <= MAX_CONTINUATIONS:
                cluster.violated(
                    "continues",
                    f"{verb} {name} ended with Fenced after {changes} changes of the leader: "
                    f"{error.message}",
                )
        command.ended = cluster.kernel.now

    command.process = cluster.job(f"{verb}-{name}", work)
    return command
