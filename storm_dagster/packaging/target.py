"""TARGET strings of ``submit``: parsed, and checked against the disk.

``file.py[:Name]``, ``package.module[:Name]``, or an archive (``.zip``, ``.jar``, ``.whl``, ``.tar.gz``)
``::module[:Name]``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from storm_dagster.model.errors import InvalidRequest

ARCHIVE_SUFFIXES = (".zip", ".jar", ".whl", ".tar.gz")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


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
