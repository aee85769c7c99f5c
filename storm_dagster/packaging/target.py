"""TARGET strings of ``submit``: their parser, checks and description.

A target is ``file.py[:Name]``, ``package.module[:Name]``, or an archive (``.zip``, ``.jar``,
``.whl``, ``.tar.gz``) ``::module[:Name]``. A child process with a deadline describes it. The target
of a run launched by hand must lie in certain folders, which is checked without importing or running
code.
"""

import json
import os
import re
import stat
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

from storm_dagster.host.children import running_child
from storm_dagster.model.errors import InvalidRequest, InvalidTopology, error_from_document
from storm_dagster.model.topology import TopologySpec, decode_topology
from storm_dagster.packaging.unpack import unpack_archive

ARCHIVE_SUFFIXES = (".zip", ".jar", ".whl", ".tar.gz")
"""Ends of the names of archives, in lower case."""
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
"""Python names, joined by dots."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of an environment in the project's folder, with code of others."""
_EXAMPLES = Path(__file__).parents[2] / "examples"
"""Examples beside this package; absent where only the package is installed."""
_REMEDY = (
    "submit it with `storm-dagster submit`, "
    "or set dagster.target.roots in the conf of the code location"
)
DESCRIBING = "STORM_DAGSTER_DESCRIBING"
"""Variable in the child's environment.

It marks the process, so that a submission by the described module is refused.
"""
_MAX_REPLY = 64 * 1024 * 1024
"""Bytes of a reply above which the target is refused."""


@dataclass(frozen=True)
class Target:
    """A parsed TARGET."""

    kind: Literal["file", "module", "archive"]
    module: str
    """Name for its import, in submit and worker alike; for a file its stem."""
    attribute: str | None = None
    """The topology in it, or a callable that makes it; ``None``: the only topology."""
    path: Path | None = None
    """The file or archive, absolute; ``None`` for a module."""

    def __str__(self) -> str:
        text = str(self.path or self.module)
        if self.kind == "archive":
            text = f"{self.path}::{self.module}"
        return f"{text}:{self.attribute}" if self.attribute else text


def _attribute(text: str, target: str) -> str | None:
    """The checked name of an attribute; ``None`` if the target names none."""
    if not text:
        return None
    if not _DOTTED.fullmatch(text):
        raise InvalidRequest(
            f"target {target!r}: {text!r} is not a Python name: write {target.split(':')[0]}:Name"
        )
    return text


def _existing(path: Path, target: str) -> Path:
    """The absolute path of an existing file; :class:`InvalidRequest` for any other."""
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
    """Parse a TARGET; :class:`InvalidRequest` names the problem.

    A file or archive must exist, a module is not looked for.
    """
    if "::" in text:
        archive, _, member = text.partition("::")
        if not archive.lower().endswith(ARCHIVE_SUFFIXES):
            raise InvalidRequest(
                f"target {text!r}: {archive!r} is not an archive ({', '.join(ARCHIVE_SUFFIXES)}): "
                "write archive.zip::module:Name, or file.py:Name"
            )
        module, _, name = member.partition(":")
        if not _DOTTED.fullmatch(module):
            raise InvalidRequest(
                f"target {text!r}: {module!r} is not a module name: write {archive}::module:Name"
            )
        return Target("archive", module, _attribute(name, text), _existing(Path(archive), text))
    if text.lower().endswith(ARCHIVE_SUFFIXES):
        raise InvalidRequest(
            f"target {text!r} names no module in the archive: write {text}::module[:Name]"
        )
    # A colon in a folder's name does not begin an attribute.
    file = text
    name = ""
    if re.search(r"\.py:[^/]*$", text):
        file, _, name = text.rpartition(":")
    if file.endswith(".py"):
        path = _existing(Path(file), text)
        if "." in path.stem:
            raise InvalidRequest(
                f"target {text!r}: {path.name} cannot be imported: rename it without the inner dot"
            )
        return Target("file", path.stem, _attribute(name, text), path)
    module, _, name = text.partition(":")
    if not _DOTTED.fullmatch(module):
        raise InvalidRequest(
            f"target {text!r} is neither file.py[:Name], package.module[:Name] "
            "nor archive.zip::module[:Name]"
        )
    return Target("module", module, _attribute(name, text))


def _is_project(folder: Path) -> bool:
    """True if a folder may be a root by default.

    The root of the disk, a login folder and shared folders such as /tmp must not.
    """
    if folder == Path(folder.anchor) or folder == Path.home():
        return False
    try:
        return not folder.stat().st_mode & (stat.S_ISVTX | stat.S_IWOTH)
    except OSError:
        return False


def target_roots(conf: Any) -> list[Path]:
    """Folders that may contain targets: ``dagster.target.roots``.

    ``conf`` is the code location's. By default the current folder, if it is a project's, and the
    examples beside this package.
    """
    configured = conf.get("dagster.target.roots")
    if configured is not None:
        return [Path(root).expanduser().resolve() for root in configured]
    return [folder for folder in (Path.cwd(), _EXAMPLES) if _is_project(folder)]


