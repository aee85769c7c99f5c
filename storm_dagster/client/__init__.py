"""Client of a cluster for the command line, the code location and users.

Every verb that changes a topology has its function: ``kill_topology(nimbus, "wc", wait_secs=5)``.
"""

from typing import TYPE_CHECKING

from storm_dagster.host.resolve import lazy_names

if TYPE_CHECKING:
    from storm_dagster.client.changes import Change, change_topology
    from storm_dagster.client.healing import pause_healing, resume_healing
    from storm_dagster.client.http import NimbusClient
    from storm_dagster.client.submission import submit_target, submit_topology, submit_uploaded
    from storm_dagster.client.uploads import Uploaded, upload, upload_target
    from storm_dagster.client.verbs import (
        activate_topology,
        complete_upgrade,
        complete_upgrade_topology,
        deactivate_topology,
        gray_upgrade,
        gray_upgrade_topology,
        kill_topology,
        rebalance_topology,
        restart_topology,
        roll_back,
        rollback_topology,
        update_topology,
    )
    from storm_dagster.client.waiting import wait_for_run, wait_for_status, wait_for_tasks

__all__ = [
    "Change",
    "NimbusClient",
    "Uploaded",
    "activate_topology",
    "change_topology",
    "complete_upgrade",
    "complete_upgrade_topology",
    "deactivate_topology",
    "gray_upgrade",
    "gray_upgrade_topology",
    "kill_topology",
    "pause_healing",
    "rebalance_topology",
    "restart_topology",
    "resume_healing",
    "roll_back",
    "rollback_topology",
    "submit_target",
    "submit_topology",
    "submit_uploaded",
    "update_topology",
    "upload",
    "upload_target",
    "wait_for_run",
    "wait_for_status",
    "wait_for_tasks",
]

# Loaded at first use: a worker and the code location import single modules of this package.
_MODULES = {
    "Change": "storm_dagster.client.changes",
    "NimbusClient": "storm_dagster.client.http",
    "Uploaded": "storm_dagster.client.uploads",
    "activate_topology": "storm_dagster.client.verbs",
    "change_topology": "storm_dagster.client.changes",
    "complete_upgrade": "storm_dagster.client.verbs",
    "complete_upgrade_topology": "storm_dagster.client.verbs",
    "deactivate_topology": "storm_dagster.client.verbs",
    "gray_upgrade": "storm_dagster.client.verbs",
    "gray_upgrade_topology": "storm_dagster.client.verbs",
    "kill_topology": "storm_dagster.client.verbs",
    "pause_healing": "storm_dagster.client.healing",
    "rebalance_topology": "storm_dagster.client.verbs",
    "restart_topology": "storm_dagster.client.verbs",
    "resume_healing": "storm_dagster.client.healing",
    "roll_back": "storm_dagster.client.verbs",
    "rollback_topology": "storm_dagster.client.verbs",
    "submit_target": "storm_dagster.client.submission",
    "submit_topology": "storm_dagster.client.submission",
    "submit_uploaded": "storm_dagster.client.submission",
    "update_topology": "storm_dagster.client.verbs",
    "upload": "storm_dagster.client.uploads",
    "upload_target": "storm_dagster.client.uploads",
    "wait_for_run": "storm_dagster.client.waiting",
    "wait_for_status": "storm_dagster.client.waiting",
    "wait_for_tasks": "storm_dagster.client.waiting",
}

# Other names of the same functions, for programs of earlier releases. No page shows them.
_FORMER_NAMES = {
    "activate": "storm_dagster.client.verbs",
    "deactivate": "storm_dagster.client.verbs",
    "kill": "storm_dagster.client.verbs",
    "rebalance": "storm_dagster.client.verbs",
    "restart": "storm_dagster.client.verbs",
    "roll_back_topology": "storm_dagster.client.verbs",
    "rollback": "storm_dagster.client.verbs",
    "update": "storm_dagster.client.verbs",
}

if not TYPE_CHECKING:  # Else a type checker accepts every name.
    __getattr__, __dir__ = lazy_names(__name__, {**_MODULES, **_FORMER_NAMES})
