"""Routes of the pause of healing, for administrators."""

from typing import Any, ClassVar

from pydantic import BaseModel

from storm_dagster.core.authorization import REQUEST_USER
from storm_dagster.http.documents import CHANGE_ERRORS, JsonMap
from storm_dagster.http.router import Router
from storm_dagster.model.requests import PauseHealingRequest, check_request
from storm_dagster.nimbus.http.topology_documents import HealingDocument
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.operations.live.healing_pause import pause_healing, resume_healing


class ResumedDocument(BaseModel, extra="forbid"):
    """End of a pause of healing."""

    resumed: bool
    """False if healing was not paused."""


class HealingRoutes:
    """Routes of the pause of healing; ``GET /v1/cluster`` shows it."""

    router: ClassVar = Router("healing")

    def __init__(self, nimbus: Nimbus, reader: ClusterReader) -> None:
        self._nimbus = nimbus
        self._reader = reader

    @router.route(
        "POST",
        "/v1/healing/pause",
        summary="Pause healing",
        body=PauseHealingRequest,
        responses={200: HealingDocument},
        errors=CHANGE_ERRORS,
    )
    def pause(self, document: JsonMap) -> dict[str, Any]:
        """Pause healing from now on; another pause is replaced."""
        epoch = self._nimbus.status.require()
        request = check_request(PauseHealingRequest, document, "a pause of healing")
        pause_healing(
            self._nimbus.operations(epoch), secs=request.secs, user=REQUEST_USER.get() or ""
        )
        self._reader.forget()
        return self._reader.healing()

    @router.route(
        "POST",
        "/v1/healing/resume",
        summary="End the pause of healing",
        responses={200: ResumedDocument},
        errors=CHANGE_ERRORS,
    )
    def resume(self) -> dict[str, Any]:
        """End the pause; the causes that wait for it are healed at once."""
        epoch = self._nimbus.status.require()
        is_resumed = resume_healing(self._nimbus.operations(epoch))
        self._reader.forget()
        return {"resumed": is_resumed}
