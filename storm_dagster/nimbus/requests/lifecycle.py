"""Changes of running topologies at the leader: its own transactions, and Dagster runs.

:meth:`LifecycleRequests.act` is the one way in, for the HTTP service and for Thrift: a submission
with ``topology.hot.deploy.enable`` is its verb ``update``, one with ``topology.upgrade`` its verb
``gray-upgrade`` (:mod:`storm_dagster.nimbus.thrift.submission`), each with the ``handle`` of the
uploaded parts.
"""

import uuid
from collections.abc import Mapping
from typing import Any

from storm_dagster.core.transitions import apply_event
from storm_dagster.core.upgrade.machine import check_ending
from storm_dagster.core.upgrade.selection import Selection
from storm_dagster.model.dagster_names import REQUEST_TAG
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.model.verbs import VERBS, Verb, check_request
from storm_dagster.model.view import TopologyView
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.submitting import KeyedLocks, accepted, with_token
from storm_dagster.operations.context import topology_by_name
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.live.rebalance import rebalance, require_offered_host
from storm_dagster.operations.read.explaining import moves_document
from storm_dagster.operations.submit.staging import check_token
from storm_dagster.operations.submit.submission import update_differences
from storm_dagster.operations.upgrade import check_upgrade


class LifecycleRequests:
    """Changes of running topologies."""

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus
        self._locks = KeyedLocks()
        """Of the tokens of updates."""

    def act(self, name: str, verb: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Make or start the change: ``{"run_id", "id", "name", "status"}``, with new code also
        ``conf``: what differs in it.

        A verb that the leader executes (:attr:`Verb.executed_by`) is done when this returns:
        ``run_id`` is ``None``, and ``status`` is the new one. Each other is a Dagster run that has
        been launched, else :class:`Unavailable`. :class:`NotAlive` for an unknown topology,
        :class:`Conflict` when its status does not allow the change. With ``dry_run`` nothing is
        changed: the response describes the change, for a rebalance with the plan.
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
        if row.executed_by == "leader" and not body.dry_run:
            return {"run_id": None, **answer, "status": self._execute(topology, row, fields, epoch)}
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
        return {"run_id": self._launch(topology, row, fields, epoch), **answer}

    def _execute(
        self, topology: TopologyView, row: Verb, fields: Mapping[str, Any], epoch: int
    ) -> str:
        """Make the change in one transaction, and note it for Dagster; the topology's status."""
        ctx = self._nimbus.operations(epoch)
        # The leader's duties remove a killed topology: its workers may need their time to end.
        operation = (
            lifecycle.mark_killed if row.name == "kill" else lifecycle.operation_of(row.name)
        )
        result = operation(ctx, topology.id, **fields)
        status = str(result.status)
        self._nimbus.verb_executed.set()
        if result.changed:
            metadata = {
                "verb": row.name,
                "topology_id": result.topology_id,
                "status": status,
                "previous": topology.base.status,
            }
            text = f"{row.name}: {result.topology_id} is {status}"
            self._nimbus.unreported.add_change(ctx, result.name, text, metadata)
        return status

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
                {key: document[key] for key in ("node", "host", "port", "kept", "tasks")}
                for document in (placement.worker_documents() if placement else ())
            ],
            "moves": moves_document(report.assignment, placement, report.components)
            if placement
            else [],
            "warnings": list(placement.warnings) if placement else [],
        }

    def _launch(
        self, topology: TopologyView, row: Verb, fields: Mapping[str, Any], epoch: int
    ) -> str:
        """Launch the run of the change, once; its id."""
        dagster = self._nimbus.dagster
        name = topology.base.name
        tags = {"storm/topology": name, REQUEST_TAG: uuid.uuid4().hex}
        if row.name == "rebalance":
            ops = {dagster.names.stage_op("assignment"): {"config": dict(fields)}}
            return dagster.launch_once(
                row.job, {"ops": ops}, tags, identity=REQUEST_TAG, partition=name
            )
        config = {"name": name, **fields}
        if row.name == "update":
            config["token"] = check_token(fields.get("token") or uuid.uuid4().hex)
        ops = {dagster.names.name(f"{row.job}_op"): {"config": config}}

        if row.name == "update":
            token = config["token"]
            ctx = self._nimbus.operations(epoch)
            with self._locks.hold(token), accepted(ctx, token, name, "update") as write:
                return dagster.launch_once(
                    row.job, {"ops": ops}, tags, identity=REQUEST_TAG, before_launch=write
                )
        try:
            return dagster.launch_once(row.job, {"ops": ops}, tags, identity=REQUEST_TAG)
        except Unavailable as error:
            if "token" in fields:
                raise with_token(error, fields["token"]) from error
            raise
