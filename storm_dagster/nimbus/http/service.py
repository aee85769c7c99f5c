"""The HTTP application of one nimbus."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.types import ASGIApp

from storm_dagster.http.answers import EXCEPTION_HANDLERS
from storm_dagster.http.authentication import Authentication
from storm_dagster.http.guard import Guard, allowed_hosts, host_of
from storm_dagster.http.server import HttpService
from storm_dagster.model.security import Security
from storm_dagster.nimbus.http.blob_routes import blob_routes
from storm_dagster.nimbus.http.metrics import Metrics
from storm_dagster.nimbus.http.topology_routes import topology_routes
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.reading import ClusterReader
from storm_dagster.nimbus.submitting import Submissions
from storm_dagster.nimbus.topology_access import topology_conf_reader

__all__ = ["HttpService", "build_app"]


def build_app(nimbus: Nimbus, reader: ClusterReader, submissions: Submissions) -> ASGIApp:
    """The ASGI application of a nimbus."""
    metrics = Metrics(nimbus, reader)
    routes = [*blob_routes(nimbus), *topology_routes(nimbus, reader, submissions, metrics)]
    app = Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS)
    guarded = Authentication(
        app, Security.of(nimbus.conf), nimbus.conf.values, topology_conf_reader(nimbus, reader)
    )
    seeds = [host_of(seed.partition("://")[2] or seed) for seed in nimbus.conf["nimbus.seeds"]]
    hosts = allowed_hosts([nimbus.identity.host, *seeds])
    return Guard(guarded, hosts=hosts, observe=metrics.observe, routes=routes)
