"""Workload: a word count whose exact result is known, and its progress in the cluster."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from storm_dagster.api.state import TaskState
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.task_state import read_task_states


def files_below(folder: Path, pattern: str) -> list[Path]:
    """Files whose path ends as the pattern says. Processes may work in the folder: what disappears
    meanwhile is not found, and is no error as for ``Path.glob``.
    """
    paths = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
    return [path for path in paths if path.match(pattern)]


def task_states(cluster: LocalCluster, name: str, component: str) -> Iterator[TaskState]:
    """Saved state of each task of the component on this machine."""
    yield from read_task_states(cluster.home, name, component).values()


class WordCount:
    """Runs ``examples/wordcount.py``; ``files`` and ``limit`` bound the lines, ``rate`` is per
    second.
    """

    def __init__(
        self, target: Path, *, files: int = 12, limit: int = 4_000, rate: int = 400
    ) -> None:
        self.target, self.files, self.limit, self.rate = target, files, limit, rate

    @cached_property
    def expected(self) -> Counter[str]:
        """The counts, computed without the cluster."""
        spec = importlib.util.spec_from_file_location(self.target.stem, self.target)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return Counter(
            word
            for _, line in module.read_lines(self.files, self.limit)
            for word in module.words_of(line)
        )

    def submit_arguments(
        self, name: str, *, workers: int = 4, rate: int | None = None
    ) -> list[str]:
        """Arguments of ``storm-dagster submit``; ``rate`` in the place of the usual one."""
        pairs = {
            "topology.workers": workers,
            "wordcount.files": self.files,
            "wordcount.limit": self.limit,
            "wordcount.lines.per.second": self.rate if rate is None else rate,
            # Messages time out soon, so that what a dead worker held is replayed within a round.
            "topology.message.timeout.secs": 8,
        }
        conf = [part for key, value in pairs.items() for part in ("--conf", f"{key}={value}")]
        return [str(self.target), "--name", name, *conf]

    def progress(self, cluster: LocalCluster, name: str) -> tuple[int, int]:
        """(lines acked, lines in all)."""
        pairs = [
            (int(s.get("done", 0)), int(s.get("total", 0)))
            for s in task_states(cluster, name, "lines")
        ]
        return sum(done for done, _ in pairs), sum(total for _, total in pairs)

    def finished(self, cluster: LocalCluster, name: str) -> bool:
        """Whether every line was counted."""
        done, total = self.progress(cluster, name)
        return total > 0 and done == total

    def counts(self, cluster: LocalCluster, name: str) -> Counter[str]:
        """The counts that the tasks have saved."""
        found: Counter[str] = Counter()
        for state in task_states(cluster, name, "count"):
            found.update(dict(state.items()))
        return found

    def wrong_words(self, cluster: LocalCluster, name: str) -> int:
        """Number of words with a wrong count."""
        found = self.counts(cluster, name)
        return sum(
            1 for word in found.keys() | self.expected.keys() if found[word] != self.expected[word]
        )
