"""State of a submission between its stages.

It is the token's node, and the blobs ``staging.<token>.<part>``. Every stage reads its input from
here, so that each of them can be repeated, alone, in another process.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from storm_dagster.blobstore.store import put_by_hash
from storm_dagster.model import paths
from storm_dagster.model.errors import (
    Conflict,
    Corrupt,
    InvalidRequest,
    KeyNotFound,
    NotAlive,
    StormDagsterError,
)
from storm_dagster.model.names import make_topology_id
from storm_dagster.model.operation_record import TokenRecord
from storm_dagster.model.placement import PlacementResult, TopologyPlacement
from storm_dagster.model.records import (
    Record,
    TaskTable,
    decode_record,
    encode_record,
)
from storm_dagster.model.topology import TopologySpec, decode_topology
from storm_dagster.operations.context import OperationsContext, decode_json, encode_json
from storm_dagster.operations.steps import step
from storm_dagster.operations.transactions import ReplyLost, commit, lost_race

Part = Literal["record", "conf", "topology", "tasks", "placement"]
"""Part of a staged submission, each in a blob of its own."""
PARTS: tuple[Part, ...] = ("record", "conf", "topology", "tasks", "placement")
"""All parts."""

_FIRST_STAGE = "storm/topology_conf"
_STAGE_OF_PART = {"tasks": "storm/task_info", "placement": "storm/assignment"}
"""Asset that stages a part; the first stage stages the others."""
_TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,235}")
"""Form of a client token, and of an upload handle."""
_ID_ATTEMPTS = 50
"""Attempts to count a new topology while other processes count theirs."""


class StagingRecord(Record):
    """Head of a staged submission; ``epoch`` is read once, when the conf is staged."""

    topology_id: str
    name: str
    epoch: int
    """Leadership epoch in which the submission must be published."""
    handle: str | None = None
    """Upload that was staged; ``None`` without one."""
    archive: str
    """Blob key from which the archive is taken."""
    wanted_status: Literal["ACTIVE", "INACTIVE"] = "ACTIVE"
    allow_degraded: bool = False
    replaces: str | None = None
    """Id of the topology of the same name that the publication replaces."""
    former: str = ""
    """Code of the replaced topology whose conf was read; empty: not checked."""
    base: str = ""
    """Digest of the replaced topology's record; empty: the release before staged it, or none."""
    run: str = ""
    """Id of the Dagster run that staged it."""
    submitted_keys: tuple[str, ...] | None = None
    """Conf keys of the submission.

    ``None``: the release before staged it, and its conf names them.
    """
    named: tuple[str, ...] = ()
    """Sizes that the call names, which an update does not keep from a rebalance."""


class StagedTasks(Record):
    """Task ids and parallelism of a staged submission."""

    table: TaskTable
    executors: dict[str, int]
    """Component -> number of executors, system components included."""
    workers: int
    owner: str = ""
    """User who owns the topology; empty without one."""
    isolation: tuple[str, ...] = ()
    """Hosts that the topology is isolated on."""


class StagedPlacement(Record):
    """A computed placement, and the assignments version of its view.

    The published assignment has its workers.
    """

    assignments_version: int
    """Version of ``/assignments`` in the view; with another one it may not fit."""
    result: PlacementResult


def check_client_token(token: object) -> str:
    """Check a client token: 1 to 236 letters, digits, ``-``, ``_`` and ``.``.

    :class:`InvalidRequest` for any other value.
    """
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise InvalidRequest(
            f"token {token!r:.80} may hold 1 to 236 letters, digits, '-', '_' and '.', "
            "and begins with a letter or digit"
        )
    return token


def staging_key(token: str, part: str) -> str:
    """Blob key of one part of a staged submission."""
    return f"staging.{check_client_token(token)}.{part}"


def token_of_staging_key(key: str) -> str | None:
    """The token inside a staging key, or ``None`` for another key."""
    if not key.startswith("staging."):
        return None
    token, dot, part = key[len("staging.") :].rpartition(".")
    return token if dot and part and token else None


def newest_token_key(name: str) -> str:
    """Blob that holds the token of the newest staging of a topology name."""
    return f"staging-of.{name}"


