"""Take-over of accepted operations by the leader: it launches runs that were never launched, and
ends records whose run has ended.

A leader writes the record of an operation before it launches the run. If it is lost between the
two, a later leader finds a record without a run. A run is launched once: one that failed is not
repeated, and its record ends.
"""

import json
import logging
import threading
from collections.abc import Mapping
from typing import Any

from storm_dagster.host.clock import boot_clock
from storm_dagster.model import paths
from storm_dagster.model.dagster_names import REQUEST_TAG, SUBMIT_JOB, TOKEN_TAG
from storm_dagster.model.errors import (
    Fenced,
    KeyNotFound,
    Misconfigured,
    StormDagsterError,
    Unavailable,
)
from storm_dagster.model.operation_record import OperationRecord, TokenRecord
from storm_dagster.model.verbs import VERBS
from storm_dagster.nimbus.dagster.client import LOOKUP_SECS, FoundRun
from storm_dagster.nimbus.member import Nimbus, repeat
from storm_dagster.nimbus.requests.lifecycle import LifecycleRequests
from storm_dagster.nimbus.requests.submitting import Submissions
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.change_records import end_change, read_changes
from storm_dagster.operations.read.under_way import OpenOperations, read_staging
from storm_dagster.operations.submit.staging import allocate_topology_id, release_token

_log = logging.getLogger(__name__)

_POLL_SECS = 2.0
_OWN_SECS = 5.0
"""Seconds between two lookups of a run. One that this leader launched a moment ago is not looked
up: most runs end within that time.
"""
_LATE_SECS = 60.0
"""Seconds for which the run of an abandoned record may still appear."""
_MAX_CHANGE_SECS = 600
"""A change of a running topology that was accepted longer ago, by this leader's wall clock, is not
launched any more: who asked for it does not expect it now.
"""
_FORMER_PREFIX, _FORMER_SUFFIX = "upload.", ".pending"


