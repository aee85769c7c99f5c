"""Pauses of a worker's loop while a task of it opens, and rewrites, a million keys, and the cost of
saving ``context.state``: ``python benchmarks/state.py``.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path

from storm_dagster.api import Grouping, Spout, StatefulBolt, Topology, Tuple
from storm_dagster.core.dataplane.keyed_state import Checkpoint, Partitioning, encode_value
from storm_dagster.testing.task_state import open_task_state
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.worker.state.log import StateLog, state_folder


class Words(Spout):
    """A spout for the harness."""

    outputs = ("word",)


class Count(StatefulBolt):
    """Counts words."""

    def process(self, tup: Tuple) -> None:
        """Count one."""
        self.state[tup.values[0]] = self.state.get(tup.values[0], 0) + 1


class Counting(Topology):
    """One task with state."""

    name = "counting"
    words = Words.spec()
    count = Count.spec(inputs={words: Grouping.fields("word")})


class Pauses:
    """Gaps between turns of a loop: by the clock, and by what this process computed, which a busy
    machine does not change.
    """

    def __init__(self) -> None:
        self.gaps: list[tuple[float, float]] = []
        self._last = time.perf_counter(), time.process_time()

    def turn(self) -> None:
        """Count the time since the last turn."""
        now = time.perf_counter(), time.process_time()
        self.gaps.append((1000 * (now[0] - self._last[0]), 1000 * (now[1] - self._last[1])))
        self._last = now

    def text(self) -> str:
        """The longest gaps, in milliseconds."""
        clock, computed = (
            ", ".join(f"{gap:.1f}" for gap in sorted(each)[:-4:-1])
            for each in zip(*self.gaps, strict=True)
        )
        return f"{clock} | {computed}"


def fill(folder: Path, keys: int) -> None:
    """State of that many keys, as the task writes it."""
    log = StateLog(
        state_folder(folder, "counting", "count"),
        Partitioning(1, True),
        0,
        (0, 0),
        max,
        lambda: True,
    )
    for begin in range(0, keys, 1000):
        names = [f"word{number}" for number in range(begin, min(keys, begin + 1000))]
        log.append(Checkpoint(values=[(name, encode_value(1, name)) for name in names]))
    log.close()


def print_saves(folder: Path, calls: int) -> None:
    """Print microseconds of one ``context.state.save``."""
    state = open_task_state(folder, "saving", "count", 1)

    def save(call: int, values: int, sync: bool) -> None:
        names = [f"w{number % 1000}" for number in range(call * values, (call + 1) * values)]
        state.save(dict.fromkeys(names, call), applied=[call], sync=sync)

    print("\n| context.state.save, microseconds | median | 99th percentile |\n|---|---|---|")
    for label, values, sync, part in (
        ("1 value and an id", 1, False, 1),
        ("100 values and an id", 100, False, 5),
        ("1 value and an id, sync", 1, True, 20),
    ):
        times = []
        for call in range(calls // part):
            began = time.perf_counter()
            save(call, values, sync)
            times.append(1e6 * (time.perf_counter() - began))
        times.sort()
        print(f"| {label} | {statistics.median(times):.0f} | {times[len(times) * 99 // 100]:.0f} |")
    state.close()


def main() -> None:
    """Print the longest pauses in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    keys = parser.parse_args().keys
    # As a worker sets them.
    gc.set_threshold(100_000, 50, 100)
    sys.setswitchinterval(0.001)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fill(folder, keys)
        gc.collect()
        gc.freeze()
        print(
            "| longest pauses of the loop, ms | by the clock | by CPU time of the process |\n|---|---|---|"
        )
        with TopologyHarness(Counting, {"words": []}, state_dir=folder) as harness:
            began, pauses = time.perf_counter(), Pauses()
            while "starting" in harness.engine.statuses().values():
                harness.engine.run(harness.shared.clock())
                time.sleep(0.0005)
                pauses.turn()
            secs = time.perf_counter() - began
            print(f"| open {keys:,} keys, {secs:.1f} s | {pauses.text()} |")
            idle, until = Pauses(), time.perf_counter() + 3
            while time.perf_counter() < until:
                harness.engine.run(harness.shared.clock())
                time.sleep(0.0005)
                idle.turn()
            print(f"| for comparison: 3 s without either | {idle.text()} |")
            log = harness.engine.runners[1].state.log  # type: ignore[union-attr]
            log._full_size = 0
            began, pauses = time.perf_counter(), Pauses()
            while not log.compact():
                time.sleep(0.0005)
                pauses.turn()
            print(f"| rewrite them, {time.perf_counter() - began:.1f} s | {pauses.text()} |")
        print_saves(folder, 5000)


if __name__ == "__main__":
    # Components must be in a module that can be imported.
    from state import main as run

    run()