def upload_key(handle: str, part: str) -> str:
    """Blob key of one uploaded part.

    ``archive``, ``conf`` or ``topology``, and what nimbus notes: ``source`` and ``submitter``.
    :class:`InvalidRequest` for a handle that cannot be one.
    """
    if not _TOKEN.fullmatch(handle):
        raise InvalidRequest(
            f"upload handle {handle!r:.80} is not one that nimbus gave out: upload again"
        )
    return f"upload.{handle}.{part}"


def read_client_token(
    ctx: OperationsContext, token: str, name: str | None = None
) -> tuple[TokenRecord, int] | None:
    """The record of a token and its data version, or ``None`` at its first use.

    :class:`Conflict` when it belongs to a topology of another ``name``.
    """
    path = paths.token(check_client_token(token))
    stored = ctx.cluster.state.get_data_with_version(path)
    if stored is None:
        return None
    raw, node = stored
    record = decode_record(TokenRecord, raw, path)
    if name not in (None, record.name):
        raise Conflict(
            f"token {token!r} belongs to topology {record.name!r}: "
            f"submit {name!r} with a token of its own"
        )
    return record, node.version


def refuse_cancelled(token: str, record: TokenRecord) -> None:
    """Raise :class:`NotAlive` if the submission of the record was cancelled."""
    if record.cancelled_by:
        raise NotAlive(
            f"the submission of {record.topology_id} was cancelled by {record.cancelled_by}: "
            f"submit topology {record.name!r} again, with a token other than {token!r}"
        )


def refuse_other_run(ctx: OperationsContext, token: str, record: TokenRecord) -> None:
    """Raise :class:`Conflict` if another run has taken the submission of the record over."""
    if record.run and record.run != ctx.run:
        raise Conflict(
            f"run {record.run} continues the submission of {record.topology_id}, which it took "
            f"over when the leader changed: wait for it, or repeat the request with its token "
            f"(--token {token})"
        )


def counter_version(ctx: OperationsContext) -> int:
    """Version of the node that counts topologies and versions of code."""
    version = ctx.cluster.state.get_version(paths.COUNTER)
    if version is None:
        raise Corrupt(
            f"{paths.COUNTER} does not exist below the root: the cluster's state is incomplete"
        )
    return version


def allocate_topology_id(
    ctx: OperationsContext,
    token: str,
    name: str,
    epoch: int,
    verb: Literal["submit", "update"] = "submit",
    *,
    request: Mapping[str, Any] | None = None,
    user: str = "",
) -> tuple[TokenRecord, int]:
    """The token's record, and its data version.

    The record binds the token to a topology id. At its first use one transaction increments the
    counter and binds the token to a new id. A repetition after any crash, also after a lost reply,
    gets the same id.

    A leader gives the ``request``, its fields, and the ``user`` who made it: it accepts the request
    in ``epoch``, and launches the run afterwards. A record that has ended, or that no leader
    launches, then restarts; :class:`Fenced` for a deposed leader, also if the record needs no
    write. A run gives no ``request``: a record that has ended is then reopened. :class:`Conflict`
    if the token belongs to a topology of another name, :class:`NotAlive` if its submission was
    cancelled.
    """
    last_error: Exception | None = None
    for _ in range(_ID_ATTEMPTS):
        stored = read_client_token(ctx, token, name)
        if stored is not None:
            record, _ = stored
            refuse_cancelled(token, record)
            if request is None:
                return _reopen(ctx, token, stored, epoch)
            return _accept_again(ctx, token, stored, epoch, request, user)
        version = counter_version(ctx)
        now = ctx.now_secs()
        record = TokenRecord(
            topology_id=make_topology_id(name, version + 1, now),
            name=name,
            epoch=epoch,
            verb=verb,
            started_secs=now,
            request=dict(request or {}),
            user=user,
        )
        transaction = (
            ctx.cluster.fenced(epoch)
            .set(paths.COUNTER, b"", version)
            .create(paths.token(token), encode_record(record))
        )
        try:
            commit(ctx, transaction, "token")
        except (ReplyLost, Conflict) as error:
            if isinstance(error, Conflict) and not lost_race(error):
                raise
            # The next read shows if the token has a record now.
            last_error = error
        ctx.sleep(0.02 * ctx.jitter())
    assert last_error is not None
    raise last_error


