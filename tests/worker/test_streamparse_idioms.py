"""Components in streamparse's idioms run both ways: as programs of streamparse, and in the worker
after a change of their import line.
"""

from __future__ import annotations

import copy
import importlib
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import streamparse

from storm_dagster.api import ShellBolt, Spout, Topology
from storm_dagster.api.tuples import Values
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually
from storm_dagster.worker.dataplane.named_values import _reads_by_position
from storm_rigs.components import CollectBolt

# Each emits one text for each pair that it gets.
COMPONENTS = {
    "Names": """
    def process(self, tup):
        self.emit([f"{tup.values.word} {tup.values.count}"])
""",
    "Positions": """
    def process(self, tup):
        word, count = tup.values
        self.emit(["%s %d" % (tup.values[0], count)])
""",
    "Keys": """
    def initialize(self, storm_conf, context):
        self.seen = Counter()
    def process(self, tup):
        self.seen[tup.values] += 1
        assert self.seen[(tup.values.word, tup.values.count)] == 1
        self.emit([" ".join(str(value) for value in tup.values)])
""",
    "Maps": """
    def process(self, tup):
        self.emit(["{word} {count}".format(**tup.values._asdict())])
""",
    "Helper": """
    def text(self, tup):
        return "%s %d" % (tup.values.word, tup.values.count)
    def process(self, tup):
        self.emit([self.text(tup)])
""",
    "Ids": """
    auto_ack = False
    auto_anchor = False
    def process(self, tup):
        self.emit([f"{tup.values.word} {tup.values.count}"], anchors=[tup.id])
        self.ack(tup.id)
""",
    "LaterIds": """
    auto_ack = False
    auto_anchor = False
    def initialize(self, storm_conf, context):
        self.waiting = {}
    def process(self, tup):
        self.waiting[tup.id] = list(tup.values)
        if len(self.waiting) == 3:
            for tup_id, values in self.waiting.items():
                self.emit(["%s %d" % tuple(values)], anchors=[tup_id])
                self.ack(tup_id)
""",
    "Attributes": """
    def process(self, tup):
        assert not self.is_tick(tup) and not self.is_heartbeat(tup)
        assert self.storm_conf["topology.message.timeout.secs"] and self.component_name == self.context["componentid"]
        assert self.task_id == self.context["taskid"] and self.pid and not self.debug
        self.logger.info("a word of %s", self.topology_name)
        self.emit(["%s %d" % (tup.values.word, tup.values.count)])
""",
}
TEXTS = ["a 1", "b 2", "c 3"]
GIVEN = {"pairs": [[text[0], int(text[2:])] for text in TEXTS]}


class Pairs(Spout):
    outputs = ["word", "count"]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "worker"
    folder.mkdir()
    monkeypatch.chdir(folder)


