"""Removal of garbage: chosen by a pure function, removed in fenced steps.

See ``docs/decisions.md#garbage``. Absence alone does not make garbage. A key or node is garbage
only if its topology has neither a base in ZooKeeper nor a token that still counts, if this observer
saw that for the whole grace time, and if the lists of nodes and blobs were read before the lists of
tokens and bases.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from storm_dagster.model import paths
from storm_dagster.model.errors import (
    Corrupt,
    Fenced,
    InvalidRequest,
    KeyNotFound,
    StormDagsterError,
)
from storm_dagster.model.event_log import is_batch_key
from storm_dagster.model.names import code_dir_of_blob_key, id_of_blob_key, topology_name_of
from storm_dagster.model.operation_record import TokenRecord
from storm_dagster.model.records import (
    Assignment,
    decode_record,
)
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext, decode_json
from storm_dagster.operations.live.event_logs import remove_log, used_event_logs
from storm_dagster.operations.results import CleanResult
from storm_dagster.operations.steps import operation, step
from storm_dagster.operations.submit.staging import token_of_staging_key
from storm_dagster.operations.submit.sweeping import end_spark_queries
from storm_dagster.operations.transactions import (
    bump_assignments_version,
    commit,
    delete_tree,
    epoch_is_over,
    retry_on_conflict,
)
from storm_dagster.zk.shards import delete_ops
from storm_dagster.zk.state_protocol import read_children

CLEAN = operation("clean", "clean.node", "clean.assignment", "clean.token", "clean.blob")
_MAX_BACKUPS = 1000
"""Backups of assignments that are kept; of more, the oldest without a topology are garbage."""
_BACKUP_SECS = 30 * 86_400
"""Age from which on the backup of a name without a topology is garbage."""
_PENDING_SECS = 7 * 86_400
"""Seconds that Dagster may be away before an accepted submission is given up."""

_PER_TOPOLOGY = (
    paths.TASKS,
    paths.TASKBEATS,
    paths.TASKERRORS,
    paths.METRICS,
    paths.GRAY_UPGRADE,
    paths.WORKERS,
    paths.ASSIGNMENTS,
)
"""First-level nodes with one child for each topology, named by its id."""

CleanerMemory = Mapping[str, float]
"""Garbage or token -> boot clock at which this observer first saw that state."""


@dataclass(frozen=True)
class Inventory:
    """Snapshot of everything that may be garbage, and of everything that is in use."""

    blobs: tuple[str, ...]
    """All blob keys."""
    nodes: Mapping[str, tuple[str, ...]]
    """First-level node -> topology ids below it."""
    tokens: Mapping[str, TokenRecord]
    """Client token -> record.

    The staging of a damaged record is kept: the token is in ``damaged_tokens``.
    """
    damaged_tokens: tuple[str, ...] = ()
    topologies: tuple[str, ...] = ()
    """Ids below ``/topology``, damaged ones included."""
    handles: Mapping[str, str] = field(default_factory=dict)
    """Token -> upload handle of its staging record."""
    newest: Mapping[str, str] = field(default_factory=dict)
    """Blob ``staging-of.<name>`` -> the token that it holds."""
    versions: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Topology id -> code versions that its assignment and its upgrade name."""
    busy_workers: tuple[str, ...] = ()
    """Ids without a topology that still have live workers; their nodes stay."""
    event_blobs: frozenset[str] | None = frozenset()
    """Keys of the blobs that event logs name; ``None`` if a log is damaged and hides some."""
    ended_logs: tuple[str, ...] = ()
    """Names of the empty event logs of topologies that are gone."""


@dataclass
class _Ages:
    """Ages of garbage and tokens by the observer's memory."""

    memory: CleanerMemory
    """Memory of the last call."""
    boot_now: float
    next_memory: dict[str, float] = field(default_factory=dict)
    """Memory for the next call: the keys whose age was read."""
    waiting: int = 0
    """Garbage that is not old enough yet."""

    def age_secs(self, key: str) -> float:
        """Seconds since the observer first saw ``key``; remember it for the next time."""
        # A time in the future is that of another boot: the age starts now.
        since = min(self.memory.get(key, self.boot_now), self.boot_now)
        self.next_memory[key] = since
        return self.boot_now - since

    def is_old(self, key: str, limit_secs: float) -> bool:
        """True if the garbage is old enough to be removed; else it is counted as waiting."""
        if self.age_secs(key) >= limit_secs:
            return True
        self.waiting += 1
        return False


