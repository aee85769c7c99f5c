"""Quickstart and tutorial, typed as they stand: their commands in order, on a whole cluster,
against the shown output.

``QUICKSTART_BIN`` names the folder of another ``storm-dagster`` (``make dist-check``: one installed
from the wheel).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from storm_dagster.host.processes import RunFile
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.product.console import SILENT, ConsoleCommand, console_commands, difference

pytestmark = [
    pytest.mark.long,
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.dagster,
    pytest.mark.timeout(900),
]

ROOT = Path(__file__).parents[2]
BIN = Path(os.environ.get("QUICKSTART_BIN") or Path(sys.executable).parent)
LOOKS = ("doctor", "explain", "show", "state")
"""Verbs that show what goes on meanwhile: they are typed again until they print what the page
shows.
"""
LOOK_SECS = 60.0
EVERYWHERE = {command.command: command for command in console_commands(ROOT / "README.md")}


class Reader:
    """Types the commands of a page in an empty folder, and holds what they print against what is
    shown.
    """

    def __init__(self, page: Path, folder: Path) -> None:
        self.folder = folder
        self.home = folder / ".storm-dagster"
        self.said: list[tuple[ConsoleCommand, str]] = []
        text = page.read_text(encoding="utf-8")
        for name, code in re.findall(r"```python\n# ([\w.]+\.py)\n(.*?)```", text, flags=re.S):
            (folder / name).write_text(code, encoding="utf-8")

    def run(self, command: str) -> str:
        """What it prints, on both channels and in that order, as on a terminal."""
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env={**os.environ, "STORM_DAGSTER_HOME": str(self.home), "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-4000:]}"
        return done.stdout

    def show(self, name: str) -> dict[str, Any]:
        """``show NAME --json``, progress and warnings left out."""
        return json.loads(self.run(f"storm-dagster show {name} --json 2>/dev/null"))

    def type(self, typed: ConsoleCommand) -> None:
        """Type one command of the page."""
        command = typed.command
        if command.startswith("storm-dagster dev"):
            # Of all that is typed only this is added: another cluster may hold the usual ports.
            command += " --ports auto"
        if typed.program == "kill":
            self._kill_a_counting_worker()
        elif typed.program in SILENT:
            assert self.run(command) == "", typed
        elif command.split()[1] in LOOKS:
            deadline = time.monotonic() + patience(LOOK_SECS)
            while self._compare(typed, said := self.run(command)) and time.monotonic() < deadline:
                time.sleep(1)
            self._hold(typed, said)
        else:
            self._hold(typed, self.run(command))

    def _compare(self, typed: ConsoleCommand, said: str) -> str | None:
        lines = said.splitlines()
        pages: Sequence[ConsoleCommand | None] = (typed, EVERYWHERE.get(typed.command))
        return next(
            (wrong for page in pages if page and (wrong := difference(page.output, lines))), None
        )

    def _hold(self, typed: ConsoleCommand, said: str) -> None:
        wrong = self._compare(typed, said)
        assert wrong is None, f"{typed} prints something else\n{wrong}"
        self.said.append((typed, said))

    def _kill_a_counting_worker(self) -> None:
        """Kill a worker with a task of ``count``, and wait until its supervisor has started it
        again.
        """
        name = [typed.command.split()[2] for typed, _ in self.said if " show " in typed.command][-1]
        document = self.show(name)
        counting = {task["id"] for task in document["tasks"] if task["component"] == "count"}
        killed = next(worker for worker in document["workers"] if counting & set(worker["tasks"]))
        os.kill(killed["pid"], signal.SIGKILL)

        def again() -> bool:
            document = self.show(name)
            slot = [
                w
                for w in document["workers"]
                if (w["node"], w["port"]) == (killed["node"], killed["port"])
            ]
            return (
                bool(slot)
                and slot[0]["pid"] not in (None, killed["pid"])
                and all(task["status"] == "running" for task in document["tasks"])
            )

        eventually(again, 120, "the worker running again in its place", interval=0.5)

    def read(self, page: Path) -> None:
        """Type all of it; end what is left running."""
        try:
            for typed in console_commands(page):
                if typed.program == "pip":
                    assert typed.command == "pip install ./storm-dagster"
                else:
                    self.type(typed)
        finally:
            if RunFile.read_all(self.home):
                self.run("storm-dagster stop")
        assert not [
            process for process in psutil.process_iter(["cmdline"]) if _mentions(process, self.home)
        ]

    def verbs(self) -> list[str]:
        """The verbs that were typed."""
        return [typed.command.split()[1] for typed, _ in self.said]

    def counts(self, verb: str, row: str) -> list[dict[str, int]]:
        """Word -> count, each time that the verb was typed; ``row`` finds both in a line of its
        table.
        """
        return [
            {word: int(count) for word, count in re.findall(row, said)}
            for typed, said in self.said
            if typed.command.split()[1] == verb
        ]


def test_the_quickstart_as_it_stands(tmp_path: Path) -> None:
    page = ROOT / "docs" / "index.md"
    reader = Reader(page, tmp_path)
    reader.read(page)
    verbs = ["run", "doctor", "dev", "submit", "show", "explain", "show", "kill", "stop"]
    assert reader.verbs() == verbs
    printed = reader.said[verbs.index("dev")][1]
    assert "http://127.0.0.1:" in printed, "dev prints the address of the Dagster UI"


def test_the_tutorial_as_it_stands(tmp_path: Path) -> None:
    page = ROOT / "docs" / "tutorial.md"
    reader = Reader(page, tmp_path)
    reader.read(page)
    before, after, *_ = reader.counts("show", r"│ count +│ (\w+) +│ (\d+)")
    assert before["dagster"] == pytest.approx(before["and"], rel=0.5)
    assert after["dagster"] < after["and"] - before["dagster"] / 2, (
        "a dictionary is lost with its process"
    )
    counts = reader.counts("state", r'"(\w+)" +│ (\d+)')
    known: dict[str, int] = {}
    for reading in counts:
        for word, count in reading.items():
            assert count > known.get(word, 0), f"{word!r} counts on, whatever happens to its worker"
        known |= reading
    last = counts[-1]
    assert (
        last["storm"]
        == last["and"]
        == last["dagster"]
        == sum(last[str(digit)] for digit in range(7))
    )
    assert 0 < last["spark"] == last["on"] < last["storm"], (
        "the new code ran, and the old one before it"
    )


def _mentions(process: psutil.Process, folder: Path) -> bool:
    return any(str(folder) in part for part in process.info["cmdline"] or [])
