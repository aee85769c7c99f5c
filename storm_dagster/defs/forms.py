"""The forms of the Launchpad: one typed config for each job, every field described and defaulted.

A map field is plain ``dict``: Dagster's typed maps refuse null values, which conf maps may hold.
"""

from __future__ import annotations

from typing import Any

import dagster as dg
from pydantic import Field

_HANDLE: str = Field(
    default="",
    description="Set by the command line and the services: the upload session that holds the code.",
)
_ALLOW_DEGRADED: bool = Field(default=False, description="Go on when the code has fewer copies than asked for.")
_HOME: str | None = Field(
    default=None, description="State folder of the cluster. Empty: the one of this code location."
)


def _token(effect: str) -> Any:
    return Field(default="", description=f"Client token: {effect}. Empty: a new one.")


class SubmitConfig(dg.Config):
    """Config of a submission. The topology's name is the partition key of the run, not a field."""

    target: str = Field(
        default="",
        description=(
            "For a run launched by hand: what to submit, as 'file.py[:Name]', 'package.module[:Name]' or "
            "'archive.zip::module[:Name]', seen from the code location. The run packs and uploads it."
        ),
    )
    conf: dict = Field(
        default={},
        description="Topology conf that overrides the topology's own, for example {topology.workers: 4}.",
    )
    inactive: bool = Field(
        default=False, description="Leave the topology INACTIVE: placed and started, its spouts silent."
    )
    allow_degraded: bool = Field(
        default=False,
        description="Go on when the code has fewer copies than asked for, once the wait for them ended.",
    )
    handle: str = _HANDLE
    token: str = _token("a submission repeated with it gives the same topology id")


class UpdateConfig(dg.Config):
    """Config of a hot deploy: the code that replaces the running topology of that name."""

    name: str = Field(description="Name of the running topology.")
    target: str = Field(
        default="",
        description="For a run launched by hand: the new code, as for a submission. The run packs and uploads it.",
    )
    conf: dict = Field(default={}, description="Topology conf that overrides the new topology's own.")
    allow_degraded: bool = _ALLOW_DEGRADED
    handle: str = _HANDLE
    token: str = _token("an update repeated with it is done once")


class GrayUpgradeConfig(dg.Config):
    """The next batch of a gray upgrade: new code on some workers first. Workers count before the component."""

    name: str = Field(description="Name of the running topology.")
    target: str = Field(
        default="",
        description=(
            "To begin, in a run launched by hand: the new code, as for a submission. Empty: go on with the upgrade "
            "that is under way."
        ),
    )
    number: int = Field(
        default=0,
        ge=0,
        description="How many workers, lowest host:port first. With a component, 0 means all of its workers.",
    )
    component: str = Field(default="", description="Only workers that run tasks of this component.")
    workers: list[str] = Field(
        default=[],
        description="Exactly these workers, each as host:port; then nothing else counts.",
    )
    conf: dict = Field(default={}, description="Topology conf that overrides the new code's own.")
    wait_secs: int = Field(
        default=300, ge=0, description="Longest wait for the batch; afterwards it goes on without this run."
    )
    allow_degraded: bool = _ALLOW_DEGRADED
    handle: str = _HANDLE
    token: str = _token("an upgrade begun with it is not begun again")


class RollbackConfig(dg.Config):
    """Config of a rollback to the former code."""

    name: str = Field(description="Name of the topology that is being upgraded.")
    wait_secs: int = Field(
        default=300, ge=0, description="Longest wait for its workers; afterwards it goes on without this run."
    )


class RebalanceConfig(dg.Config):
    """Config of `rebalance_topology` for the topology of its partition. Empty fields keep current values.

    It stands on `storm/assignment`; a submission takes parallelism from its conf and leaves it empty.
    """

    workers: int | None = Field(default=None, ge=1, description="For a rebalance: worker processes wanted.")
    executors: dict[str, int] = Field(
        default_factory=dict,
        description="For a rebalance: component -> executors wanted, for example {count: 4}.",
    )
    reassign: bool = Field(
        default=False,
        description="For a rebalance: place all tasks again instead of moving the fewest that restore balance.",
    )
    wait_secs: int | None = Field(
        default=None,
        ge=0,
        description="For a rebalance: seconds of silence before tasks move. Empty: the topology's message timeout.",
    )


class NameConfig(dg.Config):
    """Config: the topology."""

    name: str = Field(description="Name of the topology.")


class AskForRebalanceConfig(NameConfig):
    """Config: the topology, and the options of the request."""

    reassign: bool = Field(default=False, description="Place all tasks again instead of moving the fewest.")


class KillConfig(NameConfig):
    """Config of a kill: the topology, and the seconds for which its spouts are silent before it ends."""

    wait_secs: int | None = Field(
        default=None,
        ge=0,
        description="Seconds between the spouts' silence and the end. Empty: the topology's message timeout.",
    )


class ReassignConfig(dg.Config):
    """Config of a reassignment: its causes. The healing sensor fills it; if empty, the run finds them itself."""

    causes: list[dict[str, Any]] = Field(
        default_factory=list,
        description="Causes as the healing sensor saw them. Empty: look at the cluster now and heal what is dead.",
    )


class StartClusterConfig(dg.Config):
    """The local cluster to start beside this Dagster."""

    home: str | None = _HOME
    supervisors: int = Field(default=2, ge=1, le=64, description="Supervisors.")
    slots: int = Field(default=4, ge=1, le=256, description="Slots (ports) of each supervisor.")
    nimbuses: int = Field(default=1, ge=1, le=7, description="Nimbuses: one leads, the others follow.")


class StopClusterConfig(dg.Config):
    """The local cluster to stop."""

    home: str | None = _HOME