def check_inside(text: str, roots: Iterable[Path], home: Path) -> None:
    """Refuse a TARGET with a file outside ``roots`` or in the cluster's ``home``.

    ``home`` has the code of other topologies. :class:`InvalidRequest` names the file and the roots.
    Packages are searched on disk, without an import.
    """
    target = parse_target(text)
    roots = list(roots)
    for file in _files(target):
        real = file.resolve()
        is_inside = any(_is_project_file(real, root) for root in roots)
        if not is_inside or real.is_relative_to(home.resolve()):
            root_list = ", ".join(map(str, roots)) or "none"
            raise InvalidRequest(
                f"target {text!r}: {real} is not in a folder of targets ({root_list}): {_REMEDY}"
            )


def _is_project_file(file: Path, root: Path) -> bool:
    """True if the file is below ``root``, and not below an environment in it."""
    if not file.is_relative_to(root):
        return False
    return not _INSTALLED & {*file.relative_to(root).parts}


def _files(target: Target) -> list[Path]:
    """The file of a target; for a module also those of the packages around it.

    The packages are imported before the module. :class:`InvalidRequest` if one is not found on the
    path, or if the module has no file.
    """
    if target.path is not None:
        return [target.path]
    files: list[Path] = []
    locations: list[str] = [str(Path.cwd()), *sys.path]
    parts = target.module.split(".")
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:end]), locations) if locations else None
        if spec is None:
            raise InvalidRequest(
                f"target {str(target)!r}: module {target.module!r} is in no folder of the path: "
                f"{_REMEDY}"
            )
        locations = list(spec.submodule_search_locations or ())
        if spec.has_location and spec.origin:
            files.append(Path(spec.origin))
        # A package around the module may be a namespace, which has no file.
        elif end == len(parts):
            raise InvalidRequest(
                f"target {str(target)!r}: {target.module!r} has no file: {_REMEDY}"
            )
    return files


@dataclass(frozen=True)
class Description:
    """Description of a target, and its files to pack."""

    target: Target
    topology: TopologySpec
    name: str
    """Name of the topology: its own, else its module's.

    If the module has several topologies, the name of the attribute.
    """
    root: Path
    """The folder that is on the import path, in submit and worker alike."""
    include: list[str] | None
    """Names directly below ``root`` to pack; ``None``: all."""


def _environment() -> dict[str, str]:
    """The environment of the child."""
    env = {**os.environ, DESCRIBING: "1"}
    # The child starts in another folder than its caller, so that relative paths would be wrong.
    paths = [os.path.abspath(part) for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    if paths:
        env["PYTHONPATH"] = os.pathsep.join(paths)
    return env


def _run(target: Target, request: dict[str, Any], scratch: Path, timeout: float) -> Any:
    """The child's reply document.

    Files of the exchange are written into ``scratch``. The child and all processes that it started
    have ended afterwards. :class:`InvalidTopology` if the child hangs, crashes or writes no usable
    reply.
    """
    request_path = scratch / "request.json"
    reply_path = scratch / "reply.json"
    output = scratch / "output"
    request_path.write_text(json.dumps(request), encoding="utf-8")
    empty = scratch / "empty"
    empty.mkdir()
    command = [
        sys.executable,
        "-m",
        "storm_dagster.packaging.describe",
        str(request_path),
        str(reply_path),
    ]
    is_late = threading.Event()
    with (
        output.open("wb") as stream,
        # Started in an empty folder, so that no file can shadow a module that the child needs.
        # Processes that the module started end with it: they are in the child's group.
        running_child(command, stream, environment=_environment(), folder=empty) as child,
    ):

        def end_late_child() -> None:
            is_late.set()
            child.kill()

        # A wait with a timeout would only poll every 50 ms.
        timer = threading.Timer(timeout, end_late_child)
        timer.start()
        try:
            code = child.wait()
        finally:
            timer.cancel()
    if is_late.is_set():
        raise InvalidTopology(
            f"target {target} was not described within {timeout:g} s: "
            "its import (or callable) hangs; put long work into initialize() "
            'or under if __name__ == "__main__"'
        )
    if not reply_path.is_file() or reply_path.stat().st_size > _MAX_REPLY:
        raise _no_reply(target, code, output)
    return json.loads(reply_path.read_bytes())


def _no_reply(target: Target, code: int, output: Path) -> InvalidTopology:
    """The error of a child without a usable reply, with the end of its output."""
    end = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
    message = f"target {target} could not be described: the interpreter {end}"
    tail = output.read_bytes()[-2000:].decode("utf-8", "replace").strip()
    if tail:
        message += f"; its last output: {tail}"
    return InvalidTopology(message)


def describe_target(
    target: str | Target,
    args: Sequence[str] = (),
    timeout: float = 30.0,
    *,
    unpacked: Path | None = None,
) -> Description:
    """Describe the topology of ``target`` in a child process.

    The child has ``timeout`` seconds. User code is never imported in this process. A callable
    target is called with ``args`` (strings). An archive is unpacked, safely, into ``unpacked``
    (default: a temporary folder that is removed, so that ``root`` is then only a name). Raises
    :class:`InvalidRequest` for a text that is not a target, and :class:`InvalidTopology` if the
    target is not importable, has no such attribute, has several topologies or none, raises, is not
    a topology, crashes or hangs.
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
    document = reply["ok"]
    return Description(
        parsed,
        topology=decode_topology(json.dumps(document["topology"])),
        name=document["name"],
        root=Path(document["root"]),
        include=document["include"],
    )
