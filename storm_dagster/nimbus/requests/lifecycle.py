"""Changes of running topologies at the leader: as Dagster runs, or by itself in an emergency.

:meth:`LifecycleRequests.act` is the one way in, for the HTTP service and for Thrift: a submission
with ``topology.hot.deploy.enable`` is its verb ``update``, one with ``topology.upgrade`` its verb
``gray-upgrade`` (:mod:`storm_dagster.nimbus.thrift.submission`), each with the ``handle`` of the
uploaded parts.
"""

import logging
import uuid
from collections.abc import Mapping
from typing import Any

from storm_dagster.core.transitions import apply_event
from storm_dagster.core.upgrade.machine import check_ending
from storm_dagster.core.upgrade.selection import Selection
from storm_dagster.model.dagster_names import REQUEST_TAG
from storm_dagster.model.errors import InvalidRequest, Misconfigured, Unavailable
from storm_dagster.model.verbs import VERBS, Verb, check_request
from storm_dagster.model.view import TopologyView
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.submitting import with_token
from storm_dagster.operations.context import topology_by_name
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.live.rebalance import rebalance, require_offered_host
from storm_dagster.operations.read.explaining import moves_document
from storm_dagster.operations.submit.submission import update_differences
from storm_dagster.operations.upgrade import check_upgrade

_log = logging.getLogger(__name__)


class LifecycleRequests:
    """Changes of running topologies."""

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus

    def act(self, name: str, verb: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Start the change: ``{"run_id", "id", "name", "status"}``, with new code also ``conf``:
        what differs in it.

        ``run_id`` is ``None`` when Dagster did not answer within 5 s, or refused nimbus, and the
        leader did it itself (:attr:`Verb.leader`); all others are then :class:`Unavailable`.
        :class:`NotAlive` for an unknown topology, :class:`Conflict` when its status does not allow
        the change. With ``dry_run`` nothing is changed: the response describes the change, for a
        rebalance with the plan.
        """
        row = VERBS.get(verb)
        if row is None:
            raise InvalidRequest(
                f"{verb!r:.40} is not a change of a topology: use {', '.join(VERBS)}"
            )
        body = check_request(row.request, document, verb)
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
        if verb in ("activate", "deactivate", "kill", "rebalance"):
            apply_event(topology.base, verb)
        if verb == "rebalance":
            require_offered_host(view, topology)
        elif row.brings_code:
            self._check_upload(verb, topology.id, fields, epoch)
            if handle := fields.get("handle"):
                answer["conf"] = update_differences(
                    self._nimbus.operations(epoch), topology, handle
                )
        elif verb in ("complete-upgrade", "rollback"):
            check_ending(topology.base, back=verb == "rollback")
        if body.dry_run:
            plan = self._plan(topology.id, fields, epoch) if verb == "rebalance" else None
            return {"run_id": None, **answer, "dry_run": True, "would": verb, "plan": plan}
        request = uuid.uuid4().hex
        try:
            return {"run_id": self._launch(topology, name, row, fields, request), **answer}
        except (Misconfigured, Unavailable) as error:
            if not row.leader:
                if isinstance(error, Unavailable) and "token" in fields:
                    raise with_token(error, fields["token"]) from error
                raise
            _log.warning(
                "%s of %s is done by the leader: %s",
                verb,
                topology.id,
                error,
                extra={"topology": topology.id},
            )
        ctx = self._nimbus.operations(epoch)
        self._nimbus.unreported.take(ctx, request)
        report = lifecycle.operation_of(verb)(ctx, topology.id, **fields)
        text = f"{verb} of {report.topology_id}, done by the leader because Dagster did not answer"
        self._nimbus.unreported.add(ctx, report.name, text, gone=report.status is None)
        return {"run_id": None, **answer, "status": report.status or "KILLED"}

    def _check_upload(
        self, verb: str, topology_id: str, fields: Mapping[str, Any], epoch: int
    ) -> None:
        handle = fields.get("handle")
        if verb == "gray-upgrade":
            selection = Selection(
                tuple(fields.get("workers", ())), fields.get("component"), fields.get("number", 0)
            )
            check_upgrade(
                self._nimbus.operations(epoch), topology_id, selection, new=handle is not None
            )
        elif handle is None:
            raise InvalidRequest(
                "an update names no upload: upload the new code and give its 'handle'"
            )
        if handle is not None:
            self._nimbus.uploads.require(handle)

    def _plan(self, topology_id: str, fields: Mapping[str, Any], epoch: int) -> dict[str, Any]:
        """The plan of the rebalance, by the local planner; its error when it does not fit."""
        asked = {key: value for key, value in fields.items() if key != "wait_secs"}
        report = rebalance(
            self._nimbus.operations(epoch), topology_id, **asked, wait_secs=0, dry_run=True
        )
        placement = report.placement
        return {
            "outcome": report.outcome,
            "moved": report.moved,
            "tasks_added": list(report.tasks_added),
            "tasks_removed": list(report.tasks_removed),
            "workers": [
                {
                    **{key: getattr(worker, key) for key in ("node", "host", "port", "kept")},
                    "tasks": list(worker.tasks),
                }
                for worker in (placement.workers if placement else ())
            ],
            "moves": moves_document(report.assignment, placement, report.components)
            if placement
            else [],
            "warnings": list(placement.warnings) if placement else [],
        }

    def _launch(
        self,
        topology: TopologyView,
        reference: str,
        row: Verb,
        fields: Mapping[str, Any],
        request: str,
    ) -> str:
        """Launch the run of the change; ``reference`` is the name or id that the caller gave."""
        dagster = self._nimbus.dagster
        name = topology.base.name
        tags = {"storm/topology": name, REQUEST_TAG: request}
        if row.name == "rebalance":
            ops = {dagster.names.stage_op("assignment"): {"config": dict(fields)}}
            return dagster.launch_once(
                row.job, {"ops": ops}, tags, identity=REQUEST_TAG, partition=name
            )
        # A kill by id must not reach a later topology of that name.
        by_id = row.name == "kill" and reference == topology.id
        config = {"name": reference if by_id else name, **fields}
        ops = {dagster.names.name(f"{row.job}_op"): {"config": config}}
        if row.leader:
            return dagster.launch(row.job, {"ops": ops}, tags)
        return dagster.launch_once(row.job, {"ops": ops}, tags, identity=REQUEST_TAG)
