"""Sending of tuples to their targets: the hot path of a worker.

The functions called per tuple keep their form, which is measured by ``benchmarks/dataplane.py``.
"""

import datetime
from collections.abc import Sequence
from typing import Any

import msgspec

from storm_dagster.api.tuples import Tuple
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.topology import StreamSpec
from storm_dagster.model.values import ATOMIC, copy_value, decode_value, encode_own, own_values
from storm_dagster.model.wire import MAX_FRAME_BYTES
from storm_dagster.worker.dataplane.routes import MAX_BUNDLED, Route
from storm_dagster.worker.dataplane.tree import Ledger, Tree, leaves, next_edge


def route_of(routes: dict[str, Route], stream: str, component: str) -> Route:
    """Return the route of a declared stream.

    ``InvalidRequest`` for any other stream.
    """
    try:
        return routes[stream]
    except KeyError:
        declared = ", ".join(map(repr, routes)) or "none"
        raise InvalidRequest(
            f"component {component!r} emits on stream {stream!r} but declares: {declared}; add it "
            "to outputs"
        ) from None


def check_values(values: Any, route: Route) -> None:
    """Check that ``values`` has one value per field of the stream.

    It must be a list or tuple. ``InvalidRequest`` otherwise.
    """
    if not isinstance(values, list | tuple):
        raise InvalidRequest(
            f"component {route.component!r} emits {type(values).__name__} {values!r:.60} on stream "
            f"{route.stream!r}, which takes a list of values: wrap it in [ ]"
        )
    if len(values) != route.width:
        raise InvalidRequest(
            f"component {route.component!r} emits {len(values)} values on stream "
            f"{route.stream!r}, which has {route.width} fields "
            f"({', '.join(route.fields) or 'none'}): emit a value for each of them, or change "
            "outputs"
        )


def sent_and_received(values: Any, route: Route, task: int) -> list[Any]:
    """Return the values as another worker would receive them.

    ``InvalidRequest`` if they cannot be sent.
    """
    check_values(values, route)
    raw = encode_own(own_values(values, route.fields, route.stream, route.component, task))
    if len(raw) > MAX_FRAME_BYTES:
        raise InvalidRequest(
            f"component {route.component!r}, task {task} emits a tuple of {len(raw)} bytes on "
            f"stream {route.stream!r}, the limit is {MAX_FRAME_BYTES}: send a reference to it (a "
            "path, a key), or several smaller tuples"
        )
    return decode_value(raw)


# Type in the declaration of a stream -> classes of its values.
_TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "float": (float, int),
    "bool": bool,
    "bytes": (bytes, bytearray, memoryview),
    "list": (list, tuple),
    "dict": dict,
    "datetime": datetime.datetime,
    "any": object,
}


def check_types(values: Sequence[Any], stream: StreamSpec, name: str, component: str) -> None:
    """Check that each value is of the type that its field declares.

    ``InvalidRequest`` otherwise.
    """
    for field, kind, value in zip(stream.fields, stream.types, values, strict=False):
        # In Python, a bool is an int.
        if not isinstance(value, _TYPES[kind]) or (
            isinstance(value, bool) and kind in ("int", "float")
        ):
            raise InvalidRequest(
                f"component {component!r} emits {value!r:.60} ({type(value).__name__}) as field "
                f"{field!r} of stream {name!r}, which is declared {kind}: convert it, or declare "
                "another type"
            )


def send_remote(link: Any, tree: Tree | None, values: Sequence[Any]) -> None:
    """Buffer a tuple for another worker: in the bundle of its tree, or in a new one."""
    if link.last is tree:
        link.bundle.append(values)
        return
    if tree is None:
        root: Any = 0
        edge = 0
    elif tree.parents is None:
        root = tree.root
        edge = next_edge()
        tree.val ^= edge
        tree.peers |= link.peer.bit
    else:
        edge = 0
        root = []
        for leaf in leaves(tree):
            number = next_edge()
            leaf.val ^= number
            leaf.peers |= link.peer.bit
            root += (leaf.root, number)
    # The newest bundle may still grow: `RemoteLink.take` looks at its length.
    if len(link.bundle) > MAX_BUNDLED:
        link.long = True
    link.last = tree
    link.bundle = [values]
    if not link.items:
        link.peer.dirty.append(link)
    link.items.append((root, edge, link.bundle))


def deliver(
    link: Any,
    tree: Tree | None,
    ledger: Ledger,
    component: str,
    stream: str,
    task: int,
    values: Sequence[Any],
) -> None:
    """Send a tuple to one target."""
    append = link.append
    if append is None:
        send_remote(link, tree, values)
        return
    if tree is not None:
        ledger.add(tree)
    append(Tuple(0, component, stream, task, values, tree))


def send_to_targets(
    route: Route,
    values: Sequence[Any],
    tree: Tree | None,
    ledger: Ledger,
    component: str,
    task: int,
    direct_task: int | None,
    rich: bool | None = None,
) -> list[Any]:
    """Send a tuple to all its targets, and return their links.

    The caller counts ``route.emitted``. ``values`` belong to the first target, each other one gets
    a copy. ``rich``: True if some are of other types than ``ATOMIC``; ``None``: not known yet.
    """
    if direct_task:
        links = [route.link_to(direct_task)]
    elif route.direct is not None and not route.fans and not route.many:
        if route.direct:
            raise InvalidRequest(
                f"stream {route.stream!r} is direct: name the receiving task with direct_task=..."
            )
        links = []
    else:
        links = route.links(values)
    if rich is None:
        rich = not ATOMIC.issuperset(map(type, values))
    copy: Any = values
    # Encoded once, for the receivers in all other workers.
    raw: Any = None
    for index, link in enumerate(links):
        if rich and link.append is None:
            copy = raw = raw or msgspec.Raw(encode_own(values))
        elif index:
            copy = copy_value(values) if rich else [*values]
        deliver(link, tree, ledger, component, route.stream, task, copy)
    return links
