"""Dagster internals that warm runs need, and the versions that were tested."""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass
from typing import Any

import dagster as dg

log: logging.Logger = logging.getLogger(__name__)
_TRIED = ((1, 13), (1, 14))
"""(first version, first excluded version)."""


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
    found = re.match(r"(\d+)\.(\d+)", dg.__version__)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if not _TRIED[0] <= version < _TRIED[1]:
        log.warning("warm runs were not tested with Dagster %s: runs start the stock way", dg.__version__)
        return None
    try:
        from dagster._core.launcher import CheckRunHealthResult, WorkerStatus
        from dagster._grpc.types import ExecuteRunArgs
    except ImportError as error:
        log.warning("warm runs do not fit Dagster %s (%s): runs start the stock way", dg.__version__, error)
        return None
    return DagsterInternals(ExecuteRunArgs, CheckRunHealthResult, WorkerStatus)
