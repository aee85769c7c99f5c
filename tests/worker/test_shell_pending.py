"""Shell bolts: what waits to be written is limited, what the program keeps is not."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.api import ShellBolt, Topology, Tuple
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually
from storm_dagster.worker.multilang.bolts import ShellBoltRunner
from storm_rigs.components import CollectBolt, Numbers
from storm_rigs.worker.shell_programs import BEGINNING

MANY = 2_000

# Plain protocol: what it does with each tuple is HANDLE.
PROGRAM = (
    BEGINNING
    + """
send({"pid": os.getpid()})
kept, ticks = [], 0
while True:
    tup = read()
    if isinstance(tup, list): continue
    if tup["stream"] == "__heartbeat":
        send({"command": "sync"}); continue
    if tup["stream"] == "__tick":
        ticks += 1
        ON_TICK
        continue
    HANDLE
"""
)
GATHER = f"""
    kept.append(tup["id"])
    if len(kept) == {MANY}:
        for each in kept: send({{"command": "ack", "id": each}})
"""
BATCHES = """
from pystorm import BatchingBolt

class Batches(BatchingBolt):
    def process_batch(self, key, tups):
        self.emit([len(tups)])

Batches().run()
"""


class Shells(Topology):
    numbers = Numbers.spec()
    shell = ShellBolt.spec(
        command=sys.executable, script="program.py", inputs=[numbers], outputs=["size"]
    )
    sizes = CollectBolt.spec(inputs=[shell])


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "worker"
    folder.mkdir()
    monkeypatch.chdir(folder)


def harness_of(tmp_path: Path, program: str, number: int, **conf: Any) -> TopologyHarness:
    (tmp_path / "resources").mkdir()
    (tmp_path / "resources" / "program.py").write_text(program)
    given = {"numbers": [[n] for n in range(number)]}
    conf = {name.replace("_", "."): value for name, value in conf.items()}
    return TopologyHarness(Shells, given, archive=tmp_path, conf=conf)


def shell_of(harness: TopologyHarness) -> ShellBoltRunner:
    return next(
        each for each in harness.engine.runners.values() if isinstance(each, ShellBoltRunner)
    )


def program(handle: str, on_tick: str = "pass") -> str:
    return PROGRAM.replace("ON_TICK", on_tick).replace("    HANDLE", handle)


def test_a_program_may_gather_more_tuples_than_may_wait_for_it(tmp_path: Path) -> None:
    # Also more than a queue holds before back pressure: what the program keeps does not wait for
    # it.
    with harness_of(tmp_path, program(GATHER), MANY, topology_executor_queue_size=400) as harness:
        result = harness.run(timeout=60)
    assert len(result.acked["numbers"]) == MANY
    assert result.errors == []


def test_a_batching_bolt_of_pystorm_gets_all_that_wait_in_one_batch(tmp_path: Path) -> None:
    with harness_of(tmp_path, BATCHES, MANY) as harness:
        shell = shell_of(harness)

        def given() -> bool:
            harness.engine.run(time.monotonic())
            return len(shell.in_flight) == MANY

        assert eventually(given, 60, "the program has all tuples")
        for _ in range(2):  # pystorm waits for more than one tick
            harness.tick("shell")
            harness.engine.run(time.monotonic())
        result = harness.run(timeout=60)
        assert harness.tasks("sizes")[0].received == [[MANY]]
    assert len(result.acked["numbers"]) == MANY
    assert result.errors == []


@pytest.mark.parametrize(
    "on_tick",
    [
        "pass",
        'send({"command": "ack", "id": tup["id"]})',
        'send({"command": "fail", "id": tup["id"]})',
        'send({"command": "emit", "anchors": [tup["id"]], "tuple": [ticks], "need_task_ids": False})',
    ],
)
def test_ticks_take_no_room_whether_the_program_acks_them_or_not(
    tmp_path: Path, on_tick: str
) -> None:
    text = program('    send({"command": "ack", "id": tup["id"]})', on_tick)
    with harness_of(tmp_path, text, 0, topology_shellbolt_max_pending=2) as harness:
        harness.run(timeout=60)
        shell = shell_of(harness)
        for _ in range(20):
            harness.tick("shell")
            assert eventually(
                lambda: harness.engine.run(time.monotonic()) or not shell.ticks,
                60,
                "the tick is sent",
            )
        harness.give("numbers", [1], [2], [3])
        result = harness.run(timeout=60)
        assert shell.in_flight == {}
    assert len(result.acked["numbers"]) == 3
    assert result.errors == []


def test_unwritten_messages_are_limited_and_the_loop_is_woken_once_written(
    tmp_path: Path,
) -> None:
    # It reads nothing before the file is there; a pipe holds less than the tuples.
    waits = '    while not os.path.exists("go"): time.sleep(0.01)\n    send({"command": "ack", "id": tup["id"]})'
    with harness_of(tmp_path, program(waits), 0, topology_shellbolt_max_pending=10) as harness:
        woken = threading.Event()
        harness.shared.wake = woken.set
        harness.run(timeout=60)
        shell = shell_of(harness)
        harness.give("numbers", *[["x" * 10_000]] * 200)

        def stuck() -> bool:
            harness.engine.run(time.monotonic())
            assert (
                shell.process is not None and shell.process.unwritten() <= 12
            )  # heartbeats are beside the limit
            return bool(shell.queue) and shell.process.unwritten() >= 10

        assert eventually(stuck, 60, "the program's pipe is full")
        before = shell.waiting()
        assert before > 50, "what waits counts for back pressure"
        woken.clear()
        (tmp_path / "resources" / "go").touch()
        assert woken.wait(60)
        result = harness.run(timeout=60)
    assert len(result.acked["numbers"]) == 200


class Beside(Shells):
    numbers = Numbers.spec()
    shell = ShellBolt.spec(
        command=sys.executable, script="program.py", inputs=[numbers], outputs=["size"]
    )
    sizes = CollectBolt.spec(inputs=[numbers])


def test_a_program_that_holds_its_interpreter_does_not_stop_the_other_tasks(tmp_path: Path) -> None:
    # Backtracking that would not end, in C code that does not release the interpreter lock.
    holds = '    import re; re.match("(a+)+$", "a" * 100 + "b")'
    (tmp_path / "resources").mkdir()
    (tmp_path / "resources" / "program.py").write_text(program(holds))
    with TopologyHarness(
        Beside, {"numbers": [[n] for n in range(50)]}, archive=tmp_path
    ) as harness:

        def counted() -> bool:
            harness.engine.run(time.monotonic())
            (sizes,) = harness.tasks("sizes")
            return (
                sizes is not None
                and len(sizes.received) == 50
                and len(shell_of(harness).in_flight) == 50
            )

        assert eventually(counted, 60, "the bolt beside the program counts")


def test_the_cost_of_a_tuple_excludes_the_wait_of_its_batch(tmp_path: Path) -> None:
    # Otherwise the backlog of a bolt that gathers would look like hours, and pause the spouts.
    with harness_of(tmp_path, program(GATHER), MANY) as harness:
        begin = time.perf_counter_ns()
        harness.run(timeout=60)
        shell = shell_of(harness)
        shell.queue += [Tuple(0, "", "", 0, [])] * MANY
        try:
            assert shell.backlog_secs() * 1e9 <= time.perf_counter_ns() - begin, (
                "as long as it took before, at most"
            )
        finally:
            shell.queue.clear()
