"""Operations under way: submissions and changes that are accepted and not ended."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from storm_dagster.model import paths
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.operation_record import OperationRecord, TokenRecord
from storm_dagster.model.records import (
    decode_record,
)
from storm_dagster.model.verbs import VERBS
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.change_records import read_changes
from storm_dagster.operations.submit.open_tokens import (
    OpenTokenReader,
    read_staging,
    stage_of_submission,
)


@dataclass(frozen=True)
class OperationStatus:
    """An operation that has not ended, and its current step."""

    key: str
    """Client token of a submission or an update, request of another change."""
    verb: str
    topology: str
    """Name of the topology."""
    topology_id: str
    started_secs: int
    """Epoch seconds at which it was accepted; 0: an earlier release wrote the record."""
    step: str
    """Of a submission or update one of ``STAGES``: that stage has not ended."""
    run_id: str = ""
    """Its Dagster run; empty if this process does not know it."""
    user: str = ""

    def to_document(self, now_secs: int) -> dict[str, Any]:
        """The row of ``GET /v1/operations``; ``now_secs``: epoch seconds."""
        started = self.started_secs
        return {
            "verb": self.verb,
            "topology": self.topology,
            "topology_id": self.topology_id,
            "step": self.step,
            "started_secs": started,
            "age_secs": max(0, now_secs - started) if started else None,
            "run_id": self.run_id or None,
            "user": self.user or None,
        }


def operations_under_way(
    ctx: OperationsContext,
    view: ClusterView | None = None,
    token_reader: OpenTokenReader | None = None,
    run_of: Callable[[str], str | None] = lambda _: None,
) -> list[OperationStatus]:
    """Operations that are accepted and have not ended, oldest first.

    Records are read from ZooKeeper, steps from the staged parts and from the topologies. So any
    process sees the same, and a later leader finds the operations that a former one accepted.
    ``view`` spares a read of the cluster, ``token_reader`` reads of tokens. ``run_of`` returns the
    run of a token or request whose record names none, if the caller has launched it.
    """
    view = view or ctx.cluster.load_view()
    state = ctx.cluster.state
    tokens = (token_reader or OpenTokenReader()).tokens(state)
    operations = [_submission(ctx, token, record) for token, record in tokens.items()]
    operations += _inactive_submissions(ctx, view.topologies.values())
    for request, change in read_changes(state).items():
        if change.topology_id in view.topologies:
            operations.append(_change(request, change, view.topologies[change.topology_id], run_of))
    operations = [
        replace(operation, run_id=operation.run_id or run_of(operation.key) or "")
        for operation in operations
    ]
    return sorted(operations, key=lambda operation: (operation.started_secs, operation.key))


def _submission(ctx: OperationsContext, token: str, record: TokenRecord) -> OperationStatus:
    """The submission or update of a topology that is not published."""
    staged = read_staging(ctx, token)
    run_id = "" if staged is None else staged.run
    return _token_status(token, record, stage_of_submission(ctx, token, record), run_id)


def _token_status(token: str, record: TokenRecord, step: str, run_id: str) -> OperationStatus:
    """The status of a submission or update, by the record of its token."""
    return OperationStatus(
        key=token,
        verb=record.verb,
        topology=record.name,
        topology_id=record.topology_id,
        started_secs=record.started_secs,
        step=step,
        run_id=run_id,
        user=record.user,
    )


def _inactive_submissions(
    ctx: OperationsContext, topologies: Iterable[TopologyView]
) -> list[OperationStatus]:
    """The submissions whose topology is published, and not active yet."""
    operations: list[OperationStatus] = []
    for topology in topologies:
        base = topology.base
        # With a delay it is drained for its successor.
        status = (base.status, base.wanted_status, base.delay_secs)
        if status != ("INACTIVE", "ACTIVE", None):
            continue
        raw = ctx.cluster.state.get_data(paths.token(base.token)) if base.token else None
        if raw is None:
            continue
        try:
            record = decode_record(TokenRecord, raw, paths.token(base.token))
        except StormDagsterError:
            continue
        if record.topology_id == topology.id:
            staged = read_staging(ctx, base.token)
            run_id = "" if staged is None else staged.run
            operations.append(_token_status(base.token, record, "active_topology", run_id))
    return operations


def _change(
    request: str,
    record: OperationRecord,
    topology: TopologyView,
    run_of: Callable[[str], str | None],
) -> OperationStatus:
    """The status of a change of a running topology."""
    run_id = record.run_id or run_of(request) or ""
    return OperationStatus(
        key=request,
        verb=record.verb,
        topology=record.name,
        topology_id=record.topology_id,
        started_secs=record.started_secs,
        step=_step_of_change(record.verb, run_id, topology.base.status),
        run_id=run_id,
        user=record.user,
    )


def _step_of_change(verb: str, run_id: str, status: str) -> str:
    """The step of a change, by the status of its topology."""
    if not run_id:
        return "launch"
    row = VERBS.get(verb)
    if row is None:
        # Of a release that has other verbs.
        return "workers"
    return row.steps_by_status.get(status, row.step)
