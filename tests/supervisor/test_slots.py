"""The shell of the slots: one download of each code, and spares that are not lost."""

from __future__ import annotations

import json
import subprocess
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.slots.model import DesiredSlots, SlotLimits, Work
from storm_dagster.model.conf import default_conf
from storm_dagster.model.errors import InvalidTopology, StormDagsterError, Unavailable
from storm_dagster.supervisor.launcher import Launcher, log_path
from storm_dagster.supervisor.localizer import LocalCode
from storm_dagster.supervisor.slots import SlotTable
from storm_dagster.testing.waiting import eventually, patience

A = Work("a-1-1", "a-1-1")
B = Work("b-2-2", "b-2-2")
PORTS = (6900, 6901)


class SlowDownloads:
    """A localizer whose downloads end together, when the test says so."""

    removing = False

    def __init__(self) -> None:
        self.begun = Counter[str]()
        self._end = threading.Event()

    def local(self, code_dir: str) -> LocalCode | None:
        return None

    def fetch(self, code_dir: str) -> LocalCode:
        self.begun[code_dir] += 1
        self._end.wait(patience(60))
        raise Unavailable("no nimbus has it")

    def end(self) -> None:
        self._end.set()


def _table(downloads: Any) -> SlotTable:
    """Slots that start no process."""

    def launch(port: int, work: Work, code: LocalCode) -> Any:
        raise AssertionError("no code is complete")

    limits = SlotLimits(start_timeout=120, silence_timeout=30, kill_after=3)
    return SlotTable(
        PORTS,
        limits,
        downloads,
        launch,
        wake=lambda: None,
        clean=lambda live, last: None,
        report=lambda topology_id, port, text: None,
        failed=lambda port, work, text: None,
    )


def _threads(work: Work) -> list[threading.Thread]:
    """Threads that download its code."""
    name = f"fetch-{work.code_dir}"
    return [thread for thread in threading.enumerate() if thread.name == name]


@given(
    st.lists(
        st.dictionaries(st.sampled_from(PORTS), st.sampled_from([A, B])), min_size=1, max_size=8
    )
)
def test_code_is_downloaded_once_however_often_it_is_wanted(wishes: list[dict[int, Work]]) -> None:
    downloads = SlowDownloads()
    table = _table(downloads)
    try:
        for now, work in enumerate(wishes):
            table.apply(DesiredSlots(work=work, contested={}), float(now))
            for code in (A, B):
                assert len(_threads(code)) <= 1
        wanted = set(wishes[-1].values())
        assert all(_threads(work) for work in wanted)
    finally:
        downloads.end()
        for work in (A, B):
            for thread in _threads(work):
                thread.join(patience(20))
        table.close()
    assert all(number == 1 for number in downloads.begun.values())
    # Each slot that waits gets the result.
    table.poll(float(len(wishes)))
    assert all(slot.fetching is None for slot in table.slots.values())


@pytest.mark.parametrize("failure", ["no room for the log", "an environment that is not valid"])
def test_a_spare_ends_if_its_start_fails(tmp_path: Path, failure: str) -> None:
    code = tmp_path / "code-1-1"
    (code / "code").mkdir(parents=True)
    stored: dict[str, Any] = {}
    conf = {**default_conf(), "supervisor.worker.spares": 1, "storm.local.hostname": "127.0.0.1"}
    log = log_path(tmp_path, A.topology_id, 6900)
    if failure == "no room for the log":
        log.parent.parent.parent.mkdir(parents=True)
        log.parent.parent.write_text("a file where the folder of the logs should be")
    else:
        stored["topology.environment"] = conf["topology.environment"] = {"A=B": "x"}
    (code / "stormconf.ser").write_text(json.dumps(stored))
    spares: list[subprocess.Popen[bytes]] = []
    launcher = Launcher(tmp_path, "s1", "127.0.0.1", conf)

    def spawn(worker_id: str) -> subprocess.Popen[bytes]:
        """A process that waits for a line, as a spare does."""
        spares.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL))
        return spares[-1]

    launcher.spares.spawn = spawn
    launcher.spares.refill()
    (spare,) = spares
    assert psutil.pid_exists(spare.pid)
    with pytest.raises((OSError, StormDagsterError)) as raised:
        launcher.launch(6900, A, LocalCode(code, "0" * 64))
    assert isinstance(raised.value, OSError | InvalidTopology)
    eventually(lambda: spare.poll() is not None, what="the end of the spare")
    assert not any((tmp_path / "workers").glob("*"))
    launcher.spares.close()
