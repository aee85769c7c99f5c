"""Removal of garbage: chosen by a pure function, removed in fenced steps
(``docs/decisions.md#garbage``).

Absence is not an order. A key or node is garbage only when the topology that it belongs to has
neither a base in ZooKeeper nor a token that still counts, it was seen so by this observer for the
whole grace time, and the lists of nodes and blobs were read before the lists of tokens and bases.
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
from storm_dagster.model.names import code_dir_of_blob_key, id_of_blob_key, topology_name_of
from storm_dagster.model.operation_record import TokenRecord
from storm_dagster.model.records import (
    Assignment,
    decode_record,
)
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext, decode_json
from storm_dagster.operations.results import CleanResult
from storm_dagster.operations.steps import operation, step
from storm_dagster.operations.submit.staging import token_of_staging_key
from storm_dagster.operations.submit.sweeping import end_spark_queries
from storm_dagster.operations.transactions import (
    bump_assignments_version,
    commit,
    delete_tree,
    retry_on_conflict,
)
from storm_dagster.zk.shards import delete_ops
from storm_dagster.zk.state_protocol import read_children

CLEAN = operation("clean", "clean.node", "clean.assignment", "clean.token", "clean.blob")
_MOST_BACKUPS = 1000
_BACKUP_SECS = 30 * 86_400
_PENDING_SECS = 7 * 86_400
"""Longest time that Dagster may be away before a submission that was taken is given up."""

_OF_TASKS = (paths.TASKS, paths.TASKBEATS, paths.TASKERRORS, paths.METRICS)
_PER_TOPOLOGY = (*_OF_TASKS, paths.GRAY_UPGRADE, paths.WORKERS, paths.ASSIGNMENTS)

CleanerMemory = Mapping[str, float]
"""Garbage or token -> boot clock at which this observer first saw it so."""


@dataclass(frozen=True)
class Inventory:
    """Snapshot of everything that may be garbage, and of everything that is in use."""

    blobs: tuple[str, ...]
    nodes: Mapping[str, tuple[str, ...]]
    """First-level node -> topology ids below it."""
    tokens: Mapping[str, TokenRecord]
    """Client token -> record. A damaged record pins its staging: it is in ``damaged_tokens``."""
    damaged_tokens: tuple[str, ...] = ()
    topologies: tuple[str, ...] = ()
    """Ids below ``/topology``, damaged ones included."""
    handles: Mapping[str, str] = field(default_factory=dict)
    """Token -> upload handle of its staging record."""
    newest: Mapping[str, str] = field(default_factory=dict)
    """Blob ``staging-of.<name>`` -> the token that it holds."""
    versions: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Topology id -> the versions of its code that its assignment and its upgrade name."""
    busy_workers: tuple[str, ...] = ()
    """Ids without a topology that still have live workers: their nodes are not touched."""


