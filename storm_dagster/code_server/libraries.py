"""Libraries of runs. The process that forks runs imports this module, which loads them.

No module of users is among them: it may change while the code server lives, and may start threads,
which a fork does not have.
"""

import contextlib
import gc
import importlib
import os

from storm_dagster.host.forks import without_library_threads
from storm_dagster.security.settings import public_authorities

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
    "storm_dagster.defs",
    # The placement of a submission.
    "pandas",
    "pyarrow.compute",
    "dagster_pyspark",
    "pyspark.sql.connect.session",
    "storm_dagster.spark.assignment.pipeline",
    "storm_dagster.spark.planner",
)
"""Modules that a run imports; one that is missing is left to the run."""


def load() -> None:
    """Import the libraries, without threads, and keep their memory shared with the forks."""
    with without_library_threads():
        for name in LIBRARIES:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    # Each HTTP client of a run needs them.
    public_authorities()
    gc.collect()
    gc.freeze()


def seed_numbers() -> None:
    """Seed NumPy's global generator anew: all runs would draw the same numbers.

    Python's own generator does so at a fork by itself.
    """
    import numpy.random

    numpy.random.seed()


load()
os.register_at_fork(after_in_child=seed_numbers)
