"""A child never outlives the block that runs it, whenever a signal comes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from storm_dagster.host.children import running_child
from storm_dagster.testing.waiting import eventually

# The child sends the signal between its fork and its program: its parent is within the start then.
_SIGNAL_WITHIN_THE_START = """
import os, signal, subprocess, sys
from pathlib import Path
from storm_dagster.host import children

def end(number, frame):
    sys.exit(128 + number)

def first_steps():
    Path(sys.argv[1]).write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.Signals[sys.argv[2]])

class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, preexec_fn=first_steps, **options)

subprocess.Popen = Popen
signal.signal(signal.Signals[sys.argv[2]], end)
with open(os.devnull, "wb") as output:
    with children.running_child(["sleep", "1000"], output, environment=os.environ):
        pass
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129)])
def test_a_signal_within_the_start_of_a_child_ends_it(tmp_path: Path, name: str, code: int) -> None:
    note = tmp_path / "pid"
    parent = subprocess.run([sys.executable, "-c", _SIGNAL_WITHIN_THE_START, note, name])
    assert parent.returncode == code
    pid = int(note.read_text())
    assert not psutil.pid_exists(pid)


def test_processes_of_a_child_end_with_the_block(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 1000 & echo $! > {note}.new; mv {note}.new {note}; wait"]
    with (
        (tmp_path / "output").open("wb") as output,
        running_child(command, output, environment={}) as child,
    ):
        eventually(note.exists, 20, "the process of the child")
    grandchild = int(note.read_text())
    assert child.returncode == -9
    eventually(lambda: not psutil.pid_exists(grandchild), 20, "its end")
