"""Java runtime of ZooKeeper and Spark, and class data that halves their start.

The JVM parses class data once and maps it at later starts. These are Java's archives (AppCDS): the
JVM writes one when it exits normally, and checks at each start that it belongs to this Java and
these jars. A damaged archive is replaced.
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

_CREATION_SECS = 3600.0
"""Time for one process to create an archive, before another one may try."""
_UNUSED_SECS = 30 * 86400.0
"""Time after which an unused archive is removed."""

MINIMUM_JAVA = 17
"""Oldest Java that the jars of pyspark 4 run on, the embedded ZooKeeper among them."""

_ADVICE = (
    f"install Java {MINIMUM_JAVA} or newer (Debian: apt-get install openjdk-17-jre-headless, "
    "macOS: brew install openjdk@17) or point JAVA_HOME at one"
)
# The output of ``java -version`` has a line such as: openjdk version "17.0.9" 2023-10-17.
_VERSION = re.compile(r'version "(?P<major>[0-9]+)(?:\.(?P<minor>[0-9]+))?')


@functools.cache
def java_version(java: str) -> int:
    """Major version of the Java command ``java``.

    Raises ``Unavailable`` if it does not run.
    """
    try:
        # `-version` prints to standard error. A broken installation may hang, so the wait is
        # bounded.
        result = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"Java at {java} does not run ({error}): {_ADVICE}") from None
    match = _VERSION.search(result.stderr + result.stdout)
    if result.returncode != 0 or not match:
        output = (result.stderr or result.stdout).strip()
        raise Unavailable(f"Java at {java} does not print its version ({output!r:.200}): {_ADVICE}")
    major = int(match["major"])
    if major == 1:
        # Up to Java 8 the version was written 1.8.
        return int(match["minor"] or 0)
    return major


def java_command() -> str:
    """Path of a Java command of version 17 or newer.

    It is the command of ``JAVA_HOME``, else the one on the path. Raises ``Unavailable`` with
    install advice if there is none, or it is too old.
    """
    java_home = os.environ.get("JAVA_HOME")
    if java_home:
        command = str(Path(java_home) / "bin" / "java")
        if not os.access(command, os.X_OK):
            raise Unavailable(
                f"JAVA_HOME is {java_home}, but {command} is not a program: {_ADVICE}"
            )
    else:
        on_path = shutil.which("java")
        if on_path is None:
            raise Unavailable(f"no 'java' on the path and JAVA_HOME is not set: {_ADVICE}")
        command = on_path
    version = java_version(command)
    if version < MINIMUM_JAVA:
        raise Unavailable(
            f"Java at {command} has version {version}, {MINIMUM_JAVA} is needed: {_ADVICE}"
        )
    return command


def _cache_folder() -> Path:
    """Cache folder that only this user may write.

    Its files are mapped as code.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "storm-dagster" / "class-data"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.geteuid() or folder.stat().st_mode & 0o022:
        raise PermissionError(f"others may write into {folder}")
    return folder


def _key(java: str, jars: Iterable[Path]) -> str:
    """Hash of the Java command and the jars.

    It covers their paths, sizes and times.
    """
    entries: list[str] = []
    for path in (Path(java).resolve(), *jars):
        status = path.stat()
        entries.append(f"{path}:{status.st_size}:{status.st_mtime_ns}")
    return hashlib.sha256("\n".join(entries).encode()).hexdigest()[:16]


def _is_complete(path: Path) -> bool:
    """True if the JVM has written the whole archive: the header comes last."""
    with path.open("rb") as stream:
        return any(stream.read(4))


def _stamp(path: Path) -> str:
    """Size and time of the last write of an archive, by which a changed one is recognized."""
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def class_data_options(name: str, java: str, jars: Iterable[Path]) -> list[str]:
    """JVM options that map or create the archive of ``name``.

    The archive is for these jars. A JVM creates the archive when it ends. Of several concurrent
    callers one creates it. Archives that were not used for 30 days are removed with the next one.
    The options are empty without a cache folder (``XDG_CACHE_HOME``, else ``~/.cache``), or while
    another process creates the archive.
    """
    try:
        folder = _cache_folder()
        archive = folder / f"{name}-{_key(java, jars)}.jsa"
        stamp_file = archive.with_suffix(".made")
        new_archive = archive.with_suffix(".new")
        # A JVM that has ended since the last call left it complete.
        if new_archive.exists() and _is_complete(new_archive):
            stamp_file.write_text(_stamp(new_archive), encoding="ascii")
            os.replace(new_archive, archive)
            _remove_unused(folder)
        quiet = "-Xlog:cds*=off"
        if archive.exists():
            # The JVM ignores the archive of other jars, but crashes with a truncated one.
            if stamp_file.exists() and stamp_file.read_text(encoding="ascii") == _stamp(archive):
                # A use: only the access time changes, since the stamp has the other one.
                os.utime(archive, ns=(time.time_ns(), archive.stat().st_mtime_ns))
                return [f"-XX:SharedArchiveFile={archive}", quiet]
            archive.unlink(missing_ok=True)
        if new_archive.exists() and time.time() - new_archive.stat().st_mtime < _CREATION_SECS:
            return []  # The JVM of another caller creates it.
        new_archive.touch(mode=0o600)
        return [f"-XX:ArchiveClassesAtExit={new_archive}", quiet]
    except (OSError, RuntimeError) as error:
        log.debug("no shared class data for %s: %s", name, error)
        return []


def _remove_unused(folder: Path) -> None:
    for path in folder.iterdir():
        status = path.stat()
        if time.time() - max(status.st_atime, status.st_mtime) > _UNUSED_SECS:
            path.unlink(missing_ok=True)
