"""Archives of Java class data, which halve the start of ZooKeeper and Spark.

A JVM parses the classes of its jars at each start. With such an archive (Java's AppCDS) it maps
them instead. A JVM that was started for that purpose writes the archive when it exits, which takes
ten seconds for Spark: so no JVM that serves a cluster writes one. Each JVM checks at its start that
the archive belongs to this Java, and to these jars at these paths.
"""

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from storm_dagster.host.files import lock_file
from storm_dagster.model.errors import Conflict, Unavailable

log: logging.Logger = logging.getLogger(__name__)

_UNUSED_SECS = 30 * 86400.0
"""Time after which an unused archive is removed."""
_QUIET = "-Xlog:cds*=off"
"""JVM option: nothing is logged about the archive."""


@dataclass(frozen=True)
class ClassData:
    """Archive of one program, which need not exist yet."""

    path: Path | None
    """The archive; ``None`` without a cache folder that only this user may write."""

    @staticmethod
    def of(name: str, java: str, jars: Iterable[Path]) -> "ClassData":
        """Return the archive of program ``name`` for this Java command and these jars.

        It is in ``XDG_CACHE_HOME``, else ``~/.cache``.
        """
        try:
            folder = _cache_folder()
            return ClassData(folder / f"{name}-{_key(java, jars)}.jsa")
        except (OSError, RuntimeError) as error:
            log.debug("no class data for %s: %s", name, error)
            return ClassData(None)

    @property
    def _stamp_path(self) -> Path:
        """File with size and time of the complete archive."""
        assert self.path is not None
        return self.path.with_suffix(".made")

    def exists(self) -> bool:
        """True if the archive is complete and unchanged since it was made.

        A JVM ignores the archive of other jars, but crashes with a truncated one.
        """
        if self.path is None:
            return False
        try:
            return self._stamp_path.read_text(encoding="ascii") == _stamp(self.path)
        except (OSError, UnicodeDecodeError):
            return False

    def options(self) -> list[str]:
        """Return the JVM options that map the archive; none if there is no complete one."""
        if self.path is None or not self.exists():
            return []
        # A use. Only the access time changes, since the stamp has the other one. The file system of
        # an image is read-only.
        with suppress(OSError):
            os.utime(self.path, ns=(time.time_ns(), self.path.stat().st_mtime_ns))
        return [f"-XX:SharedArchiveFile={self.path}", _QUIET]

    @contextmanager
    def creation(self) -> Iterator[list[str]]:
        """Yield the options of a JVM that writes the archive when it exits.

        The JVM runs and ends inside of the block. A complete archive then replaces the former one,
        and archives that were not used for 30 days are removed, with Spark homes of environments
        that no longer exist. Raises :class:`Conflict` if another process makes this archive, and
        :class:`Unavailable` if the JVM has written none, or there is no cache folder.
        """
        if self.path is None:
            raise Unavailable(
                "there is no folder for class data that only this user may write: "
                "set XDG_CACHE_HOME to one"
            )
        new_archive = self.path.with_suffix(".new")
        with self.path.with_suffix(".lock").open("a") as lock:
            try:
                lock_file(lock, wait=False)
            except BlockingIOError:
                raise Conflict(f"another process makes the class data {self.path}") from None
            new_archive.unlink(missing_ok=True)
            try:
                yield [f"-XX:ArchiveClassesAtExit={new_archive}", _QUIET]
                if not _is_complete(new_archive):
                    raise Unavailable(
                        f"Java has written no class data to {new_archive}: look at the free disk "
                        "of its folder"
                    )
                self._stamp_path.write_text(_stamp(new_archive), encoding="ascii")
                os.replace(new_archive, self.path)
                _remove_unused(self.path.parent)
            finally:
                new_archive.unlink(missing_ok=True)


def _cache_folder() -> Path:
    """Cache folder that only this user may write, created if necessary.

    Its files are mapped as code.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "storm-dagster" / "class-data"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.geteuid() or folder.stat().st_mode & 0o022:
        raise PermissionError(f"others may write into {folder}")
    return folder


def _key(java: str, jars: Iterable[Path]) -> str:
    """Hash of the Java command and the jars: of their paths, sizes and times."""
    entries: list[str] = []
    for path in (Path(java).resolve(), *jars):
        status = path.stat()
        entries.append(f"{path}:{status.st_size}:{status.st_mtime_ns}")
    return hashlib.sha256("\n".join(entries).encode()).hexdigest()[:16]


def _is_complete(path: Path) -> bool:
    """True if the JVM has written the whole archive: the header comes last."""
    try:
        with path.open("rb") as stream:
            return any(stream.read(4))
    except FileNotFoundError:
        return False


def _stamp(path: Path) -> str:
    """Size and time of the last write of an archive, by which a changed one is recognized."""
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _remove_unused(folder: Path) -> None:
    for path in folder.iterdir():
        status = path.stat()
        if path.is_dir():
            # A Spark home, which has only links: it goes with the environment that it links to.
            links = list(path.iterdir())
            if links and not any(link.exists() for link in links):
                shutil.rmtree(path, ignore_errors=True)
            continue
        if time.time() - max(status.st_atime, status.st_mtime) > _UNUSED_SECS:
            path.unlink(missing_ok=True)
