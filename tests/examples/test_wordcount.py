"""The word count example: what comes twice is counted once, in memory as on the disk."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from storm_dagster.testing.task_state import open_task_state
from storm_dagster.testing.topology_harness import TopologyHarness

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def wordcount() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wordcount", EXAMPLES / "wordcount.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["wordcount"] = module
    spec.loader.exec_module(module)
    return module


def counts(harness: TopologyHarness) -> Counter[str]:
    """What the tasks of ``count`` have saved."""
    found: Counter[str] = Counter()
    for bolt in harness.tasks("count"):
        for word, times in bolt.context.state.items():
            assert word not in found
            found[word] = times
    return found


def test_the_lines_are_the_same_every_time(wordcount: ModuleType) -> None:
    lines = list(wordcount.read_lines(5, 200))
    assert lines == list(wordcount.read_lines(5, 200))
    assert [number for number, _ in lines] == list(range(200))
    assert len({number for number, _ in wordcount.read_lines(5, 50)}) == 50


def test_a_line_that_comes_twice_is_counted_once(wordcount: ModuleType, tmp_path: Path) -> None:
    lines = [[0, "to be or not to be"], [1, "Be_it so"], [0, "to be or not to be"]]
    expected = Counter({"to": 2, "be": 2, "or": 1, "not": 1, "be_it": 1, "so": 1})
    for _ in range(2):
        # The second time everything is replayed onto what the first has saved.
        with TopologyHarness(
            wordcount.WordCount, given={"lines": lines}, state_dir=tmp_path
        ) as harness:
            harness.run()
            harness.tick("count")
            result = harness.run()
            assert sorted(result.acked["lines"]) == [0, 1, 2] and result.errors == []
            assert counts(harness) == expected


def test_a_task_that_is_alone_now_reads_what_its_sibling_left(
    wordcount: ModuleType, tmp_path: Path
) -> None:
    expected: Counter[str] = Counter()
    for _, line in wordcount.read_lines(5, 100):
        expected.update(wordcount.words_of(line))
    # The first of two had gone through half of its share, and the second was slow.
    state = open_task_state(tmp_path, "harness", "lines", 1)
    state.save({"done": 25, "total": 50, "share": [0, 2]})
    state.close()
    conf = {"wordcount.files": 5, "wordcount.limit": 100}
    for _ in range(2):
        with TopologyHarness(wordcount.WordCount, conf=conf, state_dir=tmp_path) as harness:
            harness.run()
            harness.tick("count")
            harness.run()
            (spout,) = harness.tasks("lines")
            assert spout.context.state.get("done") == 100
            done = counts(harness)
        # Nobody had counted the lines before it: then all of them are, each once, however often it
        # is opened.
        assert done == expected