def find_garbage(
    inventory: Inventory,
    memory: CleanerMemory,
    *,
    boot_now: float,
    grace_secs: float,
    token_secs: float,
    upload_secs: float,
) -> tuple[CleanResult, dict[str, float]]:
    """Choose the garbage to remove, and the memory for the next call.

    A token counts while its topology is alive, and for ``token_secs`` after this observer first saw
    it. Uploads are removed ``upload_secs`` after they were first seen, unless a token that counts
    names their handle and is not published yet. All other garbage is removed after ``grace_secs``.
    """
    ages = _Ages(memory, boot_now)
    tokens = _judge_tokens(inventory, ages, token_secs)
    limits = _BlobLimits(inventory, tokens, grace_secs, upload_secs)
    blobs: list[str] = []
    for key in inventory.blobs:
        limit_secs = limits.of(key)
        if limit_secs is not None and ages.is_old(f"blob {key}", limit_secs):
            blobs.append(key)
    used_ids = tokens.pinned_ids | set(inventory.busy_workers)
    nodes: list[str] = []
    for parent, topology_ids in inventory.nodes.items():
        for topology_id in topology_ids:
            # A node that another program wrote there stays.
            if topology_id in used_ids or not _is_topology_id(topology_id):
                continue
            if ages.is_old(f"node {parent}/{topology_id}", grace_secs):
                nodes.append(f"{parent}/{topology_id}")
    for name in inventory.ended_logs:
        path = paths.event_log(name)
        if ages.is_old(f"node {path}", grace_secs):
            nodes.append(path)
    garbage = CleanResult(tuple(nodes), tuple(blobs), tuple(tokens.expired), ages.waiting)
    return garbage, ages.next_memory


class _BlobLimits:
    """Ages at which the blobs of an inventory may be removed."""

    def __init__(
        self, inventory: Inventory, tokens: "_TokenUse", grace_secs: float, upload_secs: float
    ) -> None:
        self._inventory = inventory
        self._tokens = tokens
        self._grace_secs = grace_secs
        self._upload_secs = upload_secs
        self._parts_of_handle = Counter(
            key.rpartition(".")[0].removeprefix("upload.") for key in inventory.blobs
        )
        """Upload handle -> number of its blobs; keys of other blobs count as handles, too."""

    def of(self, key: str) -> float | None:
        """Seconds for which the blob must have been garbage; ``None`` if it is in use.

        A blob that a user put there is in use.
        """
        topology_id = id_of_blob_key(key)
        if topology_id is not None:
            return self._of_code(key, topology_id)
        token = token_of_staging_key(key)
        if token is not None:
            return None if token in self._tokens.counting else self._grace_secs
        if key.startswith("staging-of."):
            newest_token = self._inventory.newest.get(key)
            return None if newest_token in self._tokens.counting else self._grace_secs
        if is_batch_key(key):
            used = self._inventory.event_blobs
            return None if used is None or key in used else self._grace_secs
        if key.startswith("upload."):
            handle, _, part = key[len("upload.") :].rpartition(".")
            return self._of_upload(handle, part)
        return None

    def _of_code(self, key: str, topology_id: str) -> float | None:
        """Limit of a blob with the code of a topology, or the reasons of its placement."""
        if topology_id not in self._tokens.pinned_ids:
            return self._grace_secs
        # The first version stays for the life of the topology; a later one while the assignment or
        # the upgrade names it. The limit is that of an upload, because an upgrade stores its code
        # well before it begins.
        used_versions = self._inventory.versions.get(topology_id)
        code_dir = code_dir_of_blob_key(key)
        is_later = code_dir != topology_id
        if used_versions is not None and is_later and code_dir not in used_versions:
            return max(self._grace_secs, self._upload_secs)
        return None

    def _of_upload(self, handle: str, part: str) -> float | None:
        """Limit of one part of an upload."""
        # The blob that names the submitter outlives the parts, whose upload may take hours.
        has_parts = part == "submitter" and self._parts_of_handle[handle] > 1
        if handle in self._tokens.pinned_handles or has_parts:
            return None
        pending_secs = _PENDING_SECS if handle in self._tokens.pending_handles else 0.0
        return max(self._upload_secs, pending_secs)


