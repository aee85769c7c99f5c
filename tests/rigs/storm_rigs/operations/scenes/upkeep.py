"""Scenes of what concerns the cluster around topologies: garbage, hosts and log levels."""

from __future__ import annotations

from typing import Any

from storm_dagster.model import paths
from storm_dagster.operations.live.blacklist import change_blacklist
from storm_dagster.operations.live.cleaner import clean
from storm_rigs.operations.acting import log_level
from storm_rigs.operations.scenes.scene import Scene, gone
from storm_rigs.stage.records import World


def cleaning(world: World) -> Scene:
    """A topology that lives beside remains of one that does not."""
    living = world.submit("living", "l")
    orphan = world.submit("wc", "t", conf={"topology.workers": 2})
    world.cluster.state.delete_node(paths.topology(orphan))
    before = {key: world.blobs.meta(key).sha256 for key in world.blobs.keys("") if living in key}

    def completed() -> None:
        gone(world, orphan)
        topology = world.named("living")
        assert topology.id == living and topology.assignment is not None
        assert before == {
            key: world.blobs.meta(key).sha256 for key in world.blobs.keys("") if living in key
        }

    now: dict[str, Any] = {"grace_secs": 0, "token_secs": 0}
    return Scene(
        world,
        "storm_dagster.operations.live.cleaner:clean",
        now,
        again=lambda ctx: clean(ctx, **now),
        begun=lambda: True,
        completed=completed,
        undone=lambda: None,
    )


def blacklisting(world: World) -> Scene:
    """A host that is put on the blacklist."""
    world.submit("wc", "t")

    def listed(*hosts: str) -> None:
        assert world.cluster.load_view().blacklist == frozenset(hosts)

    return Scene(
        world,
        "storm_dagster.operations.live.blacklist:change_blacklist",
        {"add": ["s2"]},
        again=lambda ctx: change_blacklist(ctx, add=["s2"]),
        begun=lambda: bool(world.cluster.load_view().blacklist),
        completed=lambda: listed("s2"),
        undone=lambda: listed(),
    )


def leveling(world: World) -> Scene:
    """A logger whose level is set."""
    topology_id = world.submit("wc", "t")

    def kept() -> list[str]:
        return sorted(world.cluster.read_log_levels(topology_id).loggers)

    def is_kept(*loggers: str) -> None:
        assert kept() == list(loggers)

    return Scene(
        world,
        "storm_rigs.operations.acting:log_level",
        {"name": "wc", "logger": "my.module", "level": "DEBUG"},
        again=lambda ctx: log_level(ctx, "wc", "my.module", "DEBUG"),
        begun=lambda: bool(kept()),
        completed=lambda: is_kept("my.module"),
        undone=is_kept,
    )
