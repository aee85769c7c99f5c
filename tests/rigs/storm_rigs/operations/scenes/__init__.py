"""Scenes: each operation that changes a cluster, about to begin in a world in which it has
something to do.

::

    scene = scene_of(world, "kill", "unassign")
    with scene.act() as actor:
        assert actor.run_to("after.unassign")
        actor.kill()
    scene.again(world.context())
    scene.completed()
"""

from __future__ import annotations

from collections.abc import Callable

from storm_dagster.model.verbs import VERBS, Verb
from storm_dagster.operations.live.rebalance import ABANDON_REBALANCE, FINISH_REBALANCE
from storm_dagster.operations.submit.publishing import ACTIVATE_TOPOLOGY
from storm_dagster.operations.upgrade import COMPLETE_UPGRADE, FINISH_ROLLBACK, ROLL_BACK
from storm_rigs.operations.scenes import events, lifecycle, placement, upgrades, upkeep
from storm_rigs.operations.scenes.scene import Scene
from storm_rigs.stage.records import World

__all__ = ["SCENES", "Scene", "scene_of"]


def status_changes() -> list[Verb]:
    """The verbs whose operation only changes the status, in one transaction of the leader."""
    return [
        verb
        for verb in VERBS.values()
        if verb.executed_by == "leader" and verb.event is not None and verb.effect == "executed"
    ]


SCENES: dict[str, list[tuple[Callable[[World], Scene], tuple[str, ...] | None]]] = {
    "submit": [(lifecycle.submission, None)],
    "continue_submission": [(lifecycle.continuing, None)],
    "continue_change": [(placement.continuing, None)],
    "kill": [(lifecycle.killing, None)],
    "cancel_submission": [(lifecycle.cancelling, None)],
    **{verb.name: [(lifecycle.status_change(verb), None)] for verb in status_changes()},
    "rebalance": [(placement.rebalancing, None)],
    "restart": [(lifecycle.restarting, None)],
    "update": [(lifecycle.updating, None)],
    "reassign": [(placement.reassigning, None)],
    "clean": [(upkeep.cleaning, None)],
    "blacklist": [(upkeep.blacklisting, None)],
    "pause_healing": [(upkeep.pausing, None)],
    "resume_healing": [(upkeep.resuming, None)],
    "log_levels": [(upkeep.leveling, None)],
    "record_tokens": [(upkeep.recording_tokens, None)],
    "create_token": [(upkeep.creating_a_token, None)],
    "revoke_token": [(upkeep.revoking_a_token, None)],
    "take_events": [(events.taking, None)],
    "acknowledge_events": [(events.acknowledging, None)],
    "change_event_source": [(events.redirecting, None)],
    "gray_upgrade": [(upgrades.upgrading, None)],
    "continue_upgrade": [(upgrades.going_on, None)],
    "complete_upgrade": [(upgrades.completing, None)],
    "roll_back": [(upgrades.rolling_back, None)],
    "finish_rollback": [(upgrades.rolled_back, None)],
    "drain": [(placement.draining(False), None)],
    "undo_drain": [(placement.draining(True), None)],
    "finish_due": [
        (upgrades.due_completion, COMPLETE_UPGRADE.steps),
        (upgrades.due_roll_back, ROLL_BACK.steps),
        (upgrades.rolled_back, FINISH_ROLLBACK.steps),
        (placement.due_rebalance, FINISH_REBALANCE.steps),
        (placement.due_rebalance_that_fits_no_more, ABANDON_REBALANCE.steps),
        (lifecycle.due_activation, ACTIVATE_TOPOLOGY.steps),
        (lifecycle.due_removal, None),
    ],
}
"""Operation -> how it is set up, and for which of its steps (``None``: for all others)."""


def scene_of(world: World, operation: str, step: str) -> Scene:
    """The scene of the operation in which it comes to that step."""
    for make, steps in SCENES[operation]:
        if steps is None or step in steps:
            return make(world)
    raise AssertionError(f"no scene reaches {step} of {operation}: add one to SCENES")
