"""Archive, conf and topology as the blobs of one version of a topology's code
(``docs/decisions.md#content-once``).
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
from storm_dagster.operations.context import OperationsContext, encode_json
from storm_dagster.operations.results import CodeResult
from storm_dagster.operations.steps import step
from storm_dagster.packaging.unpack import unpack_archive

_CHUNK = 1 << 20
_HOLDER_POLL_SECS = 0.1


def code_hashes(ctx: OperationsContext, code_dir: str) -> dict[str, str]:
    """Blob key -> SHA-256 of the code that is stored under that prefix."""
    found = (_meta(ctx, key) for key in code_keys(code_dir))
    return {meta.key: meta.sha256 for meta in found if meta is not None}


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
    """Store the code under the prefix ``code_dir`` and see it replicated.

    ``archive`` is the blob key of the uploaded archive. What is stored already under another key,
    as an upload or staged, gets a second name and is not copied. ``keep``: what is stored under the
    prefix is never replaced. Raises :class:`Unavailable` when ``topology.min.replication.count``
    nimbuses do not hold all of it within ``topology.max.replication.wait.time.sec``, unless
    degraded was allowed.
    """
    total = total_conf(ctx.values(), conf)
    blobs = (
        _store_archive(ctx, code_dir, name, archive, keep=keep),
        _store(ctx, conf_key(code_dir), encode_json(conf), keep=keep),
        _store(ctx, code_key(code_dir), spec.to_json(), keep=keep),
    )
    wanted = int(total.get("topology.min.replication.count") or 1)
    copies = _await_copies(
        ctx, blobs, wanted, float(total.get("topology.max.replication.wait.time.sec") or 0)
    )
    stored = CodeResult(code_dir, name, blobs, copies, wanted)
    if stored.degraded and not allow_degraded:
        lacking = [key for key, count in copies.items() if count < wanted]
        raise Unavailable(
            f"topology {name!r}: {lacking[0]} is held by {copies[lacking[0]]} nimbuses, {wanted} are wanted: "
            "start more nimbuses, lower topology.min.replication.count, or submit with --allow-degraded"
        )
    return stored


def _store(ctx: OperationsContext, key: str, raw: bytes, *, keep: bool) -> BlobMeta:
    stored = _meta(ctx, key) if keep else None
    if stored is not None:
        return stored
    with step(ctx, f"store.{key.rpartition('-')[2]}"):
        return put_by_hash(ctx.blobs, key, raw)


def _store_archive(
    ctx: OperationsContext, code_dir: str, name: str, archive: str, *, keep: bool
) -> BlobMeta:
    target = jar_key(code_dir)
    stored = _meta(ctx, target)
    if stored is not None and keep:
        return stored
    source = _meta(ctx, archive)
    if source is None:
        if stored is not None:
            return stored
        raise NotAlive(
            f"the archive {archive!r} of topology {name!r} does not exist, its upload has expired: submit again"
        )
    if stored is not None and stored.sha256 == source.sha256:
        return stored
    with step(ctx, "store.stormjar.jar"):
        # The store has these very bytes under the upload's key: they need not travel.
        meta = ctx.blobs.put_existing(target, source.sha256)
        if meta is None:
            with ctx.blobs.open(archive) as stream:
                meta = ctx.blobs.put(
                    target, iter(partial(stream.read, _CHUNK), b""), expected_sha256=source.sha256
                )
    return meta


def _meta(ctx: OperationsContext, key: str) -> BlobMeta | None:
    try:
        return ctx.blobs.meta(key)
    except KeyNotFound:
        return None


def _await_copies(
    ctx: OperationsContext, blobs: tuple[BlobMeta, ...], wanted: int, wait_secs: float
) -> dict[str, int]:
    """Blob key -> number of nimbuses that announce it. The store that acknowledged the write is one
    at least.
    """
    deadline = ctx.monotonic() + wait_secs
    while True:
        copies = {
            meta.key: max(1, len(ctx.cluster.state.find_children(paths.blob(meta.key)) or ()))
            for meta in blobs
        }
        if min(copies.values()) >= wanted or ctx.monotonic() >= deadline:
            return copies
        ctx.sleep(_HOLDER_POLL_SECS)


def check_uploaded_archive(
    ctx: OperationsContext, key: str, spec: TopologySpec, conf: Mapping[str, Any]
) -> None:
    """Unpack the archive of blob ``key`` as a supervisor would, and find the modules of the
    components.

    A submission finds out from its workers; what takes the place of something that runs must not.
    Nothing of the archive is executed. Raises :class:`InvalidTopology` for an archive that breaks a
    rule, for a module in it that is not valid Python, and for one that is neither in it nor
    installed here (not checked with another ``topology.python``).
    """
    with tempfile.TemporaryDirectory(prefix="storm-dagster-check-") as folder:
        path, root = Path(folder, "archive"), Path(folder, "code")
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


def _check_module(root: Path, module: str, what: str, *, elsewhere: bool) -> None:
    path = root.joinpath(*module.split("."))
    for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
        if file.is_file():
            try:
                ast.parse(file.read_bytes(), filename=file.name)
            except (SyntaxError, ValueError) as error:
                raise InvalidTopology(
                    f"module {module!r} of {what} is not valid Python ({error}): fix it and pack it again"
                ) from None
            return
    if elsewhere or any(path.parent.glob(f"{path.name}.*")) or path.is_dir():
        # Another interpreter, a compiled module, a namespace package: only its worker knows.
        return
    top = module.partition(".")[0]
    if not (root / top / "__init__.py").is_file():
        with suppress(ImportError, ValueError):
            if importlib.util.find_spec(top) is not None:
                return
    raise InvalidTopology(
        f"module {module!r} of {what} is neither in the archive nor installed: pack it, or correct the name"
    )
