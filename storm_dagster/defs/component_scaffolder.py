"""`dg scaffold defs storm_dagster.StormTopologyComponent NAME`: a topology that runs, and its ``defs.yaml``."""

from __future__ import annotations

import re
from typing import Any

from dagster.components import Scaffolder, ScaffoldRequest
from dagster.components.component_scaffolding import scaffold_component

__all__ = ["StormTopologyScaffolder"]

_TOPOLOGY = '''"""Counts words. Change it: a changed file shows as a new code version of the asset."""

from __future__ import annotations

from collections import Counter
from itertools import cycle

from storm_dagster.api import Bolt, Grouping, Spout, Topology, Tuple

LINES = ("the cow jumped over the moon", "an apple a day", "four score and seven years ago")


class LineSpout(Spout):
    """Emits lines for ever."""

    outputs = ["line"]

    def initialize(self, conf, context):
        self.lines = enumerate(cycle(LINES))

    def next_tuple(self):
        number, line = next(self.lines)
        self.emit([line], tup_id=number)


class SplitBolt(Bolt):
    """One tuple for each word."""

    outputs = ["word"]

    def process(self, tup: Tuple):
        for word in tup.values[0].split():
            self.emit([word])


class CountBolt(Bolt):
    """Counts each word in the task that its grouping sends it to."""

    outputs = ["word", "count"]

    def initialize(self, conf, context):
        self.counts = Counter()

    def process(self, tup: Tuple):
        word = tup.values[0]
        self.counts[word] += 1
        self.emit([word, self.counts[word]])


class @CLASS@(Topology):
    """Lines, their words, and how often each came."""

    config = {"topology.max.spout.pending": 100}
    lines = LineSpout.spec()
    split = SplitBolt.spec(inputs={lines: Grouping.SHUFFLE}, par=2)
    count = CountBolt.spec(inputs={split: Grouping.fields("word")}, par=2)
'''


class StormTopologyScaffolder(Scaffolder):
    """Writes a word count under the name of the folder, and a ``defs.yaml`` that declares it."""

    def scaffold(self, request: ScaffoldRequest[Any]) -> None:
        """Write both; files that exist are not overwritten."""
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", request.target_path.name)
        words = [word for word in re.split(r"[^A-Za-z0-9]+", name) if word]
        class_name = "".join(word[:1].upper() + word[1:] for word in words) or "Words"
        if class_name[0].isdigit():
            class_name = f"Topology{class_name}"
        # Imported under its stem, so that it must not be called as anything that is installed.
        module = re.sub(r"\W", "_", f"{name}_topology").lower()
        if module[0].isdigit():
            module = f"topology_{module}"
        path = request.target_path / f"{module}.py"
        if not path.exists():
            request.target_path.mkdir(parents=True, exist_ok=True)
            path.write_text(_TOPOLOGY.replace("@CLASS@", class_name), encoding="utf-8")
        scaffold_component(
            request,
            {"name": name, "target": f"{module}.py:{class_name}", "workers": 2, "deploy": "manual"},
        )
