"""Changes of running topologies at the leader: as Dagster runs, or by itself in an emergency.

:meth:`LifecycleRequests.act` is the one way in, for the HTTP service and for Thrift: a submission with
``topology.hot.deploy.enable`` is its verb ``update``, one with ``topology.upgrade`` its verb ``gray-upgrade``
(:mod:`storm_dagster.nimbus.thrift.submission`), each with the ``handle`` of the uploaded parts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from storm_dagster.core.transitions import Event, apply_event
from storm_dagster.core.upgrade.machine import check_ending
from storm_dagster.core.upgrade.selection import Selection
from storm_dagster.model.dagster_names import REBALANCE_JOB
from storm_dagster.model.errors import InvalidRequest, Misconfigured, Unavailable
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.bodies import CHANGES, check_body
from storm_dagster.operations.context import OperationsContext, topology_by_name
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.live.rebalance import rebalance, require_offered_host
from storm_dagster.operations.read.explaining import moves_document
from storm_dagster.operations.results import LifecycleResult
from storm_dagster.operations.submit.submission import update_differences
from storm_dagster.operations.upgrade import UpgradeResult, check_request

_log = logging.getLogger(__name__)

_EVENTS: tuple[Event, ...] = ("activate", "deactivate", "kill", "rebalance")
"""Verbs that the topology's status allows or forbids under their own name."""


class LifecycleRequests:
    """Changes of running topologies."""

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus

    def act(self, name: str, verb: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Start the change: ``{"run_id", "id", "name", "status"}``, with new code also ``conf``: what differs in it.

        ``run_id`` is ``None`` when Dagster did not answer within 5 s, or refused nimbus, and the leader did it itself (kill,
        activate, deactivate, complete-upgrade, rollback); all others are then :class:`Unavailable`. :class:`NotAlive` for an
        unknown topology, :class:`Conflict` when its status does not allow the change. With ``dry_run`` nothing
        is changed: the response describes the change, for a rebalance with the plan.
        """
        if verb not in CHANGES:
            raise InvalidRequest(f"{verb!r:.40} is not a change of a topology: use {', '.join(CHANGES)}")
        body = check_body(CHANGES[verb], document, verb)
        fields = body.fields()
        epoch = self._nimbus.status.require()
        view = self._nimbus.cluster.load_view()
        topology = topology_by_name(view, name)
        answer: dict[str, Any] = {
            "id": topology.id,
            "name": topology.base.name,
            "status": topology.base.status,
        }
        # The run decides; what cannot be done now needs no run.
        if verb in _EVENTS:
            apply_event(topology.base, verb)
        if verb == "rebalance":
            require_offered_host(view, topology)
        elif verb in ("update", "gray-upgrade"):
            self._check_upload(verb, topology.id, fields, epoch)
            if handle := fields.get("handle"):
                answer["conf"] = update_differences(self._nimbus.operations(epoch), topology, handle)
        elif verb in ("complete-upgrade", "rollback"):
            check_ending(topology.base, back=verb == "rollback")
        if body.dry_run:
            plan = self._plan(topology.id, fields, epoch) if verb == "rebalance" else None
            return {"run_id": None, **answer, "dry_run": True, "would": verb, "plan": plan}
        try:
            return {"run_id": self._launch(topology.base.name, verb, fields), **answer}
        except (Misconfigured, Unavailable) as error:
            by_hand = self._by_hand(verb, fields)
            if by_hand is None:
                raise
            _log.warning("%s of %s is done by the leader: %s", verb, topology.id, error)
        ctx = self._nimbus.operations(epoch)
        report = by_hand(ctx, topology.id)
        self._nimbus.unreported.add(
            ctx,
            report.name,
            f"{verb} of {report.topology_id}, done by the leader because Dagster did not answer",
            gone=report.status is None,
        )
        return {"run_id": None, **answer, "status": report.status or "KILLED"}

    def _check_upload(self, verb: str, topology_id: str, fields: Mapping[str, Any], epoch: int) -> None:
        handle = fields.get("handle")
        if verb == "gray-upgrade":
            selection = Selection(tuple(fields.get("workers", ())), fields.get("component"), fields.get("number", 0))
            check_request(self._nimbus.operations(epoch), topology_id, selection, new=handle is not None)
        elif handle is None:
            raise InvalidRequest("an update names no upload: upload the new code and give its 'handle'")
        if handle is not None:
            self._nimbus.uploads.require(handle)

    def _plan(self, topology_id: str, fields: Mapping[str, Any], epoch: int) -> dict[str, Any]:
        """The plan of the rebalance, by the local planner; its error when it does not fit."""
        asked = {key: value for key, value in fields.items() if key != "wait_secs"}
        report = rebalance(self._nimbus.operations(epoch), topology_id, **asked, wait_secs=0, dry_run=True)
        placement = report.placement
        return {
            "outcome": report.outcome,
            "moved": report.moved,
            "tasks_added": list(report.tasks_added),
            "tasks_removed": list(report.tasks_removed),
            "workers": [
                {
                    "node": worker.node,
                    "host": worker.host,
                    "port": worker.port,
                    "tasks": list(worker.tasks),
                    "kept": worker.kept,
                }
                for worker in (placement.workers if placement else ())
            ],
            "moves": moves_document(report.assignment, placement, report.components) if placement else [],
            "warnings": list(placement.warnings) if placement else [],
        }

    def _launch(self, name: str, verb: str, fields: Mapping[str, Any]) -> str:
        dagster = self._nimbus.dagster
        tags = {"storm/topology": name}
        if verb == "rebalance":
            dagster.add_partition(name)
            return dagster.launch(
                REBALANCE_JOB,
                {"ops": {dagster.names.stage_op("assignment"): {"config": dict(fields)}}},
                {**tags, "dagster/partition": name},
                patient=True,
            )
        job = f"{verb.replace('-', '_')}_topology"
        config = {"ops": {dagster.names.name(f"{job}_op"): {"config": {"name": name, **fields}}}}
        return dagster.launch(job, config, tags, patient=self._by_hand(verb, fields) is None)

    def _by_hand(
        self, verb: str, fields: Mapping[str, Any]
    ) -> Callable[[OperationsContext, str], LifecycleResult | UpgradeResult] | None:
        by_hand: Mapping[str, Callable[[OperationsContext, str], LifecycleResult | UpgradeResult]] = {
            "kill": lambda ctx, name: lifecycle.kill(ctx, name, fields.get("wait_secs")),
            "activate": lifecycle.activate,
            "deactivate": lifecycle.deactivate,
            # Rolling back and completing must not wait for Dagster.
            "complete-upgrade": lifecycle.complete_upgrade,
            "rollback": lifecycle.roll_back,
        }
        return by_hand.get(verb)