def find_garbage(
    inventory: Inventory,
    memory: CleanerMemory,
    *,
    boot_now: float,
    grace_secs: float,
    token_secs: float,
    upload_secs: float,
) -> tuple[CleanResult, dict[str, float]]:
    """Choose the garbage to remove, and the memory for the next time.

    A token counts while its topology is alive, and for ``token_secs`` after this observer first saw
    it. Uploads go ``upload_secs`` after they were first seen, unless a token that counts names
    their handle and is not published yet. Everything else goes after ``grace_secs`` of being
    garbage.
    """
    alive = set(inventory.topologies)
    seen: dict[str, float] = {}

    def age(key: str) -> float:
        since = memory.get(key, boot_now)
        seen[key] = since if since <= boot_now else boot_now
        return boot_now - seen[key]

    expired: list[str] = []
    counting: set[str] = set(inventory.damaged_tokens)
    pinned_ids = set(alive)
    # Accepted, and not known to be launched: also with a Dagster that is away for days. A leader of
    # the release before has no token's record of a Storm client's submission by then.
    pending = {
        key[7:-8]
        for key in inventory.blobs
        if key.startswith("upload.") and key.endswith(".pending")
    }
    for token, record in sorted(inventory.tokens.items()):
        waits = bool(record.request) and not record.published
        limit_secs = max(token_secs, _PENDING_SECS) if waits else token_secs
        if record.topology_id in alive or age(f"token {token}") < limit_secs:
            counting.add(token)
            if record.topology_id in alive or not record.published:
                pinned_ids.add(record.topology_id)
            if waits and (handle := record.request.get("handle")):
                pending.add(str(handle))
        else:
            expired.append(token)
    pinned_handles = {
        handle
        for token, handle in inventory.handles.items()
        if token in counting
        and not (token in inventory.tokens and inventory.tokens[token].published)
    }
    handles = Counter(key.rpartition(".")[0].removeprefix("upload.") for key in inventory.blobs)

    def limit_of(key: str) -> float | None:
        """Seconds for which the blob must have been seen as garbage; ``None`` when it is in use."""
        if (topology_id := id_of_blob_key(key)) is not None:
            stale = inventory.versions.get(topology_id)
            code_dir = code_dir_of_blob_key(key)
            # The first version stays as long as the topology; a later one as long as somebody names
            # it.
            if topology_id in pinned_ids:
                superseded = stale is not None and code_dir != topology_id and code_dir not in stale
                # As long as an upload: an upgrade stores its code well before it begins.
                return max(grace_secs, upload_secs) if superseded else None
            return grace_secs
        if (token := token_of_staging_key(key)) is not None:
            return None if token in counting else grace_secs
        if key.startswith("staging-of."):
            return None if inventory.newest.get(key) in counting else grace_secs
        if key.startswith("upload."):
            handle, _, part = key[len("upload.") :].rpartition(".")
            # Whose upload it is outlives the parts, which may come for hours.
            kept = handle in pinned_handles or (part == "submitter" and handles[handle] > 1)
            return None if kept else max(upload_secs, _PENDING_SECS if handle in pending else 0.0)
        return None  # A blob that a user put there.

    waiting = 0

    def old(key: str, limit: float) -> bool:
        nonlocal waiting
        found = age(key) >= limit
        waiting += not found
        return found

    blobs = [
        key
        for key in inventory.blobs
        if (limit := limit_of(key)) is not None and old(f"blob {key}", limit)
    ]
    used = pinned_ids | set(inventory.busy_workers)
    nodes = [
        f"{parent}/{topology_id}"
        for parent, ids in inventory.nodes.items()
        for topology_id in ids
        # What somebody else wrote there stays.
        if topology_id not in used
        and _is_topology_id(topology_id)
        and old(f"node {parent}/{topology_id}", grace_secs)
    ]
    return CleanResult(tuple(nodes), tuple(blobs), tuple(expired), waiting), seen


def _is_topology_id(text: str) -> bool:
    try:
        topology_name_of(text)
    except InvalidRequest:
        return False
    return True


def take_inventory(ctx: OperationsContext) -> Inventory:
    """Read blobs and nodes first, then what keeps them, so that nothing new looks like garbage."""
    blobs = tuple(ctx.blobs.keys())
    state = ctx.cluster.state
    nodes = {parent: tuple(state.find_children(parent) or ()) for parent in _PER_TOPOLOGY}
    newest: dict[str, str] = {}
    handles: dict[str, str] = {}
    for key in blobs:
        token = token_of_staging_key(key)
        if key.startswith("staging-of."):
            newest[key] = (ctx.find_blob(key) or b"").decode("utf-8", "replace")
        elif token is not None and key.endswith(".record") and (handle := _handle_of(ctx, key)):
            handles[token] = handle
    tokens, damaged = read_tokens(ctx)
    topologies = tuple(state.find_children(paths.TOPOLOGY) or ())
    gone = sorted({*nodes[paths.WORKERS]} - {*topologies})
    workers = state.find_children_many([paths.workers(each) for each in gone])
    return Inventory(
        blobs=blobs,
        nodes=nodes,
        tokens=tokens,
        damaged_tokens=tuple(damaged),
        topologies=topologies,
        handles=handles,
        newest=newest,
        versions=_versions(ctx, blobs),
        busy_workers=tuple(each for each, found in zip(gone, workers, strict=True) if found),
    )


def _versions(ctx: OperationsContext, blobs: Iterable[str]) -> dict[str, frozenset[str]]:
    """The versions in use, of the topologies that have blobs of more than their first one."""
    found: dict[str, frozenset[str]] = {}
    ids = {
        id_of_blob_key(key) or ""
        for key in blobs
        if id_of_blob_key(key) != code_dir_of_blob_key(key)
    }
    for topology_id in ids:
        with suppress(Corrupt):  # Nothing is decided about what cannot be read.
            assignment = ctx.cluster.assignment_info(topology_id)
            upgrade = ctx.cluster.read_upgrade(topology_id).record
            if assignment is not None:
                found[topology_id] = frozenset(
                    (assignment.code_dir, upgrade.code_dir if upgrade else "")
                )
    return found


