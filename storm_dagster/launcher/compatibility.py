"""The little of Dagster's inside that warm runs need, in one place, and for the versions it was tried with."""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass
from typing import Any

import dagster as dg

__all__ = ["DagsterInternals", "dagster_internals"]

log: logging.Logger = logging.getLogger(__name__)
_TRIED = ((1, 13), (1, 14))
"""From this version on, and below that one."""


@dataclass(frozen=True)
class DagsterInternals:
    """Names that have no public place."""

    ExecuteRunArgs: Any
    """Arguments of ``dagster api execute_run``, the command with which run launchers start runs."""
    CheckRunHealthResult: Any
    WorkerStatus: Any


@functools.cache
def dagster_internals() -> DagsterInternals | None:
    """These names; ``None``, with one warning, for a Dagster that warm runs were not tried with."""
    found = re.match(r"(\d+)\.(\d+)", dg.__version__)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if not _TRIED[0] <= version < _TRIED[1]:
        log.warning("warm runs were not tried with Dagster %s: runs start the stock way", dg.__version__)
        return None
    try:
        from dagster._core.launcher import CheckRunHealthResult, WorkerStatus
        from dagster._grpc.types import ExecuteRunArgs
    except ImportError as error:
        log.warning("warm runs do not fit Dagster %s (%s): runs start the stock way", dg.__version__, error)
        return None
    return DagsterInternals(ExecuteRunArgs, CheckRunHealthResult, WorkerStatus)
