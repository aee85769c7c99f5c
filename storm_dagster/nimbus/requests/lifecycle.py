"""Changes of running topologies, by transactions of the leader or Dagster runs.

:meth:`LifecycleRequests.act` is the only entry, for the HTTP service and for Thrift: a submission
with ``topology.hot.deploy.enable`` is its verb ``update``, one with ``topology.upgrade`` its verb
``gray-upgrade`` (:mod:`storm_dagster.nimbus.thrift.submission`), each with the ``handle`` of the
uploaded parts.
"""

import dataclasses
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from storm_dagster.core.authorization import REQUEST_USER
from storm_dagster.core.transitions import apply_event
from storm_dagster.core.upgrade.machine import check_ending
from storm_dagster.core.upgrade.selection import Selection
from storm_dagster.model.dagster_names import DECLARED_OWNER_KEY, RECORDED_TAG, REQUEST_TAG
from storm_dagster.model.errors import (
    InvalidRequest,
    Misconfigured,
    NotAlive,
    StormDagsterError,
    Unavailable,
)
from storm_dagster.model.operation_record import OperationRecord, TokenRecord
from storm_dagster.model.requests import check_request
from storm_dagster.model.verbs import VERBS, Verb
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.nimbus.dagster.client import LOOKUP_SECS
from storm_dagster.nimbus.keyed_locks import KeyedLocks
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.cancelled import (
    CANCELLED,
    describe_cancelled,
    end_cancelled,
)
from storm_dagster.nimbus.requests.launches import RecordWrite
from storm_dagster.nimbus.requests.submitting import accepted, with_token
from storm_dagster.operations.context import OperationsContext, topology_by_name
from storm_dagster.operations.live.change_records import (
    end_change,
    read_change,
    release_change,
    set_run,
    write_change,
)
from storm_dagster.operations.live.lifecycle import LEADER_OPERATIONS
from storm_dagster.operations.live.rebalance import rebalance, require_offered_host
from storm_dagster.operations.read.explaining import moves_document
from storm_dagster.operations.read.run_results import lifecycle_result
from storm_dagster.operations.results import LifecycleResult
from storm_dagster.operations.submit.open_tokens import (
    STARTING,
    OpenTokenReader,
    starting_topologies,
)
from storm_dagster.operations.submit.staging import check_client_token, read_client_token
from storm_dagster.operations.submit.submission import update_differences
from storm_dagster.operations.upgrade import UpgradeResult, check_upgrade

_log = logging.getLogger(__name__)
_audit = logging.getLogger("storm_dagster.audit")
_PLANNED_WORKER_FIELDS = ("node", "host", "port", "kept", "tasks")
"""Fields of a worker's document that a plan shows."""


