"""Received values with their fields as attributes (``tup.values.word``).

Naming the values of a tuple takes about as much time as sending it. So they stay plain lists for a
bolt whose code shows that it takes them by position only: for it, a plain list and named values are
the same.
"""

import dis
import re
from collections.abc import Callable, Iterator
from typing import Any

from storm_dagster.api.context import TopologyContext
from storm_dagster.api.tuples import Tuple, Values

# Instructions without meaning for the use of values.
_SKIPPED = frozenset(("CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "RESUME"))
# Matches the instructions of a use by position, as `_describe` writes them.
_BY_POSITION = (
    r"LOAD_FAST\w*:{name} LOAD_ATTR:values "
    # values[0], unpacked, in a loop
    r"((LOAD_CONST|LOAD_SMALL_INT):\d+ (BINARY_SUBSCR:None|BINARY_OP:26)"
    r"|UNPACK_SEQUENCE:\d+|GET_ITER:None) "
    # self.emit(tup.values), which copies them
    r"|(LOAD_METHOD|LOAD_ATTR):emit LOAD_FAST\w*:{name} LOAD_ATTR:values (CALL|CALL_METHOD):1 "
)


_USER_METHODS = (
    "process",
    "process_again",
    "group_key",
    "process_batch",
    "process_window",
    "row_of",
)
"""Methods that a class of the user may have, and that see tuples."""


def _reads_by_position(function: Any) -> bool:
    """True if ``function(self, tup)`` takes values by position only.

    False for unknown code, which may use the names.
    """
    code = getattr(function, "__code__", None)
    if code is None or code.co_argcount != 2 or hasattr(function, "__wrapped__"):
        return False
    name = code.co_varnames[1]
    text = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname not in _SKIPPED:
            text += "".join(_describe(instruction))
    other_uses = re.sub(_BY_POSITION.format(name=name), "", text)
    return f":{name} " not in other_uses


def _describe(instruction: dis.Instruction) -> Iterator[str]:
    """Yield ``OPCODE:ARGUMENT`` for each argument.

    One instruction may load two variables.
    """
    arguments = (instruction.argval,)
    if isinstance(instruction.argval, tuple) and "FAST" in instruction.opname:
        arguments = instruction.argval
    for argument in arguments:
        shown_argument = argument
        if not isinstance(argument, str) and "OP" in instruction.opname:
            shown_argument = instruction.arg
        yield f"{instruction.opname}:{shown_argument} "


def _is_own(function: Any) -> bool:
    """True if the method is missing, or that of a class of this package."""
    return function is None or function.__module__.startswith("storm_dagster.")


def namer_of(bolt: Any, context: TopologyContext) -> Callable[[list[Tuple]], None] | None:
    """Return a function that names the values of a batch, in place.

    ``None`` if the bolt never uses the names.
    """
    methods = [getattr(type(bolt), name, None) for name in _USER_METHODS]
    # A function of `@bolt` may take the whole tuple as an argument.
    is_own = _is_own(type(bolt).emit) and "tup" not in getattr(type(bolt), "_supplied", ())
    if is_own and all(_is_own(method) or _reads_by_position(method) for method in methods):
        return None
    part = context.spec.component(context.component)
    values_types: dict[tuple[str, str], Callable[[Any], Any]] = {}
    for item in part.inputs if part else ():
        if not item.component.startswith("__"):
            fields = context.source_fields(item.component, item.stream)
            values_types[item.component, item.stream] = Values.of_stream(fields)

    def name_values(batch: list[Tuple]) -> None:
        for tup in batch:
            values_type = values_types.get((tup.component, tup.stream))
            if values_type is not None and type(tup.values) is list:
                tup.values = values_type(tup.values)

    return name_values
