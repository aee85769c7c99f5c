"""New files as a source: each is read once, by its name, and from where it was left."""

from __future__ import annotations

import gzip
import importlib
import io
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from storm_dagster.api import Spout, Topology
from storm_dagster.connectors import FileSource, SourceSpout, source_spout
from storm_dagster.connectors.file_rows import FileRow
from storm_dagster.model.errors import InvalidTopology, MissingPart
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_rigs.components import CollectBolt, RejectBolt
from storm_rigs.worker.sources_in_harness import run_until

SEEN = CollectBolt.everything
"""Values of all rows that were read."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_spout, "_COMMIT_SECS", 0.02)
    monkeypatch.setattr(FileSource, "refresh_secs", 0.05)


def reading(
    path: Path | str, par: int = 1, rejected: list[Any] | None = None, **body: Any
) -> type[Topology]:
    parts = {"source": FileSource(str(path)), "outputs": ["row"], "__module__": __name__, **body}
    # Tasks import the class by its name.
    globals()["Rows"] = made = type("Rows", (SourceSpout,), parts)
    SEEN.clear()

    class Reading(Topology):
        rows = made.spec(par=par)
        uses = RejectBolt.spec(inputs=[rows], args={"values": rejected or []})

    return Reading


def positions(harness: TopologyHarness) -> dict[str, Any]:
    tasks = [one for one in harness.tasks("rows") if one is not None and one._store is not None]
    return {Path(name).name: at for one in tasks for name, at in one._store.current.items()}


def write(path: Path, text: str, secs: int = 0) -> None:
    """As the class asks for it: under its name it is whole, and with its time."""
    half = path.with_name(f"_{path.name}.half")
    half.write_text(text)
    if secs:
        os.utime(half, (secs, secs))
    half.replace(path)


def test_each_file_is_read_once_whatever_its_modification_time(
    tmp_path: Path,
) -> None:
    folder, state = tmp_path / "in", tmp_path / "state"
    folder.mkdir()
    write(folder / "b.jsonl", '{"n": 1}\n\n{"n": 2}\n', 2000)
    write(folder / "a.jsonl", '{"n": 3}', 3000)
    write(folder / "_half.jsonl", '{"n": 99}')
    write(folder / ".half.jsonl", '{"n": 99}')
    inactive = threading.Event()
    with TopologyHarness(
        reading(folder / "*.jsonl", deactivate=lambda self: inactive.set()), state_dir=state
    ) as harness:
        run_until(harness, lambda: positions(harness) == {"a.jsonl": "end", "b.jsonl": "end"})
        assert [row["n"] for (row,) in SEEN] == [1, 2, 3], "the oldest first"
        # Late, and with a time before all others.
        write(folder / "c.jsonl", '{"n": 4}\n', 1000)
        run_until(harness, lambda: positions(harness).get("c.jsonl") == "end")
        run_until(harness, lambda: lags(harness) == {"files": [0, 0.0]})
        assert harness.errors == []
        # Also while the topology is inactive.
        harness.engine.activate(False)
        run_until(harness, inactive.is_set)
        write(folder / "e.jsonl", '{"n": 5}')
        run_until(harness, lambda: lags(harness)["files"][0] == 1)
        assert [row["n"] for (row,) in SEEN] == [1, 2, 3, 4]
    (folder / "e.jsonl").unlink()
    write(folder / "d.jsonl", "".join(f'{{"n": {n}}}\n' for n in range(10, 40)))
    with TopologyHarness(
        reading(folder / "*.jsonl", max_open=3, rejected=[{"n": 20}]), state_dir=state
    ) as harness:
        run_until(harness, lambda: {row["n"] for (row,) in SEEN} >= set(range(10, 20)) | {21, 22})
        run_until(harness, lambda: positions(harness).get("d.jsonl") == 10)
    # With two tasks: nothing is read again that was finished.
    with TopologyHarness(reading(folder / "*.jsonl", par=2), state_dir=state) as harness:
        run_until(harness, lambda: positions(harness).get("d.jsonl") == "end")
        assert sorted(row["n"] for (row,) in SEEN) == list(range(20, 40))


def lags(harness: TopologyHarness) -> dict[str, Any]:
    (metrics,) = [one.metrics for one in harness.engine.stats().values() if one.component == "rows"]
    return metrics.get("lag_by_partition", {})


def test_csv_parquet_and_text_also_compressed(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    (tmp_path / "a.csv").write_text('name,n\nx,1\n"y\nz",2\n')
    with TopologyHarness(reading(tmp_path / "*.csv", decode="none")) as harness:
        run_until(harness, lambda: positions(harness) == {"a.csv": "end"})
    assert SEEN == [[{"name": "x", "n": "1"}], [{"name": "y\nz", "n": "2"}]]
    write_table(pyarrow.table({"n": [1, 2], "t": ["x", None]}), tmp_path / "a.parquet")
    with TopologyHarness(reading(tmp_path / "*.parquet")) as harness:
        run_until(harness, lambda: positions(harness) == {"a.parquet": "end"})
    assert SEEN == [[{"n": 1, "t": "x"}], [{"n": 2, "t": None}]]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("eins\nzwölf\n".encode()))
    with TopologyHarness(reading(tmp_path / "*.txt.gz", decode="text")) as harness:
        run_until(harness, lambda: positions(harness) == {"a.txt.gz": "end"})
    assert SEEN == [["eins"], ["zwölf"]]


def test_new_files_of_a_bucket_are_read_once(
    s3: tuple[dict[str, Any], str, Any], tmp_path: Path
) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    conf, bucket, fs = s3
    table = io.BytesIO()
    write_table(pyarrow.table({"n": ["4", None]}), table)
    fs.pipe_file(f"{bucket}/in/a.jsonl", b'{"n": "1"}\n\n{"n": "2"}\n')
    fs.pipe_file(f"{bucket}/in/_half.jsonl", b'{"n": "99"}')
    fs.pipe_file(f"{bucket}/in/b.csv", b"n\n3\n")
    fs.pipe_file(f"{bucket}/in/c.parquet", table.getvalue())
    for name, found in (("*.jsonl", ["1", "2"]), ("*.csv", ["3"]), ("*.parquet", ["4", None])):
        topology = reading(f"s3://{bucket}/in/{name}")
        with TopologyHarness(topology, state_dir=tmp_path / name[2:], conf=conf) as harness:
            run_until(harness, lambda: set(positions(harness).values()) == {"end"})
            assert [row["n"] for (row,) in SEEN] == found and harness.errors == []
            assert harness.tasks("rows")[0].blocking, "in a thread of its own"
    # Consoles make an empty object for a folder.
    fs.call_s3("put_object", Bucket=bucket, Key="logs/sub/", Body=b"")
    fs.pipe_file(f"{bucket}/logs/sub/e.jsonl", b'{"n": "6"}')
    topology = reading("x.csv", source=FileSource(f"s3://{bucket}/logs/**", format="lines"))
    with TopologyHarness(topology, conf=conf) as harness:
        run_until(
            harness, lambda: positions(harness) == {"e.jsonl": "end"} and harness.errors == []
        )
    with TopologyHarness(
        reading(f"s3://{bucket}/in/*.jsonl"), state_dir=tmp_path / "jsonl", conf=conf
    ) as harness:
        fs.pipe_file(f"{bucket}/in/d.jsonl.gz", b"")
        fs.pipe_file(f"{bucket}/in/late.jsonl", b'{"n": "5"}')
        run_until(harness, lambda: len(positions(harness)) == 2)
        run_until(harness, lambda: lags(harness) == {"files": [0, 0.0]})
        assert [row["n"] for (row,) in SEEN] == ["5"] and harness.errors == []


class Beats(Spout):
    outputs: ClassVar[Any] = ["n"]

    def next_tuple(self) -> None:
        self.emit([{"n": "beat"}])


def test_a_store_that_does_not_answer_keeps_no_other_task_waiting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        conf = {
            "files.endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "files.anon": True,
            "files.config_kwargs": {"retries": {"max_attempts": 0}},
        }

        class Both(reading("s3://bucket/*.jsonl")):
            beats = Beats.spec()
            use = CollectBolt.spec(inputs=[beats])

        with TopologyHarness(Both, state_dir=tmp_path, conf=conf) as harness:
            # The question is there, and has no answer.
            asked = []
            silent.settimeout(0)

            def is_asked() -> bool:
                try:
                    asked.append(silent.accept()[0])
                except BlockingIOError:
                    pass
                return bool(asked)

            run_until(harness, is_asked)
            before = len(SEEN)
            run_until(harness, lambda: len(SEEN) > before + 1000)
            for connection in asked:
                connection.close()
            silent.close()
            run_until(harness, lambda: [name for name, _ in harness.errors] == ["rows"])


def test_a_missing_client_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    # What fsspec has imported for another test it does not import again.
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "s3", raising=False)
    with pytest.raises(MissingPart, match=r"pip install 's3fs.* \(the extra s3 of"):
        FileSource("s3://bucket/*.csv").open({}, None)
    with pytest.raises(ImportError, match="gcsfs"):
        FileSource("gs://bucket/*.csv").open({}, None)


def test_a_file_that_cannot_be_read_is_named_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").write_text("nothing")
    (tmp_path / "b.jsonl").write_text("1")
    with TopologyHarness(
        reading("x.csv", source=FileSource(f"{tmp_path}/*", format="lines"))
    ) as harness:
        monkeypatch.setattr(FileSource, "_values", broken)
        run_until(harness, lambda: positions(harness) == {"b.jsonl": "end"} and harness.errors)
        assert "a.parquet cannot be read: OSError: broken" in str(harness.errors[0][1])


def broken(self: FileSource, name: str, *_: Any) -> Any:
    if name.endswith("parquet"):
        raise OSError("broken")
    yield FileRow(b"1")


def test_a_name_that_is_gone_for_long_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileSource, "forget_secs", 0.2)
    (tmp_path / "a.jsonl").write_text("1")
    with TopologyHarness(reading(tmp_path / "*.jsonl")) as harness:
        run_until(harness, lambda: positions(harness) == {"a.jsonl": "end"})
        (tmp_path / "a.jsonl").unlink()
        run_until(harness, lambda: positions(harness) == {})
        write(tmp_path / "a.jsonl", "2")
        run_until(harness, lambda: SEEN == [[1], [2]])


def test_an_unreadable_folder_is_named_and_its_files_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileSource, "forget_secs", 0.1)
    folder = tmp_path / "in"
    with TopologyHarness(reading(folder / "a*.jsonl")) as harness:
        # A folder that is not there yet has no files, which is no fault.
        run_until(
            harness, lambda: positions(harness) == {} and lags(harness) == {"files": [0, 0.0]}
        )
        assert harness.errors == []
        (tmp_path / "away").mkdir()
        (tmp_path / "away" / "a.jsonl").write_text("1")
        folder.symlink_to(tmp_path / "away")
        run_until(harness, lambda: positions(harness) == {"a.jsonl": "end"})
        # It leads to itself, from one moment to the next.
        (tmp_path / "loop").symlink_to(folder)
        (tmp_path / "loop").replace(folder)
        run_until(harness, lambda: harness.errors)
        assert "symbolic links" in str(harness.errors[0][1])
        until = time.monotonic() + 0.5
        run_until(harness, lambda: time.monotonic() > until)
        (tmp_path / "back").symlink_to(tmp_path / "away")
        (tmp_path / "back").replace(folder)
        write(folder / "ab.jsonl", "2")
        run_until(harness, lambda: positions(harness) == {"a.jsonl": "end", "ab.jsonl": "end"})
    assert SEEN == [[1], [2]]


def test_links_to_files_are_read_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    (tmp_path / "in").mkdir()
    for name, target in (("a", "one"), ("b", "nothing"), ("c", "in")):
        (tmp_path / "in" / f"{name}.jsonl").symlink_to(tmp_path / target)
    with TopologyHarness(reading(tmp_path / "in" / "*.jsonl")) as harness:
        run_until(harness, lambda: positions(harness) == {"a.jsonl": "end"})
        assert harness.errors == []
    assert SEEN == [[1]]


def test_many_files_with_a_record_that_blocks_stop_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_spout, "_BATCH", 4)
    for n in range(12):
        write(tmp_path / f"a{n}.jsonl", '{"n": 0}\n' * 40, 1000)
    write(tmp_path / "b.jsonl", "".join(f'{{"n": {n}}}\n' for n in range(1, 40)), 2000)
    with TopologyHarness(
        reading(tmp_path / "*.jsonl", max_open=2, on_poison="block", rejected=[{"n": 0}])
    ) as harness:
        run_until(harness, lambda: positions(harness).get("b.jsonl") == "end")
    assert [row["n"] for (row,) in SEEN] == list(range(1, 40))


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InvalidTopology, match=r"format of '/in/x\.bin' is not known"):
        FileSource("/in/x.bin")
