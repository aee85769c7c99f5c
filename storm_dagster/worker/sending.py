"""Handing a tuple to its targets: the hottest code of the worker outside of the components themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from storm_dagster.api.tuples import Tuple
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.worker.routes import Route
from storm_dagster.worker.tree import Ledger, Tree, leaves, next_edge, next_tuple_id

__all__ = ["check_values", "deliver", "remote", "route_of", "spread"]


def route_of(routes: dict[str, Route], stream: str, component: str) -> Route:
    """The route of a declared stream; ``InvalidRequest`` for any other."""
    try:
        return routes[stream]
    except KeyError:
        known = ", ".join(map(repr, routes)) or "none"
        raise InvalidRequest(
            f"component {component!r} emits on stream {stream!r} but declares: {known}; add it to outputs"
        ) from None


def check_values(values: Any, route: Route) -> None:
    """``InvalidRequest`` unless ``values`` is a list or tuple of as many values as the stream has fields."""
    if not isinstance(values, list | tuple):
        raise InvalidRequest(
            f"emit on stream {route.stream!r} needs a list of values, got {type(values).__name__}: wrap it in [ ]"
        )
    if len(values) != route.width:
        raise InvalidRequest(
            f"stream {route.stream!r} has {route.width} fields, {len(values)} values were emitted"
        )


def remote(link: Any, tree: Tree | None, values: Sequence[Any]) -> None:
    """Add a tuple to the bundles that wait for another worker."""
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
    else:
        edge = 0
        root = []
        for leaf in leaves(tree):
            number = next_edge()
            leaf.val ^= number
            root += (leaf.root, number)
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
    """Hand one tuple to one target."""
    append = link.append
    if append is None:
        remote(link, tree, values)
        return
    if tree is not None:
        ledger.add(tree)
    append(Tuple(next_tuple_id(), component, stream, task, values, tree))


def spread(
    route: Route,
    values: Sequence[Any],
    tree: Tree | None,
    ledger: Ledger,
    component: str,
    task: int,
    direct_task: int | None,
) -> list[Any]:
    """Hand one tuple to all its targets, which are returned. ``route.emitted`` is counted by the caller."""
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
    for link in links:
        deliver(link, tree, ledger, component, route.stream, task, values)
    return links
