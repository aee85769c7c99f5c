"""One spelling of a slot."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.model.errors import Corrupt
from storm_dagster.model.slot import Slot


@given(node=st.text(), port=st.integers())
def test_every_slot_is_read_from_its_key(node: str, port: int) -> None:
    """Also one that only a forged record names, which must not stop healing."""
    assert Slot.parse(Slot(node, port).key) == Slot(node, port)


def test_the_key_is_supervisor_colon_port() -> None:
    assert Slot("s1", 6700).key == "s1:6700"
    assert Slot.parse("fe80::1:6700") == Slot("fe80::1", 6700)


@pytest.mark.parametrize("text", ["", "s1", "s1:", "s1:x", "s1:--1", "s1:6 ", "s1:\u0661"])
def test_other_text_is_no_slot(text: str) -> None:
    with pytest.raises(Corrupt, match="<supervisor>:<port>"):
        Slot.parse(text)


def test_slots_sort_by_supervisor_and_port_and_are_pairs_in_json() -> None:
    slots = [Slot("s2", 1), Slot("s1", 10), Slot("s1", 9)]
    assert sorted(slots) == [Slot("s1", 9), Slot("s1", 10), Slot("s2", 1)]
    assert json.dumps(slots[0]) == '["s2", 1]'
    assert msgspec.json.encode(slots[0]) == b'["s2",1]'
