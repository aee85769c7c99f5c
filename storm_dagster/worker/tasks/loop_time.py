"""Time that a worker's loop spends in one task."""

_SLOW_PASS_SECS = 0.02
"""Time of a pass that only a slow call explains: others end after some milliseconds."""


class LoopTime:
    """Sums over the passes of one task. Written by the loop; any thread may read them."""

    __slots__ = ("secs", "slow_passes", "slow_secs")

    def __init__(self) -> None:
        self.secs: float = 0.0
        """Time in which the loop has run the task, in seconds."""
        self.slow_secs: float = 0.0
        """Part of it in passes that a single call made slow."""
        self.slow_passes: int = 0
        """Number of those passes."""

    def add(self, secs: float) -> None:
        """Add the time of a pass."""
        self.secs += secs
        if secs >= _SLOW_PASS_SECS:
            self.slow_secs += secs
            self.slow_passes += 1
