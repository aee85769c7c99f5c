"""Columns that the stages exchange, as Arrow types and as Spark's DDL."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import pyarrow as pa

from storm_dagster.core.scheduling.units import Executors

_TYPES = {
    "bool": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "text": pa.string(),
    "ints": pa.list_(pa.int32()),
    "texts": pa.list_(pa.string()),
}
_DDL = {pa.int32(): "int", pa.int64(): "bigint", pa.string(): "string", pa.bool_(): "boolean"}


def _fields(text: str, **nested: pa.DataType) -> list[pa.Field]:
    """Fields by text, as in ``"node host: text, port: int"``; ``nested`` are further types, by
    name.
    """
    types = _TYPES | nested
    groups = [group.split(":") for group in text.split(",")]
    return [pa.field(name, types[kind.strip()]) for names, kind in groups for name in names.split()]


ABOUT = pa.struct(
    _fields(
        "name strategy event: text, reassign use_old user_workers: bool, workers executors: int, single_master: bool, "
        "isolation: texts, reserve: int, memory master_memory: long, cpu: int, "
        "acker master: int, related: lists, units differ: ints, differ_names: texts",
        lists=pa.list_(_TYPES["ints"]),
    )
)
"""``core.scheduling.units.TopologySummary``."""

SUPERVISORS = pa.schema(_fields("cluster: int, node host: text, ports used: ints"))
TOPOLOGIES = pa.schema(_fields("cluster topology: int, history: bool, about: about", about=ABOUT))
"""``topology`` is the place in the order of service; ``history``: it has an assignment or
user-defined workers.
"""

RUNS = pa.schema(
    _fields("cluster topology: int, history: bool, component first count size: int, members: ints")
)
"""``count`` executors of ``size`` consecutive tasks each, from task ``first`` on; one executor of
``members`` when its tasks are not consecutive.
"""

HISTORY = pa.schema(
    _fields(
        "cluster topology: int, kind: text, number: int, node host: text, port: int, memory: long, cpu: int, "
        "tasks components counts: ints"
    )
)
"""``kind`` is ``old`` (a worker of the current assignment), ``user`` (a user-defined worker,
``number`` its place in the list), ``dead`` or ``unstopped`` (task ids).
"""

_REQUESTED = "node: text, port: int, host: text, old: bool, size: int, hint: slot, components: ints"
_SLOT = pa.struct(_fields("node: text, port: int"))
_REUSABLE = "worker: int, node: text, port: int, size: int, weights numbers: ints, master: bool"
SLOT_REQUEST = pa.struct(
    _fields(
        "unchanged: bool, wanted staying: int, alone: bool, requested: requested, own: slots, reusable: reusable, "
        "needs: needs, fixed: ints, total missing unassigned: int, clash: ints",
        requested=pa.list_(pa.struct(_fields(_REQUESTED, slot=_SLOT))),
        slots=pa.list_(_SLOT),
        reusable=pa.list_(pa.struct(_fields(_REUSABLE))),
        needs=pa.list_(pa.struct(_fields("component units: int, blocked: texts"))),
    )
)
"""``core.scheduling.requested_workers.SlotRequest``."""

SLOT_REQUESTS = pa.schema(
    _fields("cluster topology: int, text: text, request: request", request=SLOT_REQUEST)
)
"""One row for each topology; ``text`` is ``ABOUT`` as JSON: every group of a stage
carries its schema, and a wide one costs more than the rows.
"""

ALLOCATED = pa.schema(
    _fields(
        "cluster topology: int, kind: text, number: int, node host: text, port: int, role: text, ref why: int, "
        "text: text"
    )
)
"""``kind`` is ``slot``, ``failed``, or ``freed`` for a live worker whose slot is released, with its
number as ``ref``. A slot is a ``core.scheduling.slot_allocation.AllocatedSlot``; the ``text`` of a
failure is the refusal as JSON.
"""

PLACED = pa.schema(
    _fields(
        "cluster topology: int, node host: text, port why: int, memory: long, cpu: int, units reasons: ints, "
        "text: text, number: int, against: text"
    )
)
"""The rows of ``core.scheduling.strategy.TopologyEvent.assign``."""


def read_executors(runs: pa.Table) -> dict[int, Executors]:
    """Topology -> its executors, from the runs of some topologies."""
    columns = (
        runs.column(name).to_pylist()
        for name in ("topology", "first", "component", "count", "size", "members")
    )
    found: dict[int, Executors] = {}
    for topology, part in groupby(
        sorted(zip(*columns, strict=True), key=itemgetter(0, 1)), itemgetter(0)
    ):
        units: list[int] = []
        components: list[int] = []
        groups: list[Sequence[int]] = []
        several = False
        for _, first, component, count, size, members in part:
            mine = range(first, first + count * size, size)
            units += mine
            components += [component] * count
            groups += [members] if members else (range(unit, unit + size) for unit in mine)
            several = several or size > 1
        found[topology] = Executors(units, components, groups if several else None)
    return found


def ddl_type(kind: pa.DataType) -> str:
    """The type in Spark's notation."""
    if isinstance(kind, pa.ListType):
        return f"array<{ddl_type(kind.value_type)}>"
    if isinstance(kind, pa.StructType):
        fields = (kind.field(index) for index in range(kind.num_fields))
        return f"struct<{', '.join(f'{field.name}: {ddl_type(field.type)}' for field in fields)}>"
    return _DDL[kind]


def ddl(schema: pa.Schema) -> str:
    """The schema in Spark's notation."""
    return ", ".join(f"{field.name} {ddl_type(field.type)}" for field in schema)
