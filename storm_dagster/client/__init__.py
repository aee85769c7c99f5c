"""The client of a cluster, for the command line, the code location and users' programs."""

from __future__ import annotations

from storm_dagster.client.changes import Change, update_topology
from storm_dagster.client.http import NimbusClient
from storm_dagster.client.submission import Submission, submit_target, submit_topology, submit_uploaded
from storm_dagster.client.upgrades import complete_upgrade, gray_upgrade, roll_back
from storm_dagster.client.uploads import Uploaded, upload, upload_target
from storm_dagster.client.waiting import wait_for_run, wait_for_status, wait_for_tasks

__all__ = [
    "Change",
    "NimbusClient",
    "Submission",
    "Uploaded",
    "complete_upgrade",
    "gray_upgrade",
    "roll_back",
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
