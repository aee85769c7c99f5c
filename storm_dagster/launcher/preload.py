"""Preloading of what runs need, and detection of changed files."""

import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import signal
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from storm_dagster.host.forks import threads, without_library_threads
from storm_dagster.security.settings import public_authorities

log: logging.Logger = logging.getLogger(__name__)

# Modules of the placement step of a submission.
_PLACEMENT = (
    "pandas",
    "pyarrow.compute",
    "dagster_pyspark",
    "pyspark.sql.connect.session",
    "storm_dagster.spark.assignment.pipeline",
    "storm_dagster.spark.planner",
)
_REHEARSAL_SECS = 120
_WATCHED = (".py", ".yaml", ".yml", ".toml")
_NO_READING = os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY
_UNWATCHED = ("/proc/", "/sys/", "/dev/")
_MOST_FILES = 20_000


Settings = tuple[int, list[logging.Handler], int, bool]


def exchange(settings: Settings) -> Settings:
    """Set umask, handlers and level of the root logger, and whether it gets warnings; returns what
    was set before.
    """
    umask, handlers, level, logged = settings
    root, before = logging.getLogger(), warnings.showwarning.__module__ == logging.__name__
    former = (os.umask(umask), root.handlers[:], root.level, before)
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(logged)
    return former


def preload(modules: Sequence[str], umask: int) -> tuple[Settings, set[str]]:
    """Import the code locations ``modules``, and what Dagster, its storage and the placement import
    in a run.

    Only their own errors are raised. Returns the settings of their runs (with ``umask``), and the
    files that they read.
    """
    read, noting = set[str](), True

    def note(event: str, args: tuple[Any, ...]) -> None:
        if noting and event == "open" and isinstance(args[0], str) and not args[2] & _NO_READING:
            read.add(os.path.abspath(args[0]))

    sys.addaudithook(note)
    # Runs inherit this process's original environment.
    with without_library_threads():
        ours = exchange((umask, [], logging.WARNING, False))
        try:
            for name in modules:
                importlib.import_module(name)
        finally:
            settings, noting = exchange(ours), False
        before = threads()
        for name in (
            *_modules_of_a_run(),
            *(_PLACEMENT if "storm_dagster.defs" in modules else ()),
        ):
            try:
                importlib.import_module(name)
            except Exception as error:
                log.debug("%s is not preloaded: %s", name, error)
            if threads() > before:
                log.info("loading %s started a thread", name)
                before = threads()
    public_authorities()  # Each HTTP client of a run needs them.
    # Objects from before the fork stay shared with the runs.
    gc.collect()
    gc.freeze()
    return settings, {
        path for path in read if not path.startswith(_UNWATCHED) and not path.endswith(".pyc")
    }


def _modules_of_a_run() -> list[str]:
    """Modules that a run of one asset imports, determined in a fork, so that only the fork opens
    the storage.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            # The end of this process ends the wait for it.
            signal.alarm(_REHEARSAL_SECS)
            for number in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            logging.getLogger().handlers.clear()
            _rehearse()
            with os.fdopen(writing, "w") as stream:
                print(
                    *(
                        name
                        for name, module in sys.modules.items()
                        if getattr(module, "__spec__", None)
                    ),
                    file=stream,
                )
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        names = stream.read().split()
    os.waitpid(pid, 0)
    if not names:
        log.warning("the modules of a run are unknown: runs import them themselves")
    return [name for name in names if name not in sys.modules]


def _rehearse() -> None:
    """Run one asset in memory, and read the real storage."""

    @dg.asset
    def rehearsal() -> Any:
        return dg.MaterializeResult(metadata={"n": 1})

    with dg.DagsterInstance.ephemeral() as memory:
        dg.materialize([rehearsal], instance=memory)
    # Without a storage, the modules of the run itself are still known.
    with contextlib.suppress(Exception), dg.DagsterInstance.get() as instance:
        instance.get_runs(limit=1)


class Fingerprint:
    """Modification times of the files that this process has loaded or ``read``, or may have read in
    its code locations.
    """

    def __init__(self, modules: Iterable[str], read: Iterable[str] = ()) -> None:
        installed = [
            Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib", "stdlib")
        ]
        self._roots: list[Path] = []
        self._loaded = {
            str(file)
            for module in [*sys.modules.values()]
            if (file := getattr(module, "__file__", None))
        }
        for name in modules:
            # Not from sys.modules: it may have failed to import.
            spec = importlib.util.find_spec(name.partition(".")[0])
            if spec is None or spec.origin is None:
                continue
            path = Path(spec.origin).resolve()
            if path.name == "__init__.py" and not any(
                path.is_relative_to(place) for place in installed
            ):
                self._roots.append(path.parent)
            self._loaded.add(str(path))
        self._only_read = {*read} - self._scan().keys()
        self._loaded |= self._only_read
        self._seen: dict[str, tuple[int, int]] = self._scan()

    def changed(self) -> str | None:
        """A file that was changed, added or removed since, or ``None``."""
        return min((path for path, _ in self._scan().items() ^ self._seen.items()), default=None)

    def written_since(self, moment_ns: int) -> str | None:
        """A file of code written after that moment (epoch nanoseconds), when it may have been
        loaded already, or ``None``.
        """
        now = time.time_ns()
        # Not of what is only read: a code location may make it, at each load again.
        code = self._seen.keys() - self._only_read
        return next((path for path in code if moment_ns <= self._seen[path][0] <= now), None)

    def _scan(self) -> dict[str, tuple[int, int]]:
        paths = [*self._loaded]
        for root in self._roots:
            for folder, folders, files in os.walk(root):
                folders[:] = [
                    name for name in folders if name != "__pycache__" and not name.startswith(".")
                ]
                paths += [os.path.join(folder, name) for name in files if name.endswith(_WATCHED)]
        found: dict[str, tuple[int, int]] = {}
        for path in dict.fromkeys(paths):
            if len(found) >= _MOST_FILES and path not in self._loaded:
                break
            with contextlib.suppress(OSError):
                status = os.stat(path)
                found[path] = (status.st_mtime_ns, status.st_size)
        return found
