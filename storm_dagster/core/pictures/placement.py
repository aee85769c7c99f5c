"""A picture of tasks on slots, as SVG text made without any drawing library.

Every text in it is escaped: component, host and supervisor names come from users. It is shown as an
``<img>`` with a data URI, in which browsers run no scripts and load nothing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from xml.sax.saxutils import escape

from storm_dagster.core.pictures.cluster import DrawnSlot, DrawnSupervisor, cluster_picture
from storm_dagster.core.pictures.svg import box, clean, color, document, label, legend, short

_CELL = 22
_GAP = 3
_PER_ROW = 12
_LABEL_WIDTH = 120
_MARGIN = 12
_HEADER = 26
_SLOT_PADDING = 6
_MOST_TASKS = 600
_MOST_SLOTS = 120


@dataclass(frozen=True)
class SlotTasks:
    """One slot as it is drawn."""

    node: str
    host: str
    port: int
    tasks: tuple[int, ...]
    kept: bool = False
    """The topology used the slot before: drawn with a dashed frame."""


def slots_picture(slots: Sequence[SlotTasks], components: Mapping[int, str], title: str) -> str:
    """SVG text: one frame for each supervisor, one row for each slot, one square for each task.

    Squares carry the task id and the color of the component, which the legend names. Above 120
    slots the rest are counted in a last line; above 600 tasks it is :func:`cluster_picture`, whose
    slots have one bar for each component.
    """
    if sum(len(slot.tasks) for slot in slots) > _MOST_TASKS:
        rows = {(slot.host, slot.node): list[DrawnSlot]() for slot in slots}
        for slot in slots:
            counts = Counter(components.get(task, "?") for task in slot.tasks)
            rows[slot.host, slot.node].append(DrawnSlot(slot.port, title, counts))
        drawn_nodes = [
            DrawnSupervisor(node, host, row) for (host, node), row in sorted(rows.items())
        ]
        return cluster_picture(drawn_nodes, title)
    drawn = sorted(slots, key=lambda slot: (slot.host, slot.node, slot.port))
    hidden = len(drawn) - _MOST_SLOTS
    drawn = drawn[:_MOST_SLOTS]
    counts = Counter(components.get(task, "?") for slot in slots for task in slot.tasks)
    names = sorted(counts, key=lambda name: (name.startswith("__"), name))
    colors = {name: color(index) for index, name in enumerate(names)}
    width = _LABEL_WIDTH + _PER_ROW * (_CELL + _GAP) + 4 * _MARGIN
    body: list[str] = []
    y = _MARGIN + _HEADER
    for node, grouped in groupby(drawn, key=lambda slot: slot.node):
        members = list(grouped)
        rows_of = [max(1, -(-len(slot.tasks) // _PER_ROW)) for slot in members]
        heights = [rows * (_CELL + _GAP) + 2 * _SLOT_PADDING for rows in rows_of]
        frame = _HEADER + sum(heights) + _SLOT_PADDING
        body.append(box(_MARGIN, y, width - 2 * _MARGIN, frame, "#f5f6f8", "#c3c9d1"))
        body.append(
            label(_MARGIN + 8, y + 17, f"{node} on {members[0].host}", 12, "#2b2f36", bold=True)
        )
        inner = y + _HEADER
        for slot, height in zip(members, heights, strict=True):
            body.extend(_slot(slot, inner, height, width, components, colors))
            inner += height
        y += frame + _MARGIN
    if hidden > 0:
        body.append(label(_MARGIN, y + 12, f"and {hidden} more slots", 12, "#6b7280"))
        y += 24
    parts, y = legend(
        {f"{short(name)} ({counts[name]})": colors[name] for name in names}, y, width, _MARGIN
    )
    body.extend(parts)
    return document(width, y, title, body)


def _slot(
    slot: SlotTasks,
    y: int,
    height: int,
    width: int,
    components: Mapping[int, str],
    colors: Mapping[str, str],
) -> Iterable[str]:
    x = _MARGIN + _LABEL_WIDTH
    dash = ' stroke-dasharray="4 3"' if slot.kept else ""
    yield box(_MARGIN + 8, y, width - 2 * _MARGIN - 16, height - 4, "#ffffff", "#9aa4b2", dash)
    yield label(_MARGIN + 16, y + height / 2 + 2, f"slot {slot.port}", 12, "#374151")
    top = y + _SLOT_PADDING - 2
    for index, task in enumerate(slot.tasks):
        column, row = index % _PER_ROW, index // _PER_ROW
        left, upper = x + column * (_CELL + _GAP), top + row * (_CELL + _GAP)
        name = components.get(task, "?")
        yield (
            f"<g><title>{escape(clean(f'task {task}: {name}'))}</title>"
            f'<rect x="{left}" y="{upper}" width="{_CELL}" height="{_CELL}" rx="4" fill="{colors[name]}"/>'
            f'<text x="{left + _CELL / 2}" y="{upper + 15}" font-size="{11 if task < 1000 else 8}" '
            f'text-anchor="middle" fill="#ffffff">{task}</text></g>'
        )
