"""The exchange between launcher and fork: all orders of messages, silences and deaths, and a real
fork that is held.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from storm_dagster.launcher.wire import (
    GO,
    Event,
    ForkState,
    LauncherState,
    LineConnection,
    next_fork,
    next_launcher,
)


class Exchange(NamedTuple):
    """Both sides and what is on its way. A side that is silent for too long may find that at any
    time.
    """

    fork: ForkState = "begun"
    launcher: LauncherState = "asking"
    to_fork: tuple[Event, ...] = ("request",)
    to_launcher: tuple[Event, ...] = ()
    dead: bool = False


SAID: dict[ForkState, tuple[Event, ...]] = {"waiting": ("ready",), "runs": ("started",)}


def after(now: Exchange) -> Iterator[Exchange]:
    """Every state that may follow."""
    if not now.dead and now.fork in ("begun", "waiting", "leaving"):
        closed = now.launcher in ("launched", "stock")
        # A timeout may win against a message that is there already; the last look of all does not
        # wait.
        events = now.to_fork[:1] or (("end",) if closed else ())
        for event in dict.fromkeys(
            (*events, "silence") if now.fork != "leaving" else events or ("silence",)
        ):
            state = next_fork(now.fork, event)
            yield now._replace(
                fork=state,
                to_fork=now.to_fork[1:] if event in now.to_fork[:1] else now.to_fork,
                to_launcher=now.to_launcher + SAID.get(state, ()),
            )
    if not now.dead and now.fork != "gone":
        yield now._replace(dead=True)
    away = now.dead or now.fork == "gone"
    if now.launcher in ("asking", "said"):
        for event in (*(now.to_launcher[:1] or (("end",) if away else ())), "silence"):
            rest = now.to_launcher[1:] if event in now.to_launcher[:1] else now.to_launcher
            yield now._replace(launcher=next_launcher(now.launcher, event), to_launcher=rest)
    elif now.launcher == "going" and (away or now.fork == "leaving"):
        yield now._replace(launcher=next_launcher("going", "end"))
    elif now.launcher == "going":
        yield now._replace(launcher=next_launcher("going", "sent"), to_fork=(*now.to_fork, "go"))


def test_in_every_order_of_events_the_run_is_started_once() -> None:
    seen, left = set(), [Exchange()]
    while left:
        now = left.pop()
        if now in seen:
            continue
        seen.add(now)
        following = list(after(now))
        left.extend(following)
        assert not (now.launcher == "stock" and now.fork == "runs"), f"started twice: {now}"
        assert not (now.launcher == "launched" and now.fork == "gone"), f"lost: {now}"
        if not following:
            assert now.launcher == "stock" or now.fork == "runs" or now.dead
    assert len(seen) > 30


@pytest.mark.parametrize("held", ["before it reads", "while it reads", "not"])
def test_a_fork_that_is_held_after_go_obeys_it(held: str) -> None:
    """Real processes and a real socket: the launcher has waited, and closed, before the fork goes
    on.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        if held == "before it reads":
            os.kill(os.getpid(), signal.SIGSTOP)
        fork = LineConnection(theirs)
        state = next_fork(
            "waiting", fork.await_message("go", 3.0 if held == "while it reads" else 30.0)
        )
        if state == "leaving":
            fork.refuse_more()
            state = next_fork(state, fork.await_message("go", 0.0))
        os._exit(7 if state == "runs" else 1)
    theirs.close()
    launcher = LineConnection(ours)
    if held == "while it reads":
        os.kill(pid, signal.SIGSTOP)
    if held != "not":
        os.waitpid(pid, os.WUNTRACED)
    launcher.send(GO)
    if held != "not":
        assert (
            next_launcher(
                "said", launcher.await_message("started", 3.5 if held == "while it reads" else 0.5)
            )
            == "launched"
        )
    launcher.close()
    os.kill(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_go_that_comes_too_late_cannot_be_sent() -> None:
    ours, theirs = socket.socketpair()
    fork, launcher = LineConnection(theirs), LineConnection(ours)
    fork.refuse_more()
    with pytest.raises(OSError):
        launcher.send(GO)
    assert fork.await_message("go", 0.0) == "end"
