"""Routes of events for Dagster: workers report them, code locations pull and acknowledge them."""

import asyncio
import hmac
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from storm_dagster.core.dataplane.event_outbox import MAX_BATCH
from storm_dagster.core.event_log import MAX_PAGE_EVENTS, EventSource
from storm_dagster.http.documents import CHANGE_ERRORS, JsonMap
from storm_dagster.http.responses import JSONResponse, bounded_json
from storm_dagster.http.router import Parameter, Router
from storm_dagster.model.dagster_events import decode_event
from storm_dagster.model.errors import Corrupt, InvalidRequest, NotAlive, NotAuthenticated
from storm_dagster.model.names import check_component_id, check_topology_reference
from storm_dagster.model.requests import parse_number
from storm_dagster.model.view import TopologyView
from storm_dagster.nimbus.http.parameters import TOPOLOGY_NAME
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.event_assets import CheckedReports, EventAssets
from storm_dagster.nimbus.requests.event_intake import EventIntake, IntakeResult
from storm_dagster.nimbus.requests.event_pulls import EventPulls, stored_source
from storm_dagster.operations.context import topology_by_name
from storm_dagster.operations.live.event_logs import EventReport

_ANSWER_SECS = 25.0
"""Longest wait for a commit, which may wait for 20 s for copies; a worker waits 30 s."""
_MAX_EVENT_NUMBER = 10**15 - 1
"""Highest number of an event after which a page may begin."""
_MAX_UNDEFINED_CHARACTERS = 4096
"""Largest reason of an event that a code location has no use for."""

LogName = Annotated[str, Parameter("path", "name", "Topology name")]
Owner = Annotated[
    str | None,
    Parameter("query", "owner", "Owner that pulls; empty: only topologies without an owner"),
]
LogId = Annotated[
    str | None, Parameter("query", "log", "Log in which `after` counts; of another log all wait")
]
AfterNumber = Annotated[
    str | None, Parameter("query", "after", "Number of the last known event (0)", schema=int)
]
EventLimit = Annotated[
    str | None, Parameter("query", "limit", "Events at most, 1 to 200 (200)", schema=int)
]


class EventBatch(BaseModel, extra="forbid"):
    """Events of one worker, each with the fields ``component`` and ``task``.

    :mod:`storm_dagster.model.dagster_events` encodes them.
    """

    events: list[dict[str, Any]]


class EventResult(BaseModel, extra="forbid"):
    """Ids of the events that the cluster has taken, or refused.

    ``problem`` is the reason why the others were not taken, ``full`` is true if the event log has
    no room for them. ``undefined`` has a warning for events that were taken, though their component
    does not declare their asset; the same one once an hour.
    """

    stored: list[str]
    refused: dict[str, str]
    undefined: dict[str, str]
    problem: str | None
    full: bool


class PulledEvent(BaseModel, extra="forbid"):
    """An event that waits.

    ``component`` and ``task`` are null if a worker of an earlier release reported it.
    """

    number: int
    topology: str
    component: str | None
    task: int | None
    at: int
    event: dict[str, Any]


class EventPageDocument(BaseModel, extra="forbid"):
    """The oldest events that wait, and their number.

    ``log`` is null if no event was ever taken.
    """

    log: str | None
    owner: str | None
    declared: bool
    events: list[PulledEvent]
    waiting: int
    since: int | None
    bytes: int
    dropped: int


class TakenRequest(BaseModel, extra="forbid", strict=True):
    """Acknowledgment: every event of ``log`` up to ``number`` is in Dagster.

    ``undefined`` has the reason of each event whose asset the location does not define, by its
    number.
    """

    log: str = Field(pattern="^[0-9a-f]{32}$")
    owner: str
    number: int = Field(ge=0)
    undefined: dict[str, str] = {}


class TakenDocument(BaseModel, extra="forbid"):
    """Number of the events that still wait."""

    waiting: int


