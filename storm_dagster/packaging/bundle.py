"""A TARGET made ready to upload: its description and its archive, in a folder of their own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from storm_dagster.model.errors import InvalidRequest, InvalidTopology, Unavailable
from storm_dagster.model.topology import TopologySpec
from storm_dagster.packaging.archive import Archive, build_archive, collect_files, hash_file
from storm_dagster.packaging.describing import Description, describe_target

_PIP_SECS = 600.0


@dataclass(frozen=True)
class Bundle:
    """Parts of an upload except the conf."""

    name: str
    topology: TopologySpec
    archive: Archive


def _archive_of(found: Description, unpacked: Path, vendored: Path | None, home: Path | None, out: Path) -> Archive:
    path = found.target.path
    if found.target.kind == "archive" and path is not None:
        if vendored is None and not path.name.lower().endswith(".tar.gz"):
            return Archive(path, hash_file(path), path.stat().st_size, 0)
        # Workers get a zip; and what is to be vendored goes into it. The user chose these files: all travel.
        files = {
            entry.relative_to(unpacked).as_posix(): entry
            for entry in sorted(unpacked.rglob("*"))
            if entry.is_file() and not entry.is_symlink()
        }
        return build_archive(out, files, vendored=vendored)
    leave_out = [home] if home is not None else []
    return build_archive(out, collect_files(found.root, found.include, leave_out=leave_out), vendored=vendored)


def vendor_requirements(file: Path, into: Path) -> None:
    """Install what ``file`` lists, with its dependencies, into the folder ``into``.

    The packages are those of this interpreter and platform: workers must run the same. Raises
    :class:`InvalidRequest` when the file is missing, :class:`InvalidTopology` with pip's last words when it
    fails, :class:`Unavailable` when there is no pip or it takes longer than ten minutes.
    """
    if not file.is_file():
        raise InvalidRequest(f"--requirements {file}: the file does not exist")
    if importlib.util.find_spec("pip") is None:
        raise Unavailable(f"--requirements needs pip, which {sys.executable} lacks: run {sys.executable} -m ensurepip")
    command = [
        sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--no-compile",
        "--quiet", "--target", str(into), "--requirement", str(file.absolute()),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_PIP_SECS,
            cwd=file.absolute().parent, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Unavailable(f"pip did not finish {file} within {_PIP_SECS:g} s: try again, or vendor by hand") from None
    if done.returncode != 0:
        words = done.stdout.decode("utf-8", "replace").strip()[-1500:]
        raise InvalidTopology(f"pip cannot install {file}: {words}")


def bundle_target(
    target: str, args: Sequence[str] = (), *, folder: Path, home: Path | None = None, requirements: Path | None = None
) -> Bundle:
    """Describe ``target`` and build its archive inside ``folder`` (empty, the caller's to remove).

    ``home`` is left out of the archive; ``requirements`` are vendored into it. A ``.zip``, ``.jar`` or
    ``.whl`` without requirements is uploaded byte for byte. Errors as :func:`describe_target`,
    :func:`collect_files` and :func:`vendor_requirements`.
    """
    unpacked = folder / "unpacked"
    found = describe_target(target, args, unpacked=unpacked)
    vendored: Path | None = None
    if requirements is not None:
        vendored = folder / "vendored"
        vendor_requirements(requirements, vendored)
    archive = _archive_of(found, unpacked, vendored, home, folder / "archive.zip")
    return Bundle(found.name, found.topology, archive)