def load(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    sys.modules.pop(name, None)
    return importlib.import_module(name)


def topology_of(made: Any) -> type[Topology]:
    class Both(Topology):
        pairs = Pairs.spec()
        component = made(pairs)
        texts = CollectBolt.spec(inputs=[component])

    return Both


def texts_of(harness: TopologyHarness) -> list[str]:
    result = harness.run(timeout=60)
    assert result.errors == []
    assert sorted(result.acked["pairs"]) == [0, 1, 2] and result.failed["pairs"] == []
    return sorted(text for (text,) in harness.tasks("texts")[0].received)


@pytest.mark.parametrize("kind", ["loop", "blocking", "async"])
@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_runs_in_the_worker_after_its_import_line_is_changed(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = COMPONENTS[name].replace(
        "def process", "async def process" if kind == "async" else "def process"
    )
    extra = "    blocking = True\n" if kind == "blocking" else ""
    text = f"from collections import Counter\nfrom storm_dagster.api import Bolt\nclass {name}(Bolt):\n    outputs = ['text']\n{extra}{body}"
    code = getattr(load(tmp_path / "src", f"own_{name.lower()}_{kind}", text, monkeypatch), name)
    with TopologyHarness(topology_of(lambda pairs: code.spec(inputs=[pairs])), GIVEN) as harness:
        assert texts_of(harness) == TEXTS


@pytest.mark.parametrize("name", COMPONENTS)
def test_the_same_component_runs_as_a_program_of_streamparse(name: str, tmp_path: Path) -> None:
    text = f"from collections import Counter\nfrom streamparse import Bolt\nclass {name}(Bolt):\n    outputs = ['text']\n{COMPONENTS[name]}"
    resources = tmp_path / "resources"
    resources.mkdir()
    (resources / "program.py").write_text(text + f"\n{name}().run()\n")

    def shell(pairs: Any) -> Any:
        return ShellBolt.spec(
            command=sys.executable, script="program.py", inputs=[pairs], outputs=["text"]
        )

    with TopologyHarness(topology_of(shell), GIVEN, archive=tmp_path) as harness:
        assert texts_of(harness) == TEXTS


BATCHES = """
from {package} import {base}
class Batches({base}):
    outputs = ["text"]
    def group_key(self, tup):
        return tup.values.word
    def process_batch(self, key, tups):
        for tup in tups:
            assert tup.values.word == key
            self.emit([f"{{key}} {{tup.values.count}}"])
"""


@pytest.mark.parametrize("base", ["BatchingBolt", "TicklessBatchingBolt"])
@pytest.mark.parametrize("package", ["streamparse", "storm_dagster.api"])
def test_batches_run_both_ways(
    base: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = BATCHES.format(package=package, base=base)
    (tmp_path / "resources").mkdir()
    (tmp_path / "resources" / "program.py").write_text(text + "\nBatches().run()\n")

    def made(pairs: Any) -> Any:
        if package == "streamparse":
            return ShellBolt.spec(
                command=sys.executable, script="program.py", inputs=[pairs], outputs=["text"]
            )
        return load(tmp_path / "src", f"own_{base.lower()}", text, monkeypatch).Batches.spec(
            inputs=[pairs]
        )

    with TopologyHarness(topology_of(made), GIVEN, archive=tmp_path) as harness:
        texts: list[str] = []

        def done() -> bool:
            harness.tick("component")
            harness.engine.run(time.monotonic())
            tasks = harness.tasks("texts")
            texts[:] = sorted(text for (text,) in tasks[0].received) if tasks[0] is not None else []
            return texts == TEXTS

        assert eventually(done, 60, "all batches")
        assert harness.errors == []


# -- values ----------------------------------------------------------------------------------------


def test_named_values_are_a_list_and_behave_like_a_named_tuple() -> None:
    made = Values.of_stream(["word", "count", "user-id", "_hidden"])(["a", 1, "u", None])
    assert isinstance(made, list)
    values: Any = made
    assert values[1:] == [1, "u", None] and values == ["a", 1, "u", None]
    assert values == ("a", 1, "u", None) and values != ["a"]
    assert (values != ("a", 1, "u", None)) is False
    assert (values.word, values.count, getattr(values, "user-id")) == ("a", 1, "u")
    assert {values: 1}[("a", 1, "u", None)] == 1 and hash(values) == hash(("a", 1, "u", None))  # type: ignore[index]
    assert (
        values._fields == ("word", "count", "user-id", "_hidden")
        and values._asdict()["word"] == "a"
    )
    more: Any = (2,)
    assert values + more == values + list(more) == ["a", 1, "u", None, 2] and more + values == [
        2,
        "a",
        1,
        "u",
        None,
    ]
    assert json.loads(json.dumps(values)) == copy.copy(values) == list(values)
    assert type(copy.copy(values)) is list, "so that it is pickled by value"
    with pytest.raises(AttributeError, match="wrod"):
        _ = values.wrod  # type: ignore[attr-defined]


def first(self: Any, tup: Any) -> None:
    self.seen.append(tup.values[0])


def unpacked(self: Any, tup: Any) -> None:
    word, count = tup.values
    for value in tup.values:
        self.emit([word, count, value, tup.values[1]])


def relayed(self: Any, tup: Any) -> None:
    self.emit(tup.values)


async def awaited(self: Any, tup: Any) -> None:
    await self.ask(tup.values[0])


def named(self: Any, tup: Any) -> None:
    self.emit([tup.values.word])


def handed_on(self: Any, tup: Any) -> None:
    self.emit(tup.values[0], anchors=[tup])


def keyed(self: Any, tup: Any) -> None:
    self.seen[tup.values] = tup.values[0]


def kept(self: Any, tup: Any) -> None:
    values = tup.values
    self.emit([values[0]])


def captured(self: Any, tup: Any) -> None:
    self.later(lambda: tup.values.word)


def relayed_a_name(self: Any, tup: Any) -> None:
    self.emit(tup.values.word)


def reassigned(self: Any, tup: Any) -> None:
    tup = self.change(tup)
    self.emit([tup.values[0]])


def relayed_elsewhere(self: Any, tup: Any) -> None:
    self.send(tup.values)


def two(self: Any, tup: Any) -> None:
    self.seen.append((tup.values, 0)[1])


@pytest.mark.parametrize("function", [first, unpacked, relayed, awaited])
def test_code_that_takes_values_by_position_gets_plain_lists(function: Any) -> None:
    assert _reads_by_position(function)


@pytest.mark.parametrize(
    "function",
    [
        named,
        handed_on,
        keyed,
        kept,
        captured,
        relayed_a_name,
        reassigned,
        relayed_elsewhere,
        two,
        print,
        lambda *a: a,
    ],
)
def test_all_other_code_gets_named_values(function: Any) -> None:
    assert not _reads_by_position(function)


def test_named_values_and_ids_travel_as_lists_and_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
from storm_dagster.api import Bolt
class Whole(Bolt):
    outputs = ["text"]
    def process(self, tup):
        self.emit([{"all": [tup.values], "id": tup.id}])
"""
    code = load(tmp_path / "src", "own_whole", text, monkeypatch).Whole
    with TopologyHarness(topology_of(lambda pairs: code.spec(inputs=[pairs])), GIVEN) as harness:
        harness.run(timeout=60)
        assert harness.errors == []
        for (value,) in harness.tasks("texts")[0].received:
            assert type(value["all"][0]) is list and type(value["id"]) is int


def test_ids_are_numbers_and_a_tuple_is_acked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
from storm_dagster.api import Bolt
class Twice(Bolt):
    auto_ack = False
    outputs = ["text"]
    def process(self, tup):
        assert tup.id == tup.id and {tup.id: 1}[int(tup.id)] == 1 and isinstance(tup.id, int)
        self.emit([f"{tup.values.word} {tup.values.count}"], anchors=tup.id)
        self.ack(tup.id)
        self.fail(tup.id)
        self.ack(tup)
"""
    code = load(tmp_path / "src", "own_twice", text, monkeypatch).Twice
    with TopologyHarness(topology_of(lambda pairs: code.spec(inputs=[pairs])), GIVEN) as harness:
        assert texts_of(harness) == TEXTS


# -- streamparse's own project ---------------------------------------------------------------------

PROJECT = Path(streamparse.__file__).parent / "bootstrap" / "project" / "src"


@pytest.mark.parametrize("way", [pytest.param("program", marks=pytest.mark.long), "import line"])
def test_the_word_count_of_streamparses_quickstart_runs_both_ways(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from storm_dagster.api import Grouping, ShellSpout

    caplog.set_level("INFO", logger="storm_dagster.component")
    found = {
        "words": PROJECT / "spouts" / "words.py",
        "wordcount": PROJECT / "bolts" / "wordcount.py",
    }
    (tmp_path / "resources").mkdir()
    for name, path in found.items():
        text = path.read_text()
        assert "from streamparse import" in text, "the template has changed"
        if way == "program":
            (tmp_path / "resources" / f"own_{name}.py").write_text(text)
        else:
            load(
                tmp_path / "src",
                f"own_{name}",
                text.replace("from streamparse", "from storm_dagster.api"),
                monkeypatch,
            )

    counting: type[Topology]
    if way == "program":

        class Programs(Topology):
            words = ShellSpout.spec(
                command="streamparse_run", script="own_words.WordSpout", outputs=["word"]
            )
            count = ShellBolt.spec(
                command="streamparse_run",
                script="own_wordcount.WordCountBolt",
                inputs={words: Grouping.fields("word")},
                outputs=["word", "count"],
            )

        counting = Programs
    else:

        class Classes(Topology):
            words = sys.modules["own_words"].WordSpout.spec()
            count = sys.modules["own_wordcount"].WordCountBolt.spec(
                inputs={words: Grouping.fields("word")}
            )

        counting = Classes
    with TopologyHarness(counting, archive=tmp_path) as harness:

        def counted() -> bool:
            harness.engine.run(time.monotonic())
            # It logs a total that is a multiple of 1,000.
            return any(
                re.search(r"counted \[\d,000\] words", message) for message in caplog.messages
            )

        assert eventually(counted, 120, "thousands of words")
        assert harness.errors == []
