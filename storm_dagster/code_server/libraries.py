"""Libraries of runs; the process that forks runs imports this module.

The import loads them. No module of users is among them, because such a module may change while the
code server lives, and may start threads, which a fork does not have.
"""

import ctypes
import gc
import importlib
import logging
import os
import signal
import sys
from typing import Any

from storm_dagster.host.forks import without_library_threads
from storm_dagster.security.settings import public_authorities

log: logging.Logger = logging.getLogger(__name__)

LIBRARIES: tuple[str, ...] = (
    "dagster",
    "dagster._grpc.impl",
    "dagster._core.definitions.repository_definition.repository_data_builder",
    "dagster._core.execution.plan.active",
    "dagster._core.execution.stats",
    "dagster._core.executor.in_process",
    "dagster._core.secrets.env_file",
    "dagster._core.storage.root",
    "dagster._core.storage.sqlite_storage",
    "dagster._core.workspace.autodiscovery",
    "encodings.idna",
    "httpcore",
    "kazoo.client",
    "numpy.random",
    "pydantic",
    "upath.implementations.local",
    "storm_dagster.code_server.run_process",
    "storm_dagster.defs",
    # The placement of a submission.
    "pandas",
    "pyarrow.compute",
    "dagster_pyspark",
    "pyspark.sql.connect.session",
    "storm_dagster.spark.assignment.pipeline",
    "storm_dagster.spark.planner",
)
"""Modules that a run imports."""

_FORK_SERVER = os.getpid()
"""The process that imports this module, which forks the runs."""
_PR_SET_PDEATHSIG = 1
"""From ``linux/prctl.h``."""
_prctl: Any = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
"""Linux's ``prctl``; ``None`` on another system."""
_is_forked = False
"""True in a run's process, and in the processes that it forks."""


def load() -> None:
    """Import the libraries without threads, and share their memory with the forks.

    A library that cannot be loaded is logged and left to the run, which perhaps does not need it.
    """
    with without_library_threads():
        for name in LIBRARIES:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError:
                log.debug("runs load %s themselves", name, exc_info=True)
            # pyspark exits without a pandas that works.
            except (Exception, SystemExit) as error:
                log.warning("runs load %s themselves: %s: %s", name, type(error).__name__, error)
    try:
        # Each HTTP client of a run needs them.
        public_authorities()
    except Exception as error:
        log.warning("runs load the certificate authorities themselves: %r", error)
    # Objects that the garbage collector does not visit stay in the pages that all forks share.
    gc.collect()
    gc.freeze()


def prepare_fork() -> None:
    """Prepare a direct child of this process for its run.

    The child ends with this process, which alone reports the end of its children: Dagster marks the
    runs as failed if the report is lost. NumPy's global generator is seeded, because all runs would
    otherwise draw the same numbers; Python's own generator is seeded at each fork. In a process
    that a run forks, the call has no effect.
    """
    global _is_forked
    if _is_forked:
        return
    _is_forked = True
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != _FORK_SERVER:
            # The fork server died before the call.
            os.kill(os.getpid(), signal.SIGKILL)
    try:
        import numpy.random

        numpy.random.seed()
    except Exception as error:
        log.warning("NumPy's generator is not seeded: %r", error)


load()
os.register_at_fork(after_in_child=prepare_fork)
