"""The topology of the recovery benchmark: numbers that are written down where they end, so that
none is lost unseen.

``bench.rate`` (numbers a second) and ``bench.ledger`` (a folder) are conf keys. Every line of the
folder's files is a number and the boot clock at which it was counted.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from storm_dagster.api import Bolt, Grouping, Spout, Topology, Tuple
from storm_dagster.host.clock import boot_clock


class LedgerSpout(Spout):
    """0, 1, 2 ... at a steady rate; what is not acked comes again, also after a restart."""

    outputs = ["number"]

    def initialize(self, conf: Any, context: Any) -> None:
        self._rate = float(conf.get("bench.rate", 300))
        self._done = self._next = int(context.state.get("done", 0))
        self._most = int(context.state.get("sent", 0))
        self._acked: set[int] = set()
        self._again: list[int] = []
        self._began, self._emitted, self._saved = time.monotonic(), 0, 0.0

    def activate(self) -> None:
        self._began, self._emitted = time.monotonic(), 0

    def next_tuple(self) -> None:
        if self._emitted >= (time.monotonic() - self._began) * self._rate:
            return
        if self._again:
            number = self._again.pop()
        else:
            number, self._next = self._next, self._next + 1
        self._emitted += 1
        self._most = max(self._most, number + 1)
        self.emit([number], tup_id=number)
        self._save(0.05)

    def ack(self, tup_id: int) -> None:
        self._acked.add(tup_id)
        while self._done in self._acked:
            self._acked.discard(self._done)
            self._done += 1
        self._save(0.05 if self._done < self._most else 0.0)

    def fail(self, tup_id: int) -> None:
        self._again.append(tup_id)

    def _save(self, least: float) -> None:
        now = time.monotonic()
        if now - self._saved >= least:
            self._saved = now
            self.context.state.save({"done": self._done, "sent": self._most})


class RelayBolt(Bolt):
    """Passes on."""

    outputs = ["number"]

    def process(self, tup: Tuple) -> None:
        self.emit(list(tup.values))


class LedgerBolt(Bolt):
    """Writes each number down before it is acked."""

    def initialize(self, conf: Any, context: Any) -> None:
        folder = Path(conf["bench.ledger"])
        self._file = (folder / f"{context.task_id}-{os.getpid()}.txt").open("a", buffering=1)

    def process(self, tup: Tuple) -> None:
        self._file.write(f"{tup.values[0]} {boot_clock():.4f}\n")


class RecoveryLedger(Topology):
    """numbers -> relay -> ledger, on three workers."""

    config = {
        "topology.workers": 3,
        "topology.max.spout.pending": 500,
        "topology.message.timeout.secs": 6,
    }

    numbers = LedgerSpout.spec()
    relay = RelayBolt.spec(inputs=[numbers], par=2)
    ledger = LedgerBolt.spec(inputs={relay: Grouping.fields("number")}, par=2)
