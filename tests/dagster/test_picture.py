"""The picture of tasks on slots: well-formed, complete, and safe with any name."""

from __future__ import annotations

import base64
import xml.dom.minidom

from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.pictures.placement import SlotTasks, slots_picture
from storm_dagster.core.pictures.svg import data_uri

SLOTS = [
    SlotTasks("s1", "h1", 6900, (1, 2, 3)),
    SlotTasks("s1", "h1", 6901, (4,), kept=True),
    SlotTasks("s2", "h2", 6900, (5, 6)),
]
COMPONENTS = {1: "count", 2: "count", 3: "split", 4: "__acker", 5: "lines", 6: "__topology_master"}


def texts(svg: str) -> list[str]:
    document = xml.dom.minidom.parseString(svg)
    return [
        "".join(child.data for child in node.childNodes if child.nodeType == child.TEXT_NODE)
        for node in document.getElementsByTagName("text")
    ]


def test_every_task_slot_supervisor_and_component_is_named() -> None:
    found = texts(slots_picture(SLOTS, COMPONENTS, "wc on three slots"))
    for task in COMPONENTS:
        assert str(task) in found
    assert {"wc on three slots", "s1 on h1", "s2 on h2", "slot 6900", "slot 6901"} <= set(found)
    assert {"count (2)", "split (1)", "__acker (1)", "lines (1)"} <= set(found)


def test_one_component_has_one_colour_and_two_have_two() -> None:
    svg = slots_picture(SLOTS, COMPONENTS, "")
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


def test_many_tasks_become_bars_and_many_slots_are_counted() -> None:
    slots = [
        SlotTasks(f"s{n:03}", f"h{n}", 6900, tuple(range(10 * n + 1, 10 * n + 11)))
        for n in range(200)
    ]
    components = {task: f"c{task % 3}" for task in range(1, 2001)}
    svg = slots_picture(slots, components, "large")
    found = texts(svg)
    assert "and 160 more supervisors" in found
    assert "c0 x4" in found
    assert len(svg) < 200_000
    few = slots_picture(
        [SlotTasks(s.node, s.host, s.port, s.tasks[:2]) for s in slots], components, "small"
    )
    assert "and 80 more slots" in texts(few)


def test_an_empty_assignment_is_still_a_picture() -> None:
    xml.dom.minidom.parseString(slots_picture([], {}, "nothing placed"))


@given(name=st.text(max_size=60), host=st.text(max_size=60), title=st.text(max_size=60))
def test_no_text_breaks_out_of_the_picture(name: str, host: str, title: str) -> None:
    svg = slots_picture([SlotTasks(name, host, 1, (1,))], {1: name}, title)
    document = xml.dom.minidom.parseString(svg)
    elements = {node.tagName for node in document.getElementsByTagName("*")}
    assert elements <= {"svg", "rect", "text", "title", "g"}


def test_the_data_uri_decodes_to_the_picture() -> None:
    svg = slots_picture(SLOTS, COMPONENTS, "\u00fcml\u00e4ut <&>")
    head, _, body = data_uri(svg).partition(",")
    assert head == "data:image/svg+xml;base64"
    assert base64.b64decode(body).decode() == svg
