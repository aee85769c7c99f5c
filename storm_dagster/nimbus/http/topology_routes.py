"""Routes of topologies and the cluster, of health and metrics."""

from functools import reduce
from operator import or_
from typing import Annotated, Any, ClassVar, Literal

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema
from starlette.responses import Response

from storm_dagster.http.documents import CHANGE_ERRORS, READ_ERRORS, JsonMap
from storm_dagster.http.router import Parameter, Router
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.requests import (
    BlacklistRequest,
    SubmitRequest,
    check_request,
    parse_number,
)
from storm_dagster.model.verbs import VERBS
from storm_dagster.nimbus.http.metrics import Metrics
from storm_dagster.nimbus.http.parameters import TOPOLOGY_NAME
from storm_dagster.nimbus.http.topology_documents import (
    BlacklistDocument,
    ChangedDocument,
    ClusterDocument,
    DeadLettersDocument,
    HealthDocument,
    ListDocument,
    OperationsDocument,
    ProblemsDocument,
    RunDocument,
    ShowDocument,
    StateDocument,
    SubmittedDocument,
)
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.cluster_problems import ClusterProblems
from storm_dagster.nimbus.requests.lifecycle import LifecycleRequests
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.requests.submitting import Submissions
from storm_dagster.operations.live.blacklist import change_blacklist

_MAX_TASK = 10**10 - 1
"""Highest number that is read as the id of a task."""


class VerbName:
    """Name of a verb in OpenAPI.

    The names are those of ``VERBS`` when the service is described, and not at import.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(Literal[tuple(VERBS)])


class VerbRequestBody:
    """Body of a verb in OpenAPI: one of the requests of ``VERBS``."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        requests = dict.fromkeys(verb.request for verb in VERBS.values())
        return handler.generate_schema(reduce(or_, requests))


def parse_task(text: str | None) -> int | None:
    """The id of a task, ``None`` without text; :class:`InvalidRequest` for other text."""
    if text is None:
        return None
    return parse_number("task", text, highest=_MAX_TASK)


def parse_age(text: str | None) -> float:
    """An age in seconds; :class:`InvalidRequest` without a whole number of them."""
    if text is None or not text.isdecimal() or len(text) > 10:
        raise InvalidRequest(
            f"older_secs {text!r:.40} is not an age: give whole seconds, 0 to delete all letters"
        )
    return float(text)


TopologyName = Annotated[str, TOPOLOGY_NAME]
PageStart = Annotated[
    str | None,
    Parameter("query", "after", "Where the page begins: `next` of the one before"),
]
SpoutName = Annotated[str | None, Parameter("query", "component", "Only those of this spout")]
LetterLimit = Annotated[
    str | None,
    Parameter("query", "limit", "Letters at most, 1 to 1000 (100)", schema=int),
]


