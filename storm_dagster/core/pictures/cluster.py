"""Picture of a whole cluster: supervisors x slots, colored by topology."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from storm_dagster.core.pictures.svg import GONE, bar, box, color, document, label, legend, short
from storm_dagster.core.snapshot.workers import WorkerSnapshot

_MARGIN = 12
_WIDTH = 760
_ROW = 30
_LABEL = 84
_HEADER = 28
_MOST_SUPERVISORS = 40


@dataclass(frozen=True)
class DrawnSlot:
    """A slot as it is drawn; free without a ``topology``."""

    port: int
    topology: str | None = None
    components: Mapping[str, int] | None = None
    """Component -> how many of its tasks are in the slot."""


@dataclass(frozen=True)
class DrawnSupervisor:
    """A supervisor as it is drawn; with ``gone``, one that assignments name but that does not
    live.
    """

    id: str
    host: str
    slots: Sequence[DrawnSlot]
    gone: bool = False


def drawn_slots(ports: Iterable[int], workers: Iterable[WorkerSnapshot]) -> list[DrawnSlot]:
    """The slots of a supervisor by port, used and free; a worker may run in a slot that the
    supervisor no longer offers.
    """
    slots = {port: DrawnSlot(port) for port in ports}
    for worker in workers:
        slots[worker.port] = DrawnSlot(worker.port, worker.topology_name, worker.tasks_by_component)
    return [slot for _, slot in sorted(slots.items())]


def cluster_picture(supervisors: Sequence[DrawnSupervisor], title: str) -> str:
    """SVG text: one frame for each supervisor, one row for each slot.

    A row has the color of its topology and one segment for each component, as wide as its share of
    the tasks. Free slots are dashed, supervisors that are gone framed in red. Beyond 40 supervisors
    the rest are counted.
    """
    drawn = list(supervisors[:_MOST_SUPERVISORS])
    names = sorted({slot.topology for item in supervisors for slot in item.slots if slot.topology})
    colors = {name: color(index) for index, name in enumerate(names)}
    column = (_WIDTH - 3 * _MARGIN) // 2
    tops = [_MARGIN + _HEADER, _MARGIN + _HEADER]
    body: list[str] = []
    for item in drawn:
        # Each frame goes below the shorter column, so that many supervisors fit on one screen.
        side = 0 if tops[0] <= tops[1] else 1
        left, top = _MARGIN + side * (column + _MARGIN), tops[side]
        height = _HEADER + max(1, len(item.slots)) * _ROW + 6
        body.append(box(left, top, column, height, "#f5f6f8", GONE if item.gone else "#c3c9d1"))
        words = f"{short(item.id)} on {short(item.host)}{' (gone)' if item.gone else ''}"
        body.append(label(left + 8, top + 18, words, 12, "#2b2f36", bold=True))
        for row, slot in enumerate(item.slots):
            body.extend(_slot(slot, left + 8, top + _HEADER + row * _ROW, column - 16, colors))
        tops[side] = top + height + _MARGIN
    y = max(tops)
    if len(supervisors) > len(drawn):
        body.append(
            label(
                _MARGIN,
                y + 8,
                f"and {len(supervisors) - len(drawn)} more supervisors",
                12,
                "#6b7280",
            )
        )
        y += 24
    parts, y = legend({short(name): fill for name, fill in colors.items()}, y, _WIDTH, _MARGIN)
    return document(_WIDTH, y, title, [*body, *parts])


def _slot(
    slot: DrawnSlot, x: float, y: float, width: float, colors: Mapping[str, str]
) -> Iterable[str]:
    yield label(x, y + 17, str(slot.port), 12, "#374151")
    left, room = x + _LABEL - 30, width - _LABEL + 30
    if slot.topology is None:
        yield box(left, y, room, _ROW - 6, "#ffffff", "#9aa4b2", ' stroke-dasharray="4 3"')
        yield label(left + 8, y + 16, "free", 11, "#6b7280")
        return
    fill = colors[slot.topology]
    counts = dict(
        sorted((slot.components or {}).items(), key=lambda item: (item[0].startswith("__"), item))
    )
    total = sum(counts.values())
    at = left
    for index, (component, count) in enumerate(counts.items()):
        share = room * count / total
        words = f"{slot.topology}: {component} x{count}"
        yield bar(at, y, share, _ROW - 6, fill, words, opacity=(1.0, 0.82)[index % 2])
        text = f"{component} x{count}" if count > 1 else component
        letters = int((share - 8) / 6.2)
        if len(text) > letters > 3:
            text = text[: letters - 1] + "\u2026"
        if len(text) <= letters:
            yield label(at + 5, y + 16, text, 11, "#ffffff")
        at += share
    if not total:
        yield box(left, y, room, _ROW - 6, fill, fill)
