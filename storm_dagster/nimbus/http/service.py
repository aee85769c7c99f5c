"""The HTTP application of one nimbus."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.types import ASGIApp

from storm_dagster.http.authentication import Authentication
from storm_dagster.http.description import HttpApi
from storm_dagster.http.guard import Guard, allowed_hosts, host_of
from storm_dagster.http.logs.routes import LogRoutes
from storm_dagster.http.responses import EXCEPTION_HANDLERS
from storm_dagster.model.security import Security
from storm_dagster.nimbus.http.metrics import Metrics
from storm_dagster.nimbus.http.pages.routes import page_routes
from storm_dagster.nimbus.http.storm.routes import add_storm_routes
from storm_dagster.nimbus.http.topology_routes import add_routes
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.requests.submitting import Submissions
from storm_dagster.nimbus.requests.worker_stacks import stacks_at


def build_app(nimbus: Nimbus, reader: ClusterReader, submissions: Submissions) -> ASGIApp:
    """The ASGI application of a nimbus."""
    metrics = Metrics(nimbus, reader)
    conf = nimbus.conf
    logs = LogRoutes(nimbus.logs, lambda port: stacks_at(reader.view(), port, Security.of(conf)), conf.values)
    api = HttpApi("storm_dagster nimbus", nimbus.identity.version)
    add_routes(api, nimbus, reader, submissions, metrics)
    logs.add_to(api)
    add_storm_routes(api, nimbus, reader)
    routes = [*api.routes(), *page_routes(nimbus, reader)]
    app = Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS)
    app.router.redirect_slashes = False
    guarded = Authentication(app, Security.of(nimbus.conf), nimbus.conf.values, reader.conf)
    seeds = [host_of(seed.partition("://")[2] or seed) for seed in nimbus.conf["nimbus.seeds"]]
    hosts = allowed_hosts([nimbus.identity.host, *seeds])
    return Guard(guarded, hosts=hosts, observe=metrics.observe, routes=routes)
