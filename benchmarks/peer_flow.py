"""The word count and the chain of ten as bytewax dataflows; run by bytewax's own Python, which has
no storm_dagster.

The sink writes the log that ``peer_logs`` reads: ``s TIME ITEMS ITEMS`` every second, and ``b
TIME`` with the first item.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import bytewax.operators as op  # pyright: ignore[reportMissingImports]
from bytewax.dataflow import Dataflow  # pyright: ignore[reportMissingImports]
from bytewax.inputs import DynamicSource, StatelessSourcePartition  # pyright: ignore[reportMissingImports]
from bytewax.outputs import DynamicSink, StatelessSinkPartition  # pyright: ignore[reportMissingImports]

SHAPE = os.environ["PEER_SHAPE"]
BATCH = int(os.environ["PEER_BATCH"])
FOLDER = Path(os.environ["PEER_FOLDER"])


class _Sentences(StatelessSourcePartition):
    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self._sentences = [
            " ".join(f"word{draw.randrange(5_000)}" for _ in range(10)) for _ in range(2_000)
        ]
        self._count = 0

    def next_batch(self) -> list[Any]:
        began = self._count
        self._count += BATCH
        return [self._sentences[number % 2_000] for number in range(began, began + BATCH)]


class _Numbers(StatelessSourcePartition):
    def __init__(self) -> None:
        self._count = 0

    def next_batch(self) -> list[Any]:
        began = self._count
        self._count += BATCH
        return [(number % 1_000, time.monotonic()) for number in range(began, began + BATCH)]


class _Source(DynamicSource):
    def build(self, step_id: str, worker_index: int, worker_count: int) -> Any:
        return _Sentences(worker_index) if SHAPE == "words" else _Numbers()


class _Count(StatelessSinkPartition):
    def __init__(self, number: int) -> None:
        self._out = (FOLDER / f"spout-{number}-{os.getpid()}.log").open("a", buffering=1)
        self._items, self._told = 0, 0.0

    def write_batch(self, items: list[Any]) -> None:
        now = time.time()
        if not self._items:
            self._out.write(f"b {now:.4f}\n")
        self._items += len(items)
        if now - self._told >= 1.0:
            self._told = now
            # Ten words are a sentence. There are no acks: what has arrived counts as acked.
            done = self._items / 10 if SHAPE == "words" else self._items
            self._out.write(f"s {now:.4f} {done} {done}\n")


class _Sink(DynamicSink):
    def build(self, step_id: str, worker_index: int, worker_count: int) -> Any:
        return _Count(worker_index)


def _add_one(count: int | None, word: str) -> tuple[int, int]:
    total = (count or 0) + 1
    return total, total


flow = Dataflow(SHAPE)
items = op.input("source", flow, _Source())
if SHAPE == "words":
    split = op.flat_map("split", items, str.split)
    keyed = op.key_on("key", split, lambda word: word)
    items = op.stateful_map("count", keyed, _add_one)
else:
    for step in range(1, 11):
        items = op.map(f"pass{step}", items, lambda item: (item[0], item[1]))
op.output("sink", items, _Sink())
