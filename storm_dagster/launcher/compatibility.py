"""Dagster internals that warm runs need."""

import functools
import logging
from types import SimpleNamespace

import dagster as dg

from storm_dagster.model.dagster_names import warm_runs_tested

log: logging.Logger = logging.getLogger(__name__)


@functools.cache
def dagster_internals() -> SimpleNamespace | None:
    """Import the names without a public import; ``None``, with one warning, for a Dagster that was
    not tested.
    """
    if not warm_runs_tested(dg.__version__):
        log.warning(
            "warm runs were not tested with Dagster %s: runs start the stock way", dg.__version__
        )
        return None
    try:
        from dagster._core.launcher import CheckRunHealthResult, WorkerStatus

        # Arguments of ``dagster api execute_run``, the command with which run launchers start runs.
        from dagster._grpc.types import ExecuteRunArgs
    except ImportError as error:
        log.warning(
            "warm runs do not fit Dagster %s (%s): runs start the stock way", dg.__version__, error
        )
        return None
    return SimpleNamespace(
        ExecuteRunArgs=ExecuteRunArgs,
        CheckRunHealthResult=CheckRunHealthResult,
        WorkerStatus=WorkerStatus,
    )
