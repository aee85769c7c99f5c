"""New files as a source: each is read once, by its name, and from where it was left."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from storm_dagster.api import Bolt, Topology, Tuple
from storm_dagster.connectors import FileSource, SourceSpout, source_spout
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_dagster.testing.waiting import eventually


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_spout, "_COMMIT_SECS", 0.02)
    monkeypatch.setattr(FileSource, "refresh_secs", 0.05)


class Use(Bolt):
    seen: ClassVar[list[Any]] = []

    def process(self, tup: Tuple) -> None:
        self.seen.append(tup.values[0])


def reading(path: Path | str, par: int = 1, use: type[Bolt] | None = None, **body: Any) -> type[Topology]:
    parts = {"source": FileSource(str(path)), "outputs": ["row"], "__module__": __name__, **body}
    # Tasks import the class by its name.
    globals()["Rows"] = made = type("Rows", (SourceSpout,), parts)
    Use.seen.clear()

    class Reading(Topology):
        rows = made.spec(par=par)
        uses = (use or Use).spec(inputs=[rows])

    return Reading


def run_until(harness: TopologyHarness, condition: Callable[[], Any]) -> Any:
    def turn() -> Any:
        harness.engine.run(harness.shared.clock())
        return condition()

    return eventually(turn, 20, interval=0.001)


def positions(harness: TopologyHarness) -> dict[str, Any]:
    tasks = [one for one in harness.tasks("rows") if one is not None and one._store is not None]
    return {Path(name).name: at for one in tasks for name, at in one._store.found.items()}


def write(path: Path, text: str, secs: int = 0) -> None:
    path.write_text(text)
    if secs:
        os.utime(path, (secs, secs))


def test_each_file_is_read_once_whatever_its_time_is_and_from_where_it_was_left(tmp_path: Path) -> None:
    folder, state = tmp_path / "in", tmp_path / "state"
    folder.mkdir()
    write(folder / "b.jsonl", '{"n": 1}\n\n{"n": 2}\n', 2000)
    write(folder / "a.jsonl", '{"n": 3}', 3000)
    write(folder / "_half.jsonl", '{"n": 99}')
    write(folder / ".half.jsonl", '{"n": 99}')
    with TopologyHarness(reading(folder / "*.jsonl"), state_dir=state) as harness:
        run_until(harness, lambda: positions(harness) == {"a.jsonl": "end", "b.jsonl": "end"})
        assert [row["n"] for row in Use.seen] == [1, 2, 3], "the oldest first"
        # Late, and with a time before all others.
        write(folder / "c.jsonl", '{"n": 4}\n', 1000)
        run_until(harness, lambda: positions(harness).get("c.jsonl") == "end")
        run_until(harness, lambda: lags(harness) == {"files": [0, 0.0]})
        assert harness.errors == []
    write(folder / "d.jsonl", "".join(f'{{"n": {n}}}\n' for n in range(10, 40)))
    with TopologyHarness(reading(folder / "*.jsonl", max_open=3, use=Chokes), state_dir=state) as harness:
        Chokes.bad = {20}
        run_until(harness, lambda: {row["n"] for row in Use.seen} >= set(range(10, 20)) | {21, 22})
        run_until(harness, lambda: positions(harness).get("d.jsonl") == 10)
    # With two tasks: nothing is read again that was finished.
    Chokes.bad = set()
    with TopologyHarness(reading(folder / "*.jsonl", par=2), state_dir=state) as harness:
        run_until(harness, lambda: positions(harness).get("d.jsonl") == "end")
        assert sorted(row["n"] for row in Use.seen) == list(range(20, 40))


def lags(harness: TopologyHarness) -> dict[str, Any]:
    (metrics,) = [one.metrics for one in harness.engine.stats().values() if one.component == "rows"]
    return metrics.get("lag_by_partition", {})


def test_csv_parquet_and_text_also_compressed(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    (tmp_path / "a.csv").write_text('name,n\nx,1\n"y\nz",2\n')
    with TopologyHarness(reading(tmp_path / "*.csv", decode="none")) as harness:
        run_until(harness, lambda: positions(harness) == {"a.csv": "end"})
    assert Use.seen == [{"name": "x", "n": "1"}, {"name": "y\nz", "n": "2"}]
    write_table(pyarrow.table({"n": [1, 2], "t": ["x", None]}), tmp_path / "a.parquet")
    with TopologyHarness(reading(tmp_path / "*.parquet")) as harness:
        run_until(harness, lambda: positions(harness) == {"a.parquet": "end"})
    assert Use.seen == [{"n": 1, "t": "x"}, {"n": 2, "t": None}]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("eins\nzwölf\n".encode()))
    with TopologyHarness(reading(tmp_path / "*.txt.gz", decode="text")) as harness:
        run_until(harness, lambda: positions(harness) == {"a.txt.gz": "end"})
    assert Use.seen == ["eins", "zwölf"]


def test_a_file_that_cannot_be_read_is_named_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_text("nothing")
    (tmp_path / "b.jsonl").write_text("1")
    with TopologyHarness(reading("x.csv", source=FileSource(f"{tmp_path}/*", format="lines"))) as harness:
        monkeypatch.setattr(FileSource, "_values", broken)
        run_until(harness, lambda: positions(harness) == {"b.jsonl": "end"} and harness.errors)
        assert "a.parquet cannot be read: OSError: broken" in str(harness.errors[0][1])


def broken(self: FileSource, name: str) -> Any:
    if name.endswith("parquet"):
        raise OSError("broken")
    yield b"1"


def test_a_name_that_is_gone_for_long_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileSource, "forget_secs", 0.2)
    (tmp_path / "a.jsonl").write_text("1")
    with TopologyHarness(reading(tmp_path / "*.jsonl")) as harness:
        run_until(harness, lambda: positions(harness) == {"a.jsonl": "end"})
        (tmp_path / "a.jsonl").unlink()
        run_until(harness, lambda: positions(harness) == {})
        (tmp_path / "a.jsonl").write_text("2")
        run_until(harness, lambda: Use.seen == [1, 2])


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InvalidTopology, match=r"format of '/in/x\.bin' is not known"):
        FileSource("/in/x.bin")


class Chokes(Bolt):
    bad: ClassVar[set[int]] = set()

    def process(self, tup: Tuple) -> None:
        if tup.values[0]["n"] in self.bad:
            raise ValueError("bad")
        Use.seen.append(tup.values[0])
