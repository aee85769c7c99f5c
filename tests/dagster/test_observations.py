"""Observations of the cluster: on change, at most once a minute, with a picture and numbers;
recovery times.
"""

from __future__ import annotations

import base64
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import dagster as dg
import pytest

from storm_dagster.core.pictures.slots import DrawnSlot, DrawnSupervisor, slots_picture
from storm_dagster.defs.healing.memory import recoveries
from storm_dagster.defs.keys import SUPERVISORS, TOPOLOGIES, WORKERS
from storm_dagster.defs.observe.sensors import workers_observation
from storm_dagster.model import paths
from storm_rigs.dagster.dagster_results import SensorTick, shown, tick_sensor
from storm_rigs.stage.dagster_world import DagsterWorld

pytestmark = pytest.mark.dagster


def tick(world: DagsterWorld, cursor: str | None = None) -> SensorTick:
    return tick_sensor("supervisor_sensor", world.instance, cursor, world.defs)


def later(cursor: str, secs: float = 61) -> str:
    document = json.loads(cursor)
    document["at"] -= secs
    return json.dumps(document)


def drawn(event: dg.AssetObservation) -> ET.Element:
    (data,) = re.findall(r"base64,([A-Za-z0-9+/=]+)", shown(event)["tasks_on_slots"])
    return ET.fromstring(base64.b64decode(data))


@pytest.mark.zookeeper
def test_what_changes_is_observed_once_a_minute_at_most(world: DagsterWorld) -> None:
    assert world.submit("wc", conf={"topology.workers": 2}).success
    world.run_workers("wc")
    first = tick(world)
    events = {event.asset_key: event for event in first.observations}
    assert events.keys() == {SUPERVISORS, WORKERS, TOPOLOGIES}
    assert shown(events[WORKERS])["running"] == 2
    topologies = shown(events[TOPOLOGIES])
    assert topologies["live"] == 1
    assert topologies["statistics"].endswith("/v1/topologies")
    text = " ".join(drawn(events[SUPERVISORS]).itertext())
    assert "wc" in text and "host-s1" in text and "free" in text
    # A process that was replaced in place is no change of state.
    world.run_workers("wc", token="another")
    assert tick(world, later(first.cursor)).skipped
    # A worker that is gone is a change of the workers alone, and waits for its minute.
    topology = world.topology("wc")
    node, port = next(iter(topology.live_workers))
    world.cluster.state.delete_node(paths.worker(topology.id, node, port))
    assert tick(world, first.cursor).skipped
    second = tick(world, later(first.cursor))
    assert [event.asset_key for event in second.asset_events] == [WORKERS]
    assert shown(second.asset_events[0])["not_running"] == 1
    assert tick(world, later(second.cursor)).skipped


@pytest.mark.zookeeper
def test_workers_link_to_their_logs(world: DagsterWorld) -> None:
    assert world.submit("wc", conf={"topology.workers": 2}).success
    view = world.cluster.load_view()
    (topology,) = view.topologies.values()
    first, second = sorted((worker.node, worker.host, worker.port) for worker in topology.workers)

    def logs(**services: str | None) -> str:
        found = {
            node: info.model_copy(update={"http": services.get(node)})
            for node, info in view.supervisors.items()
        }
        return shown(workers_observation(replace(view, supervisors=found), WORKERS))["logs"]

    node, host, port = first
    link = f"- wc [{host}:{port}](http://{host}:8000/api/v1/log?file={topology.id}%2F{port}%2Fworker.log)"
    assert link in logs(**{node: f"http://{host}:8000"}).splitlines()
    assert logs().splitlines() == [f"- wc {host}:{port}" for _, host, port in (first, second)]
    # What its gone supervisor served is in nobody's reach.
    assert shown(workers_observation(replace(view, supervisors={}), WORKERS))["logs"] == ""


@pytest.mark.zookeeper
def test_a_recovery_is_timed_from_loss_to_return(world: DagsterWorld) -> None:
    assert world.submit("wc", conf={"topology.workers": 2}).success
    world.run_workers("wc")
    whole = world.cluster.load_view()
    (topology,) = whole.topologies.values()
    lost = replace(topology, live_workers=dict(list(topology.live_workers.items())[1:]))
    broken = replace(whole, topologies={topology.id: lost})
    found, memory = recoveries(whole, {}, 10.0)
    assert found == []
    found, memory = recoveries(broken, memory, 12.0)
    assert found == []
    found, memory = recoveries(broken, memory, 13.0)
    found, memory = recoveries(whole, memory, 13.5)
    assert [(one.name, one.seconds, one.moved) for one in found] == [("wc", 1.5, False)]
    assert recoveries(whole, memory, 20.0)[0] == []
    # Workers that are missing from the start, or after a rebalance, recover from nothing.
    assert recoveries(whole, recoveries(broken, {}, 1.0)[1], 2.0)[0] == []


def test_pictures_are_well_formed_whatever_the_names() -> None:
    nasty = '<script>"&\x00'
    in_slot = {1: nasty, 2: nasty, 3: "b"}
    slots = [DrawnSlot(1), DrawnSlot(2, nasty, in_slot), DrawnSlot(3, "t")]
    many = [DrawnSupervisor(f"{nasty}{n}", nasty, slots, gone=n == 1) for n in range(58)]
    picture = ET.fromstring(slots_picture(many, nasty))
    assert "and 5 more supervisors" in " ".join(picture.itertext())
    assert not [element for element in picture.iter() if element.tag.endswith("script")]
    ET.fromstring(slots_picture([], "no supervisors"))
