"""Check of an uploaded archive, before anything that runs is touched."""

from __future__ import annotations

import ast
import importlib.util
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storm_dagster.model.errors import InvalidTopology, KeyNotFound, NotAlive
from storm_dagster.model.topology import TopologySpec
from storm_dagster.operations.context import OperationsContext
from storm_dagster.packaging.unpack import unpack_archive

_CHUNK = 1 << 20


def check_uploaded_archive(ctx: OperationsContext, key: str, spec: TopologySpec, conf: Mapping[str, Any]) -> None:
    """Unpack the archive of blob ``key`` as a supervisor would, and find the modules of the components.

    A submission finds out from its workers; what takes the place of something that runs must not. Nothing of the
    archive is executed. Raises :class:`InvalidTopology` for an archive that breaks a rule, for a module in it that is
    not valid Python, and for one that is neither in it nor installed here (not checked with another ``topology.python``).
    """
    with tempfile.TemporaryDirectory(prefix="storm-dagster-check-") as folder:
        path, root = Path(folder, "archive"), Path(folder, "code")
        try:
            with ctx.blobs.open(key) as source, path.open("wb") as sink:
                while chunk := source.read(_CHUNK):
                    sink.write(chunk)
        except KeyNotFound:
            raise NotAlive(f"the archive {key!r} does not exist, its upload has expired: upload it again") from None
        unpack_archive(path, root)
        for component, kind, part in spec.components():
            if part.object.python is not None:
                module = part.object.python.partition(":")[0]
                _check_module(root, module, f"{kind} {component!r}", elsewhere=bool(conf.get("topology.python")))


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
        return  # Another interpreter, a compiled module, a namespace package: only its worker knows.
    top = module.partition(".")[0]
    if not (root / top / "__init__.py").is_file():
        try:
            if importlib.util.find_spec(top) is not None:
                return
        except (ImportError, ValueError):
            pass
    raise InvalidTopology(
        f"module {module!r} of {what} is neither in the archive nor installed: pack it, or correct the name"
    )
