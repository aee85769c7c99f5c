"""Records of tokens whose submission or update has not ended, and the stage of each."""

from dataclasses import dataclass, field

from storm_dagster.model import paths
from storm_dagster.model.dagster_names import STAGES
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.names import code_keys
from storm_dagster.model.operation_record import TokenRecord
from storm_dagster.model.records import decode_record
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.submit.staging import StagingRecord, staging_key
from storm_dagster.zk.state_protocol import ClusterState

STARTING = "STARTING"
"""Status of a topology that is being submitted, for Storm's clients: JStorm's word for a task that
does not run yet.
"""


@dataclass(frozen=True)
class StartingTopology:
    """A topology that is being submitted: it has an id and no tasks yet."""

    id: str
    name: str
    token: str
    started_secs: int
    """Epoch seconds of the submission's acceptance; 0: an earlier release wrote the record."""
    owner: str = ""
    """User who submits it; empty in a cluster without authentication."""

    def uptime_secs(self, now_secs: int) -> int:
        """Seconds since its submission was accepted, at ``now_secs`` (epoch seconds)."""
        return max(0, now_secs - self.started_secs) if self.started_secs else 0


@dataclass
class OpenTokenReader:
    """Reader of the records of operations that have not ended.

    It remembers which tokens were published: their records do not change, and a cluster has one for
    each topology.
    """

    _published: set[str] = field(default_factory=set)
    """Tokens that were published, of those that still exist."""

    def tokens(self, state: ClusterState) -> dict[str, TokenRecord]:
        """Token -> record of each submission and update whose topology is not published.

        Ended and damaged records are left out.
        """
        return {token: record for token, (record, _) in self.stored_tokens(state).items()}

    def stored_tokens(self, state: ClusterState) -> dict[str, tuple[TokenRecord, int]]:
        """:meth:`tokens`, with the data version of each record."""
        names = state.find_children(paths.TOKENS) or []
        self._published.intersection_update(names)
        unknown = [name for name in names if name not in self._published]
        records: dict[str, tuple[TokenRecord, int]] = {}
        nodes = state.get_many([paths.token(name) for name in unknown])
        for name, node in zip(unknown, nodes, strict=True):
            if node is None:
                continue
            raw, versioned = node
            try:
                record = decode_record(TokenRecord, raw, paths.token(name))
            except StormDagsterError:
                continue
            if record.published:
                self._published.add(name)
            elif not record.ended:
                records[name] = record, versioned.version
        return records


def starting_topologies(
    token_reader: OpenTokenReader, state: ClusterState
) -> list[StartingTopology]:
    """Topologies that are being submitted, by their records alone.

    Read the topologies afterwards: one that is published in between is then among those.
    """
    return [
        StartingTopology(record.topology_id, record.name, token, record.started_secs, record.user)
        for token, record in token_reader.tokens(state).items()
        if record.verb == "submit"
    ]


def read_staging(ctx: OperationsContext, token: str) -> StagingRecord | None:
    """Head of a staged submission; ``None`` if it is missing or unreadable."""
    key = staging_key(token, "record")
    try:
        raw = ctx.find_blob(key)
        return None if raw is None else decode_record(StagingRecord, raw, key)
    except StormDagsterError:
        return None


def stage_of_submission(ctx: OperationsContext, token: str, record: TokenRecord) -> str:
    """The first stage that has not ended, of a topology that is not published."""
    # A blob that each of the first four stages writes at its end.
    last_keys = (
        staging_key(token, "record"),
        code_keys(record.topology_id)[-1],
        staging_key(token, "tasks"),
        staging_key(token, "placement"),
    )
    # Not strict: the last two stages write no blob.
    for stage, key in zip(STAGES, last_keys, strict=False):
        if not ctx.blobs.exists(key):
            return stage
    return "published_assignment"
