"""Archive, conf and topology as the blobs of one version of a topology's code.

See ``docs/decisions.md#content-once``.
"""

import ast
import importlib.util
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from storm_dagster.blobstore.store import BlobMeta, put_by_hash
from storm_dagster.core.submission.conf import total_conf
from storm_dagster.model import paths
from storm_dagster.model.errors import InvalidTopology, KeyNotFound, NotAlive, Unavailable
from storm_dagster.model.names import code_key, code_keys, conf_key, jar_key
from storm_dagster.model.topology import TopologySpec
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext, encode_json
from storm_dagster.operations.results import CodeResult
from storm_dagster.operations.steps import step
from storm_dagster.operations.submit.staging import counter_version
from storm_dagster.operations.transactions import commit, retry_on_conflict
from storm_dagster.packaging.unpack import unpack_archive

_CHUNK = 1 << 20
"""Bytes of an archive that are in memory at one time."""
_HOLDER_POLL_SECS = 0.1
"""Pause between two polls of the nimbuses that hold the blobs."""


def code_hashes(ctx: OperationsContext, code_dir: str) -> dict[str, str]:
    """Blob key -> SHA-256 of the code that is stored under that prefix.

    Missing blobs are left out.
    """
    metas = [_meta(ctx, key) for key in code_keys(code_dir)]
    return {meta.key: meta.sha256 for meta in metas if meta is not None}


def next_version_number(ctx: OperationsContext, epoch: int) -> int:
    """Take a number that no other version of any code has.

    So two operators never store code under one prefix.
    """

    def attempt(view: ClusterView) -> int:
        version = counter_version(ctx)
        commit(ctx, ctx.cluster.fenced(epoch).set(paths.COUNTER, b"", version), "version_number")
        return version + 1

    return retry_on_conflict(ctx, "numbering the new code", attempt)


def store_code(
    ctx: OperationsContext,
    code_dir: str,
    *,
    name: str,
    archive: str,
    conf: dict[str, Any],
    spec: TopologySpec,
    keep: bool,
    allow_degraded: bool,
) -> CodeResult:
    """Store the code under the prefix ``code_dir``, and wait until it is replicated.

    ``archive`` is the blob key of the uploaded archive. Content that is stored already under
    another key, as an upload or staged, gets a second name and is not copied. ``keep``: blobs that
    are stored under the prefix are never replaced. Raises :class:`Unavailable` if
    ``topology.min.replication.count`` nimbuses do not hold all of it within
    ``topology.max.replication.wait.time.sec``, unless degraded was allowed.
    """
    total = total_conf(ctx.values(), conf)
    blobs = (
        _store_archive(ctx, code_dir, name, archive, keep=keep),
        _store(ctx, conf_key(code_dir), encode_json(conf), keep=keep),
        _store(ctx, code_key(code_dir), spec.to_json(), keep=keep),
    )
    min_copies = int(total.get("topology.min.replication.count") or 1)
    wait_secs = float(total.get("topology.max.replication.wait.time.sec") or 0)
    copies = _await_copies(ctx, blobs, min_copies, wait_secs)
    stored = CodeResult(code_dir, name, blobs, copies, min_copies)
    if stored.degraded and not allow_degraded:
        scarce_keys = [key for key, count in copies.items() if count < min_copies]
        key = scarce_keys[0]
        raise Unavailable(
            f"topology {name!r}: {key} is held by {copies[key]} nimbuses, {min_copies} are wanted: "
            "start more nimbuses, lower topology.min.replication.count, "
            "or submit with --allow-degraded"
        )
    return stored


def _store(ctx: OperationsContext, key: str, raw: bytes, *, keep: bool) -> BlobMeta:
    """Store the blob; with ``keep`` an existing one is not replaced."""
    stored = _meta(ctx, key) if keep else None
    if stored is not None:
        return stored
    with step(ctx, f"store.{key.rpartition('-')[2]}"):
        return put_by_hash(ctx.blobs, key, raw)


