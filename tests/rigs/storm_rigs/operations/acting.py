"""Operations run by a real process of their own, which is stopped, killed or resumed at any named
step.

::

    with Actor(conf, blob_dir, "storm_dagster.operations.live.lifecycle:kill", {"name": "wc", "wait_secs": 0}) as actor:
        assert actor.run_to("after.unassign")
        actor.kill()  # kill -9

The process is forked from a server that has imported the package and is connected to nothing, so
that it costs milliseconds. What it runs is the operation itself, against real ZooKeeper and a real
blob store; only the observer of its steps comes from here.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import storm_dagster
from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.core.event_log import EventSource
from storm_dagster.core.liveness.causes import Cause
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.core.upgrade.selection import Selection
from storm_dagster.model.conf import ClusterConf, default_conf
from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.model.errors import StormDagsterError, Unavailable, error_from_document
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live import event_logs, healing, lifecycle
from storm_dagster.operations.live.change_records import PlannedOn, take_over_change
from storm_dagster.operations.live.log_levels import keep_log_levels, level_change
from storm_dagster.operations.submit import submission
from storm_dagster.operations.submit.continuing import run_stage, take_over_submission
from storm_dagster.zk.storm_cluster_state import StormClusterState

_PATIENCE_SECS = 60.0
_EXIT = b"exit"
_forking = multiprocessing.get_context("forkserver")
_forking.set_forkserver_preload([__name__])
_IMPORTED_FROM = (Path(__file__).parents[2], Path(storm_dagster.__file__).parents[1])


def _start_server() -> None:
    """Start the server that the processes are forked from, which imports this module first.

    Up to Python 3.12 it looks for modules where a new interpreter does, and imports nothing when it
    does not find them. Later each process would import everything by itself, from wherever the path
    of the tests leads by then.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, _IMPORTED_FROM), *filter(None, [before])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def submit(ctx: OperationsContext, *, name: str, token: str, handle: str, **options: Any) -> None:
    """Run the six stages of a submission one after the other, as its run does."""

    def stage_conf() -> object:
        return submission.stage_conf(ctx, name=name, token=token, handle=handle, **options)

    run_stage(ctx, token, stage_conf)
    finish_submission(ctx, token=token)


def finish_submission(ctx: OperationsContext, *, token: str) -> None:
    """Run the stages after the first one, as the run of a submission does."""
    for stage in (
        submission.stage_code,
        submission.stage_tasks,
        submission.stage_assignment,
        submission.publish_assignment,
        submission.activate_topology,
    ):
        run_stage(ctx, token, lambda stage=stage: stage(ctx, token=token))


def continue_submission(ctx: OperationsContext, *, token: str) -> None:
    """Take a submission over under the present leader."""
    take_over_submission(ctx, token, ctx.current_epoch())


def continue_change(ctx: OperationsContext, *, request: str, topology_id: str) -> None:
    """Take a change over under the present leader, which was planned on the topology as it is."""
    base_at = ctx.cluster.load_view().topologies[topology_id].base_at
    planned = PlannedOn(topology_id, base_at.version)
    take_over_change(ctx, request, planned, ctx.current_epoch())


def reassign(ctx: OperationsContext, *, causes: list[dict[str, Any]]) -> None:
    """A reassignment for causes in their JSON form."""
    healing.reassign(ctx, [Cause.from_json(cause) for cause in causes])


def upgrade(
    ctx: OperationsContext, *, name: str, number: int, handle: str | None, token: str
) -> None:
    """One batch of a gray upgrade, its selection in JSON."""
    lifecycle.gray_upgrade(ctx, name, Selection(number=number), handle=handle, token=token)


def log_level(ctx: OperationsContext, name: str, logger: str, level: str) -> None:
    """Set one logger's level."""
    keep_log_levels(ctx, name, {logger: level_change(logger, level, 0, None)})


def take_event(ctx: OperationsContext, *, topology_id: str, partition: str) -> None:
    """Take one event of the topology ``wc``."""
    event = DagsterEvent.make("wc/count", "materialization", "lake/words", partition=partition)
    report = event_logs.EventReport(topology_id, "count", 4, event)
    event_logs.take_events(ctx, "wc", EventSource(topology_id), [report])


def acknowledge(ctx: OperationsContext, *, log: str, number: int) -> None:
    """Remove the events of ``wc`` that Dagster has."""
    event_logs.acknowledge_events(ctx, "wc", log, number)


def redirect_events(ctx: OperationsContext, *, topology_id: str, owner: str) -> None:
    """Note the owner of ``wc`` in its event log."""
    source = EventSource(topology_id, declared=True, owner=owner)
    event_logs.change_source(ctx, "wc", source)


