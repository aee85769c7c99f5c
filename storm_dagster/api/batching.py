"""Bolts that gather tuples and process them in batches."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, ClassVar

from storm_dagster.api.bolts import Bolt
from storm_dagster.api.outages import SystemUnavailable
from storm_dagster.api.tuples import Tuple


class GatheringBolt(Bolt):
    """Base of bolts that keep tuples and ack them later; not used directly."""

    _gathers = True
    """The worker reads it: the bolt itself acks its tuples later, and anchors its emits."""
    _current_anchors: Any = None
    """Joint anchor of the batch in process; ``None`` between batches."""

    def emit(
        self,
        tup: Any,
        stream: str | None = None,
        anchors: Any = None,
        direct_task: int | None = None,
        need_task_ids: bool = False,
    ) -> list[int] | None:
        """As :meth:`Bolt.emit`; the default anchors are all tuples in process."""
        return super().emit(tup, stream, self._anchors(anchors), direct_task, need_task_ids)

    def _anchors(self, anchors: Any) -> Any:
        if anchors is not None:
            return anchors
        return self._current_anchors or []

    def _anchor_to(self, tups: list[Tuple] | None) -> None:
        """Anchor the following emits to these tuples; ``None``: to none."""
        # One joint anchor for all emits of a batch: each of its tuples is visited once.
        if tups and self.auto_anchor:
            self._current_anchors = self._bound().joint(tups)
        else:
            self._current_anchors = None


class BatchingBolt(GatheringBolt):
    """Bolt that processes its tuples in groups, at every n-th tick.

    It gathers tuples by ``group_key`` and calls ``process_batch`` for each group. Set
    ``topology.tick.tuple.freq.secs`` in the component's conf. The tuples of a batch are acked after
    ``process_batch`` returned, and all fail when it raises. Emitted tuples are anchored to all
    tuples of the batch.
    """

    auto_ack: ClassVar[bool] = True
    auto_anchor: ClassVar[bool] = True
    auto_fail: ClassVar[bool] = True
    ticks_between_batches: ClassVar[int] = 1
    _ticks: int = 0
    """Number of ticks since the last batches."""

    def group_key(self, tup: Tuple) -> Any:
        """The group of a tuple; by default there is one."""
        return None

    def process_batch(self, key: Any, tups: list[Tuple]) -> None:
        """Handle one group of tuples."""
        raise TypeError(f"{type(self).__name__} does not define process_batch(self, key, tups)")

    @property
    def _batches(self) -> dict[Any, list[Tuple]]:
        """Group key -> its waiting tuples; created at the first use, as no __init__ is required."""
        return self.__dict__.setdefault("_waiting", defaultdict(list))

    def process(self, tup: Tuple) -> None:
        """Add the tuple to its group."""
        self._batches[self.group_key(tup)].append(tup)

    def process_tick(self, tup: Tuple) -> None:
        """Process the batches when enough ticks have passed."""
        self._ticks += 1
        if self._ticks >= self.ticks_between_batches:
            self.process_batches()
            # Not if that raised: then the next tick repeats it.
            self._ticks = 0

    def process_batches(self) -> None:
        """Process all groups now. A group that raises fails; the others are not affected."""
        batches = self._batches
        for key in list(batches):
            tups = batches.pop(key)
            self._anchor_to(tups)
            self._begin()
            try:
                self.process_batch(key, self._once([*tups]))
            except SystemUnavailable:
                # The batch is kept, and processed when the system answers.
                self._undo()
                batches[key] = tups
                raise
            except Exception as error:
                self._undo()
                self.raise_exception(error, tups[0])
                if self.auto_fail:
                    # Not an argument: a class may define `fail(tup)`, as in streamparse.
                    self._fail_reason = error
                    for tup in tups:
                        self.fail(tup)
                    self._fail_reason = None
            except BaseException:
                # The task restarts: the batch fails with the other gathered tuples.
                self._undo()
                batches[key] = tups
                raise
            else:
                if self.auto_ack:
                    for tup in tups:
                        self.ack(tup)
            finally:
                self._anchor_to(None)


class TicklessBatchingBolt(BatchingBolt):
    """:class:`BatchingBolt` that processes every ``secs_between_batches`` seconds."""

    secs_between_batches: ClassVar[float] = 2

    @classmethod
    def component_config(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """Conf of the tick that the batches need."""
        return {"topology.tick.tuple.freq.secs": cls.secs_between_batches}
