"""Slot of a cluster: a port of a supervisor, in which one worker may run."""

import re
from typing import NamedTuple

from storm_dagster.model.errors import Corrupt

# The id of a supervisor, which may have colons and line breaks, and a port.
_KEY = re.compile(r"(.*):(-?[0-9]+)", re.DOTALL)


class Slot(NamedTuple):
    """A port of a supervisor.

    Slots are ordered by supervisor id, then by port.
    """

    node: str
    """Supervisor id."""
    port: int

    @property
    def key(self) -> str:
        """``node:port``, its form in records and documents."""
        return f"{self.node}:{self.port}"

    @classmethod
    def parse(cls, key: str) -> "Slot":
        """The slot of a :attr:`key`.

        :class:`Corrupt` for other text. Ids may have colons.
        """
        match = _KEY.fullmatch(key)
        if match is None:
            raise Corrupt(
                f"slot {key!r:.80} is not of the form <supervisor>:<port>: the record that names "
                "it "
                "was damaged or forged"
            )
        return cls(match[1], int(match[2]))
