"""Received values with their fields as attributes (``tup.values.word``), for the bolts that may use
them.

To name the values of a tuple takes about as long as to send it. So they stay plain lists for a bolt
whose code shows that it takes them by position only, where a plain list and named values cannot be
told apart.
"""

import dis
import re
from collections.abc import Callable
from typing import Any

from storm_dagster.api.context import TopologyContext
from storm_dagster.api.tuples import Tuple, Values

_SKIPPED = frozenset(("CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "RESUME"))
_BY_POSITION = (
    r"LOAD_FAST\w*:{name} LOAD_ATTR:values "
    # values[0], unpacked, in a loop
    r"((LOAD_CONST|LOAD_SMALL_INT):\d+ (BINARY_SUBSCR:None|BINARY_OP:26)|UNPACK_SEQUENCE:\d+|GET_ITER:None) "
    # self.emit(tup.values), which copies them
    r"|(LOAD_METHOD|LOAD_ATTR):emit LOAD_FAST\w*:{name} LOAD_ATTR:values (CALL|CALL_METHOD):1 "
)


_USERS = ("process", "process_again", "group_key", "process_batch", "process_window", "row_of")
"""Methods that a class of the user may have, and that see tuples."""


def _by_position(function: Any) -> bool:
    """Whether ``function(self, tup)`` takes the values of ``tup`` by position only. Unknown code
    may use the names.
    """
    code = getattr(function, "__code__", None)
    if code is None or code.co_argcount != 2 or hasattr(function, "__wrapped__"):
        return False
    name, text = code.co_varnames[1], ""
    for step in dis.get_instructions(code):
        if step.opname not in _SKIPPED:
            # One instruction may load two variables.
            for what in (
                step.argval
                if isinstance(step.argval, tuple) and "FAST" in step.opname
                else (step.argval,)
            ):
                text += f"{step.opname}:{what if isinstance(what, str) else step.arg if 'OP' in step.opname else what} "
    return f":{name} " not in re.sub(_BY_POSITION.format(name=name), "", text)


def _is_own(function: Any) -> bool:
    return function is None or function.__module__.startswith("storm_dagster.")


def namer_of(bolt: Any, context: TopologyContext) -> Callable[[list[Tuple]], None] | None:
    """A function that names the values of a batch; ``None`` if the bolt never uses the names."""
    given = [getattr(type(bolt), name, None) for name in _USERS]
    # A function of `@bolt` may ask for the whole tuple.
    own = _is_own(type(bolt).emit) and "tup" not in getattr(type(bolt), "_supplied", ())
    if own and all(_is_own(method) or _by_position(method) for method in given):
        return None
    part = context.spec.component(context.component)
    kinds = {
        (item.component, item.stream): Values.of_stream(
            context.source_fields(item.component, item.stream)
        )
        for item in (part.inputs if part else ())
        if not item.component.startswith("__")
    }

    def name_values(batch: list[Tuple]) -> None:
        for tup in batch:
            kind = kinds.get((tup.component, tup.stream))
            if kind is not None and type(tup.values) is list:
                tup.values = kind(tup.values)

    return name_values
