"""Messages of unknown senders to a worker: the token is looked at before anything is made of the
rest, and little is kept.
"""

from __future__ import annotations

import struct
import tracemalloc
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from storm_dagster.model import wire
from storm_dagster.model.wire import (
    Frame,
    Request,
    can_travel,
    encode_frame,
    encode_request,
    sender_token,
)
from storm_dagster.worker.dataplane.transport import Peer
from storm_dagster.worker.runtime.loop import Loop

MIB = 1024 * 1024
MOST = 20_000


@pytest.fixture(autouse=True)
def few_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wire.MAX_FRAME_CONTAINERS <= 1_000_000
    monkeypatch.setattr(wire, "MAX_FRAME_CONTAINERS", MOST)


class Known:
    """A loop whose one live peer has the token ``friend``; it does not run."""

    def __init__(self) -> None:
        self.delivered: list[Frame] = []
        self.replies: list[bytes] = []
        self.tokens = {"friend": ("s", 1)}
        engine: Any = SimpleNamespace(
            placement=SimpleNamespace(tokens=self.tokens),
            deliver=lambda frame, size: self.delivered.append(frame),
        )
        transport: Any = SimpleNamespace(
            reply=lambda envelope, payload: self.replies.append(payload)
        )
        spec: Any = SimpleNamespace(token="own")
        self.loop = Loop(spec, {}, transport, SimpleNamespace(pauses=0), engine)  # type: ignore[arg-type]

    def sends(self, *raws: bytes) -> int:
        """Peak of bytes that were allocated for these messages."""
        tracemalloc.start()
        try:
            for raw in raws:
                self.loop._on_message([b"id", raw])
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


def bomb(token: str, size: int) -> bytes:
    """A frame with a tuple of ``size`` empty lists."""
    head = encode_frame(Frame(token, [(1, 2, "s", [(0, 0, [[]])])]))
    return head.replace(b"\x91\x90", b"\x91\xdd" + struct.pack(">I", size) + b"\x90" * size, 1)


def test_an_unknown_senders_frame_is_not_decoded() -> None:
    known = Known()
    assert known.sends(bomb("outsider", MIB)) < MIB, "of 72 MiB"
    assert known.loop.unknown_frames == 0 and not known.delivered


def test_what_is_held_of_unknown_senders_is_bounded_in_all() -> None:
    known = Known()
    for _ in range(40):
        known.loop._on_message(
            [b"id", encode_frame(Frame("outsider", [(1, 2, "s", [(0, 0, [[bytes(MIB // 4)]])])]))]
        )
    assert known.loop._held_bytes <= 4 * MIB and known.loop.unknown_frames >= 24
    known.tokens["outsider"] = ("s", 2)
    known.loop._retry_held_frames()
    assert (
        0 < len(known.delivered) <= 16
        and known.loop._held_bytes == 0
        and not known.loop._held_frames
    )


@pytest.mark.parametrize("token", ["", "t", "x" * 31, "x" * 32, "x" * 255, "ä"])
def test_the_token_is_read_as_the_decoder_reads_it(token: str) -> None:
    assert sender_token(encode_frame(Frame(token, pressure=True))) == token
    assert sender_token(msgspec.msgpack.encode([token, *range(20)])) == token


@pytest.mark.parametrize(
    "raw",
    [b"", b"\x90", b"\x91", b"\x91\xd9", b"\xdc\x00", b"\xc1", b"\x91\xc0", b"\x91\xa2\xff\xff"],
)
def test_garbage_has_no_token(raw: bytes) -> None:
    known = Known()
    known.sends(raw)
    assert sender_token(raw) == "" and known.loop.bad_frames == 1


@pytest.mark.parametrize(
    "raw",
    [
        b'{"token":"\xff"}',
        b'{"token":"own","op":"\xff"}',
        encode_frame(Frame("friend", [(1, 2, "stream", [])])).replace(b"stream", b"str\xffam"),
    ],
)
def test_text_that_is_no_utf_8_is_dropped(raw: bytes) -> None:
    known = Known()
    known.sends(raw)
    assert known.loop.bad_frames == 1 and not known.delivered


def test_a_peer_cannot_harm_the_worker_by_depth_or_by_number() -> None:
    known = Known()
    head = bomb("friend", 0).partition(b"\x91\xdd")[0]
    lies = head + b"\x91\xdd\xff\xff\xff\xff"
    deep = head + b"\x91" * 200_000
    assert known.sends(bomb("friend", MOST), deep, lies) < 2 * MIB
    assert known.loop.bad_frames == 3 and not known.delivered
    known.sends(encode_frame(Frame("friend")))
    assert len(known.delivered) == 1


@pytest.mark.parametrize(
    ("value", "travels"),
    [
        (bytes(range(256)) * 1_000, True),
        ("東京" * 50_000, True),
        ([1.5, 2**40, -7, True, None, "text"] * 10_000, True),
        ([[]] * MOST, False),
        ([{}] * MOST, False),
        ([msgspec.msgpack.Ext(2, b"\x90" * n) for n in (1, 2, 4, 8, 16, 17, 300)] * 4_000, False),
    ],
)
def test_only_containers_count(value: Any, travels: bool) -> None:
    assert can_travel(msgspec.msgpack.encode(value)) is travels


def test_a_tuple_that_no_worker_takes_fails_where_it_is_sent() -> None:
    peer = Peer(("s", 1), "127.0.0.1:1", None)  # type: ignore[arg-type]
    failed: list[str] = []
    items = [(0, 0, [["small"]]), (0, 0, [[[[]] * MOST]])]
    counted = Counter[str]()
    link = SimpleNamespace(
        task=1,
        source=2,
        stream="s",
        take=lambda: items,
        count=lambda name, stream, number: counted.update({name: number}),
    )
    peer.dirty.append(link)
    frames = list(peer.frames("friend", 100, lambda link, bundle, error: failed.append(str(error))))
    assert all(can_travel(raw) for raw in frames) and b"small" in frames[-1]
    assert counted["remote_tuples"] == 1, "only what travels is counted"
    assert 0 < counted["remote_bytes"] < 100
    assert len(failed) == 1 and "lists, maps" in failed[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: encode_request(Request("ping", "other")),
        lambda: (
            b'{"token":"other","levels":{' + b",".join(b'"%d":{}' % n for n in range(9_000)) + b"}}"
        ),
        lambda: b'{"token":"own","op":"state","state":{"task":1,"keys":' + b"[" * 500_000,
        lambda: b'{"token":"own","op":"ping"' + b" " * (2 * MIB) + b"}",
    ],
)
def test_questions_of_unknown_senders_cost_little(make: Callable[[], bytes]) -> None:
    known = Known()
    assert known.sends(make()) < MIB
    assert known.loop.bad_frames + known.loop.unknown_frames == 1
