"""Calls of the leader that pause and resume healing."""

from typing import Any

from storm_dagster.client.http import NimbusClient
from storm_dagster.model.errors import KeyNotFound, Unavailable
from storm_dagster.model.healing_pause import DEFAULT_PAUSE_SECS

_PATH = "/v1/healing"


def pause_healing(nimbus: NimbusClient, *, secs: int = DEFAULT_PAUSE_SECS) -> dict[str, Any]:
    """Pause healing for ``secs`` (a day at most) from now on.

    Returns who heals, and the pause: ``{"by", "pause": {"until_ms", "user", "text", ...}}``. From
    then on no dead task is reassigned; workers are still restarted in place. Another pause is
    replaced.
    """
    return _post(nimbus, "pause", {"secs": secs})


def resume_healing(nimbus: NimbusClient) -> bool:
    """End the pause of healing; false if there was none."""
    return bool(_post(nimbus, "resume", {})["resumed"])


def _post(nimbus: NimbusClient, action: str, document: dict[str, Any]) -> dict[str, Any]:
    """Response of the leader; the error of a leader of an earlier release names it."""
    try:
        return nimbus.post(f"{_PATH}/{action}", document)
    except KeyNotFound as error:
        raise Unavailable(
            "the leading nimbus is of a release that cannot pause healing: upgrade every nimbus "
            "first"
        ) from error
