"""The picture of tasks on slots: well-formed, complete, and safe with any name."""

from __future__ import annotations

import base64
import xml.dom.minidom
from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.pictures.slots import placed_supervisors, slots_picture
from storm_dagster.core.pictures.svg import data_uri
from storm_dagster.model.ranges import encode_ranges
from storm_dagster.model.records import WorkerSlot
from storm_dagster.model.slot import Slot

COMPONENTS = {1: "count", 2: "count", 3: "split", 4: "__acker", 5: "lines", 6: "__topology_master"}


def placed(node: str, host: str, port: int, tasks: tuple[int, ...]) -> WorkerSlot:
    return WorkerSlot.of_tasks(Slot(node, port), host, tasks, memory_bytes=0, cpu=1)


WORKERS = [
    placed("s2", "h2", 6900, (5, 6)),
    placed("s1", "h1", 6901, (4,)),
    placed("s1", "h1", 6900, (1, 2, 3)),
]


def drawn(
    workers: Sequence[WorkerSlot], components: Mapping[int, str], title: str, name: str = "wc"
) -> str:
    tasks = [(worker, worker.ids) for worker in workers]
    supervisors = placed_supervisors(tasks, components, name, {"s1:6901"})
    return slots_picture(supervisors, title, by_component=True)


def texts(svg: str) -> list[str]:
    document = xml.dom.minidom.parseString(svg)
    return [
        "".join(child.data for child in node.childNodes if child.nodeType == child.TEXT_NODE)
        for node in document.getElementsByTagName("text")
    ]


def test_every_task_slot_supervisor_and_component_is_named() -> None:
    found = texts(drawn(WORKERS, COMPONENTS, "wc on three slots"))
    for task in COMPONENTS:
        assert str(task) in found
    assert {"wc on three slots", "s1 on h1", "s2 on h2", "6900", "6901"} <= set(found)
    assert {"count (2)", "split (1)", "__acker (1)", "lines (1)"} <= set(found)


def test_one_component_has_one_colour_and_two_have_two() -> None:
    svg = drawn(WORKERS, COMPONENTS, "")
    document = xml.dom.minidom.parseString(svg)
    colours: dict[str, set[str]] = {}
    for group in document.getElementsByTagName("g"):
        title = group.getElementsByTagName("title")[0].firstChild
        assert isinstance(title, xml.dom.minidom.Text)
        component = title.data.split(": ")[1]
        colours.setdefault(component, set()).add(
            group.getElementsByTagName("rect")[0].getAttribute("fill")
        )
    assert all(len(found) == 1 for found in colours.values())
    assert len({next(iter(found)) for found in colours.values()}) == len(colours)


def test_a_kept_slot_has_a_dashed_frame() -> None:
    assert drawn(WORKERS, COMPONENTS, "").count("stroke-dasharray") == 1
    assert "stroke-dasharray" not in drawn(WORKERS[:1], COMPONENTS, "")


def test_many_tasks_become_bars_and_many_supervisors_are_counted() -> None:
    workers = [
        placed(f"s{n:03}", f"h{n:03}", 6900, tuple(range(10 * n + 1, 10 * n + 11)))
        for n in range(200)
    ]
    components = {task: f"c{task % 3}" for task in range(1, 2001)}
    svg = drawn(workers, components, "large")
    found = texts(svg)
    assert "and 40 more supervisors" in found
    assert "c0 x4" in found and "c0 (666)" in found
    assert len(svg) < 200_000
    fewer = [
        worker.model_copy(update={"tasks": encode_ranges(worker.ids[:2])}) for worker in workers
    ]
    assert {"and 40 more supervisors", "1", "2"} <= set(texts(drawn(fewer, components, "small")))


def test_squares_of_a_full_slot_stay_inside_its_frame() -> None:
    """Every square lies inside a frame, and no two squares are in the same place."""
    components = dict.fromkeys(range(1, 101), "count")
    svg = drawn([placed("s1", "h1", 6900, tuple(components))], components, "one full slot")
    document = xml.dom.minidom.parseString(svg)
    rects = document.getElementsByTagName("rect")
    frames = [box(rect) for rect in rects if "frame" in rect.getAttribute("class")]
    groups = document.getElementsByTagName("g")
    squares = [box(group.getElementsByTagName("rect")[0]) for group in groups]
    assert len(set(squares)) == 100
    for left, top, right, bottom in squares:
        inside = [
            frame
            for frame in frames
            if frame[0] <= left and frame[1] <= top and right <= frame[2] and bottom <= frame[3]
        ]
        assert len(inside) == 2, "of the supervisor and of the slot"


def box(rect: xml.dom.minidom.Element) -> tuple[float, float, float, float]:
    """Left, top, right, bottom."""
    x, y, width, height = (float(rect.getAttribute(name)) for name in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


def test_an_empty_assignment_is_still_a_picture() -> None:
    xml.dom.minidom.parseString(drawn([], {}, "nothing placed"))


@given(name=st.text(max_size=60), host=st.text(max_size=60), title=st.text(max_size=60))
def test_no_text_breaks_out_of_the_picture(name: str, host: str, title: str) -> None:
    svg = drawn([placed(name, host, 1, (1,))], {1: name}, title, name)
    document = xml.dom.minidom.parseString(svg)
    elements = {node.tagName for node in document.getElementsByTagName("*")}
    assert elements <= {"svg", "rect", "text", "title", "g"}


def test_the_data_uri_decodes_to_the_picture() -> None:
    svg = drawn(WORKERS, COMPONENTS, "\u00fcml\u00e4ut <&>")
    head, _, body = data_uri(svg).partition(",")
    assert head == "data:image/svg+xml;base64"
    assert base64.b64decode(body).decode() == svg
