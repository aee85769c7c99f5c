"""The fields of a topology's base that repeat its conf follow every change of the conf."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from storm_dagster.core.submission.conf import BASE_CONF_FIELDS, base_conf
from storm_dagster.core.upgrade.selection import Selection
from storm_dagster.model import paths
from storm_dagster.model.records import StormBase, encode_record
from storm_dagster.operations.context import load_runnable
from storm_dagster.operations.live import lifecycle
from storm_dagster.operations.live.deploy import update
from storm_dagster.operations.live.rebalance import rebalance
from storm_dagster.operations.read.run_results import rebalance_result
from storm_dagster.operations.upgrade import advance_upgrades
from storm_rigs.operations.archives import pack_archive
from storm_rigs.operations.upgrades import UpgradeStandIns
from storm_rigs.stage.records import World

pytestmark = pytest.mark.zookeeper

CONF = {"topology.workers": 2, "topology.master.single.worker": True}
CHANGES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "owner": ({"topology.submitter.user": "ann"}, {"topology.submitter.user": "bob"}),
    "isolation": (
        {"isolation.scheduler.machines": ["s1"]},
        {"isolation.scheduler.machines": ["s2"]},
    ),
}
"""Field of the base -> confs before and after a change."""
OWN_FIELDS = {
    "v": "form of the record",
    "name": "of the submission",
    "launch_time_secs": "of the submission",
    "status": "of the verbs",
    "wanted_status": "of the verbs",
    "previous_status": "of the verbs",
    "delay_secs": "of the verbs",
    "workers": "set by rebalances",
    "executors": "set by rebalances",
    "token": "of the submission",
    "last_upgrade": "of gray upgrades",
    "submitted_keys": "by code",
    "unapplied_sizes": "of gray upgrades",
}
"""Fields of the base that do not repeat the conf, and where they come from."""


def begin_upgrade(world: World, new: dict[str, Any]) -> UpgradeStandIns:
    """A gray upgrade of all workers to a code with that conf, none of them picked yet."""
    stand_ins = UpgradeStandIns(world.cluster, world.named().id)
    world.upload("new", conf={**CONF, **new}, archive=pack_archive("new"))
    lifecycle.gray_upgrade(world.context(), "wc", Selection(number=9), handle="new")
    return stand_ins


def update_it(world: World, new: dict[str, Any]) -> None:
    world.upload("new", conf={**CONF, **new})
    update(world.context(), "wc", token="new", handle="new")


def complete(world: World, new: dict[str, Any]) -> None:
    begin_upgrade(world, new)
    lifecycle.complete_upgrade(world.context(), "wc")


def expire(world: World, new: dict[str, Any]) -> None:
    begin_upgrade(world, new)
    memory: dict[str, float] = {}
    advance_upgrades(world.context(monotonic=lambda: 0.0), memory)
    advance_upgrades(world.context(monotonic=lambda: 1e9), memory)


def complete_a_former_release(world: World, new: dict[str, Any]) -> None:
    """Its leader began the upgrade, and the record has no field of the base."""
    stand_ins = begin_upgrade(world, new)
    record = stand_ins.record.model_copy(update={"base_conf": None})
    path = paths.gray_upgrade(stand_ins.id, "conf")
    world.cluster.state.set_data(path, encode_record(record))
    lifecycle.complete_upgrade(world.context(), "wc")


def roll_back(world: World, new: dict[str, Any]) -> None:
    begin_upgrade(world, new)
    lifecycle.roll_back(world.context(), "wc")
    advance_upgrades(world.context())


def rebalance_it(world: World, new: dict[str, Any]) -> None:
    """After a gray upgrade whose end by a former release left the base as it was."""
    stale = world.named().base
    complete(world, new)
    fields = {name: getattr(stale, name) for name in BASE_CONF_FIELDS}
    base = world.named().base.model_copy(update=fields)
    world.cluster.state.set_data(paths.topology(world.named().id), encode_record(base))
    rebalance(world.context(), "wc", wait_secs=0)


VERBS: Mapping[str, Callable[[World, dict[str, Any]], None]] = {
    "update": update_it,
    "gray upgrade, completed": complete,
    "gray upgrade, expired": expire,
    "gray upgrade of a former release": complete_a_former_release,
    "gray upgrade, rolled back": roll_back,
    "rebalance": rebalance_it,
    "restart": lambda world, _: lifecycle.restart(world.context(), "wc") and None,
}
KEEPS = ("gray upgrade, rolled back", "restart")
"""Verbs after which the former conf is in force."""


def test_every_field_of_the_base_repeats_the_conf_or_has_its_own_source() -> None:
    assert StormBase.model_fields.keys() == set(BASE_CONF_FIELDS) | OWN_FIELDS.keys()
    # The parameters of the next test are these fields.
    assert set(BASE_CONF_FIELDS) == {"isolation", "owner"} == CHANGES.keys()


@pytest.mark.parametrize("field", ["isolation", pytest.param("owner", marks=pytest.mark.long)])
@pytest.mark.parametrize("verb", sorted(VERBS))
def test_the_base_has_what_the_conf_in_force_says(world: World, field: str, verb: str) -> None:
    before, after = CHANGES[field]
    world.submit("wc", conf={**CONF, **before})
    VERBS[verb](world, after)
    topology = world.named()
    assert topology.base.status == "ACTIVE"
    expected = before if verb in KEEPS else after
    assert getattr(topology.base, field) == getattr(base_conf(expected), field)
    in_force = base_conf(load_runnable(world.context(), topology).conf)
    assert {name: getattr(topology.base, name) for name in BASE_CONF_FIELDS} == {
        name: getattr(in_force, name) for name in BASE_CONF_FIELDS
    }


def test_an_upgrade_frees_the_hosts_that_it_no_longer_isolates(world: World) -> None:
    """The hosts of the new conf are kept for it from its completion on."""
    before, after = CHANGES["isolation"]
    world.submit("wc", conf={**CONF, **before})
    complete(world, after)
    rebalance(world.context(), "wc", wait_secs=0)
    assert {worker.host for worker in world.assignment().workers} == {"s2"}
    world.submit("other", conf={"topology.workers": 2})
    assert {worker.host for worker in world.assignment("other").workers} == {"s1"}


def test_a_rebalance_applies_memory_and_cpu_of_an_upgraded_code(world: World) -> None:
    """A supervisor reads them from the assignment, which a gray upgrade leaves as it is."""
    before = {"worker.memory.size": 1 << 30, "worker.cpu.slot.num": 1}
    after = {"worker.memory.size": 1 << 31, "worker.cpu.slot.num": 2}
    world.submit("wc", conf={**CONF, **before})
    world.upload("new", conf={**CONF, **after}, archive=pack_archive("new"))
    begun = lifecycle.gray_upgrade(world.context(), "wc", Selection(number=9), handle="new")
    assert [warning.partition(" in a gray")[0] for warning in begun.warnings] == [
        f"topology 'wc' keeps {key} {value}" for key, value in before.items()
    ]
    lifecycle.complete_upgrade(world.context(), "wc")

    def resources() -> set[tuple[int, int]]:
        return {(worker.memory_bytes, worker.cpu) for worker in world.assignment().workers}

    assert resources() == {tuple(before.values())}
    slots = [worker.slot for worker in world.assignment().workers]
    report = rebalance(world.context(), "wc")
    assert (report.outcome, report.status, report.moved) == ("assigned", "ACTIVE", 0)
    assert report.delay_secs == 0
    expected = "no task moved, memory and CPU of workers are those of the conf"
    assert rebalance_result(report).summary.startswith(expected)
    assert resources() == {tuple(after.values())}
    assert [worker.slot for worker in world.assignment().workers] == slots
    assert rebalance(world.context(), "wc").outcome == "unchanged"