@dataclass
class _TokenUse:
    """Expired tokens, and everything that the others keep."""

    expired: list[str]
    """Tokens to remove."""
    counting: set[str]
    """Tokens that count; damaged ones always do."""
    pinned_ids: set[str]
    """Ids of topologies that are alive or being submitted."""
    pinned_handles: set[str]
    """Handles of uploads that a submission in progress needs."""
    pending_handles: set[str]
    """Handles of accepted submissions that are not known to be launched."""


def _judge_tokens(inventory: Inventory, ages: _Ages, token_secs: float) -> _TokenUse:
    """Separate the expired tokens from those that count.

    A token without a live topology expires ``token_secs`` after it was first seen; one that waits
    for its run, which Dagster has not launched, after at least seven days.
    """
    alive = set(inventory.topologies)
    expired: list[str] = []
    counting = set(inventory.damaged_tokens)
    pinned_ids = set(alive)
    # Uploads of accepted submissions stay, because Dagster may be away for days. A leader of the
    # release before marks that of a Storm client by a blob, because it writes the token's record
    # only at the launch; of other submissions the record names the handle.
    pending_handles = {
        key.removeprefix("upload.").removesuffix(".pending")
        for key in inventory.blobs
        if key.startswith("upload.") and key.endswith(".pending")
    }
    for token, record in sorted(inventory.tokens.items()):
        waits = bool(record.request) and not record.published
        limit_secs = max(token_secs, _PENDING_SECS) if waits else token_secs
        is_alive = record.topology_id in alive
        if not is_alive and ages.age_secs(f"token {token}") >= limit_secs:
            expired.append(token)
            continue
        counting.add(token)
        if is_alive or not record.published:
            pinned_ids.add(record.topology_id)
        handle = record.request.get("handle")
        if waits and handle:
            pending_handles.add(str(handle))
    pinned_handles: set[str] = set()
    for token, handle in inventory.handles.items():
        record = inventory.tokens.get(token)
        is_published = record is not None and record.published
        if token in counting and not is_published:
            pinned_handles.add(handle)
    return _TokenUse(expired, counting, pinned_ids, pinned_handles, pending_handles)


def _is_topology_id(text: str) -> bool:
    """True if the text has the form of a topology id."""
    try:
        topology_name_of(text)
    except InvalidRequest:
        return False
    return True


def take_inventory(ctx: OperationsContext) -> Inventory:
    """Read blobs and nodes first, then the records that keep them.

    In this order no new blob or node looks like garbage: its record is written before it, or in
    the same transaction.
    """
    blobs = tuple(ctx.blobs.keys())
    state = ctx.cluster.state
    nodes = {parent: tuple(state.find_children(parent) or ()) for parent in _PER_TOPOLOGY}
    newest: dict[str, str] = {}
    handles: dict[str, str] = {}
    for key in blobs:
        token = token_of_staging_key(key)
        if key.startswith("staging-of."):
            newest[key] = (ctx.find_blob(key) or b"").decode("utf-8", "replace")
        elif token is not None and key.endswith(".record"):
            handle = _handle_of(ctx, key)
            if handle:
                handles[token] = handle
    tokens, damaged = read_tokens(ctx)
    topologies = tuple(state.find_children(paths.TOPOLOGY) or ())
    ended_ids = sorted({*nodes[paths.WORKERS]} - {*topologies})
    worker_lists = state.find_children_many(
        [paths.workers(topology_id) for topology_id in ended_ids]
    )
    busy_ids: list[str] = []
    for topology_id, workers in zip(ended_ids, worker_lists, strict=True):
        if workers:
            busy_ids.append(topology_id)
    alive = {topology_name_of(entry) for entry in topologies if _is_topology_id(entry)}
    event_blobs, ended_logs = used_event_logs(ctx, alive)
    return Inventory(
        blobs=blobs,
        nodes=nodes,
        tokens=tokens,
        damaged_tokens=tuple(damaged),
        topologies=topologies,
        handles=handles,
        newest=newest,
        versions=_used_versions(ctx, blobs),
        busy_workers=tuple(busy_ids),
        event_blobs=event_blobs,
        ended_logs=ended_logs,
    )


