"""The client of a cluster: what the command line, the code location and users' programs call."""

from __future__ import annotations

from storm_dagster.client.http import NimbusClient
from storm_dagster.client.submission import Submission, submit_target, submit_topology, submit_uploaded
from storm_dagster.client.uploads import Uploaded, upload, upload_target
from storm_dagster.client.waiting import wait_for_run, wait_for_status, wait_for_tasks

__all__ = [
    "NimbusClient",
    "Submission",
    "Uploaded",
    "submit_target",
    "submit_topology",
    "submit_uploaded",
    "upload",
    "upload_target",
    "wait_for_run",
    "wait_for_status",
    "wait_for_tasks",
]
