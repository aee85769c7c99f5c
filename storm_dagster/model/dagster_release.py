"""The installed release of Dagster, read without importing it."""

from __future__ import annotations

import re
from importlib import metadata

_WARM_RUNS_TESTED = ((1, 13), (1, 14))
"""(first release, first excluded release) whose internals warm runs were tested with."""


def dagster_version() -> str:
    """Version of the installed distribution; "none" without one."""
    try:
        return metadata.version("dagster")
    except metadata.PackageNotFoundError:
        return "none"


def warm_runs_tested(version: str) -> bool:
    """Whether warm runs were tested with this version of Dagster. With another one runs start the stock way."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and _WARM_RUNS_TESTED[0] <= (int(found[1]), int(found[2])) < _WARM_RUNS_TESTED[1]
