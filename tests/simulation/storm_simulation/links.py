"""Links between machines: their delays, and what is cut, slow or lossy now."""

from __future__ import annotations

from dataclasses import dataclass, field

from storm_simulation.kernel import Kernel


@dataclass
class Links:
    """The network. Machines are named; a cut may concern one direction only."""

    kernel: Kernel
    base: float = 0.0003
    cut: set[tuple[str, str]] = field(default_factory=set)
    """(from, to) pairs; ``*`` stands for everybody."""
    slow: dict[str, float] = field(default_factory=dict)
    """Machine -> longest additional delay of what it sends or receives."""
    lossy: dict[str, float] = field(default_factory=dict)
    """Machine -> chance that the reply to a write is lost, with the connection."""
    lost_replies: int = 0
    slow_answers: int = 0

    def delay(self, source: str, target: str) -> float | None:
        """Seconds that a message takes; ``None``: it never arrives."""
        if self.cut and self.is_cut(source, target):
            return None
        secs = self.base * (0.5 + self.kernel.rng.random())
        for name in (source, target):
            if name in self.slow:
                self.slow_answers += not self.kernel.over
                secs += self.slow[name] * self.kernel.rng.random()
        return secs

    def is_cut(self, source: str, target: str) -> bool:
        cut = self.cut
        return (source, target) in cut or (source, "*") in cut or ("*", target) in cut

    def cut_off(self, name: str) -> None:
        """Nothing leaves or reaches the machine."""
        self.cut |= {(name, "*"), ("*", name)}

    def mend(self, name: str) -> None:
        self.cut = {pair for pair in self.cut if name not in pair}
        self.slow.pop(name, None)
        self.lossy.pop(name, None)

    def loses_reply(self, name: str) -> bool:
        chance = self.lossy.get(name, 0.0)
        if chance and self.kernel.rng.random() < chance:
            self.lost_replies += not self.kernel.over
            return True
        return False
