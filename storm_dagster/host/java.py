"""The Java runtime that ZooKeeper and Spark run on, and class data with which both start in less
than half the time.

The JVM parses class data once and maps it at later starts. These are Java's own archives (AppCDS):
the JVM writes one when it ends in order, and checks at each start that it belongs to this Java and
these jars. A damaged one is created again.
"""

import functools
import hashlib
import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from storm_dagster.model.errors import Unavailable

log: logging.Logger = logging.getLogger(__name__)

_CLAIM_SECS = 3600.0
"""Time in which a process makes an archive, before another may try."""
_KEPT_SECS = 30 * 86400.0

MINIMUM_JAVA = 17
"""The oldest Java that pyspark 4's jars, and so the embedded ZooKeeper among them, run on."""

_ADVICE = (
    f"install Java {MINIMUM_JAVA} or newer (Debian: apt-get install openjdk-17-jre-headless, "
    "macOS: brew install openjdk@17) or point JAVA_HOME at one"
)
_VERSION = re.compile(r'version "(?P<major>[0-9]+)(?:\.(?P<minor>[0-9]+))?')


@functools.cache
def java_version(java: str) -> int:
    """Major version of the Java command ``java``; ``Unavailable`` when it does not run."""
    try:
        # `-version` answers on standard error; a broken installation may hang, so the wait is
        # bounded.
        answer = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"Java at {java} does not run ({error}): {_ADVICE}") from None
    match = _VERSION.search(answer.stderr + answer.stdout)
    if answer.returncode != 0 or not match:
        output = (answer.stderr or answer.stdout).strip()
        raise Unavailable(f"Java at {java} does not print its version ({output!r:.200}): {_ADVICE}")
    major = int(match["major"])
    # Up to Java 8 the version was written 1.8.
    return int(match["minor"] or 0) if major == 1 else major


def java_command() -> str:
    """Path of a Java command of version 17 or newer: that of ``JAVA_HOME``, else the one on the
    path.

    Raises ``Unavailable`` with install advice when there is none, or when it is too old.
    """
    if home := os.environ.get("JAVA_HOME"):
        found = str(Path(home) / "bin" / "java")
        if not os.access(found, os.X_OK):
            raise Unavailable(f"JAVA_HOME is {home}, but {found} is not a program: {_ADVICE}")
    else:
        on_path = shutil.which("java")
        if on_path is None:
            raise Unavailable(f"no 'java' on the path and JAVA_HOME is not set: {_ADVICE}")
        found = on_path
    version = java_version(found)
    if version < MINIMUM_JAVA:
        raise Unavailable(
            f"Java at {found} has version {version}, {MINIMUM_JAVA} is needed: {_ADVICE}"
        )
    return found


def _folder() -> Path:
    """The cache folder of this user only: its files are mapped as code."""
    folder = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "storm-dagster"
        / "class-data"
    )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.geteuid() or folder.stat().st_mode & 0o022:
        raise PermissionError(f"others may write into {folder}")
    return folder


def _key(java: str, jars: Iterable[Path]) -> str:
    files = [Path(java).resolve(), *jars]
    seen = [
        f"{path}:{status.st_size}:{status.st_mtime_ns}" for path in files if (status := path.stat())
    ]
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:16]


def _complete(path: Path) -> bool:
    """Whether the JVM has finished writing it: the header comes last."""
    with path.open("rb") as stream:
        return any(stream.read(4))


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def class_data_options(name: str, java: str, jars: Iterable[Path]) -> list[str]:
    """JVM options that map the archive of ``name`` over these jars, or that make it when this JVM
    ends.

    Several may ask at once: one of them makes it. Archives that were not used for 30 days are
    removed with the next one. Empty without a cache folder (``XDG_CACHE_HOME``, else ``~/.cache``),
    or while another makes it.
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