class LifecycleRequests:
    """Changes of running topologies."""

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus
        self._locks = KeyedLocks()
        """Locks of tokens and requests."""

    def act(self, name: str, verb: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Make or start the change, and return its document.

        The document is ``{"run_id", "id", "name", "status"}``; with new code it also has ``conf``,
        the differences of the conf. A verb that the leader executes (:attr:`Verb.executed_by`) is
        done when this returns: ``run_id`` is ``None``, and ``status`` is the new one. Each other
        verb is a Dagster run that has been launched, else :class:`Unavailable`. :class:`NotAlive`
        for an unknown topology, :class:`Conflict` if its status does not allow the change. With
        ``dry_run`` the cluster is not changed: the response describes the change, for a rebalance
        with the plan. A kill of a topology that is being submitted cancels the submission:
        ``status`` is then CANCELLED, and ``cancelled`` says what was under way.
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
        try:
            topology = topology_by_name(view, name)
        except NotAlive:
            if row.event != "kill":
                raise
            return self._kill_starting(name, row, fields, epoch, body.dry_run)
        answer: dict[str, Any] = {
            "id": topology.id,
            "name": topology.base.name,
            "status": topology.base.status,
        }
        if row.executed_by == "leader" and not body.dry_run:
            result = self._execute(topology.id, row, fields, epoch)
            answer["status"] = str(result.status)
            done = lifecycle_result(row.name, result).to_document()
            return {"run_id": None, **answer, **done}
        if not body.dry_run:
            # Before the check, which may refuse the request after the earlier run had its effect.
            run_id = self._earlier_run(row, topology.base.name, fields, epoch)
            if run_id is not None:
                return {"run_id": run_id, **answer}
        # The run decides. This check only spares a run for a change that is not possible now.
        self._check(row, view, topology, fields, epoch)
        handle = fields.get("handle")
        if handle:
            answer["conf"] = update_differences(
                self._nimbus.operations(epoch),
                topology,
                handle,
                replaces=row.name == "update",
            )
        if body.dry_run:
            plan = self._plan(topology.id, fields, epoch) if row.places_tasks else None
            return {"run_id": None, **answer, "dry_run": True, "would": verb, "plan": plan}
        run_id = self._launch_request(topology, row, fields, epoch)
        _audit_owner(topology.base.name, answer.get("conf", {}))
        return {"run_id": run_id, **answer}

    def _execute(
        self, name: str, row: Verb, fields: Mapping[str, Any], epoch: int
    ) -> LifecycleResult | UpgradeResult:
        """Make the change of the topology of that name or id in one transaction.

        The transaction includes the event for Dagster.
        """
        ctx = dataclasses.replace(self._nimbus.operations(epoch), verb=row.name)
        result = LEADER_OPERATIONS[row.name](ctx, name, **fields)
        self._nimbus.verb_executed.set()
        self._nimbus.unreported.take_noted(ctx)
        return result

    def _kill_starting(
        self, name: str, row: Verb, fields: Mapping[str, Any], epoch: int, dry_run: bool
    ) -> dict[str, Any]:
        """Kill a topology that had no base a moment ago, and return the document of :meth:`act`.

        :class:`NotAlive` if it is not being submitted either. A submission that is published at
        that moment is not cancelled: its topology is killed. The run of a cancelled submission ends
        in the background, and then its parts are deleted.
        """
        if dry_run:
            state = self._nimbus.cluster.state
            for starting in starting_topologies(OpenTokenReader(), state):
                if name in (starting.name, starting.id):
                    answer = {"id": starting.id, "name": starting.name, "status": STARTING}
                    return {"run_id": None, **answer, "dry_run": True, "would": row.name}
            # It is published by now, or does not exist.
            topology = topology_by_name(self._nimbus.cluster.load_view(), name)
            base = topology.base
            answer = {"id": topology.id, "name": base.name, "status": base.status}
            return {"run_id": None, **answer, "dry_run": True, "would": row.name}
        result = self._execute(name, row, fields, epoch)
        answer = {"id": result.topology_id, "name": result.name, "status": str(result.status)}
        if isinstance(result, LifecycleResult) and result.cancelled:
            answer["status"] = CANCELLED
            answer["cancelled"] = describe_cancelled(result.cancelled)
            end_cancelled(self._nimbus, result.cancelled, epoch)
        return {"run_id": None, **answer}

    def _check(
        self,
        row: Verb,
        view: ClusterView,
        topology: TopologyView,
        fields: Mapping[str, Any],
        epoch: int,
    ) -> None:
        """Raise an error if the change is not possible now."""
        if row.event is not None:
            apply_event(topology.base, row.event)
        handle = fields.get("handle")
        match row.precheck:
            case "offered_host":
                require_offered_host(view, topology)
            case "uploaded_code":
                if handle is None:
                    raise InvalidRequest(
                        "an update names no upload: upload the new code and give its 'handle'"
                    )
            case "upgrade_batch":
                workers = tuple(fields.get("workers", ()))
                selection = Selection(workers, fields.get("component"), fields.get("number", 0))
                ctx = self._nimbus.operations(epoch)
                check_upgrade(ctx, topology.id, selection, new=handle is not None)
            case "upgrade_to_complete":
                check_ending(topology.base, back=False)
            case "upgrade_to_roll_back":
                check_ending(topology.base, back=True)
            case None:
                pass
        if handle is not None:
            self._nimbus.uploads.require(handle)

    def _plan(self, topology_id: str, fields: Mapping[str, Any], epoch: int) -> dict[str, Any]:
        """Plan the rebalance with the local planner, whose errors are raised."""
        # A plan does not wait.
        options = {key: value for key, value in fields.items() if key != "wait_secs"}
        report = rebalance(
            self._nimbus.operations(epoch), topology_id, **options, wait_secs=0, dry_run=True
        )
        placement = report.placement
        workers: list[dict[str, Any]] = []
        moves: list[Any] = []
        if placement is not None:
            workers = [_planned_worker(document) for document in placement.worker_documents()]
            moves = moves_document(report.assignment, placement, report.components)
        return {
            "outcome": report.outcome,
            "moved": report.moved,
            "tasks_added": list(report.tasks_added),
            "tasks_removed": list(report.tasks_removed),
            "workers": workers,
            "moves": moves,
            "warnings": list(report.all_warnings),
        }

    def launch_missing_update(self, record: TokenRecord) -> str:
        """Launch the run of an update that an earlier leader accepted; return its id."""
        epoch = self._nimbus.status.require()
        topology = topology_by_name(self._nimbus.cluster.load_view(), record.name)
        return self._launch_request(
            topology, VERBS["update"], record.request, epoch, is_promised=True
        )

    def launch_missing_change(self, request: str, record: OperationRecord, version: int) -> str:
        """Launch the run of a change that an earlier leader accepted; return its id.

        :class:`Conflict` if the data version of its record is no longer ``version``,
        :class:`NotAlive` if its topology is gone.
        """
        epoch = self._nimbus.status.require()
        topology = topology_by_name(self._nimbus.cluster.load_view(), record.topology_id)
        row = VERBS[record.verb]
        change = _AcceptedChange(
            topology, row, record.request, request, record.user, record.started_secs
        )
        return self._launch_change(change, epoch, expected_version=version)

    def _launch_request(
        self,
        topology: TopologyView,
        row: Verb,
        fields: Mapping[str, Any],
        epoch: int,
        *,
        is_promised: bool = False,
    ) -> str:
        """Launch the run of the change, once, and return its id.

        ``is_promised``: a leader launches the run of an update also after an :class:`Unavailable`
        (:func:`accepted`).
        """
        fields = dict(fields)
        request = uuid.uuid4().hex
        if row.brings_code:
            # The token identifies the run, so that a repeated request makes no second one.
            request = check_client_token(fields.get("token") or request)
            fields["token"] = request
        change = _AcceptedChange(topology, row, fields, request, REQUEST_USER.get())
        if not row.has_token_record:
            return self._launch_change(change, epoch)
        token = request
        name = topology.base.name
        ctx = self._nimbus.operations(epoch)
        with (
            self._nimbus.launches.hold(token),
            self._locks.hold(token),
            accepted(ctx, token, name, "update", fields, is_promised) as write_record,
        ):
            run_id = self._earlier_run(row, name, fields, epoch)
            return run_id or self._start_run(change, write_record)

    def _earlier_run(
        self, row: Verb, name: str, fields: Mapping[str, Any], epoch: int
    ) -> str | None:
        """Return the run of an earlier request with the same token, unless it failed.

        ``None`` for a verb without a token, and without a record of the token for this verb. For a
        gray upgrade only a run that has not ended counts: its operation knows the token of each
        batch.
        """
        token = fields.get("token")
        if not row.brings_code or token is None:
            return None
        ctx = self._nimbus.operations(epoch)
        record: OperationRecord | TokenRecord
        if row.has_token_record:
            stored_token = read_client_token(ctx, token, name)
            if stored_token is None:
                return None
            record, _ = stored_token
        else:
            stored_change = read_change(ctx, check_client_token(token))
            if stored_change is None:
                return None
            record, _ = stored_change
        if record.verb != row.name:
            return None
        run = self._nimbus.dagster.find_run(REQUEST_TAG, token, job=row.job, patience=LOOKUP_SECS)
        if run is None or run.failed or (run.finished and not row.has_token_record):
            return None
        return run.run_id

    def _launch_change(
        self, change: "_AcceptedChange", epoch: int, *, expected_version: int | None = None
    ) -> str:
        """Store the record of a change, launch its run, and return the id of the run.

        With ``expected_version``, the data version of an existing record, the leader launches a run
        that is missing: after each error the record stays for its next round.
        """
        ctx = self._nimbus.operations(epoch)
        request = change.request
        name = change.topology.base.name
        record = OperationRecord(
            topology_id=change.topology.id,
            name=name,
            verb=change.row.name,
            epoch=epoch,
            started_secs=change.started_secs or ctx.now_secs(),
            user=change.user,
            request=dict(change.fields),
        )
        with self._nimbus.launches.hold(request), self._locks.hold(request):
            run_id = self._earlier_run(change.row, name, change.fields, epoch)
            if run_id is not None:
                return run_id
            with self._record_before_launch(ctx, change, record, expected_version) as write_record:
                run_id = self._start_run(change, write_record)
            self._nimbus.launches.note_run(request, run_id)
            self._note_run(ctx, request, run_id)
            return run_id

    @contextmanager
    def _record_before_launch(
        self,
        ctx: OperationsContext,
        change: "_AcceptedChange",
        record: OperationRecord,
        expected_version: int | None,
    ) -> Iterator[Callable[[], None]]:
        """Yield the function that writes the record, for the launch inside.

        After an :class:`Unavailable` the run may exist: the record stays, and no leader launches it
        without ``expected_version``. If the launch was refused permanently, a new record is
        deleted.
        """
        request = change.request
        is_new = read_change(ctx, request) is None
        write = RecordWrite()

        def write_record() -> None:
            write.was_begun = True
            write.version = write_change(ctx, request, record, expected_version)

        try:
            yield write_record
        except Unavailable as error:
            if not write.was_begun or expected_version is not None:
                # No record was written, or this leader launches the run in its next round.
                is_released = True
            else:
                is_released = self._release(ctx, request)
            if change.row.brings_code:
                raise with_token(error, request) from error
            if not is_released:
                raise Unavailable(
                    f"{error.message}; the {change.row.name} of {record.name} may still take "
                    "place: see `storm-dagster list` before you repeat it"
                ) from error
            raise
        except (InvalidRequest, Misconfigured):
            if write.version is not None and expected_version is None:
                if is_new:
                    end_change(ctx, request, write.version)
                else:
                    # An earlier attempt of the request may have a run.
                    self._release(ctx, request)
            raise

    @staticmethod
    def _release(ctx: OperationsContext, request: str) -> bool:
        """Store that no leader launches the run of the change; False if that fails."""
        try:
            release_change(ctx, request)
        except StormDagsterError as error:
            _log.warning(
                "the run of request %s may be launched by a later leader: %s",
                request,
                error.message,
            )
            return False
        return True

    @staticmethod
    def _note_run(ctx: OperationsContext, request: str, run_id: str) -> None:
        """Store the run in the record.

        If that fails, a later leader looks the run up by its tag.
        """
        try:
            set_run(ctx, request, run_id)
        except StormDagsterError as error:
            _log.info("run %s is not noted in its record: %s", run_id, error.message)

    def _start_run(self, change: "_AcceptedChange", write_record: Callable[[], None]) -> str:
        """Launch the run; ``write_record`` is called right before.

        Return the id of the run. A verb that places tasks materializes ``storm/assignment`` for
        the topology's partition; the others have a job with one op.
        """
        dagster = self._nimbus.dagster
        row = change.row
        name = change.topology.base.name
        tags = {"storm/topology": name, REQUEST_TAG: change.request}
        if not row.has_token_record:
            tags[RECORDED_TAG] = "true"
        if row.places_tasks:
            config: dict[str, Any] = dict(change.fields)
            op = dagster.names.stage_op("assignment")
            partition = name
        else:
            config = {"name": name, **change.fields}
            op = dagster.names.name(f"{row.job}_op")
            partition = None
        return dagster.launch_once(
            row.job,
            {"ops": {op: {"config": config}}},
            tags,
            identity=REQUEST_TAG,
            partition=partition,
            before_launch=write_record,
        )


def _audit_owner(name: str, differences: Mapping[str, Mapping[str, Any]]) -> None:
    """Log the owner of a declared topology, if its new conf has another one."""
    owners = differences.get(DECLARED_OWNER_KEY)
    if owners is not None:
        _audit.info("owner of topology %r: %r, before %r", name, owners["new"], owners["old"])


def _planned_worker(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a worker's document that a plan shows."""
    return {key: document[key] for key in _PLANNED_WORKER_FIELDS}


@dataclasses.dataclass(frozen=True)
class _AcceptedChange:
    """A change that a Dagster run executes."""

    topology: TopologyView
    row: Verb
    fields: Mapping[str, Any]
    """Fields of the request, as the config of the run has them."""
    request: str
    """Identity of the run: the client token of a change that brings code."""
    user: str
    """User of the request; empty in a cluster without authentication."""
    started_secs: int = 0
    """Time at which it was accepted, epoch seconds; 0 for the present."""