class TopologyRoutes:
    """Routes of topologies and the cluster."""

    router: ClassVar = Router("topologies")

    def __init__(
        self,
        nimbus: Nimbus,
        reader: ClusterReader,
        submissions: Submissions,
        lifecycle: LifecycleRequests,
        metrics: Metrics,
    ) -> None:
        self._nimbus = nimbus
        self._reader = reader
        self._submissions = submissions
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._problems = ClusterProblems(nimbus, reader)

    @router.route(
        "GET", "/healthz", summary="Health of this nimbus", responses={200: HealthDocument}
    )
    def health(self) -> dict[str, Any]:
        """Health; available without ZooKeeper."""
        return self._reader.health()

    @router.route(
        "GET",
        "/metrics",
        summary="Metrics for Prometheus",
        responses={200: {"text/plain": str}},
    )
    def metrics(self) -> Response:
        """Metrics in the text format of Prometheus."""
        return self._metrics.response()

    @router.route(
        "POST",
        "/v1/submit",
        summary="Launch the run of a submission",
        body=SubmitRequest,
        body_required=True,
        responses={202: SubmittedDocument},
        errors=CHANGE_ERRORS,
    )
    def submit(self, document: JsonMap) -> dict[str, Any]:
        """Launch the run of a submission, once for each token."""
        submitted = self._submissions.submit(document)
        self._reader.forget()
        return submitted

    @router.route(
        "GET",
        "/v1/runs/{run_id}",
        summary="A run and its steps",
        responses={200: RunDocument},
        errors=READ_ERRORS,
    )
    def run(self, run_id: Annotated[str, Parameter("path", "run_id", "Run id")]) -> dict[str, Any]:
        """Status and steps of a run of Dagster."""
        return self._submissions.run(run_id)

    @router.route(
        "GET",
        "/v1/topologies",
        summary="Topologies",
        responses={200: ListDocument},
        errors=READ_ERRORS,
    )
    def list_topologies(self) -> dict[str, Any]:
        """Rows of all topologies."""
        return self._reader.list_topologies()

    @router.route(
        "GET",
        "/v1/operations",
        summary="Submissions and changes under way",
        responses={200: OperationsDocument},
        errors=READ_ERRORS,
    )
    def list_operations(self) -> dict[str, Any]:
        """Operations under way, oldest first."""
        return self._reader.list_operations()

    @router.route(
        "GET",
        "/v1/problems",
        summary="Problems of the cluster, its hosts and its topologies",
        responses={200: ProblemsDocument},
        errors=READ_ERRORS,
    )
    def problems(
        self,
        limit: Annotated[
            str | None,
            Parameter("query", "limit", "Topologies at most, 1 to 500 (50)", schema=int),
        ],
        after: PageStart,
    ) -> dict[str, Any]:
        """A page of problems; no topology master is asked."""
        return self._problems.document(limit, after)

    @router.route(
        "GET",
        "/v1/topologies/{name}",
        summary="A topology with its tasks, workers, statistics and errors",
        responses={200: ShowDocument},
        errors=READ_ERRORS,
    )
    def show(self, name: TopologyName) -> dict[str, Any]:
        """:class:`NotAlive` when no topology has the name or id."""
        return self._reader.show(name)

    @router.route(
        "GET",
        "/v1/topologies/{name}/state/{component:path}",
        summary="A page of the keyed state of a stateful bolt, as its tasks have it now",
        responses={200: StateDocument},
        errors=CHANGE_ERRORS,
    )
    def state(
        self,
        name: TopologyName,
        component: Annotated[str, Parameter("path", "component", "Component")],
        key: Annotated[
            str | None,
            Parameter("query", "key", "Only this key: as text, or as JSON for numbers and lists"),
        ],
        limit: Annotated[
            str | None,
            Parameter("query", "limit", "Entries at most, 1 to 1000 (100)", schema=int),
        ],
        after: PageStart,
    ) -> dict[str, Any]:
        """A page of the keyed state of a component."""
        return self._reader.state(name, component, key=key, limit=limit, after=after)

    @router.route(
        "GET",
        "/v1/topologies/{name}/dead-letters",
        summary="A page of the dead letters of a topology's spouts",
        responses={200: DeadLettersDocument},
        errors=CHANGE_ERRORS,
    )
    def dead_letters(
        self, name: TopologyName, component: SpoutName, limit: LetterLimit, after: PageStart
    ) -> dict[str, Any]:
        """A page of dead letters; they stay where they are."""
        return self._reader.dead_letters(name, component=component, limit=limit, after=after)

    @router.route(
        "POST",
        "/v1/topologies/{name}/dead-letters/replay",
        summary="Replay a page of dead letters",
        body=JsonMap,
        responses={200: DeadLettersDocument},
        errors=CHANGE_ERRORS,
    )
    def replay_dead_letters(
        self,
        name: TopologyName,
        component: SpoutName,
        limit: LetterLimit,
        after: PageStart,
        document: JsonMap,
    ) -> dict[str, Any]:
        """A page of dead letters, which are emitted again."""
        return self._reader.dead_letters(
            name, replay=True, component=component, limit=limit, after=after
        )

    @router.route(
        "POST",
        "/v1/topologies/{name}/dead-letters/delete",
        summary="Delete a page of dead letters",
        body=JsonMap,
        responses={200: DeadLettersDocument},
        errors=CHANGE_ERRORS,
    )
    def delete_dead_letters(
        self,
        name: TopologyName,
        component: SpoutName,
        older_secs: Annotated[
            str | None,
            Parameter(
                "query",
                "older_secs",
                "Only letters whose last failure is so many seconds ago; 0: all",
                schema=int,
                required=True,
            ),
        ],
        limit: LetterLimit,
        after: PageStart,
        document: JsonMap,
    ) -> dict[str, Any]:
        """A page of dead letters, which are deleted."""
        return self._reader.dead_letters(
            name,
            delete_older_secs=parse_age(older_secs),
            component=component,
            limit=limit,
            after=after,
        )

    @router.route(
        "GET",
        "/v1/topologies/{name}/placement",
        summary="Reasons for the slot of each task",
        responses={200: JsonMap},
        errors=READ_ERRORS,
    )
    def placement(
        self,
        name: TopologyName,
        task: Annotated[
            int | None,
            Parameter(
                "query",
                "task",
                "Also the alternatives to the worker of this task",
                schema=int,
                parse=parse_task,
            ),
        ],
    ) -> dict[str, Any]:
        """The stored reasons of the newest placement."""
        return self._reader.placement(name, task=task)

    @router.route(
        "POST",
        "/v1/topologies/{name}/{verb}",
        summary="Change a topology",
        body=VerbRequestBody,
        responses={202: ChangedDocument},
        errors=CHANGE_ERRORS,
    )
    def change(
        self,
        name: TopologyName,
        verb: Annotated[str, Parameter("path", "verb", schema=VerbName)],
        document: JsonMap,
    ) -> dict[str, Any]:
        """Execute a verb; later requests read the cluster's new state."""
        changed = self._lifecycle.act(name, verb, document)
        self._reader.forget()
        return changed

    @router.route(
        "GET",
        "/v1/blacklist",
        summary="Hosts that get no new work",
        responses={200: BlacklistDocument},
        errors=READ_ERRORS,
    )
    def blacklist(self) -> dict[str, Any]:
        """Hosts in order of their names."""
        return {"hosts": sorted(self._nimbus.cluster.blacklist())}

    @router.route(
        "POST",
        "/v1/blacklist",
        summary="Change the blacklist",
        body=BlacklistRequest,
        responses={200: BlacklistDocument},
        errors=CHANGE_ERRORS,
    )
    def change_blacklist(self, document: JsonMap) -> dict[str, Any]:
        """Add and remove hosts; the blacklist after the change."""
        epoch = self._nimbus.status.require()
        change = check_request(BlacklistRequest, document, "a change of the blacklist")
        hosts = change_blacklist(self._nimbus.operations(epoch), **change.fields())
        return {"hosts": list(hosts)}

    @router.route(
        "GET",
        "/v1/cluster",
        summary="Nimbuses and supervisors",
        responses={200: ClusterDocument},
        errors=READ_ERRORS,
    )
    def cluster(self) -> dict[str, Any]:
        """Nimbuses and supervisors."""
        return self._reader.cluster()
