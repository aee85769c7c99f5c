"""Imbalance of a topology as one number, which a scheduled rebalance has to lower."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def imbalance(workers: Iterable[tuple[str, int]], *, wanted: int, supervisors: int) -> float:
    """Excess of the fullest worker or supervisor over its fair share: 0 is even, 1 is twice the share.

    ``workers``: (supervisor id, number of tasks) of each used slot. ``wanted``: workers that the tasks should
    be spread over. ``supervisors``: number of usable ones. The larger of two excesses: tasks on one worker, and
    workers on one supervisor.
    """
    used = [(node, tasks) for node, tasks in workers if tasks > 0]
    total = sum(tasks for _, tasks in used)
    if not total:
        return 0.0
    fair_tasks = -(-total // max(1, min(wanted, total)))
    fair_workers = -(-len(used) // max(1, min(supervisors, len(used))))
    fullest = max(tasks for _, tasks in used)
    crowded = max(Counter(node for node, _ in used).values())
    return max(fullest / fair_tasks, crowded / fair_workers) - 1.0