def _used_versions(ctx: OperationsContext, blobs: Iterable[str]) -> dict[str, frozenset[str]]:
    """Topology id -> prefixes of the code in use, if it has blobs of a later version.

    Without an assignment or a readable record, the topology is left out.
    """
    used: dict[str, frozenset[str]] = {}
    # Blobs that are not of a topology have neither an id nor a prefix.
    ids = {
        id_of_blob_key(key) or ""
        for key in blobs
        if id_of_blob_key(key) != code_dir_of_blob_key(key)
    }
    for topology_id in ids:
        with suppress(Corrupt):  # Without a readable record no version of it is garbage.
            assignment = ctx.cluster.assignment_info(topology_id)
            upgrade = ctx.cluster.read_upgrade(topology_id).record
            if assignment is not None:
                upgrade_code_dir = upgrade.code_dir if upgrade else ""
                used[topology_id] = frozenset((assignment.code_dir, upgrade_code_dir))
    return used


def read_tokens(ctx: OperationsContext) -> tuple[dict[str, TokenRecord], list[str]]:
    """Every client token with its record, and those whose record is damaged."""
    state = ctx.cluster.state
    # The blob store is not ZooKeeper: after the sync every token written before the list of blobs
    # is visible.
    state.sync_path(paths.TOKENS)
    tokens: dict[str, TokenRecord] = {}
    damaged: list[str] = []
    for token, (raw, _) in read_children(state, paths.TOKENS).items():
        try:
            tokens[token] = decode_record(TokenRecord, raw, paths.token(token))
        except StormDagsterError:
            damaged.append(token)
    return tokens, damaged


def _handle_of(ctx: OperationsContext, key: str) -> str | None:
    """The upload handle in the staging record ``key``; ``None`` without one."""
    try:
        document = decode_json(ctx.find_blob(key) or b"{}", key)
    except StormDagsterError:
        return None
    handle = document.get("handle") if isinstance(document, dict) else None
    return handle if isinstance(handle, str) else None


def clean(
    ctx: OperationsContext,
    memory: CleanerMemory | None = None,
    *,
    boot_now: float | None = None,
    **limits: float,
) -> tuple[CleanResult, dict[str, float]]:
    """Remove garbage; for the leader and ``inbox_cleanup_schedule``.

    Old backups of assignments are removed as well. Pass the returned memory to the next call.
    ``limits`` are those of :func:`survey`. An error at one node or blob is a problem of the result.
    Refuses with :class:`Unavailable` if the cluster's root is empty, :class:`Conflict` if the root
    belongs to another cluster; :class:`Fenced` once another leader has begun.
    """
    epoch = ctx.current_epoch()
    now = ctx.monotonic() if boot_now is None else boot_now
    garbage, next_memory = survey(ctx, memory, boot_now=now, **limits)
    problems: list[str] = []

    garbage_nodes = [*garbage.nodes, *_old_backups(ctx)]
    nodes = [path for path in garbage_nodes if _delete_node(ctx, epoch, path, problems)]
    tokens = [
        token for token in garbage.tokens if _delete_node(ctx, epoch, paths.token(token), problems)
    ]
    blobs = _delete_blobs(ctx, epoch, garbage.blobs, problems)
    result = CleanResult(
        tuple(nodes), tuple(blobs), tuple(tokens), garbage.waiting, tuple(problems)
    )
    return result, next_memory