class TakeOver:
    """Upkeep of the records of operations, at the leader."""

    def __init__(
        self, nimbus: Nimbus, submissions: Submissions, lifecycle: LifecycleRequests
    ) -> None:
        self._nimbus = nimbus
        self._submissions = submissions
        self._lifecycle = lifecycle
        self._upload_secs = float(nimbus.conf["nimbus.inbox.jar.expiration.secs"])
        self._records = OpenOperations()
        self._epoch: int | None = None
        self._seen: dict[str, float] = {}
        """Key -> boot clock at which this leader first saw its record."""
        self._next: dict[str, float] = {}
        """Key -> boot clock of the next lookup of its run."""
        self._problems: dict[str, str] = {}
        """Key -> reason why its launch waits, as it was logged."""

    def run(self, ended: threading.Event) -> None:
        """Look after the records until ``ended``."""
        repeat(self.run_once, _POLL_SECS, ended, "accepted operations wait")

    def run_once(self) -> None:
        """One round; nothing while this nimbus does not lead."""
        epoch = self._nimbus.status.epoch
        if epoch != self._epoch:
            self._epoch = epoch
            self._seen, self._next = {}, {}
        if epoch is None:
            return
        ctx = self._nimbus.operations(epoch)
        self._adopt_former(ctx, epoch)
        state = ctx.cluster.state
        tokens = self._records.tokens(state)
        changes = read_changes(state)
        keys = tokens.keys() | changes.keys()
        self._seen = {key: at for key, at in self._seen.items() if key in keys}
        self._next = {key: at for key, at in self._next.items() if key in keys}
        self._problems = {key: text for key, text in self._problems.items() if key in keys}
        for token, record in tokens.items():
            if self._is_due(token, record.epoch, epoch) and not self._resolve(ctx, token, record):
                return  # Dagster is away: the others are looked up in later rounds.
        alive = {*(state.find_children(paths.TOPOLOGY) or ())} if changes else set[str]()
        for request, change in changes.items():
            if change.topology_id not in alive:
                end_change(ctx, request)
                continue
            is_due = self._is_due(request, change.epoch, epoch)
            if is_due and not self._resolve(ctx, request, change):
                return

    def _is_due(self, key: str, accepted_in: int, epoch: int) -> bool:
        """True when the run of the record is to be looked up now."""
        now = boot_clock()
        is_new = key not in self._seen
        self._seen.setdefault(key, now)
        if is_new and accepted_in == epoch:
            self._next[key] = now + _OWN_SECS
        if self._nimbus.launches.is_busy(key) or now < self._next.get(key, 0.0):
            return False
        self._next[key] = now + _OWN_SECS
        return True

    def _resolve(
        self, ctx: OperationsContext, key: str, record: TokenRecord | OperationRecord
    ) -> bool:
        """Launch the run that is missing, or end the record whose run has ended; false if Dagster
        does not respond.
        """
        try:
            run = self._find_run(ctx, key, record)
            if run is None:
                self._launch_missing(ctx, key, record)
            elif run.finished:
                self._end(ctx, key, record)
            else:
                self._nimbus.launches.note_run(key, run.run_id)
        except Fenced:
            raise
        except (Misconfigured, Unavailable) as error:
            self._log_waiting(key, record, error)
            return False
        except KeyNotFound as error:
            # A nimbus that is away may hold the upload.
            if boot_clock() - self._seen[key] < self._upload_secs:
                self._log_waiting(key, record, error)
            else:
                self._give_up(ctx, key, record, error)
        except StormDagsterError as error:
            self._give_up(ctx, key, record, error)
        return True

    def _give_up(
        self,
        ctx: OperationsContext,
        key: str,
        record: TokenRecord | OperationRecord,
        error: StormDagsterError,
    ) -> None:
        """End an operation whose run cannot be launched."""
        _log.error(
            "%s of %s, which was accepted, failed: %s", record.verb, record.name, error.message
        )
        self._end(ctx, key, record)
        self._drop_upload(record)

    def _find_run(
        self, ctx: OperationsContext, key: str, record: TokenRecord | OperationRecord
    ) -> FoundRun | None:
        """The run of the record; ``None`` when Dagster has none."""
        dagster = self._nimbus.dagster
        if record.verb == "submit":
            run = dagster.find_run(TOKEN_TAG, key, job=SUBMIT_JOB, patience=LOOKUP_SECS)
        else:
            job = VERBS[record.verb].job
            run = dagster.find_run(REQUEST_TAG, key, job=job, patience=LOOKUP_SECS)
        if run is not None or not isinstance(record, TokenRecord):
            return run
        # A run that a user launched in Dagster's UI has its token, and no tag of a request.
        staged = read_staging(ctx, key)
        if staged is None or not staged.run:
            return None
        try:
            document = dagster.run(staged.run)
        except KeyNotFound:
            return None
        return FoundRun(staged.run, str(document["status"]))

    def _launch_missing(
        self, ctx: OperationsContext, key: str, record: TokenRecord | OperationRecord
    ) -> None:
        if isinstance(record, TokenRecord):
            may_launch = bool(record.request)
        else:
            # One with a run was launched before: Dagster has deleted the run.
            age_secs = ctx.now_secs() - record.started_secs
            may_launch = (
                not record.is_abandoned and not record.run_id and age_secs <= _MAX_CHANGE_SECS
            )
        if not may_launch:
            if boot_clock() - self._seen[key] >= _LATE_SECS:
                self._end(ctx, key, record)
            return
        _log.info("%s of %s was accepted and has no run: launching it", record.verb, record.name)
        if isinstance(record, OperationRecord):
            run_id = self._lifecycle.relaunch(key, record)
        elif record.verb == "submit":
            run_id = self._submissions.submit(record.request, is_promised=True)["run_id"]
        else:
            run_id = self._lifecycle.relaunch_update(record)
        self._nimbus.launches.note_run(key, str(run_id))

    def _end(self, ctx: OperationsContext, key: str, record: TokenRecord | OperationRecord) -> None:
        """End the record. The token of a submission stays bound to its topology id."""
        if isinstance(record, TokenRecord):
            release_token(ctx, key, ended=True)
        else:
            end_change(ctx, key)

    def _drop_upload(self, record: TokenRecord | OperationRecord) -> None:
        """Remove the upload of an operation that was refused for good."""
        handle = record.request.get("handle")
        if not isinstance(handle, str):
            return
        try:
            self._nimbus.uploads.cancel(handle)
        except StormDagsterError as error:
            _log.info("upload %s expires later: %s", handle, error.message)

    def _log_waiting(
        self, key: str, record: TokenRecord | OperationRecord, error: StormDagsterError
    ) -> None:
        """Log why the operation waits, when that is a new reason."""
        if self._problems.get(key) != error.message:
            self._problems[key] = error.message
            _log.warning("%s of %s waits: %s", record.verb, record.name, error.message)

    def _adopt_former(self, ctx: OperationsContext, epoch: int) -> None:
        """Make records of submissions that a leader of the release before accepted by Thrift.

        It stored them as blobs ``upload.<handle>.pending``.
        """
        blobs = self._nimbus.blobs
        for key in blobs.keys(_FORMER_PREFIX):
            if not key.endswith(_FORMER_SUFFIX):
                continue
            try:
                document: Mapping[str, Any] = json.loads(blobs.read(key))
                name, token = str(document["name"]), str(document["token"])
                request = {
                    "name": name,
                    "token": token,
                    "handle": str(document["handle"]),
                    "inactive": bool(document["inactive"]),
                }
                allocate_topology_id(ctx, token, name, epoch, "submit", request=request)
            except KeyNotFound:
                continue
            except (ValueError, TypeError, KeyError) as error:
                _log.error("%s is not a pending submission and is dropped: %s", key, error)
            except StormDagsterError as error:
                _log.warning("the pending submission %s waits: %s", key, error.message)
                continue
            try:
                blobs.delete(key)
            except KeyNotFound:
                pass
