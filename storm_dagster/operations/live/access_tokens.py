"""Records of access tokens: made, revoked, and dropped when they have expired.

Each change raises the version of their parent, by which daemons see that the list has changed.
"""

from storm_dagster.model import paths
from storm_dagster.model.access_tokens import TOKEN_ID, TokenScope, check_token_user
from storm_dagster.model.errors import Conflict, InvalidRequest, KeyNotFound, Unavailable
from storm_dagster.model.records import decode_record, encode_record
from storm_dagster.model.token_records import AccessTokenRecord, AccessTokens
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.steps import operation
from storm_dagster.operations.transactions import commit, retry_on_conflict
from storm_dagster.zk.access_tokens import read_token_records
from storm_dagster.zk.cluster_state import Transaction

RECORD_TOKENS = operation("record_tokens", "access_tokens")
CREATE_TOKEN = operation("create_token", "access_token")
REVOKE_TOKEN = operation("revoke_token", "revoked_token")

_MAX_TOKENS = 2_000
"""Tokens that count at the same time."""
_KEPT_SECS = 86_400
"""Time for which the list shows a token that has expired."""
_MAX_DROPPED = 100
"""Expired records that one change drops."""


def record_tokens(ctx: OperationsContext, epoch: int) -> None:
    """Store the start of the first leader that records tokens; no effect at later ones.

    From then on the time runs in which tokens of earlier releases count.
    """

    def attempt(_: ClusterView) -> None:
        if ctx.cluster.state.exists(paths.ACCESS_TOKENS):
            return
        record = AccessTokens(recorded_from_secs=ctx.now_secs())
        transaction = ctx.cluster.fenced(epoch)
        transaction.create(paths.ACCESS_TOKENS, encode_record(record))
        commit(ctx, transaction, "access_tokens")
        ctx.log.info("access tokens are recorded from now on")

    retry_on_conflict(ctx, "recording access tokens", attempt)


def create_token(
    ctx: OperationsContext,
    token_id: str,
    *,
    scope: TokenScope,
    user: str,
    life_secs: int,
    made_by: str,
) -> AccessTokenRecord:
    """Record a token in a fenced transaction, and return its record.

    Its life begins now, by the clock of this process. A repetition with the same id, scope and user
    returns the first record, because the reply to the first call may be lost; :class:`Conflict` for
    an id of another token. :class:`InvalidRequest` for an id or a user that cannot be one.
    """
    if not TOKEN_ID.fullmatch(token_id):
        raise InvalidRequest(
            f"{token_id!r:.40} is not the id of a token: use 16 hexadecimal digits"
        )
    check_token_user(user)
    epoch = ctx.current_epoch()
    now_secs = ctx.now_secs()
    record = AccessTokenRecord(
        user=user,
        scope=scope,
        expires_secs=now_secs + life_secs,
        made_secs=now_secs,
        made_by=made_by[:200],
    )

    def attempt(_: ClusterView) -> AccessTokenRecord:
        transaction, records = _begin_change(ctx, epoch)
        stored = records.get(token_id)
        if stored is not None:
            if (stored.scope, stored.user) == (scope, user):
                return stored
            raise Conflict(f"the id {token_id} is that of another token: choose another")
        expired = _expired_ids(records, now_secs)
        if len(records) - len(expired) >= _MAX_TOKENS:
            raise Unavailable(
                f"{_MAX_TOKENS} tokens count already: revoke some with `storm-dagster token revoke`"
            )
        for expired_id in expired[:_MAX_DROPPED]:
            transaction.delete(paths.access_token(expired_id))
        transaction.create(paths.access_token(token_id), encode_record(record))
        commit(ctx, transaction, "access_token")
        ctx.log.info("token %s of scope %s for %s", token_id, scope, user or "no user")
        return record

    return retry_on_conflict(ctx, "recording an access token", attempt)


def revoke_token(ctx: OperationsContext, token_id: str) -> None:
    """Remove the record of a token, which then counts nowhere within seconds.

    :class:`KeyNotFound` without a record; an earlier attempt of this call whose reply was lost does
    not count.
    """
    epoch = ctx.current_epoch()
    was_there = False

    def attempt(_: ClusterView) -> None:
        nonlocal was_there
        transaction, records = _begin_change(ctx, epoch)
        if token_id not in records:
            if was_there:
                return
            raise KeyNotFound(
                f"no token {token_id!r:.40} is recorded: see `storm-dagster token list`"
            )
        was_there = True
        transaction.delete(paths.access_token(token_id))
        commit(ctx, transaction, "revoked_token")
        ctx.log.info("token %s is revoked", token_id)

    retry_on_conflict(ctx, "revoking an access token", attempt)


def _begin_change(
    ctx: OperationsContext, epoch: int
) -> tuple[Transaction, dict[str, AccessTokenRecord]]:
    """Begin a transaction that raises the version of the list, and read the records.

    The commit loses the race if another change is first. :class:`Unavailable` before a leader has
    begun to record tokens.
    """
    node = ctx.cluster.state.get_data_with_version(paths.ACCESS_TOKENS)
    if node is None:
        raise Unavailable("the leading nimbus does not record tokens yet: try again in a moment")
    raw, versioned = node
    decode_record(AccessTokens, raw, paths.ACCESS_TOKENS)
    transaction = ctx.cluster.fenced(epoch).set(paths.ACCESS_TOKENS, raw, versioned.version)
    return transaction, read_token_records(ctx.cluster.state)


def _expired_ids(records: dict[str, AccessTokenRecord], now_secs: int) -> list[str]:
    """Ids of the records whose token has expired for longer than the list shows it."""
    return [
        token_id
        for token_id, record in records.items()
        if record.expires_secs + _KEPT_SECS < now_secs
    ]
