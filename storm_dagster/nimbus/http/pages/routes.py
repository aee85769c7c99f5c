"""Routes of the pages, of their style sheet and of their script.

The content security policy of a page permits these files and no others.
"""

import hashlib
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from storm_dagster.core.authorization import LIMITED_USER
from storm_dagster.http.responses import run_read
from storm_dagster.model.amounts import compact, duration, percent
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.nimbus.http.pages.facts import PageFacts
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.requests.topology_stats import SharedValues

_HERE = Path(__file__).parent
_MEDIA = {".css": "text/css", ".js": "text/javascript"}
"""Suffix of a static file -> its media type; other files are not served."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src "
    "'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_SHARED_SECS = 2.0
"""Maximum age of a shared page."""
_SHARED_TIMES = 30.0
"""A page is shared for 30 times the processor time that it took, and at most 2 s: it costs at most
3 % of a core for any number of readers.
"""
_HEADERS = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-store"}


def _utc(time_format: str, epoch_secs: float) -> str:
    try:
        moment = datetime.fromtimestamp(epoch_secs, timezone.utc)
    except (OverflowError, ValueError, OSError):
        # A worker writes the time of its errors.
        return "?"
    return moment.strftime(time_format)


def _prose(text: str) -> Markup:
    """A sentence, escaped, with the words between backticks as code."""
    html: list[Markup] = []
    for number, part in enumerate(text.split("`")):
        escaped = Markup.escape(part)
        is_code = number % 2 == 1
        html.append(Markup(f"<code>{escaped}</code>") if is_code else escaped)
    return Markup("").join(html)


def _templates(static: Mapping[str, bytes]) -> Environment:
    """Templates of the pages, with their filters and the versions of the static files."""
    # In the URLs of static files: a new content has a new URL, which no browser has cached.
    versions = {name: hashlib.sha256(content).hexdigest()[:12] for name, content in static.items()}
    templates = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    times = {"clock": partial(_utc, "%H:%M:%S"), "moment": partial(_utc, "%Y-%m-%d %H:%M:%S")}
    templates.filters.update(
        compact=compact, percent=percent, duration=duration, prose=_prose, **times
    )
    templates.globals.update(version=versions)
    return templates


class _Pages:
    """Pages of a nimbus, each shared for a moment by users with the same rights."""

    def __init__(self, facts: PageFacts, templates: Environment) -> None:
        self._facts = facts
        self._templates = templates
        self._shared = SharedValues[Mapping[str, Any]](
            _SHARED_SECS, _SHARED_TIMES, oldest_secs=_SHARED_SECS
        )

    def route(
        self, path: str, template_name: str, values: Callable[[Request], Mapping[str, Any]]
    ) -> Route:
        """Route of the page that a template makes of ``values``."""

        async def endpoint(request: Request) -> Response:
            # Users with different rights must not share a page.
            key = (LIMITED_USER.get(), request.url.path, request.url.query)
            response = await run_read(
                self._shared.get, key, lambda: self._render(template_name, values, request)
            )
            if not response:
                return Response(status_code=503)
            return HTMLResponse(**response, headers=_HEADERS)

        return Route(path, endpoint, methods=["GET"], include_in_schema=False)

    def _render(
        self,
        template_name: str,
        values: Callable[[Request], Mapping[str, Any]],
        request: Request,
    ) -> dict[str, Any]:
        """Arguments of the response; an error becomes a page of its own."""
        common = self._facts.common
        try:
            template = self._templates.get_template(template_name)
            return {"content": template.render(**common(), **values(request))}
        except StormDagsterError as error:
            template = self._templates.get_template("problem.html")
            text = template.render(**common(), problem=error.message)
            return {"content": text, "status_code": error.http_status}


def page_routes(nimbus: Nimbus, reader: ClusterReader) -> list[Route]:
    """All routes of the pages. Templates escape the values that they print."""
    static = {
        path.name: path.read_bytes()
        for path in sorted((_HERE / "static").iterdir())
        if path.suffix in _MEDIA
    }
    facts = PageFacts(nimbus, reader)
    pages = _Pages(facts, _templates(static))
    return [
        pages.route("/", "topologies.html", facts.topologies),
        pages.route("/topologies/{name}", "topology.html", facts.topology),
        pages.route("/topologies/{name}/placement", "placement.html", facts.placement),
        pages.route("/hosts", "hosts.html", facts.hosts),
        Route(
            "/topologies/{name}/graph.svg",
            facts.graph_file,
            methods=["GET"],
            include_in_schema=False,
        ),
        _static_route(static),
    ]


def _static_route(static: Mapping[str, bytes]) -> Route:
    """Route of the files that the pages load: file name -> content."""

    async def file(request: Request) -> Response:
        # Only the names in ``static``: a path of a request never reaches the file system.
        name = request.path_params["name"]
        if name not in static:
            return Response(status_code=404)
        return Response(
            static[name],
            media_type=_MEDIA[Path(name).suffix],
            headers={"Cache-Control": "public, max-age=86400"},
        )

    return Route("/static/{name}", file, methods=["GET"], include_in_schema=False)
