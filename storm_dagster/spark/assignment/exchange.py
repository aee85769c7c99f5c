"""Rows that the stages exchange: keys as columns, the value beside them as bytes.

Spark groups, joins and sorts by the keys. Only the rules of ``core.scheduling`` read a value, so
that its fields are declared there alone. A value is JSON of the standard library, because Python
workers of a Spark server elsewhere may have no other library than pyarrow.
"""

import json
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from storm_dagster.core.scheduling.requested_workers import (
    DifferNeed,
    RequestedSlot,
    ReusableSlot,
    SlotRequest,
)
from storm_dagster.core.scheduling.slot_allocation import AllocatedSlot
from storm_dagster.core.scheduling.task_assignment import Allocated
from storm_dagster.core.scheduling.units import TopologySummary
from storm_dagster.model.placement_reasons import Refusal
from storm_dagster.model.slot import Slot

if TYPE_CHECKING:
    from storm_dagster.model.records import SupervisorInfo

_KEY = pa.int32()
"""Type of the number of a cluster, and of a topology in it."""
_PORTS = pa.list_(pa.int32())
"""Type of the ports of a supervisor."""

SUPERVISORS = pa.schema(
    [("cluster", _KEY), ("node", pa.string()), ("ports", _PORTS), ("used", _PORTS)]
)
"""Ports of supervisors; free slots are ranked on columns."""

HELD_SLOTS = pa.schema(
    [("cluster", _KEY), ("topology", _KEY), ("node", pa.string()), ("port", pa.int32())]
)
"""Slots of the current assignments."""

VALUES = pa.schema(
    [("cluster", _KEY), ("topology", _KEY), ("kind", pa.string()), ("value", pa.binary())]
)
"""Values of topologies, and one value of the cluster.

``topology`` is the place in the order of service, or ``CLUSTER``; each has at most one value of
each kind.
"""

CLUSTER = -1
"""``topology`` of the cluster's value."""
SUPERVISOR_RECORDS = "supervisors"
"""(id, record) of each supervisor of the cluster, by ascending id."""

SUMMARY = "summary"
"""``units.TopologySummary``."""
EXECUTORS = "executors"
"""Runs of ``executor_runs``."""
HISTORY = "history"
"""Rows of ``history.history_rows``; a topology without rows has no such value."""
REQUEST = "request"
"""``requested_workers.SlotRequest`` of a topology with a history."""
ALLOCATED = "allocated"
"""``task_assignment.Allocated``."""
PLACED = "placed"
"""Rows of ``strategy.TopologyEvent.assign``."""

Value = tuple[int, int, str, bytes]
"""A row of ``VALUES``."""


def values_table(rows: Iterable[Value]) -> pa.Table:
    """The rows as a table of ``VALUES``."""
    return table_of(rows, VALUES)


def table_of(rows: Iterable[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    """The rows, in the order of the schema's columns, as a table."""
    columns: list[Any] = list(zip(*rows, strict=True))
    return pa.table(columns or [[]] * len(schema), schema=schema)


def read_values(table: pa.Table) -> Iterator[Value]:
    """The rows of a table of ``VALUES``; further columns are left out."""
    columns = [table.column(name).to_pylist() for name in VALUES.names]
    return zip(*columns, strict=True)


def encode(value: Any) -> bytes:
    """The bytes of a value: named tuples are lists, objects are maps of their fields."""
    return json.dumps(value, separators=(",", ":"), default=vars).encode()


def decode(data: bytes) -> Any:
    """The value of the bytes, as plain lists and maps."""
    return json.loads(data)


def decode_supervisors(data: bytes) -> "list[tuple[str, SupervisorInfo]]":
    """(id, record) of each supervisor.

    The record is a plain object with the fields of ``SupervisorInfo``, because a Python worker may
    lack the library of the record classes.
    """
    supervisors: list[tuple[str, SupervisorInfo]] = []
    for node, fields in decode(data):
        record = cast("SupervisorInfo", SimpleNamespace(**fields))
        supervisors.append((node, record))
    return supervisors


def decode_summary(data: bytes) -> TopologySummary:
    """The summary of a topology."""
    return TopologySummary(*decode(data))


def decode_request(data: bytes) -> SlotRequest:
    """The slot request of a topology."""
    request = SlotRequest(*decode(data))
    return request._replace(
        requested=[_requested_slot(fields) for fields in request.requested],
        own=[_slot(fields) for fields in request.own],
        reusable=[ReusableSlot(*fields) for fields in request.reusable],
        needs=[DifferNeed(*fields) for fields in request.needs],
    )


def _requested_slot(fields: Iterable[Any]) -> RequestedSlot:
    slot = RequestedSlot(*fields)
    return slot if slot.hint is None else slot._replace(hint=_slot(slot.hint))


def _slot(fields: Iterable[Any]) -> Slot:
    return Slot(*fields)


def decode_allocated(data: bytes) -> Allocated:
    """The slots of a topology, or its refusal."""
    fields = decode(data)
    refusal = fields["refusal"]
    return Allocated(
        slots=[AllocatedSlot(**slot) for slot in fields["slots"]],
        freed=fields["freed"],
        refusal=None if refusal is None else Refusal(*refusal),
    )
