"""TARGET strings of ``submit``: parsed, checked against the disk, and described by a child process
with a deadline.

``file.py[:Name]``, ``package.module[:Name]``, or an archive (``.zip``, ``.jar``, ``.whl``,
``.tar.gz``) ``::module[:Name]``. The target of a run launched by hand must lie in certain folders,
which is found out without importing or running anything.
"""

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

from storm_dagster.model.errors import InvalidRequest, InvalidTopology, error_from_document
from storm_dagster.model.topology import TopologySpec, decode_topology
from storm_dagster.packaging.unpack import unpack_archive

ARCHIVE_SUFFIXES = (".zip", ".jar", ".whl", ".tar.gz")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Of an environment in the project's folder: what others wrote."""
_EXAMPLES = Path(__file__).parents[2] / "examples"
_REMEDY = "submit it with `storm-dagster submit`, or set dagster.target.roots in the conf of the code location"
DESCRIBING = "STORM_DAGSTER_DESCRIBING"
"""Set in the child's environment: a module that submits while it is described is refused."""
_MAX_REPLY = 64 * 1024 * 1024


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
        where = (
            f"{self.path}::{self.module}"
            if self.kind == "archive"
            else str(self.path or self.module)
        )
        return f"{where}:{self.attribute}" if self.attribute else where


def _attribute(text: str, target: str) -> str | None:
    if not text:
        return None
    if not _DOTTED.fullmatch(text):
        raise InvalidRequest(
            f"target {target!r}: {text!r} is not a Python name: write {target.split(':')[0]}:Name"
        )
    return text


def _existing(path: Path, target: str) -> Path:
    if path.is_dir():
        raise InvalidRequest(
            f"target {target!r}: {path} is a folder: name the file in it that holds the topology"
        )
    if not path.is_file():
        raise InvalidRequest(
            f"target {target!r}: file {path} does not exist (looked in {Path.cwd()})"
        )
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
            raise InvalidRequest(
                f"target {text!r}: {module!r} is not a module name: write {archive}::module:Name"
            )
        return Target("archive", module, _attribute(name, text), _existing(Path(archive), text))
    if text.lower().endswith(ARCHIVE_SUFFIXES):
        raise InvalidRequest(
            f"target {text!r} names no module in the archive: write {text}::module[:Name]"
        )
    head, _, name = text.rpartition(":") if re.search(r"\.py:[^/]*$", text) else (text, "", "")
    if head.endswith(".py"):
        path = _existing(Path(head), text)
        if "." in path.stem:
            raise InvalidRequest(
                f"target {text!r}: {path.name} cannot be imported: rename it without the inner dot"
            )
        return Target("file", path.stem, _attribute(name, text), path)
    module, _, name = text.partition(":")
    if not _DOTTED.fullmatch(module):
        raise InvalidRequest(
            f"target {text!r} is neither file.py[:Name], package.module[:Name] nor archive.zip::module[:Name]"
        )
    return Target("module", module, _attribute(name, text))


def _is_project(folder: Path) -> bool:
    """Whether a folder may be a root by default: the whole disk, a login folder and shared folders
    such as /tmp may not.
    """
    if folder == Path(folder.anchor) or folder == Path.home():
        return False
    try:
        return not folder.stat().st_mode & (stat.S_ISVTX | stat.S_IWOTH)
    except OSError:
        return False


def target_roots(conf: Any) -> list[Path]:
    """``dagster.target.roots``; by default the present folder, if it is a project's, and the
    examples beside this package.
    """
    if (given := conf.get("dagster.target.roots")) is not None:
        return [Path(root).expanduser().resolve() for root in given]
    return [folder for folder in (Path.cwd(), _EXAMPLES) if _is_project(folder)]


def check_inside(text: str, roots: Iterable[Path], home: Path) -> None:
    """Refuse a TARGET with a file outside ``roots``, or in the cluster's ``home``, where other
    topologies' code lies.

    :class:`InvalidRequest` names the file and the roots. Packages are looked up on disk; nothing is
    imported.
    """
    target, roots = parse_target(text), list(roots)
    for file in _files(target):
        real = file.resolve()
        inside = any(
            real.is_relative_to(root) and not _INSTALLED & {*real.relative_to(root).parts}
            for root in roots
        )
        if not inside or real.is_relative_to(home.resolve()):
            shown = ", ".join(map(str, roots)) or "none"
            raise InvalidRequest(
                f"target {text!r}: {real} is not in a folder of targets ({shown}): {_REMEDY}"
            )


