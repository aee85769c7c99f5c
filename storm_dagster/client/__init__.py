"""The client of a cluster, for the command line, the code location and users' programs.

Every verb has its function here: ``kill_topology(nimbus, "wc", wait_secs=5)`` is
:func:`change_topology` for ``kill``.
"""

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storm_dagster.client.changes import Change, change_topology
    from storm_dagster.client.http import NimbusClient
    from storm_dagster.client.submission import submit_target, submit_topology, submit_uploaded
    from storm_dagster.client.uploads import Uploaded, upload, upload_target
    from storm_dagster.client.waiting import wait_for_run, wait_for_status, wait_for_tasks

__all__ = [
    "Change",
    "NimbusClient",
    "Uploaded",
    "change_topology",
    "submit_target",
    "submit_topology",
    "submit_uploaded",
    "upload",
    "upload_target",
    "wait_for_run",
    "wait_for_status",
    "wait_for_tasks",
]


# Loaded at first use: a worker and the code location import single modules of this package.
_MODULES = {
    "changes": ("Change", "change_topology"),
    "http": ("NimbusClient",),
    "submission": ("submit_target", "submit_topology", "submit_uploaded"),
    "uploads": ("Uploaded", "upload", "upload_target"),
    "waiting": ("wait_for_run", "wait_for_status", "wait_for_tasks"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """The names of ``__all__``; and ``activate_topology``, ``kill_topology``, ``gray_upgrade``,
    ``roll_back`` ...: :func:`change_topology` of one verb.
    """
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    from storm_dagster.model.verbs import VERBS

    verb = name.removesuffix("_topology").replace("roll_back", "rollback").replace("_", "-")
    if verb not in VERBS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    changes = import_module(f"{__name__}.changes")
    return partial(changes.change_topology, verb=verb)