def finish_due(ctx: OperationsContext) -> None:
    """Run the actions that are due for the leader, once every delay has passed."""
    seen = lifecycle.finish_due(ctx, boot_id="b", boot_now=0.0)
    lifecycle.finish_due(ctx, seen.memory, boot_id="b", boot_now=1e9)


class Actor:
    """One process that runs one operation. A context manager: the process has ended when it exits.

    ``target`` is ``module:function``, whose first argument is the operations' context;
    ``arguments`` are its keyword arguments, JSON. ``conf`` leads to the cluster. The plain-Python
    planner places.
    """

    def __init__(
        self,
        conf: Mapping[str, Any],
        blob_dir: Path,
        target: str,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.points: list[str] = []
        """Every point that was passed so far."""
        _start_server()
        mine, theirs = _forking.Pipe()
        self._pipe: Connection = mine
        order = {
            "conf": dict(conf),
            "blobs": str(blob_dir),
            "target": target,
            "arguments": dict(arguments or {}),
        }
        self._process: BaseProcess = _forking.Process(
            target=_act, args=(theirs, json.dumps(order)), daemon=True
        )
        self._process.start()
        theirs.close()
        self._document: dict[str, Any] | None = None

    def __enter__(self) -> Actor:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.is_alive():
            self.kill()
        self._pipe.close()
        self._process.close()

    def run_to(self, point: str | None = None) -> bool:
        """Run until ``point``, where the process stops; ``False`` when it ended without passing
        it.
        """
        while True:
            document = self._receive()
            if "point" not in document:
                self._document = document
                self._process.join(_PATIENCE_SECS)
                return False
            self.points.append(document["point"])
            if document["point"] == point:
                return True
            self._pipe.send_bytes(b"")

    def go_on(self) -> None:
        """Resume a process that stopped at a point."""
        self._pipe.send_bytes(b"")

    def finish(self) -> StormDagsterError | None:
        """Run it to its end; the typed error with which it ended, if it did."""
        if self._document is None:
            self.run_to(None)
        assert self._document is not None
        if "error" not in self._document:
            return None
        return error_from_document(self._document)

    def kill(self) -> None:
        """``kill -9``, and wait until it is gone."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(_PATIENCE_SECS)
        if self._process.exitcode != -signal.SIGKILL:
            raise Unavailable(
                f"the acting process ended with {self._process.exitcode}, not by the signal"
            )

    def exit(self) -> None:
        """End a process that stopped at a point as ``sys.exit(1)`` does there, and wait until it is
        gone.
        """
        self._pipe.send_bytes(_EXIT)
        self._process.join(_PATIENCE_SECS)
        if self._process.exitcode != 1:
            raise Unavailable(f"the acting process ended with {self._process.exitcode}, not with 1")

    def freeze(self, secs: float) -> None:
        """Stop a process that stopped at a point as a whole, for so long; its session ends if that
        is longer.
        """
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        time.sleep(secs)
        os.kill(self._process.pid, signal.SIGCONT)

    def _receive(self) -> dict[str, Any]:
        if not self._pipe.poll(_PATIENCE_SECS):
            raise Unavailable(
                f"the acting process says nothing (last point: {self.points[-1:]}): see its traceback"
            )
        try:
            return json.loads(self._pipe.recv_bytes())
        except EOFError:
            self._process.join(_PATIENCE_SECS)
            raise Unavailable(
                f"the acting process died by itself with {self._process.exitcode} (last point: {self.points[-1:]})"
            ) from None


def _act(pipe: Connection, raw: str) -> None:
    """Main function of the child: connect, run the operation, report every point and wait to be
    resumed.
    """
    order = json.loads(raw)
    values = {**default_conf(), **order["conf"]}

    def observer(point: str) -> None:
        pipe.send_bytes(json.dumps({"point": point}).encode())
        if pipe.recv_bytes() == _EXIT:
            sys.exit(1)

    module, _, function = order["target"].partition(":")
    with StormClusterState.open(values) as cluster:
        ctx = OperationsContext(
            cluster=cluster,
            blobs=LocalBlobStore(Path(order["blobs"])),
            conf=ClusterConf(values, dict.fromkeys(values, "test")),
            planner=plan_placement,
            checkpoint=observer,
        )
        try:
            getattr(importlib.import_module(module), function)(ctx, **order["arguments"])
        except StormDagsterError as error:
            pipe.send_bytes(json.dumps(error.to_document()).encode())
        else:
            pipe.send_bytes(json.dumps({"done": True}).encode())