def _files(target: Target) -> list[Path]:
    """The file of a target; of a module those of the packages around it, too, which are imported
    before it.
    """
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
        places = (
            list(spec.submodule_search_locations)
            if spec.submodule_search_locations is not None
            else None
        )
        if spec.has_location and spec.origin:
            found.append(Path(spec.origin))
        elif end == len(parts):
            raise InvalidRequest(
                f"target {str(target)!r}: {target.module!r} has no file: {_REMEDY}"
            )
    return found


@dataclass(frozen=True)
class Description:
    """Description of a target, and the files that travel with it."""

    target: Target
    topology: TopologySpec
    name: str
    """Its own name; else its module's, or the attribute's when the module holds several."""
    root: Path
    """The folder that is on the import path, in submit and worker alike."""
    include: list[str] | None
    """Names right below ``root`` that travel; ``None``: everything."""


def _environment() -> dict[str, str]:
    env = {**os.environ, DESCRIBING: "1"}
    # The child starts in another folder than its caller.
    paths = [os.path.abspath(part) for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    if paths:
        env["PYTHONPATH"] = os.pathsep.join(paths)
    return env


def _run(target: Target, request: dict[str, Any], scratch: Path, timeout: float) -> Any:
    """The child's reply document; :class:`InvalidTopology` when it hangs, crashes or answers
    nonsense.
    """
    request_path, reply_path, output = (
        scratch / "request.json",
        scratch / "reply.json",
        scratch / "output",
    )
    request_path.write_text(json.dumps(request), encoding="utf-8")
    empty = scratch / "empty"
    empty.mkdir()
    with output.open("wb") as stream:
        # Started in an empty folder: nothing there can shadow a module that the child itself needs.
        child = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "storm_dagster.packaging.describe",
                str(request_path),
                str(reply_path),
            ],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=empty,
            env=_environment(),
            start_new_session=True,
        )
        late = threading.Event()
        # A wait with a timeout would only look every 50 ms.
        patience = threading.Timer(timeout, lambda: (late.set(), child.kill()))
        patience.start()
        try:
            code = child.wait()
        finally:
            patience.cancel()
            # Whatever the module started goes with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if late.is_set():
        raise InvalidTopology(
            f"target {target} was not described within {timeout:g} s: its import (or callable) hangs; put long "
            'work into initialize() or under if __name__ == "__main__"'
        )
    tail = output.read_bytes()[-2000:].decode("utf-8", "replace").strip()
    if not reply_path.is_file() or reply_path.stat().st_size > _MAX_REPLY:
        how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
        raise InvalidTopology(
            f"target {target} could not be described: the interpreter {how}"
            + (f"; its last output: {tail}" if tail else "")
        )
    return json.loads(reply_path.read_bytes())


def describe_target(
    target: str | Target,
    args: Sequence[str] = (),
    timeout: float = 30.0,
    *,
    unpacked: Path | None = None,
) -> Description:
    """The topology that ``target`` names, described by a child process within ``timeout`` seconds.

    User code is never imported here. A callable target is called with ``args`` (strings). An
    archive is unpacked, safely, into ``unpacked`` (default: a temporary folder that is gone
    afterwards, so that ``root`` is only a name then). Raises :class:`InvalidRequest` when the
    target's text names nothing, and :class:`InvalidTopology` when it is not importable, has no such
    attribute, holds several topologies or none, raises, is no topology, crashes or hangs.
    """
    parsed = parse_target(target) if isinstance(target, str) else target
    with tempfile.TemporaryDirectory(prefix="storm-dagster-describe-") as text:
        scratch = Path(text)
        root = parsed.path and parsed.path.parent
        if parsed.path is not None and parsed.kind == "archive":
            root = unpacked or scratch / "archive"
            unpack_archive(parsed.path, root)
        request = {
            "cwd": os.getcwd(),
            "root": str(root) if root else None,
            "file": str(parsed.path) if parsed.kind == "file" else None,
            "module": parsed.module,
            "attribute": parsed.attribute,
            "args": [str(arg) for arg in args],
        }
        reply = _run(parsed, request, scratch, timeout)
    if "ok" not in reply:
        error = error_from_document(reply)
        raise type(error)(f"target {parsed}: {error.message}")
    found = reply["ok"]
    topology = decode_topology(json.dumps(found["topology"]))
    return Description(parsed, topology, found["name"], Path(found["root"]), found["include"])