def _accept_again(
    ctx: OperationsContext,
    token: str,
    stored: tuple[TokenRecord, int],
    epoch: int,
    request: Mapping[str, Any],
    user: str,
) -> tuple[TokenRecord, int]:
    """The record for a repetition with its token, and its data version.

    It is the stored record if a run changed that at the same time. Every branch commits a
    transaction of the epoch, so that a deposed leader gets :class:`Fenced`.
    """
    record, version = stored
    if record.published or (record.request and record.epoch == epoch):
        ctx.cluster.fenced(epoch).commit()
        return stored
    if record.request:
        # A former leader accepted it, and its run may exist: only the epoch changes.
        changes: dict[str, Any] = {"epoch": epoch}
    else:
        # The record has ended, or no leader launches its run: this request starts it from the
        # beginning.
        changes = {
            "epoch": epoch,
            "started_secs": ctx.now_secs(),
            "request": dict(request),
            "user": user,
            "ended": False,
        }
    accepted = record.model_copy(update=changes)
    if not _set_token(ctx, token, accepted, version, epoch):
        return stored
    return accepted, version + 1


def _reopen(
    ctx: OperationsContext, token: str, stored: tuple[TokenRecord, int], epoch: int
) -> tuple[TokenRecord, int]:
    """Mark a submission whose run continues as not ended; the record and version.

    A new execution also takes it over from a run that is noted there. The stored record if it has
    not ended and names no other run, was published, or was changed at the same time.
    """
    record, version = stored
    is_own = record.run in ("", ctx.run)
    if (not record.ended and is_own) or record.published:
        return stored
    changes: dict[str, Any] = {"ended": False}
    if not is_own:
        changes["run"] = ctx.run
    reopened = record.model_copy(update=changes)
    if not _set_token(ctx, token, reopened, version, epoch):
        return stored
    return reopened, version + 1


def reopen_token(ctx: OperationsContext, token: str, epoch: int) -> None:
    """Note that the submission of a token continues, if its record has ended.

    No effect without a record.
    """
    stored = read_client_token(ctx, token)
    if stored is not None:
        _reopen(ctx, token, stored, epoch)


def release_token(
    ctx: OperationsContext, token: str, *, ended: bool, version: int | None = None
) -> None:
    """Prevent every leader from launching the token's run.

    The error told the caller to repeat the request, or the run has ``ended``. A token that was
    published, or that expired, stays unchanged; with ``version``, also one whose record was changed
    since it had that data version.
    """
    stored = read_client_token(ctx, token)
    if stored is None:
        return
    record, stored_version = stored
    if record.published or version not in (None, stored_version):
        return
    released = record.model_copy(update={"request": {}, "ended": ended})
    if released != record:
        _set_token(ctx, token, released, stored_version, ctx.current_epoch())


def _set_token(
    ctx: OperationsContext, token: str, record: TokenRecord, version: int, epoch: int
) -> bool:
    """Replace the record of data version ``version``; false if it was changed since."""
    transaction = ctx.cluster.fenced(epoch)
    transaction.set(paths.token(token), encode_record(record), version)
    try:
        transaction.commit()
    except Conflict:
        return False
    return True


def discard_token(ctx: OperationsContext, token: str, version: int, epoch: int) -> bool:
    """Delete the token's record if no run was launched for it.

    ``version`` is the data version that it must have. False if the record stays, because it was
    changed or deleted since, or cannot be deleted: the cleaner deletes it when it expires.
    """
    try:
        ctx.cluster.fenced(epoch).delete(paths.token(token), version).commit()
    except StormDagsterError as error:
        ctx.log.info("the record of token %s expires later: %s", token, error.message)
        return False
    return True


def write_part(ctx: OperationsContext, token: str, part: Part, document: Any) -> None:
    """Store one part of the staged submission.

    A record is stored as its JSON, a topology in its blob form, another value as plain JSON. A
    topology that normalization did not change is the uploaded content; the other parts are new.
    """
    key = staging_key(token, part)
    with step(ctx, f"stage.{part}"):
        if isinstance(document, TopologySpec):
            put_by_hash(ctx.blobs, key, document.to_json())
        elif isinstance(document, Record):
            ctx.blobs.put(key, encode_record(document, limit=None))
        else:
            ctx.blobs.put(key, encode_json(document))


