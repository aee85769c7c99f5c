"""Scenes of what concerns the cluster around topologies: garbage, hosts and log levels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from storm_dagster.model import paths
from storm_dagster.model.errors import KeyNotFound
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.access_tokens import create_token, record_tokens, revoke_token
from storm_dagster.operations.live.blacklist import change_blacklist
from storm_dagster.operations.live.cleaner import clean
from storm_dagster.operations.live.healing_pause import pause_healing, resume_healing
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


def pausing(world: World) -> Scene:
    """A pause of healing."""
    world.submit("wc", "t")

    def is_paused() -> bool:
        return world.cluster.healing_pause() is not None

    def completed() -> None:
        assert is_paused()

    def undone() -> None:
        assert not is_paused()

    return Scene(
        world,
        "storm_dagster.operations.live.healing_pause:pause_healing",
        {"secs": 600},
        again=lambda ctx: pause_healing(ctx, secs=600),
        begun=is_paused,
        completed=completed,
        undone=undone,
    )


def resuming(world: World) -> Scene:
    """The end of a pause of healing."""
    world.submit("wc", "t")
    pause_healing(world.context(), secs=600)

    def is_paused() -> bool:
        return world.cluster.healing_pause() is not None

    def completed() -> None:
        assert not is_paused()

    def undone() -> None:
        assert is_paused()

    return Scene(
        world,
        "storm_dagster.operations.live.healing_pause:resume_healing",
        {},
        again=resume_healing,
        begun=lambda: not is_paused(),
        completed=completed,
        undone=undone,
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


_TOKEN = "0123456789abcdef"


def recording_tokens(world: World) -> Scene:
    """A first leader that records tokens."""
    epoch = world.context().current_epoch()

    def recorded(*versions: int) -> None:
        version = world.cluster.state.get_version(paths.ACCESS_TOKENS)
        assert [version] == [*versions, None][:1]

    return Scene(
        world,
        "storm_dagster.operations.live.access_tokens:record_tokens",
        {"epoch": epoch},
        again=lambda ctx: record_tokens(ctx, epoch),
        begun=lambda: world.cluster.state.exists(paths.ACCESS_TOKENS),
        completed=lambda: recorded(0),
        undone=recorded,
    )


def creating_a_token(world: World) -> Scene:
    """A token that is recorded."""
    fields: dict[str, Any] = {
        "token_id": _TOKEN,
        "scope": "operate",
        "user": "ann",
        "life_secs": 60,
        "made_by": "storm",
    }
    record_tokens(world.context(), world.context().current_epoch())
    return _token_scene(
        world,
        "storm_dagster.operations.live.access_tokens:create_token",
        fields,
        again=lambda ctx: create_token(ctx, **fields),
        after=[_TOKEN],
        before=[],
    )


def revoking_a_token(world: World) -> Scene:
    """A token that is revoked."""
    ctx = world.context()
    record_tokens(ctx, ctx.current_epoch())
    create_token(ctx, _TOKEN, scope="read", user="", life_secs=60, made_by="storm")

    def again(ctx: OperationsContext) -> None:
        # The caller cannot know that its first call was executed.
        with suppress(KeyNotFound):
            revoke_token(ctx, _TOKEN)

    return _token_scene(
        world,
        "storm_dagster.operations.live.access_tokens:revoke_token",
        {"token_id": _TOKEN},
        again=again,
        after=[],
        before=[_TOKEN],
    )


def _token_scene(
    world: World,
    function: str,
    fields: dict[str, Any],
    *,
    again: Callable[[OperationsContext], object],
    before: list[str],
    after: list[str],
) -> Scene:
    """A scene whose effect is the list of tokens."""

    def ids() -> list[str]:
        return world.cluster.state.get_children(paths.ACCESS_TOKENS)

    def are(expected: list[str]) -> None:
        assert ids() == expected

    return Scene(
        world,
        function,
        fields,
        again=again,
        begun=lambda: ids() == after,
        completed=lambda: are(after),
        undone=lambda: are(before),
    )
