"""Upkeep of accepted operations by the leader.

The leader launches runs that were never launched, and ends records whose run has ended. A leader
writes the record of an operation before it launches the run. If the leader is lost between the two,
a later leader finds a record without a run. A run is launched once: a run that failed is not
repeated, and its record ends.
"""

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
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
from storm_dagster.model.records import HEALING
from storm_dagster.model.verbs import VERBS
from storm_dagster.nimbus.dagster.client import LOOKUP_SECS, FoundRun
from storm_dagster.nimbus.member import Nimbus, repeat
from storm_dagster.nimbus.requests.lifecycle import LifecycleRequests
from storm_dagster.nimbus.requests.submitting import Submissions
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.change_records import end_change, load_changes
from storm_dagster.operations.submit.open_tokens import (
    OpenTokenReader,
    read_staging,
)
from storm_dagster.operations.submit.staging import allocate_topology_id, release_token
from storm_dagster.operations.transactions import lost_race

_log = logging.getLogger(__name__)

_POLL_SECS = 2.0
"""Pause between two rounds of the upkeep."""
_OWN_SECS = 5.0
"""Seconds between two lookups of a run, and before the first lookup of a run that this leader
launched: most runs end within that time.
"""
_MAX_POLL_SECS = 60.0
"""Maximum pause between two lookups of a run that has not ended; each doubles the one before."""
_LATE_SECS = 60.0
"""Seconds in which a run may still appear after its launch was sent.

The launch was sent by a former leader, or by this one without a response.
"""
_MAX_CHANGE_SECS = 600
"""Maximum age of a change of a running topology that is launched, by this leader's wall clock.

The user does not expect an older change now.
"""
_FORMER_PREFIX = "upload."
_FORMER_SUFFIX = ".pending"
"""Begin and end of the keys of the blobs in which the release before stored accepted submissions.
"""