def _read(ctx: OperationsContext, token: str, part: Part) -> bytes:
    """The blob of one part.

    :class:`NotAlive` names the stage that writes it, or says that the submission was cancelled.
    """
    key = staging_key(token, part)
    try:
        return ctx.blobs.read(key)
    except KeyNotFound:
        stored = read_client_token(ctx, token)
        if stored is not None:
            token_record, _ = stored
            refuse_cancelled(token, token_record)
        raise _not_staged(token, part, stored) from None


def _not_staged(token: str, part: Part, stored: tuple[TokenRecord, int] | None) -> NotAlive:
    """The error for a missing part.

    ``stored`` is the record of the token; ``None``: it has expired. Without the head nothing of the
    submission is left, so that no later stage alone can continue it.
    """
    submission = f"submission {token!r}"
    if stored is not None:
        token_record, _ = stored
        submission = f"submission {token!r} of topology {token_record.name!r}"
        if token_record.published:
            return NotAlive(
                f"{submission} was published, and has no staged {part} since the topology was "
                "killed: submit it again"
            )
    stage = _STAGE_OF_PART.get(part)
    if stage is not None:
        return NotAlive(
            f"{submission} has no staged {part}, it never got there or has expired: "
            f"materialize {stage} first, or submit again"
        )
    return NotAlive(
        f"{submission} has no staged {part}: what a failed submission staged is removed with its "
        "upload when its command ends, or it has expired; submit the topology again, or re-execute "
        f"all steps of the run, {_FIRST_STAGE} first, if its form has a target"
    )


def read_record(ctx: OperationsContext, token: str) -> StagingRecord:
    """The head of a staged submission; :class:`NotAlive` if it does not exist."""
    return decode_record(StagingRecord, _read(ctx, token, "record"), staging_key(token, "record"))


def staged_replaces(ctx: OperationsContext, token: str) -> str | None:
    """Id of the replaced topology, for a repetition of the stage without it.

    ``None`` if the submission replaces none, or if it is not staged yet.
    """
    try:
        return read_record(ctx, token).replaces
    except NotAlive:
        return None


def read_topology(ctx: OperationsContext, token: str) -> tuple[dict[str, Any], TopologySpec]:
    """The normalized conf and topology of a staged submission.

    :class:`NotAlive` if they are not staged, :class:`Corrupt` if they are damaged.
    """
    conf = decode_json(_read(ctx, token, "conf"), staging_key(token, "conf"))
    if not isinstance(conf, dict):
        raise Corrupt(f"{staging_key(token, 'conf')} is not a map: submit again")
    return conf, decode_topology(_read(ctx, token, "topology"))


def read_tasks(ctx: OperationsContext, token: str) -> StagedTasks:
    """Task ids and parallelism of a staged submission.

    :class:`NotAlive` if they are not staged.
    """
    return decode_record(StagedTasks, _read(ctx, token, "tasks"), staging_key(token, "tasks"))


def read_placement(ctx: OperationsContext, token: str) -> StagedPlacement:
    """The newest placement of a staged submission.

    :class:`NotAlive` without one, :class:`Corrupt` if it is damaged.
    """
    key = staging_key(token, "placement")
    raw = _read(ctx, token, "placement")
    document = decode_json(raw, key)
    # Each record has ``v``; the documents of an earlier release did not.
    if isinstance(document, dict) and "v" not in document:
        return _former_placement(document, key)
    return decode_record(StagedPlacement, raw, key)


def _former_placement(document: Mapping[str, Any], key: str) -> StagedPlacement:
    """Decode a placement of an earlier release, whose workers list their task ids."""
    try:
        fields = document["result"]
        placements = [
            TopologyPlacement.from_document(placement) for placement in fields["placements"]
        ]
        result = PlacementResult(
            placements=tuple(placements),
            planner=fields["planner"],
            session_secs=fields["session_secs"],
            assign_secs=fields["assign_secs"],
        )
        return StagedPlacement(assignments_version=document["assignments_version"], result=result)
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(
            f"{key} is not a placement ({error}): materialize storm/assignment again"
        ) from None
