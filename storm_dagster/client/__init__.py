"""The client of a cluster, for the command line, the code location and users' programs.

Every verb has its function here: ``kill_topology(nimbus, "wc", wait_secs=5)`` is
:func:`change_topology` for ``kill``.
"""

from functools import partial

from storm_dagster.client.changes import Change, change_topology
from storm_dagster.client.http import NimbusClient
from storm_dagster.client.submission import submit_target, submit_topology, submit_uploaded
from storm_dagster.client.uploads import Uploaded, upload, upload_target
from storm_dagster.client.waiting import wait_for_run, wait_for_status, wait_for_tasks
from storm_dagster.model.verbs import VERBS

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


def __getattr__(name: str) -> partial[Change]:
    """``activate_topology``, ``kill_topology``, ``gray_upgrade``, ``roll_back`` ...:
    :func:`change_topology` of one verb.
    """
    verb = name.removesuffix("_topology").replace("roll_back", "rollback").replace("_", "-")
    if verb not in VERBS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(change_topology, verb=verb)
