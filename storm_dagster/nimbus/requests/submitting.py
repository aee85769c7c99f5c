"""Submissions at the leader, which a token makes idempotent."""

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from storm_dagster.core.authorization import REQUEST_USER
from storm_dagster.model.dagster_names import SUBMIT_JOB, TOKEN_TAG
from storm_dagster.model.errors import (
    AlreadyAlive,
    InvalidRequest,
    Misconfigured,
    NotAlive,
    StormDagsterError,
    Unavailable,
)
from storm_dagster.model.names import check_topology_name
from storm_dagster.model.requests import SubmitRequest, check_request
from storm_dagster.nimbus.dagster.client import LOOKUP_SECS, FoundRun
from storm_dagster.nimbus.keyed_locks import KeyedLocks
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.launches import RecordWrite
from storm_dagster.nimbus.time_cache_map import TimeCacheMap
from storm_dagster.operations.context import OperationsContext, check_name_free
from storm_dagster.operations.submit.staging import (
    allocate_topology_id,
    check_client_token,
    discard_token,
    read_client_token,
    refuse_cancelled,
    release_token,
)

_log = logging.getLogger(__name__)

_REMEMBERED_SECS = 600.0
"""Time after its launch for which a submission is remembered by its name."""
_POLL_SECS = 0.5
"""Maximum age of the state of a run, so that few of a hundred callers with one name cause a lookup
in Dagster.
"""


@dataclass(frozen=True)
class _UnderWay:
    """The newest launch of a name."""

    token: str
    run_id: str
    seen_at: float
    """Time at which the run was last known to be under way, monotonic seconds."""


class Submissions:
    """Launch of submissions.

    Each token makes one run, however often and by however many callers it is used.
    """

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus
        self._names: TimeCacheMap[str, _UnderWay] = TimeCacheMap(
            _REMEMBERED_SECS, now=time.monotonic(), limit=10_000
        )
        """Name -> its newest launch: while that run continues, other tokens are refused."""
        nimbus.expiring.append(self._names)
        self._locks = KeyedLocks()
        """Locks of tokens, and of names as ``name <name>``."""

    def submit(
        self, document: Mapping[str, Any], *, is_promised: bool = False, is_new: bool = False
    ) -> dict[str, Any]:
        """Launch the run of a submission: ``{"run_id", "token"}``.

        A token that was used before returns its run or, if that failed, a new one. ``run_id`` is
        ``None`` if its topology runs already and the run is not found.

        ``is_promised``: the caller does not repeat the submission, so that a leader launches its
        run also after an :class:`Unavailable`. ``is_new``: no run of the token is looked up,
        because the token has a record and no run. :class:`AlreadyAlive` when a topology of the name
        exists under another token, or is being submitted. :class:`NotAlive` if the submission of
        the token was cancelled.
        """
        request = check_request(SubmitRequest, document, "a submission")
        epoch = self._nimbus.status.require()
        name = check_topology_name(request.name)
        token = check_client_token(request.token or uuid.uuid4().hex)
        with (
            self._nimbus.launches.hold(token),
            self._locks.hold(token),
            self._locks.hold(f"name {name}"),
        ):
            self._refuse_under_way(name, token)
            view = self._nimbus.cluster.load_view()
            topology = view.topology_named(name)
            own_ids: tuple[str, ...] = ()  # Topology of this token, which may have the name.
            if topology is not None and topology.base.token == token:
                own_ids = (topology.id,)
            is_published = bool(own_ids)
            check_name_free(view, name, own_ids, secs_until_removal=self._nimbus.secs_until_removal)
            try:
                run_id = None if is_new else self._earlier_run(token, name, epoch)
            except (Misconfigured, Unavailable):
                if not is_published:
                    raise
                run_id = None  # The topology runs: the id of its run is not worth an error.
            if run_id is None and not is_published:
                self._nimbus.uploads.require(request.handle)
                config = request.model_copy(update={"token": token}).model_dump(exclude={"name"})
                run_id = self._launch(name, token, config, epoch, is_promised)
        return {"run_id": run_id, "token": token}

    def _earlier_run(self, token: str, name: str, epoch: int) -> str | None:
        """Run of the token, unless it failed; ``None`` at the first use of the token."""
        stored = read_client_token(self._nimbus.operations(epoch), token, name)
        if stored is None:
            return None
        record, _ = stored
        refuse_cancelled(token, record)
        run = self._find_run(token)
        if run is None or run.failed:
            return None
        return run.run_id

    def _find_run(self, token: str) -> FoundRun | None:
        return self._nimbus.dagster.find_run(TOKEN_TAG, token, job=SUBMIT_JOB, patience=LOOKUP_SECS)

    def _refuse_under_way(self, name: str, token: str) -> None:
        """Raise :class:`AlreadyAlive` while another submission of the name is under way.

        Only one of them can publish its topology.
        """
        launch = self._names.get(name)
        if launch is None or launch.token == token:
            return
        if self._cancellation(launch.token) is not None:
            # Its run may still be there, and cannot publish.
            self._names.remove(name)
            return
        if time.monotonic() - launch.seen_at > _POLL_SECS:
            run = self._find_run(launch.token)
            if run is None or run.finished:
                self._names.remove(name)
                return
            self._names.put(name, replace(launch, seen_at=time.monotonic()))
        raise AlreadyAlive(
            f"topology {name!r} is being submitted already (run {launch.run_id}): "
            "wait until it has finished, or choose another name"
        )

    def _cancellation(self, token: str) -> NotAlive | None:
        """The error of a submission that was cancelled; ``None`` if it was not."""
        # Reads are not fenced: any epoch is right.
        stored = read_client_token(self._nimbus.operations(epoch=-1), token)
        if stored is None:
            return None
        record, _ = stored
        try:
            refuse_cancelled(token, record)
        except NotAlive as error:
            return error
        return None

    def run(self, run_id: str) -> dict[str, Any]:
        """Return the document of ``GET /v1/runs/{id}``.

        The error of the run of a submission that was cancelled says so, also if the run was ended
        from outside.
        """
        document = self._nimbus.dagster.run(run_id)
        if document["error"] is None:
            return document
        error: NotAlive | None = None
        try:
            token = self._nimbus.dagster.tags_of_run(run_id).get(TOKEN_TAG)
            if token is not None:
                error = self._cancellation(token)
        except StormDagsterError as problem:
            _log.info("the token of run %s is not looked up: %s", run_id, problem.message)
        if error is None:
            return document
        return {**document, "error": {"type": error.kind, "message": error.message}}

    def _launch(
        self, name: str, token: str, config: Mapping[str, Any], epoch: int, is_promised: bool
    ) -> str:
        """Write the token's record and launch the run; return the run's id.

        ``config`` has the fields of the request, without the name.
        """
        dagster = self._nimbus.dagster
        ops = {dagster.names.stage_op("topology_conf"): {"config": dict(config)}}
        tags = {"storm/topology": name, TOKEN_TAG: token}
        ctx = self._nimbus.operations(epoch)
        request = {"name": name, **config}
        with accepted(ctx, token, name, "submit", request, is_promised) as write_record:
            run_id = dagster.launch_once(
                SUBMIT_JOB,
                {"ops": ops},
                tags,
                identity=TOKEN_TAG,
                partition=name,
                before_launch=write_record,
            )
        self._nimbus.launches.note_run(token, run_id)
        self._names.put(name, _UnderWay(token, run_id, time.monotonic()))
        return run_id


