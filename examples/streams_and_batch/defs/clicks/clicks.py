"""Page views as they come, written to the lake as Parquet, one folder for each day; Dagster hears
of each whole hour.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from storm_dagster.api import Bolt, SparkBolt, Spout, TopologyBuilder, Tuple

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PAGES = ("/", "/docs", "/docs/tutorial", "/download", "/blog")


class Views(Spout):
    """Emits page views at a steady pace; a view that was not written is emitted again."""

    outputs = ["view", "user", "url", "at"]

    def initialize(self, conf: Any, context: Any) -> None:
        self.number = 0
        self.step = 1.0 / float(conf.get("clicks.per.second", 50))
        self.due = time.monotonic()
        # Ids stay different when the task is restarted.
        self.prefix = f"{context.task_id}-{int(time.time() * 1000)}"
        self.waiting: dict[str, list[Any]] = {}

    def next_tuple(self) -> None:
        now = time.monotonic()
        if now < self.due:
            return
        self.due = max(self.due + self.step, now - 1.0)
        self.number += 1
        view = f"{self.prefix}-{self.number}"
        url = f"{PAGES[self.number % len(PAGES)]}?utm={self.number % 7}"
        self.waiting[view] = [view, self.number % 1000, url, int(time.time() * 1000)]
        self.emit(self.waiting[view], tup_id=view)

    def ack(self, tup_id: Any) -> None:
        self.waiting.pop(tup_id, None)

    def fail(self, tup_id: Any) -> None:
        if tup_id in self.waiting:
            self.emit(self.waiting[tup_id], tup_id=tup_id)


class Pages(Bolt):
    """The page of each view, without what is behind the question mark, and its day (UTC)."""

    outputs = ["view", "user", "page", "at", "day"]

    def process(self, tup: Tuple) -> None:
        view, user, url, at = tup.values
        day = datetime.fromtimestamp(at / 1000, tz=timezone.utc).date().isoformat()
        self.emit([view, user, url.partition("?")[0], at, day])


def land(frame: DataFrame, out: str) -> DataFrame:
    """Append the micro-batch to the lake, and say how far it goes. Delivery is at least once:
    readers drop views that come twice.
    """
    frame.coalesce(1).write.mode("append").partitionBy("day").parquet(out)
    return frame.selectExpr("max(at) as at")


class Hours(Bolt):
    """Tells Dagster of every hour that is complete, a minute after its end.

    The tuple that completes an hour is acked when Dagster has stored that. A new task reports the
    newest hour once more, which makes the batch assets on it a second time, the same way.
    """

    assets = ["lake/clicks"]
    grace = timedelta(minutes=1)

    def initialize(self, conf: Any, context: Any) -> None:
        self.reported = ""

    def process(self, tup: Tuple) -> None:
        at = datetime.fromtimestamp(tup.values[0] / 1000, tz=timezone.utc)
        whole = (at - self.grace - timedelta(hours=1)).strftime("%Y-%m-%d-%H:00")
        if whole > self.reported:
            self.dagster.materialize(
                "lake/clicks", partition=whole, metadata={"landed_until": at.isoformat()}
            )
            self.reported = whole


def clicks(lake: str) -> TopologyBuilder:
    """The topology. ``lake`` is a folder that the Spark server can write."""
    builder = TopologyBuilder("clicks")
    builder.set_spout("views", Views)
    builder.set_bolt("pages", Pages, inputs="views")
    builder.set_bolt(
        "landed",
        SparkBolt,
        inputs="pages",
        args={
            "function": "clicks:land",
            "args": {"out": f"{lake}/clicks"},
            "schema": "view string, user long, page string, at long, day string",
            "batch_secs": 2.0,
        },
        outputs=["at"],
    )
    builder.set_bolt("hours", Hours, inputs="landed")
    return builder
