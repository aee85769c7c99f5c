"""Records of accepted changes of running topologies, ``/operations/<request>``.

Written by the leader before it launches the run that executes the change; deleted when the run has
ended, by that run or by the leader. An update has the record of its token instead
(:mod:`storm_dagster.operations.submit.staging`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Corrupt, NotAlive, StormDagsterError
from storm_dagster.model.operation_record import OperationRecord
from storm_dagster.model.records import decode_record, encode_record
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.steps import operation
from storm_dagster.operations.transactions import commit, retry_on_conflict
from storm_dagster.zk.state_protocol import ClusterState, read_children

CONTINUE_CHANGE = operation("continue_change", "take_over_change")
_MAX_ATTEMPTS = 5
"""Attempts to write a record that other processes change at the same time."""


@dataclass(frozen=True)
class StoredChanges:
    """Snapshot of the records of accepted changes."""

    records: Mapping[str, OperationRecord]
    """Request -> record."""
    versions: Mapping[str, int]
    """Request -> data version of its node, damaged ones included."""
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Request -> reason why its record cannot be read."""


def load_changes(state: ClusterState) -> StoredChanges:
    """Read the records of all accepted changes."""
    records: dict[str, OperationRecord] = {}
    versions: dict[str, int] = {}
    damaged: dict[str, str] = {}
    for request, (raw, node) in read_children(state, paths.OPERATIONS).items():
        versions[request] = node.version
        try:
            records[request] = decode_record(OperationRecord, raw, paths.operation(request))
        except Corrupt as error:
            damaged[request] = error.message
    return StoredChanges(records, versions, damaged)


def read_changes(state: ClusterState) -> Mapping[str, OperationRecord]:
    """Request -> record of each accepted change; damaged records are left out."""
    return load_changes(state).records


def read_change(ctx: OperationsContext, request: str) -> tuple[OperationRecord, int] | None:
    """The record of an accepted change and its data version.

    ``None`` without one, :class:`Corrupt` if it is damaged.
    """
    path = paths.operation(request)
    stored = ctx.cluster.state.get_data_with_version(path)
    if stored is None:
        return None
    raw, node = stored
    return decode_record(OperationRecord, raw, path), node.version


def write_change(
    ctx: OperationsContext, request: str, record: OperationRecord, version: int | None = None
) -> int:
    """Create the record, or replace that of an earlier attempt of the same request.

    Returns its data version. With ``version``, the record must still have that data version.
    :class:`Conflict` if it has another one or is gone, or if the request belongs to another
    topology; :class:`Fenced` if the record's epoch is over.
    """
    path = paths.operation(request)
    raw = encode_record(record)
    stored = read_change(ctx, request)
    transaction = ctx.cluster.fenced(record.epoch)
    if stored is None:
        if version is not None:
            raise Conflict(f"the record {path} was deleted at that time: the change has ended")
        transaction.create(path, raw)
        transaction.commit()
        return 0
    former, stored_version = stored
    if former.name != record.name:
        raise Conflict(
            f"token {request!r} belongs to a change of topology {former.name!r}: change "
            f"{record.name!r} with a token of its own"
        )
    if version is None:
        version = stored_version
    transaction.set(path, raw, version)
    transaction.commit()
    return version + 1


def set_run(ctx: OperationsContext, request: str, run_id: str) -> None:
    """Note the run of the change, if its record still exists and names no run.

    A record that another process changes at the same time stays as that process writes it.
    """
    stored = read_change(ctx, request)
    if stored is None:
        return
    record, version = stored
    if not record.run_id:
        _update(ctx, request, record, version, {"run_id": run_id})


def claim_change(
    ctx: OperationsContext, request: str, run_id: str, *, is_recorded: bool = True
) -> None:
    """Claim the change for this run, before the run has any effect.

    Two leaders may have launched several runs of one request; only the first one executes it.
    :class:`Conflict` if another run has the record, or if the record was deleted. With
    ``is_recorded`` false, for a run that a leader of the release before launched, the record may be
    missing.
    """
    path = paths.operation(request)
    for _ in range(_MAX_ATTEMPTS):
        stored = read_change(ctx, request)
        if stored is None and not is_recorded:
            return
        if stored is None:
            raise Conflict(
                f"the record {path} of this change is gone, because another run executed it or it "
                "was ended: to execute it again, launch the run without its tag storm/request"
            )
        record, version = stored
        if record.run_id == run_id:
            return
        if record.run_id:
            raise Conflict(
                f"run {record.run_id} executes this change (record {path}): this run has "
                "no effect; to repeat the change, launch the run without its tag storm/request"
            )
        if _update(ctx, request, record, version, {"run_id": run_id}):
            return
    raise Conflict(f"the record {path} is changed all the time: execute this run again")


