"""Placement of a topology's tasks, and routes of its output streams.

Routes are resolved once per assignment, so that each tuple is cheap.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from storm_dagster.core.dataplane.load_aware import LoadAwareShuffle
from storm_dagster.host.requirements import missing_part
from storm_dagster.model.errors import InvalidRequest, InvalidTopology, typed_error_text
from storm_dagster.model.fusion import FUSED
from storm_dagster.model.groupings import GROUPINGS, GroupingSpec, custom_chooser, fields_chooser
from storm_dagster.model.multimap import multimap
from storm_dagster.model.names import FORMER_MODULES
from storm_dagster.model.records import StateHome
from storm_dagster.model.slot import Slot
from storm_dagster.model.topology import TopologySpec
from storm_dagster.worker.dataplane.tree import next_edge


@dataclass(frozen=True)
class Placement:
    """Slots and addresses of all tasks, and the tasks of this worker."""

    version: int
    """Version of the assignment."""
    slots: Mapping[int, Slot]
    """Task id -> slot, of all tasks."""
    addresses: Mapping[Slot, str]
    """Slot -> ``host:port``."""
    components: Mapping[int, str]
    """Task id -> component, of all tasks."""
    own_tasks: frozenset[int]
    """Tasks assigned to this worker's slot."""
    open: frozenset[int]
    """Own tasks that may run now, because no other worker still owns them."""
    tokens: Mapping[str, Slot] = field(default_factory=dict)
    """Start tokens of the topology's live workers -> slot."""
    ready: frozenset[Slot] = frozenset()
    """Slots whose worker runs all its tasks."""
    state: StateHome = field(default_factory=lambda: StateHome(marker=""))
    """The cluster's record of the topology's state."""


def by_component(components: Mapping[int, str]) -> dict[str, list[int]]:
    """Component -> its tasks, ascending."""
    return multimap((components[task], task) for task in sorted(components))


_NEVER = object()
"""Instead of the tree of a bundle: there is none, and ``None`` is the tree of untracked tuples."""
MAX_BUNDLED = 1000
"""Tuples in a bundle that is sent."""


def resolve(name: str) -> Any:
    """Import the object that ``"module:QualName"`` names.

    Raises ``MissingPart`` if an extra is missing, :class:`InvalidTopology` for any other reason.
    """
    module, _, attribute = name.partition(":")
    try:
        imported = importlib.import_module(FORMER_MODULES.get(module, module))
        return attrgetter(attribute)(imported)
    except (ImportError, AttributeError) as error:
        part = missing_part(error, repr(name)) if isinstance(error, ModuleNotFoundError) else None
        raise part or InvalidTopology(
            f"{name!r} cannot be imported in the worker ({typed_error_text(error)}): is it "
            "in the archive?"
        ) from error


@dataclass(slots=True, eq=False)
class LocalLink:
    """Link to a task of this worker.

    ``append`` puts a tuple into its queue.
    """

    task: int
    append: Callable[[Any], None]


def split_bundle(
    bundle: tuple[Any, int, list[Any]], max_tuples: int
) -> list[tuple[Any, int, list[Any]]]:
    """Divide a bundle into bundles of at most ``max_tuples`` tuples.

    Their edges are random and XOR to the edge of ``bundle``, which the sender's part of the tree
    has already.
    """
    root, edge, tuples = bundle
    parts: list[tuple[Any, int, list[Any]]] = []
    # [root, edge, root, edge, ...]: the edges of the last part, after those of all others.
    last_edges = [*root] if isinstance(root, list) else [root, edge]
    is_tracked = last_edges[0] != 0
    for end in range(max_tuples, len(tuples), max_tuples):
        edges = [*last_edges]
        if is_tracked:
            for index in range(1, len(edges), 2):
                edges[index] = next_edge()
                last_edges[index] ^= edges[index]
        parts.append(_bundle(edges, root, tuples[end - max_tuples : end]))
    parts.append(_bundle(last_edges, root, tuples[len(parts) * max_tuples :]))
    return parts


def _bundle(edges: list[int], root: Any, tuples: list[Any]) -> tuple[Any, int, list[Any]]:
    """Bundle of the same form as that with ``root``; ``edges``: [root, edge, ...]."""
    return (edges, 0, tuples) if isinstance(root, list) else (root, edges[1], tuples)


def _ignore_count(name: str, stream: str, number: int) -> None:
    """Ignore a count.

    A link without a task of this worker only forwards tuples.
    """


@dataclass(slots=True, eq=False)
class RemoteLink:
    """Link to a task of another worker: buffers bundles until the pass ends.

    Consecutive tuples of one tree are one bundle with one edge, which saves a random number, an XOR
    and a tree at the receiver for each tuple.
    """

    task: int
    """The receiving task."""
    source: int
    """The sending task."""
    stream: str
    peer: Any
    """The ``Peer`` of the receiving worker."""
    append: None = None
    """``None``, unlike that of :class:`LocalLink`: the hot path tells them apart by it."""
    items: list[Any] = field(default_factory=list)
    """Bundles of this pass: (root, or list of roots and edges; edge; tuples)."""
    last: Any = _NEVER
    """Tree of the newest bundle."""
    bundle: list[Any] = field(default_factory=list)
    """Tuples of the newest bundle."""
    long: bool = False
    """True if one of the bundles must be divided, apart from :attr:`bundle`, the newest one."""
    count: Callable[[str, str, int], None] = _ignore_count
    """Adds to a count by stream of the sending task: name, stream, number."""

    def take(self) -> list[Any]:
        """Remove and return the buffered bundles.

        Each has at most :data:`MAX_BUNDLED` tuples.
        """
        items = self.items
        self.items = []
        self.last = _NEVER
        if not self.long and len(self.bundle) <= MAX_BUNDLED:
            return items
        self.long = False
        parts: list[Any] = []
        for item in items:
            parts += split_bundle(item, MAX_BUNDLED)
        return parts


