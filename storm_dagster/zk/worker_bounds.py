"""Bounds of what daemons read of the nodes that workers write.

A worker runs code of its topology's author, and may write any number of nodes of any size. What is
read of one topology follows its own size: the number of its slots and of its tasks.
"""

import logging
from collections.abc import Collection, Sequence
from threading import Lock

from storm_dagster.model.records import TaskTable
from storm_dagster.model.view import highest_task

_log = logging.getLogger(__name__)

MAX_FORMER_WORKERS = 16
"""Nodes of workers that are read beside those of the assigned slots: workers of a former placement
that have not ended yet.
"""
_BASE_BYTES = 1 << 20
_BYTES_FOR_TASK = 16
"""A task is named by at most ten digits and a comma, as owned and as dead."""
_BYTES_FOR_WORKER = 1024
_MAX_NAMED = 10_000
"""Folders that are remembered as named in the log."""
_named: set[str] = set()
_guard = Lock()


def max_total_bytes(tasks: TaskTable | None, slots: int) -> int:
    """Bytes of worker records that are decoded of one topology with these tasks and slots."""
    return _BASE_BYTES + _BYTES_FOR_TASK * highest_task(tasks) + _BYTES_FOR_WORKER * slots


def bounded_names(
    folder: str, names: Sequence[str], expected: Collection[str], extra: int
) -> list[str]:
    """The names that are read of a folder: the expected ones, then at most ``extra`` others.

    The excess is logged once for each folder, with its number.
    """
    present = set(names)
    kept = [name for name in expected if name in present]
    others = sorted(present.difference(expected))
    excess = len(others) - extra
    if excess > 0:
        _name_once(folder, excess)
        others = others[:extra]
    return kept + others


def _name_once(folder: str, excess: int) -> None:
    """Log the excess of a folder, unless that was done before."""
    with _guard:
        if folder in _named:
            return
        if len(_named) >= _MAX_NAMED:
            _named.clear()
        _named.add(folder)
    _log.error(
        "%s has %d nodes more than its topology may need, which are not read: its code writes "
        "them; kill the topology, or correct its code",
        folder,
        excess,
    )
