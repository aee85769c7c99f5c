"""Sources: what a :class:`SourceSpout` reads, and what to write for another system."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from storm_dagster.api.context import TopologyContext
from storm_dagster.connectors.tracking import PartitionEnd, SourceRecord


@dataclass(frozen=True)
class Lag:
    """How far a task is behind in a partition; ``None``: unknown."""

    records: int | None = None
    """Records behind the committed position."""
    secs: float | None = None
    """Age of the oldest of them. Without it the spout takes it from the event times."""


class Source(Protocol):
    """What one task reads. Derive from it: what is not defined then does nothing.

    All calls come from one thread, to a copy of its own for each task. What a method raises is
    reported, at most once a minute, and the call repeated; what :meth:`open` raises lets the task
    start again.
    """

    assets: Sequence[str] = ()
    """Keys of the Dagster assets that it reads: upstream of the spout in the lineage of a declared
    topology.
    """
    blocking: ClassVar[bool] = True
    """Whether calls may wait, for up to a second; the task then has a thread. If not, they are made
    on the worker's loop.
    """
    keeps_positions: ClassVar[bool] = False
    """Whether the source stores positions itself. If not, they are kept with the component's
    state.
    """
    refresh_secs: ClassVar[float] = 10.0
    """Pause between two calls of :meth:`partitions`."""
    forget_secs: ClassVar[float] = 7 * 86400.0
    """After so long without a partition its kept position is dropped."""

    def open(self, conf: Mapping[str, Any], context: TopologyContext) -> None:
        """Connect. ``conf`` is the component's, over the topology's."""

    def partitions(self) -> Collection[str] | None:
        """All partitions, for all tasks; each is read by the task of ``reader_of(name, tasks)``.
        ``None``: not known yet. Empty: the system deals the records itself, and all tasks read.
        """
        return ()

    def assign(self, mine: Mapping[str, Any]) -> None:
        """Partition -> kept position (or ``None``) of the partitions to read; called again when
        they change.
        """

    def read(
        self, most: int, full: Collection[str]
    ) -> Sequence[SourceRecord | PartitionEnd | Exception]:
        """The next records, about ``most``, of partitions that are not ``full``. Exceptions among
        them are reported.
        """
        ...

    def recreated(self) -> Collection[str]:
        """Partitions that were deleted and created again since the last call.

        Records that were read of them before are dropped: their acks commit no position. Called
        before each :meth:`read` and :meth:`commit`; this must not wait.
        """
        return ()

    def commit(self, after: Mapping[str, Any]) -> None:
        """Partition -> position before which all is finished, where it changed: about once a
        second, perhaps empty. Only if the source keeps positions; it need not wait until they are
        stored.
        """

    def ack(self, handles: Sequence[Any]) -> None:
        """Records of a queue are finished."""

    def nack(self, handles: Sequence[Any]) -> None:
        """Records of a queue are not finished, and will not be by this task."""

    def lag(self) -> Mapping[str, Lag]:
        """By partition, from what is known without asking: this must not wait."""
        return {}

    def close(self) -> None:
        """Store what was committed, and disconnect."""