class Route:
    """One output stream of one task."""

    def __init__(self, stream: str, fields: Sequence[str], component: str = "") -> None:
        self.stream: str = stream
        self.fields: tuple[str, ...] = tuple(fields)
        self.component: str = component
        self.width: int = len(fields)
        self.shuffles: list[LoadAwareShuffle[Any]] = []
        """Load-aware choosers."""
        self.only: Callable[[Sequence[Any]], Any] | None = None
        """The chooser, when there is exactly one subscription and it gives one target."""
        self.target_cache: dict[Any, Any] | None = None
        """Targets of :attr:`only` by the first value, filled by the chooser: saves a call.

        ``None`` if the choice needs other values.
        """
        self.fans: list[Callable[[Sequence[Any]], Any]] = []
        """Choosers that give one target each."""
        self.many: list[Callable[[Sequence[Any]], Sequence[Any]]] = []
        """Choosers that give several targets."""
        self.direct: dict[int, Any] | None = None
        """Task -> link, of the tasks that ``direct_task`` may name.

        ``None`` unless the stream is direct, or read with direct grouping.
        """
        self.copies: int = 0
        """Receivers that each emitted tuple has at least: the number of :attr:`fans`."""
        self.emitted = 0
        self.extra: int = 0
        """Difference of the number of sent tuples from ``emitted * copies``."""

    @property
    def transferred(self) -> int:
        """Tuples sent: one for each emitted tuple and receiving task."""
        return self.emitted * self.copies + self.extra

    def adopt(self, former: "Route") -> None:
        """Continue the counts of the route that this one replaces."""
        self.emitted: int = former.emitted
        self.extra = former.transferred - self.emitted * self.copies

    def links(self, values: Sequence[Any]) -> list[Any]:
        """Return the targets of a tuple without ``direct_task``, and count its copies."""
        # Called per tuple, measured by benchmarks/dataplane.py.
        targets = [choose(values) for choose in self.fans]
        for choose_many in self.many:
            chosen = choose_many(values)
            self.extra += len(chosen)
            targets.extend(chosen)
        return targets

    def link_to(self, task: int) -> Any:
        """Return the link to the target ``task`` of a direct emit, and count its copies.

        ``InvalidRequest`` if it does not read the stream with direct grouping.
        """
        link = self.direct.get(task) if self.direct else None
        if link is None:
            raise InvalidRequest(
                f"stream {self.stream!r} cannot be sent to task {task}: no task of that id reads "
                "it with direct grouping"
            )
        # A direct tuple has one receiver: correct the number that `copies` counts for it.
        self.extra += 1 - self.copies
        return link


def build_routes(
    spec: TopologySpec,
    tasks_of: Mapping[str, Sequence[int]],
    component: str,
    task: int,
    link: Callable[[int, str], Any],
    context: Any = None,
) -> "dict[str, Route]":
    """Build the routes of all streams of ``task``.

    ``tasks_of``: component -> its tasks. ``link(target task, stream)`` creates a link. Subscribers
    without tasks are skipped. Raises the errors of a custom grouping.
    """
    part = spec.component(component)
    routes: dict[str, Route] = {}
    for stream, declared in (part.outputs if part else {}).items():
        if stream.startswith("__") and not stream.startswith(FUSED):
            continue
        route = routes[stream] = Route(stream, declared.fields, component)
        if declared.direct:
            route.direct = {}
        for reader, _, reading in spec.components():
            targets = sorted(tasks_of.get(reader, ()))
            for item in reading.inputs:
                if item.component == component and item.stream == stream and targets:
                    links = [link(target, stream) for target in targets]
                    _subscribe(route, item.grouping, links, task, context)
        route.copies = len(route.fans)
        if route.copies == 1 and not route.many and route.direct is None:
            route.only = route.fans[0]
    return routes


def _subscribe(
    route: "Route", grouping: GroupingSpec, links: list[Any], task: int, context: Any
) -> None:
    """Add the chooser of one input of a reader to a route.

    ``links``: to all tasks of the reader; ``task``: the sender. Raises the errors of a custom
    grouping.
    """
    rule = GROUPINGS[grouping.type]
    by_task = {link.task: link for link in links}
    if rule.needs == "direct":
        route.direct = {**(route.direct or {}), **by_task}
        return
    if rule.local:
        # The tasks of this worker, if there are any.
        links = [link for link in links if link.append is not None] or links
    if rule.needs == "object":
        build_grouping = resolve(grouping.object or "")
        custom_grouping = build_grouping(
            context, route.component, route.stream, list(by_task), **grouping.args
        )
        choose = custom_chooser(by_task, custom_grouping)
    elif rule.chooser:
        names = grouping.fields if rule.needs == "fields" else ()
        indices = [route.fields.index(name) for name in names]
        if grouping.type == "fields" and indices == [0] and len(links) > 1:
            route.target_cache = {}
            choose = fields_chooser(links, indices, route.target_cache)
        else:
            choose = rule.chooser(links, indices)
    else:
        shuffle: LoadAwareShuffle[Any] = LoadAwareShuffle(links, task)
        if len(links) > 1:
            route.shuffles.append(shuffle)
        choose = shuffle.choose
    (route.many if rule.many else route.fans).append(choose)
