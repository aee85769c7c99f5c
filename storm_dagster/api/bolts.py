"""Bolts: components that process tuples; their reports to Dagster."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypedDict

from typing_extensions import Unpack

from storm_dagster.api.component import Component
from storm_dagster.api.tuples import Tuple, TupleId
from storm_dagster.model.dagster_events import (
    ASSET_METADATA_KEY,
    ASSETS_KEY,
    TARGET_PART,
    DagsterEvent,
)
from storm_dagster.model.errors import InvalidRequest, InvalidTopology


class AssetEvent(TypedDict, total=False):
    """Fields of a materialization or observation."""

    partition: str | None
    metadata: Mapping[str, Any] | None
    description: str | None
    data_version: str | None
    anchors: Sequence[Any] | None
    """Tuples that are acked only when the cluster has taken the event; default: that in process."""


class DagsterReports:
    """Reports of a bolt to Dagster, as ``self.dagster``.

    Each call checks its values and returns at once. The event is delivered at least once: nimbus
    stores it, and delivers it when Dagster is there. The tuple in process is acked only when nimbus
    has stored the event, and a replayed tuple repeats the report. Without a tuple (ticks,
    ``initialize``, untracked tuples, bolts without ``auto_anchor``) the worker keeps the event
    until nimbus has stored it, and reports an error if it must drop it. As with ``emit``,
    ``anchors`` sets other tuples. Equal pending events are sent once.

    A component with many events that nimbus does not take gets no more tuples and ticks until it
    does.

    ``key`` is ``"lake/clicks"`` or a list of its parts, one of those that the bolt declares
    (:attr:`Bolt.assets`). ``metadata`` are JSON values, 16 KiB at most.
    """

    def __init__(self, bolt: Any) -> None:
        self._bolt = bolt

    def materialize(self, key: str | Sequence[str], **event: Unpack[AssetEvent]) -> None:
        """Report that the asset, or a partition of it, was materialized.

        Runs that depend on it may start.
        """
        self._report("materialization", key, **event)

    def observe(self, key: str | Sequence[str], **event: Unpack[AssetEvent]) -> None:
        """Report an observation of the asset.

        Dependent runs start only if its data version has changed.
        """
        self._report("observation", key, **event)

    def check(
        self,
        key: str | Sequence[str],
        name: str,
        passed: bool,
        *,
        partition: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        severity: Literal["ERROR", "WARN"] = "ERROR",
        anchors: Sequence[Any] | None = None,
    ) -> None:
        """Report the result of the asset check ``name``."""
        self._report(
            "check",
            key,
            anchors,
            check=name,
            passed=passed,
            partition=partition,
            metadata=metadata,
            severity=severity,
        )

    def _report(self, kind: str, key: Any, anchors: Any = None, **fields: Any) -> None:
        bolt = self._bolt
        source = f"{bolt.topology_name}/{bolt.component_name}"
        event = DagsterEvent.make(source, kind, key, **fields)
        if event.key[0] == TARGET_PART:
            raise InvalidRequest(
                f"{kind} of asset {event.asset!r:.100}: keys that begin with {TARGET_PART} are "
                "those of the reports of sinks: name the asset itself"
            )
        bolt._bound().event(event, bolt._anchors(anchors))


class Bolt(Component):
    """Component that processes the tuples of its inputs, one at a time in each task.

    ``process`` may be ``async``: then up to ``async_window`` tuples of a task are in flight at
    once, on an event loop in the task's own thread.

    The worker binds methods at run time. A bolt on the worker's loop gets an **instance attribute**
    ``emit``, a closure over the task's routes, unless its class overrides ``emit``; ``ack`` and
    ``fail`` call closures that the worker puts into the collector. A :class:`StatefulBolt` gets an
    instance attribute ``process`` too, which runs the bolt's own one and defers its acks to the
    next checkpoint. The reason is measured speed: a call per tuple then follows no chain of
    attributes and methods. So the methods here are the signatures, and what runs in tasks with
    their own thread.
    """

    auto_ack: ClassVar[bool] = True
    """Ack each tuple when ``process`` returns."""
    auto_anchor: ClassVar[bool] = True
    """Anchor emitted tuples to the tuple in process."""
    auto_fail: ClassVar[bool] = True
    """Fail the tuple when ``process`` raises; without it, the tuple times out."""
    async_window: ClassVar[int] = 64
    """Number of tuples of a task in flight at once, if ``process`` is ``async``."""
    assets: ClassVar[Sequence[str]] = ()
    """Keys of the Dagster assets on which it reports, such as ``"lake/clicks"``.

    Nimbus refuses reports on other assets. They come to the conf of the component, as
    ``topology.component.assets``.
    """
    _kind = "bolt"
    _is_full: bool = False
    """True while the bolt accepts no tuple (of blocking bolts).

    The worker then calls :meth:`_make_room` instead.
    """

    _room_at: int = 0
    """Time of ``context.now_ms()`` before which :meth:`_make_room` has no effect.

    Unless it is 0, a full bolt waits for an external system (see ``TargetRetries``): spouts are
    held back, and no message timeout runs.
    """

    @classmethod
    def _spec_conf(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """The conf that the class requires, with the assets on which it reports.

        These are defined elsewhere: a code location makes no asset of its own of them.
        """
        conf = super()._spec_conf(args)
        declared: Any = cls.assets
        is_list = isinstance(declared, list | tuple)
        if not is_list or not all(isinstance(path, str) for path in declared):
            raise InvalidTopology(
                f"{cls.__name__}.assets must be a list of keys of Dagster assets, such as "
                f"['lake/clicks'], got {declared!r:.100}: rename an attribute that is not such a "
                "list"
            )
        if declared:
            metadata = dict.fromkeys(declared)
            metadata.update(conf.get(ASSET_METADATA_KEY) or {})
            paths = [*(conf.get(ASSETS_KEY) or ()), *declared]
            conf[ASSETS_KEY] = list(dict.fromkeys(paths))
            conf[ASSET_METADATA_KEY] = metadata
        return conf

    def _make_room(self) -> None:
        """End :attr:`_is_full`, if that is possible now."""

    def _begin(self) -> None:
        """Begin a transaction of the state (of bolts with state)."""

    def _undo(self) -> None:
        """Revert the state to the last :meth:`_begin`."""

    def _once(self, tups: list[Tuple]) -> list[Tuple]:
        """The tuples of a batch without repetitions, where the bolt has ids."""
        return tups

    def process(self, tup: Tuple) -> Any:
        """Handle one tuple.

        The worker calls the instance attribute ``process`` of a stateful bolt (see the class).
        """
        raise TypeError(f"{type(self).__name__} does not define process(self, tup)")

    def named(self, tup: Tuple) -> dict[str, Any]:
        """The values of a received tuple by field."""
        fields = self.context.source_fields(tup.component, tup.stream)
        return dict(zip(fields, tup.values, strict=False))

    def process_tick(self, tup: Tuple) -> Any:
        """Called every ``topology.tick.tuple.freq.secs`` seconds when that is set."""

    def emit(
        self,
        tup: Sequence[Any],
        stream: str | None = None,
        anchors: Sequence[Tuple | int | str] | None = None,
        direct_task: int | None = None,
        need_task_ids: bool = False,
    ) -> list[int] | None:
        """Emit values, and return the receiving task ids if ``need_task_ids``.

        The tuple fails or times out together with its ``anchors``: by default the tuple in process;
        with ``[]`` it is not tracked. On the worker's loop an instance attribute replaces this
        method (see the class).
        """
        return self._bound().emit(tup, stream, anchors, direct_task, need_task_ids, None)

    @property
    def dagster(self) -> DagsterReports:
        """Reports to Dagster.

        For example ``self.dagster.materialize("lake/clicks", partition="2026-11-21-10:00")``.
        """
        return DagsterReports(self)

    def _anchors(self, anchors: Any) -> Any:
        """The effective anchors of an emit or event."""
        return anchors

    def ack(self, tup: Tuple | int | str) -> None:
        """Ack a tuple (or ``tup.id``), through the collector's closure.

        Only the first ``ack`` or ``fail`` of a tuple counts.
        """
        self._bound().ack(tup._tuple if isinstance(tup, TupleId) else tup)

    _fail_reason: Any = None
    """Reason of the calls of :meth:`fail` without one."""

    def fail(self, tup: Tuple | int | str, reason: Any = None) -> None:
        """Fail a tuple (or ``tup.id``).

        Its spout is notified now instead of at the timeout. ``reason`` (an exception, or text) is
        in the dead letter that the tuple may become.
        """
        if reason is None:
            reason = self._fail_reason
        self._bound().fail(tup._tuple if isinstance(tup, TupleId) else tup, reason)


class KeyValueState(Protocol):
    """Key-value store in memory, saved at checkpoints.

    Values have the types that tuples may hold. Assign a changed value: ``state[key] = value``. A
    value that is changed in place is not saved.
    """

    def get(self, key: Any, default: Any = None) -> Any:
        """The value, or ``default``."""
        ...

    def __getitem__(self, key: Any) -> Any: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __delitem__(self, key: Any) -> None: ...

    def __contains__(self, key: Any) -> bool: ...

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...

    def items(self) -> Iterator[tuple[Any, Any]]:
        """The (key, value) pairs of this task."""
        ...


class StatefulBolt(Bolt):
    """Bolt with ``self.state``, from ``initialize`` on.

    It is a base class, or a mixin: ``class Totals(StatefulBolt, WindowedBolt)``.

    A tuple is acked only when its changes of the state are in a checkpoint, so that no change is
    lost: tuples without a checkpoint are replayed. A checkpoint is taken when the task's queue is
    empty, and at least every ``topology.state.checkpoint.interval.ms``. When ``process`` raises,
    its changes of the state are reverted.

    A tuple can be applied twice: when its worker dies between a checkpoint and the acks, or when
    another bolt failed it. ``message_id`` prevents that: a tuple whose id was applied in the last
    four message timeouts goes to ``process_again`` instead of ``process``.

    If all inputs are grouped by fields, state is divided by key: the key of a state entry must be
    the value that the tuple was grouped by (for several fields a tuple of values), and the entry
    moves with it when the number of tasks changes. Otherwise each task has its own state; then
    ``merge_states`` merges the states of removed tasks.
    """

    state: KeyValueState
    state_scope: ClassVar[Literal["key", "task"] | None] = None
    """Overrides how the state is divided."""
    message_id: ClassVar[str | Sequence[str] | None] = None
    """Fields whose values are the id of a tuple on its stream.

    The inputs must be grouped by fields.
    """
    _sink_batches: Any = None
    """Ids and batches in the task's state log; the worker sets it."""

    def process_again(self, tup: Tuple) -> None:
        """Handle a tuple that was applied before.

        Repeat the emits that downstream bolts need; by default nothing is emitted.
        """

    def merge_states(self, key: Any, values: list[Any]) -> Any:
        """Merge the values of several tasks for a key, when the number of tasks shrinks."""
        raise InvalidRequest(
            f"{type(self).__name__} has fewer tasks than before, "
            f"and {len(values)} values for {key!r:.80}: "
            "define merge_states(self, key, values)"
        )

    def _begin(self) -> None:
        self.state._begin()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]

    def _undo(self) -> None:
        self.state._undo()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]

    def _once(self, tups: list[Tuple]) -> list[Tuple]:
        if not self.message_id:
            return tups
        # Of tuples with the same id the last one, at the place of the first.
        by_id = {self._sink_batches.id_of(tup): tup for tup in tups}
        return list(by_id.values())
