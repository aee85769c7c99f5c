"""Submissions that were taken: their names, until a run has them."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from storm_dagster.model.errors import AlreadyAlive, Unavailable
from storm_dagster.nimbus.requests.launches import Launches
from storm_dagster.nimbus.thrift.pending import PendingSubmission, PendingSubmissions
from storm_dagster.operations.submit.staging import read_client_token, release_token
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper


class Silent:
    """A Dagster that does not answer."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def submit(self, document: dict[str, Any], **_: bool) -> None:
        self.over.wait(60)
        raise Unavailable("Dagster does not answer")


def test_a_submission_that_a_deposed_leader_cannot_take_back_may_take_place(world: World) -> None:
    """Its client is told so, and its upload stays for the next leader."""
    ctx = world.context()
    epoch = ctx.current_epoch()
    cancelled: list[str] = []
    status = SimpleNamespace(epoch=epoch, require=lambda: epoch)
    member: Any = SimpleNamespace(
        cluster=world.cluster,
        launches=Launches(),
        operations=lambda _: ctx,
        status=status,
        uploads=SimpleNamespace(cancel=cancelled.append),
    )

    def refuse(*_: object, **__: object) -> None:
        status.epoch = None
        raise Unavailable("Dagster does not answer")

    submissions: Any = SimpleNamespace(submit=refuse)
    pending = PendingSubmissions(member, submissions)
    taken = PendingSubmission("wc", "a" * 32, "thrift-1", inactive=False)
    pending.add(taken)
    with pytest.raises(Unavailable, match="may still launch it"):
        pending.launch(taken, time.monotonic() + 60)
    stored = read_client_token(ctx, "thrift-1")
    assert stored is not None and stored[0].request and not cancelled
    status.epoch = epoch
    pending.drop(taken)
    assert read_client_token(ctx, "thrift-1") is None and cancelled == [taken.handle]


def test_a_name_is_kept_until_its_submission_has_a_run(world: World) -> None:
    ctx = world.context()
    epoch = ctx.current_epoch()
    member: Any = SimpleNamespace(
        cluster=world.cluster,
        launches=Launches(),
        operations=lambda _: ctx,
        status=SimpleNamespace(epoch=epoch, require=lambda: epoch),
    )
    silent: Any = Silent()
    pending = PendingSubmissions(member, silent)
    taken = PendingSubmission("wc", "a" * 32, "thrift-1", inactive=False)
    with pending.reserve("wc"):
        with pytest.raises(AlreadyAlive), pending.reserve("wc"):
            pass
        pending.add(taken)
        assert pending.launch(taken, time.monotonic() + 0.05) is False
    silent.over.set()
    # Another nimbus sees the same: the record is in ZooKeeper.
    for other in (pending, PendingSubmissions(member, silent)):
        with pytest.raises(AlreadyAlive), other.reserve("wc"):
            pass
    stored = read_client_token(ctx, "thrift-1")
    assert stored is not None and stored[0].request["handle"] == "a" * 32
    member.launches.note_run("thrift-1", "run-1")
    with pending.reserve("wc"):
        pass
    later: Any = SimpleNamespace(**{**vars(member), "launches": Launches()})
    release_token(ctx, "thrift-1", ended=True)
    with PendingSubmissions(later, silent).reserve("wc"):
        pass
