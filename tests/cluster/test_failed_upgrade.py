"""An upgrade whose bolt raises in ``initialize``, on daemons with real workers, without Dagster.

It is rolled back, says why, and leaves the topology as it was.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from storm_dagster.client.uploads import upload_target
from storm_dagster.core.upgrade.selection import Selection
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.upgrade_waiting import await_upgrade
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.stage.daemons import Daemons

pytestmark = [pytest.mark.cluster, pytest.mark.zookeeper, pytest.mark.timeout(300)]

STEADY = Path(__file__).parent / "topologies" / "steady.py"
BROKEN = """

def _raise(self: Sink, conf: Any, context: Any) -> None:
    raise LookupError("no dictionary")


Sink.initialize = _raise
"""
CONF = {"topology.workers": 2, "topology.master.single.worker": True}


@pytest.fixture
def daemons(zookeeper_server: str, tmp_path: Path) -> Iterator[Daemons]:
    conf = {"storm.zookeeper.root": f"/t-{uuid.uuid4().hex[:12]}"}
    with Daemons(
        tmp_path / "home", [zookeeper_server], nimbuses=1, supervisors=1, slots=3, conf=conf
    ) as daemons:
        yield daemons


@pytest.fixture
def broken(tmp_path: Path) -> str:
    """Target: the topology whose sink cannot be opened."""
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "steady.py").write_text(STEADY.read_text() + BROKEN)
    return f"{folder / 'steady.py'}:Steady"


def test_a_task_that_cannot_be_opened_rolls_the_upgrade_back_and_is_quoted(
    daemons: Daemons, broken: str
) -> None:
    topology_id = daemons.submit(f"{STEADY}:Steady", "numbers", conf=CONF)
    daemons.wait_running(topology_id)
    with daemons.client() as nimbus, daemons.operations() as ctx:
        former = {
            row["port"]: row["version"] for row in nimbus.get("/v1/topologies/numbers")["workers"]
        }
        handle = upload_target(nimbus, broken, conf=CONF, home=daemons.home).handle
        request = lifecycle.gray_upgrade(ctx, "numbers", Selection(number=1), handle=handle)
        with pytest.raises(InvalidTopology, match="the former code runs again") as failed:
            await_upgrade(ctx, request, wait_secs=patience(60), on_worker=lambda *_: None)

        lines = (STEADY.read_text() + BROKEN).splitlines()
        line = 1 + next(row for row, text in enumerate(lines) if "raise LookupError" in text)
        quoted = f"LookupError: no dictionary (steady.py, line {line})"
        assert "sink[" in failed.value.message and quoted in failed.value.message

        daemons.wait_running(topology_id)
        document = nimbus.get("/v1/topologies/numbers")
        assert document["id"] == topology_id and document["status"] == "ACTIVE"
        assert {row["port"]: row["version"] for row in document["workers"]} == former

        # The reason stays, with the log of the worker that failed.
        kept = document["failed_upgrade"]
        assert quoted in kept["reason"] and kept["worker"] in kept["reason"]
        log = httpx.get(kept["log"], timeout=patience(20), trust_env=False)
        assert log.status_code == 200 and "LookupError: no dictionary" in log.text
        (finding,) = [row for row in document["findings"] if row["kind"] == "failed-upgrade"]
        assert quoted in finding["text"] and kept["log"] in finding["remedy"]
        changes = [(row["action"], row["why"]) for row in document["history"]]
        assert changes[0] == ("upgrade rolled back", kept["reason"])
        assert [action for action, _ in changes] == [
            *("upgrade rolled back", "upgrade begun", "submitted")
        ]
        explained = nimbus.get("/v1/topologies/numbers/placement")
        assert explained["failed_upgrade"] == kept
        page = nimbus.request("GET", "/topologies/numbers").text
        assert quoted in page and f'href="{kept["log"]}"' in page

        # Its restarts were planned: no worker counts as one that ends by itself.
        assert not [row for row in document["findings"] if row["kind"] == "restarts"]
        emitted = sum(task["stats"]["emitted"] for task in document["tasks"])
        eventually(
            lambda: (
                sum(
                    task["stats"]["emitted"]
                    for task in nimbus.get("/v1/topologies/numbers")["tasks"]
                )
                > emitted
            ),
            60,
            "more tuples of the former code",
        )