class AcceptedOperations:
    """Upkeep of the records of operations, at the leader."""

    def __init__(
        self, nimbus: Nimbus, submissions: Submissions, lifecycle: LifecycleRequests
    ) -> None:
        self._nimbus = nimbus
        self._submissions = submissions
        self._lifecycle = lifecycle
        self._upload_secs = float(nimbus.conf["nimbus.inbox.jar.expiration.secs"])
        """Seconds in which a nimbus that is away may return with an upload that is not here."""
        self._token_reader = OpenTokenReader()
        """Reader of the records of tokens; it spares reads of finished ones."""
        self._epoch: int | None = None
        """Epoch for which the maps of times below hold; a new leader starts with empty ones."""
        self._pauses: dict[str, float] = {}
        """Key -> seconds between the next two lookups of a run that has not ended."""
        self._seen: dict[str, float] = {}
        """Key -> boot clock at which this leader first saw its record."""
        self._next: dict[str, float] = {}
        """Key -> boot clock of the next lookup of its run."""
        self._problems: dict[str, str] = {}
        """Key of an operation, or of an earlier release's blob -> logged reason of its wait."""

    def run(self, ended: threading.Event) -> None:
        """Maintain the records until ``ended``."""
        repeat(self.run_once, _POLL_SECS, ended, "accepted operations wait")

    def run_once(self) -> None:
        """Maintain the records once; a nimbus that does not lead reads and changes none."""
        epoch = self._nimbus.status.epoch
        if epoch != self._epoch:
            self._epoch = epoch
            self._seen = {}
            self._next = {}
            self._pauses = {}
        if epoch is None:
            return
        ctx = self._nimbus.operations(epoch)
        former = self._adopt_former(ctx, epoch)
        operations = self._open_operations(ctx)
        # Operations of former leaders come first: their runs may be missing.
        operations.sort(key=lambda operation: operation.record.epoch == epoch)
        keys = {operation.key for operation in operations}
        self._seen = {key: at for key, at in self._seen.items() if key in keys}
        self._next = {key: at for key, at in self._next.items() if key in keys}
        self._pauses = {key: secs for key, secs in self._pauses.items() if key in keys}
        self._problems = {
            key: text for key, text in self._problems.items() if key in keys or key in former
        }
        for operation in operations:
            if self._begin_lookup(operation, epoch) and not self._resolve(ctx, operation):
                return  # Dagster cannot be asked: the others are looked up in later rounds.

    def _open_operations(self, ctx: OperationsContext) -> list["OpenOperation"]:
        """Operations that have not ended.

        Damaged records of changes are deleted, and so are those whose topology is gone.
        """
        state = ctx.cluster.state
        operations: list[OpenOperation] = []
        for token, (record, version) in self._token_reader.stored_tokens(state).items():
            operations.append(OpenOperation(token, record, version))
        changes = load_changes(state)
        for request, reason in changes.damaged.items():
            _log.error("the record of request %s is damaged and is deleted: %s", request, reason)
            end_change(ctx, request, changes.versions[request])
        newest: dict[str, int] = {}
        for change in changes.records.values():
            newest_secs = newest.get(change.topology_id, 0)
            newest[change.topology_id] = max(newest_secs, change.started_secs)
        live_ids: set[str] = set()
        if changes.records:
            live_ids.update(state.find_children(paths.TOPOLOGY) or ())
        for request, change in changes.records.items():
            version = changes.versions[request]
            if change.topology_id in live_ids:
                newest_secs = newest[change.topology_id]
                operations.append(OpenOperation(request, change, version, newest_secs))
            else:
                end_change(ctx, request, version)
        return operations

    def _begin_lookup(self, operation: "OpenOperation", epoch: int) -> bool:
        """Note the record, and return True if its run must be looked up now.

        The time of the following lookup is then set. A new record is noted as seen, and its first
        lookup is delayed if its run may still be on its way to Dagster. No record is due while a
        thread of this nimbus launches its run.
        """
        key = operation.key
        record = operation.record
        now = boot_clock()
        is_new = key not in self._seen
        self._seen.setdefault(key, now)
        if is_new and record.epoch == epoch:
            self._next[key] = now + _OWN_SECS
        elif is_new and isinstance(record, OperationRecord):
            # The launch that a former leader sent may still be on its way. A second run of a
            # submission completes the first; one of a restart is a second restart.
            self._next[key] = now + _LATE_SECS
        if self._nimbus.launches.is_busy(key) or now < self._next.get(key, 0.0):
            return False
        self._next[key] = now + self._pauses.get(key, _OWN_SECS)
        return True

    def _resolve(self, ctx: OperationsContext, operation: "OpenOperation") -> bool:
        """Launch a missing run, or end the record of a run that has ended.

        Return False if Dagster does not respond or is misconfigured: the other operations are then
        left to later rounds. :class:`Fenced` is raised if this nimbus no longer leads.
        """
        key = operation.key
        record = operation.record
        try:
            run, was_deleted = self._find_run(ctx, key, record)
            if run is None:
                # The run that is launched now is looked up at short intervals first.
                self._pauses.pop(key, None)
                self._launch_missing(ctx, operation, was_deleted)
            elif run.finished:
                self._end(ctx, operation)
            else:
                self._pauses[key] = min(2 * self._pauses.get(key, _OWN_SECS), _MAX_POLL_SECS)
                self._nimbus.launches.note_run(key, run.run_id)
        except Fenced:
            raise
        except (Misconfigured, Unavailable) as error:
            self._log_waiting(operation, error)
            return False
        except KeyNotFound as error:
            # A nimbus that is away may hold the upload, or its missing parts.
            if boot_clock() - self._seen[key] < self._upload_secs:
                self._log_waiting(operation, error)
            else:
                self._give_up(ctx, operation, error)
                self._drop_upload(record)
        except StormDagsterError as error:
            # Another process changed the record at that time: the next round reads it again.
            if not lost_race(error):
                self._give_up(ctx, operation, error)
        return True

    def _give_up(
        self, ctx: OperationsContext, operation: "OpenOperation", error: StormDagsterError
    ) -> None:
        """End an operation whose run cannot be launched. The cleaner deletes its upload."""
        record = operation.record
        _log.error(
            "%s of %s, which was accepted, failed: %s", record.verb, record.name, error.message
        )
        self._end(ctx, operation)

    def _find_run(
        self, ctx: OperationsContext, key: str, record: TokenRecord | OperationRecord
    ) -> tuple[FoundRun | None, bool]:
        """Run of the record, and True if the record had a run that was deleted.

        The run is ``None`` if Dagster has none.
        """
        dagster = self._nimbus.dagster
        if isinstance(record, OperationRecord) and record.run_id:
            run_id = record.run_id
        else:
            if record.verb == "submit":
                run = dagster.find_run(TOKEN_TAG, key, job=SUBMIT_JOB, patience=LOOKUP_SECS)
            else:
                job = VERBS[record.verb].job
                run = dagster.find_run(REQUEST_TAG, key, job=job, patience=LOOKUP_SECS)
            if run is not None or isinstance(record, OperationRecord):
                return run, False
            # A run that a user launched in Dagster's UI has its token, and no tag of a request.
            staged = read_staging(ctx, key)
            if staged is None or not staged.run:
                return None, False
            run_id = staged.run
        try:
            document = dagster.run(run_id)
        except KeyNotFound:
            return None, True
        return FoundRun(run_id, str(document["status"])), False

    def _launch_missing(
        self, ctx: OperationsContext, operation: "OpenOperation", was_deleted: bool
    ) -> None:
        """Launch the run of a record that has none, or end the record.

        No run is launched if it ``was_deleted``, if the caller was told to repeat the request, or
        if the change is too old: the record then ends when it has been seen for
        :data:`_LATE_SECS`, because a run that was sent may still appear. It ends at once if a
        later change supersedes it.
        """
        key = operation.key
        record = operation.record
        if was_deleted:
            may_launch = False
        elif isinstance(record, TokenRecord):
            # It has no request if the caller repeats it, or if a run wrote the record.
            may_launch = bool(record.request)
        else:
            age_secs = ctx.now_secs() - record.started_secs
            may_launch = not record.is_abandoned and age_secs <= _MAX_CHANGE_SECS
        if not may_launch:
            if boot_clock() - self._seen[key] >= _LATE_SECS:
                self._end(ctx, operation)
            return
        if isinstance(record, OperationRecord) and _is_superseded(ctx, operation, record):
            _log.warning(
                "%s of %s was accepted and has no run; it is not launched, because a later change "
                "of the topology would be undone",
                record.verb,
                record.name,
            )
            self._end(ctx, operation)
            return
        _log.info("%s of %s was accepted and has no run: launching it", record.verb, record.name)
        if isinstance(record, OperationRecord):
            # This stays if the launch raises: without a response the run may still appear.
            self._next[key] = boot_clock() + _LATE_SECS
            run_id = self._lifecycle.launch_missing_change(key, record, operation.version)
            self._next[key] = boot_clock() + _OWN_SECS
        elif record.verb == "submit":
            run_id = self._submissions.submit(record.request, is_promised=True)["run_id"]
        else:
            run_id = self._lifecycle.launch_missing_update(record)
        self._nimbus.launches.note_run(key, str(run_id))

    def _end(self, ctx: OperationsContext, operation: "OpenOperation") -> None:
        """End the record, if no process has changed it since it was read.

        Otherwise the next round handles the changed record. The record of a submission or update
        stays, marked as ended, so that its token keeps its topology id; that of another change is
        deleted.
        """
        if isinstance(operation.record, TokenRecord):
            release_token(ctx, operation.key, ended=True, version=operation.version)
        else:
            end_change(ctx, operation.key, operation.version)

    def _drop_upload(self, record: TokenRecord | OperationRecord) -> None:
        """Remove the upload of an operation that was refused permanently."""
        handle = record.request.get("handle")
        if not isinstance(handle, str):
            return
        try:
            self._nimbus.uploads.cancel(handle)
        except StormDagsterError as error:
            _log.info("upload %s expires later: %s", handle, error.message)

    def _log_waiting(self, operation: "OpenOperation", error: StormDagsterError) -> None:
        """Log the reason why the operation waits, unless it was the last one logged."""
        record = operation.record
        if self._is_new_problem(operation.key, error.message):
            _log.warning("%s of %s waits: %s", record.verb, record.name, error.message)

    def _is_new_problem(self, key: str, text: str) -> bool:
        """True if the text is not the last one that was logged for the key."""
        if self._problems.get(key) == text:
            return False
        self._problems[key] = text
        return True

    def _adopt_former(self, ctx: OperationsContext, epoch: int) -> set[str]:
        """Make records of submissions that a leader of the release before accepted.

        That leader accepted them by Thrift and stored them as blobs ``upload.<handle>.pending``.
        Each is deleted once its record is stored, or if it is damaged. Return the keys of all that
        were found.
        """
        blobs = self._nimbus.blobs
        former = {key for key in blobs.keys(_FORMER_PREFIX) if key.endswith(_FORMER_SUFFIX)}
        for key in sorted(former):
            try:
                document: Mapping[str, Any] = json.loads(blobs.read(key))
                name = str(document["name"])
                token = str(document["token"])
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
                if self._is_new_problem(key, error.message):
                    _log.warning("the pending submission %s waits: %s", key, error.message)
                continue
            try:
                blobs.delete(key)
            except KeyNotFound:
                pass
        return former


@dataclass(frozen=True)
class OpenOperation:
    """Operation that has not ended, with its record and its version."""

    key: str
    """Token or request."""
    record: TokenRecord | OperationRecord
    version: int
    """Data version of the record."""
    newest_secs: int = 0
    """Time at which the topology's newest change was accepted, epoch seconds; 0 for a token."""


def _is_superseded(
    ctx: OperationsContext, operation: OpenOperation, record: OperationRecord
) -> bool:
    """True if a later change of the topology was accepted, or made.

    A healing does not count: it restores the placement that the change begins with.
    """
    if operation.newest_secs > record.started_secs:
        return True
    assignment = ctx.cluster.assignment_info(record.topology_id)
    if assignment is None:
        return False
    later = [change for change in assignment.history if change.at_secs > record.started_secs]
    return any(change.action != HEALING for change in later)
