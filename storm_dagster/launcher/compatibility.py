"""Dagster internals that warm runs need."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import dagster as dg

from storm_dagster.model.dagster_release import warm_runs_tested

log: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DagsterInternals:
    """Names without a public import."""

    ExecuteRunArgs: Any
    """Arguments of ``dagster api execute_run``, the command with which run launchers start runs."""
    CheckRunHealthResult: Any
    WorkerStatus: Any


@functools.cache
def dagster_internals() -> DagsterInternals | None:
    """Import these names; ``None``, with one warning, for a Dagster that was not tested."""
    if not warm_runs_tested(dg.__version__):
        log.warning("warm runs were not tested with Dagster %s: runs start the stock way", dg.__version__)
        return None
    try:
        from dagster._core.launcher import CheckRunHealthResult, WorkerStatus
        from dagster._grpc.types import ExecuteRunArgs
    except ImportError as error:
        log.warning("warm runs do not fit Dagster %s (%s): runs start the stock way", dg.__version__, error)
        return None
    return DagsterInternals(ExecuteRunArgs, CheckRunHealthResult, WorkerStatus)
