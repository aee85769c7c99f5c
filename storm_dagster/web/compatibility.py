"""Dagster internals that the guarded web application needs, imported here alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
from starlette.types import ASGIApp

from storm_dagster.model.errors import Unavailable

# Statement timeout in milliseconds, recycling of connections in seconds, overflow of the pool: as the stock server has them.
_STORAGE = (15_000, 3_600, 20)
_POLL_MS = 2_000


@contextmanager
def dagster_application(workspace: Path) -> Iterator[ASGIApp]:
    """Dagster's web application for a workspace file, without any server.

    :class:`Unavailable` for a Dagster that does not fit: then there is no UI, for the stock server asks nobody.
    """
    try:
        from dagster._core.workspace.context import WorkspaceProcessContext
        from dagster._core.workspace.load_target import WorkspaceFileTarget
        from dagster_webserver.webserver import DagsterWebserver
    except ImportError as error:
        raise _unfit(error) from None
    with dg.DagsterInstance.get() as instance:
        try:
            instance.optimize_for_webserver(*_STORAGE)
            context = WorkspaceProcessContext(instance, WorkspaceFileTarget(paths=[str(workspace)]), dg.__version__)
        except (AttributeError, TypeError) as error:
            raise _unfit(error) from None
        with context:
            try:
                app = DagsterWebserver(context, live_data_poll_rate=_POLL_MS).create_asgi_app()
            except (AttributeError, TypeError) as error:
                raise _unfit(error) from None
            yield app


def _unfit(error: Exception) -> Unavailable:
    return Unavailable(
        f"Dagster's web application does not fit: Dagster {dg.__version__} ({error}). The UI does not start, because the "
        "stock dagster-webserver lets everybody in: install a tested release (`storm-dagster doctor` names them), or "
        "protect the stock server yourself (docs/security.md) and set dagster.graphql.url"
    )
