"""``dagster api grpc`` with forked runs.

Where a fork is not possible it is the stock code server. The only internal of Dagster that this
needs is the attribute in which a code server keeps the ``multiprocessing`` context of its runs.
"""

import functools
import importlib.metadata
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.process
import os
import platform
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import dagster as dg

from storm_dagster.code_server.lost_runs import report_lost_runs
from storm_dagster.host.forks import fork_folder

log: logging.Logger = logging.getLogger(__name__)

_CONTEXT = "_mp_ctx"
"""Attribute of Dagster's ``DagsterApiServer``.

The context's ``Process`` starts runs.
"""
_PAUSE_SECS = 5.0
"""Time in which Dagster's webserver and daemon load the code location.

They are not disturbed in it.
"""
_PRELOADED = "storm_dagster.code_server.libraries"
"""Module that the fork server imports first; it loads the libraries of runs."""
_MAX_ADDRESS = 107
"""Bytes of the path of a unix socket."""
_MAX_NAME = len("/listener-12345678")
"""Bytes that ``multiprocessing`` appends to its folder."""
_DAGSTER_PACKAGES = frozenset(
    {
        "dagster",
        "dagster_aws",
        "dagster_azure",
        "dagster_celery",
        "dagster_celery_docker",
        "dagster_celery_k8s",
        "dagster_cloud",
        "dagster_docker",
        "dagster_gcp",
        "dagster_k8s",
        "dagster_mysql",
        "dagster_postgres",
        "dagster_shared",
    }
)
"""Packages of Dagster with classes that a ``dagster.yaml`` can name."""


def serve(arguments: Sequence[str], socket: str | None, location: str) -> None:
    """Run ``dagster api grpc`` with these arguments until SIGTERM, and exit.

    Runs are forked on Linux, if Dagster has the attribute that this needs, and if the socket of the
    process that forks is closed to other users. Otherwise they start as in any code server, and the
    log has the reason. Lost runs of ``location`` from an earlier code server at ``socket`` are
    reported.
    """
    fork_runs(socket)
    if socket is not None:
        _start_later(lambda: _report_lost_runs(socket, location))
    sys.argv = ["dagster", "api", "grpc", *arguments]
    scripts = importlib.metadata.entry_points(group="console_scripts", name="dagster")
    command = next(iter(scripts)).load()
    command()


def fork_runs(socket: str | None) -> None:
    """Make each code server that this process creates fork its runs, if possible.

    ``socket`` is the code server's socket, if it serves on one. It changes Dagster's class, so that
    a call after the creation of a code server has no effect on that one. Where a fork is not
    possible the class, or the code server, stays unchanged.
    """
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
                "runs cannot be forked with Dagster %s, whose code server has no %s: "
                "they start the stock way",
                dg.__version__,
                _CONTEXT,
            )
            return
        context = _prepare_fork_server(socket)
        if context is not None:
            setattr(server, _CONTEXT, context)

    replacement: Any = construct_forking
    DagsterApiServer.__init__ = replacement


def _prepare_fork_server(socket: str | None) -> Any:
    """Schedule the start of the fork server, and return the context of its processes.

    A run that begins earlier starts the fork server, and waits until it has loaded its libraries.
    ``None``, after a warning, if the fork server cannot be reached safely.
    """
    from storm_dagster.code_server.run_process import RunContext

    _use_own_folder(socket)
    problem = _address_problem()
    if problem is not None:
        log.warning("runs cannot be forked: %s; they start the stock way", problem)
        return None
    context = RunContext()
    context.set_forkserver_preload([_PRELOADED, *_storage_modules()])
    _start_later(multiprocessing.forkserver.ensure_running)
    return context


def _use_own_folder(socket: str | None) -> None:
    """Put the fork server's socket into a folder beside ``socket``.

    ``multiprocessing`` creates it there. The next code server empties that folder, because signals
    end a code server without a cleanup. If the folder cannot be created, the temporary folder of
    ``multiprocessing`` stays in use.
    """
    configuration: Any = getattr(multiprocessing.process.current_process(), "_config", None)
    if socket is None or not isinstance(configuration, dict):
        return
    folder = str(fork_folder(socket))
    if len(os.fsencode(folder)) + _MAX_NAME > _MAX_ADDRESS:
        return
    try:
        shutil.rmtree(folder, ignore_errors=True)
        os.mkdir(folder, mode=0o700)
    except OSError as error:
        log.info("the socket of the fork server is not in %s: %s", folder, error)
        return
    configuration["tempdir"] = folder


def _address_problem() -> str | None:
    """Reason why the fork server must not listen at its default address.

    ``multiprocessing`` chooses the address.
    """
    # Its stubs lack the function, which the fork server calls.
    connections: Any = multiprocessing.connection
    address: str = connections.arbitrary_address("AF_UNIX")
    if address.startswith("\0"):
        # CVE-2022-42919 in Python 3.10.0 to 3.10.8 and 3.11.0.
        return (
            f"the fork server of Python {platform.python_version()} executes code for every user "
            "of the machine: update Python"
        )
    if len(os.fsencode(address)) > _MAX_ADDRESS:
        return (
            f"the path of a socket in {os.path.dirname(address)} is longer than the kernel's "
            f"{_MAX_ADDRESS} bytes: set TMPDIR to a shorter one"
        )
    return None


def _start_later(action: Callable[[], None]) -> None:
    """Call ``action`` in a thread once the code location is loaded."""
    timer = threading.Timer(_PAUSE_SECS, action)
    timer.daemon = True
    timer.start()


def _report_lost_runs(socket: str, location: str) -> None:
    """Report lost runs in a thread of this process; an error is only logged."""
    try:
        with dg.DagsterInstance.get() as instance:
            report_lost_runs(instance, socket, location)
    except Exception as error:
        # One line: a disk that is full, or a database that is away, is not a fault of this process.
        log.warning(
            "runs that an earlier code server has left behind are not reported: %s: %s",
            type(error).__name__,
            str(error).partition("\n")[0],
        )


def _storage_modules() -> list[str]:
    """Modules of Dagster with the classes that ``dagster.yaml`` names, sorted.

    Empty if the instance cannot be opened: runs then load them themselves.
    """
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
        log.info("runs load the modules of Dagster's storage themselves: %r", error)
        return []
    return sorted(name for name in modules if is_dagsters_own(name))


def is_dagsters_own(module: str) -> bool:
    """True if the module is of a distribution of Dagster.

    A user's own one, for example of a package ``dagster_company``, is code that may change while
    the code server lives.
    """
    return module.split(".")[0] in _DAGSTER_PACKAGES
