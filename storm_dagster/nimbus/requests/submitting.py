"""A submission at the leader: checked, made idempotent by its token, and launched as a Dagster
run.
"""

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
    StormDagsterError,
    Unavailable,
)
from storm_dagster.model.names import check_topology_name
from storm_dagster.model.requests import SubmitRequest, check_request
from storm_dagster.nimbus.dagster.client import LOOKUP_SECS, FoundRun
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.launches import KeyedLocks
from storm_dagster.nimbus.time_cache_map import TimeCacheMap
from storm_dagster.operations.context import OperationsContext, check_name_free
from storm_dagster.operations.submit.staging import (
    allocate_topology_id,
    check_token,
    discard_token,
    read_token,
    release_token,
)

_REMEMBERED_SECS = 600.0
_POLL_SECS = 0.5
"""So old may the knowledge be that a run goes on: of a hundred callers with one name few ask
Dagster.
"""


@dataclass(frozen=True)
class _UnderWay:
    """The newest launch of a name."""

    token: str
    run_id: str
    seen: float
    """When the run was last known to go on, monotonic seconds."""


class Submissions:
    """Launches submissions. The same token, however often and from however many callers, makes one
    run.
    """

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus
        self._names: TimeCacheMap[str, _UnderWay] = TimeCacheMap(
            _REMEMBERED_SECS, now=time.monotonic(), limit=10_000
        )
        nimbus.expiring.append(self._names)
        self._locks = KeyedLocks()

    def submit(
        self, document: Mapping[str, Any], *, is_promised: bool = False, is_new: bool = False
    ) -> dict[str, Any]:
        """Launch the run of a submission: ``{"run_id", "token"}``.

        A token that was used before answers with its run (or, when that failed, with a new one).
        The leader that finds its record without a run launches it, also after an
        :class:`Unavailable` if the submission ``is_promised``: its caller does not repeat it. The
        token of one that ``is_new`` has a record and no run.
        :class:`AlreadyAlive` when a topology of the name exists under another token, or is being
        submitted.
        """
        asked = check_request(SubmitRequest, document, "a submission")
        epoch = self._nimbus.status.require()
        name = check_topology_name(asked.name)
        token = check_token(asked.token or uuid.uuid4().hex)
        with (
            self._nimbus.launches.hold(token),
            self._locks.hold(token),
            self._locks.hold(f"name {name}"),
        ):
            self._refuse_under_way(name, token)
            view = self._nimbus.cluster.load_view()
            alive = view.topology_named(name)
            is_made = alive is not None and alive.base.token == token
            check_name_free(view, name, (alive.id,) if alive is not None and is_made else ())
            try:
                run_id = None if is_new else self._earlier_run(token, name, epoch)
            except (Misconfigured, Unavailable):
                if not is_made:
                    raise
                run_id = None  # its topology runs: which run made it is not worth an error
            if run_id is None and not is_made:
                self._nimbus.uploads.require(asked.handle)
                config = asked.model_copy(update={"token": token}).model_dump(exclude={"name"})
                run_id = self._launch(name, token, config, epoch, is_promised)
        return {"run_id": run_id, "token": token}

    def _earlier_run(self, token: str, name: str, epoch: int) -> str | None:
        """The run that the token had, unless it failed; ``None`` at the token's first use."""
        if read_token(self._nimbus.operations(epoch), token, name) is None:
            return None
        run = self._find_run(token)
        if run is None or run.failed:
            return None
        return run.run_id

    def _find_run(self, token: str) -> FoundRun | None:
        return self._nimbus.dagster.find_run(TOKEN_TAG, token, job=SUBMIT_JOB, patience=LOOKUP_SECS)

    def _refuse_under_way(self, name: str, token: str) -> None:
        """:class:`AlreadyAlive` while the run of another submission of the name goes on: only one
        can win.
        """
        other = self._names.get(name)
        if other is None or other.token == token:
            return
        if time.monotonic() - other.seen > _POLL_SECS:
            run = self._find_run(other.token)
            if run is None or run.finished:
                self._names.remove(name)
                return
            self._names.put(name, replace(other, seen=time.monotonic()))
        raise AlreadyAlive(
            f"topology {name!r} is being submitted already (run {other.run_id}): wait until it has finished, or choose "
            "another name"
        )

    def _launch(
        self, name: str, token: str, config: Mapping[str, Any], epoch: int, is_promised: bool
    ) -> str:
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
    """Yield the function that writes the record of the token, to be called right before the launch
    of its run. The record holds the ``request``, so that a later leader can launch the run.

    The record stays if the run may exist: of an :class:`Unavailable` Dagster may have launched it
    before. Unless the submission ``is_promised``, no leader launches it then: the error names the
    token, with which the caller repeats the request. If the launch was refused for good, the
    record goes; one that an earlier attempt wrote stays, and no leader launches its run.
    """
    epoch = ctx.current_epoch()
    is_new = read_token(ctx, token, name) is None
    attempts: list[bool] = []
    versions: list[int] = []

    def write_record() -> None:
        # Before: a reply that is lost leaves the record.
        attempts.append(True)
        _, version = allocate_topology_id(
            ctx, token, name, epoch, verb, request=request, user=REQUEST_USER.get()
        )
        versions.append(version)

    try:
        yield write_record
    except Unavailable as error:
        if attempts and not is_promised:
            _release(ctx, token)
        raise with_token(error, token) from error
    except (InvalidRequest, Misconfigured):
        if is_new and versions:
            discard_token(ctx, token, versions[-1], epoch)
        elif versions and not is_promised:
            _release(ctx, token)
        raise


def _release(ctx: OperationsContext, token: str) -> None:
    """Let no leader launch the token's run, as far as that can be stored."""
    try:
        release_token(ctx, token, ended=False)
    except StormDagsterError as error:
        ctx.log.warning(
            "the run of token %s may be launched by a later leader: %s", token, error.message
        )


def with_token(error: Unavailable, token: str) -> Unavailable:
    """The error of a launch, with the token under which the request can be repeated safely."""
    return Unavailable(
        f"{error.message}; repeat the request with its token (--token {token}): it is done once"
    )
