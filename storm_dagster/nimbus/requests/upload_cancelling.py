"""Cancellation of an upload, with all that failed runs have staged of it."""

import logging

from storm_dagster.model.dagster_names import REQUEST_TAG, SUBMIT_JOB, TOKEN_TAG
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.operation_record import TokenRecord
from storm_dagster.model.verbs import VERBS
from storm_dagster.nimbus.dagster.client import LOOKUP_SECS
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.operations.submit.open_tokens import read_staging
from storm_dagster.operations.submit.staging import read_client_token, token_of_staging_key
from storm_dagster.operations.submit.sweeping import delete_blobs

_log = logging.getLogger(__name__)


def cancel_upload(nimbus: Nimbus, handle: str) -> None:
    """Drop an upload with its parts, and all that a failed run has staged of it.

    Parts that a run under way has staged stay, and so does a published topology. Parts that cannot
    be deleted now are left to the cleaner. Raises the errors of ``Uploads.cancel``.
    """
    epoch = nimbus.status.require()
    nimbus.uploads.cancel(handle)
    try:
        _drop_staged(nimbus, handle, epoch)
    except StormDagsterError as error:
        _log.info("the staged parts of upload %s are deleted later: %s", handle, error.message)


def _drop_staged(nimbus: Nimbus, handle: str, epoch: int) -> None:
    """Delete the staged parts and the code of each failed submission of the upload."""
    ctx = nimbus.operations(epoch)
    for key in ctx.blobs.keys("staging."):
        token = token_of_staging_key(key)
        if token is None or not key.endswith(".record"):
            continue
        staged = read_staging(ctx, token)
        if staged is None or staged.handle != handle:
            continue
        stored = read_client_token(ctx, token)
        if stored is None:
            continue  # It has expired: the cleaner deletes the rest.
        record, _ = stored
        if not record.published and _has_failed(nimbus, token, record):
            delete_blobs(ctx, record.topology_id, record.name, token)
            _log.info(
                "dropped the staged parts of the failed %s of %s", record.verb, record.topology_id
            )


def _has_failed(nimbus: Nimbus, token: str, record: TokenRecord) -> bool:
    """True if the run of the token has ended without a published topology."""
    if record.verb == "submit":
        tag = TOKEN_TAG
        job = SUBMIT_JOB
    else:
        tag = REQUEST_TAG
        job = VERBS[record.verb].job
    run = nimbus.dagster.find_run(tag, token, job=job, patience=LOOKUP_SECS)
    return run is not None and run.failed
