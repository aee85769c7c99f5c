"""Cancellation of submissions that are under way, by a kill.

See ``docs/decisions.md#cancelled-submissions``. One fenced transaction closes the record of the
token. The transaction that publishes sets the same record at its data version, so that a submission
is either cancelled and never published, or published and then killed as any topology.
"""

from storm_dagster.model import paths
from storm_dagster.model.errors import Fenced
from storm_dagster.model.operation_record import TokenRecord
from storm_dagster.model.records import encode_record
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.results import CancelledSubmission
from storm_dagster.operations.steps import operation
from storm_dagster.operations.submit.open_tokens import (
    OpenTokenReader,
    read_staging,
    stage_of_submission,
)
from storm_dagster.operations.submit.staging import read_client_token
from storm_dagster.operations.submit.sweeping import DELETE_BLOBS, delete_blobs
from storm_dagster.operations.transactions import commit, epoch_is_over, retry_on_conflict

CANCEL = operation("cancel_submission", "cancel", DELETE_BLOBS)


def cancel_submissions(ctx: OperationsContext, name: str) -> tuple[CancelledSubmission, ...]:
    """Cancel every submission under way of a topology, by its name or id, in one transaction.

    Empty if none is under way. A submission that is published at that time is not cancelled: the
    caller then finds its topology. The staged parts stay (:func:`drop_submission`).
    """
    epoch = ctx.current_epoch()
    # The submissions of the newest attempt, whose reply may be lost.
    attempted: list[CancelledSubmission] = []

    def attempt(view: ClusterView) -> tuple[CancelledSubmission, ...]:
        if attempted and all(_is_cancelled(ctx, submission.token) for submission in attempted):
            return tuple(attempted)
        attempted.clear()
        if name in view.topologies or view.topology_named(name) is not None:
            return ()
        transaction = ctx.cluster.fenced(epoch)
        for token, (record, version) in OpenTokenReader().stored_tokens(ctx.cluster.state).items():
            if not _is_submission_of(name, record):
                continue
            attempted.append(_describe(ctx, token, record))
            changes = {"published": True, "ended": True, "request": {}, "cancelled_by": "kill"}
            cancelled = record.model_copy(update=changes)
            transaction.set(paths.token(token), encode_record(cancelled), version)
        if attempted:
            commit(ctx, transaction, "cancel")
        for submission in attempted:
            ctx.log.info("cancelled the submission of %s", submission.topology_id)
        return tuple(attempted)

    return retry_on_conflict(ctx, f"cancelling {name}", attempt)


def is_being_submitted(ctx: OperationsContext, name: str) -> bool:
    """True if a submission of a topology, by its name or id, is under way."""
    records = OpenTokenReader().tokens(ctx.cluster.state).values()
    return any(_is_submission_of(name, record) for record in records)


def _is_submission_of(name: str, record: TokenRecord) -> bool:
    return record.verb == "submit" and name in (record.name, record.topology_id)


def _is_cancelled(ctx: OperationsContext, token: str) -> bool:
    """True if the record of the token says that its submission was cancelled."""
    stored = read_client_token(ctx, token)
    if stored is None:
        return False
    record, _ = stored
    return bool(record.cancelled_by)


def _describe(ctx: OperationsContext, token: str, record: TokenRecord) -> CancelledSubmission:
    """The submission of an open record, with its step, run and upload."""
    staged = read_staging(ctx, token)
    handle = str(record.request.get("handle") or "")
    run_id = ""
    if staged is not None:
        run_id = staged.run
        handle = handle or staged.handle or ""
    return CancelledSubmission(
        topology_id=record.topology_id,
        name=record.name,
        token=token,
        step=stage_of_submission(ctx, token, record),
        started_secs=record.started_secs,
        run_id=run_id,
        handle=handle,
    )


def drop_submission(ctx: OperationsContext, submission: CancelledSubmission) -> None:
    """Delete the staged parts and the code of a cancelled submission.

    Its run may still write some until it ends: the cleaner deletes those when the token expires.
    :class:`Fenced` if the epoch is over: the cleaner of the next leader then deletes all.
    """
    epoch = ctx.current_epoch()
    if epoch_is_over(ctx, epoch):
        raise Fenced(
            f"leadership epoch {epoch} is over, no blob was deleted: "
            "stop acting, ask the new leader"
        )
    delete_blobs(ctx, submission.topology_id, submission.name, submission.token)
