"""Operations of a run that continue when the leader changes.

See ``docs/decisions.md#fenced-writes``. A run keeps the epoch that it began with, so that its
writes fail with ``Fenced`` once another nimbus leads. It then takes its operation over: one fenced
transaction of the new epoch notes the run in the record of the operation, by compare and set, and
checks that the state on which the operation is based was not changed. Of two runs the second ends
with ``Conflict``. After that the interrupted part is repeated in the new epoch.
"""

from collections.abc import Callable
from typing import TypeVar

from storm_dagster.blobstore.store import EpochStore
from storm_dagster.model import paths
from storm_dagster.model.errors import Conflict, Fenced, NotAlive
from storm_dagster.model.operation_record import TokenRecord
from storm_dagster.model.records import encode_record
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext, check_name_free
from storm_dagster.operations.steps import operation
from storm_dagster.operations.submit.open_tokens import read_staging
from storm_dagster.operations.submit.staging import (
    StagingRecord,
    read_client_token,
    refuse_cancelled,
    refuse_other_run,
    write_part,
)
from storm_dagster.operations.submit.targets import base_digest, check_target
from storm_dagster.operations.transactions import commit, retry_on_conflict

T = TypeVar("T")

CONTINUE_SUBMISSION = operation("continue_submission", "take_over", "stage.record")

MAX_CONTINUATIONS = 2
"""Changes of the leader over which a part of an operation continues; the next one ends it."""


def continue_under_leaders(
    ctx: OperationsContext, attempt: Callable[[], T], take_over: Callable[[int], None]
) -> T:
    """Run ``attempt``, and once more after each change of the leader.

    Before a repetition ``take_over`` takes the operation over. It gets the epoch of the new leader;
    its errors end the operation. :class:`Fenced` at the third change of the leader, and at the
    first one in the context of a leader, because a deposed leader does not act for its successor.
    """
    continuations = 0
    must_take_over = False
    while True:
        try:
            if must_take_over:
                take_over(_follow_leader(ctx))
                must_take_over = False
            return attempt()
        except Fenced as error:
            if ctx.epoch is not None or continuations == MAX_CONTINUATIONS:
                raise
            continuations += 1
            must_take_over = True
            ctx.log.warning("another nimbus leads, this continues under it: %s", error.message)


def _follow_leader(ctx: OperationsContext) -> int:
    """The current epoch, which the later writes of the blob store carry as well."""
    # The server of this session may be behind the one that ended the former epoch.
    ctx.cluster.state.sync_path(paths.EPOCH)
    epoch = ctx.current_epoch()
    if isinstance(ctx.blobs, EpochStore):
        ctx.blobs.follow_epoch(epoch)
    return epoch


def run_stage(ctx: OperationsContext, token: str, stage: Callable[[], T]) -> T:
    """Run one stage of a submission, or a whole update, also if the leader changes.

    Raises the errors of ``stage`` and of :func:`take_over_submission`.
    """

    def take_over(epoch: int) -> None:
        take_over_submission(ctx, token, epoch)

    return continue_under_leaders(ctx, stage, take_over)


def take_over_submission(ctx: OperationsContext, token: str, epoch: int) -> None:
    """Let this run continue the submission or update of the token in ``epoch``.

    One transaction checks what a new execution checks, and notes run and epoch in the record of the
    token: name, status, code and record of a replaced topology are those that were staged. The
    capacity is checked by the stage that publishes, which plans again. No effect if the first stage
    has not stored the record yet.

    :class:`AlreadyAlive` if another topology has the name by now. :class:`NotAlive` if the
    submission was cancelled, or the topology was killed. :class:`Conflict` if another run has taken
    the submission over, or the replaced topology was changed.
    """

    def attempt(view: ClusterView) -> StagingRecord | None:
        stored = read_client_token(ctx, token)
        if stored is None:
            return None
        record, version = stored
        refuse_cancelled(token, record)
        refuse_other_run(ctx, token, record)
        staged = read_staging(ctx, token)
        if record.epoch == epoch and record.run == ctx.run != "":
            return staged  # The reply of our own commit was lost.
        transaction = ctx.cluster.fenced(epoch)
        if record.published:
            _check_published(view, record)
        else:
            replaced_id = _check_unchanged(view, record, staged)
            # No other topology has got the name, and none was placed, since the view was loaded.
            transaction.check(paths.ASSIGNMENTS, view.assignments_version)
            if replaced_id is not None:
                base_version = view.topologies[replaced_id].base_at.version
                transaction.check(paths.topology(replaced_id), base_version)
        changes = {"epoch": epoch, "run": ctx.run, "ended": False}
        continued_record = record.model_copy(update=changes)
        transaction.set(paths.token(token), encode_record(continued_record), version)
        commit(ctx, transaction, "take_over")
        return staged

    staged = retry_on_conflict(ctx, f"continuing the submission of token {token}", attempt)
    if staged is not None:
        staged = staged.model_copy(update={"epoch": epoch, "run": ctx.run or staged.run})
        write_part(ctx, token, "record", staged)


def _check_published(view: ClusterView, record: TokenRecord) -> None:
    """Raise :class:`NotAlive` unless the topology that was published is alive."""
    topology = view.topologies.get(record.topology_id)
    if topology is None or topology.base.status == "KILLED":
        raise NotAlive(
            f"topology {record.name!r} ({record.topology_id}) was killed while its submission was "
            "under way: submit it again"
        )


def _check_unchanged(
    view: ClusterView, record: TokenRecord, staged: StagingRecord | None
) -> str | None:
    """Check that the submission may be published as it was staged.

    Returns the id of the topology that it replaces, or ``None``.
    """
    if staged is None:
        # The stage that did not end checks the rest.
        if record.verb == "submit":
            check_name_free(view, record.name, (record.topology_id,))
        return None
    check_target(view, staged)
    if staged.replaces is None:
        return None
    replaced = view.topologies[staged.replaces]
    if staged.base not in ("", base_digest(replaced.base)):
        raise Conflict(
            f"topology {record.name!r} was changed while its replacement was prepared, and the "
            "leader changed as well: update it again"
        )
    return replaced.id
