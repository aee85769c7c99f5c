"""Operations under way: submissions and updates that are accepted, not ended."""

from dataclasses import dataclass

from storm_dagster.model.dagster_names import STAGES
from storm_dagster.model.names import code_keys
from storm_dagster.model.records import TokenRecord
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.cleaner import read_tokens
from storm_dagster.operations.submit.staging import staging_key


@dataclass(frozen=True)
class OperationStatus:
    """A submission or update, and the stage that it comes to next."""

    token: str
    record: TokenRecord
    stage: str
    """One of :data:`STAGES`: that stage has not ended."""


def operations_under_way(ctx: OperationsContext) -> list[OperationStatus]:
    """Operations that are accepted and have not ended, oldest first.

    Records are read from ZooKeeper, stages from what is staged: any process sees the same, and a
    later leader finds what a former one accepted. One that failed stays until its token expires
    (``nimbus.inbox.jar.expiration.secs``).
    """
    tokens, _ = read_tokens(ctx)
    operations: list[OperationStatus] = []
    for token, record in tokens.items():
        stage = _stage_of(ctx, token, record)
        if stage is not None:
            operations.append(OperationStatus(token, record, stage))
    return sorted(
        operations, key=lambda operation: (operation.record.started_secs, operation.token)
    )


def _stage_of(ctx: OperationsContext, token: str, record: TokenRecord) -> str | None:
    """The first stage that has not ended; ``None`` after the last one and a kill."""
    if record.published:
        base = ctx.cluster.storm_base(record.topology_id)
        is_unfinished = (
            base is not None
            and base.token == token
            and (base.status, base.wanted_status, base.delay_secs) == ("INACTIVE", "ACTIVE", None)
        )
        return "active_topology" if is_unfinished else None
    last_keys = (
        staging_key(token, "record"),
        code_keys(record.topology_id)[-1],
        staging_key(token, "tasks"),
        staging_key(token, "placement"),
    )
    for stage, key in zip(STAGES, last_keys, strict=False):
        if not ctx.blobs.exists(key):
            return stage
    return "published_assignment"
