"""Slot of a cluster: a port of a supervisor, in which one worker may run."""

import re
from typing import NamedTuple

from storm_dagster.model.errors import Corrupt

_KEY = re.compile(r"(.*):(-?[0-9]+)", re.DOTALL)


class Slot(NamedTuple):
    """A port of a supervisor; its order is that of the supervisor ids, then of the ports."""

    node: str
    """Supervisor id."""
    port: int

    @property
    def key(self) -> str:
        """``node:port``, its spelling in records and documents."""
        return f"{self.node}:{self.port}"

    @classmethod
    def parse(cls, key: str) -> "Slot":
        """The slot of a :attr:`key`, whose id may hold colons; :class:`Corrupt` for other text."""
        match = _KEY.fullmatch(key)
        if match is None:
            raise Corrupt(
                f"slot {key!r:.80} is not of the form <supervisor>:<port>: the record that names it "
                "was damaged or forged"
            )
        return cls(match[1], int(match[2]))
