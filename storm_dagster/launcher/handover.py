"""Who runs a run: the two sides of the exchange between launcher and fork, as tables of states.

The launcher's ``go`` decides. A fork that gives up closes the connection for ``go`` first and then looks whether one had
come: so a ``go`` that could be sent is obeyed by any fork that lives, however long it was held, and one that could not be
sent is not. Only a fork's death is left, which the launcher sees at once or the warm process reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Event = Literal["request", "ready", "go", "started", "sent", "silence", "end"]
"""A message that came; ``sent``: the own message could be sent; silence for too long; the other side is gone."""
ForkState = Literal["begun", "waiting", "leaving", "runs", "gone"]
LauncherState = Literal["asking", "going", "said", "launched", "stock"]

FORK: Mapping[tuple[ForkState, Event], ForkState] = {
    ("begun", "request"): "waiting",
    ("waiting", "go"): "runs",
    ("waiting", "silence"): "leaving",
    ("waiting", "end"): "leaving",
    # In this state no further message can come.
    ("leaving", "go"): "runs",
}
"""In ``waiting`` it has sent ``ready``. Whatever is not here: ``gone``, without running."""

LAUNCHER: Mapping[tuple[LauncherState, Event], LauncherState] = {
    ("asking", "ready"): "going",
    ("going", "sent"): "said",
    # It is held, and runs when it goes on.
    ("said", "silence"): "launched",
    ("said", "started"): "launched",
}
"""In ``going`` it sends ``go``; in ``said`` it could be sent. Whatever is not here: ``stock``."""


def next_fork(state: ForkState, event: Event) -> ForkState:
    """The fork's next state."""
    return FORK.get((state, event), "gone")


def next_launcher(state: LauncherState, event: Event) -> LauncherState:
    """The launcher's next state."""
    return LAUNCHER.get((state, event), "stock")
