"""Spark's Python daemon with loaded libraries, for fast starts of Python workers.

A forked Python worker starts in milliseconds. Spark ends Python workers that idle for a minute, and
forks new ones from a daemon that has imported no library, because pandas and pyarrow start threads
at their import and threads do not survive a fork. Those threads can be turned off. This module does
so, imports, checks that its process has only one thread, and then becomes ``pyspark.daemon``. Spark
starts it as ``python -m``, by ``spark.python.daemon.module``.
"""

import contextlib
import gc
import importlib.util
import os
import sys

from storm_dagster.host.forks import thread_count, without_library_threads
from storm_dagster.model.strategies import STRATEGIES

_LIBRARIES = (
    "pyarrow.compute",
    "pandas",
    "pyspark.worker",
    "pyspark.sql.pandas.serializers",
    "pyspark.sql.pandas.types",
    "pyspark.sql.conversion",
    "storm_dagster.spark.assignment.groups",
    *(path.partition(":")[0] for path in STRATEGIES.values()),
)
"""Modules that the functions of placements and of Spark components import."""


def _load_libraries() -> None:
    """Import the libraries that this pyspark has.

    The worker loads, or misses, the others.
    """
    for name in _LIBRARIES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def main() -> None:
    """Preload and serve.

    Without preloading if threads cannot be counted, or if the libraries start threads.
    """
    # The block restores the server's environment, in which users' functions run.
    with without_library_threads():
        if thread_count() == 1:
            _load_libraries()
        if thread_count() != 1:
            # A fork of a process with threads may hang: restart as Spark's own daemon.
            os.execv(sys.executable, [sys.executable, "-m", "pyspark.daemon", *sys.argv[1:]])
    # Objects from before the fork stay shared between workers.
    gc.freeze()
    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()
