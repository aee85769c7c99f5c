"""Folders in which the target of a run launched by hand must lie, found without importing or running anything."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from storm_dagster.model.errors import InvalidRequest
from storm_dagster.packaging.target import Target, parse_target

_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Of an environment in the project's folder: what others wrote."""
_EXAMPLES = Path(__file__).parents[2] / "examples"
_REMEDY = "submit it with `storm-dagster submit`, or set dagster.target.roots in the conf of the code location"


def _is_project(folder: Path) -> bool:
    """Whether a folder may be a root by default: the whole disk, a login folder and shared folders such as /tmp may not."""
    if folder == Path(folder.anchor) or folder == Path.home():
        return False
    try:
        return not folder.stat().st_mode & (stat.S_ISVTX | stat.S_IWOTH)
    except OSError:
        return False


def target_roots(conf: Any) -> list[Path]:
    """``dagster.target.roots``; by default the present folder, if it is a project's, and the examples beside this package."""
    given = conf.get("dagster.target.roots")
    if given is not None:
        return [Path(root).expanduser().resolve() for root in given]
    return [folder for folder in (Path.cwd(), _EXAMPLES) if _is_project(folder)]


def check_inside(text: str, roots: Iterable[Path], home: Path) -> None:
    """Refuse a TARGET with a file outside ``roots``, or in the cluster's ``home``, where other topologies' code lies.

    :class:`InvalidRequest` names the file and the roots. Packages are looked up on disk; nothing is imported.
    """
    target, roots = parse_target(text), list(roots)
    for file in _files(target):
        real = file.resolve()
        inside = any(real.is_relative_to(root) and not _INSTALLED & {*real.relative_to(root).parts} for root in roots)
        if not inside or real.is_relative_to(home.resolve()):
            shown = ", ".join(map(str, roots)) or "none"
            raise InvalidRequest(f"target {text!r}: {real} is not in a folder of targets ({shown}): {_REMEDY}")


def _files(target: Target) -> list[Path]:
    """The file of a target; of a module those of the packages around it, too, which are imported before it."""
    if target.path is not None:
        return [target.path]
    found: list[Path] = []
    places: list[str] | None = [str(Path.cwd()), *sys.path]
    parts = target.module.split(".")
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:end]), places) if places else None
        if spec is None:
            raise InvalidRequest(
                f"target {str(target)!r}: module {target.module!r} is in no folder of the path: {_REMEDY}"
            )
        places = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else None
        if spec.has_location and spec.origin:
            found.append(Path(spec.origin))
        elif end == len(parts):
            raise InvalidRequest(f"target {str(target)!r}: {target.module!r} has no file: {_REMEDY}")
    return found
