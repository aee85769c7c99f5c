"""Pages and documents of a topology whose workers write extreme values: none answers with 500."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from storm_dagster.model import paths
from storm_dagster.model.slot import Slot
from storm_dagster.testing.waiting import eventually
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.nimbus_thread import NimbusThread
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper

LAST_SECOND = 253_402_300_799
"""Of the year 9999."""
PAGES = (
    "/",
    "/hosts",
    "/topologies/evil",
    "/topologies/evil/placement",
    "/topologies/evil/graph.svg",
)
DOCUMENTS = ("/v1/topologies", "/v1/topologies/evil", "/v1/cluster", "/metrics")
INTEGERS = (0, -1, 2**31, 2**63, -(2**63), 2**64, 10**30, -(10**30), 10**400)
NUMBERS = ("NaN", "Infinity", "-Infinity", "1e308", "-1e308", "5e-324", "0", "-0.0", "1e400")
TEXTS = (
    "",
    "\0",
    "\x1b[31m",
    "<b>",
    "\ud800",
    "\udc80x",
    "\U0010ffff",
    "\u202e",
    "{{7*7}}",
    "é" * 999,
)


Values = tuple[Any, str, str]
"""An integer, a number as JSON writes it, and a text, of which one is extreme: a record with an
invalid field is left out as a whole, with what its other fields would do.
"""
SMALL: list[Values] = [(10**400, "1.0", "a"), (1, "NaN", "a"), (1, "1.0", "\ud800")]
ALL: list[Values] = [
    *((integer, "1.0", "a") for integer in INTEGERS),
    *((1, number, "a") for number in NUMBERS),
    *((1, "1.0", text) for text in TEXTS),
]


def write(world: World, path: str, fields: dict[str, Any], number: str = "0") -> None:
    """Write a record; ``@`` stands for a number that Python's JSON has no text for."""
    text = json.dumps({"v": 1, **fields}).replace('"@"', number)
    world.cluster.state.set_data(path, text.encode())


def write_all(world: World, topology_id: str, slots: Mapping[Slot, Any], values: Values) -> None:
    """Write each record that a worker may write, with these values in all fields that take them."""
    integer, number, text = values
    for (node, port), tasks in slots.items():
        record = {
            "pid": integer,
            "token": text,
            "version": integer,
            "tasks": tasks,
            "started_ms": integer,
            "status": "running",
            "code": text,
        }
        write(world, paths.worker(topology_id, node, port), record)
    beat = {"count": integer, "silent_ms": integer, "uptime_secs": integer}
    beats = {
        "topology_id": topology_id,
        "topology_master": integer,
        "workers": {f"{node}-{port}": beat for node, port in slots} | {text: beat},
        "version": integer,
        "summary": dict.fromkeys(("emitted", "acked", "failed", "latency_ms", text), "@"),
        "trend": text,
    }
    write(world, paths.taskbeats(topology_id), beats, number)
    write(world, paths.metrics(topology_id), {"sample_rate": "@", "ids": {text: integer}}, number)
    home = {"marker": text, "openings": {text: [integer], "1": [integer]}, "local": [text]}
    write(world, paths.state_home(topology_id), home)
    for place, time in enumerate((0, LAST_SECOND)):
        error = {
            "task": integer,
            "host": text,
            "port": integer,
            "time": time,
            "error": text,
            "count": integer,
            "group": text,
        }
        write(world, f"{paths.task_errors(topology_id, 'split')}/e{place:010d}", error)


def routes_of(nimbus: NimbusThread, topology_id: str) -> list[str]:
    """All documents and pages that show a topology, or all of them."""
    document = nimbus.get("/openapi.json").json()
    known = {"id": topology_id, "name": "evil", "component": "split"}
    routes = list(PAGES)
    for path, methods in document["paths"].items():
        names = re.findall(r"\{(\w+)\}", path)
        if "get" in methods and all(name in known for name in names):
            routes.append(path.format(**known))
            if "name" in names:
                routes.append(path.format(**{**known, "name": topology_id}))
    return sorted(set(routes))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("extremes", "everywhere"),
    [(SMALL, False), pytest.param(ALL, True, marks=pytest.mark.long)],
    ids=["some", "all"],
)
def test_no_page_or_document_fails_on_what_a_worker_wrote(
    stage: Stage, extremes: list[Values], everywhere: bool
) -> None:
    world = stage.world()
    nimbus = stage.nimbus().await_leading()
    world.supervisor("s1")
    topology_id = world.submit("evil")
    world.run_workers(topology_id)
    live_workers = world.cluster.live_workers(topology_id)
    slots = {slot: worker.tasks for slot, worker in live_workers.items()}
    write_all(world, topology_id, slots, (1, "1.0", "a"))
    with httpx.Client(base_url=nimbus.url, timeout=30, trust_env=False) as http:
        eventually(lambda: http.get("/topologies/evil").status_code == 200, what="its page")
        asked = routes_of(nimbus, topology_id) if everywhere else [*PAGES, *DOCUMENTS]
        usual = {route: http.get(route).status_code for route in asked}
        # Others ask a worker, and none listens here.
        routes = [route for route, status in usual.items() if status < 500]
        assert {*PAGES, *DOCUMENTS} <= set(routes), usual
        assert not everywhere or len(routes) > 25, usual
        failures: list[str] = []
        for values in extremes:
            write_all(world, topology_id, slots, values)
            for route in routes:
                try:
                    answer = http.get(route)
                except httpx.HTTPError as error:
                    failures.append(f"{route} of {values!r:.80}: {error!r}")
                    continue
                status = answer.status_code
                # A record that is left out may be the one of the worker that is asked, and a
                # topology with a damaged one is left alone: both are said.
                is_told = status in (503, 504) or "has a damaged record" in answer.text
                if status >= 500 and not is_told:
                    failures.append(f"{route} of {values!r:.80}: {status}")
        assert failures == []
