"""Dagster observations of healing: restarts in place, recoveries and alarms."""

from collections.abc import Iterable

import dagster as dg

from storm_dagster.defs.healing.memory import Recovery, Restart
from storm_dagster.defs.metadata import table
from storm_dagster.model.multimap import multimap


def restart_observations(
    restarted: Iterable[Restart], key: dg.AssetKey
) -> list[dg.AssetObservation]:
    """One observation for each topology whose workers were restarted in place.

    It is at the topology's partition of the asset ``key``.
    """
    by_name = multimap((restart.name, restart) for restart in restarted)
    observations: list[dg.AssetObservation] = []
    for name, members in sorted(by_name.items()):
        rows = [(member.host, member.port, member.node, member.pid) for member in members]
        observations.append(
            dg.AssetObservation(
                asset_key=key,
                partition=name,
                description=f"{len(members)} workers of {name} were restarted in place",
                metadata={
                    "restarts": len(members),
                    "workers": table("host port:int supervisor pid:int", rows),
                    "topology_id": members[0].topology_id,
                },
            )
        )
    return observations


def recovery_observations(
    recovered: Iterable[Recovery], topology: dg.AssetKey, workers: dg.AssetKey
) -> list[dg.AssetObservation]:
    """Two observations of each recovery.

    One is at its topology's partition of the asset ``topology``, one at the asset ``workers``,
    where Dagster plots the seconds of the whole cluster.
    """
    observations: list[dg.AssetObservation] = []
    for recovery in recovered:
        metadata = {
            "recovery_seconds": round(recovery.seconds, 3),
            "recovered_topology": recovery.topology_id,
            "how": "tasks moved" if recovery.moved else "restarted in place",
        }
        words = f"all workers of {recovery.name} run again after {recovery.seconds:.2f} s"
        observations += [
            dg.AssetObservation(
                asset_key=topology, partition=recovery.name, description=words, metadata=metadata
            ),
            dg.AssetObservation(asset_key=workers, description=words, metadata=metadata),
        ]
    return observations


def pause_observation(pause: str | None, key: dg.AssetKey) -> dg.AssetObservation:
    """Observation of the supervisors: operators have paused healing, or it continues.

    ``pause`` is the sentence about the pause; ``None`` at its end.
    """
    words = pause or "the pause of healing is over"
    return dg.AssetObservation(
        asset_key=key, description=words, metadata={"healing_pause": pause or "none"}
    )


def alarm_observation(alarm: str | None, key: dg.AssetKey) -> dg.AssetObservation:
    """Observation of the supervisors: healing is frozen, or it continues."""
    words = f"ALARM, healing is frozen: {alarm}" if alarm else "healing continues"
    return dg.AssetObservation(
        asset_key=key, description=words, metadata={"alarm": alarm or "none"}
    )
