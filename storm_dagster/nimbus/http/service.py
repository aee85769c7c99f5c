"""The HTTP application of a nimbus: own routes, Storm's, logs, pages."""

from starlette.applications import Starlette
from starlette.types import ASGIApp

from storm_dagster.http.authentication import Authentication
from storm_dagster.http.description import HttpApi
from storm_dagster.http.guard import Guard, allowed_hosts, host_of
from storm_dagster.http.logs.routes import LogRoutes
from storm_dagster.http.probes import Probes
from storm_dagster.http.responses import EXCEPTION_HANDLERS
from storm_dagster.nimbus.http.access_token_routes import AccessTokenRoutes
from storm_dagster.nimbus.http.blob_routes import BlobRoutes
from storm_dagster.nimbus.http.event_routes import EventRoutes
from storm_dagster.nimbus.http.healing_routes import HealingRoutes
from storm_dagster.nimbus.http.metrics import Metrics
from storm_dagster.nimbus.http.pages.routes import page_routes
from storm_dagster.nimbus.http.storm.actions import TopologyActions
from storm_dagster.nimbus.http.storm.cluster_pages import ClusterPages
from storm_dagster.nimbus.http.storm.topology_pages import TopologyPages
from storm_dagster.nimbus.http.topology_routes import TopologyRoutes
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.lifecycle import LifecycleRequests
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.requests.running_workers import WorkerLevels, stacks_at
from storm_dagster.nimbus.requests.submitting import Submissions
from storm_dagster.operations.live.worker_requests import WorkerLinks
from storm_dagster.security.settings import Security


def build_app(
    nimbus: Nimbus, reader: ClusterReader, submissions: Submissions, lifecycle: LifecycleRequests
) -> ASGIApp:
    """The ASGI application of a nimbus."""
    metrics = Metrics(nimbus, reader)
    conf = nimbus.conf
    logs = LogRoutes(
        nimbus.logs, lambda port: stacks_at(reader.view(), port, WorkerLinks.of(conf)), conf.values
    )
    api = HttpApi("storm_dagster nimbus", nimbus.identity.version)
    api.add(logs)
    add_routes(api, nimbus, reader, submissions, lifecycle, metrics)
    routes = [*api.routes(), *page_routes(nimbus, reader)]
    app = Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS)
    app.router.redirect_slashes = False
    guarded = Authentication(
        app, Security.of(conf), conf.values, reader.authorization_conf, tokens=nimbus.access_tokens
    )
    # A seed is a URL, or an address without a scheme.
    seeds = [host_of(seed.partition("://")[2] or seed) for seed in nimbus.conf["nimbus.seeds"]]
    hosts = allowed_hosts([nimbus.identity.host, *seeds])
    return Guard(guarded, hosts=hosts, observe=metrics.observe, routes=routes)


def add_routes(
    api: HttpApi,
    nimbus: Nimbus,
    reader: ClusterReader,
    submissions: Submissions,
    lifecycle: LifecycleRequests,
    metrics: Metrics,
) -> None:
    """Add all routes but those of logs and pages.

    The first route that fits a request handles it.
    """
    api.add(BlobRoutes(nimbus))
    api.add(AccessTokenRoutes(nimbus))
    api.add(HealingRoutes(nimbus, reader))
    # Before the verbs of topologies: ``events`` is not one of them.
    api.add(EventRoutes(nimbus))
    api.add(Probes(nimbus.passes.problems, reader.readiness_problems))
    api.add(TopologyRoutes(nimbus, reader, submissions, lifecycle, metrics))
    api.add(ClusterPages(nimbus, reader))
    api.add(TopologyActions(lifecycle, reader, WorkerLevels(nimbus)))
    api.add(TopologyPages(nimbus, reader))
