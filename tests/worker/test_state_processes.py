"""State of a component in real workers: killed, moved, redistributed over more tasks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from storm_dagster.api import Grouping, TopologyBuilder
from storm_dagster.core.dataplane.keyed_state import Contents, Partitioning, read_log
from storm_dagster.model.errors import InvalidRequest, KeyNotFound, Unavailable
from storm_dagster.model.wire import StateQuery
from storm_dagster.nimbus.requests.running_workers import read_state
from storm_dagster.operations.live.worker_requests import WorkerLinks, ask_worker
from storm_dagster.testing.waiting import eventually
from storm_dagster.worker.state.keyed import KeyedState
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.worker_processes import WorkerRig

pytestmark = pytest.mark.zookeeper

CODE = '''
"""Every word carries its number; a file tells what was acked."""
import os, time
from pathlib import Path
from storm_dagster.api import Spout, StatefulBolt

FOLDER = Path(os.environ["RIG_FOLDER"])


class Words(Spout):
    def initialize(self, conf, context):
        path = FOLDER / "acked"
        self.done = set(map(int, path.read_text().split())) if path.exists() else set()
        self.acks = path.open("a", buffering=1)
        self.total, self.pause = int(conf["rig.words"]), float(conf.get("rig.pause", 0))
        self.next, self.again, self.ready = 0, [], 0.0

    def next_tuple(self):
        if self.pause and time.monotonic() < self.ready:
            return
        self.ready = time.monotonic() + self.pause
        if self.again:
            n = self.again.pop()
        else:
            while self.next in self.done:
                self.next += 1
            n, self.next = self.next, self.next + 1
        if n < self.total:
            self.emit([f"w{n % 50}", n], tup_id=n)

    def ack(self, n):
        self.acks.write(f"{n}\\n")

    def fail(self, n):
        self.again.append(n)


class Count(StatefulBolt):
    message_id = "n"

    def process(self, tup):
        word = tup.values[0]
        self.state[word] = self.state.get(word, 0) + 1
'''

TOTAL = 4000


def tasks_of(counts: str) -> dict[str, str]:
    return {"count": counts, "__acker": "5", "__topology_master": "6", "words": "7"}


@pytest.fixture
def make_rig(stage: Stage) -> Callable[..., WorkerRig]:
    def make(conf: dict[str, Any]) -> WorkerRig:
        builder = TopologyBuilder("wc")
        builder.set_spout("words", "rig_code:Words", outputs=["word", "n"])
        builder.set_bolt(
            "count", "rig_code:Count", inputs={"words": Grouping.fields("word")}, par=2
        )
        settings = {
            "rig.words": TOTAL,
            "topology.message.timeout.secs": 2,
            "topology.max.spout.pending": 200,
            "task.refresh.poll.secs": 2,
            **conf,
        }
        return stage.workers(builder, tasks_of("1-2"), code=CODE, conf=settings)

    return make


def acked(rig: WorkerRig) -> set[int]:
    path = rig.folder / "acked"
    return set(map(int, path.read_text().split())) if path.exists() else set()


def counted(rig: WorkerRig) -> Counter[str]:
    """Counts in the checkpoints of the newest division."""
    folder = rig.folder / "state" / "wc" / "count.state"
    newest = sorted(folder.glob("*.json"))[-1].stem
    total: Counter[str] = Counter()
    for path in (folder / newest).glob("*.log"):
        contents = Contents()
        for record in read_log(path.read_bytes(), str(path)):
            contents.apply(record)
        total.update(contents.values)
    return total


def test_state_outside_json_is_shown_as_text_in_bounded_pages() -> None:
    state = KeyedState(Contents(), Partitioning(1, by_key=True), 0)
    state["odd"], state[1, "a"] = {(1, 2): "x"}, 5
    for n in range(100):
        state[n] = "v" * 15_000
    state["long"] = "w" * 100_000
    first, second, *_ = state.page(StateQuery(1, limit=3))["entries"]
    assert first == {"key": "odd", "value": None, "shown": "{(1, 2): 'x'}"} and second["value"] == 5
    at, rows = 0, 0
    while at is not None:
        page = state.page(StateQuery(1, offset=at, limit=1000))
        assert len(json.dumps(page, default=str)) < 300_000
        at, rows = page["next"], rows + len(page["entries"])
    assert rows == len(state)
    (long,) = state.page(StateQuery(1, keys=["long"]))["entries"]
    assert long["value"] is None and long["shown"].startswith("'www") and len(long["shown"]) == 1000
    assert state.page(StateQuery(1, keys=["[1,", [1, "a"]]))["entries"][0]["value"] == 5


EXPECTED = Counter(f"w{n % 50}" for n in range(TOTAL))


def test_a_worker_killed_twice_loses_no_count_and_counts_nothing_twice(
    make_rig: Callable[..., WorkerRig],
) -> None:
    rig = make_rig({"rig.pause": 0.0002})
    one, two = ("s1", free_port()), ("s2", free_port())
    rig.assign({one: "1,5-7", two: "2"})
    rig.start(*one)
    rig.start(*two)
    for least in (300, 1500):
        eventually(lambda least=least: len(acked(rig)) > least, what="some words are acked")
        rig.processes[two].kill()
        rig.processes[two].wait()
        rig.start(*two)
    eventually(lambda: len(acked(rig)) == TOTAL, timeout=60, what="all words are acked")
    assert counted(rig) == EXPECTED


def test_state_is_read_page_by_page_and_by_key(make_rig: Callable[..., WorkerRig]) -> None:
    """From the workers that keep it, of a topology that is ACTIVE or INACTIVE."""
    rig = make_rig({})
    one, two = ("s1", free_port()), ("s2", free_port())
    rig.assign({one: "1,5-7", two: "2"})
    rig.start(*one)
    rig.start(*two)
    eventually(lambda: len(acked(rig)) == TOTAL, timeout=60, what="all words are acked")
    rig.set_status("INACTIVE")
    reported = ask_worker("127.0.0.1", two[1], rig.live()[two].token, "stats", 20)["tasks"]["2"][
        "metrics"
    ]
    (log,) = (rig.folder / "state" / "wc" / "count.state").glob("*/1.*.log")
    assert 0 < reported["state_keys"] < 50 and reported["state_bytes"] == log.stat().st_size
    assert reported["unsaved_secs"] == 0.0

    def read(component: str = "count", **asked: str) -> dict[str, Any]:
        topology = rig.cluster.load_view().topologies[rig.topology_id]
        return read_state(topology, component, WorkerLinks(), **asked)

    page, seen = read(limit="7"), Counter[str]()
    tasks: list[int] = []
    for _ in range(20):
        assert len(page["entries"]) <= 7
        seen.update({row["key"]: row["value"] for row in page["entries"]})
        tasks += [row["task"] for row in page["entries"]]
        if page["next"] is None:
            break
        page = read(limit="7", after=page["next"])
    assert seen == EXPECTED and tasks == sorted(tasks) and set(tasks) == {1, 2}
    assert read(limit="1000")["next"] is None
    (found,) = read(key="w7")["entries"]
    assert (found["key"], found["value"]) == ("w7", TOTAL // 50)
    assert read(key="nothing") == {
        "id": rig.topology_id,
        "component": "count",
        "entries": [],
        "next": None,
    }
    with pytest.raises(InvalidRequest, match="has no keyed state"):
        read("words")
    with pytest.raises(KeyNotFound, match="it has count, words"):
        read("cuont")
    for wrong in (
        {"limit": "0"},
        {"limit": "1001"},
        {"limit": "0000005000"},
        {"limit": "000000001" + "9" * 5000},
        {"limit": "-1"},
        {"after": "5"},
        {"after": "x:1"},
    ):
        with pytest.raises(InvalidRequest):
            read(**wrong)
    rig.processes[two].kill()
    rig.processes[two].wait()
    eventually(lambda: two not in rig.live(), what="the worker's node is gone")
    with pytest.raises(Unavailable, match="task 2 of 'count' does not run"):
        read()


def test_state_follows_its_tasks_to_other_workers_and_more_tasks(
    make_rig: Callable[..., WorkerRig],
) -> None:
    rig = make_rig({"rig.pause": 0.0005})
    one, two = ("s1", free_port()), ("s2", free_port())
    rig.assign({one: "1,5-7", two: "2"})
    rig.start(*one)
    rig.start(*two)
    pids = {slot: process.pid for slot, process in rig.processes.items()}
    eventually(lambda: len(acked(rig)) > 300, what="some words are acked")
    rig.assign({one: "2,5-7", two: "1"})
    eventually(rig.running, timeout=90, what="the tasks have changed places")
    at = len(acked(rig))
    eventually(lambda: len(acked(rig)) > at + 300, what="more words are acked")
    # As a rebalance does it: one more task, in the middle of everything.
    rig.set_tasks(tasks_of("1-3"))
    rig.assign({one: "2,5-7", two: "1,3"})
    eventually(rig.running, timeout=90, what="the third task runs")
    eventually(lambda: len(acked(rig)) == TOTAL, timeout=60, what="all words are acked")
    assert counted(rig) == EXPECTED
    folder = rig.folder / "state" / "wc" / "count.state"
    assert len(list(folder.glob("000002/*.log"))) == 3
    assert {slot: process.pid for slot, process in rig.processes.items()} == pids
    assert all(process.poll() is None for process in rig.processes.values())


def on_two_hosts(rig: WorkerRig) -> tuple[tuple[str, int], tuple[str, int]]:
    """A slot on each of two hosts, whose workers have a HOME each."""
    for number in (1, 2):
        rig.hosts[f"s{number}"], rig.homes[f"s{number}"] = (
            f"127.0.0.{number}",
            rig.folder / f"home{number}",
        )
        rig.homes[f"s{number}"].mkdir()
    return ("s1", free_port()), ("s2", free_port())


def errors(rig: WorkerRig) -> str:
    """Texts of all errors of the topology."""
    return "\n".join(
        one.error
        for each in rig.cluster.errors_by_component(rig.topology_id).values()
        for one in each
    )


@pytest.mark.long
def test_hosts_that_share_no_storage_are_seen_and_those_that_do_run(
    make_rig: Callable[..., WorkerRig],
) -> None:
    rig = make_rig({"rig.pause": 0.0005})
    one, two = on_two_hosts(rig)
    rig.assign({one: "1,5-7", two: "2"})
    rig.start(*one)
    rig.start(*two)
    eventually(
        lambda: "is not the folder that they see" in errors(rig),
        timeout=60,
        what="the other host refuses",
    )
    text = errors(rig)
    assert (
        "topology.state.local: true" in text
        and "(count)" in text
        and "127.0.0.1, 127.0.0.2" in text
    )
    # The same storage on both: the marker of the first one is there.
    (marker,) = rig.folder.glob("home*/state/wc/.shared-*")
    other = rig.folder / ("home2" if "home1" in str(marker) else "home1") / "state"
    if other.exists():
        other.rename(other.with_name("away"))
    other.symlink_to(marker.parent.parent)
    eventually(rig.running, timeout=60, what="both run on one storage")
    eventually(lambda: len(acked(rig)) == TOTAL, timeout=60, what="all words are acked")
    rig.homes.clear()
    assert not (rig.folder / "state").exists()
    (rig.folder / "state").symlink_to(marker.parent.parent)
    assert counted(rig) == EXPECTED


@pytest.mark.long
def test_a_task_on_a_host_without_its_state_does_not_start(
    make_rig: Callable[..., WorkerRig],
) -> None:
    """Never on two hosts at once, so that no marker was needed; then local state is asked for."""
    rig = make_rig({"rig.pause": 0.0005})
    one, two = on_two_hosts(rig)
    rig.assign({one: "1-2,5-7"})
    rig.start(*one)
    eventually(lambda: len(acked(rig)) > 300, timeout=60, what="some words are acked")
    rig.processes[one].kill()
    rig.processes[one].wait()
    rig.assign({two: "1-2,5-7"})
    rig.start(*two)
    eventually(
        lambda: "older than the last that was acknowledged" in errors(rig),
        timeout=60,
        what="it is refused",
    )
    assert "opening" in errors(rig) or "division" in errors(rig)
    assert not rig.running()
    rig.processes[two].terminate()
    rig.processes[two].wait()
    conf = rig.code_dir / "stormconf.ser"
    conf.write_text(json.dumps({**json.loads(conf.read_text()), "topology.state.local": True}))
    rig.assign({two: "1,5-7", one: "2"})
    rig.start(*two)
    rig.start(*one)
    eventually(rig.running, timeout=60, what="it starts with what is there")
    eventually(
        lambda: "topology.state.local is set" in errors(rig),
        timeout=60,
        what="the warning is recorded",
    )
    assert set(rig.cluster.read_state_home(rig.topology_id).local) == {"127.0.0.1", "127.0.0.2"}
