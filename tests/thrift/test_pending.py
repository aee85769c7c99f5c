"""Submissions that were taken: their names, when another nimbus launches them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from storm_dagster.model.errors import AlreadyAlive, KeyNotFound, Unavailable
from storm_dagster.nimbus.thrift.pending import PendingSubmission, PendingSubmissions


class Blobs(dict[str, bytes]):
    """Of a nimbus: those that all of them have."""

    def put(self, key: str, raw: bytes) -> None:
        self[key] = raw

    def keys(self, prefix: str = "") -> Any:
        return [key for key in self if key.startswith(prefix)]

    def read(self, key: str) -> bytes:
        return self[key]

    def delete(self, key: str) -> None:
        if self.pop(key, None) is None:
            raise KeyNotFound(key)


class Status:
    epoch: int | None = 1
    me = "a:1"

    def __init__(self) -> None:
        self.known = Leader()


class Leader:
    leader: str | None = "a:1"


class Member:
    def __init__(self) -> None:
        self.blobs, self.status = Blobs(), Status()


class Silent:
    """Where Dagster does not answer."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def submit(self, document: dict[str, Any]) -> None:
        self.over.wait(60)
        raise Unavailable("Dagster does not answer")


def test_a_name_is_free_at_a_nimbus_that_leads_again() -> None:
    member: Any = Member()
    silent = Silent()
    pending = PendingSubmissions(member, silent)  # type: ignore[arg-type]
    taken = PendingSubmission("wc", "a" * 32, "thrift-1", inactive=False)
    pending.reserve("wc")
    pending.add(taken)
    assert pending.launch(taken, time.monotonic() + 0.05) is False
    with pytest.raises(AlreadyAlive):
        pending.reserve("wc")
    silent.over.set()
    time.sleep(0.3)
    # A pause of the connection is no other leader.
    member.status.epoch = None
    pending._launch_left()
    with pytest.raises(AlreadyAlive):
        pending.reserve("wc")
    # Another one leads, launches it, and drops its record; the topology is killed.
    member.status.known.leader = "b:1"
    pending._launch_left()
    member.blobs.clear()
    member.status.epoch = 3
    pending._launch_left()
    pending.reserve("wc")
