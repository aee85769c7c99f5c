"""Spark's Python daemon with its libraries loaded: a forked Python worker starts in milliseconds.

Spark ends Python workers that idle for a minute, and forks new ones from a daemon that has imported
nothing, because pandas and pyarrow start threads when they are imported and threads do not survive a fork.
Those threads can be turned off. This module does so, imports, makes sure that it is still alone in its
process, and then is ``pyspark.daemon``. Started by Spark as ``python -m``, by ``spark.python.daemon.module``.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from pathlib import Path

from storm_dagster.model.strategies import STRATEGIES

_QUIET = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OPENBLAS_NUM_THREADS": "1"}
_LIBRARIES = (
    "pyarrow.compute",
    "pandas",
    "pyspark.worker",
    "pyspark.sql.pandas.serializers",
    "pyspark.sql.pandas.types",
    "pyspark.sql.conversion",
    "storm_dagster.spark.assignment.allocate_slots",
    "storm_dagster.spark.assignment.request_slots",
    "storm_dagster.spark.assignment.assign_tasks",
    *(path.partition(":")[0] for path in STRATEGIES.values()),
)


def _threads() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 2


def main() -> None:
    """Preload and serve; serve without preloading where threads cannot be counted or would be left."""
    before = {name: os.environ.get(name) for name in _QUIET}
    os.environ.update(_QUIET)
    if _threads() == 1:
        for name in _LIBRARIES:
            # A library that this pyspark does not have is loaded, or missed, by the worker itself.
            if importlib.util.find_spec(name.partition(".")[0]) is not None:
                try:
                    importlib.import_module(name)
                except ImportError:
                    continue
    if _threads() != 1:
        # A forked thread-holder may hang: start again as Spark's own daemon.
        os.execv(sys.executable, [sys.executable, "-m", "pyspark.daemon", *sys.argv[1:]])
    for name, value in before.items():
        # What users' functions run in has the environment that the server was given.
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    # Objects from before the fork stay shared between workers.
    gc.freeze()
    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()
