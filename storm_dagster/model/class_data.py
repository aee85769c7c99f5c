"""Class data of a JVM, parsed once and mapped at later starts: ZooKeeper and Spark start in less than half the time.

Java's own archives (AppCDS): the JVM writes one when it ends in order, and checks at each start that it belongs to
this Java and these jars. A damaged one is created again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

log: logging.Logger = logging.getLogger(__name__)

_CLAIM_SECS = 3600.0
"""Time in which a process makes an archive, before another may try."""
_KEPT_SECS = 30 * 86400.0


def _folder() -> Path:
    """The cache folder of this user only: its files are mapped as code."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "storm-dagster" / "class-data"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.geteuid() or folder.stat().st_mode & 0o022:
        raise PermissionError(f"others may write into {folder}")
    return folder


def _key(java: str, jars: Iterable[Path]) -> str:
    files = [Path(java).resolve(), *jars]
    seen = [f"{path}:{status.st_size}:{status.st_mtime_ns}" for path in files if (status := path.stat())]
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:16]


def _complete(path: Path) -> bool:
    """Whether the JVM has finished writing it: the header comes last."""
    with path.open("rb") as stream:
        return any(stream.read(4))


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def class_data_options(name: str, java: str, jars: Iterable[Path]) -> list[str]:
    """JVM options that map the archive of ``name`` over these jars, or that make it when this JVM ends.

    Several may ask at once: one of them makes it. Archives that were not used for 30 days are removed with the next
    one. Empty without a cache folder (``XDG_CACHE_HOME``, else ``~/.cache``), or while another makes it.
    """
    try:
        folder = _folder()
        archive = folder / f"{name}-{_key(java, jars)}.jsa"
        made, making = archive.with_suffix(".made"), archive.with_suffix(".new")
        if making.exists() and _complete(making):
            made.write_text(_stamp(making), encoding="ascii")
            os.replace(making, archive)
            for old in folder.iterdir():
                if time.time() - max(old.stat().st_atime, old.stat().st_mtime) > _KEPT_SECS:
                    old.unlink(missing_ok=True)
        quiet = "-Xlog:cds*=off"
        if archive.exists():
            # The JVM ignores another's archive, and crashes over one that was cut off.
            if made.exists() and made.read_text(encoding="ascii") == _stamp(archive):
                os.utime(archive, ns=(time.time_ns(), archive.stat().st_mtime_ns))
                return [f"-XX:SharedArchiveFile={archive}", quiet]
            archive.unlink(missing_ok=True)
        if making.exists() and time.time() - making.stat().st_mtime < _CLAIM_SECS:
            return []
        making.touch(mode=0o600)
        return [f"-XX:ArchiveClassesAtExit={making}", quiet]
    except (OSError, RuntimeError) as error:
        log.debug("no shared class data for %s: %s", name, error)
        return []
