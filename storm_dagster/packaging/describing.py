"""Describe a TARGET without importing it: a child process does, with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storm_dagster.model.errors import InvalidTopology, error_from_document
from storm_dagster.model.topology import TopologySpec, decode_topology
from storm_dagster.packaging.target import Target, parse_target
from storm_dagster.packaging.unpack import unpack_archive

DESCRIBING = "STORM_DAGSTER_DESCRIBING"
"""Set in the child's environment: a module that submits while it is described is refused."""
_MAX_REPLY = 64 * 1024 * 1024


@dataclass(frozen=True)
class Description:
    """Description of a target, and the files that travel with it."""

    target: Target
    topology: TopologySpec
    name: str
    """Its own name; else its module's, or the attribute's when the module holds several."""
    root: Path
    """The folder that is on the import path, in submit and worker alike."""
    include: tuple[str, ...] | None
    """Names right below ``root`` that travel; ``None``: everything."""


def _environment() -> dict[str, str]:
    env = dict(os.environ)
    env[DESCRIBING] = "1"
    # The child starts in another folder than its caller.
    paths = [os.path.abspath(part) for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    if paths:
        env["PYTHONPATH"] = os.pathsep.join(paths)
    return env


def _run(target: Target, request: dict[str, Any], scratch: Path, timeout: float) -> Any:
    """The child's reply document; :class:`InvalidTopology` when it hangs, crashes or answers nonsense."""
    request_path, reply_path, output = scratch / "request.json", scratch / "reply.json", scratch / "output"
    request_path.write_text(json.dumps(request), encoding="utf-8")
    empty = scratch / "empty"
    empty.mkdir()
    with output.open("wb") as stream:
        # Started in an empty folder: nothing there can shadow a module that the child itself needs.
        child = subprocess.Popen(
            [sys.executable, "-m", "storm_dagster.packaging.describe", str(request_path), str(reply_path)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=empty,
            env=_environment(),
            start_new_session=True,
        )
        try:
            code = child.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Whatever the module started goes with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if code is None:
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
    target: str | Target, args: Sequence[str] = (), timeout: float = 30.0, *, unpacked: Path | None = None
) -> Description:
    """The topology that ``target`` names, described by a child process within ``timeout`` seconds.

    User code is never imported here. A callable target is called with ``args`` (strings). An archive is
    unpacked, safely, into ``unpacked`` (default: a temporary folder that is gone afterwards, so that
    ``root`` is only a name then). Raises :class:`InvalidRequest` when the target's text names nothing, and
    :class:`InvalidTopology` when it is not importable, has no such attribute, holds several topologies or
    none, raises, is no topology, crashes or hangs.
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
    include = found["include"]
    return Description(
        parsed, topology, found["name"], Path(found["root"]), None if include is None else tuple(include)
    )
