"""Scenes of gray upgrades."""

from __future__ import annotations

from storm_dagster.core.upgrade.machine import Move
from storm_dagster.core.upgrade.selection import Selection
from storm_dagster.model import paths
from storm_dagster.model.names import jar_key
from storm_dagster.model.records import GrayWorker
from storm_dagster.operations.live import lifecycle
from storm_dagster.zk.gray_upgrades import write_move
from storm_rigs.operations.acting import finish_due, upgrade
from storm_rigs.operations.archives import pack_archive
from storm_rigs.operations.scenes.scene import Scene, due
from storm_rigs.operations.upgrades import UpgradeStandIns
from storm_rigs.stage.records import World

_LIFECYCLE = lifecycle.__name__
_UPGRADABLE = {"topology.workers": 3, "topology.master.single.worker": True}


def _upgradable(world: World) -> UpgradeStandIns:
    """A topology that can be upgraded worker by worker."""
    topology_id = world.submit("wc", "t", conf=_UPGRADABLE)
    # What an earlier upgrade of very many workers left.
    world.cluster.state.mkdirs(f"{paths.gray_upgrade(topology_id, 'upgraded_workers')}/h:1")
    return UpgradeStandIns(world.cluster, topology_id)


def _under_way(world: World, number: int = 1) -> UpgradeStandIns:
    """An upgrade with that many workers upgraded."""
    stand_ins = _upgradable(world)
    handle = world.upload("h2", conf=_UPGRADABLE, archive=pack_archive("newer archive"))
    lifecycle.gray_upgrade(
        world.context(), "wc", Selection(number=number), handle=handle, token="u"
    )
    stand_ins.batch()
    assert len(stand_ins.state.upgraded) == number
    return stand_ins


def _whole(world: World, stand_ins: UpgradeStandIns, status: str) -> None:
    """Assert that the code of the topology and of its upgrade are there, and the topology's
    status.
    """
    topology, state = stand_ins.topology, stand_ins.state
    assert topology.base.status == status
    codes = [topology.code_dir, *([state.record.code_dir] if state.record else [])]
    assert all(world.blobs.exists(jar_key(code)) for code in codes)


def upgrading(world: World) -> Scene:
    """The first batch of an upgrade."""
    stand_ins = _upgradable(world)
    handle = world.upload("h2", conf=_UPGRADABLE, archive=pack_archive("newer archive"))
    arguments = {"name": "wc", "number": 1, "handle": handle, "token": "u"}

    def completed() -> None:
        _whole(world, stand_ins, "UPGRADING")
        assert stand_ins.record.number == 1
        assert stand_ins.topology.code_dir == stand_ins.id, "nothing runs it yet"

    def undone() -> None:
        _whole(world, stand_ins, "ACTIVE")
        assert stand_ins.state.record is None

    return Scene(
        world,
        "storm_rigs.operations.acting:upgrade",
        arguments,
        again=lambda ctx: upgrade(ctx, **arguments),
        begun=lambda: stand_ins.state.record is not None,
        completed=completed,
        undone=undone,
    )


def going_on(world: World) -> Scene:
    """The next batch of an upgrade."""
    stand_ins = _under_way(world)
    arguments = {"name": "wc", "number": 1, "handle": None, "token": ""}

    def asked(wanted: bool) -> None:
        _whole(world, stand_ins, "UPGRADING")
        assert stand_ins.record.continue_ == wanted

    return Scene(
        world,
        "storm_rigs.operations.acting:upgrade",
        arguments,
        again=lambda ctx: upgrade(ctx, **arguments),
        begun=lambda: stand_ins.record.continue_,
        completed=lambda: asked(True),
        undone=lambda: asked(False),
    )


def _ended(world: World, stand_ins: UpgradeStandIns, code: str) -> None:
    _whole(world, stand_ins, "ACTIVE")
    assert stand_ins.state.record is None
    assert stand_ins.topology.code_dir == code
    for part in ("upgrading_workers", "upgraded_workers"):
        assert world.cluster.state.find_children(paths.gray_upgrade(stand_ins.id, part)) == []


def completing(world: World, number: int = 1) -> Scene:
    """An upgrade of so many workers that is completed with all others."""
    stand_ins = _under_way(world, number)
    new = stand_ins.record.code_dir

    def undone() -> None:
        _whole(world, stand_ins, "UPGRADING")
        assert stand_ins.state.record is not None

    return Scene(
        world,
        f"{_LIFECYCLE}:complete_upgrade",
        {"name": "wc"},
        again=lambda ctx: lifecycle.complete_upgrade(ctx, "wc"),
        begun=lambda: stand_ins.state.record is None,
        completed=lambda: _ended(world, stand_ins, new),
        undone=undone,
    )


def due_completion(world: World) -> Scene:
    """An upgrade with every worker upgraded."""
    return due(completing(world, 3))


def rolling_back(world: World) -> Scene:
    """An upgrade that is taken back."""
    stand_ins = _under_way(world, 2)

    def rolled(wanted: bool) -> None:
        _whole(world, stand_ins, "ROLLBACK" if wanted else "UPGRADING")
        assert stand_ins.record.rollback == wanted

    return Scene(
        world,
        f"{_LIFECYCLE}:roll_back",
        {"name": "wc"},
        again=lambda ctx: lifecycle.roll_back(ctx, "wc"),
        begun=lambda: stand_ins.record.rollback,
        completed=lambda: rolled(True),
        undone=lambda: rolled(False),
    )


def due_roll_back(world: World) -> Scene:
    """An upgrade in which a worker failed."""
    scene = rolling_back(world)
    topology_id = world.named().id
    state = world.cluster.read_upgrade(topology_id)
    failed = Move(min(state.upgraded), "failed", GrayWorker(failed="it ended"))
    write_move(world.cluster.state, topology_id, state, failed)
    return due(scene)


def rolled_back(world: World) -> Scene:
    """An upgrade whose workers all run the old code again."""
    stand_ins = _under_way(world, 2)
    lifecycle.roll_back(world.context(), "wc")
    stand_ins.supervise()
    back = Scene(
        world,
        "",
        {},
        again=finish_due,
        begun=lambda: True,
        completed=lambda: _ended(world, stand_ins, stand_ins.id),
        undone=lambda: None,
    )
    return due(back)
