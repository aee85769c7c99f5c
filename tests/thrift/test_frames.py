"""What is refused before it is decoded."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.nimbus.thrift.frames import (
    MAX_DEPTH,
    MAX_VALUES,
    MalformedFrame,
    check_message,
)
from storm_dagster.nimbus.thrift.idl import encode_reply, load_idl
from storm_rigs.protocols.thrift_calls import encode_call

BOOL, DOUBLE, I32, STRING, STRUCT, MAP, SET, LIST = 2, 4, 8, 11, 12, 13, 14, 15


def call(
    arguments: bytes, name: bytes = b"getLeader", kind: int = 1, version: int = 0x8001
) -> bytes:
    """A call with those bytes as its argument structure."""
    return (
        struct.pack("!HBBi", version, 0, kind, len(name)) + name + struct.pack("!i", 7) + arguments
    )


def field(kind: int, value: bytes, number: int = 1) -> bytes:
    return struct.pack("!bh", kind, number) + value


STOP = b"\0"


def test_every_method_s_call_passes() -> None:
    idl = load_idl()
    common = idl.ComponentCommon(
        inputs={
            idl.GlobalStreamId(componentId="s", streamId="default"): idl.Grouping(
                shuffle=idl.NullStruct()
            )
        },
        streams={"default": idl.StreamInfo(output_fields=["word"], direct=False)},
        parallelism_hint=2,
        json_conf="{}",
    )
    shell = idl.ComponentObject(shell=idl.ShellComponent(execution_command="python", script="b.py"))
    topology = idl.StormTopology(
        spouts={"s": idl.SpoutSpec(spout_object=shell, common=common)},
        bolts={"b": idl.Bolt(bolt_object=shell, common=common)},
        state_spouts={},
    )
    for name in idl.Nimbus.thrift_services:
        assert check_message(encode_call(name, 1)) == 0
    whole = encode_call(
        "submitTopology", 1, name="x", uploadedJarLocation="y", jsonConf="{}", topology=topology
    )
    assert 20 < check_message(whole) < 100
    assert (
        check_message(encode_call("uploadChunk", 1, location="x", chunk=b"\xff" * 1_000_000)) == 2
    )


def test_old_messages_without_a_version_pass() -> None:
    assert check_message(struct.pack("!i", 4) + b"ping" + struct.pack("!bi", 1, 7) + STOP) == 0


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "too early"),
        (b"\x80\x01", "too early"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "method name"),
        (call(STOP, version=0x8002), "another protocol"),
        (b"\x82" + b"\x21" * 40, "another protocol"),
        (call(STOP, kind=2), "message type 2 is not a call"),
        (call(STOP, name=b""), "method name"),
        (call(STOP, name=b"x" * 200), "method name"),
        (call(STOP)[:-1], "too early"),
        (call(STOP) + b"more", "after the end"),
        (call(field(STRING, struct.pack("!i", 2**31 - 1)) + STOP), "announced"),
        (call(field(STRING, struct.pack("!i", -1)) + STOP), "announced"),
        (call(field(LIST, struct.pack("!bi", I32, 2**31 - 1)) + STOP), "a container of"),
        (call(field(LIST, struct.pack("!bi", I32, -5)) + STOP), "a container of"),
        # Types without a size: a decoder would count to two thousand million for nothing.
        (call(field(LIST, struct.pack("!bi", 99, 2**31 - 1)) + STOP), "type 99"),
        (call(field(SET, struct.pack("!bi", 0, 2**31 - 1)) + STOP), "type 0"),
        (call(field(MAP, struct.pack("!bbi", 1, 1, 2**31 - 1)) + STOP), "type 1"),
        (call(field(77, b"") + STOP), "type 77"),
        (call(field(LIST, struct.pack("!bi", STRUCT, MAX_VALUES + 1)) + STOP * (MAX_VALUES + 2)), "more than"),
    ],
)  # fmt: skip
def test_a_malformed_frame_is_refused_with_the_reason(frame: bytes, why: str) -> None:
    with pytest.raises(MalformedFrame, match=why):
        check_message(frame)


def test_nesting_is_bounded_however_deep_it_claims_to_be() -> None:
    one_in_another = struct.pack("!bi", LIST, 1)
    for depth in (MAX_DEPTH + 1, 10_000, 1_000_000):
        with pytest.raises(MalformedFrame, match="nested"):
            check_message(call(field(LIST, one_in_another * depth)))
    with pytest.raises(MalformedFrame, match="nested"):
        check_message(call(field(STRUCT, b"") * 10_000))
    fits = (
        field(LIST, struct.pack("!bi", LIST, 1) * 20 + struct.pack("!bi", BOOL, 1) + b"\1") + STOP
    )
    assert check_message(call(fits)) == 22


def test_answers_are_no_calls() -> None:
    idl = load_idl()
    with pytest.raises(MalformedFrame):
        check_message(encode_reply("getLeader", 1, idl.Nimbus.getLeader_result()))


@given(st.binary(max_size=300))
def test_any_bytes_end_in_a_verdict(raw: bytes) -> None:
    for frame in (raw, call(raw)):
        try:
            check_message(frame)
        except MalformedFrame:
            continue
