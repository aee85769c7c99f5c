"""TARGET strings of ``submit``: parsed, and checked against the disk.

``file.py[:Name]``, ``package.module[:Name]``, or an archive (``.zip``, ``.jar``, ``.whl``, ``.tar.gz``)
``::module[:Name]``. The target of a run launched by hand must lie in certain folders, which is found out without importing
or running anything.
"""

from __future__ import annotations

import re
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

from storm_dagster.model.errors import InvalidRequest

ARCHIVE_SUFFIXES = (".zip", ".jar", ".whl", ".tar.gz")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Of an environment in the project's folder: what others wrote."""
_EXAMPLES = Path(__file__).parents[2] / "examples"
_REMEDY = "submit it with `storm-dagster submit`, or set dagster.target.roots in the conf of the code location"


@dataclass(frozen=True)
class Target:
    """A parsed TARGET."""

    kind: Literal["file", "module", "archive"]
    module: str
    """Name under which it is imported, in submit and worker alike; a file's is its stem."""
    attribute: str | None = None
    """The topology in it, or a callable that makes it; ``None``: the only one there is."""
    path: Path | None = None
    """The file or archive, absolute."""

    def __str__(self) -> str:
        where = f"{self.path}::{self.module}" if self.kind == "archive" else str(self.path or self.module)
        return f"{where}:{self.attribute}" if self.attribute else where


def _attribute(text: str, target: str) -> str | None:
    if not text:
        return None
    if not _DOTTED.fullmatch(text):
        raise InvalidRequest(f"target {target!r}: {text!r} is not a Python name: write {target.split(':')[0]}:Name")
    return text


def _existing(path: Path, target: str) -> Path:
    if path.is_dir():
        raise InvalidRequest(f"target {target!r}: {path} is a folder: name the file in it that holds the topology")
    if not path.is_file():
        raise InvalidRequest(f"target {target!r}: file {path} does not exist (looked in {Path.cwd()})")
    return path.absolute()


def parse_target(text: str) -> Target:
    """The target that ``text`` names; :class:`InvalidRequest` names the problem."""
    if "::" in text:
        archive, _, rest = text.partition("::")
        if not archive.lower().endswith(ARCHIVE_SUFFIXES):
            raise InvalidRequest(
                f"target {text!r}: {archive!r} is not an archive ({', '.join(ARCHIVE_SUFFIXES)}): "
                "write archive.zip::module:Name, or file.py:Name"
            )
        module, _, name = rest.partition(":")
        if not _DOTTED.fullmatch(module):
            raise InvalidRequest(f"target {text!r}: {module!r} is not a module name: write {archive}::module:Name")
        return Target("archive", module, _attribute(name, text), _existing(Path(archive), text))
    if text.lower().endswith(ARCHIVE_SUFFIXES):
        raise InvalidRequest(f"target {text!r} names no module in the archive: write {text}::module[:Name]")
    head, _, name = text.rpartition(":") if re.search(r"\.py:[^/]*$", text) else (text, "", "")
    if head.endswith(".py"):
        path = _existing(Path(head), text)
        if "." in path.stem:
            raise InvalidRequest(f"target {text!r}: {path.name} cannot be imported: rename it without the inner dot")
        return Target("file", path.stem, _attribute(name, text), path)
    module, _, name = text.partition(":")
    if not _DOTTED.fullmatch(module):
        raise InvalidRequest(
            f"target {text!r} is neither file.py[:Name], package.module[:Name] nor archive.zip::module[:Name]"
        )
    return Target("module", module, _attribute(name, text))


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
