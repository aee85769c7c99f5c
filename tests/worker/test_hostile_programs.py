"""Shell components whose programs flood, forget, die or leave children: neither the worker nor a
verdict suffers from it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from storm_dagster.api import Bolt, ShellBolt, ShellSpout, TopologyBuilder, Tuple
from storm_dagster.model.names import ACKER
from storm_dagster.testing.waiting import eventually
from storm_dagster.worker.multilang.process import ShellProcess
from storm_rigs.components import RangeSpout, SleepBolt
from storm_rigs.stage.local_workers import LocalWorkers
from storm_rigs.worker.shell_programs import BEGINNING

# Plain protocol: what it does with each message is HANDLE.
PROGRAM = (
    BEGINNING
    + """
send({"pid": os.getpid()})
given = 0
while True:
    got = read()
    HANDLE
"""
)
FLOODS = """
    one = '{"command": "emit", "anchors": [], "tuple": ["x"], "need_task_ids": false}\\nend\\n' * 1000
    while True: sys.stdout.write(one)
"""
FORGETS = """
    if isinstance(got, dict) and got["stream"] == "__heartbeat": send({"command": "sync"})
"""
# Its first process emits ten tuples, and dies of the third verdict.
DIES = """
    first = not os.path.exists("RAN") if not given else first
    open("RAN", "a").close()
    given += 1
    if got["command"] == "next" and first and not os.path.exists("EMITTED"):
        open("EMITTED", "a").close()
        for number in range(10): send({"command": "emit", "tuple": [number], "id": number, "need_task_ids": False})
    if got["command"] in ("ack", "fail"):
        with open("VERDICTS", "a") as heard: heard.write(f"{got['command']} {got['id']}\\n")
        if first and len(open("VERDICTS").readlines()) == 3: sys.exit(1)
    send({"command": "sync"})
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def made(handle: str) -> list[str]:
        for name in ("RAN", "EMITTED", "VERDICTS"):
            handle = handle.replace(f'"{name}"', repr(str(tmp_path / name)))
        (tmp_path / "program.py").write_text(PROGRAM.replace("    HANDLE\n", handle))
        return [sys.executable, str(tmp_path / "program.py")]

    return made


class Odd(Bolt):
    def process(self, tup: Tuple) -> None:
        if tup.values[0] % 2:
            self.fail(tup)


def test_a_program_that_emits_without_pause_waits_for_its_readers(command: Any) -> None:
    builder = TopologyBuilder("floods")
    builder.set_spout("source", RangeSpout, args={"total": 1})
    builder.set_bolt(
        "floods", ShellBolt.spec(command=command(FLOODS), outputs=["y"]), inputs="source"
    )
    builder.set_bolt("slow", SleepBolt, inputs="floods", args={"secs": 0.001})
    slots = {"source": 0, "floods": 0, "slow": 0, ACKER: 0}
    workers = LocalWorkers(builder, slots, {"topology.executor.queue.size": 1_000})
    try:
        eventually(
            lambda: (workers.turn(), workers.runner("slow").stats.executed)[1],
            60,
            "its first tuple",
            interval=0,
        )
        turns, most, until = 0, 0, time.monotonic() + 3
        while time.monotonic() < until:
            workers.turn()
            turns += 1
            inbound = workers.runner("floods").inbound  # type: ignore[attr-defined]
            most = max(most, len(inbound) + workers.runner("slow").waiting())
        assert workers.runner("slow").stats.executed > 0
        assert turns > 20 and most < 20_000
        assert workers.errors == []
    finally:
        workers.close()


def test_tuples_that_a_program_never_acks_are_not_kept(command: Any) -> None:
    builder = TopologyBuilder("forgets")
    builder.set_spout("source", RangeSpout, args={"total": 500})
    builder.set_bolt(
        "forgets", ShellBolt.spec(command=command(FORGETS), outputs=["y"]), inputs="source"
    )
    slots = {"source": 0, "forgets": 0, ACKER: 0}
    workers = LocalWorkers(builder, slots, {"topology.message.timeout.secs": 1})
    try:
        source: Any = workers.runner("source")

        def all_gone() -> bool:
            workers.turn()
            return len(source.instance.failed) == 500 and not workers.runner("forgets").in_flight  # type: ignore[attr-defined]

        eventually(all_gone, 60, "the end of what was never acked", interval=0.001)
        assert workers.errors == []
    finally:
        workers.close()


def test_verdicts_that_waited_for_a_program_go_to_its_successor(
    command: Any, tmp_path: Path
) -> None:
    builder = TopologyBuilder("dies")
    builder.set_spout("dies", ShellSpout.spec(command=command(DIES), outputs=["y"]))
    builder.set_bolt("odd", Odd, inputs="dies")
    workers = LocalWorkers(builder, {"dies": 0, "odd": 0, ACKER: 0}, {})
    try:
        heard = tmp_path / "VERDICTS"

        def all_heard() -> bool:
            workers.turn()
            return heard.exists() and len(heard.read_text().splitlines()) >= 10

        eventually(all_heard, 60, "ten verdicts", interval=0.001)
        expected = [f"{'fail' if number % 2 else 'ack'} {number}" for number in range(10)]
        assert sorted(heard.read_text().splitlines()) == sorted(expected)
    finally:
        workers.close()


def test_standard_error_without_ends_of_lines_is_not_gathered(tmp_path: Path) -> None:
    code = "import sys, time\nfor _ in range(100): sys.stderr.write('\\r10%' * 250_000); sys.stderr.flush()\ntime.sleep(60)"
    before = psutil.Process().memory_info().rss
    process = ShellProcess(
        [sys.executable, "-c", code], tmp_path, tmp_path / "pids", {}, lambda *_: None, "progress"
    )
    try:
        time.sleep(2)
        assert psutil.Process().memory_info().rss - before < 50 << 20
    finally:
        process.end()


def test_children_of_a_program_that_has_died_end_with_it(tmp_path: Path) -> None:
    code = f"sleep 4321 & echo $! > {tmp_path}/child; exit 1"
    process = ShellProcess(
        ["sh", "-c", code], tmp_path, tmp_path / "pids", {}, lambda *_: None, "leaves"
    )
    child = int(
        eventually(
            lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text().strip(), 20
        )
        or 0
    )
    assert psutil.pid_exists(child)
    time.sleep(0.3)
    process.end()

    def gone() -> bool:
        return (
            not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
        )

    eventually(gone, 20, "the end of the child", ignore=(psutil.Error,))