def read_tokens(ctx: OperationsContext) -> tuple[dict[str, TokenRecord], list[str]]:
    """Every client token with its record, and those whose record is damaged."""
    state = ctx.cluster.state
    # The blob store is not ZooKeeper: see at least what was written before it was listed.
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
    """Remove garbage; for the leader and ``inbox_cleanup_schedule``. Pass the memory in again next
    time.

    ``limits`` are those of :func:`survey`. Refuses with :class:`Unavailable` when the cluster's
    root is empty, :class:`Conflict` when it is another one's.
    """
    epoch = ctx.current_epoch()
    now = ctx.monotonic() if boot_now is None else boot_now
    garbage, seen = survey(ctx, memory, boot_now=now, **limits)
    problems: list[str] = []

    def deleted(nodes: Iterable[str]) -> list[str]:
        return [path for path in nodes if _delete_node(ctx, epoch, path, problems)]

    nodes = deleted([*garbage.nodes, *_old_backups(ctx)])
    tokens = [token for token in garbage.tokens if deleted([paths.token(token)])]
    blobs = tuple(_delete_blobs(ctx, epoch, garbage.blobs, problems))
    return CleanResult(tuple(nodes), blobs, tuple(tokens), garbage.waiting, tuple(problems)), seen


def survey(
    ctx: OperationsContext,
    memory: CleanerMemory | None = None,
    *,
    boot_now: float,
    grace_secs: float = 60.0,
    token_secs: float | None = None,
    upload_secs: float | None = None,
) -> tuple[CleanResult, dict[str, float]]:
    """What :func:`clean` would remove now, and the memory for the next time; nothing is changed.

    Tokens and uploads live ``nimbus.inbox.jar.expiration.secs`` unless given.
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
    """Backups of assignments of names that no topology has: all but the newest 1,000, and what is
    30 days old.

    The age is by the clock of who wrote it: nothing that runs is decided by a backup.
    """
    stored = read_children(ctx.cluster.state, paths.ASSIGNMENTS_BAK)
    topologies = ctx.cluster.state.find_children(paths.TOPOLOGY) or []
    alive = {
        topology_name_of(topology_id) for topology_id in topologies if _is_topology_id(topology_id)
    }
    ages = sorted((at.mzxid, name, raw) for name, (raw, at) in stored.items())
    old = ctx.now_secs() - _BACKUP_SECS
    surplus = {name for _, name, _ in ages[:-_MOST_BACKUPS]}
    gone = [(name, raw) for _, name, raw in ages if name not in alive]
    return [
        paths.assignment_backup(name)
        for name, raw in gone
        if name in surplus or _written_secs(raw, old) < old
    ]


def _written_secs(raw: bytes, unknown: float) -> float:
    """When that assignment was made, in epoch seconds; ``unknown`` for one in parts."""
    try:
        return decode_record(Assignment, raw).timestamp_ms / 1000
    except Corrupt:
        return unknown


def _delete_node(ctx: OperationsContext, epoch: int, path: str, problems: list[str]) -> bool:
    try:
        if path.startswith(f"{paths.ASSIGNMENTS}/"):
            topology_id = path[len(paths.ASSIGNMENTS) + 1 :]

            def unassign(view: ClusterView) -> None:
                transaction = bump_assignments_version(
                    ctx.cluster.fenced(epoch), view, {topology_id: None}
                )
                if delete_ops(ctx.cluster.state, transaction, paths.assignment(topology_id)):
                    commit(ctx, transaction, "clean.assignment")

            retry_on_conflict(ctx, f"cleaning {path}", unassign)
            return True
        name = "clean.token" if path.startswith(f"{paths.TOKENS}/") else "clean.node"
        return delete_tree(ctx, epoch, path, name) > 0
    except Fenced:
        raise
    except StormDagsterError as error:
        problems.append(f"{path}: {error.message}")
        return False


def _delete_blobs(
    ctx: OperationsContext, epoch: int, keys: Iterable[str], problems: list[str]
) -> list[str]:
    gone: list[str] = []
    for key in keys:
        found = ctx.cluster.epoch()
        if found is None or found[0] != epoch:
            raise Fenced(
                f"leadership epoch {epoch} is over: cleaning stops, the new leader goes on with it"
            )
        end_spark_queries(ctx, key)
        try:
            with step(ctx, "clean.blob"):
                ctx.blobs.delete(key)
            gone.append(key)
        except KeyNotFound:
            continue
        except StormDagsterError as error:
            problems.append(f"{key}: {error.message}")
    return gone