class EventRoutes:
    """The routes of events.

    Only live workers may report, only users who may change the topology pull and acknowledge.
    """

    router: ClassVar = Router("topologies")

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus
        self._assets = EventAssets(nimbus)
        self._intake = EventIntake(nimbus)
        self._pulls = EventPulls(nimbus)

    @router.route(
        "POST",
        "/v1/topologies/{name}/events",
        summary="Report events of assets for Dagster (for workers)",
        parameters=(TOPOLOGY_NAME,),
        body=EventBatch,
        body_required=True,
        responses={200: EventResult},
        errors=(401, 404, 500, 503),
    )
    async def report(self, request: Request) -> Response:
        """Take a batch of events.

        The body of an unauthorized request is not read.
        """
        topology = await run_in_threadpool(self._sending_topology, request)
        document = await bounded_json(request)
        return JSONResponse(await self._take(topology, document))

    def _sending_topology(self, request: Request) -> TopologyView:
        """The topology with a live worker that has the request's token.

        :class:`NotAuthenticated` without such a worker, :class:`NotLeading` at a follower. The
        error is the same for every name, so that it reveals no topology.
        """
        nimbus = self._nimbus
        nimbus.status.require()
        authorization = request.headers.get("authorization", "")
        token = authorization.removeprefix("Bearer ").encode("utf-8", "replace")
        topology = None
        with suppress(NotAlive, Corrupt):
            topology = topology_by_name(nimbus.shown_view(), request.path_params["name"])
        if topology is not None and token:
            # Of the view: its reads of nodes that workers make are bounded.
            for worker in topology.live_workers.values():
                if hmac.compare_digest(token, worker.token.encode()):
                    return topology
        raise NotAuthenticated(
            "events of a topology come from its live workers only, which send their start token "
            "(Authorization: Bearer)"
        )

    async def _take(self, topology: TopologyView, document: dict[str, Any]) -> dict[str, Any]:
        """Take the events of a request's body, and return its response.

        :class:`InvalidRequest` for another body, :class:`Unavailable` if too many batches wait.
        """
        reports, refused = await run_in_threadpool(_decode_batch, topology.id, document)
        result = IntakeResult(0)
        source, checked = await run_in_threadpool(self._check, topology, reports)
        if source is not None and checked.accepted:
            future = self._intake.submit(topology.base.name, source, checked.accepted)
            try:
                result = await asyncio.wait_for(asyncio.wrap_future(future), _ANSWER_SECS)
            except (TimeoutError, asyncio.TimeoutError):
                result = IntakeResult(
                    0, f"the events were not stored within {_ANSWER_SECS:g} s: see nimbus's log"
                )
        return {
            "stored": [report.event.id for report in checked.accepted[: result.taken]],
            "refused": {**refused, **checked.refused},
            "undefined": checked.warnings,
            "problem": result.problem,
            "full": result.full,
        }

    def _check(
        self, topology: TopologyView, reports: Sequence[EventReport]
    ) -> tuple[EventSource | None, CheckedReports]:
        """Destination of valid events, and the decision about each; no destination without one."""
        if not reports:
            return None, CheckedReports()
        source = stored_source(self._nimbus, topology)
        return source, self._assets.check(topology, source, reports)

    @router.route(
        "GET",
        "/v1/topologies/{name}/events",
        summary="The oldest events that wait for the Dagster of a declared topology",
        responses={200: EventPageDocument},
        errors=CHANGE_ERRORS,
    )
    def pull(
        self, name: LogName, owner: Owner, log: LogId, after: AfterNumber, limit: EventLimit
    ) -> dict[str, Any]:
        """The oldest events, in the order in which the cluster took them.

        They are at most 200, and about 1 MiB.
        """
        max_events = MAX_PAGE_EVENTS
        if limit is not None:
            max_events = parse_number("limit", limit, lowest=1, highest=MAX_PAGE_EVENTS)
        start = 0 if after is None else parse_number("after", after, highest=_MAX_EVENT_NUMBER)
        return self._pulls.page(check_topology_reference(name), owner or "", log, start, max_events)

    @router.route(
        "POST",
        "/v1/topologies/{name}/events/taken",
        summary="Acknowledge events that are in Dagster",
        body=TakenRequest,
        body_required=True,
        responses={200: TakenDocument},
        errors=CHANGE_ERRORS,
    )
    def acknowledge(self, name: LogName, document: JsonMap) -> dict[str, Any]:
        """Remove every event up to a number. Repeating it has no effect."""
        acknowledgment = _parse_acknowledgment(document)
        return self._pulls.acknowledge(
            check_topology_reference(name),
            acknowledgment.owner,
            acknowledgment.log,
            acknowledgment.number,
            {int(number): text for number, text in acknowledgment.undefined.items()},
        )


def _parse_acknowledgment(document: dict[str, Any]) -> TakenRequest:
    """The acknowledgment in a body; :class:`InvalidRequest` for another body."""
    try:
        taken = TakenRequest.model_validate(document)
    except ValueError as error:
        raise InvalidRequest(f"this is not a valid acknowledgment: {error}") from None
    for number, text in taken.undefined.items():
        if not number.isdecimal() or len(number) > 15 or len(text) > _MAX_UNDEFINED_CHARACTERS:
            raise InvalidRequest(
                f"undefined maps numbers of events to reasons of at most "
                f"{_MAX_UNDEFINED_CHARACTERS} characters, got {number!r:.40}: {text!r:.40}"
            )
    return taken


def _decode_batch(
    topology_id: str, document: dict[str, Any]
) -> tuple[list[EventReport], dict[str, str]]:
    """The events of a worker's body, and the invalid ones: id -> reason.

    :class:`InvalidRequest` for another body, and for an invalid event without an id.
    """
    events = document.get("events")
    if not isinstance(events, list) or len(events) > MAX_BATCH or set(document) != {"events"}:
        raise InvalidRequest(f'a batch is {{"events": [event]}}, with {MAX_BATCH} events at most')
    reports: list[EventReport] = []
    refused: dict[str, str] = {}
    for entry in events:
        event_id = entry.get("id") if isinstance(entry, dict) else None
        try:
            event = decode_event(entry)
        except InvalidRequest as error:
            if not isinstance(event_id, str):
                raise
            refused[event_id] = error.message
            continue
        component, task = _reporter(entry)
        reports.append(EventReport(topology_id, component, task, event))
    return reports, refused


def _reporter(entry: dict[str, Any]) -> tuple[str | None, int | None]:
    """Component and task that report an event.

    Both are ``None`` if one of them is missing or not valid.
    """
    component = entry.get("component")
    task = entry.get("task")
    if not isinstance(task, int) or isinstance(task, bool):
        return None, None
    try:
        return check_component_id(component), task
    except InvalidRequest:
        return None, None
