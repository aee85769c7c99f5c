"""Spark's Python daemon with its libraries loaded: a forked Python worker starts in milliseconds.

Spark ends Python workers that idle for a minute, and forks new ones from a daemon that has imported
nothing, because pandas and pyarrow start threads when they are imported and threads do not survive
a fork. Those threads can be turned off. This module does so, imports, makes sure that it is still
alone in its process, and then is ``pyspark.daemon``. Started by Spark as ``python -m``, by
``spark.python.daemon.module``.
"""

import contextlib
import gc
import importlib.util
import os
import sys

from storm_dagster.host.forks import threads, without_library_threads
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


def main() -> None:
    """Preload and serve; serve without preloading where threads cannot be counted or would be
    left.
    """
    # What users' functions run in has the environment that the server was given.
    with without_library_threads():
        for name in _LIBRARIES if threads() == 1 else ():
            # A library that this pyspark does not have is loaded, or missed, by the worker itself.
            if importlib.util.find_spec(name.partition(".")[0]) is not None:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
        if threads() != 1:
            # A forked thread-holder may hang: start again as Spark's own daemon.
            os.execv(sys.executable, [sys.executable, "-m", "pyspark.daemon", *sys.argv[1:]])
    # Objects from before the fork stay shared between workers.
    gc.freeze()
    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()
