"""The first process of a container, which runs without an init: signals and dead orphans."""

from __future__ import annotations

import subprocess
import sys

import pytest

from storm_dagster.testing.waiting import patience
from storm_rigs.servers.pid_namespaces import CONTAINER, missing_requirement

pytestmark = pytest.mark.skipif(
    missing_requirement() is not None, reason=missing_requirement() or ""
)

# The signal comes when the command line is imported, before a daemon has its own handler.
_SIGNAL_DURING_THE_START = """
import os, signal, sys, time
import storm_dagster.cli.app
from storm_dagster.cli import main

def run():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
    sys.exit("the signal was lost")

storm_dagster.cli.app.run = run
main()
"""
_ORPHANS = """
import subprocess
from storm_dagster.host.orphans import reap_orphans
from storm_dagster.testing.waiting import eventually

own = subprocess.Popen(["sh", "-c", "exit 7"], start_new_session=True)
worker = subprocess.Popen(["sh", "-c", "(exit 3) & (exit 4) & exit 0"], start_new_session=True)
print(worker.wait())
reaped = 0

def are_gone():
    global reaped
    reaped += reap_orphans()
    return reaped == 2

eventually(are_gone, 20, "the end of the orphans")
# The status of an own child is not taken from who waits for it.
print(own.wait(), reap_orphans())
"""


def as_first_process(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CONTAINER, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(60),
    )


def test_a_signal_during_the_start_ends_the_first_process() -> None:
    ended = as_first_process(_SIGNAL_DURING_THE_START)
    assert ended.returncode == 143, ended.stderr
    assert ended.stderr == "storm-dagster: a signal ended this process during its start\n"


def test_dead_orphans_are_reaped_and_own_children_are_not() -> None:
    ended = as_first_process(_ORPHANS)
    assert ended.stdout.splitlines() == ["0", "7 0"], ended.stderr