@dataclass(frozen=True)
class PlannedOn:
    """State of a topology on which a change was planned."""

    topology_id: str
    base_version: int | None
    """Data version of its record; ``None``: the change has begun and is stored there."""


def take_over_change(ctx: OperationsContext, request: str, planned: PlannedOn, epoch: int) -> None:
    """Let this run continue a change under the leader of ``epoch``.

    One transaction notes run and epoch in the record of the ``request``, and checks that the
    topology is as it was when the change was planned. Without a ``request`` the run was launched by
    hand and has no record. :class:`NotAlive` if the topology was killed, :class:`Conflict` if it
    was changed since, or if another run has the record.
    """

    def attempt(view: ClusterView) -> None:
        topology = view.topologies.get(planned.topology_id)
        if topology is None or topology.base.status == "KILLED":
            raise NotAlive(
                f"topology {planned.topology_id} was killed while a change of it was under way: "
                "submit it again"
            )
        version = topology.base_at.version
        if planned.base_version not in (None, version):
            raise Conflict(
                f"topology {topology.base.name!r} was changed while this change of it was planned, "
                "and the leader changed as well: repeat the change if it is still wanted"
            )
        transaction = ctx.cluster.fenced(epoch).check(paths.topology(topology.id), version)
        stored = read_change(ctx, request) if request else None
        if stored is not None:
            record, record_version = stored
            if record.run_id not in ("", ctx.run):
                raise Conflict(
                    f"run {record.run_id} executes this change (record {paths.operation(request)}) "
                    "since the leader changed: this run has no further effect"
                )
            continued_record = record.model_copy(update={"epoch": epoch, "run_id": ctx.run})
            encoded = encode_record(continued_record)
            transaction.set(paths.operation(request), encoded, record_version)
        commit(ctx, transaction, "take_over_change")

    retry_on_conflict(ctx, f"continuing the change of {planned.topology_id}", attempt)


def release_change(ctx: OperationsContext, request: str) -> None:
    """Prevent every leader from launching the run of the change.

    The error told the caller to repeat the request. No effect without a record, or if another
    process changes it at the same time.
    """
    stored = read_change(ctx, request)
    if stored is not None:
        record, version = stored
        _update(ctx, request, record, version, {"is_abandoned": True})


def _update(
    ctx: OperationsContext,
    request: str,
    record: OperationRecord,
    version: int,
    changes: Mapping[str, object],
) -> bool:
    """Change fields of the record; false if its data version is another one."""
    transaction = ctx.cluster.fenced(ctx.current_epoch())
    raw = encode_record(record.model_copy(update=changes))
    try:
        transaction.set(paths.operation(request), raw, version).commit()
    except Conflict:
        ctx.log.info("the record of %s %s was changed at that time", record.verb, record.name)
        return False
    return True


def end_change(ctx: OperationsContext, request: str, version: int = -1) -> None:
    """Delete the record of a change that has ended.

    With ``version``, it is deleted only if it has that data version; -1 is any. A missing record is
    not an error, and a record that cannot be deleted is left to the leader.
    """
    path = paths.operation(request)
    try:
        if ctx.cluster.state.exists(path):
            ctx.cluster.fenced(ctx.current_epoch()).delete(path, version).commit()
    except StormDagsterError as error:
        ctx.log.info("the record %s is deleted later: %s", path, error.message)


def end_change_of_run(ctx: OperationsContext, request: str, run_id: str) -> None:
    """Delete the record of the change that this run executed.

    One that names no run is deleted as well; the record of another run stays. A record that cannot
    be read or deleted is left to the leader.
    """
    try:
        stored = read_change(ctx, request)
    except StormDagsterError as error:
        ctx.log.info("the record of request %s is deleted later: %s", request, error.message)
        return
    if stored is None:
        return
    record, version = stored
    if record.run_id in ("", run_id):
        end_change(ctx, request, version)
