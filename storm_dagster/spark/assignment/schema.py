"""Columns that the stages exchange, as Arrow types and as Spark's DDL."""

from __future__ import annotations

import pyarrow as pa

_INTS = pa.list_(pa.int32())
_NAMES = pa.list_(pa.string())

ABOUT = pa.struct(
    [
        ("name", pa.string()),
        ("strategy", pa.string()),
        ("event", pa.string()),
        ("reassign", pa.bool_()),
        ("use_old", pa.bool_()),
        ("user_workers", pa.bool_()),
        ("workers", pa.int32()),
        ("executors", pa.int32()),
        ("single_master", pa.bool_()),
        ("isolation", _NAMES),
        ("reserve", pa.int32()),
        ("memory", pa.int64()),
        ("master_memory", pa.int64()),
        ("cpu", pa.int32()),
        # Components are numbered per topology: what is system, what trades tuples with what, what is apart.
        ("acker", pa.int32()),
        ("master", pa.int32()),
        ("related", pa.list_(_INTS)),
        ("units", _INTS),
        ("differ", _INTS),
        ("differ_names", _NAMES),
    ]
)
"""Conf and components of a topology; ``units`` counts executors per component."""

SUPERVISORS = pa.schema(
    [("cluster", pa.int32()), ("node", pa.string()), ("host", pa.string()), ("ports", _INTS), ("used", _INTS)]
)
TOPOLOGIES = pa.schema([("cluster", pa.int32()), ("topology", pa.int32()), ("history", pa.bool_()), ("about", ABOUT)])
"""``topology`` is the place in the order of service; ``history``: it has an assignment or user-defined workers."""

RUNS = pa.schema(
    [
        ("cluster", pa.int32()),
        ("topology", pa.int32()),
        ("history", pa.bool_()),
        ("component", pa.int32()),
        ("first", pa.int32()),
        ("count", pa.int32()),
        ("size", pa.int32()),
        ("members", _INTS),
    ]
)
"""``count`` executors of ``size`` consecutive tasks each, from task ``first`` on; one executor of ``members``
when its tasks are not consecutive."""

HISTORY = pa.schema(
    [
        ("cluster", pa.int32()),
        ("topology", pa.int32()),
        ("kind", pa.string()),
        ("number", pa.int32()),
        ("node", pa.string()),
        ("host", pa.string()),
        ("port", pa.int32()),
        ("memory", pa.int64()),
        ("cpu", pa.int32()),
        ("tasks", _INTS),
        ("components", _INTS),
        ("counts", _INTS),
    ]
)
"""``kind`` is ``old`` (a worker of the current assignment), ``user`` (a user-defined worker, ``number`` its
place in the list), ``dead`` or ``unstopped`` (task ids)."""

_SLOT = [("node", pa.string()), ("port", pa.int32())]
SLOT_REQUEST = pa.struct(
    [
        ("unchanged", pa.bool_()),
        ("count", pa.int32()),
        ("staying", pa.int32()),
        ("alone", pa.bool_()),
        (
            "requested",
            pa.list_(
                pa.struct(
                    [
                        *_SLOT,
                        ("host", pa.string()),
                        ("old", pa.bool_()),
                        ("size", pa.int32()),
                        ("hint_node", pa.string()),
                        ("hint_port", pa.int32()),
                        ("components", _INTS),
                    ]
                )
            ),
        ),
        ("own", pa.list_(pa.struct(_SLOT))),
        (
            "reusable",
            pa.list_(
                pa.struct(
                    [
                        ("worker", pa.int32()),
                        *_SLOT,
                        ("size", pa.int32()),
                        ("weights", _INTS),
                        ("numbers", _INTS),
                        ("master", pa.bool_()),
                    ]
                )
            ),
        ),
        (
            "needs",
            pa.list_(pa.struct([("component", pa.int32()), ("units", pa.int32()), ("blocked", _NAMES)])),
        ),
        ("fixed", _INTS),
        ("total", pa.int32()),
        ("missing", pa.int32()),
        ("unassigned", pa.int32()),
        ("clash", _INTS),
    ]
)
"""Slot request of a topology. ``reusable`` are old workers whose slot may be reused, with ``numbers`` of
executors that have so many tasks there (``weights``, descending); ``fixed`` are the sizes of unstopped workers,
``total``, ``missing`` and ``unassigned`` (to be placed, in no requested worker) count executors; ``clash`` is (user-defined
workers, old workers, room) when these are too many together."""

SLOT_REQUESTS = pa.schema(
    [("cluster", pa.int32()), ("topology", pa.int32()), ("text", pa.string()), ("request", SLOT_REQUEST)]
)
"""One row for each topology; ``text`` is ``ABOUT`` as JSON: every group of a stage
carries its schema, and a wide one costs more than the rows."""

ALLOCATED = pa.schema(
    [
        ("cluster", pa.int32()),
        ("topology", pa.int32()),
        ("kind", pa.string()),
        ("number", pa.int32()),
        ("node", pa.string()),
        ("host", pa.string()),
        ("port", pa.int32()),
        ("role", pa.string()),
        ("ref", pa.int32()),
        ("why", pa.int32()),
        ("text", pa.string()),
    ]
)
"""``kind`` is ``slot``, ``failed``, or ``freed`` for a live worker whose slot is released; ``role`` is ``empty``,
``requested``, ``reuse``, ``fuller`` (reused, with one executor more than the share) or ``master``, and ``ref`` the
number of the requested or old worker; ``text`` is a failure as JSON, or the next best supervisor for a slot."""

PLACED = pa.schema(
    [
        ("cluster", pa.int32()),
        ("topology", pa.int32()),
        ("node", pa.string()),
        ("host", pa.string()),
        ("port", pa.int32()),
        ("why", pa.int32()),
        ("memory", pa.int64()),
        ("cpu", pa.int32()),
        ("units", _INTS),
        ("reasons", _INTS),
        ("text", pa.string()),
        ("number", pa.int32()),
        ("against", pa.string()),
    ]
)
"""One row for each worker; a failed topology has one row without a node, its ``units`` those without a slot
and its ``text`` the failure. Otherwise the ``text`` of the first row holds the warnings, if there are any.
``number`` is the worker's place among equals, ``against`` the next best supervisor for its slot."""

_PLAIN = {pa.int32(): "int", pa.int64(): "bigint", pa.string(): "string", pa.bool_(): "boolean"}


def ddl_type(kind: pa.DataType) -> str:
    """The type in Spark's notation."""
    if isinstance(kind, pa.ListType):
        return f"array<{ddl_type(kind.value_type)}>"
    if isinstance(kind, pa.StructType):
        fields = (kind.field(index) for index in range(kind.num_fields))
        return f"struct<{', '.join(f'{field.name}: {ddl_type(field.type)}' for field in fields)}>"
    return _PLAIN[kind]


def ddl(schema: pa.Schema) -> str:
    """The schema in Spark's notation."""
    return ", ".join(f"{field.name} {ddl_type(field.type)}" for field in schema)
