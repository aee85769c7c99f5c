"""A TARGET made ready to upload: its description and its archive, in a folder of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from storm_dagster.model.topology import TopologySpec
from storm_dagster.packaging.archive import Archive, build_archive, collect_files, hash_file
from storm_dagster.packaging.describing import Description, describe_target
from storm_dagster.packaging.requirements import vendor_requirements

__all__ = ["Bundle", "bundle_target"]


@dataclass(frozen=True)
class Bundle:
    """All that a submission uploads, but for the conf."""

    name: str
    topology: TopologySpec
    archive: Archive


def _archive_of(
    found: Description, unpacked: Path, vendored: Path | None, home: Path | None, out: Path
) -> Archive:
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
    return build_archive(
        out, collect_files(found.root, found.include, leave_out=leave_out), vendored=vendored
    )


def bundle_target(
    target: str,
    args: Sequence[str] = (),
    *,
    folder: Path,
    home: Path | None = None,
    requirements: Path | None = None,
    timeout: float = 30.0,
) -> Bundle:
    """Describe ``target`` and build its archive inside ``folder`` (empty, the caller's to remove).

    ``home`` is left out of the archive; ``requirements`` are vendored into it. A ``.zip``, ``.jar`` or
    ``.whl`` without requirements is uploaded byte for byte. Errors as :func:`describe_target`,
    :func:`collect_files` and :func:`vendor_requirements`.
    """
    unpacked = folder / "unpacked"
    found = describe_target(target, args, timeout, unpacked=unpacked)
    vendored: Path | None = None
    if requirements is not None:
        vendored = folder / "vendored"
        vendor_requirements(requirements, vendored)
    archive = _archive_of(found, unpacked, vendored, home, folder / "archive.zip")
    return Bundle(found.name, found.topology, archive)
