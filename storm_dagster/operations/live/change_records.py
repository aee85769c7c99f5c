"""Records of accepted changes of running topologies, ``/operations/<request>``.

Written by the leader before it launches the run that executes the change; deleted when the run has
ended, by that run or by the leader. An update has the record of its token instead
(:mod:`storm_dagster.operations.submit.staging`).
"""

from collections.abc import Mapping

from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Corrupt, StormDagsterError
from storm_dagster.model.operation_record import OperationRecord
from storm_dagster.model.records import decode_record, encode_record
from storm_dagster.operations.context import OperationsContext
from storm_dagster.zk.state_protocol import ClusterState, read_children


def read_changes(state: ClusterState) -> Mapping[str, OperationRecord]:
    """Request -> record of each accepted change; damaged records are left out."""
    records: dict[str, OperationRecord] = {}
    for request, (raw, _) in read_children(state, paths.OPERATIONS).items():
        try:
            records[request] = decode_record(OperationRecord, raw, paths.operation(request))
        except Corrupt:
            continue
    return records


def read_change(ctx: OperationsContext, request: str) -> tuple[OperationRecord, int] | None:
    """The record of an accepted change and its data version; ``None`` without one."""
    path = paths.operation(request)
    stored = ctx.cluster.state.get_data_with_version(path)
    if stored is None:
        return None
    return decode_record(OperationRecord, stored[0], path), stored[1].version


def write_change(ctx: OperationsContext, request: str, record: OperationRecord) -> None:
    """Create the record, or replace that of an earlier attempt of the same request.

    :class:`Conflict` when the request belongs to another topology.
    """
    path = paths.operation(request)
    raw = encode_record(record)
    known = read_change(ctx, request)
    transaction = ctx.cluster.fenced(record.epoch)
    if known is None:
        transaction.create(path, raw)
    elif known[0].name != record.name:
        raise Conflict(
            f"token {request!r} belongs to a change of topology {known[0].name!r}: change "
            f"{record.name!r} with a token of its own"
        )
    else:
        transaction.set(path, raw, known[1])
    transaction.commit()


def set_run(ctx: OperationsContext, request: str, run_id: str) -> None:
    """Note the run of the change, if its record is still there."""
    _update(ctx, request, {"run_id": run_id})


def release_change(ctx: OperationsContext, request: str) -> None:
    """Let no leader launch the run of the change from now on: its caller repeats the request."""
    _update(ctx, request, {"is_abandoned": True})


def _update(ctx: OperationsContext, request: str, changes: Mapping[str, object]) -> None:
    known = read_change(ctx, request)
    if known is None:
        return
    record, version = known
    transaction = ctx.cluster.fenced(ctx.current_epoch())
    raw = encode_record(record.model_copy(update=changes))
    try:
        transaction.set(paths.operation(request), raw, version).commit()
    except Conflict:
        ctx.log.info("the record of %s %s was changed at that time", record.verb, record.name)


def end_change(ctx: OperationsContext, request: str) -> None:
    """Delete the record of a change that has ended.

    One that is gone is no error, and one that cannot be deleted is left to the leader.
    """
    path = paths.operation(request)
    try:
        if ctx.cluster.state.exists(path):
            ctx.cluster.fenced(ctx.current_epoch()).delete(path).commit()
    except StormDagsterError as error:
        ctx.log.info("the record %s is deleted later: %s", path, error.message)
