"""``dagster api grpc`` with runs that are forked; the stock code server where that is not possible.

The one internal of Dagster that this needs is the attribute in which a code server keeps the
``multiprocessing`` context of its runs.
"""

import functools
import importlib.metadata
import logging
import multiprocessing
import multiprocessing.forkserver
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import dagster as dg

from storm_dagster.code_server.lost_runs import report_lost_runs

log: logging.Logger = logging.getLogger(__name__)

_CONTEXT = "_mp_ctx"
"""Attribute of Dagster's ``DagsterApiServer``; runs are started by the context's ``Process``."""
_PAUSE_SECS = 5.0
"""Time in which Dagster's webserver and daemon load the code location, undisturbed."""
_PRELOADED = "storm_dagster.code_server.libraries"


def serve(arguments: Sequence[str], socket: str | None, location: str) -> None:
    """Run ``dagster api grpc`` with these arguments until SIGTERM; it exits by itself.

    Runs are forked on Linux, if Dagster has the attribute that this needs. Otherwise they start as
    in any code server, and a warning says so. Runs of ``location`` that an earlier code server at
    ``socket`` has left behind are reported.
    """
    fork_runs()
    if socket is not None:
        _later(lambda: _report_lost_runs(socket, location))
    sys.argv = ["dagster", "api", "grpc", *arguments]
    scripts = importlib.metadata.entry_points(group="console_scripts", name="dagster")
    command = next(iter(scripts)).load()
    command()


def fork_runs() -> None:
    """Make each code server that this process creates fork its runs, if possible."""
    if not sys.platform.startswith("linux"):
        # Libraries of other systems do not survive a fork.
        return
    try:
        from dagster._grpc.server import DagsterApiServer
    except ImportError as error:
        log.warning(
            "runs cannot be forked with Dagster %s (%s): they start the stock way",
            dg.__version__,
            error,
        )
        return
    construct: Any = DagsterApiServer.__init__

    @functools.wraps(construct)
    def construct_forking(server: Any, *args: Any, **settings: Any) -> None:
        construct(server, *args, **settings)
        if not hasattr(server, _CONTEXT):
            log.warning(
                "runs cannot be forked with Dagster %s, whose code server has no %s: they start the stock way",
                dg.__version__,
                _CONTEXT,
            )
            return
        setattr(server, _CONTEXT, _prepare_fork_server())

    replacement: Any = construct_forking
    DagsterApiServer.__init__ = replacement


def _prepare_fork_server() -> Any:
    """Have the process that forks started soon; returns the context whose processes it forks.

    A run that comes earlier starts it, and waits until it has loaded its libraries.
    """
    context = multiprocessing.get_context("forkserver")
    # The main module is ours: a run would otherwise import it again.
    context.set_forkserver_preload(["__main__", _PRELOADED, *_storage_modules()])
    _later(multiprocessing.forkserver.ensure_running)
    return context


def _later(action: Callable[[], None]) -> None:
    timer = threading.Timer(_PAUSE_SECS, action)
    timer.daemon = True
    timer.start()


def _report_lost_runs(socket: str, location: str) -> None:
    try:
        with dg.DagsterInstance.get() as instance:
            report_lost_runs(instance, socket, location)
    except Exception:
        log.exception("runs that an earlier code server has left behind are not reported")


def _storage_modules() -> list[str]:
    """Modules of Dagster with the classes that ``dagster.yaml`` names."""
    try:
        with dg.DagsterInstance.get() as instance:
            parts = (
                instance.run_storage,
                instance.event_log_storage,
                instance.schedule_storage,
                instance.compute_log_manager,
                instance.run_launcher,
            )
            modules = {type(part).__module__ for part in parts}
    except Exception as error:
        log.info("runs load the modules of Dagster's storage themselves: %s", error)
        return []
    # A user's own class is code that may change.
    return sorted(name for name in modules if name.startswith("dagster"))
