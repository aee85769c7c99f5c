"""Owner of a declared topology: the project and the deployment that declare it.

It decides which code location deploys the topology and gets its events. It never depends on an
instance's storage, because `dg dev` without DAGSTER_HOME makes an instance at each start.
"""

import getpass
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from storm_dagster.model.errors import InvalidRequest

DEPLOYMENT_VARIABLE = "DAGSTER_CLOUD_DEPLOYMENT_NAME"
"""Environment variable in which Dagster+ names the deployment."""
_DEV_VARIABLE = "DAGSTER_IS_DEV_CLI"
"""Environment variable that `dg` and `dagster dev` set, for their code servers and runs as well."""
_DEFAULT_DEPLOYMENT = "default"
_DEPLOYMENT = re.compile(r"[!-~\u00a1-\U0010ffff]{1,200}")
"""Name of a deployment: characters that are visible, without spaces."""


def declared_owner(
    module: str, deployment: str | None = None, environ: Mapping[str, str] = os.environ
) -> str:
    """The owner ``MODULE:DEPLOYMENT`` of the topologies of a project.

    ``module`` is the top-level module of its definitions, ``deployment`` the field of the
    component. Without it the deployment is that of ``DAGSTER_CLOUD_DEPLOYMENT_NAME``, else
    ``local-USER@HOST`` under `dg` or `dagster dev`, else ``default``. So a code server without
    these commands has the same owner under each host name. :class:`InvalidRequest` for a name with
    spaces.
    """
    source = "deployment"
    name = deployment
    if not name:
        source = DEPLOYMENT_VARIABLE
        name = environ.get(DEPLOYMENT_VARIABLE)
    if not name:
        source = "the user and the host"
        name = _local_deployment() if environ.get(_DEV_VARIABLE) else _DEFAULT_DEPLOYMENT
    if not _DEPLOYMENT.fullmatch(name):
        raise InvalidRequest(
            f"the deployment {name!r:.100} of {source} cannot be part of an owner: give 1 to 200 "
            "characters without spaces in the field `deployment`"
        )
    return f"{module}:{name}"


def definitions_module(defs_module: str, defs_folder: Path, project_root: Path) -> str:
    """Top-level module of the definitions.

    It is that of the project's defs module, however Dagster loads the project. A component without
    a project (``build_defs_for_component``) has no module: its folder of definitions is the project
    itself, and the name of that folder counts.
    """
    if defs_folder == project_root:
        return project_root.name or "root"
    return defs_module.partition(".")[0]


def ownership_problem(name: str, owner: str | None, owned_by: str | None) -> str | None:
    """Reason why ``owner`` must not change topology ``name``, with the remedy.

    ``owned_by`` is the stored owner. ``None`` if it is the same, or if one of them is unknown.
    """
    if owner is None or owned_by is None or owner == owned_by:
        return None
    return (
        f"owned by {owned_by}, and this is {owner}: declare it under another name here, or take "
        f"{name!r} over by a run that you launch by hand with `take_over: true`"
    )


def _local_deployment() -> str:
    """The deployment of a developer: user and host, without the domain of a network."""
    host = socket.gethostname().partition(".")[0].lower()
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        # The user of a container may have no name.
        user = str(os.getuid())
    return f"local-{user}@{host or 'localhost'}".replace(" ", "-")
