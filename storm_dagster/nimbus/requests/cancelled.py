"""Submissions that a kill has cancelled: rows of the response, and the end of their runs."""

import logging
import time
from collections.abc import Iterable

from storm_dagster.host.futures import in_thread
from storm_dagster.model.dagster_names import SUBMIT_JOB, TOKEN_TAG
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.operation_text import operation_text
from storm_dagster.nimbus.dagster.client import LOOKUP_SECS
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.operations.live.cancelling import drop_submission
from storm_dagster.operations.results import CancelledSubmission

_log = logging.getLogger(__name__)

CANCELLED = "CANCELLED"
"""Status in the response to a kill that cancelled a submission."""
_END_SECS = 30.0
"""Time in which the run of a cancelled submission is looked up and ended: its launch may be under
way. A run that appears later ends at its next stage, which finds the cancellation.
"""
_POLL_SECS = 1.0
"""Pause between two lookups of that run."""


def describe_cancelled(submissions: Iterable[CancelledSubmission]) -> str:
    """The cancelled submissions for people.

    For example "wc-1-1700000000, which was submitting (places tasks) for 3 s".
    """
    now_secs = int(time.time())
    texts: list[str] = []
    for submission in submissions:
        row: dict[str, object] = {"verb": "submit", "step": submission.step}
        if submission.started_secs:
            row["age_secs"] = max(0, now_secs - submission.started_secs)
        texts.append(f"{submission.topology_id}, which was {operation_text(row)}")
    return "; ".join(texts)


def end_cancelled(nimbus: Nimbus, submissions: Iterable[CancelledSubmission], epoch: int) -> None:
    """End the runs of cancelled submissions and delete their parts, in the background.

    Both are best effort: a run that is not ended fails at its next stage, and the cleaner deletes
    parts that stay.
    """
    for submission in submissions:

        def end(submission: CancelledSubmission = submission) -> None:
            _end_run(nimbus, submission)
            _drop_parts(nimbus, submission, epoch)

        in_thread("nimbus-cancel", end)


def _end_run(nimbus: Nimbus, submission: CancelledSubmission) -> None:
    """End the run of the submission, and wait until it has ended; errors are only logged."""
    deadline = time.monotonic() + _END_SECS
    dagster = nimbus.dagster
    terminated = ""
    while time.monotonic() < deadline:
        try:
            run = dagster.find_run(
                TOKEN_TAG, submission.token, job=SUBMIT_JOB, patience=LOOKUP_SECS
            )
            if run is not None and run.finished:
                return
            if run is not None and run.run_id != terminated:
                dagster.terminate(run.run_id)
                terminated = run.run_id
        except StormDagsterError as error:
            _log.info(
                "the run of %s, which was cancelled, is not ended: %s",
                submission.topology_id,
                error.message,
            )
        else:
            if run is None and not nimbus.launches.is_busy(submission.token):
                return  # It has no run, and none is being launched here.
        time.sleep(_POLL_SECS)


def _drop_parts(nimbus: Nimbus, submission: CancelledSubmission, epoch: int) -> None:
    """Delete the staged parts, the code and the upload; errors are only logged."""
    try:
        drop_submission(nimbus.operations(epoch), submission)
        if submission.handle:
            nimbus.uploads.cancel(submission.handle)
    except StormDagsterError as error:
        _log.info("parts of %s are deleted later: %s", submission.topology_id, error.message)