def _store_archive(
    ctx: OperationsContext, code_dir: str, name: str, archive: str, *, keep: bool
) -> BlobMeta:
    """Store the uploaded archive under the prefix, unless it has the same content.

    If the upload has expired, the stored archive serves, as for a repetition; :class:`NotAlive`
    without one.
    """
    target = jar_key(code_dir)
    stored = _meta(ctx, target)
    if stored is not None and keep:
        return stored
    source = _meta(ctx, archive)
    if source is None:
        if stored is not None:
            return stored
        raise NotAlive(
            f"the archive {archive!r} of topology {name!r} does not exist, "
            "its upload has expired: submit again"
        )
    if stored is not None and stored.sha256 == source.sha256:
        return stored
    with step(ctx, "store.stormjar.jar"):
        # The store has the same bytes under the upload's key: they are not transferred.
        meta = ctx.blobs.put_existing(target, source.sha256)
        if meta is None:
            with ctx.blobs.open(archive) as stream:
                meta = ctx.blobs.put(
                    target, iter(partial(stream.read, _CHUNK), b""), expected_sha256=source.sha256
                )
    return meta


def _meta(ctx: OperationsContext, key: str) -> BlobMeta | None:
    """Size and hash of the blob; ``None`` without it."""
    try:
        return ctx.blobs.meta(key)
    except KeyNotFound:
        return None


def _await_copies(
    ctx: OperationsContext, blobs: tuple[BlobMeta, ...], min_copies: int, wait_secs: float
) -> dict[str, int]:
    """Wait for the copies; blob key -> number of nimbuses that announce it.

    It is at least 1, the store that acknowledged the write. After ``wait_secs`` it may be below
    ``min_copies``.
    """
    deadline = ctx.monotonic() + wait_secs
    while True:
        copies: dict[str, int] = {}
        for meta in blobs:
            holders = ctx.cluster.state.find_children(paths.blob(meta.key)) or ()
            copies[meta.key] = max(1, len(holders))
        if min(copies.values()) >= min_copies or ctx.monotonic() >= deadline:
            return copies
        ctx.sleep(_HOLDER_POLL_SECS)


def check_uploaded_archive(
    ctx: OperationsContext, key: str, spec: TopologySpec, conf: Mapping[str, Any]
) -> None:
    """Check that the archive of blob ``key`` has the components' modules.

    It is unpacked as by a supervisor. For a submission the workers report such errors; code that
    replaces running code must be checked before. No code of the archive is executed. Raises
    :class:`InvalidTopology` for an archive that breaks a rule, for a module in it that is not valid
    Python, and for one that is neither in it nor installed here (not checked with another
    ``topology.python``).
    """
    with tempfile.TemporaryDirectory(prefix="storm-dagster-check-") as folder:
        path = Path(folder, "archive")
        root = Path(folder, "code")
        try:
            with ctx.blobs.open(key) as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink, _CHUNK)
        except KeyNotFound:
            raise NotAlive(
                f"the archive {key!r} does not exist, its upload has expired: upload it again"
            ) from None
        unpack_archive(path, root)
        for component, kind, part in spec.components():
            if part.object.python is not None:
                module = part.object.python.partition(":")[0]
                _check_module(
                    root,
                    module,
                    f"{kind} {component!r}",
                    elsewhere=bool(conf.get("topology.python")),
                )


def _check_module(root: Path, module: str, component: str, *, elsewhere: bool) -> None:
    """Check a component's module in the code folder ``root``, without an import.

    :class:`InvalidTopology` if it is not valid Python, or if it is neither there nor installed
    here. With ``elsewhere`` another interpreter runs it, so that a missing one is not an error.
    """
    path = root.joinpath(*module.split("."))
    for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
        if file.is_file():
            try:
                ast.parse(file.read_bytes(), filename=file.name)
            except (SyntaxError, ValueError) as error:
                raise InvalidTopology(
                    f"module {module!r} of {component} is not valid Python ({error}): "
                    "fix it and pack it again"
                ) from None
            return
    if elsewhere or any(path.parent.glob(f"{path.name}.*")) or path.is_dir():
        # Another interpreter, a compiled module, a namespace package: only the worker can tell.
        return
    top = module.partition(".")[0]
    # A package in the archive hides an installed one of the same name.
    if not (root / top / "__init__.py").is_file():
        with suppress(ImportError, ValueError):
            if importlib.util.find_spec(top) is not None:
                return
    raise InvalidTopology(
        f"module {module!r} of {component} is neither in the archive nor installed: "
        "pack it, or correct the name"
    )
