"""Picture of supervisors x slots, as SVG text without a drawing library.

Every text in it is escaped: component, host and supervisor names come from users. Metadata show it
as an ``<img>`` with a data URI, in which browsers run no scripts and load no files.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from storm_dagster.core.pictures.svg import (
    GONE,
    bar,
    box,
    clean,
    color,
    document,
    label,
    legend,
    short,
)
from storm_dagster.core.snapshot.workers import WorkerSnapshot
from storm_dagster.model.multimap import multimap
from storm_dagster.model.records import WorkerSlot

MAX_SLOTS = 160
"""Number of slots that are drawn; supervisors beyond them are counted."""
MAX_SQUARES = 600
"""Tasks of which each has a square; more of them are bars."""

# In pixels.
_MARGIN = 12
"""Room around and between frames."""
_COLUMN = 362
"""Width of a frame."""
_HEADER = 28
"""Height of the title of the picture, and of that of a frame."""
_PORT = 54
"""Width of the port before a row."""
_ROW = 30
"""Height of a slot, with the room to the next one."""
_CELL = 22
"""Side of the square of a task."""
_PITCH = 25
"""From one square to the next, in both directions."""
_DASHED = ' stroke-dasharray="4 3"'
"""Attribute of a dashed frame."""


@dataclass(frozen=True)
class DrawnSlot:
    """A slot in the picture; free without a ``topology``."""

    port: int
    topology: str = ""
    components: Mapping[int, str] = field(default_factory=dict)
    """Task -> component, in the order in which the tasks are drawn."""
    reused: bool = False
    """The topology used the slot before: drawn with a dashed frame."""


@dataclass(frozen=True)
class DrawnSupervisor:
    """A supervisor in the picture.

    With ``gone``, assignments name it but it does not live.
    """

    id: str
    host: str
    slots: Sequence[DrawnSlot]
    gone: bool = False


def drawn_slots(workers: Mapping[int, WorkerSnapshot | None]) -> list[DrawnSlot]:
    """Slots of a supervisor.

    ``workers`` maps ports to the worker in them, ``None`` in a free slot.
    """
    slots: list[DrawnSlot] = []
    for port, worker in workers.items():
        if worker is None:
            slots.append(DrawnSlot(port))
        else:
            slots.append(DrawnSlot(port, worker.topology_name, worker.components))
    return slots


def running_supervisors(
    workers: Iterable[WorkerSnapshot], *, gone: bool = False
) -> list[DrawnSupervisor]:
    """The slots in use by supervisor, in order of host, id and port."""
    by_supervisor = multimap(((worker.host, worker.node), worker) for worker in workers)
    supervisors: list[DrawnSupervisor] = []
    for (host, node), own_workers in sorted(by_supervisor.items()):
        slots = drawn_slots({worker.port: worker for worker in sorted(own_workers, key=_port)})
        supervisors.append(DrawnSupervisor(node, host, slots, gone))
    return supervisors


def placed_supervisors(
    tasks: Iterable[tuple[WorkerSlot, Sequence[int]]],
    components: Mapping[int, str],
    topology: str,
    former_slots: Set[str] = frozenset(),
) -> list[DrawnSupervisor]:
    """The slots of a placement by supervisor, in order of host, id and port.

    ``tasks`` has each worker and its task ids, which take long to decode. ``components`` maps the
    tasks of the topology to their component. ``former_slots`` has the keys of the slots that it
    used before.
    """
    by_supervisor = multimap(((worker.host, worker.node), (worker, ids)) for worker, ids in tasks)
    supervisors: list[DrawnSupervisor] = []
    for (host, node), own_workers in sorted(by_supervisor.items()):
        slots: list[DrawnSlot] = []
        for worker, ids in sorted(own_workers, key=_port_of_tasks):
            components_of_tasks = {task: components.get(task, "?") for task in ids}
            is_reused = worker.slot.key in former_slots
            slots.append(DrawnSlot(worker.port, topology, components_of_tasks, is_reused))
        supervisors.append(DrawnSupervisor(node, host, slots))
    return supervisors


def _port(worker: WorkerSnapshot) -> int:
    return worker.port


def _port_of_tasks(tasks: tuple[WorkerSlot, Sequence[int]]) -> int:
    worker, _ = tasks
    return worker.port


def slots_picture(
    supervisors: Sequence[DrawnSupervisor], title: str, *, by_component: bool = False
) -> str:
    """SVG text: one frame for each supervisor, one row for each slot.

    A row has one bar for each component, as wide as its share of the tasks, in the color of the
    topology. Free slots are dashed, supervisors that are gone framed in red. Beyond
    :data:`MAX_SLOTS` slots supervisors are counted.

    ``by_component`` is for the slots of one topology: colors are those of components, at most
    :data:`MAX_SQUARES` tasks are squares with their ids, and the picture is as narrow as a dialog
    of Dagster.
    """
    colors = _Colors(supervisors, by_component)
    drawn = _drawn_supervisors(supervisors)
    omitted_count = len(supervisors) - len(drawn)
    columns = 1 if by_component else 2
    width = _MARGIN + columns * (_COLUMN + _MARGIN)
    tops = [_MARGIN + _HEADER] * columns
    body: list[str] = []
    for supervisor in drawn:
        # Each frame goes below the shortest column, so that many supervisors fit on one screen.
        column = tops.index(min(tops))
        left = _MARGIN + column * (_COLUMN + _MARGIN)
        height = _frame_height(supervisor, colors)
        body.extend(_frame(supervisor, left, tops[column], height, colors))
        tops[column] += height + _MARGIN
    y = max(tops)
    if omitted_count:
        body.append(label(_MARGIN, y + 8, f"and {omitted_count} more supervisors", 12, "#6b7280"))
        y += 24
    parts, y = legend(colors.legend(), y, width, _MARGIN)
    return document(width, y, title, [*body, *parts])


class _Colors:
    """Colors of one picture, and the form of its tasks."""

    def __init__(self, supervisors: Sequence[DrawnSupervisor], by_component: bool) -> None:
        self._tasks = Counter[str]()
        """Component -> number of its tasks in the picture."""
        topologies: set[str] = set()
        for supervisor in supervisors:
            for slot in supervisor.slots:
                self._tasks.update(slot.components.values())
                if slot.topology:
                    topologies.add(slot.topology)
        self.by_component = by_component
        names = sorted(self._tasks, key=_system_last) if by_component else sorted(topologies)
        self._colors = {name: color(index) for index, name in enumerate(names)}
        """Component or topology -> its color."""
        self.squares = by_component and self._tasks.total() <= MAX_SQUARES
        """True if each task is drawn as a separate square."""

    def of(self, slot: DrawnSlot, component: str) -> str:
        """The color of the tasks of a component in a slot."""
        return self._colors[component if self.by_component else slot.topology]

    def legend(self) -> dict[str, str]:
        """Text -> color."""
        if not self.by_component:
            return {short(name): fill for name, fill in self._colors.items()}
        return {f"{short(name)} ({self._tasks[name]})": fill for name, fill in self._colors.items()}


def _system_last(component: str) -> tuple[bool, str]:
    """Sort key of components: those of users by name, then those of the system."""
    return component.startswith("__"), component


def _drawn_supervisors(supervisors: Sequence[DrawnSupervisor]) -> Sequence[DrawnSupervisor]:
    """The first supervisors that have room, but at least one."""
    slots = 0
    for index, supervisor in enumerate(supervisors):
        slots += max(1, len(supervisor.slots))
        if slots > MAX_SLOTS and index > 0:
            return supervisors[:index]
    return supervisors


def _frame_height(supervisor: DrawnSupervisor, colors: _Colors) -> int:
    rows = sum(_row_height(slot, colors) for slot in supervisor.slots)
    return _HEADER + max(_ROW, rows) + 6


def _row_height(slot: DrawnSlot, colors: _Colors) -> int:
    if not colors.squares:
        return _ROW
    lines = -(-len(slot.components) // _squares_per_line())
    return _ROW + max(0, lines - 1) * _PITCH


def _squares_per_line() -> int:
    return (_COLUMN - 16 - _PORT) // _PITCH


def _frame(
    supervisor: DrawnSupervisor, left: int, top: int, height: int, colors: _Colors
) -> Iterable[str]:
    """The frame of a supervisor with its title and its slots."""
    outline = GONE if supervisor.gone else "#c3c9d1"
    yield box(left, top, _COLUMN, height, "#f5f6f8", outline)
    text = f"{short(supervisor.id)} on {short(supervisor.host)}"
    if supervisor.gone:
        text += " (gone)"
    yield label(left + 8, top + 18, text, 12, "#2b2f36", bold=True)
    y = top + _HEADER
    for slot in supervisor.slots:
        yield label(left + 8, y + 17, str(slot.port), 12, "#374151")
        yield from _slot(slot, left + 8 + _PORT, y, colors)
        y += _row_height(slot, colors)


def _slot(slot: DrawnSlot, left: int, top: int, colors: _Colors) -> Iterable[str]:
    """A slot without its port: free, with squares, or with bars."""
    width = _COLUMN - 16 - _PORT
    height = _row_height(slot, colors) - 6
    if not slot.topology:
        yield box(left, top, width, height, "#ffffff", "#9aa4b2", _DASHED)
        yield label(left + 8, top + 16, "free", 11, "#6b7280")
        return
    if colors.squares:
        yield box(left, top, width, height, "#ffffff", "#9aa4b2", _DASHED if slot.reused else "")
        yield from _squares(slot, left, top, colors)
    else:
        yield from _bars(slot, left, top, width, colors)


def _squares(slot: DrawnSlot, left: int, top: int, colors: _Colors) -> Iterable[str]:
    """One square for each task of a slot, in lines."""
    for index, (task, component) in enumerate(slot.components.items()):
        line, column = divmod(index, _squares_per_line())
        x = left + 8 + column * _PITCH
        y = top + 1 + line * _PITCH
        size = 11 if task < 1000 else 8
        fill = colors.of(slot, component)
        yield (
            f"<g><title>{escape(clean(f'task {task}: {component}'))}</title>"
            f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" rx="4" fill="{fill}"/>'
            f'<text x="{x + _CELL / 2}" y="{y + 15}" font-size="{size}" '
            f'text-anchor="middle" fill="#ffffff">{task}</text></g>'
        )


def _bars(slot: DrawnSlot, left: int, top: int, width: int, colors: _Colors) -> Iterable[str]:
    """One bar for each component of a slot, as wide as its share of the tasks."""
    counts = Counter(slot.components.values())
    if not counts:
        yield box(left, top, width, _ROW - 6, "#ffffff", "#9aa4b2")
        yield label(left + 8, top + 16, f"{short(slot.topology)} without tasks", 11, "#6b7280")
    x = float(left)
    for index, component in enumerate(sorted(counts, key=_system_last)):
        count = counts[component]
        share = width * count / counts.total()
        words = f"{slot.topology}: {component} x{count}"
        # Neighbors of the same color differ in opacity.
        opacity = 0.82 if index % 2 and not colors.by_component else 1.0
        yield bar(x, top, share, _ROW - 6, colors.of(slot, component), words, opacity=opacity)
        text = _bar_text(component, count, share)
        if text:
            yield label(x + 5, top + 16, text, 11, "#ffffff")
        x += share


def _bar_text(component: str, count: int, width: float) -> str:
    """Text that fits into a bar of that width; empty if none does."""
    text = f"{component} x{count}" if count > 1 else component
    # A letter of this size is about 6.2 pixels wide.
    letters = int((width - 8) / 6.2)
    if len(text) <= letters:
        return text
    return text[: letters - 1] + "\u2026" if letters > 3 else ""