def survey(
    ctx: OperationsContext,
    memory: CleanerMemory | None = None,
    *,
    boot_now: float,
    grace_secs: float = 60.0,
    token_secs: float | None = None,
    upload_secs: float | None = None,
) -> tuple[CleanResult, dict[str, float]]:
    """Garbage that :func:`clean` would remove now, and the memory for the next call.

    No state is changed. Tokens and uploads live ``nimbus.inbox.jar.expiration.secs`` unless given.
    """
    ctx.cluster.check_cluster_id()
    age = float(ctx.conf.get("nimbus.inbox.jar.expiration.secs", 3600))
    return find_garbage(
        take_inventory(ctx),
        memory or {},
        boot_now=boot_now,
        grace_secs=grace_secs,
        token_secs=age if token_secs is None else token_secs,
        upload_secs=age if upload_secs is None else upload_secs,
    )


def _old_backups(ctx: OperationsContext) -> list[str]:
    """Surplus or old backups of assignments of names that no topology has.

    Surplus are all but the newest 1,000 backups, old are those of more than 30 days. The age is by
    the clock of the writer, because no running topology depends on a backup.
    """
    stored = read_children(ctx.cluster.state, paths.ASSIGNMENTS_BAK)
    topologies = ctx.cluster.state.find_children(paths.TOPOLOGY) or []
    alive = {
        topology_name_of(topology_id) for topology_id in topologies if _is_topology_id(topology_id)
    }
    # Ordered by ZooKeeper's transaction, which no clock changes.
    by_age = sorted((at.mzxid, name, raw) for name, (raw, at) in stored.items())
    oldest_secs = ctx.now_secs() - _BACKUP_SECS
    surplus = {name for _, name, _ in by_age[:-_MAX_BACKUPS]}
    backups: list[str] = []
    for _, name, raw in by_age:
        if name in alive:
            continue
        if name in surplus or _written_secs(raw, oldest_secs) < oldest_secs:
            backups.append(paths.assignment_backup(name))
    return backups


def _written_secs(raw: bytes, unknown: float) -> float:
    """Epoch seconds of the assignment; ``unknown`` if in parts or damaged."""
    try:
        return decode_record(Assignment, raw).timestamp_ms / 1000
    except Corrupt:
        return unknown


def _delete_node(ctx: OperationsContext, epoch: int, path: str, problems: list[str]) -> bool:
    """Delete the node and all below it; true if it was deleted.

    An error is appended to ``problems``; only :class:`Fenced` is raised.
    """
    try:
        if path.startswith(f"{paths.ASSIGNMENTS}/"):
            _delete_assignment(ctx, epoch, path[len(paths.ASSIGNMENTS) + 1 :])
            return True
        if path.startswith(f"{paths.EVENTS}/"):
            return remove_log(ctx, epoch, path[len(paths.EVENTS) + 1 :])
        name = "clean.token" if path.startswith(f"{paths.TOKENS}/") else "clean.node"
        return delete_tree(ctx, epoch, path, name) > 0
    except Fenced:
        raise
    except StormDagsterError as error:
        problems.append(f"{path}: {error.message}")
        return False


def _delete_assignment(ctx: OperationsContext, epoch: int, topology_id: str) -> None:
    """Delete the assignment; no write if there is none.

    Like every change of assignments, it raises the version of ``/assignments``.
    """

    def unassign(view: ClusterView) -> None:
        transaction = bump_assignments_version(ctx.cluster.fenced(epoch), view, {topology_id: None})
        if delete_ops(ctx.cluster.state, transaction, paths.assignment(topology_id)):
            commit(ctx, transaction, "clean.assignment")

    retry_on_conflict(ctx, f"cleaning {paths.assignment(topology_id)}", unassign)


def _delete_blobs(
    ctx: OperationsContext, epoch: int, keys: Iterable[str], problems: list[str]
) -> list[str]:
    """Delete the blobs, and return the keys of those that were deleted.

    An error is appended to ``problems``. :class:`Fenced` once ``epoch`` is over, which is checked
    before each blob, because blobs are not in ZooKeeper.
    """
    deleted: list[str] = []
    for key in keys:
        if epoch_is_over(ctx, epoch):
            raise Fenced(
                f"leadership epoch {epoch} is over: cleaning stops, the new leader continues it"
            )
        end_spark_queries(ctx, key)
        try:
            with step(ctx, "clean.blob"):
                ctx.blobs.delete(key)
            deleted.append(key)
        except KeyNotFound:
            continue
        except StormDagsterError as error:
            problems.append(f"{key}: {error.message}")
    return deleted