@contextmanager
def accepted(
    ctx: OperationsContext,
    token: str,
    name: str,
    verb: Literal["submit", "update"],
    request: Mapping[str, Any],
    is_promised: bool = False,
) -> Iterator[Callable[[], None]]:
    """Yield the function that writes the record of the token.

    It must be called right before the launch of the run. The record holds the ``request``, so that
    a later leader can launch the run.

    The record stays if the run may exist: before an :class:`Unavailable` Dagster may have launched
    it. Unless the submission ``is_promised``, no leader launches it then: the error names the
    token, with which the caller repeats the request. If the launch was refused permanently, the
    record is deleted; one that an earlier attempt wrote stays, and no leader launches its run.
    """
    epoch = ctx.current_epoch()
    is_new = read_client_token(ctx, token, name) is None
    write = RecordWrite()

    def write_record() -> None:
        write.was_begun = True
        _, write.version = allocate_topology_id(
            ctx, token, name, epoch, verb, request=request, user=REQUEST_USER.get()
        )

    try:
        yield write_record
    except Unavailable as error:
        if write.was_begun and not is_promised:
            _release(ctx, token)
        raise with_token(error, token) from error
    except (InvalidRequest, Misconfigured):
        if is_new and write.version is not None:
            discard_token(ctx, token, write.version, epoch)
        elif write.version is not None and not is_promised:
            _release(ctx, token)
        raise


def _release(ctx: OperationsContext, token: str) -> None:
    """Store that no leader launches the run of the token; an error is only logged."""
    try:
        release_token(ctx, token, ended=False)
    except StormDagsterError as error:
        ctx.log.warning(
            "the run of token %s may be launched by a later leader: %s", token, error.message
        )


def with_token(error: Unavailable, token: str) -> Unavailable:
    """Error of a launch, with the token by which the request can be repeated safely."""
    return Unavailable(
        f"{error.message}; repeat the request with its token (--token {token}): it is done once"
    )
