"""Frames of a pass of the loop for a peer: complete, once, in order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from storm_dagster.model.slot import Slot
from storm_dagster.model.wire import decode_frame
from storm_dagster.worker.dataplane.routes import RemoteLink
from storm_dagster.worker.dataplane.sending import send_remote
from storm_dagster.worker.dataplane.transport import Peer
from storm_dagster.worker.dataplane.tree import Tree


def unexpected(link: Any, bundle: Any, error: Exception) -> None:
    raise error


@given(st.lists(st.integers(0, 12), max_size=5), st.integers(1, 10))
@example([5, 5, 3], 10)
def test_every_tuple_is_in_exactly_one_frame_whatever_fills_them(
    sizes: list[int], most: int
) -> None:
    peer = Peer(Slot("s2", 7001), "127.0.0.1:7001", None)  # type: ignore[arg-type]
    for task, size in enumerate(sizes, 1):
        link = RemoteLink(task, 99, "default", peer)
        for number in range(size):
            send_remote(link, Tree(1, task * 100 + number + 1, 0), [task, number])
    frames = [decode_frame(raw) for raw in peer.frames("token", most, unexpected)]
    received: dict[int, list[int]] = {}
    for frame in frames:
        assert sum(len(bundles) for _, _, _, bundles in frame.groups) <= most
        for task, _, _, bundles in frame.groups:
            for _, _, many in bundles:
                received.setdefault(task, []).extend(values[1] for values in many)
    assert received == {task: list(range(size)) for task, size in enumerate(sizes, 1) if size}


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(1, 10))
def test_bytes_and_tuples_of_each_stream_are_counted_as_they_travel(
    sizes: list[int], most: int
) -> None:
    """Also where a stream fills several frames, and where a tuple cannot be encoded."""
    peer = Peer(Slot("s2", 7001), "127.0.0.1:7001", None)  # type: ignore[arg-type]
    counted = {"remote_bytes": Counter[str](), "remote_tuples": Counter[str]()}

    def count(name: str, stream: str, number: int) -> None:
        counted[name][stream] += number

    for task, size in enumerate(sizes, 1):
        link = RemoteLink(task, 99, f"stream{task % 2}", peer, count=count)
        for number in range(size):
            broken = number == 3 and task == 2
            send_remote(link, Tree(1, task * 100 + number + 1, 0), [object() if broken else "text"])
    frames = [decode_frame(raw) for raw in peer.frames("token", most, lambda *_: None)]
    received_bytes = Counter[str]()
    received_tuples = Counter[str]()
    for frame in frames:
        for group in frame.groups:
            _, _, stream, bundles = group
            received_bytes[stream] += len(msgspec.msgpack.encode(group))
            received_tuples[stream] += sum(len(many) for _, _, many in bundles)
    assert received_bytes
    assert counted == {"remote_bytes": received_bytes, "remote_tuples": received_tuples}


def test_acks_and_reports_are_no_bytes_of_a_stream() -> None:
    peer = Peer(Slot("s2", 7001), "127.0.0.1:7001", None)  # type: ignore[arg-type]
    peer.by_task["acks"][1] = [5, 6]
    (raw,) = peer.frames("token", 10, unexpected)
    assert decode_frame(raw).acks == [(1, [5, 6])] and not decode_frame(raw).groups
