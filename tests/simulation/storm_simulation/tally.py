"""The sum of what happened over many seeds: faults by kind and by what they concern, and what is
counted apart.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storm_simulation.healing_faults import GROUPS

if TYPE_CHECKING:
    from storm_simulation.program import Result

COUNTED = ("processes", "links", "disks", "clocks")
_GROUPS = {
    **GROUPS,
    "run killed at a step": "processes",
    "machine lost for good": "for good",
    "host flaps": "for good",
    "host lost in a pause": "for good",
    "host lost, runs late": "for good",
}
"""Machines are lost for good once in each seed, after its other faults."""


@dataclass
class Tally:
    """Results of seeds, added up."""

    next_seed: int = 1
    seeds: int = 0
    broken: int = 0
    virtual_secs: float = 0.0
    cpu_secs: float = 0.0
    commits: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    commands: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)
    healing_runs: Counter[str] = field(default_factory=Counter)
    """Healing runs by what they did for a topology."""

    @staticmethod
    def load(path: Path, first: int) -> Tally:
        """What an earlier run of the program has kept; an empty one that begins with seed
        ``first``.
        """
        if not path.exists():
            return Tally(first)
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        faults, commands, known, healing_runs = (
            Counter[str](kept.pop(name, {}))
            for name in ("faults", "commands", "known", "healing_runs")
        )
        return Tally(
            **kept, faults=faults, commands=commands, known=known, healing_runs=healing_runs
        )

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(vars(self), indent=1, sort_keys=True), encoding="utf-8")

    def add(self, result: Result) -> None:
        self.next_seed = result.seed + 1
        self.seeds += 1
        self.broken += result.violation is not None
        self.virtual_secs += result.virtual_secs
        self.cpu_secs += result.cpu_secs
        self.commits += result.commits
        self.faults.update(result.faults)
        self.commands.update(result.commands)
        self.known.update(result.known)
        self.healing_runs.update(result.healing_runs)

    def of(self, group: str) -> dict[str, int]:
        """Kind -> count of the faults of a group; ``apart`` are those of none."""
        kinds = [*(kind for kind in _GROUPS if _GROUPS[kind] == group)]
        if group == "apart":
            kinds = [kind for kind in self.faults if kind not in _GROUPS]
        return {kind: self.faults[kind] for kind in sorted(kinds)}

    @property
    def total(self) -> int:
        """Faults of processes, links, disks and clocks."""
        return sum(sum(self.of(group).values()) for group in COUNTED)

    def reached(self, total: int) -> bool:
        """Whether there are that many faults, and a hundredth of it of each kind."""
        return self.total >= total and all(
            count >= total / 100 for group in COUNTED for count in self.of(group).values()
        )

    def text(self) -> str:
        """A table of all of it."""
        speed = self.virtual_secs / max(self.cpu_secs, 0.01)
        lines = [
            f"{self.seeds} seeds, {self.virtual_secs:.0f} virtual s = {speed:.0f} times real time, "
            f"{self.total} faults in {self.cpu_secs:.0f} CPU s, {self.commits} commits, {self.broken} broken"
        ]
        for group in (*COUNTED, "services", "for good", "apart"):
            kinds = self.of(group)
            counts = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
            lines.append(f"{group} {sum(kinds.values())}: {counts}")
        for title, counted in (
            ("healing runs", self.healing_runs),
            ("commands", self.commands),
            ("known violations", self.known),
        ):
            lines.append(
                f"{title}: "
                + ", ".join(f"{kind} {count}" for kind, count in sorted(counted.items()) if count)
            )
        return "\n".join(lines)
