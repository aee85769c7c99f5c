"""Hours that are complete one after the other; a bolt reports them to Dagster. A file has what was
acked.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from storm_dagster.api import Bolt, Spout, Topology, Tuple

EVENTS_EVERY = 3
"""Each third number is the end of an hour."""


class Numbers(Spout):
    """Counts as long as a file allows; what is not acked is emitted again, also by a new worker."""

    outputs = ["number"]

    def initialize(self, conf: Any, context: Any) -> None:
        self.folder = Path(conf["hours.folder"])
        path = self.folder / "acked"
        done = {int(line) for line in path.read_text().split()} if path.exists() else set()
        self.acks = path.open("a", buffering=1)
        self.due = 0.0
        self.next = max(done, default=-1) + 1
        self.again = sorted(set(range(self.next)) - done)

    def next_tuple(self) -> None:
        if self.again:
            number = self.again.pop()
        elif time.monotonic() >= self.due and not (self.folder / "end").exists():
            self.due = time.monotonic() + 0.1
            number = self.next
            self.next += 1
        else:
            return
        self.emit([number], tup_id=number)

    def ack(self, tup_id: int) -> None:
        self.acks.write(f"{tup_id}\n")

    def fail(self, tup_id: int) -> None:
        self.again.append(tup_id)


class Hours(Bolt):
    """Reports each complete hour to Dagster."""

    assets = ["lake/clicks"]

    def process(self, tup: Tuple) -> None:
        number = tup.values[0]
        if number % EVENTS_EVERY == 0:
            self.dagster.materialize(
                "lake/clicks", partition=f"hour-{number}", metadata={"number": number}
            )
            self.dagster.check("lake/clicks", "complete", True, metadata={"number": number})


class HoursTopology(Topology):
    """Numbers, and their hours. Conf ``hours.folder``: where the acks go."""

    config = {"topology.message.timeout.secs": 10}
    numbers = Numbers.spec()
    hours = Hours.spec(inputs=[numbers])
